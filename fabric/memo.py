"""What a session lately heard of prompts: hints for a scheduler that must not wait. A holder's pin decides.

Three things are remembered, each by a digest of the token chain and for ``ttl_s`` seconds:

* the answer to a prompt, by the digest at the last position it could be resumed from: a prompt that
  is the same up to there has the same answer;
* that a position can be resumed from: a prompt that ends just behind it has a full hit;
* that a prompt is cold, by the digest of its first grid step: others that begin so are taken for cold.

Digests bear the namespace, so tenants, weights and adapters never meet here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from .identity import DIGEST_BYTES

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Remembered:
    """A resume position heard of lately, and whether anything at all matched."""

    tokens: int
    cold: bool


@dataclass(slots=True)
class ProbeMemo:
    """At most ``entries_max`` answers. ``grid_tokens``: the model's resume grid."""

    grid_tokens: int
    ttl_s: float = 2.0
    entries_max: int = 65_536
    _answers: OrderedDict[bytes, tuple[float, Remembered]] = field(default_factory=OrderedDict)
    _resumable: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    _cold: OrderedDict[bytes, float] = field(default_factory=OrderedDict)

    def recall(self, keys: bytes, n: int, now: float) -> Remembered | None:
        """What is known of a prompt of n tokens with digests ``keys`` (32 bytes each, one a grid step)."""
        last = self._last(n)
        if last == 0:
            return Remembered(0, cold=True)
        end = _digest(keys, last)
        answer = self._answers.get(end)
        if answer is not None and now < answer[0]:
            return answer[1]
        if now < self._resumable.get(end, 0.0):
            return Remembered(last * self.grid_tokens, cold=False)
        if now < self._cold.get(_digest(keys, 1), 0.0):
            return Remembered(0, cold=True)
        return None

    def learn(self, keys: bytes, n: int, tokens: int, now: float, *, cold: bool) -> None:
        """Take an answer, granted or only told; it replaces what was remembered of this prompt."""
        last = self._last(n)
        if last == 0:
            return
        until = now + self.ttl_s
        first = _digest(keys, 1)
        self._put(self._answers, _digest(keys, last), (until, Remembered(tokens, cold)))
        if tokens:
            self._put(self._resumable, _digest(keys, tokens // self.grid_tokens), until)
        if tokens < last * self.grid_tokens:
            self._resumable.pop(_digest(keys, last), None)
        if cold:
            self._put(self._cold, first, until)
        else:
            self._cold.pop(first, None)

    def wrote(self, keys: bytes, n: int) -> None:
        """This prompt was stored: what was missing may be there now."""
        for step in range(1, len(keys) // DIGEST_BYTES + 1):
            self._answers.pop(_digest(keys, step), None)
        if self._last(n):
            self._cold.pop(_digest(keys, 1), None)

    def forget(self) -> None:
        """The fabric is another one now, or its processes are."""
        self._answers.clear()
        self._resumable.clear()
        self._cold.clear()

    def __len__(self) -> int:
        return len(self._answers) + len(self._resumable) + len(self._cold)

    def _last(self, n: int) -> int:
        return max(n - 1, 0) // self.grid_tokens

    def _put(self, table: OrderedDict[bytes, T], key: bytes, value: T) -> None:
        table[key] = value
        table.move_to_end(key)
        while len(table) > self.entries_max:
            table.popitem(last=False)


def _digest(keys: bytes, step: int) -> bytes:
    return keys[(step - 1) * DIGEST_BYTES : step * DIGEST_BYTES]
