"""``kvfabric bench lease``: what a lease on state at hand costs, beside a Ray call that does nothing.

One holder on an embedded cluster, asked by this process as an engine's worker asks it: tokens digested
before, headers only. Stretches of acquires and of Ray calls take turns, so that a busy machine slows both.

``first_seen``: the first acquire of a prompt of its own, which was stored and never asked for.
``repeated``: one of the same prompts again, after all the others were asked for. Nobody may answer for the
other: the figures say what remembering a prompt is worth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...actors.client import HolderClient, request_id
from ...actors.fabric import Fabric, connect, launch
from ...actors.lease import Lease
from ...actors.session import Session
from ...actors.spec import FabricSpec
from ...fabric import wire
from ...fabric.identity import PromptKeys
from ...fabric.kinds import Status
from ...fabric.messages import Done, Release
from .core import report
from .directory_core import figure

BLOCK_TOKENS = 16
BLOCKS, GROUPS, BLOCK_BYTES = 64, 5, 64 << 10
PROMPTS = 48
ROUNDS = 5
"""How often each prompt is asked for again."""
STRETCH = 8

LONG_BLOCK_TOKENS = 128
LONG_BLOCKS, LONG_GROUPS, LONG_BLOCK_BYTES = 8192, 7, 64
LONG_PROMPTS = 3
LONG_ROUNDS = 5
STORE_BLOCKS = 1024
"""Blocks a group stored at a time: one request names them all."""

CHECKS = 2000
RAY_TARGET = 0.25
CHECK_TARGET_US = 10.0

EXPECTED = (
    "local_hit_64x5_first_seen_of_a_ray_call",
    "local_hit_64x5_repeated_of_a_ray_call",
    "local_hit_64x5_first_seen_p50",
    "local_hit_64x5_repeated_p50",
    "local_hit_64x5_repeated_acquire_p50",
    "local_hit_64x5_repeated_release_p50",
    "ray_noop_call_p50",
    "socket_round_trip_p50",
    "check_320_slots",
    "lease_bytes_64x5",
    "local_hit_8192x7_tiny_blocks_first_seen_of_a_ray_call",
    "local_hit_8192x7_tiny_blocks_repeated_of_a_ray_call",
    "local_hit_8192x7_tiny_blocks_first_seen_p50",
    "local_hit_8192x7_tiny_blocks_repeated_p50",
    "check_57344_slots",
    "lease_bytes_8192x7",
)
"""Every figure there must be: one that is missing fails like one that does not hold."""

Figure = dict[str, Any]


def run() -> dict[str, Any]:
    """Measure everything: ``{"bench", "machine", "figures": [{name, value, unit, target, holds}]}``."""
    return report("lease", figures(), EXPECTED)


def figures() -> list[Figure]:
    """All figures. Starts an embedded Ray cluster; raises FabricError if it does not come up."""
    short = _spec("bench-lease", GROUPS, BLOCK_TOKENS, BLOCK_BYTES, PROMPTS * BLOCKS)
    long = _spec("bench-lease-long", LONG_GROUPS, LONG_BLOCK_TOKENS, LONG_BLOCK_BYTES, LONG_PROMPTS * LONG_BLOCKS)
    with launch(short, name="bench-lease") as fabric:
        noop = _noop()
        with connect("bench-lease") as session:
            found = list(_short(fabric, session, noop))
        with launch(long, name="bench-lease-long"), connect("bench-lease-long") as session:
            found.extend(_long(session, noop))
    return found


def _spec(name: str, groups: int, block_tokens: int, block_bytes: int, slots: int) -> FabricSpec:
    """So many groups of ordinary history, each with so many slots."""
    kind = {"kind": "compressed_history", "block_tokens": block_tokens, "block_bytes": block_bytes}
    model = {"name": name, "groups": [{"name": f"g{i}", **kind} for i in range(groups)]}
    return FabricSpec.load({"model": model, "slots": {f"g{i}": slots for i in range(groups)}})


def _noop() -> Callable[[], float]:
    """Seconds that one call of an actor on this node takes which does nothing."""
    import ray

    class Noop:
        def call(self) -> None:
            """Nothing."""

    handle: Any = ray.remote(Noop).options(num_cpus=0).remote()

    def call() -> float:
        began = time.perf_counter()
        ray.get(handle.call.remote())
        return time.perf_counter() - began

    for _ in range(100):
        call()
    return call


def _short(fabric: Fabric, session: Session, noop: Callable[[], float]) -> Iterator[Figure]:
    keys = [_stored(session, number, BLOCKS * BLOCK_TOKENS) for number in range(PROMPTS)]
    rounds = _asked(session, keys, noop, ROUNDS)
    yield from _hits("local_hit_64x5", *rounds, target=RAY_TARGET)
    yield figure("local_hit_64x5_repeated_acquire_p50", _p50_us([a for a, _ in rounds[1]]), "us")
    yield figure("local_hit_64x5_repeated_release_p50", _p50_us([r for _, r in rounds[1]]), "us")
    yield figure("ray_noop_call_p50", _p50_us(rounds[2]), "us")
    yield figure("socket_round_trip_p50", _p50_us(_round_trips(fabric)), "us")
    yield from _of_a_lease(session, keys[0], "lease_bytes_64x5", "check_320_slots", CHECK_TARGET_US)


def _long(session: Session, noop: Callable[[], float]) -> Iterator[Figure]:
    keys = [_stored(session, number, LONG_BLOCKS * LONG_BLOCK_TOKENS) for number in range(LONG_PROMPTS)]
    yield from _hits("local_hit_8192x7_tiny_blocks", *_asked(session, keys, noop, LONG_ROUNDS))
    yield from _of_a_lease(session, keys[0], "lease_bytes_8192x7", "check_57344_slots", None)


Spent = tuple[list[tuple[float, float]], list[tuple[float, float]], list[float]]
"""Seconds of (acquire, release) of prompts first seen and repeated, and of a Ray call."""


def _asked(session: Session, keys: list[PromptKeys], noop: Callable[[], float], rounds: int) -> Spent:
    first: list[tuple[float, float]] = []
    repeated: list[tuple[float, float]] = []
    calls: list[float] = []
    for turn in range(1 + rounds):
        into = repeated if turn else first
        for at in range(0, len(keys), STRETCH):
            into.extend(_hit(session, prompt) for prompt in keys[at : at + STRETCH])
            calls.extend(noop() for _ in range(STRETCH))
    return first, repeated, calls


def _hit(session: Session, keys: PromptKeys) -> tuple[float, float]:
    began = time.perf_counter()
    answer = session.acquire(keys)
    granted = time.perf_counter()
    if answer.lease is None or answer.status is not Status.FULL_HIT:
        raise RuntimeError(f"a prompt at hand is a {answer.status}: {answer.cause}")
    released = time.perf_counter()
    answer.lease.release()
    return granted - began, time.perf_counter() - released


def _hits(
    name: str,
    first: list[tuple[float, float]],
    repeated: list[tuple[float, float]],
    calls: list[float],
    target: float | None = None,
) -> Iterator[Figure]:
    for kind, hits in (("first_seen", first), ("repeated", repeated)):
        both_us = _p50_us([acquired + released for acquired, released in hits])
        yield figure(f"{name}_{kind}_of_a_ray_call", both_us / _p50_us(calls), "share", target)
        yield figure(f"{name}_{kind}_p50", both_us, "us")


def _p50_us(seconds: list[float]) -> float:
    return 1e6 * statistics.median(seconds)


def _round_trips(fabric: Fabric) -> list[float]:
    """Seconds of the smallest request over the same socket: a hit needs two."""
    here = fabric.info()
    member = next(m for m in here.members if m.shards and m.node == here.node)
    client = HolderClient(member)
    spent = []
    for _ in range(400):
        began = time.perf_counter()
        client.call(Release(request_id(), 0, None), Done)
        spent.append(time.perf_counter() - began)
    client.close()
    return spent[100:]


def _of_a_lease(
    session: Session, keys: PromptKeys, bytes_name: str, check_name: str, check_us: float | None
) -> Iterator[Figure]:
    lease = session.acquire(keys).lease
    if lease is None:
        raise RuntimeError("a prompt at hand was not granted again")
    with lease:
        yield figure(bytes_name, len(wire.encode_plain(lease.grant)), "bytes")
        yield figure(check_name, _check_us(lease), "us", check_us)


def _check_us(lease: Lease) -> float:
    spent = []
    for _ in range(CHECKS):
        began = time.perf_counter()
        refused = lease.check()
        spent.append(time.perf_counter() - began)
        if refused is not None:
            raise RuntimeError(f"the lease does not stand: {refused}")
    return _p50_us(spent)


def _stored(session: Session, number: int, tokens: int) -> PromptKeys:
    """A prompt of its own whose every block is stored, and one token more; its digests are computed."""
    model = session.model
    keys = session.keys(np.random.default_rng(number).integers(0, 50_000, tokens + 1))
    for unit in model.units_tokens:
        keys.keys(unit)
    block = np.full(model.groups[0].block_bytes, number % 251, dtype=np.uint8)
    blocks = tokens // model.groups[0].unit_tokens
    for at in range(0, blocks, STORE_BLOCKS):
        part = dict.fromkeys(range(at, min(at + STORE_BLOCKS, blocks)), block)
        stored = session.publish(keys, {group.name: part for group in model.groups})
        if not stored.ok:
            raise RuntimeError(f"prompt {number} was not stored: {stored.refused}")
    return keys
