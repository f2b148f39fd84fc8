"""Slabs follow the mix of prompts: what a fixed split loses when it changes, and what moving costs when it does not."""

from __future__ import annotations

import random
from array import array

import pytest

from kvfabric.fabric.budget import in_slabs
from kvfabric.fabric.invariants import check
from kvfabric.fabric.model import ModelSpec
from kvfabric.ops.replay.machine import Setup
from kvfabric.ops.replay.models import layout_of
from kvfabric.ops.replay.play import WEIGHTS, Replay, Result
from kvfabric.ops.replay.trace import BLOCK_TOKENS, Request, Trace
from kvfabric.policies.eviction import eviction_policy

MODEL = ModelSpec.load(
    {
        "name": "hybrid",
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 512, "block_bytes": 64 << 10},
            {
                "name": "swa",
                "kind": "sliding_window",
                "block_tokens": 128,
                "window_tokens": 512,
                "block_bytes": 256 << 10,
                "endpoint_tokens": 512,
            },
        ],
    }
)
MEMORY_BYTES = 192 << 20
LONG_TOKENS = 40 * BLOCK_TOKENS


def prompts(draw: random.Random, first: int, since_s: float, *, count: int, blocks: int, kept: int) -> list[Request]:
    """Requests for prompts of so many blocks, each asked for again and again while ``kept`` others are."""
    fresh = iter(range(first, 1 << 40))
    live: list[list[int]] = []
    found = []
    for number in range(count):
        if len(live) < kept:
            live.append([next(fresh) for _ in range(blocks)])
            ids = live[-1]
        else:
            ids = live[draw.randrange(kept)]
            if draw.random() < 0.02:
                live.remove(ids)
        found.append(Request(since_s + number, blocks * BLOCK_TOKENS + 1, 1, array("q", ids)))
    return found


def long_then_short(*, shifts: bool) -> Trace:
    draw = random.Random("mix")
    found = prompts(draw, 1, 0.0, count=500, blocks=40, kept=40)
    if shifts:
        found += prompts(draw, 1 << 20, 500.0, count=3000, blocks=2, kept=150)
    else:
        found += prompts(draw, 1 << 20, 500.0, count=500, blocks=40, kept=40)
    return Trace("mix", found)


def played(trace: Trace, *, slabs: bool, eviction: str) -> Result:
    split = layout_of(MODEL, MEMORY_BYTES, "ends", LONG_TOKENS, 1 << 20)
    layout, shares = in_slabs(split) if slabs else (split, ())
    replay = Replay(trace, Setup(MODEL, 1, layout, WEIGHTS, eviction_policy(eviction), slab_shares=shares), "ends")
    result = replay.run()
    assert result.wrong_reads == 0
    assert check(replay.fabric.nodes["n0"].core) == []
    return result


@pytest.mark.parametrize("eviction", ["lru", "default"])
def test_where_the_mix_shifts_moving_slabs_gains_hits(eviction: str) -> None:
    trace = long_then_short(shifts=True)
    fixed, moving = (played(trace, slabs=slabs, eviction=eviction) for slabs in (False, True))
    assert moving.slabs_moved > 0 == fixed.slabs_moved
    assert fixed.by_cause["window_incomplete"] > 4 * moving.by_cause["window_incomplete"]
    assert moving.effective_hit_tokens > 1.08 * fixed.effective_hit_tokens


def test_where_the_mix_stays_moving_slabs_costs_nothing_to_speak_of() -> None:
    trace = long_then_short(shifts=False)
    fixed, moving = (played(trace, slabs=slabs, eviction="lru") for slabs in (False, True))
    assert moving.effective_hit_tokens > 0.99 * fixed.effective_hit_tokens
    assert moving.slabs_moved < 16
