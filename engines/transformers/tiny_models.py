"""Tiny random models of five real families, the same bit for bit in every process and host.

Weights come from a counter-based generator keyed by family, seed and tensor name, as integers
scaled by one constant: no library's initialisation, order of construction, thread count or vector
unit has a say. They are drawn wider than the library's 0.02: at width 32 that would multiply a
normalised vector by 0.1, 0.25 does by 1.4, as 0.02 does at width 4,096. What the library zeroes
(position biases, attention sinks, the hash router's table) is drawn too. In a model whose weights
hardly matter a broken cache would hardly show.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from .library import quiet, require

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 256
WEIGHT_STD = 0.25

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,  # tied random embeddings mostly repeat the last token
    "attn_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _deepseek_v4(transformers: Any) -> PreTrainedConfig:
    compressed = ["compressed_sparse_attention", "heavily_compressed_attention"]
    config: PreTrainedConfig = transformers.DeepseekV4Config(
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        head_dim=16,
        q_lora_rank=16,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=["sliding_attention", *compressed, *compressed],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        mlp_layer_types=["hash_moe", *["moe"] * 4],
        hc_mult=2,
        hc_sinkhorn_iters=4,
        sliding_window=16,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=6,
        partial_rotary_factor=0.5,
        **_COMMON,
    )
    return config


def _gemma3(transformers: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = transformers.Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=1,  # sharp attention: one row of a window can matter
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        **_COMMON,
    )
    return config


def _gpt_oss(transformers: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = transformers.GptOssConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        **_COMMON,
    )
    return config


def _deepseek_v3_2(transformers: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = transformers.DeepseekV32Config(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_topk=16,
        index_head_dim=16,
        index_n_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **_COMMON,
    )
    return config


def _qwen3_next(transformers: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = transformers.Qwen3NextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        **_COMMON,
    )
    return config


_CONFIGS: dict[str, tuple[Callable[[Any], PreTrainedConfig], str]] = {
    "deepseek_v4": (_deepseek_v4, "DeepseekV4ForCausalLM"),
    "gemma3": (_gemma3, "Gemma3ForCausalLM"),
    "gpt_oss": (_gpt_oss, "GptOssForCausalLM"),
    "deepseek_v3_2": (_deepseek_v3_2, "DeepseekV32ForCausalLM"),
    "qwen3_next": (_qwen3_next, "Qwen3NextForCausalLM"),
}

FAMILIES = tuple(_CONFIGS)
"""The families that :func:`build` knows."""


def build(family: str, seed: int = 0) -> tuple[PreTrainedModel, PreTrainedConfig]:
    """A tiny model of that family on the CPU in float32, in evaluation mode, and its config.

    Equal arguments give bit-identical weights everywhere. Raises ValueError for an unknown family
    and MissingExtra if transformers is not installed.
    """
    if family not in _CONFIGS:
        raise ValueError(f"model {family!r} is not one of {', '.join(FAMILIES)}")
    make_config, class_name = _CONFIGS[family]
    transformers = require()
    with quiet(), torch.random.fork_rng(devices=[]):
        config = make_config(transformers)
        model: PreTrainedModel = getattr(transformers, class_name)(config)
    model.train(False).requires_grad_(False)
    for name, tensor in _tensors(model):
        _draw(tensor, name, _generator(family, seed, name))
    return model, config


def fine_tuned(model: PreTrainedModel, *, seed: int = 0, fraction: float = 0.01) -> PreTrainedModel:
    """A copy whose every weight moved by up to ``fraction`` of its tensor's largest magnitude."""
    tuned: PreTrainedModel = copy.deepcopy(model)
    for name, tensor in _tensors(tuned):
        if tensor.is_floating_point():
            step = _uniform(_generator("fine-tune", seed, name), tensor.shape)
            tensor.add_(step, alpha=fraction * float(tensor.abs().max()))
    return tuned


def prompt(seed: int, tokens: int) -> list[int]:
    """Random token ids of the tiny models' vocabulary: a fixed function of ``seed``, of any length."""
    draws = _generator("prompt", seed, "").random_raw(tokens)
    return [int(draw) % VOCABULARY for draw in draws]


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, shared ones once, and the buffers that a checkpoint holds."""
    yield from model.named_parameters()
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer


def _generator(*key: str | int) -> np.random.Philox:
    digest = blake3("\x00".join(map(str, key)).encode(), derive_key_context="kvfabric 2026 tiny model").digest(16)
    return np.random.Philox(key=int.from_bytes(digest, "little"))


def _uniform(generator: np.random.Philox, shape: torch.Size) -> torch.Tensor:
    """Exact multiples of 2**-23 in [-1, 1)."""
    draws: npt.NDArray[np.uint64] = generator.random_raw(max(1, shape.numel())) >> np.uint64(40)
    values = (draws.astype(np.float32) - np.float32(1 << 23)) / np.float32(1 << 23)
    return torch.from_numpy(values[: shape.numel()]).reshape(shape)


def _draw(tensor: torch.Tensor, name: str, generator: np.random.Philox) -> None:
    """Fill one tensor by its name and rank."""
    if not tensor.is_floating_point():  # the hash router's table of experts a token
        table = (generator.random_raw(tensor.numel()) % 4).astype(np.int64)
        tensor.copy_(torch.from_numpy(table).reshape(tensor.shape))
        return
    noise = _uniform(generator, tensor.shape)
    leaf = name.rpartition(".")[2]
    if leaf in {"position_bias", "sinks"}:
        tensor.copy_(noise * 2.0)
    elif leaf == "A_log":  # decay rates between e**-1 and e: some states forget, some remember
        tensor.copy_(noise)
    elif tensor.dim() >= 2:
        tensor.copy_(noise * (WEIGHT_STD * math.sqrt(3.0)))
    else:  # gains and biases: around the constant the library sets
        base = tensor.reshape(-1)[0].clone()
        if not bool((tensor == base).all()):
            base = torch.zeros(())
        tensor.copy_(base + noise * 0.1)
