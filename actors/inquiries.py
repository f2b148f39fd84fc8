"""The supervisor's part in answering: it asks every process, and puts together what they say."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..fabric.kinds import FabricError
from ..fabric.messages import Purge, Purged, SeriesReply, SeriesRequest, StatusReply, StatusRequest
from ..fabric.supervisor import SupervisorCore
from .estate import Estate
from .mesh import Mesh
from .shards import is_directory
from .spec import FabricSpec

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0
PURGE_TIMEOUT_S = 10.0
PURGE_EVERY_S = 0.2


class Inquiries:
    """Methods of the supervisor's actor."""

    if TYPE_CHECKING:
        fabric: str
        spec: FabricSpec
        estate: Estate
        core: SupervisorCore
        mesh: Mesh | None

        def _scaling_status(self) -> dict[str, Any]: ...
        def _drain_summary(self, node: str) -> dict[str, Any]: ...

    async def status(self) -> str:
        """JSON: every process with what it says of itself."""
        assert self.mesh is not None
        members = self.core.members().members
        replies = await asyncio.gather(*(self._status_of(m.address) for m in members))
        processes = {
            address: {"life": str(p.life), "node": p.wanted.node, "failure": self.core.failures.get(address, "")}
            for address, p in self.core.processes.items()
        }
        return json.dumps(
            {
                "fabric": self.fabric,
                "pid": os.getpid(),
                "model": self.spec.model.name,
                "weights": self.estate.weights,
                "bypassed": self.core.bypassed,
                "supervisor": {"pid": os.getpid(), "incarnation": self.core.incarnation},
                "scaling": self._scaling_status(),
                "drains": [self._drain_summary(node) for node in self.core.drains],
                "processes": processes,
                "directory": [r for r in replies if is_directory(r.get("address", ""))],
                "holders": [r for r in replies if not is_directory(r.get("address", ""))],
            }
        )

    async def _status_of(self, address: str, of: str = "") -> Any:
        assert self.mesh is not None
        try:
            reply = await self.mesh.ask(address, StatusRequest("status", of), STATUS_TIMEOUT_S)
        except FabricError as error:
            return {"address": address, "error": str(error)}
        return json.loads(reply.status) if isinstance(reply, StatusReply) else {"address": address}

    async def series(self) -> str:
        """JSON: by address, the samples that each holder kept of its life (``fabric/series.py``)."""
        assert self.mesh is not None
        addresses = [m.address for m in self.core.members().members if m.shards]
        replies = await asyncio.gather(*(self._series_of(address) for address in addresses))
        return json.dumps(dict(zip(addresses, replies, strict=True)))

    async def _series_of(self, address: str) -> list[Any]:
        assert self.mesh is not None
        try:
            reply = await self.mesh.ask(address, SeriesRequest("series"), STATUS_TIMEOUT_S)
        except FabricError as error:
            logger.info("%s: its series is not known: %s", address, error)
            return []
        return list(json.loads(reply.samples)) if isinstance(reply, SeriesReply) else []

    async def inquire(self, of: str) -> str:
        """JSON: what each process answers to a question (``leases``, ``health``), by address; ``error`` where none came."""
        assert self.mesh is not None
        addresses = [m.address for m in self.core.members().members]
        replies = await asyncio.gather(*(self._status_of(address, of) for address in addresses))
        return json.dumps(dict(zip(addresses, replies, strict=True)))

    async def purge(
        self,
        tenant: str | None,
        namespace: bytes,
        keys: list[tuple[int, bytes]],
        *,
        quarantine: bool = False,
        timeout_s: float = PURGE_TIMEOUT_S,
    ) -> str:
        """JSON: what every holder took out (or barred), in as many passes as it took, and what is ``left``.

        A holder that does not answer is in ``unanswered``: what it holds is not proven gone.
        """
        deadline = time.monotonic() + timeout_s
        total: Counter[str] = Counter()
        message = Purge("purge", tenant, namespace, tuple((unit, blob) for unit, blob in keys), quarantine)
        while True:
            addresses = [m.address for m in self.core.members().members if not is_directory(m.address)]
            passed = await asyncio.gather(*(self._purge_at(address, message) for address in addresses))
            answered = [p for p in passed if isinstance(p, Purged)]
            for one in answered:
                total.update(objects=one.objects, bytes=one.object_bytes, extents=one.extents, leases=one.leases)
            missing = self.core.wanted - set(addresses)
            unanswered = [a for a, p in zip(addresses, passed, strict=True) if not isinstance(p, Purged)]
            unanswered += [address for address in missing if not is_directory(address)]
            left = sum(p.left for p in answered)
            if not (left or unanswered) or time.monotonic() >= deadline:
                counts = {name: total[name] for name in ("objects", "bytes", "extents", "leases")}
                return json.dumps({**counts, "holders": len(addresses), "left": left, "unanswered": sorted(unanswered)})
            await asyncio.sleep(PURGE_EVERY_S)

    async def _purge_at(self, address: str, message: Purge) -> Any:
        assert self.mesh is not None
        try:
            return await self.mesh.ask(address, message, STATUS_TIMEOUT_S)
        except FabricError as error:
            logger.warning("%s: %s did not answer a purge: %s", self.fabric, address, error)
            return None
