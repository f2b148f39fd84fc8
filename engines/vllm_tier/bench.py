"""``kvfabric bench engines``: vLLM with a fabric under it, on a machine without a GPU. Run it in vLLM's environment.

What the tier costs vLLM's scheduler, moving rows beside vLLM's own file tier on tmpfs (rounds take turns, so that a busy
machine slows both), and the first token of a prompt whose 512-token prefix another node computed, against computing it.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ...actors.fabric import Fabric, launch
from ...fabric.kinds import FabricError
from ..shared.named_blocks import blocks_model
from . import trial

Figure = dict[str, Any]

SIZES = ((64 << 10, 5), (64 << 10, 64), (1 << 20, 64))
"""Row bytes, rows: 320 KiB, 4 MiB, 64 MiB a job."""
WARM_UP = 3
"""Rounds before those that count: threads started, connections made, code paths run, of both tiers."""
ROUNDS_MAX = 25
MEMORY_BYTES = 768 << 20
"""Of each node's holder."""
LOOKUPS = 2000
STEPS = 2000
PREFIX_TOKENS = 512
PROMPTS = 7
WAIT_S = 60.0


def figures() -> list[Figure]:
    """All figures. Starts an embedded Ray cluster; raises FabricError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise FabricError(
            "vLLM is not installed here: scripts/install-engines vllm, then .venv-vllm/bin/kvfabric bench engines"
        )
    trial.environment()
    with tempfile.TemporaryDirectory(prefix="kvfabric-bench-", dir="/dev/shm") as folder:
        rows = sorted({row_bytes for row_bytes, _ in SIZES})
        first = {
            "model": blocks_model(block_bytes=rows[0], block_tokens=trial.BLOCK_TOKENS),
            "memory_bytes": MEMORY_BYTES,
        }
        with launch(first, name=_fabric_of(rows[0]), nodes=2):
            told = _scheduler_figures(rows[0])
            for row_bytes in rows:
                model = blocks_model(block_bytes=row_bytes, block_tokens=trial.BLOCK_TOKENS)
                with launch({"model": model, "memory_bytes": MEMORY_BYTES}, name=_fabric_of(row_bytes)):
                    told += [
                        f for size, count in SIZES if size == row_bytes for f in _moving(row_bytes, count, Path(folder))
                    ]
            return told + _first_token(Path(folder))


def _fabric_of(row_bytes: int) -> str:
    return f"bench-{row_bytes}"


def _figure(name: str, value: float, unit: str, target: float | None, *, at_most: bool = False) -> Figure:
    holds = target is None or (value <= target if at_most else value >= target)
    return {"name": name, "value": float(f"{value:.3g}"), "unit": unit, "target": target, "holds": holds}


# --- tiers without an engine ---------------------------------------------------------------------


@dataclass(slots=True)
class Tiers:
    """A fabric's tier and vLLM's file tier over the same rows."""

    fabric: Any
    files: Any
    rows: Any
    jobs: int = 0

    def move(self, tier: Any, keys: Sequence[bytes], *, load: bool) -> float:
        """Seconds from handing a job over to its end, which is waited for as both tiers let an engine wait."""
        from vllm.v1.kv_offload.base import OffloadKey, ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self.jobs += 1
        chunks = np.arange(len(keys), dtype=np.int32)
        job = TransferJob(self.jobs, [OffloadKey(key) for key in keys], chunks, load, ReqContext("bench"))
        began = time.perf_counter()
        (tier.submit_load if load else tier.submit_store)(job)
        tier.drain_jobs()
        done = list(tier.get_finished_jobs())
        seconds = time.perf_counter() - began
        if not done[0].success:
            stats = tier.get_stats()
            why = "" if stats is None else f" ({stats.reduce()})"
            raise FabricError(f"{tier.tier_type}: a job of {len(keys)} rows failed{why}")
        return seconds


def _awaited(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise FabricError(f"nothing came within {WAIT_S:g} s")
    return seen


@contextmanager
def tiers(row_bytes: int, rows: int, folder: Path) -> Iterator[Tiers]:
    """Both tiers over one memory of so many rows."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    from .host import HostTieringSpec
    from .tier import KvFabricTier

    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(trial.BLOCK_TOKENS, ("layer",), 0),),
        worker_kv_bytes_per_block=row_bytes,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": row_bytes * rows},
        engine_id="bench",
        model=OffloadingModelConfig("bench", "bfloat16"),
        cache=OffloadingCacheConfig(trial.BLOCK_TOKENS, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
    spec = HostTieringSpec(config)
    memory: Any = np.random.default_rng(1).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    view = memoryview(memory)
    fabric = KvFabricTier(spec, view, "kvfabric", fabric=_fabric_of(row_bytes), weights="bench")
    files = FileSystemTierManager(spec, view, "fs", root_dir=str(folder / f"fs-{row_bytes}"))
    try:
        yield Tiers(fabric, files, memory)
    finally:
        fabric.shutdown()
        files.shutdown()


def _names(count: int) -> list[bytes]:
    """Keys that nobody has: a hash of 32 bytes, group 0."""
    return [os.urandom(32) + bytes(4) for _ in range(count)]


def _moving(row_bytes: int, rows: int, folder: Path) -> Iterator[Figure]:
    """Storing and loading one job of so many rows, against the file tier. Each tier has one thread for a job."""
    seconds: dict[tuple[str, bool], list[float]] = {}
    with tiers(row_bytes, rows, folder) as both:
        # No more than there is room for: nothing makes room for anything.
        for number in range(min(WARM_UP + ROUNDS_MAX, MEMORY_BYTES // (row_bytes * rows))):
            if number == WARM_UP:
                seconds.clear()
            keys = _names(rows)
            for load in (False, True):
                for name, tier in (("fabric", both.fabric), ("files", both.files)):
                    before = both.rows.copy() if load else None
                    if load:
                        both.rows[:] = 0
                    seconds.setdefault((name, load), []).append(both.move(tier, keys, load=load))
                    if before is not None and not np.array_equal(before, both.rows):
                        raise FabricError(f"{tier.tier_type}: other bytes came back")
    size = row_bytes * rows
    for verb, load in (("store", False), ("load", True)):
        own, theirs = (statistics.median(seconds[name, load]) for name in ("fabric", "files"))
        name = f"{verb}_{size >> 10}_kib"
        yield _figure(f"{name}_of_file_tier", theirs / own, "ratio", 0.5)
        yield _figure(f"{name}", size / own / 1e9, "GB/s", None)


def _scheduler_figures(row_bytes: int) -> list[Figure]:
    """What the tier costs on the scheduler's thread, while other threads store and load."""
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, tiers(row_bytes, 64, Path(folder)) as both:
        tier, context, step = both.fabric, ReqContext("bench"), ScheduleEndContext((), ())
        keys = _names(256)
        both.move(tier, keys[:64], load=False)
        for key in keys:
            tier.lookup(OffloadKey(key), context)
        tier.on_schedule_end(step)
        _awaited(
            lambda: all(tier.lookup(OffloadKey(k), context).name != "RETRY" for k in keys) or tier.on_schedule_end(step)
        )
        quiet = _lookup_times(tier, [OffloadKey(key) for key in keys], context)
        idle = []
        for _ in range(STEPS):
            began = time.perf_counter()
            tier.get_finished_jobs()
            tier.on_schedule_end(step)
            tier.has_pending_work()
            idle.append(time.perf_counter() - began)
        busy = _beside_transfers(both, keys, context)
    return [
        _figure("lookup_cached_p50", statistics.median(quiet) * 1e6, "us", 30.0, at_most=True),
        _figure("lookup_cached_longest", max(quiet) * 1e3, "ms", 1.0, at_most=True),
        _figure("idle_step_p50", statistics.median(idle) * 1e6, "us", 50.0, at_most=True),
        _figure("lookup_beside_transfers_p50", statistics.median(busy) * 1e6, "us", 30.0, at_most=True),
        _figure("lookup_beside_transfers_p99", _p99(busy) * 1e3, "ms", 1.0, at_most=True),
        _figure("lookup_beside_transfers_longest", max(busy) * 1e3, "ms", 1.0, at_most=True),
    ]


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _lookup_times(tier: Any, keys: Sequence[Any], context: Any) -> list[float]:
    took = []
    for number in range(LOOKUPS):
        key = keys[number % len(keys)]
        began = time.perf_counter()
        tier.lookup(key, context)
        took.append(time.perf_counter() - began)
    return took


def _beside_transfers(both: Tiers, keys: list[bytes], context: Any) -> list[float]:
    """Look-ups while a store and a load are always under way, with pauses as a step of the model makes them."""
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    took: list[float] = []
    chunks = np.arange(32, dtype=np.int32)
    known = [OffloadKey(key) for key in keys]
    for _ in range(40):
        both.jobs += 2
        fresh = [OffloadKey(key) for key in _names(32)]
        both.fabric.submit_store(TransferJob(both.jobs, fresh, chunks, False, ReqContext("bench")))
        both.fabric.submit_load(TransferJob(both.jobs + 1, known[:32], chunks + 32, True, ReqContext("bench")))
        left = 2
        while left:
            for key in known[:50]:
                began = time.perf_counter()
                both.fabric.lookup(key, context)
                took.append(time.perf_counter() - began)
            time.sleep(0.001)
            left -= len(list(both.fabric.get_finished_jobs()))
    return took


# --- the first token -----------------------------------------------------------------------------


def _first_token(folder: Path) -> list[Figure]:
    """A prompt whose prefix another node computed: loaded, against computed by an engine without a fabric."""
    import ray

    model = trial.write_model(folder / "llama", trial.Family.LLAMA)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 1000) for _ in range(PREFIX_TOKENS + 20)] for _ in range(PROMPTS)]
    config = trial.transfer_config("bench-engines", launch={"memory_bytes": MEMORY_BYTES})
    engines = [trial.actor_on(0).remote(str(model), config)]
    _got(engines[0].generate.remote(prompts, 4))  # vLLM stores what a step computed in the step after it
    _got(engines[0].settle.remote())
    engines.append(trial.actor_on(1).remote(str(model), trial.transfer_config("bench-engines")))
    engines.append(trial.actor_on(1).remote(str(model)))
    _, reader, plain = engines
    for engine in (reader, plain):
        _got(engine.generate.remote([prompts[0][::-1]], 1))
    took: dict[str, list[float]] = {"loaded": [], "computed": []}
    for prompt in prompts:
        for name, engine in (("loaded", reader), ("computed", plain)):
            _got(engine.forget.remote())
            took[name].append(_got(engine.first_token_s.remote(prompt)))
    status = _attached("bench-engines").status()
    reused = sum(int(h.get("counters", {}).get("reused_hit_tokens_total", 0)) for h in status["holders"])
    for engine in engines:
        _got(engine.close.remote())
        ray.kill(engine)
    _attached("bench-engines").shutdown()
    if reused < PROMPTS * PREFIX_TOKENS:
        raise FabricError(f"only {reused} tokens were reused: the first token of {PROMPTS} prompts was not measured")
    loaded, computed = statistics.median(took["loaded"]), statistics.median(took["computed"])
    return [
        _figure("first_token_512_shared_loaded_of_computed", loaded / computed, "ratio", 1.0, at_most=True),
        _figure("first_token_512_shared_loaded", loaded * 1e3, "ms", None),
        _figure("first_token_512_shared_computed", computed * 1e3, "ms", None),
    ]


def _got(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=10 * WAIT_S)


def _attached(name: str) -> Fabric:
    from ...actors.fabric import attach

    return attach(name)
