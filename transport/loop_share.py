"""Who may have an event loop next, where several want it: turns for what can wait, and pauses between them.

A holder's loop serves requests, and takes in what a disk has read. Each step is short, but where those of a burst
follow one another at once, every other request finds one before it. So what can wait stands in one line: what a
disk tells, a core's timer, and the requests of a connection that has more of them. They have the loop one at a
time and, while anybody else asks, it is left alone behind each for six times as long as that took: six requests
of seven find it free, and all that can wait has a seventh of it together. Where nobody else asks there are no pauses.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

LIVE_S = 0.005
"""Somebody asks for so long after the last request."""
PAUSES = 6.0
"""Length of a pause, in lengths of the turn before it."""
PAUSE_S_MAX = 0.02

Work = Callable[[], None]


class LoopShare:
    """One loop's share for what can wait. ``now``: monotonic seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last: object = None
        self._last_s = float("-inf")
        self._other_s = float("-inf")
        """When somebody else than the last asked last."""
        self._free_s = float("-inf")
        self._line: deque[tuple[Work, object]] = deque()
        self._next: asyncio.Handle | None = None

    def live(self, who: object) -> None:
        """A request of theirs is served that did not stand in line."""
        if who is not self._last:
            self._last, self._other_s = who, self._last_s
        self._last_s = self._now()

    def used(self, seconds: float) -> None:
        """What could have waited has had the loop for so long, up to this moment."""
        self._free_s = self._now() + min(PAUSES * seconds, PAUSE_S_MAX)

    def pause_s(self, who: object = None) -> float:
        """How long the loop is left to others than these; 0 where nobody else asks. ``who``: None for nobody's work."""
        now = self._now()
        asked_s = self._other_s if who is self._last and who is not None else self._last_s
        return max(self._free_s - now, 0.0) if now - asked_s <= LIVE_S else 0.0

    # --- the line ------------------------------------------------------------------------------

    def stand(self, work: Work, who: object = None) -> None:
        """Have ``work`` run once, behind all that stands in line. Whoever stands there does not stand there twice."""
        self._line.append((work, who))
        if self._next is None:
            self._wait()

    async def turn(self, work: Work) -> None:
        """Stand in line with ``work`` until it ran. Raises what it raises."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def run() -> None:
            if over.done():
                return
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised where the turn is awaited
                over.set_exception(error)
            else:
                over.set_result(None)

        self.stand(run)
        await over

    def _wait(self) -> None:
        """Look at the sockets before the next turn at least once: who asked during the last one goes first."""
        loop = asyncio.get_running_loop()
        pause_s = self.pause_s(self._line[0][1])
        if pause_s:
            self._next = loop.call_later(pause_s, self._turn)
        else:
            self._next = loop.call_soon(self._look)

    def _look(self) -> None:
        self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._next = None
        work, who = self._line[0]
        if self.pause_s(who):
            self._wait()
            return
        self._line.popleft()
        began = self._now()
        try:
            work()
        finally:
            self.used(self._now() - began)
            if self._line and self._next is None:
                self._wait()
