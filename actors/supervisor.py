"""The supervisor's process: starts and ends the fabric's other processes as its core says.

Detached and named, one a fabric. It looks at the cluster once a second, renews the holders' right
to grant over the mesh, and learns of exits from broken connections, proven by the node's raylet.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..fabric import wire
from ..fabric.effects import Send
from ..fabric.identity import weights_digest16
from ..fabric.kinds import FabricError
from ..fabric.messages import Member, StatusReply, StatusRequest
from ..fabric.supervisor import (
    Exited,
    Life,
    Observed,
    Start,
    Started,
    StartFailed,
    Stop,
    SupervisorConfig,
    SupervisorCore,
    SupervisorEffect,
    SupervisorEvent,
    Tick,
    Wanted,
)
from . import ray_api
from .directory import Directory
from .holder import Holder
from .info import FabricInfo
from .mesh import Mesh
from .spec import FabricSpec, new_secret

logger = logging.getLogger(__name__)

DIRECTORY = "directory:0"
RECONCILE_S = 1.0
PING_TIMEOUT_S = 3.0
STATUS_TIMEOUT_S = 5.0


def actor_name(fabric: str, address: str, incarnation: int | None = None) -> str:
    """The name a process has in Ray. A life's number is part of it, so that lives never mix."""
    return f"{fabric}/{address}" if incarnation is None else f"{fabric}/{address}/{incarnation}"


class Supervisor:
    """Ray actor. Documented methods, all bytes or JSON: ``describe``, ``status``, ``handles``,
    ``update_weights``, ``set_bypass``, ``drain``, ``shutdown``, ``ready``.
    """

    def __init__(self, fabric: str, spec_json: str) -> None:
        self.fabric = fabric
        self.spec = FabricSpec.model_validate_json(spec_json)
        self.secret = new_secret()
        self.weights = self.spec.model.weights
        self.known_weights = [self.weights]
        config = SupervisorConfig(grant_s=self.spec.grant_s)
        self.core = SupervisorCore(config, time.monotonic(), inherited=False)
        self.core.weights = weights_digest16(self.weights)
        self.handles_by_address: dict[str, Any] = {}
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="kvfabric")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started = asyncio.Event()
        self._closing = False
        self._nodes: dict[str, ray_api.Node] = {}
        self.mesh: Mesh | None = None

    # --- loop ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Begin reconciling; returns at once."""
        if self.mesh is None:
            self.mesh = Mesh("supervisor", self.secret, self._undeliverable)
            self._spawn(self._loop())

    async def _loop(self) -> None:
        while not self._closing:
            try:
                await self._look()
            except FabricError as error:
                logger.warning("%s: %s", self.fabric, error)
            except Exception:
                logger.exception("%s: looking at the cluster failed", self.fabric)
            await asyncio.sleep(RECONCILE_S)

    async def _look(self) -> None:
        nodes = await self._in_thread(ray_api.nodes)
        self._nodes = {n.node: n for n in nodes}
        self._feed(Observed(tuple(self._wanted(nodes)), frozenset(self._nodes)))
        self._feed(Tick())

    def _wanted(self, nodes: Iterable[ray_api.Node]) -> Iterable[Wanted]:
        hosts = [n for n in nodes if self._takes(n)]
        if hosts:
            yield Wanted(DIRECTORY, self._directory_node(hosts))
        for node in hosts:
            for place in range(self.spec.holders_per_node):
                yield Wanted(f"holder:{node.node[:16]}:{place}", node.node, self.spec.shards_of(place))

    def _takes(self, node: ray_api.Node) -> bool:
        resource = self.spec.node_resource
        return resource is None or node.resources.get(resource, 0) > 0

    def _directory_node(self, hosts: list[ray_api.Node]) -> str:
        """Where the directory is, or should go: off the head where there is a choice."""
        known = self.core.processes.get(DIRECTORY)
        if known is not None and known.wanted.node in self._nodes:
            return known.wanted.node
        workers = [n for n in hosts if "node:__internal_head__" not in n.resources]
        return min(workers or hosts, key=lambda n: n.node).node

    # --- the core ------------------------------------------------------------------------------

    def _feed(self, event: SupervisorEvent) -> None:
        self._carry_out(self.core.handle(event, time.monotonic()))

    def _carry_out(self, effects: list[SupervisorEffect]) -> None:
        assert self.mesh is not None
        self.mesh.update(self.core.members())
        for effect in effects:
            match effect:
                case Send():
                    self.mesh.send(effect.to, effect.message)
                case Start():
                    self._spawn(self._start(effect.wanted))
                case Stop():
                    self._spawn(self._stop(effect.address))

    def _undeliverable(self, to: str, record: Any) -> None:
        """A connection broke: ask the node whether the process is gone."""
        del record
        process = self.core.processes.get(to)
        if process is not None and process.member is not None and process.life is Life.UP and not self._closing:
            self._spawn(self._check(to, process.member.incarnation))

    async def _check(self, address: str, incarnation: int) -> None:
        """Whether a process that cannot be reached is dead by the word of a live node, or only silent."""
        handle = self.handles_by_address.get(address)
        if handle is None:
            return
        proven = False
        try:
            await asyncio.wait_for(handle.ping.remote(), PING_TIMEOUT_S)
            return
        except TimeoutError:
            logger.info("%s does not answer", address)
        except Exception as error:  # noqa: BLE001 - Ray's own families; which one says what is known
            proven = type(error).__name__ in {"ActorDiedError", "RayActorError"} and self._node_lives(address)
        self._feed(Exited(address, incarnation, proven))
        self._spawn(self._look())

    def _node_lives(self, address: str) -> bool:
        process = self.core.processes.get(address)
        return process is not None and process.wanted.node in self._nodes

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_thread(self, call: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    # --- processes -----------------------------------------------------------------------------

    async def _start(self, wanted: Wanted) -> None:
        try:
            member = await asyncio.wait_for(self._start_process(wanted), self.core.config.start_timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever it was, the start failed and is tried again
            logger.warning("%s did not start: %s", wanted.address, error)
            self._feed(StartFailed(wanted.address, str(error).splitlines()[0] if str(error) else repr(error)))
            return
        self._feed(Started(member))
        self._started.set()

    async def _start_process(self, wanted: Wanted) -> Member:
        counter = f"{self.fabric}/{wanted.address}"
        incarnation = await self._in_thread(lambda: ray_api.next_count(counter))
        node = self._nodes.get(wanted.node)
        setup = {
            "fabric": self.fabric,
            "address": wanted.address,
            "incarnation": incarnation,
            "node": wanted.node,
            "host": node.host if node is not None else "",
            "secret": self.secret,
            "spec": self.spec.model_dump_json(),
            "shards": list(wanted.shards),
            "directory": DIRECTORY,
            "weights": self.core.weights,
        }
        cls = Directory if wanted.address == DIRECTORY else Holder
        name = actor_name(self.fabric, wanted.address, incarnation)
        handle = await self._in_thread(lambda: ray_api.start_actor(cls, name, setup, node=wanted.node or None))
        raw = await handle.start.remote()
        self.handles_by_address[wanted.address] = handle
        return replace(wire.decode_plain(Member, raw), node=wanted.node)

    async def _stop(self, address: str) -> None:
        """Close, then kill from here: silent, where a process that ends itself is not."""
        handle = self.handles_by_address.pop(address, None)
        if handle is None:
            return
        try:
            await asyncio.wait_for(handle.close.remote(), PING_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - it ends either way
            logger.info("%s did not close: %r", address, error)
        await self._in_thread(lambda: ray_api.kill(handle))

    # --- methods -------------------------------------------------------------------------------

    async def ready(self, timeout_s: float) -> str:
        """Wait until the directory and a holder for every wanted place are up. "" or what is missing."""
        deadline = time.monotonic() + timeout_s
        while True:
            processes = self.core.processes
            missing = [a for a, p in processes.items() if p.life is not Life.UP]
            if DIRECTORY in processes and len(processes) > 1 and not missing:
                return ""
            if time.monotonic() >= deadline:
                why = "; ".join(f"{a}: {d}" for a, d in self.core.failures.items())
                return (
                    f"not up after {timeout_s:.0f} s: {', '.join(missing) or 'no node takes a holder'}. {why}".strip()
                )
            self._started.clear()
            try:
                await asyncio.wait_for(self._started.wait(), 0.2)
            except TimeoutError:
                continue

    async def describe(self) -> bytes:
        """A FabricInfo record, for a process that connects."""
        members = self.core.members().members
        return FabricInfo(self.fabric, self.spec, self.weights, self.secret, members, "").encode()

    async def handles(self) -> dict[str, Any]:
        """The Ray actor handles by address."""
        return dict(self.handles_by_address)

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
                "model": self.spec.model.name,
                "weights": self.weights,
                "bypassed": self.core.bypassed,
                "processes": processes,
                "directory": [r for r in replies if r.get("address") == DIRECTORY],
                "holders": [r for r in replies if r.get("address") != DIRECTORY],
            }
        )

    async def _status_of(self, address: str) -> dict[str, Any]:
        assert self.mesh is not None
        try:
            reply = await self.mesh.ask(address, StatusRequest("status"), STATUS_TIMEOUT_S)
        except FabricError as error:
            return {"address": address, "error": str(error)}
        return dict(json.loads(reply.status)) if isinstance(reply, StatusReply) else {"address": address}

    async def update_weights(self, revision: str) -> None:
        """Put a weights revision in force: everything older is unreachable at once."""
        if revision not in self.known_weights:
            self.known_weights.append(revision)
        self.weights = revision
        retired = [weights_digest16(w) for w in self.known_weights if w != revision]
        self._carry_out(self.core.update_weights(weights_digest16(revision), retired))

    async def set_bypass(self, on: bool) -> None:
        """Answer recompute to every acquire, or stop doing so."""
        self._carry_out(self.core.set_mode(bypassed=on))

    async def drain(self, node: str) -> None:
        """Stop granting on a node."""
        self._carry_out(self.core.set_mode(drain=node))

    async def shutdown(self) -> None:
        """End every process but this one."""
        self._closing = True
        for address in sorted(self.handles_by_address, key=lambda a: a == DIRECTORY):
            await self._stop(address)
        if self.mesh is not None:
            await self.mesh.close()
