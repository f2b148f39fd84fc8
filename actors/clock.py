"""The clock that every part of a process reads, so that a rehearsal can move it.

Holders, the directory, the supervisor, sessions and leases count seconds on one of these.
"""

from __future__ import annotations

import time


class Clock:
    """Monotonic seconds: CLOCK_MONOTONIC of this host or, where ``held_at_s`` is given, a value that only :meth:`move` changes.

    A held clock makes time part of a rehearsal's script: nothing expires because a machine is slow.
    """

    __slots__ = ("_held_at_s",)

    def __init__(self, held_at_s: float | None = None) -> None:
        self._held_at_s = held_at_s

    @property
    def held(self) -> bool:
        """Whether it stands still: timers of the operating system then mean nothing."""
        return self._held_at_s is not None

    def now(self) -> float:
        return time.monotonic() if self._held_at_s is None else self._held_at_s

    def now_ns(self) -> int:
        return time.monotonic_ns() if self._held_at_s is None else int(self._held_at_s * 1e9)

    def left(self, deadline_s: float) -> float:
        """Seconds until a deadline, 0 behind it."""
        return max(deadline_s - self.now(), 0.0)

    def move(self, to_s: float) -> None:
        """Set a held clock forward. Raises ValueError for one that runs, or to move back."""
        if self._held_at_s is None or to_s < self._held_at_s:
            raise ValueError(f"clock: cannot be moved to {to_s}")
        self._held_at_s = to_s


MONOTONIC = Clock()
"""The clock of a process that is no part of a rehearsal."""
