"""Cache groups from a Hugging Face ``config.json``, for the families whose rules are known.

The rules of each family as transformers and vLLM implement them; bytes as the presets have them:
bf16 rows unless the config says otherwise, DeepSeek's own fp8 rows for its latent attention.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import lcm
from pathlib import Path
from typing import Any

from .kinds import SpecError
from .model import ModelSpec
from .presets import group_of_layers

BLOCK_TOKENS = 16
SNAPSHOT_TOKENS = 2048
"""Tokens between checkpoints of recurrent state, where a config leaves them to the engine."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KV_ALIGNMENT_BYTES = 16

_V4_PADDING_BYTES = 576
_V4_LAYERS = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}

Groups = list[dict[str, Any]]


class _Config:
    """One config.json with errors that name the field."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def whole(self, field: str, default: int | None = None) -> int:
        """A whole number of at least 1. Raises SpecError naming the field."""
        value = self.data.get(field)
        value = default if value is None else value
        if value is None:
            raise SpecError(f"config.{field}: missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"config.{field}: {value!r} is not a whole number of at least 1")
        return value

    def layer_types(self, known: tuple[str, ...], default: Callable[[int], str]) -> list[str]:
        """The attention of each layer. Raises SpecError for a type that no rule is known for."""
        count = self.whole("num_hidden_layers")
        types = self.data.get("layer_types")
        if types is None:
            return [default(i) for i in range(count)]
        if not isinstance(types, list) or len(types) < count:
            raise SpecError(f"config.layer_types: not a list of {count} layers")
        for kind in types[:count]:
            if kind not in known:
                raise SpecError(f"config.layer_types: no rule is known for {kind!r} in this family")
        return types[:count]

    def dtype_bytes(self) -> int:
        """Bytes of one value of the cache; bf16 where the config says nothing."""
        name = self.data.get("dtype") or self.data.get("torch_dtype") or "bfloat16"
        if name not in _DTYPE_BYTES:
            raise SpecError(f"config.dtype: {name!r} is none of {', '.join(_DTYPE_BYTES)}")
        return _DTYPE_BYTES[name]

    def head_dim(self) -> int:
        """Values of one head; hidden_size over heads where the config says nothing."""
        if self.data.get("head_dim") is not None:
            return self.whole("head_dim")
        return self.whole("hidden_size") // self.whole("num_attention_heads")

    def kv_row_bytes(self) -> int:
        """Bytes of keys and values of one token in one layer."""
        heads = self.whole("num_key_value_heads", self.whole("num_attention_heads"))
        return 2 * heads * self.head_dim() * self.dtype_bytes()


def _where(types: list[str], *wanted: str) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(types) if kind in wanted)


def _kv_group(config: _Config, fields: dict[str, Any], layers: tuple[int, ...]) -> Groups:
    if not layers:
        return []
    fields = {**fields, "block_tokens": BLOCK_TOKENS}
    row = config.kv_row_bytes() * BLOCK_TOKENS
    return [group_of_layers(fields, layers=layers, layer_bytes=row, padding_bytes=_KV_ALIGNMENT_BYTES)]


_FULL = {"name": "full", "kind": "compressed_history"}


def _plain(config: _Config) -> Groups:
    """All layers attend to everything."""
    window = config.data.get("sliding_window")
    if window is not None and config.data.get("use_sliding_window", True):
        raise SpecError(
            f"config.sliding_window: {window!r}, but which layers have it is not said: write a spec by hand"
        )
    types = config.layer_types(("full_attention",), lambda _: "full_attention")
    return _kv_group(config, _FULL, _where(types, "full_attention"))


def _windowed(every: Callable[[_Config], int]) -> Callable[[_Config], Groups]:
    """Full attention in each layer that `every` divides (counted from 1), a window in the others."""

    def groups(config: _Config) -> Groups:
        step = every(config)
        types = config.layer_types(
            ("full_attention", "sliding_attention"),
            lambda i: "sliding_attention" if (i + 1) % step else "full_attention",
        )
        window: dict[str, Any] = {"name": "window", "kind": "sliding_window"}
        layers = _where(types, "sliding_attention")
        if layers:
            window["window_tokens"] = config.whole("sliding_window")
        return [*_kv_group(config, _FULL, _where(types, "full_attention")), *_kv_group(config, window, layers)]

    return groups


def _gemma3_step(config: _Config) -> int:
    if config.data.get("use_bidirectional_attention"):
        raise SpecError("config.use_bidirectional_attention: a token's state then depends on later tokens")
    field = "sliding_window_pattern" if "sliding_window_pattern" in config.data else "_sliding_window_pattern"
    return config.whole(field, 6)


def _qwen3_next(config: _Config) -> Groups:
    """Full attention in every fourth layer, a recurrent state in the others."""
    step = config.whole("full_attention_interval", 4)
    types = config.layer_types(
        ("full_attention", "linear_attention"),
        lambda i: "linear_attention" if (i + 1) % step else "full_attention",
    )
    key = config.whole("linear_num_key_heads") * config.whole("linear_key_head_dim")
    value = config.whole("linear_num_value_heads") * config.whole("linear_value_head_dim")
    convolution = (2 * key + value) * (config.whole("linear_conv_kernel_dim") - 1) * config.dtype_bytes()
    # The recurrent state is kept in fp32 whatever the model's dtype.
    recurrent = value * config.whole("linear_key_head_dim") * _DTYPE_BYTES["float32"]
    state = {"name": "gdn", "kind": "compressed_history", "form": "state", "grid_tokens": SNAPSHOT_TOKENS}
    layers = _where(types, "linear_attention")
    groups = _kv_group(config, _FULL, _where(types, "full_attention"))
    if layers:
        layer_bytes = convolution + recurrent
        groups.append(group_of_layers(state, layers=layers, layer_bytes=layer_bytes, padding_bytes=_KV_ALIGNMENT_BYTES))
    return groups


def _deepseek_v3_2(config: _Config) -> Groups:
    """A latent row and an indexer key a token in every layer."""
    types = config.layer_types(("indexed_attention",), lambda _: "indexed_attention")
    layers = _where(types, "indexed_attention")
    rank, rotary = config.whole("kv_lora_rank"), config.whole("qk_rope_head_dim")
    # fp8 values with one fp32 scale for 128 of them, rotary values in bf16.
    latent = rank + 4 * -(-rank // 128) + 2 * rotary
    key = config.whole("index_head_dim", 128)
    kinds = (
        ({"name": "latent", "kind": "compressed_history"}, latent),
        ({"name": "indexer", "kind": "indexer", "of": "latent"}, _index_row(key)),
    )
    return [
        group_of_layers(
            {**fields, "block_tokens": 64}, layers=layers, layer_bytes=64 * row, padding_bytes=_KV_ALIGNMENT_BYTES
        )
        for fields, row in kinds
    ]


def _index_row(values: int) -> int:
    """fp8 values with one fp32 scale for 128 of them."""
    return values + 4 * -(-values // 128)


def _v4_layer_types(config: _Config) -> list[str]:
    ratios = config.data.get("compress_ratios")
    if config.data.get("layer_types") is None and ratios is not None:
        count = config.whole("num_hidden_layers")
        # The list may go on with the layers that predict further tokens.
        if not isinstance(ratios, list) or len(ratios) < count or any(r not in _V4_LAYERS for r in ratios):
            raise SpecError(f"config.compress_ratios: not a list of {count} of {', '.join(map(str, _V4_LAYERS))}")
        return [_V4_LAYERS[r] for r in ratios[:count]]
    sparse, heavy = _V4_LAYERS[4], _V4_LAYERS[128]
    # transformers numbers the layers behind the first two from 0 and begins with heavily compressed ones.
    return config.layer_types(tuple(_V4_LAYERS.values()), lambda i: sparse if i >= 2 and i % 2 else heavy)


def _v4_ratios(config: _Config) -> tuple[int, int]:
    rates = config.data.get("compress_rates") or {}
    if not isinstance(rates, dict):
        raise SpecError("config.compress_rates: not a mapping of layer type to tokens an entry")
    merged = _Config(
        {
            "compress_rates.compressed_sparse_attention": rates.get(_V4_LAYERS[4])
            or config.data.get("compress_rate_csa"),
            "compress_rates.heavily_compressed_attention": rates.get(_V4_LAYERS[128])
            or config.data.get("compress_rate_hca"),
        }
    )
    return (
        merged.whole("compress_rates.compressed_sparse_attention", 4),
        merged.whole("compress_rates.heavily_compressed_attention", 128),
    )


def _deepseek_v4(config: _Config) -> Groups:
    """A window in every layer; compressed entries, sparse with an indexer or heavy, in most."""
    types = _v4_layer_types(config)
    csa, hca = _where(types, _V4_LAYERS[4]), _where(types, _V4_LAYERS[128])
    m, heavy = _v4_ratios(config)
    head, index = config.whole("head_dim"), config.whole("index_head_dim", 128)
    rotary = config.whole("qk_rope_head_dim", 64)
    # fp8 values with one scale byte for 64 of them, padded to 8; rotary values in bf16.
    row = head - rotary + 2 * rotary + -(-(head - rotary) // 64 // 8) * 8
    block = lcm(256, m, heavy)
    groups: list[tuple[dict[str, Any], tuple[int, ...], int]] = []
    compressed = {"kind": "compressed_history", "block_tokens": block}
    tail = {"kind": "uncompressed_tail"}
    if csa:
        indexed = {"kind": "indexer", "of": "csa", "block_tokens": block}
        groups += [
            ({"name": "csa", **compressed, "ratio": m}, csa, block // m * row),
            ({"name": "csa_indexer", **indexed}, csa, block // m * _index_row(index)),
        ]
    if hca:
        groups += [({"name": "hca", **compressed, "ratio": heavy}, hca, block // heavy * row)]
    window = {"kind": "sliding_window", "block_tokens": 64, "window_tokens": config.whole("sliding_window")}
    groups += [({"name": "swa", **window}, tuple(range(len(types))), 64 * row)]
    # Compressor states are kv and gate in fp32; an overlapped compressor keeps two of each.
    if csa:
        joined = {**tail, "block_tokens": m, "overlap_tokens": m}
        groups += [
            ({"name": "csa_tail", **joined, "of": "csa"}, csa, m * 16 * head),
            ({"name": "csa_indexer_tail", **joined, "of": "csa_indexer"}, csa, m * 16 * index),
        ]
    if hca:
        groups += [({"name": "hca_tail", **tail, "block_tokens": 8, "of": "hca"}, hca, 8 * 8 * head)]
    return [
        group_of_layers(fields, layers=layers, layer_bytes=layer_bytes, padding_bytes=_V4_PADDING_BYTES)
        for fields, layers, layer_bytes in groups
    ]


FAMILIES: dict[str, Callable[[_Config], Groups]] = {
    "deepseek_v4": _deepseek_v4,
    "deepseek_v32": _deepseek_v3_2,
    "gemma3_text": _windowed(_gemma3_step),
    "gpt_oss": _windowed(lambda _: 2),
    "qwen3_next": _qwen3_next,
    "llama": _plain,
    "mistral": _plain,
    "mixtral": _plain,
    "qwen2": _plain,
    "qwen3": _plain,
    "qwen3_moe": _plain,
}
"""By ``model_type``: how a family's groups follow from its config."""


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a model from its Hugging Face config.

    ``config`` is the parsed ``config.json``; a multimodal one is read at its ``text_config``.
    Raises SpecError naming the field that is missing, wrong or of a family that is not known.
    """
    kind = config.get("model_type")
    inner = config.get("text_config")
    if kind not in FAMILIES and isinstance(inner, Mapping):
        dtypes = {field: config[field] for field in ("dtype", "torch_dtype") if field in config}
        return from_hf({**dtypes, **inner, "model_type": inner.get("model_type") or f"{kind}_text"})
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise SpecError(f"config.model_type: {kind!r} is none of {', '.join(sorted(FAMILIES))}: write a spec by hand")
    groups = FAMILIES[kind](_Config(config))
    return ModelSpec.load({"name": kind, "groups": groups}, where="config")


def read_hf(path: str | Path) -> ModelSpec:
    """The spec of the model whose ``config.json`` is at `path` (the file, or the folder it is in).

    Raises SpecError naming the file, and the field where there is one.
    """
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{file}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise SpecError(f"{file}: not a JSON object")
    try:
        return from_hf(config)
    except SpecError as error:
        raise SpecError(f"{file}: {error}") from None
