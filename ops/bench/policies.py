"""``kvfabric bench policies``: eviction policies on traces, against each other and against a cache that knows the future.

The working set is what a trace leaves if nothing is ever evicted; capacities are shares of it. A replay's
speed is per minute of CPU time, the median over the replays of one preset; on the clock it is told beside it.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...fabric.budget import bytes_per_token
from ...policies.eviction import NAMES, eviction_policy
from ..replay.bound import belady_hits
from ..replay.machine import Setup
from ..replay.models import FULL_ATTENTION, layout_of, replay_model
from ..replay.play import WEIGHTS, Replay
from ..replay.trace import BLOCK_TOKENS, Trace, generate, load, working_set_blocks
from .core import report

PRESETS = (FULL_ATTENTION, "deepseek_v4_flash")
SHARES = (5, 10, 25, 50)
CHECKPOINT = "branches"
GENERATED_REQUESTS = 1500
RATIO_MIN = 0.99
GAP_CLOSED_MIN = {25: 0.25}
BOUND_SHARE_MIN = {50: 0.93}
SPEED_MIN = {FULL_ATTENTION: 100_000.0, "deepseek_v4_flash": 10_000.0}
BASELINES = tuple(name for name in NAMES if name != "default")

Figure = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One replay: a trace's path (None: generated), a preset, a share of the working set, a policy."""

    trace: Path | None
    preset: str
    share: int
    policy: str


def run(traces: Sequence[Path] = (), presets: Sequence[str] = PRESETS) -> dict[str, Any]:
    """Measure: ``{"bench", "machine", "figures": [{name, value, unit, target, holds}]}``."""
    paths: tuple[Path | None, ...] = tuple(traces) or (None,)
    cases = [
        Case(path, preset, share, policy)
        for path in paths
        for preset in presets
        for share in SHARES
        for policy in NAMES
    ]
    with ProcessPoolExecutor(max(1, min(os.cpu_count() or 1, len(cases)))) as pool:
        done = dict(zip(cases, pool.map(play, cases), strict=True))
    hits = {case: played.hit_tokens for case, played in done.items()}
    figures: list[Figure] = []
    for path in paths:
        trace = trace_of(path)
        for preset in presets:
            figures += _against_baselines(trace.name, path, preset, hits)
            if preset == FULL_ATTENTION:
                figures += _against_bound(trace, path, hits)
    figures += _means(paths, presets, hits)
    for preset in presets:
        mine = [played for case, played in done.items() if case.preset == preset]
        speed = statistics.median(60 * played.requests / played.cpu_s for played in mine)
        figures.append(_figure(f"{preset}: replay speed", round(speed), "requests/min", SPEED_MIN.get(preset)))
        clock = statistics.median(60 * played.requests / played.wall_s for played in mine)
        figures.append(_figure(f"{preset}: replay speed, on the clock", round(clock), "requests/min", None))
    return report("policies", figures, ())


def trace_of(path: Path | None) -> Trace:
    """The trace of a path; the generated one without."""
    return generate(GENERATED_REQUESTS) if path is None else load(path)


@dataclass(frozen=True, slots=True)
class Played:
    """What one replay of a case hit, and how long it took."""

    hit_tokens: int
    requests: int
    cpu_s: float
    wall_s: float


def play(case: Case) -> Played:
    """One replay. Raises AssertionError where a leased slot held something else."""
    trace = trace_of(case.trace)
    model = replay_model(case.preset)
    blocks = working_set_blocks(trace)
    mean_tokens = max(1, trace.tokens // len(trace.requests))
    tokens = blocks * BLOCK_TOKENS * case.share / 100
    memory_bytes = int(tokens * bytes_per_token(model, checkpoint=CHECKPOINT, prompt_tokens=mean_tokens)) + 1
    layout = layout_of(model, memory_bytes, CHECKPOINT, mean_tokens, blocks + 1)
    replay = Replay(trace, Setup(model, 1, layout, WEIGHTS, eviction_policy(case.policy)), CHECKPOINT)
    began = time.process_time()
    result = replay.run()
    spent_s = time.process_time() - began
    if result.wrong_reads:
        raise AssertionError(f"{case}: {result.wrong_reads} leased slots held something else")
    return Played(result.effective_hit_tokens, result.requests, spent_s, result.wall_s)


def _slots(path_blocks: int, share: int) -> int:
    return max(1, path_blocks * share // 100)


def _against_baselines(name: str, path: Path | None, preset: str, hits: dict[Case, int]) -> Iterable[Figure]:
    for share in SHARES:
        told = {policy: hits[Case(path, preset, share, policy)] for policy in NAMES}
        for policy in BASELINES:
            yield _figure(f"{name}, {preset}, {share} %: {policy}", told[policy], "tokens", None)
        yield _figure(f"{name}, {preset}, {share} %: default", told["default"], "tokens", None)
        ratio = told["default"] / max(1, *(told[policy] for policy in BASELINES))
        yield _figure(f"{name}, {preset}, {share} %: default to the better", round(ratio, 4), "ratio", RATIO_MIN)


def _against_bound(trace: Trace, path: Path | None, hits: dict[Case, int]) -> Iterable[Figure]:
    blocks = working_set_blocks(trace)
    for share in SHARES:
        bound = belady_hits(trace, _slots(blocks, share)) * BLOCK_TOKENS
        better = max(hits[Case(path, FULL_ATTENTION, share, policy)] for policy in BASELINES)
        default = hits[Case(path, FULL_ATTENTION, share, "default")]
        where = f"{trace.name}, {FULL_ATTENTION}, {share} %"
        yield _figure(f"{where}: bound", bound, "tokens", None)
        closed = (default - better) / max(1, bound - better)
        yield _figure(f"{where}: gap to the bound closed", round(closed, 4), "ratio", GAP_CLOSED_MIN.get(share))
        yield _figure(
            f"{where}: share of the bound", round(default / max(1, bound), 4), "ratio", BOUND_SHARE_MIN.get(share)
        )


def _means(paths: Sequence[Path | None], presets: Sequence[str], hits: dict[Case, int]) -> Iterable[Figure]:
    """Geometric means over traces, presets and capacities of the default policy's hits to a baseline's."""
    for policy in BASELINES:
        logs = [
            math.log(
                max(1, hits[Case(path, preset, share, "default")]) / max(1, hits[Case(path, preset, share, policy)])
            )
            for path in paths
            for preset in presets
            for share in SHARES
        ]
        mean = math.exp(statistics.fmean(logs))
        figure = _figure(f"geometric mean: default to {policy}", round(mean, 4), "ratio", 1.0)
        yield {**figure, "holds": mean > 1.0}


def _figure(name: str, value: float, unit: str, target: float | None) -> Figure:
    holds = target is None or value >= target
    return {"name": name, "value": value, "unit": unit, "target": target, "holds": holds}
