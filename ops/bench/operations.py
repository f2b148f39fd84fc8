"""``kvfabric bench operations``: nodes that join and leave a running fabric, and what metrics cost.

``join``: from the moment Ray calls a node alive to the first grant of its holder, process start included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...actors import ray_api
from ...actors.fabric import Fabric, launch
from ...actors.spec import FabricSpec
from .core import complete, machine
from .directory_core import figure
from .operations_metrics import metrics_cost

JOINS = 3
JOIN_TARGET_S = 5.0
JOIN_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.05

EXPECTED = ("join_to_serving", "metrics_of_an_acquire", "counting_an_acquire", "acquire_and_release")
"""Every figure there must be: one that is missing fails like one that does not hold."""

Figure = dict[str, Any]


def run() -> dict[str, Any]:
    """Measure everything: ``{"bench", "machine", "figures": [{name, value, unit, target, holds}]}``."""
    return {"bench": "operations", "machine": machine(), "figures": complete(figures(), EXPECTED)}


def figures() -> list[Figure]:
    """All figures. Starts an embedded Ray cluster; raises FabricError if it does not come up."""
    kv = {"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 65536}
    spec = FabricSpec.load({"model": {"name": "bench-operations", "groups": [kv]}, "memory_bytes": 16 << 20})
    with launch(spec, name="bench-operations") as fabric:
        return [*metrics_cost(fabric), *_join(fabric)]


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
