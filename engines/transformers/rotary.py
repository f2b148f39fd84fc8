"""Which channels of which cached tensor are rotated, and how the rotated pairs lie.

Two caches of equal shape and dtype differ in this alone: an indexer whose keys bear another
rotation changed 124 of 128 tokens, and no shape check sees it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from .library import decoder_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Pairs(StrEnum):
    """How the two channels of one rotated pair lie."""

    INTERLEAVED = "interleaved"  # (0, 1), (2, 3), ...
    HALVES = "halves"  # (0, n / 2), (1, n / 2 + 1), ...


@dataclass(frozen=True, slots=True)
class Rotation:
    """Channels [start, stop) of a tensor's last axis are rotated, in pairs."""

    pairs: Pairs
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.pairs}[{self.start}:{self.stop}]"


def rotations(config: PreTrainedConfig) -> dict[str, Rotation]:
    """The rotated tensors of a model's cache, by part name; what is absent is not rotated.

    Empty for a family whose convention is not known here: its passport then names the family.
    """
    decoder: Any = decoder_config(config)
    match decoder.model_type:
        case "deepseek_v4":
            rope, head, index = decoder.qk_rope_head_dim, decoder.head_dim, decoder.index_head_dim
            trailing = Rotation(Pairs.INTERLEAVED, head - rope, head)
            return {
                "keys": trailing,
                "compressed_kv.compressor": trailing,
                "compressed_kv.indexer": Rotation(Pairs.INTERLEAVED, index - rope, index),
            }
        case "deepseek_v32":  # the latent (keys) is not rotated; its rotary part is stored as values
            leading = Rotation(Pairs.HALVES, 0, decoder.qk_rope_head_dim)
            return {"values": leading, "indexer_keys": leading}
        case "gemma3_text" | "gpt_oss":
            return {"keys": Rotation(Pairs.HALVES, 0, decoder.head_dim)}
        case "qwen3_next":
            factor = decoder.rope_parameters["partial_rotary_factor"]
            return {"keys": Rotation(Pairs.HALVES, 0, int(decoder.head_dim * factor))}
        case _:
            return {}


def rotary_convention(config: PreTrainedConfig, tensors: frozenset[str]) -> str:
    """The convention of those tensors in one line: pairs and channels of each, bases and scaling.

    Empty if none of them is rotated.
    """
    decoder: Any = decoder_config(config)
    known = rotations(config)
    parameters = json.dumps(getattr(decoder, "rope_parameters", None), sort_keys=True, default=str)
    digest = blake3(parameters.encode(), derive_key_context="kvfabric 2026 rotary parameters").hexdigest(8)
    if not known:
        return f"as {decoder.model_type} parameters {digest}"
    rotated = [f"{name}:{known[name]}" for name in sorted(tensors & known.keys())]
    return " ".join([*rotated, f"parameters {digest}"]) if rotated else ""
