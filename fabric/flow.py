"""The bytes-a-second budget of one holder: who may move bytes next, live requests first.

Everything that moves payload passes here before it is carried out: restores, fetches, copies between tiers,
what is written out (a drain's included), uploads and what is read again to see whether it still stands. Under a budget an effect waits for its turn, in the order by
which restores stand in line: by when the bytes are wanted. What is asked for ahead of its use is wanted
:data:`BACKGROUND_S` later, and so is what no request waits for: live requests go first and nothing waits for ever.
Without a budget everything passes at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from .arena import ArenaLayout
from .effects import Effect, ReadExtent, ScrubExtent, StartTransfer, UploadExtent, WriteExtent
from .restores import BACKGROUND_S, PATIENCE_S

BURST_S = 0.25
"""How much of a second's bytes may be moved at once after a pause."""


class Flow:
    """The effects of a holder that wait for their bytes to be due.

    ``bytes_per_s``: None is no limit. ``file_bytes``: of an extent's file.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        layout: ArenaLayout,
        file_bytes: Callable[[int], int],
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._layout = layout
        self._file_bytes = file_bytes
        self._paid_until_s = float("-inf")
        self._waiting: list[tuple[float, int, float, int, Effect]] = []
        self._count = 0
        self.moved_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def due_s(self) -> float | None:
        """When the next effect may go; None where none waits."""
        return self._paid_until_s if self._waiting else None

    def through(
        self, effects: Iterable[Effect], now: float, hurried: Mapping[int, float] = MappingProxyType({})
    ) -> list[Effect]:
        """What may be carried out now: of these, and of those that waited. ``hurried``: by when some are wanted after all."""
        if self.bytes_per_s is None:
            return list(effects)
        if hurried and self._waiting:
            self._waiting = [
                (min(wanted_s, hurried.get(_token(effect), wanted_s)), count, since_s, nbytes, effect)
                for wanted_s, count, since_s, nbytes, effect in self._waiting
            ]
            heapq.heapify(self._waiting)
        passing = []
        for effect in effects:
            nbytes = self._bytes_of(effect)
            if not nbytes:
                passing.append(effect)
                continue
            self._count += 1
            heapq.heappush(self._waiting, (_wanted_s(effect, now), self._count, now, nbytes, effect))
        while self._waiting and self._paid_until_s <= now:
            _, _, since_s, nbytes, effect = heapq.heappop(self._waiting)
            self._paid_until_s = max(self._paid_until_s, now - BURST_S) + nbytes / self.bytes_per_s
            self.moved_bytes += nbytes
            passing.append(_later(effect, now - since_s))
        return passing

    def _bytes_of(self, effect: Effect) -> int:
        """Payload that an effect moves; 0 for what moves none."""
        match effect:
            case ReadExtent():
                pools, pool_of = self._layout.pools, self._layout.pool_of
                return sum(pools[pool_of(slot)].slot_bytes for _, _, slot in effect.reads)
            case WriteExtent():
                return sum(entry.length for entry in effect.entries)
            case StartTransfer():
                return sum(pair.length for pair in effect.pairs)
            case ScrubExtent():
                return effect.nbytes
            case UploadExtent():
                return self._file_bytes(effect.extent)
        return 0


def _wanted_s(effect: Effect, now: float) -> float:
    """By when an effect's bytes are wanted."""
    wanted_s = effect.wanted_s if isinstance(effect, ReadExtent | StartTransfer) else None
    return now + PATIENCE_S + BACKGROUND_S if wanted_s is None else wanted_s


def _token(effect: Effect) -> int:
    return effect.token if isinstance(effect, ReadExtent | StartTransfer) else 0


def _later(effect: Effect, seconds: float) -> Effect:
    """The same effect, begun that much later: a transfer's time does not run while it waits for its turn."""
    return replace(effect, deadline_s=effect.deadline_s + seconds) if isinstance(effect, StartTransfer) else effect
