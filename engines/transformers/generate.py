"""Prefill in chunks, then decode greedily, keeping the logits of every step.

Two runs can be compared bit for bit only if they cut the tokens into the same chunks, before the
resume position too: a matrix product over another number of rows may round differently, and the
cache keeps what was rounded. So the cuts are an argument.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .library import feed, fresh_cache, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Generation:
    """What a run produced.

    ``start``: tokens that the cache held already. ``chunk_ends``: where each prefill chunk ended.
    ``logits``: one tensor [tokens of the step, vocabulary] a chunk, then one a decode step.
    ``tokens``: the decoded ids. ``first_token_s``: seconds to the first of them. ``cache`` holds
    every token that was fed: all but the last decoded one.
    """

    start: int
    chunk_ends: tuple[int, ...]
    logits: tuple[torch.Tensor, ...]
    tokens: tuple[int, ...]
    first_token_s: float
    cache: Cache

    def logits_from(self, position: int) -> tuple[torch.Tensor, ...]:
        """The logits of the chunks from ``position`` on and of every decode step.

        Raises ValueError unless a chunk begins at ``position``: such a run cannot be compared.
        """
        if position not in (self.start, *self.chunk_ends[:-1]):
            raise ValueError(f"position {position}: no chunk begins there ({self.start}, ends {self.chunk_ends})")
        return self.logits[sum(1 for end in self.chunk_ends if end <= position) :]


def generate(
    model: PreTrainedModel,
    tokens: Sequence[int],
    *,
    cuts: Iterable[int] = (),
    decode_tokens: int = 32,
    cache: Cache | None = None,
    start: int = 0,
    after_chunk: Callable[[int, Cache], None] | None = None,
) -> Generation:
    """Feed ``tokens[start:]`` in chunks that end at each of ``cuts`` and at the end, then decode.

    ``cache`` holds the first ``start`` tokens already and is used up; without one the run begins
    at 0. Cuts at or before ``start`` or behind the last token are ignored. ``after_chunk(p, cache)``
    is called when the cache stands at p, before anything else is fed: the moment to capture.

    Raises ValueError if nothing is left to feed, or if ``start`` and ``cache`` do not go together.
    """
    if (cache is None) != (start == 0):
        raise ValueError(f"start {start}: a cache that holds the tokens before it is needed, and only then")
    if not start < len(tokens):
        raise ValueError(f"start {start}: at least one of the {len(tokens)} tokens must be computed")
    ends = (*sorted({cut for cut in cuts if start < cut < len(tokens)}), len(tokens))
    held = fresh_cache(model.config) if cache is None else cache
    logits: list[torch.Tensor] = []
    decoded: list[int] = []
    began = time.perf_counter()
    with quiet(), torch.no_grad():
        for begin, end in zip((start, *ends), ends, strict=False):
            logits.append(_step(model, held, tokens[begin:end]))
            if after_chunk is not None:
                after_chunk(end, held)
        decoded.append(int(logits[-1][-1].argmax()))
        first_token_s = time.perf_counter() - began
        while len(decoded) < decode_tokens:
            logits.append(_step(model, held, decoded[-1:]))
            decoded.append(int(logits[-1][-1].argmax()))
    return Generation(start, ends, tuple(logits), tuple(decoded), first_token_s, held)


def _step(model: PreTrainedModel, cache: Cache, tokens: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
    return feed(model, cache, ids)[0]


def same_logits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether two runs agree bit for bit, step by step."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def tokens_wrong(right: Sequence[int], given: Sequence[int]) -> int:
    """In how many places the decoded tokens differ from the right ones."""
    return sum(1 for a, b in zip(right, given, strict=True) if a != b)
