"""A Serve router whose fabric does not answer loses the order, never the request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using extra keyword arguments on `Field`:DeprecationWarning"  # ray.serve.config
)


def test_a_router_without_a_fabric_offers_every_replica() -> None:
    from kvfabric.engines.ray_serve.router import StateRouter

    router: Any = object.__new__(StateRouter)
    router.initialize_state(fabric="there-is-none")
    request: Any = SimpleNamespace(args=[[1, 2, 3]], routing_context=SimpleNamespace(should_backoff=False))
    replicas: Any = [SimpleNamespace(node_id="a"), SimpleNamespace(node_id="b")]
    offered = [asyncio.run(router.choose_replicas(replicas, request)) for _ in range(40)]
    assert all(len(groups) == 1 and {r.node_id for r in groups[0]} == {"a", "b"} for groups in offered)
    assert len({groups[0][0].node_id for groups in offered}) == 2, (
        "Serve takes the first of equal queues: not always one"
    )
    assert request.routing_context.should_backoff
