"""``kvfabric bench core``: the figures of the pure core, in one run on one thread.

Speeds are per second of CPU time, medians over rounds: nothing here waits, so a busy machine slows
the clock on the wall and not the core.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ...fabric.identity import Namespace, PromptKeys, as_tokens
from ...fabric.model import ModelSpec
from ..simulate.run import simulate
from . import core_rules

ROUNDS = 7
DIGEST_TOKENS = 1 << 19
SIMULATION_STEPS = 2000

EXPECTED = (
    "usable_position_8x8192",
    "usable_position_deepseek_v4_flash_262144_tokens",
    "resolve_with_cause_8x8192",
    "resolve_with_cause_deepseek_v4_flash_262144_tokens",
    "usable_position_8x262144",
    "tokens_to_keys_128_token_cuts",
    "tokens_to_keys_4_token_cuts",
    "simulation_steps",
)
"""Every figure there must be: one that is missing fails like one that does not hold."""

Figure = dict[str, Any]


def run() -> dict[str, Any]:
    """Measure everything: ``{"bench", "machine", "figures": [{name, value, unit, target, holds}]}``."""
    figures = [*core_rules.figures(), *digest_figures(), simulation_figure()]
    return report("core", figures, EXPECTED)


def report(bench: str, figures: list[Figure], expected: tuple[str, ...]) -> dict[str, Any]:
    """What every bench prints: the figures, those that are missing among them, and what they were measured on."""
    return {"bench": bench, "machine": machine(), "figures": complete(figures, expected)}


def complete(figures: list[Figure], expected: tuple[str, ...] = EXPECTED) -> list[Figure]:
    """The figures, and in the place of each that is missing one that does not hold."""
    known = {figure["name"] for figure in figures}
    missing = [name for name in expected if name not in known]
    return figures + [{"name": n, "value": None, "unit": "", "target": None, "holds": False} for n in missing]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    load = os.getloadavg()[0]
    return {
        "cores": os.cpu_count(),
        "load": round(load, 2),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def digest_figures() -> list[Figure]:
    """From tokens to the keys a request carries: the whole of ``PromptKeys``, millions of tokens a second."""
    tokens = as_tokens(np.arange(DIGEST_TOKENS) % 50_000)
    found = []
    for cut, target in ((128, 25.0), (4, 3.0)):
        spec = {"name": "kv", "kind": "compressed_history", "block_tokens": cut}
        model = ModelSpec.load({"name": f"cuts_{cut}", "groups": [spec]})

        def keys(model: ModelSpec = model, cut: int = cut) -> int:
            return len(PromptKeys(model, Namespace(model.name, "v1"), tokens).keys(cut))

        spent_s = median_cpu_s(keys)
        name, value = f"tokens_to_keys_{cut}_token_cuts", len(tokens) / spent_s / 1e6
        found.append(_at_least(name, value, "M tokens/s", target))
    return found


def simulation_figure() -> Figure:
    """Steps of the simulation, invariants after each included, over the first seeds. A broken law holds nothing."""
    rates = []
    clean = True
    for seed in range(1, ROUNDS + 1):
        started = time.process_time()
        report = simulate(seed, SIMULATION_STEPS, rest=False)
        rates.append(report.steps / (time.process_time() - started))
        clean = clean and report.clean
    figure = _at_least("simulation_steps", statistics.median(rates), "steps/s", 3000.0)
    return {**figure, "holds": figure["holds"] and clean}


def median_cpu_s(call: Callable[[], object]) -> float:
    """Median CPU seconds of a call over rounds, after one to warm up."""
    call()
    spent = []
    for _ in range(ROUNDS):
        started = time.process_time()
        call()
        spent.append(time.process_time() - started)
    return statistics.median(spent)


def _at_least(name: str, value: float, unit: str, target: float) -> Figure:
    return {"name": name, "value": round(value, 2), "unit": unit, "target": target, "holds": value >= target}
