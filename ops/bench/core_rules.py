"""How long the rule engine takes to answer one prompt.

Each figure is a median over evidence as it comes in service: history with a hole near its end,
windows, tails and snapshots with gaps or only where earlier turns ended.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ...fabric.bitmaps import ones
from ...fabric.evidence import GroupEvidence
from ...fabric.kinds import Form, ObjectKind
from ...fabric.model import ModelSpec
from ...fabric.presets import preset
from ...fabric.rules import resolve, usable_position

BLOCK_TOKENS = 16
ROUNDS = 15
WORLDS = 8
"""Prompts with evidence of their own; a figure is the median over all of them."""


def eight_groups() -> ModelSpec:
    """Eight groups of equal blocks, of every kind and both forms."""
    blocks = {"block_tokens": BLOCK_TOKENS}
    history = {"kind": ObjectKind.COMPRESSED_HISTORY}
    window = {"kind": ObjectKind.SLIDING_WINDOW, **blocks}
    return ModelSpec.load(
        {
            "name": "eight_groups",
            "groups": [
                {"name": "kv", **history, **blocks},
                {"name": "mla", **history, **blocks},
                {"name": "index", "kind": ObjectKind.INDEXER, "of": "mla", **blocks},
                {"name": "tail", "kind": ObjectKind.UNCOMPRESSED_TAIL, "of": "mla", "overlap_tokens": 4, **blocks},
                {"name": "w128", "window_tokens": 128, **window},
                {"name": "w512", "window_tokens": 512, **window},
                {"name": "w1024", "window_tokens": 1024, "sink_tokens": 4, **window},
                {"name": "ssm", **history, "form": Form.STATE, "grid_tokens": BLOCK_TOKENS},
            ],
        }
    )


def worn(model: ModelSpec, tokens: int, seed: int) -> list[GroupEvidence]:
    """Evidence of a prompt of `tokens` tokens whose objects are partly gone.

    Of every second prompt, windows, tails and snapshots are there only where one of three earlier
    turns ended, as a writer leaves them that keeps the end of each request.
    """
    rng = random.Random(seed)
    hole = rng.uniform(0.9, 0.99)
    turns = [rng.uniform(0.05, 0.95) for _ in range(3)]
    evidence = []
    for group in model.groups:
        count = tokens // group.unit_tokens
        held = ones(count)
        reach = max(1, (group.window_tokens or 0) + 2 * model.grid_tokens) // group.unit_tokens
        if group.form is Form.BLOCKS and group.kind in {ObjectKind.COMPRESSED_HISTORY, ObjectKind.INDEXER}:
            held &= ~(1 << int(count * hole))
        elif seed % 2:
            held = ones(-(-group.sink_tokens // group.unit_tokens))
            for turn in turns:
                held |= ones(reach) << max(0, int(count * turn) - reach)
        elif group.form is Form.STATE:
            held = rng.getrandbits(count) & rng.getrandbits(count)
        else:
            for _ in range(8):
                held &= ~(ones(rng.randint(1, reach)) << rng.randrange(count))
        evidence.append(GroupEvidence({0: held}, ones(count)))
    return evidence


def median_us(calls: list[Callable[[], Any]], rounds: int = ROUNDS) -> float:
    """Median microseconds of one call, over `rounds` rounds through all calls, after one to warm up."""
    spent = []
    for at in range(rounds + 1):
        for call in calls:
            start = time.perf_counter()
            call()
            if at:
                spent.append(time.perf_counter() - start)
    return statistics.median(spent) * 1e6


def figures() -> list[dict[str, Any]]:
    """The erosion figures: name, value, unit, target and whether it holds."""
    eight, flash = eight_groups(), preset("deepseek_v4_flash")
    cases = (
        ("usable_position_8x8192", usable_position, eight, 8192 * BLOCK_TOKENS, 15.0),
        ("usable_position_deepseek_v4_flash_262144_tokens", usable_position, flash, 262_144, 60.0),
        ("resolve_with_cause_8x8192", resolve, eight, 8192 * BLOCK_TOKENS, 200.0),
        ("resolve_with_cause_deepseek_v4_flash_262144_tokens", resolve, flash, 262_144, 200.0),
        ("usable_position_8x262144", usable_position, eight, 262_144 * BLOCK_TOKENS, 1000.0),
    )
    return [_figure(name, ask, model, tokens, target) for name, ask, model, tokens, target in cases]


def _figure(name: str, ask: Callable[..., Any], model: ModelSpec, tokens: int, target: float) -> dict[str, Any]:
    worlds = [worn(model, tokens, seed) for seed in range(WORLDS)]
    value = median_us([partial(ask, model, evidence, tokens + 1) for evidence in worlds])
    return {"name": name, "value": round(value, 2), "unit": "us", "target": target, "holds": value < target}
