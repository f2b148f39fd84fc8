"""Wake-ups of a core: a heap of what is to run when, driven by the ``now`` of its events.

Most wake-ups are time-outs of what ends long before them. So one that is cancelled lets go of what it
would have called at once, and leaves the heap when cancelled ones are half of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

CANCELLED_MIN = 64


class Wake:
    """One wake-up. Dropping it changes nothing; :meth:`cancel` does. It must tolerate being late."""

    __slots__ = ("_wakes", "call")

    def __init__(self, wakes: Wakes, call: Callable[[], None]) -> None:
        self._wakes = wakes
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Never run it. Idempotent, and of no effect once it ran."""
        if self.call is not None:
            self.call = None
            self._wakes.cancelled += 1


class Wakes:
    """All wake-ups of one core."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Wake]] = []
        self.cancelled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, at_s: float, number: int, call: Callable[[], None]) -> Wake:
        """Have ``call`` run by the first :meth:`run_due` at or after ``at_s``; ``number`` orders equal times."""
        if self.cancelled > CANCELLED_MIN + len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].call is not None]
            heapq.heapify(self._heap)
            self.cancelled = 0
        wake = Wake(self, call)
        heapq.heappush(self._heap, (at_s, number, wake))
        return wake

    def run_due(self, now: float) -> None:
        """Run what is due, also what is made due meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            _, _, wake = heapq.heappop(self._heap)
            call, wake.call = wake.call, None
            if call is None:
                self.cancelled -= 1
            else:
                call()

    @property
    def next_s(self) -> float | None:
        """When the first one is due; None without any."""
        while self._heap and self._heap[0][2].call is None:
            heapq.heappop(self._heap)
            self.cancelled -= 1
        return self._heap[0][0] if self._heap else None
