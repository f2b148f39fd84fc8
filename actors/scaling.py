"""The supervisor's part in scaling: what it sees of nodes and holders, and what it asks of Ray's autoscaler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..fabric.scaling import NodeUse, ScaleDown, ScaleUp
from ..fabric.supervisor import DrainNode, SupervisorCore, SupervisorEffect, SupervisorEvent
from . import ray_api
from .clock import Clock
from .spec import FabricSpec

logger = logging.getLogger(__name__)


class Scaling:
    """Methods of the supervisor's actor."""

    if TYPE_CHECKING:
        fabric: str
        spec: FabricSpec
        core: SupervisorCore
        clock: Clock

        def _feed(self, event: SupervisorEvent) -> None: ...
        def _carry_out(self, effects: list[SupervisorEffect]) -> None: ...
        async def _in_thread(self, call: Callable[[], Any]) -> Any: ...
        async def _keep(self) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        self._down: ScaleDown | None = None
        self._up: ScaleUp | None = None
        self._requested = 0
        self._sizes: dict[str, int] = {}

    async def _scale(self, hosts: list[ray_api.Node]) -> None:
        """Let go of holders where nobody works, take them back where somebody does, ask for nodes under pressure."""
        scale, now = self.spec.scale, self.clock.now()
        self._down = self._down or ScaleDown(scale.down_config())
        self._up = self._up or ScaleUp(scale.up_config())
        members = [(p.member, p.load) for p in self.core.processes.values() if p.member is not None and p.member.shards]
        wanted = self._up.look(
            {(m.address, m.incarnation): load for m, load in members if load is not None}, len(hosts), now
        )
        if scale.up and wanted != self._requested:
            logger.warning("%s: pressure %.2f: asks for %d nodes", self.fabric, self._up.pressure.value, wanted)
            await self._in_thread(lambda: ray_api.request_nodes(scale.bundle, wanted))
            self._requested = wanted
        if scale.idle_s is None:
            return
        in_use = await self._in_thread(ray_api.nodes_in_use)
        clients = {m.node for m, load in members if load is None or load.clients}
        for node in in_use & self.core.retired_nodes:
            self._carry_out(self.core.engage(node))
        uses = [self._use_of(node, engines=node.node in in_use | clients) for node in hosts]
        there = [use for use in uses if use.node not in self.core.retired_nodes]
        going = self._down.look(there, now, wanted=self._requested)
        for node in going:
            self._feed(DrainNode(node, scale.drain_s, "idle", retire=True))
        if going:
            await self._keep()

    def _use_of(self, node: ray_api.Node, *, engines: bool) -> NodeUse:
        size = self._sizes.get(node.node)
        if size is None:
            slots, places = self.spec.slots_on(node.resources), range(self.spec.holders_per_node)
            layouts = [self.spec.layout(self.spec.shards_of(place), slots) for place in places]
            size = self._sizes[node.node] = sum(layout.size_bytes for layout in layouts)
        stays = ray_api.HEAD in node.resources or node.node in self.core.drains
        return NodeUse(node.node, engines, size, stays)

    def _scaling_status(self) -> dict[str, Any]:
        pressure = None if self._up is None else self._up.pressure
        return {
            "pressure": 0.0 if pressure is None else round(pressure.value, 3),
            "refused": 0.0 if pressure is None else round(pressure.refused, 3),
            "evicted": 0.0 if pressure is None else round(pressure.evicted, 3),
            "waiting": 0.0 if pressure is None else round(pressure.waiting, 3),
            "wanted_nodes": 0 if self._up is None else self._up.wanted_nodes,
            "requested_nodes": self._requested,
            "retired_nodes": sorted(self.core.retired_nodes),
        }
