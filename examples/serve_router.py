"""A Ray Serve request router that sends each request to the node where its state is.

Run it with ``python examples/serve_router.py`` (it needs ``ray[serve]``, the package's extra ``serve``). Two replicas,
each on a node of its own; conversations grow turn by turn, and every turn goes where the one before was computed.
The state is made up; an engine's adapter would bring its cache's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig

import kvfabric

MODEL = {
    "name": "tiny",
    "groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 16384}],
}
REPLICAS = 2
TURN_TOKENS = 64
logger = logging.getLogger("ray.serve")


class StateRouter(RequestRouter):
    """Offers a request to the replicas of the best node first: the farthest resume, then the fewest bytes to move.

    Replicas of nodes that rank alike stand together, and Serve takes the one with the shorter queue; where they are all
    full, the next best are asked. Whatever goes wrong with the ranking costs the order, never the request.
    """

    def initialize_state(self, *, fabric: str = "default", rank_timeout_s: float = 0.5, **_: Any) -> None:
        """Takes ``request_router_kwargs``. ``rank_timeout_s``: what a request waits for its ranking at most."""
        self.fabric = fabric
        self.rank_timeout_s = rank_timeout_s
        self.session: kvfabric.AsyncSession | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in the order in which they are to be offered the request."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # once all were asked and all were full
        try:
            ranks = await asyncio.wait_for(self._ranks(pending_request.args[0]), self.rank_timeout_s)
        except (kvfabric.FabricError, TimeoutError) as error:
            logger.warning("routed without a ranking: %s", error)
            return [candidate_replicas]
        left = list(candidate_replicas)
        offered = []
        for _, alike in itertools.groupby(ranks, lambda rank: (rank.tokens, rank.cost_bytes)):
            nodes = {rank.node for rank in alike}
            offered.append([replica for replica in left if replica.node_id in nodes])
            left = [replica for replica in left if replica.node_id not in nodes]
        return [*offered, left]  # Serve passes over an empty list

    async def _ranks(self, tokens: list[int]) -> list[Any]:
        if self.session is None:
            self.session = await kvfabric.connect_async(self.fabric)
        return await self.session.rank(tokens)


class Engine:
    """An inference engine's stand-in: resumes what it can, "computes" the rest and publishes it."""

    def __init__(self) -> None:
        self.session = kvfabric.connect()

    def __call__(self, tokens: list[int]) -> dict[str, Any]:
        """Returns where the request ran, how far it resumed and what was moved for that."""
        answer = self.session.acquire(tokens)
        if answer.lease is not None:
            answer.lease.release()
        (group,) = self.session.model.groups
        missing = range(answer.tokens // group.unit_tokens, len(tokens) // group.unit_tokens)
        computed = {index: np.full(group.block_bytes, index % 256, dtype=np.uint8) for index in missing}
        self.session.publish(tokens, {group.name: computed})
        moved = sum((answer.moved_bytes or {}).values())
        return {"node": ray.get_runtime_context().get_node_id(), "resumed": answer.tokens, "moved": moved}


def converse(engine: DeploymentHandle[Any], first: int) -> str:
    """Four conversations of four turns each; what became of them."""
    stayed = moved = resumed = 0
    for conversation in range(first, first + 4):
        tokens: list[int] = []
        home = ""
        for turn in range(4):
            tokens += [(conversation * 1009 + turn * 101 + i) % 32_000 for i in range(TURN_TOKENS)]
            told = engine.remote([*tokens, 1]).result(timeout_s=30.0)
            stayed += turn > 0 and told["node"] == home
            home = told["node"]
            moved += told["moved"]
            resumed += told["resumed"]
    return f"{stayed} of 12 turns went where the one before was computed, {resumed} tokens resumed, {moved} bytes moved"


def main() -> None:
    """The same conversations by this router and by Serve's own."""
    with kvfabric.launch({"model": MODEL, "memory_bytes": 64 << 20}, nodes=REPLICAS) as fabric:
        print(f"launched: {len(fabric.status()['holders'])} holders")
        serve.start(proxy_location="Disabled", logging_config=LoggingConfig(log_level="ERROR"))
        try:
            served: Any = serve.deployment(
                num_replicas=REPLICAS,
                max_replicas_per_node=1,
                max_ongoing_requests=4,
                ray_actor_options={"num_cpus": 0},
            )(Engine)
            router: dict[str, Any] = {
                "request_router_class": StateRouter,
                "request_router_kwargs": {"fabric": fabric.name},
            }
            by_state = served.options(request_router_config=RequestRouterConfig(**router))
            engine = serve.run(by_state.bind(), name="state", route_prefix=None)
            print(f"by state: {converse(engine, 0)}")
            engine = serve.run(served.bind(), name="queues", route_prefix=None)
            print(f"by queues: {converse(engine, 4)}")
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
    print("shut down")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
