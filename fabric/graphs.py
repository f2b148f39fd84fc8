"""The graph desk: slots that captured CUDA graphs have baked in.

An engine registers its slots once, at capture; registration refuses a slot that is not resident. A
graph lease is granted only when everything it needs lies in these very slots: what lies elsewhere is
copied there first, through the same proof as any other copy. It freezes them until release. When it
expires its slots stay as they are, since the process may replay the graph at any time, until that
process is proven dead or says that the graph is idle.

    registered --acquire--> frozen --release--> registered
                                   --deadline--> expired, still frozen --idle, or process dead--> registered
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .arena import SlotState
from .context import HolderContext
from .kinds import Reason
from .leases import LeaseRecord
from .messages import Done, GraphIdle, GraphRegister, GraphRegistered, SlotRun

GRAPHS_MAX = 256


@dataclass(frozen=True, slots=True)
class Graph:
    """One registered graph: where each object of a group and shard must lie, by index."""

    number: int
    client: str
    slots: dict[tuple[int, int], dict[int, int]]


class GraphDesk:
    """All registered graphs of one holder's life."""

    def __init__(self, ctx: HolderContext) -> None:
        self.ctx = ctx
        self.graphs: dict[int, Graph] = {}
        self.release: Callable[[int], object] = lambda lease: ctx.leases.end(lease, ctx.now)

    def register(self, client: str, message: GraphRegister) -> None:
        """Take a graph's slots, all of them or none."""
        refusal = self._refusal(message)
        if refusal is not None:
            reason, group = refusal
            self.ctx.send(client, GraphRegistered(message.request, 0, reason, group))
            return
        number = self.ctx.number()
        slots: dict[tuple[int, int], dict[int, int]] = {}
        for run in message.slots:
            numbers = np.frombuffer(run.slots, dtype="<u4").tolist()
            slots.setdefault((run.group, run.shard), {}).update(zip(run.indices, numbers, strict=True))
        self.graphs[number] = Graph(number, client, slots)
        self.ctx.send(client, GraphRegistered(message.request, number, None, ""))

    def _refusal(self, message: GraphRegister) -> tuple[Reason, str] | None:
        if len(self.graphs) >= GRAPHS_MAX:
            return Reason.QUOTA, ""
        for run in message.slots:
            refused = self._not_resident(run)
            if refused is not None:
                return refused, self.ctx.model.groups[run.group].name
        return None

    def _not_resident(self, run: SlotRun) -> Reason | None:
        """Why one of these slots cannot be captured: another pool's, or not bearing these bytes now."""
        pool = self.ctx.books.pools.get((run.group, run.shard))
        slots = np.frombuffer(run.slots, dtype="<u4").astype(np.int64)
        if pool is None or ((slots < pool.first) | (slots >= pool.first + pool.slots)).any():
            return Reason.VERSION_CHANGED
        if not all(self.ctx.books.slabs.has((run.group, run.shard), slot) for slot in slots.tolist()):
            return Reason.VERSION_CHANGED
        arena = self.ctx.arena
        if arena.versions[slots].tobytes() != run.versions or (arena.states[slots] != SlotState.SEALED).any():
            return Reason.VERSION_CHANGED
        return None

    def idle(self, client: str, message: GraphIdle) -> None:
        """The graph does not run: what expired while it might have is let go."""
        graph = self.graphs.get(message.graph)
        if graph is not None:
            self._let_go(lambda record: record.graph_number == message.graph)
            if message.drop:
                del self.graphs[message.graph]
        self.ctx.send(client, Done(message.request, None, ""))

    def client_gone(self, client: str) -> None:
        """The process that might replay its graphs is proven dead."""
        for number in [n for n, g in self.graphs.items() if g.client == client]:
            del self.graphs[number]
        for record in self.ctx.leases.live.values():
            if record.graph and record.client == client:
                record.graph = False
                for run in record.proof.runs:
                    self.ctx.books.freeze(run.slots, -1)
        self._let_go(lambda record: record.client == client)

    def _let_go(self, concerns: Callable[[LeaseRecord], bool]) -> None:
        """End the expired leases concerned, on every rank."""
        now = self.ctx.now
        for record in [r for r in self.ctx.leases.live.values() if now >= r.deadline_s and concerns(r)]:
            self.release(record.lease)
