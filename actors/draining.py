"""The supervisor's part in emptying nodes: who said that one goes, and what became of its state."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..fabric.kinds import FabricError
from ..fabric.supervisor import DrainNode, SupervisorCore, SupervisorEvent
from . import ray_api
from .clock import Clock
from .estate import left_s

DRAIN_WITHIN_S = 30.0
"""How long a drain may take of which Ray does not tell when the node goes."""
DRAIN_MARGIN_S = 1.0
"""How much sooner than the node goes its drain is to be over."""
REPORT_TIMEOUT_S = 5.0
"""How long after a drain's deadline its holders' reports are awaited."""


class Draining:
    """Methods of the supervisor's actor."""

    if TYPE_CHECKING:
        core: SupervisorCore
        clock: Clock
        _nodes: dict[str, ray_api.Node]

        def _feed(self, event: SupervisorEvent) -> None: ...
        async def _in_thread(self, call: Callable[[], Any]) -> Any: ...
        async def _keep(self) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        self._heard = asyncio.Event()
        """Set whenever a process said something."""

    async def _look_for_drains(self) -> None:
        """Whom Ray is about to take away."""
        draining = await self._in_thread(ray_api.draining_nodes)
        for node, until in draining.items():
            if node in self._nodes and node not in self.core.drains:
                within_s = left_s(until) if until else DRAIN_WITHIN_S
                self._feed(DrainNode(node, max(within_s - DRAIN_MARGIN_S, 0.0), "ray"))
                await self._keep()

    async def drain(self, node: str, within_s: float) -> str:
        """Empty a node, named by its Ray id or a prefix of it, and tell as JSON what became of its state.

        Raises FabricError unless it is one node.
        """
        found = [known for known in self._nodes if known.startswith(node)] if node else []
        if len(found) != 1:
            raise FabricError(f"node: {len(found)} nodes of the cluster have an id that begins with {node!r}")
        self._feed(DrainNode(found[0], within_s, "asked"))
        await self._keep()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s + REPORT_TIMEOUT_S):
                await self._drained(found[0])
        return json.dumps(self._drain_summary(found[0]))

    async def _drained(self, node: str) -> None:
        """Wait until a node's drain is over, or it is gone."""
        while (drain := self.core.drains.get(node)) is not None and not drain.over:
            self._heard.clear()
            await self._heard.wait()

    def _drain_summary(self, node: str) -> dict[str, Any]:
        drain = self.core.drains.get(node)
        if drain is None:
            return {"node": node, "why": "", "over": True, "left_s": 0.0}
        summary: dict[str, Any] = {
            "node": node,
            "why": drain.why,
            "over": drain.over,
            "left_s": round(max(drain.deadline_s - self.clock.now(), 0.0), 3),
            "spent_s": round(max((r.spent_s for r in drain.reports.values()), default=0.0), 3),
            "leases_cut": sum(r.leases_cut for r in drain.reports.values()),
        }
        for name, tally in self.core.drain_sum(node).items():
            summary[f"{name}_objects"] = tally.objects
            summary[f"{name}_bytes"] = tally.size_bytes
            summary[f"{name}_value"] = tally.value
        return summary
