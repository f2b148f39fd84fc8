"""Who may have an event loop next, where several want it: short turns, and pauses in between.

A holder's loop serves requests and takes in what a disk has read. Each step is short, but where those of a burst
follow one another at once, every other request finds one before it. So a step in the background, and the turn
of a connection that has more requests waiting, are followed by a pause of three times their length while
anybody else asks: three requests of four find the loop free, and the burst gets a quarter of it. Where nobody
else asks there is no pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LIVE_S = 0.005
"""Somebody asks for so long after the last request."""
PAUSES = 3.0
"""Length of a pause, in lengths of the step before it."""
PAUSE_S_MAX = 0.02
STEP_S_MIN = 0.0001
"""Shorter steps need no pause."""


class LoopShare:
    """One loop's share for the background, and for each connection. ``now``: monotonic seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last: object = None
        self._last_s = float("-inf")
        self._other_s = float("-inf")
        """When somebody else than the last asked last."""
        self._free_s = float("-inf")

    def live(self, who: object) -> None:
        """A request of theirs is being served."""
        if who is not self._last:
            self._last, self._other_s = who, self._last_s
        self._last_s = self._now()

    def pause_after(self, seconds: float, who: object = None) -> float:
        """How long they leave the loop to others, having had it so long up to this moment. ``who``: None in the background."""
        asked_s = self._other_s if who is self._last and who is not None else self._last_s
        if seconds < STEP_S_MIN or self._now() - asked_s > LIVE_S + seconds:
            return 0.0
        return min(PAUSES * seconds, PAUSE_S_MAX)

    def used(self, seconds: float) -> None:
        """The background has had the loop for so long, up to this moment."""
        self._free_s = self._now() + self.pause_after(seconds)

    @property
    def pause_s(self) -> float:
        """How long the background still leaves the loop alone; 0 if it need not."""
        now = self._now()
        return max(self._free_s - now, 0.0) if now - self._last_s <= LIVE_S else 0.0
