"""A bytes-a-second budget that the threads of one process share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 0.25
"""How much of a second's bytes may be moved at once after a pause."""


class Budget:
    """Takes bytes from a bucket that fills at ``bytes_per_s``; None is no limit. Thread-safe."""

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_until_s = clock() - BURST_S

    def wait_s(self, nbytes: int) -> float:
        """Charge ``nbytes`` and say how long to wait before moving them: first come, first served."""
        if self.bytes_per_s is None:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(self._paid_until_s, now - BURST_S)
            self._paid_until_s = start + nbytes / self.bytes_per_s
            return max(start - now, 0.0)

    def take(self, nbytes: int, cancelled: threading.Event) -> bool:
        """Wait until ``nbytes`` may be moved; False where ``cancelled`` was set first."""
        delay = self.wait_s(nbytes)
        return not cancelled.wait(delay) if delay else not cancelled.is_set()
