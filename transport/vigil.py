"""Waiting awake for a moment before sleeping: a core that slept runs the same code two to six times as slowly.

Who expects something within microseconds polls for it, a bounded time: a client for its reply, a holder for the
next request of whoever it has just served. Whether that pays is learned: a wait in vain, or one that had its core
taken away meanwhile, is followed by one that sleeps at once, then by 3, by 7, by at most :data:`ASLEEP_MAX`. So rare
requests, long ones and machines without a free core cost little.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

AWAKE_S = 0.0
"""How long a wait stays awake, where nobody says otherwise: it takes cores that others may need."""
ASLEEP_MAX = 63
TAKEN_S = 0.00005
"""Two looks so far apart had somebody else on the core in between."""


class Vigil:
    """Whether the next wait stays awake, by how the last ones went. ``awake_s``: how long at most; 0 never."""

    def __init__(self, awake_s: float = AWAKE_S, now: Callable[[], float] = time.monotonic) -> None:
        self.awake_s = awake_s
        self.now = now
        self._asleep = 0
        """So many waits sleep at once before one stays awake again."""
        self._after_vain = 0

    def begins(self) -> bool:
        """Whether this wait stays awake; if so, tell how it :meth:`ended`."""
        if self._asleep or not self.awake_s:
            self._asleep = max(self._asleep - 1, 0)
            return False
        return True

    def ended(self, *, in_time: bool) -> None:
        """A wait was over in time, or in vain."""
        self._after_vain = 0 if in_time else min(2 * self._after_vain + 1, ASLEEP_MAX)
        self._asleep = self._after_vain

    def wait(self, ready: Callable[[], object]) -> bool:
        """Poll until it is ready, if this wait stays awake, and no longer than it may. Whether it is known to be ready."""
        if not self.begins():
            return False
        looked_s = self.now()
        until_s, alone = looked_s + self.awake_s, True
        while not ready():
            now_s = self.now()
            alone = alone and now_s - looked_s < TAKEN_S
            looked_s = now_s
            if now_s >= until_s:
                self.ended(in_time=False)
                return False
        self.ended(in_time=alone and self.now() - looked_s < TAKEN_S)
        return True


class LoopVigil:
    """An event loop that stays awake for a while after a request. ``busy``: whether threads need the process meanwhile.

    It polls all its sockets as ever; it only does not sleep in between.
    """

    def __init__(self, vigil: Vigil, busy: Callable[[], bool] = lambda: False) -> None:
        self._vigil = vigil
        self._busy = busy
        self._until_s: float | None = None
        """While awake: how long yet."""

    def served(self) -> None:
        """A request was served; whoever sent it may well send the next."""
        vigil = self._vigil
        if self._until_s is not None:
            vigil.ended(in_time=True)
        elif not vigil.begins():
            return
        else:
            asyncio.get_running_loop().call_soon(self._look)
        self._until_s = vigil.now() + vigil.awake_s

    def _look(self) -> None:
        if self._until_s is None:
            return
        if self._busy():
            self._until_s = None
        elif self._vigil.now() < self._until_s:
            asyncio.get_running_loop().call_soon(self._look)
        else:
            self._until_s = None
            self._vigil.ended(in_time=False)
