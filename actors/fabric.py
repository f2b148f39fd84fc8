"""The public door: ``launch`` a fabric on a Ray cluster, ``connect`` to one, and the handle in between."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..fabric.kinds import FabricError, SpecError
from ..fabric.model import ModelSpec
from ..fabric.passport import AbiPassport
from ..fabric.ranking import NodeRank
from ..fabric.series import Sample, loaded
from ..fabric.supervisor import SUPERVISOR
from . import ray_api
from .addresses import actor_name, checked_name, prefix_of
from .async_session import AsyncSession
from .embedded import EmbeddedCluster
from .estate import key_of
from .info import INFO_SCHEMA, FabricInfo
from .session import Session
from .shards import DIRECTORY_SHARDS_MAX
from .spec import FabricSpec
from .supervisor import DIRECTORY, Supervisor

logger = logging.getLogger(__name__)

HERE = "auto"
"""The cluster of this machine, as Ray calls it."""

READY_TIMEOUT_S = 120.0
BACK_TIMEOUT_S = 20.0
"""How long a supervisor that died is waited for."""
BACK_POLL_S = 0.25
KNOCK_TIMEOUT_S = 5.0


class Fabric:
    """A running fabric. Dropping the handle ends nothing; :meth:`shutdown` does.

    A fabric on an embedded cluster ends with the process that launched it.
    """

    def __init__(self, name: str, supervisor: Any, spec: FabricSpec, embedded: EmbeddedCluster | None) -> None:
        self.name = name
        self.spec = spec
        self._supervisor = supervisor
        self._embedded = embedded
        self._session: Session | None = None

    def _ask(self, method: str, *args: Any, timeout_s: float = ray_api.CALL_TIMEOUT_S) -> Any:
        """What the supervisor's method returns; one that died is waited for, or found under its name. Raises Unavailable.

        Every method does the same when it is called twice.
        """
        if self._supervisor is None:
            raise FabricError(f"fabric {self.name!r} was shut down by this handle: launch it, or attach to it, anew")
        end = time.monotonic() + BACK_TIMEOUT_S
        while True:
            asked = getattr(self._supervisor, method, None)
            if asked is None:
                raise FabricError(
                    f"fabric {self.name!r}: its supervisor is of a version that does not know {method!r}: end its process"
                    " and launch the fabric anew, the holders go on"
                )
            try:
                return ray_api.call(asked.remote(*args), timeout_s)
            except ray_api.Unavailable:
                if time.monotonic() >= end:
                    raise
                time.sleep(BACK_POLL_S)
                self._supervisor = ray_api.find_actor(actor_name(self.name, SUPERVISOR)) or self._supervisor

    def status(self) -> dict[str, Any]:
        """Every process, pool, lease and link, as plain data."""
        return dict(json.loads(self._ask("status")))

    def series(self) -> dict[str, list[Sample]]:
        """What each holder did over its life, by address: samples in bounded memory (:mod:`~kvfabric.fabric.series`)."""
        return series(self.name)

    @property
    def embedded(self) -> EmbeddedCluster | None:
        """The cluster on this machine that this fabric runs on, where it started one."""
        return self._embedded

    @property
    def directory(self) -> Any:
        """The first directory shard's Ray actor handle: ``request(bytes) -> bytes`` takes wire records."""
        return self._handle(DIRECTORY)

    def holder(self, node: str | None = None, gpu: int = 0) -> Any:
        """A holder's Ray actor handle: ``request(bytes) -> bytes`` takes wire records.

        ``node``: a Ray node id or a prefix of one (default: this process's node). Raises FabricError
        where there is none.
        """
        wanted = node or ray_api.my_node()
        info = self.info()
        here = sorted(m.address for m in info.members if m.shards and m.node.startswith(wanted))
        if gpu >= len(here):
            raise FabricError(f"holder: node {wanted} has {len(here)} holders, there is no number {gpu}")
        return self._handle(here[gpu])

    def _handle(self, address: str) -> Any:
        lives = (m.incarnation for m in self.info().members if m.address == address)
        names = (actor_name(self.name, address, incarnation) for incarnation in lives)
        handle = next((ray_api.find_actor(name) for name in names), None)
        if handle is None:
            raise FabricError(f"{address} is not running: see fabric.status()")
        return handle

    def info(self) -> FabricInfo:
        """What a process learns when it connects."""
        return FabricInfo.decode(self._ask("describe", INFO_SCHEMA), ray_api.my_node())

    def rank(self, tokens: Any, **key: Any) -> list[NodeRank]:
        """Where to send a request, from whatever node: see :meth:`Session.rank`."""
        if self._session is None:
            self._session = connect(self.name)
        return self._session.rank(tokens, **key)

    def update_weights(self, revision: str) -> None:
        """Put a weights revision in force: everything older is unreachable once this returns.

        Sessions keep the weights they connected with; one that loaded the new ones connects anew.
        """
        if not isinstance(revision, str) or not revision:
            raise FabricError(f"revision: a name is expected, got {revision!r}")
        self._ask("update_weights", revision)

    def leases(self) -> list[dict[str, Any]]:
        """Every live lease, with its ``holder``."""
        told = json.loads(self._ask("inquire", "leases"))
        return [{"holder": address, **lease} for address, leases in told.items() for lease in _listed(leases)]

    def worth(self) -> dict[str, list[tuple[float, int]]]:
        """What each holder's memory is worth by the eviction policy, by address: (worth a byte, bytes), most first."""
        told = json.loads(self._ask("inquire", "worth"))
        return {a: [(float(w), int(n)) for w, n in listed] for a, listed in told.items() if isinstance(listed, list)}

    def health(self) -> dict[str, dict[str, Any]]:
        """The facts about each holder that ``kvfabric doctor`` judges, by address; ``error`` where one did not answer."""
        told = json.loads(self._ask("inquire", "health"))
        return {address: facts for address, facts in told.items() if facts is not None}

    def history(self, what: str) -> dict[str, list[dict[str, Any]]]:
        """What holders remember of the chain of a lease (its number) or of a digest (64 hexadecimal digits), by node.

        Raises FabricError for what is neither, and for a chain that no holder remembers.
        """
        digits = len(what) == 64 and set(what.lower()) <= set("0123456789abcdef")
        if not (what.isdecimal() or digits):
            raise FabricError(f"{what}: a lease's number or a digest of 64 hexadecimal digits is expected")
        known = json.loads(self._ask("inquire", f"chain:{what}"))
        chains = [told for told in known.values() if told and "error" not in told]
        if not chains:
            raise FabricError(f"{what}: no holder remembers it; `kvfabric leases` and the log name leases")
        keys = max(chains, key=lambda chain: sum(map(len, chain.values())))
        told = json.loads(self._ask("inquire", f"history:{json.dumps(keys)}"))
        node_of = {member.address: member.node for member in self.info().members}
        found: dict[str, list[dict[str, Any]]] = {}
        for address, events in told.items():
            if isinstance(events, list):
                found.setdefault(node_of.get(address, address), []).extend(events)
        return {node: sorted(events, key=lambda event: -event["ago_s"]) for node, events in found.items()}

    def purge(
        self,
        tokens: Any = None,
        *,
        tenant: str | None = None,
        namespace: bytes = b"",
        quarantine: bool = False,
        timeout_s: float = 10.0,
        **key: Any,
    ) -> dict[str, Any]:
        """Take state out of every tier of every holder: a tenant's, a namespace's, or what lies along a prompt's chain.

        What matches all that is named goes: it is invisible at once, its leases end, its slots in host memory are
        overwritten, every extent with bytes of it is deleted. Returns ``objects``, ``bytes``, ``extents``, ``leases``,
        ``holders``, and what is ``left`` and who was ``unanswered`` after ``timeout_s``: proven where both are empty.
        ``quarantine``: bar it from being served instead. Of a chain: under the weights in force, with the KEY given.
        Raises FabricError where nothing is named.
        """
        if tokens is None and tenant is None and not namespace:
            raise FabricError("purge: name a tenant, a namespace or a prompt")
        keys: list[tuple[int, bytes]] = []
        if tokens is not None:
            with connect(self.name) as session:
                prompt = session.keys(tokens, **({"tenant": tenant} if tenant else {}), **key)
                keys = [(unit, prompt.keys(unit)) for unit in session.model.units_tokens]
                namespace = prompt.namespace.digest()
            if not any(blob for _, blob in keys):
                raise FabricError(f"purge: no block ends within these {len(prompt)} tokens")
        told = ray_api.call(
            self._supervisor.purge.remote(tenant, namespace, keys, quarantine=quarantine, timeout_s=timeout_s),
            timeout_s + ray_api.CALL_TIMEOUT_S,
        )
        return dict(json.loads(told))

    def bypass(self, on: bool, *, group: str = "") -> None:
        """Answer recompute to every acquire and renew no lease, or stop doing so.

        ``group``: which one is suspected; causes name it. Raises FabricError for a group the model does not have.
        """
        if group and group not in {known.name for known in self.spec.model.groups}:
            raise FabricError(f"group: the model {self.spec.model.name!r} has no group {group!r}")
        if not isinstance(on, bool):  # "off" would be as good as True
            raise FabricError(f"on: True or False is expected, got {on!r}")
        self._ask("set_bypass", on, group)

    def reshard(self, directory_shards: int, *, timeout_s: float = 60.0) -> None:
        """Spread the directory over so many processes; only what must move does, and answers go on meanwhile.

        Raises FabricError for a number out of 1..64, or if the shards are not up in time.
        """
        if not 1 <= directory_shards <= DIRECTORY_SHARDS_MAX:
            raise FabricError(f"directory_shards: {directory_shards} is not within 1..{DIRECTORY_SHARDS_MAX}")
        missing = ray_api.call(
            self._supervisor.set_directory_shards.remote(directory_shards, timeout_s), timeout_s + 10.0
        )
        if missing:
            raise FabricError(f"fabric {self.name!r}: {missing}")

    def drain(self, node: str, deadline_s: float = 30.0) -> dict[str, Any]:
        """Empty a node (its Ray id or a prefix of it), and tell what became of its state.

        It stops granting at once; what is worth most moves to other nodes and leases run out, within
        ``deadline_s`` seconds: then the rest is dropped and leases are cut. Returns objects, bytes and value
        (by the eviction policy) that were moved, were elsewhere already, and were dropped.
        Raises FabricError unless exactly one node is meant, SpecError for a deadline below 0.
        """
        if not 0 <= deadline_s < float("inf"):
            raise SpecError(f"deadline_s: {deadline_s} is not a number of seconds from 0 on")
        timeout_s = deadline_s + ray_api.CALL_TIMEOUT_S
        return dict(json.loads(self._ask("drain", node, deadline_s, timeout_s=timeout_s)))

    def shutdown(self) -> None:
        """End the fabric's processes, and the embedded cluster with the last fabric on it. Idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        embedded, self._embedded = self._embedded, None
        session, self._session = self._session, None
        if session is not None:
            session.close()
        try:
            if supervisor is not None:
                _end(self.name, supervisor)
        finally:
            if embedded is not None:
                embedded.users -= 1
                if not embedded.users:
                    embedded.close()

    def tell_link_problems(self) -> None:
        """Say once, where a user sees it, which way of moving bytes could not start, and why."""
        seen: dict[str, str] = {}
        for holder in self.status()["holders"]:
            seen.update(holder.get("link_problems", {}))
        for link, problem in sorted(seen.items()):
            logger.warning("fabric %s: link %s is not used: %s", self.name, link, problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()


def connect_ray(address: str = "") -> None:
    """Be connected to that cluster, else to that of RAY_ADDRESS, else to this machine's. Raises Unavailable for none."""
    if ray_api.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS") or HERE
    problem = ray_api.unreachable(address)
    if problem:
        raise _no_cluster(address, problem)
    try:
        _knock(address)
        ray = ray_api.ray()  # its import sets the level of its own logger
        with ray_api.quiet():
            ray.init(address=address, namespace=ray_api.NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _no_cluster(address, ray_api.reason_of(error)) from None


def _no_cluster(address: str, problem: str) -> ray_api.Unavailable:
    if address == HERE:
        return ray_api.Unavailable(
            "no Ray cluster runs on this machine: start one (`ray start --head`), or name one (RAY_ADDRESS, --address HOST:PORT)"
        )
    return ray_api.Unavailable(
        f"no Ray cluster is reached at {address!r}: {problem}; HOST:PORT of a cluster's head is expected"
    )


def _knock(address: str) -> None:
    """Raises ConnectionError where nobody listens at HOST:PORT: Ray itself tries for minutes, and tells it at length."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"nobody listens there ({error})") from None


def _end(name: str, supervisor: Any) -> None:
    """End a fabric's processes by its supervisor; without one, each of those it left."""
    try:
        ray_api.call(supervisor.shutdown.remote())
    except ray_api.Unavailable as error:
        logger.warning("fabric %s: its supervisor is gone (%s); what it left is ended", name, error)
    with contextlib.suppress(ray_api.Unavailable):  # then the cluster is gone, and they with it
        for handle in ray_api.named_actors(prefix_of(name)).values():
            ray_api.kill(handle)
        ray_api.let_go(key_of(name))


def launch(
    spec: FabricSpec | ModelSpec | dict[str, Any] | str | Path,
    *,
    name: str = "default",
    nodes: int = 1,
    timeout_s: float = READY_TIMEOUT_S,
) -> Fabric:
    """Start a fabric (or attach to the one of that name) on the Ray cluster at hand.

    The cluster is the one this process is connected to, else that of RAY_ADDRESS, else an embedded
    one of ``nodes`` nodes on this machine, which ends with this process. Raises SpecError for a bad
    spec, FabricError if the fabric is not up within ``timeout_s`` or runs another model.
    """
    wanted = FabricSpec.load(spec)
    checked_name(name)
    embedded = EmbeddedCluster.current
    if not ray_api.is_initialized():
        if os.environ.get("RAY_ADDRESS"):
            connect_ray()
        else:
            embedded = EmbeddedCluster.start(nodes)
    if embedded is not None:
        embedded.users += 1
    started = None
    try:
        supervisor = ray_api.find_actor(actor_name(name, SUPERVISOR))
        if supervisor is None:
            supervisor = started = ray_api.start_actor(
                Supervisor, actor_name(name, SUPERVISOR), name, wanted.text, comes_back=True
            )
        try:
            ray_api.call(supervisor.run.remote(), max(timeout_s, ray_api.CALL_TIMEOUT_S))
        except ray_api.Unavailable as error:
            raise FabricError(f"fabric {name!r}: its supervisor does not answer ({error})") from None
        missing = ray_api.call(supervisor.ready.remote(timeout_s), timeout_s + 10.0)
        if missing:
            raise FabricError(f"fabric {name!r}: {missing}")
        fabric = Fabric(name, supervisor, wanted, embedded)
        running = fabric.info().spec
        if running.model != wanted.model:
            raise FabricError(
                f"fabric {name!r} runs already with the model {running.model.name!r}: choose another name, or shut it down"
            )
        fabric.tell_link_problems()
        return fabric
    except BaseException:
        if embedded is not None:
            embedded.users -= 1
        if embedded is not None and not embedded.users:
            embedded.close()
        elif started is not None:
            _end(name, started)
        raise


def series(name: str = "default") -> dict[str, list[Sample]]:
    """What each holder of a running fabric did over its life, by address. Raises FabricError where none runs."""
    _on_cluster(f"series({name!r})")
    told = json.loads(ray_api.call(_supervisor(name).series.remote()))
    return {address: loaded(samples) for address, samples in told.items()}


def _listed(told: Any) -> list[dict[str, Any]]:
    return told if isinstance(told, list) else []


def attach(name: str = "default") -> Fabric:
    """The running fabric of that name, on the cluster at hand or that of RAY_ADDRESS. Raises FabricError where none runs."""
    _on_cluster(f"attach({name!r})")
    supervisor = _supervisor(name)
    info = FabricInfo.decode(ray_api.call(supervisor.describe.remote(INFO_SCHEMA)), ray_api.my_node())
    return Fabric(name, supervisor, info.spec, None)


def fabrics() -> list[str]:
    """The names of all fabrics on the cluster that this process is connected to."""
    return ray_api.names_ending("/supervisor")


def _on_cluster(what: str) -> None:
    """Be connected to Ray: to the cluster of RAY_ADDRESS, if to none yet. Raises FabricError."""
    if not ray_api.is_initialized():
        if not os.environ.get("RAY_ADDRESS"):
            raise FabricError(f"{what}: this process is not connected to Ray; call ray.init or launch first")
        connect_ray()


def _on_this_host(node: str) -> str:
    """That node's id. Raises FabricError unless it is alive and on this process's host, whose memory alone can be mapped."""
    hosts = {known.node: known.host for known in ray_api.nodes()}
    if hosts.get(node) != hosts[ray_api.my_node()]:
        where = f"is on host {hosts[node]}" if node in hosts else "is no node that is alive"
        raise FabricError(f"node: {node!r} {where}; give the Ray id of one on this host, or none")
    return node


def _supervisor(name: str) -> Any:
    """The supervisor of a fabric on the cluster that this process is connected to. Raises FabricError for none."""
    supervisor = ray_api.find_actor(actor_name(name, SUPERVISOR))
    if supervisor is None:
        others = ", ".join(sorted(fabrics())) or "none"
        raise ray_api.Unavailable(
            f"no fabric {name!r} runs on this cluster: kvfabric.launch(spec, name={name!r}) or `kvfabric up SPEC --fabric {name}`"
            f" starts one; running: {others}"
        )
    return supervisor


def connect(
    name: str = "default",
    *,
    weights_revision: str | None = None,
    passport: AbiPassport | Mapping[str, AbiPassport] | None = None,
    gpu: int | None = None,
    node: str = "",
) -> Session:
    """A session with a running fabric, from a driver, an actor or a task.

    ``weights_revision`` and ``passport`` say what this reader runs; by default the fabric's own. ``node``: the Ray id of
    the node on this host whose holders are its own, for a child process of a Ray worker where a host has several nodes:
    Ray takes such a process for a driver, on any of them. Raises FabricError where no fabric of that name runs, or no
    such node on this host.
    """
    _on_cluster(f"connect({name!r})")
    node = _on_this_host(node) if node else ray_api.my_node()

    def resolve() -> FabricInfo:
        return FabricInfo.decode(ray_api.call(_supervisor(name).describe.remote(INFO_SCHEMA)), node)

    return Session(resolve, name=name, weights_revision=weights_revision, passport=passport, gpu=gpu)


async def connect_async(
    name: str = "default",
    *,
    weights_revision: str | None = None,
    passport: AbiPassport | Mapping[str, AbiPassport] | None = None,
    gpu: int | None = None,
) -> AsyncSession:
    """:func:`connect` for asyncio."""
    import asyncio

    session = await asyncio.to_thread(
        lambda: connect(name, weights_revision=weights_revision, passport=passport, gpu=gpu)
    )
    return AsyncSession(session)
