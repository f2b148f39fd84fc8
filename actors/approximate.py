"""Approximate replay: shorter than exact, for requests that say so, and never into an exact namespace.

A request with the keyword ``approximate=True`` is answered from two places: from state that was computed
approximately before, which has a namespace of its own, and from exact state, by a replay of one window only.
What its reader publishes goes to the namespace of approximate state, under the same keyword. A session
remembers what it was answered so, and refuses to publish it as exact.
"""

from __future__ import annotations

import threading

from ..fabric.checkpoints import BranchBook
from ..fabric.identity import PromptKeys
from ..fabric.kinds import FabricError
from ..fabric.model import ModelSpec
from .answer import Answer


class Approximations:
    """Where this session's prompts were resumed approximately. Thread-safe, bounded."""

    def __init__(self, model: ModelSpec) -> None:
        self._grid_tokens = model.grid_tokens
        self._resumed = BranchBook(model.grid_tokens)
        self._lock = threading.Lock()

    def answered(self, exact: PromptKeys, answer: Answer) -> None:
        """The last answer to a prompt is what its reader computes from."""
        if not answer.approximate and not len(self._resumed):
            return
        with self._lock:
            grid = exact.keys(self._grid_tokens)
            self._resumed.forget(grid)
            if answer.approximate:
                self._resumed.asked(grid, answer.tokens)

    def check(self, keys: PromptKeys) -> None:
        """Raises FabricError for a prompt that would be published as exact and was resumed approximately."""
        if keys.namespace.approximate or not len(self._resumed):
            return
        with self._lock:
            found = self._resumed.along(keys.keys(self._grid_tokens))
        if found:
            raise FabricError(
                f"tokens: this prompt was resumed at {found[-1]} from an approximate replay: publish it with"
                " approximate=True, or acquire it anew without"
            )


def begins(answer: Answer) -> int:
    """From which token a reader computes."""
    return answer.tokens if answer.replay_from is None else answer.replay_from


def better(one: Answer, other: Answer) -> Answer:
    """The answer with which less is computed, the first on a tie; the other is given up."""
    best, rest = (one, other) if begins(one) >= begins(other) else (other, one)
    rest.cancel()
    return best
