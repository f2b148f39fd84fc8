"""Who makes room: the policy's least worth first, and never against the structure.

Objects of one chain rest on each other, and a cut chain serves nobody behind the cut::

    history   [0] <- [1] <- [2] <- [3]        rests on the block before it: leaves from its far end
    indexer   [0] <- [1] <- [2] <- [3]        likewise, and each block leaves together with its history's
    window                   [a]   [b]        at home at the history block that it ends in: useless without

Who leaves is ranked in batches: a policy is asked about many objects at once, and its answer stands
until its batch is used up. What was used, pinned or replaced meanwhile is passed over; what nothing
rests on any more joins in at its own worth.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .eviction import Eviction, Slots
from .identity import DIGEST_BYTES
from .kinds import Form, ObjectKind, ProtocolError
from .model import ModelSpec

if TYPE_CHECKING:
    from .holdings import Holdings
    from .objects import Obj
    from .pools import Pool

BATCH_MIN = 8
BATCH_SHARE = 128
"""A batch is this part of a pool: what arrived after it was ranked waits for no more than that."""
SELECTIONS_MAX = 256
RETAIN_S_MAX = 86400.0
RETAIN_WEIGHT_MAX = 4.0

Rank = tuple[float, int, int, int]
"""Worth, nearness to its chain's start, slot, version."""


@dataclass(slots=True)
class Batch:
    """What leaves next of one selection, as of its ranking."""

    number: int
    heap: list[Rank]
    limit: tuple[float, int] | None
    """Worth and place of the last one ranked where more were left out: from there on, rank anew."""
    last: Obj | None = None


class Structure:
    """Which groups of a model cut a chain, and where the others are at home."""

    def __init__(self, model: ModelSpec) -> None:
        blocks = [
            i for i, g in enumerate(model.groups) if g.kind is ObjectKind.COMPRESSED_HISTORY and g.form is Form.BLOCKS
        ]
        self.prefix = tuple(
            model.chained and g.form is Form.BLOCKS and g.kind in (ObjectKind.COMPRESSED_HISTORY, ObjectKind.INDEXER)
            for g in model.groups
        )
        self.home_group: int | None = blocks[0] if blocks else None
        """The history that every other group's objects are at home in."""
        self.home_unit = model.groups[blocks[0]].unit_tokens if blocks else 0
        self._units = tuple(g.unit_tokens for g in model.groups)

    def rests_on(self, group: int, index: int, units: dict[int, bytes]) -> tuple[bytes, bytes]:
        """Digests of the object before it in its chain and of the history block it ends in; b"" where there is none.

        ``units``: a prompt's digests by object unit, 32 bytes each.
        """
        unit = self._units[group]
        base = home = b""
        if self.prefix[group] and index:
            base = units[unit][(index - 1) * DIGEST_BYTES : index * DIGEST_BYTES]
        if self.home_group is not None and self.home_group != group:
            at = ((index + 1) * unit - 1) // self.home_unit * DIGEST_BYTES
            home = units[self.home_unit][at : at + DIGEST_BYTES]
        return base, home


@dataclass(slots=True)
class Retained:
    """What was asked to stay longer: by slot, how much and until when; it fades over its time."""

    weight: npt.NDArray[np.float64]
    since_s: npt.NDArray[np.float64]
    until_s: npt.NDArray[np.float64]
    any_until_s: float = 0.0

    @classmethod
    def of(cls, slots: int) -> Retained:
        return cls(np.zeros(slots), np.zeros(slots), np.zeros(slots))

    def keep(self, slots: Slots, weight: float, now_s: float, ttl_s: float) -> None:
        """Raise these slots' objects; a later call replaces an earlier one."""
        self.weight[slots], self.since_s[slots], self.until_s[slots] = weight, now_s, now_s + ttl_s
        self.any_until_s = max(self.any_until_s, now_s + ttl_s)

    def forget(self, slot: int) -> None:
        self.weight[slot] = 0.0

    def moved(self, old: int, new: int) -> None:
        """One slot's object lies in another."""
        for column in (self.weight, self.since_s, self.until_s):
            column[new] = column[old]

    def raised(self, slots: Slots, values: npt.NDArray[np.float64], now_s: float) -> npt.NDArray[np.float64]:
        """The values, those of retained objects moved up the order by their weight (1: past all others) and what is left of it."""
        if now_s >= self.any_until_s:
            return values
        left = (self.until_s[slots] - now_s) / np.maximum(self.until_s[slots] - self.since_s[slots], 1e-9)
        boost = self.weight[slots] * np.clip(left, 0.0, 1.0)
        if not boost.any():
            return values
        ordered = np.sort(values)
        place = np.searchsorted(ordered, values) + boost * len(values)
        inside = ordered[np.minimum(place.astype(np.int64), len(values) - 1)]
        beyond = np.maximum(place - (len(values) - 1), 0.0) * max(abs(float(ordered[-1])), 1.0)
        return np.where(boost > 0, inside + beyond, values)


@dataclass(slots=True, eq=False)
class RoomBook:
    """Who leaves next, for each pool and each byte limit."""

    books: Holdings
    policy: Eviction
    structure: Structure
    value: npt.NDArray[np.float64]
    ranked: npt.NDArray[np.int64]
    """The number of the batch in which the slot's value was told."""
    resting: npt.NDArray[np.int32]
    """How many objects in memory rest on the slot's."""
    retained: Retained
    _count: dict[tuple[int, int], dict[bytes, int]] = field(default_factory=dict)
    """By group and shard: how many objects in memory rest on the object with this digest."""
    _at_home: dict[int, dict[bytes, dict[Obj, None]]] = field(default_factory=dict)
    """By shard: the objects of other groups in memory that are useless without this history block."""
    _batches: dict[tuple[tuple[int, ...], str | None], Batch] = field(default_factory=dict)
    _number: int = 0

    @classmethod
    def of(cls, books: Holdings, policy: Eviction, slots: int) -> RoomBook:
        return cls(
            books,
            policy,
            Structure(books.model),
            np.zeros(slots),
            np.full(slots, -1, dtype=np.int64),
            np.zeros(slots, dtype=np.int32),
            Retained.of(slots),
        )

    # --- what rests on what ----------------------------------------------------------------------

    def link_all(self, key: tuple[int, int], objects: Sequence[Obj]) -> None:
        """These objects of one group and shard are in memory: what they rest on knows them, and they what rests on them."""
        count, table, resting = self._count.setdefault(key, {}), self.books.table[key], self.resting
        for obj in objects:
            resting[obj.slot] = count.get(obj.digest, 0)
            if obj.base:
                count[obj.base] = now = count.get(obj.base, 0) + 1
                base = table.get(obj.base)
                if base is not None and base.slot >= 0:
                    resting[base.slot] = now
            if obj.home:
                self._at_home.setdefault(obj.shard, {}).setdefault(obj.home, {})[obj] = None
            obj.linked = True

    def unlink(self, obj: Obj) -> None:
        """The object loses its slot."""
        if not obj.linked:
            return
        obj.linked = False
        if self.retained.any_until_s:
            self.retained.forget(obj.slot)
        key = (obj.group, obj.shard)
        if obj.base:
            count = self._count[key]
            resting = count[obj.base] - 1
            if resting:
                count[obj.base] = resting
            else:
                del count[obj.base]
            base = self.books.table[key].get(obj.base)
            if base is not None and base.slot >= 0:
                self.resting[base.slot] = resting
        if obj.home:
            homes = self._at_home[obj.shard]
            there = homes[obj.home]
            there.pop(obj, None)
            if not there:
                del homes[obj.home]

    def company(self, obj: Obj) -> Iterator[Obj]:
        """What leaves with a victim, because nobody can use it any more; the victim not included."""
        structure = self.structure
        if not self.policy.structured or structure.home_group is None or not structure.prefix[obj.group]:
            return
        home: Obj | None = obj
        if obj.home:
            home = self.books.table[structure.home_group, obj.shard].get(obj.home)
            if home is None or home.slot < 0 or self.resting[home.slot] or not self._may_leave(home):
                return
            yield home
        if home is None or home.on_a_tier:
            return
        for other in list(self._at_home.get(obj.shard, {}).get(home.digest, ())):
            if other is not obj and self._may_leave(other):
                yield other

    # --- who leaves ------------------------------------------------------------------------------

    def victim(self, pools: Sequence[Pool], tenant: str | None, where: str) -> Obj:
        """The next to leave of these pools (of one tenant). Raises ProtocolError where nothing may."""
        key = (tuple(pool.first for pool in pools), tenant)
        batch = self._batches.get(key)
        for _ in range(3):
            obj = self._next(batch) if batch is not None else None
            if obj is not None:
                return obj
            batch = self._rank(pools, tenant)
            if len(self._batches) >= SELECTIONS_MAX:
                self._batches.clear()
            self._batches[key] = batch
        raise ProtocolError(f"{where}: reserved without room")

    def victims(self, pools: Sequence[Pool], tenant: str | None, where: str, count: int) -> list[Obj]:
        """Who leaves next, up to ``count`` of these pools and at least one, with what leaves along with them.

        They count as gone from here on: evict them all before anything else is asked. Raises ProtocolError where
        nothing may leave.
        """
        meant = {(pool.group, pool.shard) for pool in pools}
        found: list[Obj] = []
        freed = 0
        victim: Obj | None = self.victim(pools, tenant, where)
        batch = self._batches[tuple(pool.first for pool in pools), tenant]
        alone = not self._at_home
        while victim is not None:
            for obj in (victim,) if alone else (*self.company(victim), victim):
                self.unlink(obj)
                found.append(obj)
                freed += (obj.group, obj.shard) in meant
            # Only of the batch at hand: a fresh one would have those in it that are about to leave.
            victim = self._next(batch) if freed < count else None
        return found

    def _next(self, batch: Batch) -> Obj | None:
        """The first in turn that may leave still; None where the batch is used up."""
        books, heap, limit, number = self.books, batch.heap, batch.limit, batch.number
        owner, ranked, resting = books.owner, self.ranked, self.resting
        last, batch.last = batch.last, None
        if last is not None and last.base:
            self._follow(batch, books.table[last.group, last.shard].get(last.base))
        while heap:
            value, nearness, slot, version = heapq.heappop(heap)
            if limit is not None and (value, nearness) > limit:
                return None
            obj = owner[slot]
            if obj is None or obj.version != version or ranked[slot] != number:
                continue
            if (not resting[slot] or obj.first_out or limit == _ANY) and self._may_leave(obj):
                batch.last = obj
                return obj
        return None

    @staticmethod
    def _may_leave(obj: Obj) -> bool:
        """Not pinned, and not about to leave already."""
        return obj.linked and obj.evictable

    def _follow(self, batch: Batch, base: Obj | None) -> None:
        """Nothing rests on this one any more: it is in turn at its own worth."""
        if base is None or base.slot < 0 or self.resting[base.slot] or self.ranked[base.slot] != batch.number:
            return
        heapq.heappush(batch.heap, (float(self.value[base.slot]), -base.position, base.slot, base.version))

    def _rank(self, pools: Sequence[Pool], tenant: str | None) -> Batch:
        """Ask the policy about everything that may leave."""
        books = self.books
        found = []
        for pool in pools:
            part = slice(pool.first, pool.first + pool.slots)
            found.append(pool.first + np.flatnonzero(books.settled[part] & (books.pins[part] == 0)))
        slots: Slots = np.concatenate(found)
        if tenant is not None:
            mine = [slot for slot in slots.tolist() if (o := books.owner[slot]) is not None and o.tenant == tenant]
            slots = np.array(mine, dtype=np.int64)
        self._number += 1
        size = max(BATCH_MIN, len(slots) // BATCH_SHARE)
        values = self.policy.values(slots, size, books.now_s)
        values = np.where(books.first_out[slots], -np.inf, self.retained.raised(slots, values, books.now_s))
        self.value[slots] = values
        self.ranked[slots] = self._number
        tips = np.flatnonzero((self.resting[slots] == 0) | books.first_out[slots])
        limit: tuple[float, int] | None = None
        if not len(tips):
            tips, limit = np.arange(len(slots)), _ANY
        order = tips[np.lexsort((-books.positions[slots[tips]], values[tips]))]
        chosen = slots[order[:size]]
        columns = zip(
            self.value[chosen].tolist(), (-books.positions[chosen]).tolist(), chosen.tolist(),
            books.versions[chosen].tolist(), strict=True,
        )  # fmt: skip
        heap: list[Rank] = list(columns)
        if limit is None and len(order) > size:
            limit = heap[-1][:2]
        return Batch(self._number, heap, limit)

    def least_worth(self, pool: Pool, count: int) -> list[Obj]:
        """What to move down to a tier first: it stays findable there, so nothing is left behind that rests on it."""
        books = self.books
        part = slice(pool.first, pool.first + pool.slots)
        slots: Slots = pool.first + np.flatnonzero(books.settled[part] & (books.pins[part] == 0))
        values = self.retained.raised(slots, self.policy.values(slots, count, books.now_s), books.now_s)
        chosen = slots[np.lexsort((-books.positions[slots], values))[:count]]
        return [obj for slot in chosen.tolist() if (obj := books.owner[slot]) is not None and obj.bad is None]

    def again(self) -> None:
        """Something is to leave before all others: rank anew."""
        self._batches.clear()

    def moved(self, old: int, new: int) -> None:
        """One slot's object lies in another from here on, and is worth what it was."""
        self.policy.moved(old, new)
        self.retained.moved(old, new)
        self.touched([new])

    def touched(self, slots: Slots | Sequence[int]) -> None:
        """These were used: what was told of their worth does not hold any more."""
        self.ranked[slots] = -1


_ANY = (np.inf, 0)
"""The limit of a batch where something rests on everything that may leave, and is pinned: any may."""
