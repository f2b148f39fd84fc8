"""The readers' pools: one a group and shard, its free slots, and the slab that it is giving away.

::

    free      for whoever comes
    closed    free, in the slab that is being emptied: for nobody, unless nothing else is left
    owned     an object's
    away      in slabs that other pools have

free + closed + owned = capacity, and capacity + away = slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .arena import ArenaLayout

Key = tuple[int, int]
"""Group and shard."""


@dataclass(slots=True)
class Pool:
    """The slots of one group and shard: ``first`` .. ``first + slots``, ``away`` of them in other pools' slabs."""

    group: int
    shard: int
    first: int
    slots: int
    free: list[int]
    evictable: int = 0
    away: int = 0
    closed: list[int] = field(default_factory=list)
    closing: range = range(0)
    """The slots of the slab that is being emptied."""

    @property
    def capacity(self) -> int:
        """Slots that it has, used or not."""
        return self.slots - self.away

    @property
    def unused(self) -> int:
        return len(self.free) + len(self.closed)

    @property
    def used(self) -> int:
        return self.capacity - self.unused

    @property
    def room(self) -> int:
        """Slots that an object could have: giving a slab away is put off before anyone is refused for it."""
        return self.unused + self.evictable

    def give_back(self, slot: int) -> None:
        """A slot is nobody's any more."""
        (self.closed if slot in self.closing else self.free).append(slot)

    def give_back_all(self, slots: Sequence[int]) -> None:
        """:meth:`give_back` of many, in this order."""
        if not self.closing:
            self.free.extend(slots)
            return
        for slot in slots:
            self.give_back(slot)

    def take(self, slot: int) -> None:
        """This very slot, which is free. Raises ValueError where it is not."""
        if slot in self.closing:
            self.reopen()
        self.free.remove(slot)

    def close(self, slots: range) -> None:
        """Let nobody have a free slot of these from here on."""
        self.closing = slots
        self.closed = [slot for slot in self.free if slot in slots]
        self.free = [slot for slot in self.free if slot not in slots]

    def reopen(self) -> None:
        """The slab stays."""
        self.free += self.closed
        self.closed, self.closing = [], range(0)


def readers_pools(layout: ArenaLayout) -> dict[Key, Pool]:
    """The pools that readers read from, with every slot free."""
    pools = {}
    for first, pool in zip(layout.first_slot, layout.pools, strict=True):
        if pool.tier is layout.readers_tier:
            free = list(range(first + pool.slots - 1, first - 1, -1))
            pools[pool.group, pool.shard] = Pool(pool.group, pool.shard, first, pool.slots, free)
    return pools
