"""A captured CUDA graph's slots, registered with the holders that own them.

lease = session.acquire(tokens).lease
graph = session.register_graph(lease)         # at capture; Stored-like refusal: capture is not allowed
...
answer = session.acquire(other, graph=graph)  # granted only in the very same slots
graph.idle()                                  # nothing replays now: expired leases let go
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from ..fabric.kinds import Reason
from ..fabric.messages import Done, GraphIdle, GraphRegister, GraphRegistered, LeaseGrant
from .attempt import Stored
from .client import HolderClient, HolderLost, request_id


class Graph:
    """A registered graph. Dropping it keeps the registration until this process's connection ends."""

    def __init__(self, numbers: Mapping[str, int], clients: Mapping[str, HolderClient]) -> None:
        self.numbers = dict(numbers)
        self._clients = dict(clients)

    @classmethod
    def register(cls, grant: LeaseGrant, clients: Mapping[str, HolderClient]) -> Graph | Stored:
        """At every holder of the lease, or nowhere."""
        graph = cls({}, clients)
        for part in grant.parts:
            try:
                reply = clients[part.holder].call(GraphRegister(request_id(), part.slots), GraphRegistered)
            except HolderLost:
                reply = GraphRegistered("", 0, Reason.HOLDER_LOST, "")
            if reply.refused is not None:
                graph.close()
                return Stored(reply.refused, reply.group)
            graph.numbers[part.holder] = reply.graph
        return graph

    def idle(self) -> None:
        """Nothing replays this graph now: the slots of its expired leases are let go."""
        self._tell(drop=False)

    def close(self) -> None:
        """The graph will never run again. Idempotent."""
        self._tell(drop=True)
        self.numbers = {}

    def _tell(self, *, drop: bool) -> None:
        for holder, number in self.numbers.items():
            with contextlib.suppress(HolderLost):  # a holder that is gone holds nothing frozen
                self._clients[holder].call(GraphIdle(request_id(), number, drop), Done)
