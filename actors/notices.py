"""Notices that a node goes away: SIGTERM to its holder, or what the cloud publishes before it takes a spot machine.

A notice is heard once and never taken back: whoever hears it empties the node in the time that is left.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from .spec_sections import NoticeSpec

logger = logging.getLogger(__name__)

SIGTERM, SPOT, FILE = "sigterm", "spot", "file"
TIMEOUT_S = 1.0


class Notices:
    """What one holder heard. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = NoticeSpec()
        self._clock = clock
        self.heard = ""
        """What said that the node goes; "" while nothing did."""
        self._until_s = 0.0

    def leaves_in_s(self) -> float | None:
        """Seconds until the node goes; None as far as is known it stays."""
        return max(self._until_s - self._clock(), 0.0) if self.heard else None

    def hear(self, notice: str, within_s: float) -> None:
        """The node goes; the first notice counts, for what it began is not begun anew."""
        if not self.heard:
            logger.warning("this node goes in %.0f s, says %s", within_s, notice)
            self.heard, self._until_s = notice, self._clock() + within_s

    def listen_for_sigterm(self) -> None:
        """Take the first SIGTERM as a notice and live on; the second ends the process. Main thread only, else nothing is heard."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning("SIGTERM is no notice here: this is not the main thread")
            return
        before = signal.getsignal(signal.SIGTERM)

        def hear(*_: object) -> None:
            signal.signal(signal.SIGTERM, before)
            self.hear(SIGTERM, self.spec.sigterm_s)

        signal.signal(signal.SIGTERM, hear)

    async def watch(self) -> None:
        """Look again and again, until a notice was heard."""
        while not self.heard and (self.spec.url or self.spec.file):
            said = await asyncio.to_thread(self._look)
            if said is not None:
                self.hear(said, self.spec.notice_s)
            else:
                await asyncio.sleep(self.spec.look_every_s)

    def _look(self) -> str | None:
        """In a thread: which source says that the node goes."""
        if self.spec.file and Path(self.spec.file).exists():
            return FILE
        if not self.spec.url:
            return None
        request = urllib.request.Request(self.spec.url, headers=dict(self.spec.headers))  # noqa: S310 - checked by the spec
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:  # noqa: S310
                body = reply.read(64).strip().upper()
        except (urllib.error.URLError, OSError):
            return None  # a cloud answers 404 as long as the machine stays
        return None if body == b"FALSE" else SPOT
