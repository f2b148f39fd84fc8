"""The spill desk: lets what will soon make room lie in host memory as well, so that eviction loses nothing that fits there.

A slot is wanted at once and a copy takes time, so copies are made ahead: of the least worth of a pool that is nearly full,
as many as will leave next. What has a copy falls back to it when it makes room, by the same path as every eviction; what
has none is gone. Nothing is copied that is worth less than what would have to leave host memory for it, and never
more at a time than ``AT_WORK_MAX``; under a byte budget these copies go last.
"""

from __future__ import annotations

from .context import HolderContext
from .ladder import HostDesk
from .objects import Obj
from .pools import Key, Pool

AT_WORK_MAX = 64


class SpillDesk:
    """Copies down ahead of eviction, where there is host memory below the readers' pools."""

    def __init__(self, ctx: HolderContext, host: HostDesk) -> None:
        self.ctx = ctx
        self.host = host
        self._looked: dict[Key, int] = {}
        """By pool: how many victims there had been at the last look."""

    def look(self) -> None:
        """After a step: see to every pool that is nearly full and has lost a good part of what was copied."""
        share, books = self.ctx.config.spill_share, self.ctx.books
        if not share or not self.host.pools.pools or self.ctx.draining:
            return
        for key, pool in books.pools.items():
            ahead = max(1, int(share * pool.capacity))
            due = self._looked.get(key, -ahead) + max(1, ahead // 2)
            if key in self.host.pools.pools and pool.unused < ahead and books.victims >= due:
                self._looked[key] = books.victims
                self._copy(key, pool, ahead)

    def _copy(self, key: Key, pool: Pool, count: int) -> None:
        books, below = self.ctx.books, self.host.pools
        least = [obj for obj in books.leaving.least_worth(pool, count) if not obj.on_a_tier and not obj.first_out]
        least = least[: max(0, AT_WORK_MAX - self.host.at_work)]
        free = len(below.pools[key].free)
        leaving = (below.worth.get(slot, float("inf")) for slot in below.idle(key))
        copied, worths = list[Obj](), list[float]()
        for obj, worth in sorted(zip(least, books.worths(least), strict=True), key=lambda pair: -pair[1]):
            if free <= 0 and worth <= next(leaving, float("inf")):
                break
            free -= 1
            copied.append(obj)
            worths.append(worth)
        if copied:
            self.ctx.counters["spilled_objects"] += len(copied)
            self.host.copy_ahead(copied, worths)
