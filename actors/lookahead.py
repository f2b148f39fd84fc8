"""A session's look-ups for schedulers: answers at once or not at all, and many in one round trip."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..fabric.identity import PromptKeys
from ..fabric.kinds import Status
from ..fabric.memo import Remembered, SegmentMemo
from ..fabric.messages import Acquire, Prompt
from ..fabric.messages import Answer as WireAnswer
from ..fabric.model import ModelSpec

ASKING_MAX = 64
THREADS = 2


class Lookahead:
    """What a session lately heard, and the questions it asks in the background. Thread-safe.

    ``ask`` probes with what a question says and never raises for what may happen to a cache.
    """

    def __init__(self, model: ModelSpec, ask: Callable[[Acquire], WireAnswer]) -> None:
        self._ask = ask
        self._memo = SegmentMemo(model)
        self._lock = threading.Lock()
        self._asking: dict[bytes, bytes] = {}
        """The first anchor of each question under way, by what names the question."""
        self._outdated: set[bytes] = set()
        """Questions under way whose answers are no news: something was stored, or holders were replaced, meanwhile."""
        self._threads: ThreadPoolExecutor | None = None

    def recall(self, question: Acquire) -> Remembered | None:
        """What is known now; where nothing is, the question is on its way, unless too many are."""
        wide = question.prompt.keys[0][1]
        name = wide[-32:]
        with self._lock:
            known = self._memo.recall(question.prompt, question.abis, question.readers, time.monotonic())
            if known is not None:
                return known
            if name in self._asking or len(self._asking) >= ASKING_MAX:
                return None
            self._asking[name] = wide[:32]
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvfabric-lookahead")
            self._threads.submit(self._in_background, question, name)
        return None

    def _in_background(self, question: Acquire, name: bytes) -> None:
        try:
            reply = self._ask(question)
            with self._lock:
                if name not in self._outdated:
                    self._memo.learn(question.prompt, reply, time.monotonic())
        finally:
            with self._lock:
                self._asking.pop(name, None)
                self._outdated.discard(name)

    def granted(self, question: Acquire, reply: WireAnswer) -> None:
        """An acquire was answered: by what its holder pinned, not by hints."""
        if reply.status is Status.PENDING or not len(self._memo):
            return
        with self._lock:
            prompt, tokens = question.prompt, reply.tokens
            self._memo.granted(prompt, question.abis, question.readers, tokens, time.monotonic())

    def wrote(self, prompt: Prompt) -> None:
        """The session stored something of this prompt."""
        anchor = prompt.keys[0][1][:32]
        with self._lock:
            self._outdated.update(name for name, first in self._asking.items() if first == anchor)
            self._memo.drop(prompt)

    def forget(self) -> None:
        """Holders were replaced: what was heard is of other processes."""
        with self._lock:
            self._outdated.update(self._asking)
            self._memo.forget()

    def close(self) -> None:
        """Ask nothing more."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)


def in_turn(ask: Callable[[PromptKeys], WireAnswer], prompts: Sequence[PromptKeys]) -> list[WireAnswer]:
    """One after another: what is left where a batch cannot be asked at once."""
    return [ask(keys) for keys in prompts]
