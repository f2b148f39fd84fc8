"""Whose each slab is: the readers' memory as one area that the pools share, a slab at a time.

A slab changes hands only empty, whole and re-headered: none of its slots is owned (so nothing there is pinned, frozen,
leased, in quarantine or on its way), and with it every header of its giver's slots there says ELSEWHERE under a new
version, every header of its taker's FREE under a new one. Versions are counted by slot, and a slot number stays
its pool's: none comes twice, and whoever still holds a version of before is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .arena import Arena, SlotState
from .kinds import ProtocolError
from .pools import Key, Pool


class SlabBook:
    """The slabs of one holder. Without slabs every pool has its own range, and there is nothing here."""

    def __init__(self, arena: Arena, pools: Mapping[Key, Pool], shares: Sequence[int] = ()) -> None:
        """``shares``: how many slabs each pool has at first, in the pools' order; evenly where nobody says."""
        layout = arena.layout
        self.arena = arena
        self.pools = pools
        self.owner: list[Key] = []
        """By slab: whose it is."""
        if not layout.slabs:
            return
        keys = list(pools)
        given = list(shares) or [layout.slabs // len(keys) + (i < layout.slabs % len(keys)) for i in range(len(keys))]
        if len(given) != len(keys) or sum(given) != layout.slabs or min(given) < 1:
            raise ProtocolError(f"slabs: {given} are no shares of {layout.slabs} slabs for {len(keys)} pools")
        for key, count in zip(keys, given, strict=True):
            self.owner += [key] * count
        for key, pool in pools.items():
            mine = [slot for slab, owner in enumerate(self.owner) if owner == key for slot in self.slots(key, slab)]
            pool.free = mine[::-1]
            pool.away = pool.slots - len(mine)
            away = np.setdiff1d(np.arange(pool.first, pool.first + pool.slots), np.array(mine, dtype=np.int64))
            arena.states[away] = SlotState.ELSEWHERE

    def __len__(self) -> int:
        return len(self.owner)

    def slots(self, key: Key, slab: int) -> range:
        """A pool's slots in a slab, whoever has it."""
        pool = self.pools[key]
        size = pool.slots // len(self.owner)
        return range(pool.first + slab * size, pool.first + (slab + 1) * size)

    def of(self, key: Key) -> list[int]:
        """The slabs that a pool has."""
        return [slab for slab, owner in enumerate(self.owner) if owner == key]

    def has(self, key: Key, slot: int) -> bool:
        """Whether a slot of a pool lies in a slab that the pool has."""
        pool = self.pools[key]
        if not self.owner:
            return True
        return self.owner[(slot - pool.first) // (pool.slots // len(self.owner))] == key

    def hand_over(self, slab: int, taker: Key) -> None:
        """An empty slab that its pool has closed is another pool's from here on. Raises ProtocolError for any other."""
        key = self.owner[slab]
        giver, leaving = self.pools[key], self.slots(key, slab)
        if giver.closing != leaving or len(giver.closed) != len(leaving):
            raise ProtocolError(f"slab {slab} is not empty: it cannot be given away")
        giver.closed, giver.closing = [], range(0)
        giver.away += len(leaving)
        self.arena.vacate_all(np.array(leaving, dtype=np.int64), SlotState.ELSEWHERE)
        coming = self.slots(taker, slab)
        self.owner[slab] = taker
        self.arena.vacate_all(np.array(coming, dtype=np.int64), SlotState.FREE)
        self.pools[taker].away -= len(coming)
        self.pools[taker].free += reversed(coming)
