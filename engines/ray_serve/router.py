"""A Ray Serve request router that sends each request to the node where its state is.

    serve.deployment(
        request_router_config=RequestRouterConfig(
            request_router_class="kvfabric.engines.ray_serve.router:StateRouter",
            request_router_kwargs={"fabric": "default"},
        )
    )(Engine)

The request is the first argument of the call: its prompt's tokens. Needs ``ray[serve]``, the package's extra ``serve``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from ...actors.async_session import AsyncSession
from ...actors.fabric import connect_async
from ...fabric.kinds import FabricError
from ...fabric.ranking import NodeRank

logger = logging.getLogger("ray.serve")


class StateRouter(RequestRouter):
    """Offers a request to the replicas of the best node first: the farthest resume, then the fewest bytes to move.

    Replicas of nodes that rank alike stand together, and Serve takes the one with the shorter queue, of equal ones the
    first: so they are shuffled. Where they are all full, the next best are asked. Whatever goes wrong with the ranking costs the order, never the request.
    """

    def initialize_state(self, *, fabric: str = "default", rank_timeout_s: float = 0.5, **_: Any) -> None:
        """Takes ``request_router_kwargs``. ``rank_timeout_s``: what a request waits for its ranking at most."""
        self.fabric = fabric
        self.rank_timeout_s = rank_timeout_s
        self._session: AsyncSession | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in the order in which they are to be offered the request."""
        left = random.sample(candidate_replicas, len(candidate_replicas))
        if pending_request is None:
            return [left]
        pending_request.routing_context.should_backoff = True  # once all were asked and all were full
        try:
            ranks = await asyncio.wait_for(self.ranks(pending_request, candidate_replicas), self.rank_timeout_s)
        except (FabricError, TimeoutError) as error:
            logger.warning("routed without a ranking: %s", error)
            return [left]
        offered = []
        for _, alike in itertools.groupby(ranks, lambda rank: (rank.tokens, rank.cost_bytes)):
            nodes = {rank.node for rank in alike}
            offered.append([replica for replica in left if replica.node_id in nodes])
            left = [replica for replica in left if replica.node_id not in nodes]
        return [*offered, left]  # Serve passes over an empty list

    async def ranks(self, request: PendingRequest, replicas: Sequence[RunningReplica]) -> list[NodeRank]:
        """The nodes, best first; none for a request of which nothing can be said."""
        return await (await self.session()).rank(request.args[0])

    async def session(self) -> AsyncSession:
        """This router's own. Raises FabricError where no such fabric runs."""
        if self._session is None:
            self._session = await connect_async(self.fabric)
        return self._session
