"""Faults of a disk, injected on purpose: for tests, scenarios and rehearsals on a running fabric."""

from __future__ import annotations

import errno
import os
import threading
import time
from enum import StrEnum

SLOW_S = 0.25


class DiskFault(StrEnum):
    """What an operation on the disk meets."""

    OPEN_FAILS = "disk_open_fails"
    FULL = "disk_full"
    READ_ONLY = "disk_read_only"
    TORN_WRITE = "disk_torn_write"
    """The write reports success, nothing after the middle of its first block is on disk."""
    READ_ERROR = "disk_read_error"
    SHORT_READ = "disk_short_read"
    FLIPPED = "disk_flipped"
    SLOW = "disk_slow"


class DiskFaults:
    """How many of the next operations meet which fault. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[DiskFault, int] = {}

    def inject(self, fault: DiskFault, times: int) -> None:
        """The next ``times`` operations meet it; 0 clears it."""
        with self._lock:
            self._left[fault] = times

    def waiting(self) -> tuple[tuple[str, int], ...]:
        """(fault, operations that will still meet it) of all that were ever injected."""
        with self._lock:
            return tuple((str(fault), left) for fault, left in self._left.items())

    def meets(self, fault: DiskFault) -> bool:
        """Whether this operation meets the fault; uses one up."""
        if not self._left:
            return False
        with self._lock:
            left = self._left.get(fault, 0)
            if left:
                self._left[fault] = left - 1
            return left > 0

    def raise_for(self, fault: DiskFault) -> None:
        """Raise the OSError that this fault is, if the operation meets it."""
        code = {
            DiskFault.OPEN_FAILS: errno.EIO,
            DiskFault.FULL: errno.ENOSPC,
            DiskFault.READ_ONLY: errno.EROFS,
            DiskFault.READ_ERROR: errno.EIO,
        }[fault]
        if self.meets(fault):
            raise OSError(code, os.strerror(code))

    def delay(self) -> None:
        """Take a while, if the operation meets a slow disk."""
        if self.meets(DiskFault.SLOW):
            time.sleep(SLOW_S)
