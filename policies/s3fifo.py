"""S3-FIFO: a small first-in-first-out queue for newcomers, a main one for what was used again, a ghost of what left.

As published: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023).
Newcomers enter the small queue (a tenth of the pool), or the main one where the ghost knows them. At
the head of the small queue, what was used more than once moves to the main one and the rest leaves; at
the head of the main one, what was used goes round once more a use. The core lets nothing leave before
what rests on it, so a chain leaves from its far end here as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..fabric.eviction import Arrivals, PoolShape, Slots, Values, slots_of

SMALL_SHARE = 0.1
USES_MAX = 3
_LATER = 1e15
"""Between the places of one queue and the next in turn."""


class S3Fifo:
    """One holder's pools under S3-FIFO, by :class:`~kvfabric.fabric.eviction.Eviction`."""

    structured = True

    def __init__(self, pools: Sequence[PoolShape]) -> None:
        slots = slots_of(pools)
        self._main = np.zeros(slots, dtype=np.bool_)
        self._place = np.zeros(slots, dtype=np.int64)
        self._uses = np.zeros(slots, dtype=np.int64)
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        self._ghost_max = max(1, int(slots * (1 - SMALL_SHARE)))
        self._next = 0

    def arrived(self, arrivals: Arrivals, now_s: float) -> None:
        """The far end of a chain stands first in its queue."""
        del now_s
        known = [digest in self._ghost for digest in arrivals.digests]
        for digest, was in zip(arrivals.digests, known, strict=True):
            if was:
                del self._ghost[digest]
        self._main[arrivals.slots] = known
        self._uses[arrivals.slots] = 0
        self._enqueue(arrivals.slots[::-1])

    def used(self, slots: Slots, tick: int, now_s: float) -> None:
        del tick, now_s
        self._uses[slots] = np.minimum(self._uses[slots] + 1, USES_MAX)

    def left(self, slots: Slots, digests: Sequence[bytes], now_s: float) -> None:
        """Only what leaves the small queue is remembered."""
        del now_s
        for main, digest in zip(self._main[slots].tolist(), digests, strict=True):
            if not main:
                self._ghost[digest] = None
        while len(self._ghost) > self._ghost_max:
            self._ghost.popitem(last=False)

    def moved(self, old: int, new: int) -> None:
        for column in (self._main, self._place, self._uses):
            column[new] = column[old]

    def values(self, slots: Slots, count: int, now_s: float) -> Values:
        """Each one's place in line, with both queues moved on as far as ``count`` departures would."""
        del now_s
        small = slots[~self._main[slots]]
        promoted = small[self._uses[small] > 1]
        promoted = promoted[np.argsort(self._place[promoted])]
        self._main[promoted], self._uses[promoted] = True, 0
        self._enqueue(promoted)
        main = slots[self._main[slots]]
        self._turn(main, count)
        values = self._place[slots].astype(np.float64)
        values[self._main[slots]] += _LATER + self._uses[main] * len(slots)
        values[~self._main[slots]] += self._small_turn(slots[~self._main[slots]], len(slots))
        return values

    def _small_turn(self, small: Slots, size: int) -> Values:
        """What the small queue has beyond its share leaves before the main queue's, the rest after it."""
        beyond = max(len(small) - int(size * SMALL_SHARE), 0)
        turn = np.full(len(small), 2 * _LATER)
        turn[np.argsort(self._place[small])[:beyond]] = 0
        return turn

    def _turn(self, main: Slots, count: int) -> None:
        """Send round again what was used and stands before the next ``count`` that leave."""
        line = main[np.argsort(self._place[main])]
        leaving = np.cumsum(self._uses[line] == 0)
        passed = line[: int(np.searchsorted(leaving, count))]
        again = passed[self._uses[passed] > 0]
        self._uses[again] -= 1
        self._enqueue(again)

    def _enqueue(self, slots: Slots) -> None:
        self._place[slots] = np.arange(self._next, self._next + len(slots))
        self._next += len(slots)
