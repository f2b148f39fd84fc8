"""Prompts, their objects and what reading them must give: the same in every process of a test."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvfabric.actors.lease import Lease
from kvfabric.fabric.model import ModelSpec

T = TypeVar("T")

GROUPS: list[dict[str, Any]] = [
    {"name": "csa", "kind": "compressed_history", "block_tokens": 16, "ratio": 4, "block_bytes": 5000},
    {
        "name": "tail",
        "kind": "uncompressed_tail",
        "of": "csa",
        "block_tokens": 4,
        "overlap_tokens": 4,
        "block_bytes": 700,
    },
    {"name": "idx", "kind": "indexer", "of": "csa", "block_tokens": 16, "block_bytes": 96},
    {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 16, "block_bytes": 4096},
]
"""A hybrid model's groups: a resume at 64 needs csa 0..3, idx 0..3, tail 15 and swa 12..15."""

NEEDED_AT_64 = {"csa": range(4), "idx": range(4), "tail": range(15, 16), "swa": range(12, 16)}


def spec(**more: Any) -> dict[str, Any]:
    """A fabric's spec over GROUPS; one link, so that a test knows which one moved the bytes."""
    return {
        "model": {"name": "hybrid", "groups": GROUPS},
        "memory_bytes": 16 << 20,
        "transport": {"links": ["nixl"]},
        "metrics_every_s": 0.5,
        **more,
    }


def prompt(name: str, tokens: int = 70) -> list[int]:
    """A prompt of its own for each name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return [(seed + 7919 * i) % 50_000 for i in range(tokens)]


def content(tokens: list[int], group: str, index: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The one right content of an object."""
    seed = hashlib.sha256(f"{tokens[:8]}/{group}/{index}".encode()).digest()
    return np.random.default_rng(np.frombuffer(seed, dtype=np.uint64)).integers(0, 256, nbytes, dtype=np.uint8)


def objects(model: ModelSpec, tokens: list[int], upto: int | None = None) -> dict[str, dict[int, Any]]:
    """Every object of the prompt's first ``upto`` tokens."""
    n = len(tokens) if upto is None else upto
    return {
        g.name: {i: content(tokens, g.name, i, g.block_bytes) for i in range(n // g.unit_tokens)} for g in model.groups
    }


def only(
    objects_by_group: Mapping[str, Mapping[int, Any]], wanted: Mapping[str, Iterable[int]]
) -> dict[str, dict[int, Any]]:
    """Some of the objects."""
    return {group: {i: objects_by_group[group][i] for i in indices} for group, indices in wanted.items()}


def wrong_bytes(lease: Lease, model: ModelSpec, tokens: list[int]) -> list[str]:
    """Every leased object that does not bear its one right content, read under the lease's guard."""
    wrong = []
    for group in model.groups:
        with lease.read(group.name) as views:
            for index, view in views.items():
                if not np.array_equal(view, content(tokens, group.name, index, group.block_bytes)):
                    wrong.append(f"{group.name}[{index}]")
    return wrong


def eventually(look: Callable[[], T], holds: Callable[[T], bool] = bool, within_s: float = 20.0) -> T:
    """What ``look`` gives once it holds; fails with the last thing seen."""
    deadline = time.monotonic() + within_s
    while True:
        seen = look()
        if holds(seen):
            return seen
        assert time.monotonic() < deadline, f"still {seen!r} after {within_s} s"
        time.sleep(0.02)
