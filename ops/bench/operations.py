"""``kvfabric bench operations``: nodes that join and leave a running fabric, and what metrics cost.

``join``: from the moment Ray calls a node alive to the first grant of its holder, process start included.
``drain``: 1 GiB in chains that were used more or less often, 30 s, a link that carries 20 MiB a second. What is moved is
weighed against the best that fits, by what the eviction policy says the memory was worth a moment before; and what
a reader on the other node finds afterwards, weighed by uses, against the same after a kill without a drain.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ...actors import ray_api
from ...actors.fabric import Fabric, connect, launch
from ...actors.spec import FabricSpec
from .core import report
from .directory_core import figure
from .operations_metrics import metrics_cost

JOINS = 3
JOIN_TARGET_S = 5.0
JOIN_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.05

DRAIN_S = 30.0
LINK_BYTES_PER_S = 20 << 20
BLOCK_TOKENS, BLOCK_BYTES = 16, 64 << 10
CHAIN_BLOCKS = 256
CHAINS = 64
"""1 GiB in all: 64 chains of 16 MiB."""
KILLED_CHAINS = 4
USES = (0, 1, 2, 4, 8)
"""How often chains are asked for after they were stored, in turn."""
VALUE_TARGET = 0.9

EXPECTED = (
    "join_to_serving",
    "drain_value_of_the_best_that_fits",
    "drain_tokens_kept_by_uses_of_the_best_that_fits",
    "drain_moved",
    "drain_spent",
    "kill_tokens_kept_by_uses",
    "metrics_of_an_acquire",
    "counting_an_acquire",
    "acquire_and_release",
)
"""Every figure there must be: one that is missing fails like one that does not hold."""

Figure = dict[str, Any]


def run() -> dict[str, Any]:
    """Measure everything: ``{"bench", "machine", "figures": [{name, value, unit, target, holds}]}``."""
    return report("operations", figures(), EXPECTED)


def figures() -> list[Figure]:
    """All figures. Starts an embedded Ray cluster; raises FabricError if it does not come up."""
    with launch(_spec(256), name="bench-operations", nodes=2) as fabric:
        return [*metrics_cost(fabric), *_join(fabric), *_drains(fabric)]


def _spec(blocks: int, **fields: Any) -> FabricSpec:
    kv = {"name": "kv", "kind": "compressed_history", "block_tokens": BLOCK_TOKENS, "block_bytes": BLOCK_BYTES}
    return FabricSpec.load({"model": {"name": "bench-operations", "groups": [kv]}, "slots": {"kv": blocks}, **fields})


def _join(fabric: Fabric) -> Iterator[Figure]:
    cluster = fabric.embedded
    if cluster is None:
        raise RuntimeError("this bench adds nodes to a cluster of its own: unset RAY_ADDRESS")
    spent = []
    for number in range(JOINS):
        node = cluster.add_node(f"joined_{number}")
        _until(partial(_alive, node))
        alive_s = time.monotonic()
        _until(partial(_serves, fabric, node))
        spent.append(time.monotonic() - alive_s)
        cluster.remove_node(node)
        _until(partial(_forgotten, fabric, node))
    yield figure("join_to_serving", statistics.median(spent), "s", JOIN_TARGET_S)


def _drains(fabric: Fabric) -> Iterator[Figure]:
    """A drain in time, and a kill: each on a fabric of its own, from this node to the other."""
    if fabric.embedded is None:
        raise RuntimeError("this bench ends nodes' holders: unset RAY_ADDRESS")
    other = fabric.embedded.node_ids[1]
    link = {"links": ["tcp"], "tcp_bytes_per_s": LINK_BYTES_PER_S}
    with launch(_spec(CHAINS * CHAIN_BLOCKS, transport=link), name="bench-drain") as drained:
        uses = _stored(drained, CHAINS)
        here = drained.info().node
        address = next(m.address for m in drained.info().members if m.shards and m.node == here)
        worth = drained.worth()[address]
        told = drained.drain(here, deadline_s=DRAIN_S)
        _kill(drained, here)
        fits_bytes = DRAIN_S * LINK_BYTES_PER_S
        yield figure(
            "drain_value_of_the_best_that_fits",
            told["moved_value"] / _best(worth, fits_bytes),
            "share",
            VALUE_TARGET,
            most=False,
        )
        by_uses = sorted(((float(n), CHAIN_BLOCKS * BLOCK_BYTES) for n in uses), reverse=True)
        kept = _kept(drained, other, uses)
        yield figure("drain_tokens_kept_by_uses_of_the_best_that_fits", kept / _best(by_uses, fits_bytes), "share")
        yield figure("drain_moved", told["moved_bytes"] / (1 << 20), "MiB")
        yield figure("drain_spent", told["spent_s"], "s", DRAIN_S + 1.0)
    with launch(_spec(KILLED_CHAINS * CHAIN_BLOCKS, transport=link), name="bench-kill") as killed:
        uses = _stored(killed, KILLED_CHAINS)
        _kill(killed, killed.info().node)
        yield figure("kill_tokens_kept_by_uses", _kept(killed, other, uses), "bytes")


def _best(worth: list[tuple[float, int]], fits_bytes: float) -> float:
    """The greatest value that fits: (worth a byte, bytes) in order, the last one in part."""
    value, left = 0.0, fits_bytes
    for each, size in worth:
        taken = min(size, left)
        value, left = value + each * taken, left - taken
    return value


def _tokens(number: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(number).integers(0, 50_000, CHAIN_BLOCKS * BLOCK_TOKENS + 1).tolist()
    return drawn


def _stored(fabric: Fabric, chains: int) -> list[int]:
    """Chains stored here, each then asked for so many times; how often each was."""
    uses = [USES[number % len(USES)] for number in range(chains)]
    with connect(fabric.name) as session:
        for number in range(chains):
            block = np.full(BLOCK_BYTES, number % 251, dtype=np.uint8)
            stored = session.publish(_tokens(number), {"kv": dict.fromkeys(range(CHAIN_BLOCKS), block)})
            if not stored.ok:
                raise RuntimeError(f"chain {number} was not stored: {stored.refused}")
        for turn in range(max(USES)):
            for number in [number for number in range(chains) if uses[number] > turn]:
                session.acquire(_tokens(number)).cancel()
    return uses


def _kill(fabric: Fabric, node: str) -> None:
    """The holder of a node ends as its node's death would end it."""
    holder = next(h for h in fabric.status()["holders"] if h.get("node") == node)
    os.kill(holder["pid"], signal.SIGKILL)
    _until(partial(_dead, fabric, holder["pid"]))


def _dead(fabric: Fabric, pid: int) -> bool:
    return all(h.get("pid") != pid for h in fabric.status()["holders"])


def _kept(fabric: Fabric, node: str, uses: list[int]) -> float:
    """Bytes of the chains that a reader on another node finds, each times its uses."""
    import ray

    there: Any = ray.remote(found).options(num_cpus=0, label_selector={"ray.io/node-id": node})
    tokens = ray.get(there.remote(fabric.name, len(uses)), timeout=JOIN_TIMEOUT_S)
    return float(sum(n * each for n, each in zip(tokens, uses, strict=True))) / BLOCK_TOKENS * BLOCK_BYTES


def found(name: str, chains: int) -> list[int]:
    """How many tokens of each chain a session of this process's node could resume from."""
    with connect(name) as session:
        return [session.probe(_tokens(number)).tokens for number in range(chains)]


def _alive(node: str) -> bool:
    return any(known.node == node for known in ray_api.nodes())


def _forgotten(fabric: Fabric, node: str) -> bool:
    return all(member.node != node for member in fabric.info().members)


def _serves(fabric: Fabric, node: str) -> bool:
    return any(h.get("node") == node and h.get("grants") for h in fabric.status()["holders"])


def _until(holds: Callable[[], bool], timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """Raises RuntimeError where it does not hold in time."""
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() >= end:
            raise RuntimeError(f"not so within {timeout_s:.0f} s")
        time.sleep(LOOK_EVERY_S)
