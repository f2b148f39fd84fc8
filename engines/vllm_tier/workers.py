"""Threads that take jobs in turn. A job costs one hand-over: no future, no executor, a tenth of a millisecond less."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class Workers:
    """So many threads behind one queue. What is queued when they are ended is done first; what raises is logged."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._state = threading.Condition()
        self._under_way = 0
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()
        atexit.register(self.shutdown)  # a process that ends without telling loses nothing either

    def __len__(self) -> int:
        """Jobs that have not ended."""
        return self._under_way

    def submit(self, work: Work) -> None:
        """Queue it; returns at once."""
        with self._state:
            self._under_way += 1
        self._queue.put(work)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                # A thread that died of one job's bug would never take the others.
                logger.exception("kvfabric: a job failed by a bug")
            with self._state:
                self._under_way -= 1
                if not self._under_way:
                    self._state.notify_all()

    def drain(self) -> None:
        """Wait until everything that was submitted has ended."""
        with self._state:
            self._state.wait_for(lambda: not self._under_way)

    def shutdown(self) -> None:
        """Do what is queued, then end the threads. Idempotent; nothing may be submitted afterwards."""
        atexit.unregister(self.shutdown)
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
