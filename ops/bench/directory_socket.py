"""One shard asked over its socket and through Ray calls, beside each other: the same process, the same look-ups."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...actors.fabric import Fabric, launch
from ...actors.spec import FabricSpec
from ...fabric import wire
from ...fabric.kinds import INDEX_DIGEST_BYTES as KEY
from ...fabric.messages import Lookup, Strip
from ...transport.control_client import BlockingClient
from .directory_core import figure, model_of
from .directory_load import UNIT_TOKENS

ROUNDS = 400
AHEAD = 32
"""Look-ups under way at a time where the rate is measured."""
COLD_BLOCKS = 64
TIMEOUT_S = 30.0

Figure = dict[str, Any]


def figures() -> Iterator[Figure]:
    """Starts an embedded Ray cluster with one fabric; the ratios are of one run."""
    with launch(FabricSpec(model=model_of(1), memory_bytes=1 << 20), name="bench-directory") as fabric:
        yield from _measure(fabric)


def _measure(fabric: Fabric) -> Iterator[Figure]:
    import ray

    member = next(m for m in fabric.info().members if m.address.startswith("directory"))
    handle = fabric.directory
    frames = [_cold(number) for number in range(64)]
    with BlockingClient.connect(member.unix) as client:
        socket_us = _round_trips(lambda frame: client.request(frame, TIMEOUT_S), frames)
        ray_us = _round_trips(lambda frame: ray.get(handle.request.remote(frame), timeout=TIMEOUT_S), frames)
        socket_rate = _rate(lambda batch: client.request_many(batch, TIMEOUT_S), frames)
        ray_rate = _rate(lambda batch: ray.get([handle.request.remote(f) for f in batch], timeout=TIMEOUT_S), frames)
    yield figure("directory_socket_cold_miss_p50", statistics.median(socket_us), "us")
    yield figure("directory_ray_call_p50", statistics.median(ray_us), "us")
    share = statistics.median(socket_us) / statistics.median(ray_us)
    yield figure("directory_socket_p50_of_a_ray_call", share, "share", 0.2)
    yield figure("directory_socket_lookups", socket_rate, "lookups/s")
    yield figure("directory_ray_lookups", ray_rate, "lookups/s")
    yield figure("directory_socket_lookups_over_ray", socket_rate / ray_rate, "times", 5.0, most=False)


def _cold(number: int) -> bytes:
    """A look-up of a prompt that nobody has."""
    chain = np.random.default_rng(number).bytes(COLD_BLOCKS * KEY)
    return wire.encode(Lookup(f"bench-{number}", 0, (Strip(UNIT_TOKENS, 0, chain),)))


def _round_trips(ask: Callable[[bytes], Any], frames: list[bytes]) -> list[float]:
    """Microseconds of one look-up after another, after some to warm up."""
    spent = []
    for turn in range(ROUNDS + 50):
        start = time.perf_counter()
        ask(frames[turn % len(frames)])
        if turn >= 50:
            spent.append((time.perf_counter() - start) * 1e6)
    return spent


def _rate(ask: Callable[[list[bytes]], Any], frames: list[bytes]) -> float:
    """Look-ups a second with several under way, the best of three stretches: load from elsewhere only slows."""
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        for turn in range(ROUNDS // AHEAD):
            at = turn * AHEAD % len(frames)
            ask(frames[at : at + AHEAD])
        best = max(best, ROUNDS // AHEAD * AHEAD / (time.perf_counter() - start))
    return best
