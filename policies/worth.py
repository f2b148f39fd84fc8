"""The default policy: what recompute an object saves per byte and second, by how it is likely to be used again.

What comes back is not an object but a request's whole prompt: the next turn of a conversation, another question about
a document. So what is learned from is the *visit* (one request's prompt, what it found and what it stored), once however
many objects it has, and all objects that a visit touched are worth what the visit is. A visit is followed long after
its objects left, by one digest: the next that stores that object anew has come back.

Where engines tell how long an output became, that counts as well (:mod:`outputs`).

Each kind of state learns its own reuse (:mod:`reuse`): a history block, a window and a snapshot of one
chain are used together but come and go at different places. The worth of an object is its expected uses
per second times the tokens that a use saves, over its bytes. Ties leave oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..fabric.eviction import Arrivals, PoolShape, Slots, Values, slots_of
from .outputs import UNTOLD, Outputs
from .reuse import TURNS, Floats, Ints, Seen, at_age, class_of, expected_uses, hazards, indices

CONTINUES_TOKENS = 1024
"""Who finds more than so many tokens continues something; less may be a system prompt."""
VISITS_MAX = 16_384
"""Visits that are followed, for each group: the latest. A power of two."""
UNDECIDED_MAX = 256
"""Visits that found something and may store more: the latest."""
HELD_MAX = 4096
"""What is seen is added up at the latest when it is of so many visits."""
NOTED_MAX = 1 << 16
"""Uses are noted and gone through many at a time: at the latest when so many objects wait for that."""
LOOK_EVERY = (8, 200)
LOOK_SHARE = 0.05
"""A fresh look at what was seen is due after so large a part more was seen, within these numbers of visits."""


class Visits:
    """The latest visits of one group, in a ring: what class each is of, since when, and whether its next is awaited."""

    def __init__(self, size: int) -> None:
        self.classes: Ints = np.zeros(size, dtype=np.int64)
        self.at_s: Floats = np.zeros(size)
        self.awaited = np.zeros(size, dtype=np.bool_)
        self.back_s: Floats = np.zeros(size)
        """When its next came, where that is no longer awaited."""
        self.outputs = Outputs(size)
        self._turns = [0] * size
        self._lengths = [0] * size
        self._marks: list[bytes] = [b""] * size
        self._marked: dict[bytes, int] = {}
        self.total = 0
        """Visits so far: a visit is known by its number."""

    def add(self, turn: int, length: int, run: int, now_s: float) -> tuple[int, tuple[int, float] | None]:
        """The number of one more; and class and time of one whose next was awaited and is no more."""
        number, place = self.total, self.total % len(self._turns)
        lost = (int(self.classes[place]), float(self.at_s[place])) if self.awaited[place] else None
        self.mark(number, b"")
        self.outputs.forget(place)
        self.total += 1
        self.at_s[place], self.awaited[place] = now_s, True
        self.set(number, turn, length, run)
        return number, lost

    def set(self, number: int, turn: int, length: int, run: int) -> int:
        """What is known of a visit by now; returns its class."""
        place = number % len(self._turns)
        self._turns[place], self._lengths[place] = turn, length
        self.classes[place] = found = class_of(turn, run)
        return found

    def known(self, number: int) -> bool:
        return number >= 0 and self.total - len(self._turns) <= number

    def turn_after(self, number: int) -> int:
        """The turn of who continues a visit."""
        return min(self._turns[number % len(self._turns)] + 1, TURNS - 1) if self.known(number) else 1

    def mark(self, number: int, digest: bytes) -> None:
        """By this object a visit is recognised after it left; b"" for none."""
        place = number % len(self._turns)
        before = self._marks[place]
        if before and self._marked.get(before) == place:
            del self._marked[before]
        self._marks[place] = digest
        if digest:
            self._marked[digest] = place

    def mark_of(self, number: int) -> bytes:
        return self._marks[number % len(self._turns)] if self.known(number) else b""

    def marked(self, digest: bytes) -> int | None:
        """The visit that this object stands for."""
        place = self._marked.get(digest)
        return None if place is None else self.total - 1 - (self.total - 1 - place) % len(self._turns)

    def any_marked(self, digests: Sequence[bytes]) -> bool:
        """Whether one of these objects stands for a visit."""
        return not self._marked.keys().isdisjoint(digests)

    def generated(self, number: int, output_tokens: int) -> None:
        """The output that followed this visit's prompt became so long."""
        if self.known(number):
            place = number % len(self._turns)
            self.outputs.tell(place, int(self.classes[place]), output_tokens)

    def learn_outputs(self, rates: Floats, now_s: float) -> None:
        """Compare what was told of outputs with what came back; ``rates``: what is known without that."""
        places = np.flatnonzero(self.outputs.bands != UNTOLD)
        waits, kinds = self.awaited[places], self.classes[places]
        ages_s = np.maximum(np.where(waits, now_s, self.back_s[places]) - self.at_s[places], 0.0)
        self.outputs.learn(places, kinds, ~waits, expected_uses(rates, kinds, ages_s))

    def factors(self, numbers: Ints) -> Floats:
        """What the worth of these visits' objects is multiplied by."""
        size = len(self._turns)
        found: Floats = self.outputs.factors[
            numbers & (size - 1)
        ]  # of none, -1: the last place, free until all are taken
        return found if self.total < size else np.where(numbers >= self.total - size, found, 1.0)

    def came_back(self, number: int, now_s: float, length: int | None = None) -> tuple[int, float] | None:
        """Class and time of a visit whose next came, at least half as long as it was where ``length`` says how long."""
        place = number % len(self._turns)
        if not self.known(number) or not self.awaited[place]:
            return None
        if length is not None and 2 * length < self._lengths[place]:
            return None
        self.awaited[place], self.back_s[place] = False, now_s
        return int(self.classes[place]), float(self.at_s[place])


@dataclass(slots=True)
class Learned:
    """What one group's visits showed, and what follows from it."""

    visits: Visits
    unit_tokens: int
    prefix: bool
    seen: Seen = field(default_factory=Seen.nothing)
    table: Floats = field(default_factory=lambda: indices(hazards(Seen.nothing())))
    undecided: OrderedDict[int, Slots] = field(default_factory=OrderedDict)
    """The slots that a visit found, until it stores what follows them."""
    looked_at: int = 0
    _spans: list[tuple[int, float, bool]] = field(default_factory=list)

    def span(self, ended: tuple[int, float] | None, now_s: float, *, used: bool) -> None:
        """A visit of this class and time was followed until now: its next came, or it is out of sight."""
        if ended is not None:
            self._spans.append((ended[0], max(now_s - ended[1], 0.0), used))
            if len(self._spans) >= HELD_MAX:
                self._fold()

    @property
    def due(self) -> bool:
        """Whether it is time for a fresh look."""
        least, most = LOOK_EVERY
        return self.visits.total - self.looked_at >= min(max(least, LOOK_SHARE * self.visits.total), most)

    def look(self, now_s: float) -> None:
        """Learn from what happened, and from the visits whose next is awaited still."""
        self._fold()
        awaited = np.flatnonzero(self.visits.awaited)
        ages_s = now_s - self.visits.at_s[awaited]
        rates = hazards(self.seen.and_spans(self.visits.classes[awaited], ages_s, used=False))
        self.table = indices(rates)
        if self.visits.outputs.any_told:
            self.visits.learn_outputs(rates, now_s)
        self.seen = self.seen.faded(self.visits.total - self.looked_at)
        self.looked_at = self.visits.total

    def _fold(self) -> None:
        """Add what happened to what was seen."""
        for used in (True, False):
            some = [(kind, age_s) for kind, age_s, u in self._spans if u is used]
            if some:
                classes, ages_s = np.array([k for k, _ in some]), np.array([a for _, a in some])
                self.seen = self.seen.and_spans(classes, ages_s, used=used)
        self._spans.clear()


class Worth:
    """One holder's pools under the default policy, by :class:`~kvfabric.fabric.eviction.Eviction`."""

    structured = True

    def __init__(self, pools: Sequence[PoolShape]) -> None:
        slots = slots_of(pools)
        self._visit: Ints = np.full(slots, -1, dtype=np.int64)
        """The last visit that touched the slot's object; what it is of and since when, beside it."""
        self._classes: Ints = np.zeros(slots, dtype=np.int64)
        self._last_s: Floats = np.zeros(slots)
        self._group: Ints = np.zeros(slots, dtype=np.int64)
        self._saved_per_byte: Floats = np.zeros(slots)
        self._learned: dict[int, Learned] = {}
        self._noted: list[tuple[Slots, float]] = []
        self._noted_count = 0
        for pool in pools:
            part = slice(pool.first, pool.first + pool.slots)
            self._group[part] = pool.group
            self._saved_per_byte[part] = (pool.unit_tokens if pool.prefix else 1) / pool.object_bytes
            if pool.group not in self._learned:
                self._learned[pool.group] = Learned(Visits(VISITS_MAX), pool.unit_tokens, pool.prefix)

    def used(self, slots: Slots, tick: int, now_s: float) -> None:
        """A visit found these, of each group in the order of their chain. On the way of every lease: only noted."""
        del tick
        self._noted.append((slots, now_s))
        self._noted_count += len(slots)
        if self._noted_count >= NOTED_MAX:
            self._catch_up()

    def _catch_up(self) -> None:
        """Go through the uses noted, in their order: whatever asks or changes what is known of an object comes after them."""
        noted, self._noted, self._noted_count = self._noted, [], 0
        for slots, at_s in noted:
            self._found(slots, at_s)

    def _found(self, slots: Slots, now_s: float) -> None:
        for group, mine in self._by_group(slots):
            learned = self._learned[group]
            visits, before = learned.visits, int(self._visit[mine[-1]])
            learned.span(visits.came_back(before, now_s, len(mine)), now_s, used=True)
            continues = len(mine) * learned.unit_tokens > CONTINUES_TOKENS or not learned.prefix
            turn = visits.turn_after(before) if continues else 0
            number, lost = visits.add(turn, len(mine), 0, now_s)
            learned.span(lost, now_s, used=False)
            if continues:
                visits.mark(number, visits.mark_of(before))
            learned.undecided[number] = mine
            if len(learned.undecided) > UNDECIDED_MAX:
                learned.undecided.popitem(last=False)
            self._touch(mine, number, int(visits.classes[number % VISITS_MAX]), now_s)

    def arrived(self, arrivals: Arrivals, now_s: float) -> None:
        """A visit stores these behind what it found, or begins with them; it may have been here before."""
        self._catch_up()
        learned = self._learned[arrivals.pool.group]
        visits, run = learned.visits, len(arrivals.slots)
        found = arrivals.positions[0] // learned.unit_tokens - 1 if learned.prefix else 0
        base = int(self._visit[arrivals.base]) if arrivals.base >= 0 else -1
        turn, back = 0, self._came_back(learned, arrivals, now_s)
        if found * learned.unit_tokens > CONTINUES_TOKENS:
            turn = visits.turn_after(base)
        if back is not None:
            turn = max(turn, back)
        slots = learned.undecided.pop(base, None)
        if slots is not None and slots[-1] == arrivals.base:
            number, slots = base, np.concatenate([slots, arrivals.slots])
            turn = max(turn if back is not None else 0, visits.turn_after(base) - 1)
            kind = visits.set(number, turn, found + run, run)
        else:
            number, lost = visits.add(turn, found + run, run, now_s)
            learned.span(lost, now_s, used=False)
            kind, slots = int(visits.classes[number % VISITS_MAX]), arrivals.slots
        middle = (found + run) // 2 - found if learned.prefix else run - 1
        visits.mark(number, arrivals.digests[max(0, min(middle, run - 1))])
        self._touch(slots, number, kind, now_s)

    @staticmethod
    def _came_back(learned: Learned, arrivals: Arrivals, now_s: float) -> int | None:
        """The turn of who stores again what an earlier visit left; None where nobody is known to have."""
        turn = None
        if not learned.visits.any_marked(arrivals.digests):
            return None
        for digest, position in zip(arrivals.digests, arrivals.positions, strict=True):
            number = learned.visits.marked(digest)
            if number is not None:
                learned.span(learned.visits.came_back(number, now_s), now_s, used=True)
                if position > CONTINUES_TOKENS or not learned.prefix:
                    turn = learned.visits.turn_after(number)
        return turn

    def generated(self, slots: Slots, output_tokens: int, now_s: float) -> None:
        """The visit that touched each of these last is the one whose output is told."""
        del now_s
        self._catch_up()
        for slot in slots.tolist():
            self._learned[int(self._group[slot])].visits.generated(int(self._visit[slot]), output_tokens)

    def left(self, slots: Slots, digests: Sequence[bytes], now_s: float) -> None:
        """What left is recognised by its visit's mark when it comes back."""
        self._catch_up()
        self._visit[slots] = -1

    def _by_group(self, slots: Slots) -> list[tuple[int, Slots]]:
        if len(self._learned) == 1:
            return [(group, slots) for group in self._learned if len(slots)]
        groups = self._group[slots]
        return [(group, slots[groups == group]) for group in np.unique(groups).tolist()]

    def _touch(self, slots: Slots, number: int, kind: int, now_s: float) -> None:
        self._visit[slots], self._classes[slots], self._last_s[slots] = number, kind, now_s

    def moved(self, old: int, new: int) -> None:
        self._catch_up()
        for column in (self._visit, self._classes, self._last_s):
            column[new] = column[old]

    def values(self, slots: Slots, count: int, now_s: float) -> Values:
        del count
        self._catch_up()
        out = np.zeros(len(slots))
        groups = self._group[slots]
        several = len(self._learned) > 1
        for group in np.unique(groups).tolist() if several else [*self._learned] if len(slots) else ():
            learned = self._learned[group]
            if learned.due:
                learned.look(now_s)
            mine = groups == group if several else slice(None)
            some = slots[mine]
            found = at_age(learned.table, self._classes[some], now_s - self._last_s[some])
            told = learned.visits.outputs.any_told
            out[mine] = found * learned.visits.factors(self._visit[some]) if told else found
        return out * self._saved_per_byte[slots] - (now_s - self._last_s[slots]) * 1e-24
