"""The slots below the readers' own: copies in host memory of what a holder's GPU pools had.

::

    free -> filling -> standing (an object's ``below``) -> free
                       standing and read: stays until the last reader gives it back

One pool a group and shard, beside the readers' pool of that group; kinds never share. A standing
copy is the object's only one, or a second beside its slot or its extent. What was used longest ago
leaves first; what is being read, or promised to a restore, does not leave at all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .arena import Arena, SlotState
from .lifecycle import State
from .objects import Obj

Key = tuple[int, int]
"""Group and shard."""


@dataclass(slots=True)
class HostPool:
    """The slots of one group and shard: ``first`` .. ``first + slots``."""

    first: int
    slots: int
    free: list[int]
    standing: OrderedDict[int, Obj] = field(default_factory=OrderedDict)
    """By slot, the least recently used first."""
    filling: set[int] = field(default_factory=set)
    """Bytes are on their way into these."""
    leaving: set[int] = field(default_factory=set)
    """Nobody's any more, but still being read or not yet quiet."""

    @property
    def used(self) -> int:
        return self.slots - len(self.free)

    def has(self, slot: int) -> bool:
        """Whether it is a slot of this pool."""
        return self.first <= slot < self.first + self.slots

    def miscounted(self) -> list[str]:
        """What the pool as a whole says of itself and is not so: each slot is in one of four states, once."""
        parts = (self.free, self.standing, self.filling, self.leaving)
        slots = np.concatenate([np.fromiter(part, np.int64, len(part)) for part in parts]) - self.first
        mine = slots[(slots >= 0) & (slots < self.slots)]
        counted = np.bincount(mine, minlength=self.slots)
        name = f"host pool of slots {self.first} to {self.first + self.slots}"
        found = [f"{name}: another pool's slot is counted here"] if len(mine) < len(slots) else []
        found += [f"{name}: slot {self.first + i} is lost" for i in np.flatnonzero(counted == 0).tolist()]
        return found + [f"{name}: slot {self.first + i} counts twice" for i in np.flatnonzero(counted > 1).tolist()]

    def astray(self, group: int, shard: int, part: range) -> list[str]:
        """Slots of a part of the pool that hold a copy which is not theirs to hold."""
        found = []
        for slot in part:
            obj = self.standing.get(slot)
            if obj is None:
                continue
            if obj.below != slot or not obj.visible:
                found.append(f"host slot {slot} is a copy of what does not have it")
            if (obj.group, obj.shard) != (group, shard):
                found.append(f"host slot {slot} of {group}/{shard} holds an object of {obj.group}/{obj.shard}")
        return found


class HostPools:
    """All host slots of one holder; keeps the arena's headers of them in step."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.pools: dict[Key, HostPool] = {}
        layout = arena.layout
        for first, pool in zip(layout.first_slot, layout.pools, strict=True):
            if pool.tier is not layout.readers_tier:
                free = list(range(first + pool.slots - 1, first - 1, -1))
                self.pools[pool.group, pool.shard] = HostPool(first, pool.slots, free)
        self._readers: Counter[int] = Counter()
        self.used_at: dict[int, int] = {}
        """By standing slot: the count of uses when it was last used."""
        self.uses = 0
        self.worth: dict[int, float] = {}
        """By standing slot: what the object was worth when it was copied ahead of its eviction."""

    def covers(self, obj: Obj) -> bool:
        """Whether objects of this group and shard may lie in host memory."""
        return (obj.group, obj.shard) in self.pools

    def pool_of(self, slot: int) -> HostPool:
        """The pool of a host slot. Raises KeyError for a slot of the readers' pools."""
        layout = self.arena.layout.pools[self.arena.layout.pool_of(slot)]
        return self.pools[layout.group, layout.shard]

    # --- a slot's life -------------------------------------------------------------------------

    def take(self, key: Key) -> int:
        """A free slot, to be filled. Raises IndexError where none is free."""
        pool = self.pools[key]
        slot = pool.free.pop()
        pool.filling.add(slot)
        self.arena.begin_write(slot)
        return slot

    def taken_over(self, obj: Obj) -> None:
        """A standing copy is this object's from here on: of the same key and length."""
        self.pool_of(obj.below).standing[obj.below] = obj

    def stand(self, slot: int, obj: Obj) -> None:
        """The bytes of a slot that was filled are the object's, proven: its copy below."""
        pool = self.pool_of(slot)
        pool.filling.remove(slot)
        pool.standing[slot] = obj
        obj.below = slot
        self.arena.seal(slot, obj.length, obj.checksum, obj.digest[:16], obj.revision)
        self.use(slot)

    def use(self, slot: int) -> None:
        """Mark a use of a standing copy."""
        self.uses += 1
        self.used_at[slot] = self.uses
        self.pool_of(slot).standing.move_to_end(slot)

    def first_out(self, slot: int) -> None:
        """Let this standing copy leave before any other."""
        self.used_at[slot] = 0
        self.pool_of(slot).standing.move_to_end(slot, last=False)

    def give_up(self, slot: int, *, quiet: bool = True) -> None:
        """What was to fill this slot did not; without ``quiet`` its bytes may still come."""
        pool = self.pool_of(slot)
        pool.filling.remove(slot)
        if quiet:
            self._free(pool, slot)
        else:
            pool.leaving.add(slot)
            self.arena.vacate(slot, SlotState.QUARANTINED)

    def quiet(self, slot: int) -> None:
        """Nothing writes any more to a slot that was given up."""
        pool = self.pool_of(slot)
        pool.leaving.remove(slot)
        self._free(pool, slot)

    def drop(self, slot: int) -> None:
        """A standing copy is nobody's any more; its slot is free once nothing reads it."""
        pool = self.pool_of(slot)
        obj = pool.standing.pop(slot)
        self.used_at.pop(slot, None)
        self.worth.pop(slot, None)
        if obj.below == slot:
            obj.below = -1
        if self._readers[slot]:
            pool.leaving.add(slot)
        else:
            self._free(pool, slot)

    def borrow(self, slot: int) -> None:
        """Someone reads a standing copy: it stays where it is."""
        self._readers[slot] += 1

    def give_back(self, slot: int) -> None:
        """One reader of a copy has ended."""
        self._readers[slot] -= 1
        if self._readers[slot]:
            return
        del self._readers[slot]
        pool = self.pool_of(slot)
        if slot in pool.leaving:
            pool.leaving.remove(slot)
            self._free(pool, slot)

    def _free(self, pool: HostPool, slot: int) -> None:
        self.arena.vacate(slot)
        pool.free.append(slot)

    # --- who may leave -------------------------------------------------------------------------

    def idle(self, key: Key, used_before: int | None = None) -> Iterator[int]:
        """Standing copies that may leave, the least recently used first; ``used_before``: only older ones."""
        for slot, obj in self.pools[key].standing.items():
            if used_before is not None and self.used_at[slot] > used_before:
                return
            if obj.below == slot and not self._readers[slot] and obj.state is not State.RESTORING:
                yield slot

    def last_used(self) -> Iterator[tuple[Obj, float]]:
        """Every standing copy, the last used first, and what its object was worth when it was copied; 0 where that is not known."""
        slots = sorted(
            (slot for pool in self.pools.values() for slot in pool.standing), key=lambda slot: -self.used_at[slot]
        )
        yield from ((self.pool_of(slot).standing[slot], self.worth.get(slot, 0.0)) for slot in slots)

    def busy(self, key: Key) -> bool:
        """Whether a slot of this pool will be free or idle without anything being asked for it."""
        pool = self.pools[key]
        return bool(pool.filling or pool.leaving) or any(
            self._readers[slot] or obj.state is State.RESTORING for slot, obj in pool.standing.items()
        )

    # --- books ---------------------------------------------------------------------------------

    def at(self, slot: int) -> Obj | None:
        """Whose standing copy lies in a slot; None: nobody's, or no slot of these pools."""
        return next((pool.standing.get(slot) for pool in self.pools.values() if pool.has(slot)), None)

    def copies(self) -> dict[int, Obj]:
        """Every standing copy, by slot."""
        return {slot: obj for pool in self.pools.values() for slot, obj in pool.standing.items()}

    def lost(self) -> int:
        """Slots that nothing accounts for: 0 unless there is a bug."""
        return sum(
            pool.slots - len({*pool.free, *pool.standing, *pool.filling, *pool.leaving}) for pool in self.pools.values()
        )
