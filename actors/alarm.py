"""The one timer of a process around a core: it rings when the core next wants to be woken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..transport.loop_share import LoopShare
from .clock import Clock

LATE_S_MAX = 0.05
"""It rings that late at most, however much the loop has to do."""


class Alarm:
    """Set after every step. One that is due no later than asked stays: setting a timer costs more than a step too many.

    ``share``: what is done as it rings leaves the loop to live requests for a while.
    """

    def __init__(self, clock: Clock, ring: Callable[[], None], share: LoopShare | None = None) -> None:
        self._clock = clock
        self._ring = ring
        self._share = share or LoopShare()
        self._timer: asyncio.TimerHandle | None = None
        self._in_line = False
        self._due_s = 0.0

    def set(self, due_s: float | None) -> None:
        """Ring by ``due_s`` on the process's clock; None for never. One on a clock that stands still never rings."""
        if due_s is None or self._clock.held:
            self.stop()
        elif self._timer is None or due_s < self._due_s:
            self.stop()
            self._due_s = due_s
            self._timer = asyncio.get_running_loop().call_later(self._clock.left(due_s), self._due)

    def stop(self) -> None:
        """Do not ring. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        """Ring when it is this timer's turn, or late at the latest."""
        self._timer = asyncio.get_running_loop().call_later(LATE_S_MAX, self._late)
        if not self._in_line:
            self._in_line = True
            self._share.stand(self._turn)

    def _turn(self) -> None:
        self._in_line = False
        if self._timer is not None and not self._clock.left(self._due_s):
            self.stop()
            self._ring()

    def _late(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        began = loop.time()
        self._ring()
        self._share.used(loop.time() - began)
