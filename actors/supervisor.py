"""The supervisor's process: starts and ends the fabric's other processes as its core says.

Detached and named, one a fabric. It looks at the cluster once a second, renews the holders' right
to grant over the mesh, and learns of exits from broken connections, proven by the node's raylet.
When it dies Ray starts it anew: it reads what its predecessor kept in Ray's KV (:mod:`.estate`), takes over
the processes that run, which notice nothing, and waits one grant lease before it replaces one that does not answer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..fabric import wire
from ..fabric.effects import Received, Send
from ..fabric.identity import weights_digest16
from ..fabric.kinds import FabricError
from ..fabric.messages import Birth, Misuse
from ..fabric.supervisor import (
    SUPERVISOR,
    Answered,
    Confirmed,
    DrainNode,
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
from ..transport.challenge import door_secret
from . import ray_api
from .addresses import actor_name, holder_address, prefix_of
from .clock import Clock
from .directory import Directory
from .draining import Draining
from .estate import Estate, inherit, key_of, left_s, until_unix_s
from .holder import Holder
from .info import FabricInfo, check_vector
from .inquiries import Inquiries
from .log_lines import tell, write_to
from .mesh import Mesh
from .rehearsal import Rehearsed, door_setup
from .scaling import Scaling
from .shards import DirectoryShards, is_directory, shard_names
from .spec import FabricSpec, new_secret
from .tasks import tell_failure

logger = logging.getLogger(__name__)

DIRECTORY = "directory:0"
RECONCILE_S = 1.0
PING_TIMEOUT_S = 3.0
STARTS_TRIED = 3
"""Whoever waits for processes that failed to start so often is told; the supervisor goes on trying."""
TOLD_TIMEOUT_S = 3.0
WEIGHTS_KNOWN_MAX = 1024


def new_estate(spec: FabricSpec) -> Estate:
    """A fabric that begins."""
    weights = spec.model.weights
    return Estate(spec.text, new_secret(), weights, [weights], directory_shards=spec.directory_shards)


class Supervisor(Inquiries, Draining, Scaling, Rehearsed):
    """Ray actor. Documented methods, which take and return bytes, JSON or plain values: ``describe``, ``status``,
    ``ready``, ``update_weights``, ``set_bypass``, ``drain``, ``shutdown``.
    """

    def __init__(self, fabric: str, spec_json: str) -> None:
        super().__init__()
        self.fabric = fabric
        left = inherit(fabric)
        self.estate = left or new_estate(FabricSpec.read(spec_json))
        self.spec = FabricSpec.read(self.estate.spec)
        self.secret = self.estate.secret
        testing = self.spec.testing
        self.clock = Clock(0.0 if testing else None)
        # On a clock that stands still no time to settle or to back off would ever be over.
        config = SupervisorConfig(
            self.spec.grant_s, warm_bytes=self.spec.scale.warm_bytes, warm_s=self.spec.scale.warm_s
        )
        if testing:
            config = replace(config, settled_s=0.0, backoff_s=0.0)
        self.core = SupervisorCore(config, self.clock.now(), inherited=left is not None)
        self.core.bypassed = self.estate.bypassed
        self._weights_in_force()
        self._lives: dict[tuple[str, int], Any] = {}
        """Ray handles of every process started and not yet ended, by address and incarnation."""
        self._checking: set[str] = set()
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="kvfabric")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started = asyncio.Event()
        self._closing = False
        self._nodes: dict[str, ray_api.Node] = {}
        self.mesh: Mesh | None = None
        self.shards = DirectoryShards(self.estate.directory_shards)
        self._running: asyncio.Task[None] | None = None
        me = ray_api.comes_back_to()
        if me is not None:
            me.run.remote()  # nobody else would: who launched the fabric may be gone

    def _weights_in_force(self) -> list[SupervisorEffect]:
        retired = [weights_digest16(w) for w in self.estate.known_weights if w != self.estate.weights]
        return self.core.update_weights(weights_digest16(self.estate.weights), retired)

    # --- loop ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Begin reconciling; returns once what an earlier supervisor left is taken over. Idempotent."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._begin())
        await asyncio.shield(self._running)

    async def _begin(self) -> None:
        write_to(ray_api.logs_folder(), f"{self.fabric}-{SUPERVISOR}")
        self.mesh = Mesh(SUPERVISOR, self.secret, self._undeliverable, self._replied)
        self.core.incarnation = await self._in_thread(lambda: ray_api.next_count(self._counter))
        await self._keep()
        await self._confirm()
        await self._take_over()
        await self._put_shards_in_force()
        for node, until, why, retire in self.estate.drains:
            self._feed(DrainNode(node, left_s(until), why, retire))
        self._spawn(self._renew())
        self._spawn(self._confirming())
        self._spawn(self._loop())

    @property
    def _counter(self) -> str:
        return f"{prefix_of(self.fabric)}{SUPERVISOR}"

    async def _take_over(self) -> None:
        """Every process that runs and answers goes on as it is; what was only half begun ends."""
        mine = actor_name(self.fabric, SUPERVISOR)
        left = await self._in_thread(lambda: ray_api.named_actors(prefix_of(self.fabric), but=mine))
        self.core.inherited = bool(left)
        births = await asyncio.gather(*(self._birth_of(name, handle) for name, handle in left.items()))
        latest: dict[str, int] = {}
        for (address, incarnation), _, _ in births:
            latest[address] = max(latest.get(address, 0), incarnation)
        for key, handle, birth in births:
            if key[1] < latest[key[0]] or birth == b"":
                await self._in_thread(functools.partial(ray_api.kill, handle))
                continue
            self._lives[key] = handle
            if birth is not None:
                told = wire.decode_plain(Birth, birth)
                self._feed(Started(told.member, told.clock_s))

    async def _birth_of(self, name: str, handle: Any) -> tuple[tuple[str, int], Any, bytes | None]:
        """A process by address and incarnation, and what it says of itself: nothing before it began, None where it is silent."""
        address, _, incarnation = name.removeprefix(prefix_of(self.fabric)).rpartition("/")
        try:
            birth = await asyncio.wait_for(handle.birth.remote(wire.SCHEMA), PING_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever it was: it is silent, and may go on
            logger.info("%s does not answer its new supervisor: %r", address, error)
            birth = None
        return (address, int(incarnation)), handle, birth

    async def _keep(self) -> None:
        """Keep what a successor must know."""
        estate, core, now = self.estate, self.core, self.clock.now()
        estate.bypassed, estate.directory_shards = core.bypassed, self.shards.count
        estate.drains = [(d.node, until_unix_s(d.deadline_s - now), d.why, d.retire) for d in core.drains.values()]
        raw = estate.encode()
        await self._in_thread(lambda: ray_api.keep(key_of(self.fabric), raw))

    async def _confirming(self) -> None:
        """Look again and again whether this is still the fabric's supervisor."""
        while not self._closing:
            await asyncio.sleep(min(RECONCILE_S, self.core.config.grant_s / 5))
            try:
                await self._confirm()
            except Exception as error:  # noqa: BLE001 - Ray's control store does not answer: rights run out
                logger.warning("%s: is this still its supervisor? %r", self.fabric, error)

    async def _confirm(self) -> None:
        asked_s = self.clock.now()
        latest = await self._in_thread(lambda: ray_api.count_of(self._counter))
        if latest == self.core.incarnation:
            if not self.spec.testing:
                self._feed(Confirmed(asked_s))
        elif not self._closing:
            logger.warning("%s: another supervisor took over; this one ends", self.fabric)
            self._closing = True

    async def _renew(self) -> None:
        """Renewing does not wait for the cluster's state: a slow answer from Ray takes no right away."""
        while not self._closing:
            try:
                self._feed(Tick())
            except Exception:
                logger.exception("%s: a step failed", self.fabric)
            await asyncio.sleep(RECONCILE_S / 2)

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
        if self._closing:
            return
        self._nodes = {n.node: n for n in nodes}
        await self._look_for_drains()
        if not self.spec.testing:
            await self._scale([n for n in nodes if self.spec.takes(n.resources, n.labels)])
        self._feed(Observed(tuple(self._wanted(nodes)), frozenset(self._nodes)))
        if self.shards.due({a for a, p in self.core.processes.items() if p.life is Life.UP}):
            await self._put_shards_in_force()
        for address, process in self.core.processes.items():
            if process.life is Life.SILENT and process.member is not None:
                self._ask_for(address, process.member.incarnation)

    def _wanted(self, nodes: Iterable[ray_api.Node]) -> Iterable[Wanted]:
        hosts = [n for n in nodes if self.spec.takes(n.resources, n.labels)]
        wanted: list[Wanted] = []
        if hosts:
            shards = self.shards.wanted(self.clock.now())
            wanted += [Wanted(shard, self._directory_node(shard, hosts, n)) for n, shard in enumerate(shards)]
        wanted += [
            Wanted(holder_address(node.node, place), node.node, self.spec.shards_of(place))
            for node in hosts
            for place in range(self.spec.holders_per_node)
        ]
        # Whom a rehearsal keeps away is wanted until it is known to have ended, or it would be closed and not killed.
        return (w for w in wanted if w.address not in self.kept_away or w.address in self.core.processes)

    def _directory_node(self, shard: str, hosts: list[ray_api.Node], number: int) -> str:
        """Where a shard is, or should go: spread over the nodes, off the head where there is a choice."""
        known = self.core.processes.get(shard)
        going = {drain.node for drain in self.core.drains.values() if drain.over}
        if known is not None and known.wanted.node in self._nodes and known.wanted.node not in going:
            return known.wanted.node
        stay = [n for n in hosts if n.node not in self.core.drains] or hosts
        workers = [n for n in stay if ray_api.HEAD not in n.resources]
        places = sorted(n.node for n in workers or stay)
        return places[number % len(places)]

    async def _put_shards_in_force(self) -> None:
        """A shard map with a number above every earlier one; everyone is told."""
        epoch = await self._in_thread(lambda: ray_api.next_count(f"{prefix_of(self.fabric)}shard_map"))
        self._carry_out(self.core.set_shards(self.shards.next_map(epoch, self.clock.now())))

    # --- the core ------------------------------------------------------------------------------

    def _feed(self, event: SupervisorEvent) -> None:
        self._carry_out(self.core.handle(event, self.clock.now()))

    def _carry_out(self, effects: list[SupervisorEffect]) -> None:
        assert self.mesh is not None
        self.mesh.update(self.core.members())
        for effect in effects:
            match effect:
                case Send():
                    self.mesh.send(effect.to, effect.message)
                case Start():
                    tell("process_start", fabric=self.fabric, process=effect.wanted.address, node=effect.wanted.node)
                    self._spawn(self._start(effect.wanted))
                case Stop():
                    tell("process_stop", fabric=self.fabric, process=effect.address, incarnation=effect.incarnation)
                    self._spawn(self._stop(effect.address, effect.incarnation))

    def _undeliverable(self, to: str, record: Any) -> None:
        """A connection broke: ask the node whether the process is gone."""
        del record
        process = self.core.processes.get(to)
        if process is not None and process.member is not None:
            self._ask_for(to, process.member.incarnation)

    def _replied(self, address: str, reply: Any) -> None:
        if isinstance(reply, Misuse):
            logger.warning("%s refused what the supervisor said: %s", address, reply.text)
        else:
            self._feed(Received(address, reply))
            self._heard.set()

    def _ask_for(self, address: str, incarnation: int) -> None:
        if address not in self._checking and not self._closing:
            self._checking.add(address)
            self._spawn(self._check(address, incarnation))

    async def _check(self, address: str, incarnation: int) -> None:
        """Whether a process that could not be reached is dead by the word of a live node, or silent, or well."""
        try:
            event = await self._seek(address, incarnation)
        finally:
            self._checking.discard(address)
        if self._closing:
            return
        self._feed(event)
        if isinstance(event, Exited) and event.proven:
            await self._look()

    async def _seek(self, address: str, incarnation: int) -> Exited | Answered:
        handle = self._lives.get((address, incarnation))
        proven = False
        if handle is not None:
            try:
                await asyncio.wait_for(handle.ping.remote(), PING_TIMEOUT_S)
                return Answered(address, incarnation)
            except TimeoutError:
                logger.info("%s does not answer", address)
            except Exception as error:  # noqa: BLE001 - Ray's own families; which one says what is known
                proven = type(error).__name__ in {"ActorDiedError", "RayActorError"} and self._node_lives(address)
        return Exited(address, incarnation, proven)

    def _node_lives(self, address: str) -> bool:
        process = self.core.processes.get(address)
        return process is not None and process.wanted.node in self._nodes

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(tell_failure)

    async def _in_thread(self, call: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    # --- processes -----------------------------------------------------------------------------

    async def _start(self, wanted: Wanted) -> None:
        key: tuple[str, int] | None = None
        try:
            async with asyncio.timeout(self.core.config.start_timeout_s):
                counter = f"{prefix_of(self.fabric)}{wanted.address}"
                key = wanted.address, await self._in_thread(lambda: ray_api.next_count(counter))
                birth = await self._start_process(wanted, key[1])
        except Exception as error:  # noqa: BLE001 - whatever it was, the start failed and is tried again
            detail = ray_api.reason_of(error)
            logger.warning("%s did not start: %s", wanted.address, detail)
            if key is not None:
                await self._stop(*key)
            self._feed(StartFailed(wanted.address, detail))
            return
        if self._closing:
            await self._stop(*key)
            return
        self._feed(Started(replace(birth.member, node=wanted.node), birth.clock_s))
        self._started.set()

    async def _start_process(self, wanted: Wanted, incarnation: int) -> Birth:
        """Start one life. The one before it is ended first, so that its memory is free."""
        for key in [key for key in self._lives if key[0] == wanted.address]:
            await self._stop(*key)
        node = self._nodes.get(wanted.node)
        setup = {
            "fabric": self.fabric,
            "address": wanted.address,
            "incarnation": incarnation,
            "node": wanted.node,
            "host": node.host if node is not None else "",
            "secret": self.secret,
            "spec": self.spec.text,
            "shards": list(wanted.shards),
            "directory": DIRECTORY,
            "shard_map": [self.shards.map.epoch, list(self.shards.map.shards)],
            "weights": self.core.weights,
            "slots": self.spec.slots_on(node.resources if node is not None else {}),
            **door_setup(self, wanted.address),
        }
        cls = Directory if is_directory(wanted.address) else Holder
        name = actor_name(self.fabric, wanted.address, incarnation)
        handle = await self._in_thread(lambda: ray_api.start_actor(cls, name, setup, node=wanted.node or None))
        self._lives[wanted.address, incarnation] = handle
        birth = wire.decode_plain(Birth, await handle.start.remote(wire.SCHEMA))
        check_vector(birth.vector, self.spec.model, wanted.address)
        return birth

    async def _stop(self, address: str, incarnation: int) -> None:
        """Close, then kill from here: silent, where a process that ends itself is not."""
        handle = self._lives.pop((address, incarnation), None)
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
            up = {a for a, p in self.core.processes.items() if p.life is Life.UP}
            missing = sorted(self.core.wanted - up)
            if any(not is_directory(a) for a in self.core.wanted) and not missing:
                await self._told()
                return ""
            hopeless = missing and all(self.core.failed_starts(a) >= STARTS_TRIED for a in missing)
            if hopeless or time.monotonic() >= deadline:
                why = "; ".join(f"{a}: {d}" for a, d in self.core.failures.items())
                waited_s = timeout_s - max(deadline - time.monotonic(), 0.0)
                return f"not up after {waited_s:.0f} s: {why or ', '.join(missing) or 'no node takes a holder'}"
            self._started.clear()
            try:
                await asyncio.wait_for(self._started.wait(), 0.2)
            except TimeoutError:
                continue

    async def describe(self, schema: int = 1) -> bytes:
        """A FabricInfo record, for a process that connects and reads ``schema``."""
        members = self.core.members().members
        return FabricInfo(self.fabric, self.spec, self.estate.weights, members, "", door_secret(self.secret)).encode(
            schema
        )

    async def _told(self) -> None:
        """Wait until everyone who is up took what was sent. Who does not in time loses its right to grant."""
        assert self.mesh is not None
        up = [m.address for m in self.core.members().members]
        late = await self.mesh.flushed(up, TOLD_TIMEOUT_S)
        if late:
            logger.warning("%s: not told yet: %s", self.fabric, ", ".join(late))

    async def update_weights(self, revision: str) -> None:
        """Put a weights revision in force: everything older is unreachable once this returns."""
        estate = self.estate
        estate.known_weights = [*[w for w in estate.known_weights if w != revision][-WEIGHTS_KNOWN_MAX:], revision]
        estate.weights = revision
        self._carry_out(self._weights_in_force())
        await self._keep()
        await self._told()

    async def set_bypass(self, on: bool, group: str = "") -> None:
        """Answer recompute to every acquire, or stop doing so. ``group``: which one causes name ("": the first)."""
        tell("bypass", fabric=self.fabric, on=on, group=group)
        self.core.suspect = group if on else ""
        self._carry_out(self.core.set_mode(bypassed=on))
        await self._keep()
        await self._told()

    async def set_directory_shards(self, count: int, timeout_s: float) -> str:
        """Spread the directory over so many processes. "" once everyone is told, else what is missing."""
        self.shards.count = count
        await self._keep()
        deadline = time.monotonic() + timeout_s
        await self._look()
        while self.shards.map.shards != shard_names(count):
            if time.monotonic() >= deadline:
                return f"the directory is not spread over {count} processes after {timeout_s:.0f} s"
            await asyncio.sleep(0.1)
        await self._told()
        return ""

    async def shutdown(self) -> None:
        """End every process but this one: the holders at once, then the directory they speak to."""
        self._closing = True
        await self._in_thread(lambda: ray_api.let_go(key_of(self.fabric)))
        for directories in (False, True):
            keys = [key for key in self._lives if is_directory(key[0]) is directories]
            await asyncio.gather(*(self._stop(*key) for key in keys))
        if self.mesh is not None:
            await self.mesh.close()
