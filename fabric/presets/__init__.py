"""Real models' cache groups as data, one YAML file each, with the geometry of a real engine.

A preset file is a model spec in which a group states its layers and the bytes of one object of one
layer; each file names where its figures come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from ..kinds import SpecError
from ..model import ModelSpec

PRESETS = (
    "full_attention",
    "deepseek_v4_flash",
    "deepseek_v4_pro",
    "deepseek_v3_2",
    "gemma3_27b",
    "gemma3_270m",
    "gpt_oss_120b",
    "qwen3_next_80b",
)
"""The names :func:`preset` knows."""

_LENGTHS = ("block_tokens", "grid_tokens", "ratio", "lag_tokens", "overlap_tokens", "window_tokens", "sink_tokens")


def preset(name: str, scale: int = 1) -> ModelSpec:
    """The spec of a known model. ``scale`` shrinks it for tests.

    The bytes of every object are divided by `scale` (rounded up; pages are padded again), and all
    lengths in tokens by the largest divisor of `scale` that divides each of them and leaves none
    that is more than 1 at 1: the rules keep their shape.

    Raises SpecError for an unknown name or a scale below 1.
    """
    if name not in PRESETS:
        raise SpecError(f"preset: there is no {name!r}; known are {', '.join(PRESETS)}")
    if scale < 1:
        raise SpecError(f"scale: {scale} is less than 1")
    data = _data(name)
    shrink = _shrink([group[field] for group in data["groups"] for field in _LENGTHS if field in group], scale)
    groups = [_group(group, scale, shrink) for group in data["groups"]]
    return ModelSpec.load({"name": data["name"], "groups": groups}, where=f"preset {name}")


def source(name: str) -> str:
    """Where the figures of a preset come from."""
    return str(_data(name)["source"])


def group_of_layers(
    fields: Mapping[str, Any], *, layers: tuple[int, ...], layer_bytes: int, padding_bytes: int = 1
) -> dict[str, Any]:
    """Fields of a group spec whose object is `layers` times one layer's, each padded to `padding_bytes`."""
    page_bytes = -(-layer_bytes // padding_bytes) * padding_bytes
    return {
        **fields,
        "layers": layers,
        "block_bytes": layer_bytes * len(layers),
        "page_bytes": page_bytes * len(layers),
        "alignment_bytes": padding_bytes,
    }


@cache
def _data(name: str) -> dict[str, Any]:
    text = files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def _shrink(lengths: list[int], scale: int) -> int:
    divisors = (d for d in range(scale, 0, -1) if scale % d == 0)
    return next(d for d in divisors if all(x <= 1 or (x % d == 0 and x // d > 1) for x in lengths))


def _group(data: dict[str, Any], scale: int, shrink: int) -> dict[str, Any]:
    fields = {k: v for k, v in data.items() if k not in {"layers", "layer_bytes", "padding_bytes"}}
    for field in _LENGTHS:
        if fields.get(field, 0) > 1:
            fields[field] //= shrink
    return group_of_layers(
        fields,
        layers=tuple(data["layers"]),
        layer_bytes=-(-data["layer_bytes"] // scale),
        padding_bytes=data.get("padding_bytes", 1),
    )
