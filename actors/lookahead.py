"""A session's look-ups for schedulers: answers at once or not at all, and many in one round trip."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..fabric.identity import PromptKeys
from ..fabric.kinds import Status
from ..fabric.memo import ProbeMemo, Remembered
from ..fabric.messages import Answer as WireAnswer

ASKING_MAX = 64
THREADS = 2

Ask = Callable[[PromptKeys], WireAnswer]


class Lookahead:
    """What a session lately heard, and the questions it asks in the background. Thread-safe.

    ``ask`` probes one prompt and never raises for what may happen to a cache.
    """

    def __init__(self, grid_tokens: int, ask: Ask) -> None:
        self._grid_tokens = grid_tokens
        self._ask = ask
        self._memo = ProbeMemo(grid_tokens)
        self._lock = threading.Lock()
        self._asking: set[bytes] = set()
        self._threads: ThreadPoolExecutor | None = None

    def recall(self, keys: PromptKeys) -> Remembered | None:
        """What is known now; where nothing is, a question is on its way, unless too many are."""
        grid = keys.keys(self._grid_tokens)
        with self._lock:
            known = self._memo.recall(grid, len(keys), time.monotonic())
            if known is not None:
                return known
            name = grid[-32:]
            if name in self._asking or len(self._asking) >= ASKING_MAX:
                return None
            self._asking.add(name)
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvfabric-lookahead")
            self._threads.submit(self._in_background, keys, name)
        return None

    def _in_background(self, keys: PromptKeys, name: bytes) -> None:
        try:
            self.heard(keys, self._ask(keys))
        finally:
            with self._lock:
                self._asking.discard(name)

    def heard(self, keys: PromptKeys, reply: WireAnswer) -> None:
        """Remember what a probe or an acquire was told: a grant shorter than was remembered corrects it."""
        if reply.status is Status.PENDING:
            return
        cold = reply.status is Status.MISS and reply.cause is None
        grid = keys.keys(self._grid_tokens)
        with self._lock:
            self._memo.learn(grid, len(keys), reply.tokens, time.monotonic(), cold=cold)

    def wrote(self, keys: PromptKeys) -> None:
        """The session stored something of this prompt."""
        with self._lock:
            self._memo.wrote(keys.keys(self._grid_tokens), len(keys))

    def forget(self) -> None:
        """Holders were replaced: what was heard is of other processes."""
        with self._lock:
            self._memo.forget()

    def close(self) -> None:
        """Ask nothing more."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)


def in_turn(ask: Ask, prompts: Sequence[PromptKeys]) -> list[WireAnswer]:
    """One after another: what is left where a batch cannot be asked at once."""
    return [ask(keys) for keys in prompts]
