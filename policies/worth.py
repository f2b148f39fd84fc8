"""The default policy: what recompute an object saves per byte and second, by how it is likely to be used again.

Each kind of state learns its own reuse (:mod:`reuse`): a history block, a window and a snapshot of one
chain are used together but come and go at different places. The worth of an object is its expected uses
per second times the tokens that a use saves, over its bytes. Ties leave oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..fabric.eviction import Arrivals, PoolShape, Slots, Values, slots_of
from .reuse import Floats, Ints, Seen, at_age, born_class, class_of, hazards, indices

CONTINUES_TOKENS = 1024
"""What follows at least so many tokens that were there already continues something; less may be a system prompt."""
GHOSTS = 2.0
"""How many that left are followed, as a share of the slots of their group."""
LOOK_EVERY = 2048
"""Objects used or stored between two fresh looks at what was seen."""
HELD_MAX = 4 * LOOK_EVERY
"""Objects whose uses are kept one by one; where nothing has to leave, nobody looks for a long time."""


class Ghosts:
    """What left lately: classes and last uses in a ring, found by digest."""

    def __init__(self, size: int) -> None:
        self.classes: Ints = np.zeros(size, dtype=np.int64)
        self.uses: Ints = np.zeros(size, dtype=np.int64)
        self.last_s: Floats = np.zeros(size)
        self.there = np.zeros(size, dtype=np.bool_)
        self._place: dict[bytes, int] = {}
        self._digests: list[bytes] = [b""] * size
        self._next = 0

    def put(self, digest: bytes, kind: int, uses: int, last_s: float) -> tuple[int, float] | None:
        """Follow one more; the class and last use of the one that is followed no longer for it."""
        place = self._next
        self._next = (place + 1) % len(self._digests)
        dropped = None
        if self.there[place]:
            del self._place[self._digests[place]]
            dropped = int(self.classes[place]), float(self.last_s[place])
        earlier = self._place.get(digest)
        if earlier is not None:
            self.there[earlier] = False
        self._place[digest], self._digests[place] = place, digest
        self.classes[place], self.uses[place], self.last_s[place], self.there[place] = kind, uses, last_s, True
        return dropped

    def take(self, digest: bytes) -> int | None:
        """The place of one that came back, which is followed no longer."""
        place = self._place.pop(digest, None)
        if place is not None:
            self.there[place] = False
        return place


@dataclass(slots=True)
class Learned:
    """What one group's objects showed, and what follows from it."""

    ghosts: Ghosts
    seen: Seen = field(default_factory=Seen.nothing)
    table: Floats = field(default_factory=lambda: indices(hazards(Seen.nothing())))
    news: int = 0
    _spans: list[tuple[Ints, Floats, bool]] = field(default_factory=list)
    _held: int = 0

    def span(self, classes: Ints, ages_s: Floats, *, used: bool) -> None:
        """These were there up to these ages, and were then used or lost from sight."""
        self._spans.append((classes, ages_s, used))
        self.news += len(classes)
        self._held += len(classes)
        if self._held >= HELD_MAX:
            self._fold()

    def look(self, classes: Ints, ages_s: Floats) -> None:
        """Learn from what happened, and from these that are there still."""
        self._fold()
        self.news = 0
        self.table = indices(hazards(self.seen.and_spans(classes, ages_s, used=False)))
        self.seen = self.seen.faded()

    def _fold(self) -> None:
        """Add what happened to what was seen."""
        for used in (True, False):
            some = [(c, a) for c, a, u in self._spans if u is used]
            if some:
                spans = np.concatenate([c for c, _ in some]), np.concatenate([a for _, a in some])
                self.seen = self.seen.and_spans(*spans, used=used)
        self._spans.clear()
        self._held = 0


class Worth:
    """One holder's pools under the default policy, by :class:`~kvfabric.fabric.eviction.Eviction`."""

    structured = True

    def __init__(self, pools: Sequence[PoolShape]) -> None:
        slots = slots_of(pools)
        self._classes: Ints = np.zeros(slots, dtype=np.int64)
        self._born: Ints = np.zeros(slots, dtype=np.int64)
        self._uses: Ints = np.zeros(slots, dtype=np.int64)
        self._last_s: Floats = np.zeros(slots)
        self._there = np.zeros(slots, dtype=np.bool_)
        self._group: Ints = np.zeros(slots, dtype=np.int64)
        self._saved_per_byte: Floats = np.zeros(slots)
        sizes: dict[int, int] = {}
        for pool in pools:
            part = slice(pool.first, pool.first + pool.slots)
            self._group[part] = pool.group
            self._saved_per_byte[part] = (pool.unit_tokens if pool.prefix else 1) / pool.object_bytes
            sizes[pool.group] = sizes.get(pool.group, 0) + pool.slots
        self._learned = {group: Learned(Ghosts(max(1, int(GHOSTS * size)))) for group, size in sizes.items()}
        self._pools = tuple(pools)
        self._untold: list[tuple[Slots, Ints, Floats]] = []
        """Uses since the last telling: it takes longer to part them by group than to note them."""
        self._untold_count = 0

    def arrived(self, arrivals: Arrivals, now_s: float) -> None:
        """Newcomers begin a class of their own; what comes back goes on in the class that it left in."""
        pool, slots = arrivals.pool, arrivals.slots
        learned = self._learned[pool.group]
        follows = arrivals.positions[0] - pool.unit_tokens >= CONTINUES_TOKENS
        self._born[slots] = born_class(len(slots), continues=follows)
        self._uses[slots] = 0
        places = [learned.ghosts.take(digest) for digest in arrivals.digests]
        back = [i for i, place in enumerate(places) if place is not None]
        if back:
            at = np.array([place for place in places if place is not None], dtype=np.int64)
            ghosts = learned.ghosts
            learned.span(ghosts.classes[at], now_s - ghosts.last_s[at], used=True)
            self._uses[slots[back]] = ghosts.uses[at] + 1
        self._classes[slots] = class_of(self._uses[slots], self._born[slots])
        self._last_s[slots] = now_s
        self._there[slots] = True
        learned.news += len(slots)

    def used(self, slots: Slots, tick: int, now_s: float) -> None:
        del tick
        self._untold.append((slots, self._classes[slots], now_s - self._last_s[slots]))
        self._untold_count += len(slots)
        uses = self._uses[slots] + 1
        self._uses[slots] = uses
        self._classes[slots] = class_of(uses, self._born[slots])
        self._last_s[slots] = now_s
        if self._untold_count >= HELD_MAX:
            self._tell()

    def _tell(self) -> None:
        """Part the uses noted by group."""
        if not self._untold:
            return
        slots, classes, ages_s = (np.concatenate(column) for column in zip(*self._untold, strict=True))
        self._untold.clear()
        self._untold_count = 0
        groups = self._group[slots]
        for group in np.unique(groups).tolist():
            mine = groups == group
            self._learned[group].span(classes[mine], ages_s[mine], used=True)

    def left(self, slots: Slots, digests: Sequence[bytes], now_s: float) -> None:
        """What left is followed until it comes back or later ones push it out."""
        self._there[slots] = False
        columns = (self._group, self._classes, self._uses, self._last_s)
        for digest, group, kind, uses, last_s in zip(digests, *(c[slots].tolist() for c in columns), strict=True):
            learned = self._learned[group]
            dropped = learned.ghosts.put(digest, kind, uses, last_s)
            if dropped is not None:
                learned.span(np.array([dropped[0]]), np.array([max(now_s - dropped[1], 0.0)]), used=False)

    def moved(self, old: int, new: int) -> None:
        for column in (self._classes, self._born, self._uses, self._last_s, self._there):
            column[new] = column[old]
        self._there[old] = False

    def values(self, slots: Slots, count: int, now_s: float) -> Values:
        del count
        self._tell()
        groups = self._group[slots]
        out = np.zeros(len(slots))
        for group in np.unique(groups).tolist():
            learned = self._learned[group]
            if learned.news >= LOOK_EVERY:
                self._look(group, now_s)
            mine = groups == group
            some = slots[mine]
            out[mine] = at_age(learned.table, self._classes[some], now_s - self._last_s[some])
        return out * self._saved_per_byte[slots] - (now_s - self._last_s[slots]) * 1e-24

    def _look(self, group: int, now_s: float) -> None:
        learned = self._learned[group]
        there = np.flatnonzero(self._there & (self._group == group))
        ghosts = learned.ghosts
        gone = np.flatnonzero(ghosts.there)
        learned.look(
            np.concatenate([self._classes[there], ghosts.classes[gone]]),
            now_s - np.concatenate([self._last_s[there], ghosts.last_s[gone]]),
        )
