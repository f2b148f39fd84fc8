"""That a model keeps all its state where a geometry reads it, shown by running it.

Cache classes can be judged by name; a model that keeps state in its own modules cannot. A resume
from its captured cache would go on from whatever another prompt left there, without a sound. So
the model is asked once: does what follows a restored cache equal what follows the cache itself?
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .capture import capture
from .errors import UnsupportedCache
from .geometry import Geometry
from .library import decoder_config, feed, fresh_cache, quiet
from .restore import assemble

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

FOLLOWING_TOKENS = 2


def prove_complete(model: PreTrainedModel, geometry: Geometry) -> None:
    """Raise UnsupportedCache unless the model, on a cache restored from captured objects, goes on as before.

    Five short passes: a prompt of one grid step and its continuation, twice, to see how far equal
    runs differ here (not at all on a CPU); another prompt in between; the continuation of the
    restored cache. Raises what ``capture`` raises too.
    """
    position = _position(model, geometry)
    vocabulary = int(decoder_config(model.config).vocab_size)
    tokens = [(7 * i + 1) % vocabulary for i in range(position + FOLLOWING_TOKENS)]
    with quiet(), torch.no_grad():
        first = _filled(model, tokens[:position])
        objects = capture(first, geometry, position)
        right = _following(model, first, tokens)
        noise = _difference(right, _following(model, _filled(model, tokens[:position]), tokens))
        _filled(model, [(5 * i + 3) % vocabulary for i in range(position)])
        resumed = _following(model, assemble(model, geometry, position, objects), tokens)
    found = _difference(right, resumed)
    if not found <= noise:  # whatever is no number is refused too
        raise UnsupportedCache(
            f"{type(model).__name__}: after {position} tokens a restored cache goes on differently (logits differ by"
            f" {found:.3g}, equal runs by {noise:.3g}), so the model keeps state that its cache does not hold"
        )


def _position(model: PreTrainedModel, geometry: Geometry) -> int:
    """A position on the grid with at least one token behind the last compressed entry."""
    rates = (getattr(layer, "compress_rate", 1) for layer in fresh_cache(model.config).layers)
    grid = geometry.grid_tokens
    return -(-(max(rates, default=1) + 1) // grid) * grid


def _filled(model: PreTrainedModel, tokens: list[int]) -> Cache:
    cache = fresh_cache(model.config)
    feed(model, cache, torch.tensor([tokens], device=model.device), logits_to_keep=1)
    return cache


def _following(model: PreTrainedModel, cache: Cache, tokens: list[int]) -> torch.Tensor:
    """The logits of the last tokens, one step each: by then every state was read and written."""
    ids = torch.tensor([tokens[-FOLLOWING_TOKENS:]], device=model.device)
    return torch.cat([feed(model, cache, ids[:, i : i + 1]) for i in range(FOLLOWING_TOKENS)], dim=1)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max())
