"""The holder's process: one core, one arena, its links. It decides nothing.

The event loop runs the core and the sockets; copies, digests and transfers run in threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

from ..fabric import wire
from ..fabric.context import HolderConfig
from ..fabric.doors import Corrupt, InjectFault, Rest, TellAll
from ..fabric.effects import (
    DeleteExtent,
    Digested,
    DigestSlots,
    DiskRead,
    DiskState,
    DiskWritten,
    DropLocal,
    Effect,
    Event,
    ExtentScrubbed,
    PeerClosed,
    ReadExtent,
    Received,
    Restored,
    ScrubExtent,
    Send,
    StartTransfer,
    Tick,
    Undeliverable,
    UploadExtent,
    WriteExtent,
)
from ..fabric.holder import HolderCore
from ..fabric.invariants import Violation, check_in_slices
from ..fabric.kinds import FabricError, Reason, SpecError
from ..fabric.messages import (
    Done,
    Drain,
    EventsSeen,
    GrantSeen,
    GrantUntil,
    Members,
    Purge,
    Purged,
    Regions,
    RegionsRequest,
    SeriesReply,
    SeriesRequest,
    ShardMap,
    StatusReply,
    StatusRequest,
)
from ..fabric.metrics import collect
from ..fabric.series import dumped
from ..fabric.supervisor import SUPERVISOR
from ..policies.eviction import eviction_policy
from ..policies.limits import quotas
from ..policies.planning import disk_admission_of, planning_of
from ..transport.control_socket import Reply
from ..transport.disk.driver import DiskEffect
from ..transport.disk.faults import DiskFault
from ..transport.memfd import ArenaMemory, memory_available_bytes
from ..transport.numa import stay_on
from ..transport.vigil import LoopVigil, Vigil
from . import ray_api
from .addresses import place_of
from .alarm import Alarm
from .clock import Clock
from .disk import OPEN_WAIT_S, disk_tier, restore_settings
from .doors import TransferDoor
from .gpu import payloads_of, take_gpu
from .health import chain_told, health_of, history_told, leases_of
from .holder_status import holder_status
from .links import HolderMemory, start_links
from .log_lines import LINES_MAX, lines_of, tell, write_to
from .memory_service import MemoryService
from .metrics import MetricsExport, link_points
from .notices import Notices
from .rehearsal import NO_REHEARSAL
from .spec import FabricSpec
from .tasks import tell_failure
from .transfers import Transfers

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOG_EVERY_S = 1.0


def slab_settings(spec: FabricSpec) -> dict[str, Any]:
    """How often slabs are looked at, where the spec has them."""
    return {} if spec.slabs is None else {"slab_look_s": spec.slabs.look_s, "slab_gather_s": spec.slabs.gather_s}


SPILL_SHARE = 0.0625
"""Of each pool that readers map, how much has a copy in host memory before it makes room, where there is such a tier."""


class Holder(MemoryService):
    """Ray actor that owns one arena. Documented methods: ``start``, ``request``, ``ping``, ``close``.

    ``request(frame: bytes) -> bytes`` takes any of the records a session sends, and
    ``StatusRequest``, ``SeriesRequest``, ``WriteSlots``, ``ReadSlots``.
    """

    notices: Notices

    def __new__(cls, setup: dict[str, Any] | None = None) -> Self:
        """Ray makes an actor on its process's main thread, where signals come, and begins it on another."""
        del setup
        holder = super().__new__(cls)
        holder.notices = Notices()
        holder.notices.listen_for_sigterm()
        return holder

    def __init__(self, setup: dict[str, Any]) -> None:
        setup = {**NO_REHEARSAL, "slots": None, **setup}
        spec = FabricSpec.read(setup["spec"])
        super().__init__(
            fabric=setup["fabric"],
            address=setup["address"],
            incarnation=setup["incarnation"],
            node=setup["node"],
            host=setup["host"],
            secret=setup["secret"],
            model=spec.model,
            clock=Clock(setup["clock_s"]),
            testing=spec.testing,
        )
        self.mesh.unreachable = frozenset(setup["unreachable"])
        self.spec = spec
        self.shards: tuple[int, ...] = tuple(setup["shards"])
        layout, slab_shares = spec.layout_in_slabs(self.shards, setup["slots"])
        available = memory_available_bytes()
        if layout.size_bytes > available:  # the kernel would end this process when it runs out, not refuse now
            raise SpecError(
                f"memory_bytes, host_memory_bytes, slots: an arena of {layout.size_bytes} bytes does not fit the"
                f" {available} bytes of free memory on node {self.node[:12]}"
            )
        self.memory = ArenaMemory.create(layout, self.incarnation)
        numa_node = spec.transport.numa_node_of(place_of(self.address))
        if numa_node is not None:
            stay_on(numa_node, self.memory)
        self.gpu = take_gpu(layout, self.fabric, self.address)
        self.payloads = payloads_of(self.memory.arena, self.gpu)
        self._for_readers, self._for_writers = self.memory.read_only_fd(), self.memory.read_write_fd()
        config = HolderConfig(
            holder=self.address,
            node=self.node,
            shards=self.shards,
            directory=setup["directory"],
            shard_map=ShardMap(*setup["shard_map"]) if "shard_map" in setup else None,
            verify_always=spec.verify == "always",
            zero_between_tenants=spec.zero_between_tenants,
            slab_shares=slab_shares,
            spill_share=SPILL_SHARE,
            **slab_settings(spec),
            transfer_timeout_s=spec.transport.transfer_timeout_s,
            lease_s_max=spec.lease_s_max,
            attempt_ttl_s=spec.attempt_ttl_s,
            limits=spec.limits.byte_limits(spec.model),
            quotas=quotas(spec.limits.by_tenant),
            move_bytes_per_s=None if spec.node_bytes_per_s is None else spec.node_bytes_per_s / spec.holders_per_node,
            scrub_bytes_per_s=None if spec.testing else spec.scrub_bytes_per_s,
            disk_scrub_bytes_per_s=None if spec.testing or spec.disk is None else spec.disk.scrub_bytes_per_s,
            **restore_settings(spec.disk),
        )
        self.core = HolderCore(
            config,
            spec.model,
            self.memory.arena,
            self.incarnation,
            setup["weights"],
            planning=planning_of(spec.model, spec.costs.guess()),
            placement=spec.placement.policy() if spec.placement is not None else None,
            eviction=eviction_policy(spec.eviction),
            writing=disk_admission_of(spec.disk.admission if spec.disk is not None else "all"),
        )
        self.door = TransferDoor(self.core) if spec.testing else None
        self.disk = disk_tier(
            spec, self.memory, self._from_disk, self.share, fabric=self.fabric, address=self.address, node=self.node
        )
        self.transfers = Transfers(
            self.address,
            self.clock,
            self.mesh,
            self.payloads,
            door=self.door,
            in_thread=self._in_thread,
            feed=self._feed,
        )
        self.metrics: MetricsExport | None = None
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="kvfabric")
        self._tasks: set[asyncio.Task[Any]] = set()
        """Work in flight: while there is any, this process is not at rest."""
        self._lasting: list[asyncio.Task[None]] = []
        """What goes on as long as this process lives; it is no work in flight."""
        self._alarm = Alarm(self.clock, lambda: self._feed(Tick()), self.share)
        self._closing = False
        self.vigil = LoopVigil(Vigil(spec.transport.awake_s), lambda: self.busy)
        self.notices.spec = spec.notices
        self._sessions = set()
        self._purging: dict[Purge, asyncio.Task[Purged]] = {}
        self._checking: asyncio.Task[list[Violation]] | None = None

    # --- life ----------------------------------------------------------------------------------

    async def start(self, schema: int = wire.SCHEMA) -> bytes:
        """Start the links, listen, begin this life; returns a Birth record, as ``schema`` has it."""
        self.transfers.links, self.transfers.problems = await self._in_thread(
            lambda: start_links(
                HolderMemory(self.memory, self.payloads, self.gpu),
                self.spec.transport,
                holder=self.address,
                incarnation=self.incarnation,
                suffix=secrets.token_hex(4),
                host=self.host,
                secret=self._secret,
            )
        )
        await self.listen(self.shards)
        self._last(self.notices.watch())
        self._carry_out(self.core.start(self.clock.now()))
        self._feed(DiskState(Reason.DISK_UNAVAILABLE))
        if self.disk is not None:
            await self.disk.start(OPEN_WAIT_S)
        write_to(ray_api.logs_folder(), f"{self.fabric}-{self.address}-{self.incarnation}")
        self._last(self._write_log())
        if self.spec.metrics_every_s:
            self.metrics = MetricsExport(self.fabric, self.address)
            self._last(self._export_metrics())
        return await self.birth(schema)

    async def _write_log(self) -> None:
        """Once a second the log's lines of what was decided since, at most so many."""
        told = self.core.ctx.journal.total
        common = {"fabric": self.fabric, "node": self.node, "holder": self.address, "incarnation": self.incarnation}
        while not self._closing:
            await asyncio.sleep(LOG_EVERY_S)
            journal, number = self.core.ctx.journal, told
            told = journal.total
            if self.spec.log_acquires == "none" or told == number:
                continue
            entries, passed_over = journal.since(number, LINES_MAX)
            events = lines_of(list(entries), whole=self.spec.log_acquires == "all")
            if passed_over:
                events.append(("lines_passed_over", {"count": passed_over}))
            for event, fields in events:
                tell(event, **common, **fields)

    async def _export_metrics(self) -> None:
        """From time to time, in a thread; what fails is told and tried again: a holder serves without metrics."""
        assert self.metrics is not None
        while not self._closing:
            await asyncio.sleep(self.spec.metrics_every_s)
            points = [*collect(self.core), *link_points(dict(self.transfers.moved), dict(self.transfers.moved_s))]
            try:
                await self._in_thread(partial(self.metrics.flush, points))
            except Exception:
                logger.exception("%s: its metrics were not exported", self.address)

    async def ping(self) -> int:
        return self.incarnation

    async def close(self) -> None:
        """Let clients go, close the links, give the memory back once nobody maps it."""
        self._closing = True
        self._alarm.stop()
        await super().close()
        for task in (*self._tasks, *self._lasting):
            task.cancel()
        await self.transfers.close()
        if self.disk is not None:
            await self.disk.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.memory.close()
        for descriptor in (self._for_readers, self._for_writers):
            os.close(descriptor)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    # --- the core ------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        if not self._closing:
            self.steps += 1
            self._carry_out(self.core.handle(event, self.clock.now()))

    def received(self, sender: str, record: Any) -> None:
        self._feed_in_turn(Received(sender, record))

    def told_members(self, record: Members) -> None:
        self._feed(Received(SUPERVISOR, record))

    def reply_to_peer(self, record: Any) -> bytes:
        core = self.core
        if isinstance(record, GrantUntil):
            known = (core.weights_number, core.mode_number, core.ctx.router.map.epoch)
            leaves = self.notices.leaves_in_s()
            return wire.encode(
                GrantSeen(
                    self.incarnation, self.clock.now(), *known, leaves, self.notices.heard, core.load(self.clients)
                )
            )
        if isinstance(record, Drain) and core.drain.report is not None and core.drain.number == record.number:
            return wire.encode(core.drain.report)
        return b""

    @property
    def clients(self) -> int:
        """Sessions connected over the Unix socket."""
        return len(self._sessions)

    def undelivered(self, to: str, record: Any) -> None:
        self._feed_in_turn(Undeliverable(to, record))

    def _feed_in_turn(self, event: Received | Undeliverable) -> None:
        """At once, but for what only a request that needs a tier waits for: live requests go first."""
        if self.core.for_a_tier(event):
            self._spawn(self.share.turn(partial(self._feed, event)))
        else:
            self._feed(event)

    def client_closed(self, client: str) -> None:
        self._sessions.discard(client)
        self._feed(PeerClosed(client))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to=to) if to == SUPERVISOR:
                    continue  # it asks, and takes what there is as the reply
                case Send():
                    self.deliver(effect.to, effect.message)
                case StartTransfer():
                    self._spawn(self.transfers.run(effect))
                case DigestSlots():
                    self._spawn(self._digest(effect))
                case WriteExtent() | ReadExtent() | DeleteExtent() | UploadExtent() | DropLocal() | ScrubExtent():
                    self._on_disk(effect)
        self._alarm.set(None if self._closing else self.core.next_deadline_s)

    def _on_disk(self, effect: DiskEffect) -> None:
        """Without a disk the core was told so, and asks for nothing but what it began before it knew."""
        if self.door is not None and isinstance(effect, ReadExtent):
            self.door.before_restore(effect)
        match effect:
            case _ if self.disk is not None:
                self.disk.carry_out(effect)
            case WriteExtent():
                self._later(DiskWritten(effect.token, Reason.DISK_UNAVAILABLE))
            case ReadExtent():
                failed = tuple(Restored(slot, None, Reason.DISK_UNAVAILABLE) for _, _, slot in effect.reads)
                self._later(DiskRead(effect.token, failed))
            case ScrubExtent():
                self._later(ExtentScrubbed(effect.token, ()))

    def _from_disk(self, event: Event) -> None:
        self._feed(event if self.door is None else self.door.after_restore(event))

    async def inject_disk(self, fault: str, times: int) -> None:
        """Let the next ``times`` operations on the disk meet a fault, for rehearsals (0 clears it).

        Raises FabricError without a disk tier, ValueError for a fault that is none.
        """
        if self.disk is None:
            raise FabricError("disk: this fabric's spec names none")
        self.disk.inject(DiskFault(fault), times)

    def _later(self, event: Event) -> None:
        asyncio.get_running_loop().call_soon(self._feed, event)

    def _last(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(tell_failure)
        self._lasting.append(task)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(tell_failure)

    async def _digest(self, effect: DigestSlots) -> None:
        lengths = self.memory.arena.lengths
        slots = [(slot, int(lengths[slot])) for slot in effect.slots]
        self._feed(Digested(effect.token, await self._in_thread(lambda: self._checksums(slots))))

    def _checksums(self, slots: list[tuple[int, int]]) -> tuple[bytes, ...]:
        """In a thread: digests of the first bytes of slots; what a GPU cannot read any more equals nothing recorded."""
        try:
            return tuple(self.payloads.checksums(slots))
        except RuntimeError as error:
            logger.warning("payload cannot be read: %s", error)
            return (b"",) * len(slots)

    # --- what this process answers itself ------------------------------------------------------

    async def _purge(self, record: Purge) -> bytes:
        """A pass, in slices between which requests come. Who asks again while it is under way waits for its end."""
        key = replace(record, request="")
        under_way = self._purging.get(key)
        if under_way is None:
            under_way = self._purging[key] = asyncio.get_running_loop().create_task(self._pass_of(record))
            self._tasks.add(under_way)
            under_way.add_done_callback(self._tasks.discard)
            under_way.add_done_callback(lambda _: self._purging.pop(key, None))
        return wire.encode(replace(await asyncio.shield(under_way), request=record.request))

    async def _pass_of(self, record: Purge) -> Purged:
        work, purged = self.core.purges.purge(record), None
        while purged is None:
            self.steps += 1
            purged, effects = self.core.go_on_purging(work, self.clock.now())
            self._carry_out(effects)
            await asyncio.sleep(0)
        return purged

    async def _check(self) -> list[Violation]:
        """What of the invariants does not hold; requests come between one slice and the next."""
        found = []
        for violation in check_in_slices(self.core):
            if violation is None:
                await asyncio.sleep(0)
            else:
                found.append(violation)
        return found

    async def _health(self, record: StatusRequest) -> bytes:
        """What ``kvfabric doctor`` judges. Who asks while the books are being checked waits for what that finds."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.get_running_loop().create_task(self._check())
        found = await asyncio.shield(self._checking)
        disk = None if self.disk is None else self.disk.status()
        facts = health_of(self.core, found, dict(self.transfers.problems), disk)
        return wire.encode(
            StatusReply(record.request, json.dumps(facts | {"settings_passed_over": self.spec.passed_over}))
        )

    def own_request(self, client: str, record: Any) -> Reply | Awaitable[Reply] | None:
        match record:
            case SeriesRequest():
                return wire.encode(SeriesReply(record.request, dumped(self.core.series())))
            case RegionsRequest():
                regions = self.transfers.regions()
                return wire.encode(Regions(record.request, self.address, self.incarnation, regions))
            case Purge() if client == SUPERVISOR:
                return self._purge(record)
            case StatusRequest(of="health"):
                return self._health(record)
        return super().own_request(client, record)

    # --- rehearsals ----------------------------------------------------------------------------

    def through_door(self, record: Any) -> Any:
        assert self.door is not None
        match record:
            case InjectFault() if record.fault in set(DiskFault):
                if self.disk is None:
                    raise FabricError(f"fault: {record.fault} needs a disk, which this fabric's spec does not name")
                self.disk.inject(DiskFault(record.fault), record.times)
            case InjectFault():
                self.door.inject(record.fault, record.times, record.load)
            case Corrupt():
                self.door.corrupt(record.group, record.digest, record.how)
            case TellAll():
                for stream in list(self.core.events.streams.values()):
                    self._feed(
                        Received(stream.shard, EventsSeen(stream.shard, stream.epoch, self.incarnation, 0, True))
                    )
            case _:
                return super().through_door(record)
        return Done(record.request, None, "")

    def faults_waiting(self) -> list[tuple[str, int | None, int | None, int]]:
        """(fault, group, index, operations that will still meet it)."""
        disk = [] if self.disk is None else [(fault, None, None, left) for fault, left in self.disk.faults_left.items()]
        return [*([] if self.door is None else self.door.waiting()), *disk]

    @property
    def busy(self) -> bool:
        """Whether anything is under way besides the step at hand."""
        disk = self.disk
        return self.mesh.busy or bool(self._tasks) or (disk is not None and disk.outstanding > 0)

    def rest(self, request: str) -> Rest:
        told = tuple(
            (stream.shard, -1 if stream.pending or stream.dump is not None else stream.seq)
            for stream in self.core.events.streams.values()
        )
        return replace(super().rest(request), busy=self.busy, due_s=self.core.next_deadline_s, told=told)

    def run_due(self) -> None:
        due = self.core.next_deadline_s
        if due is not None and due <= self.clock.now():
            self._feed(Tick())

    # --- status --------------------------------------------------------------------------------

    def status_of(self, of: str) -> str:
        match of:
            case "leases":
                return json.dumps(leases_of(self.core))
            case _ if of.startswith("chain:"):
                return json.dumps(chain_told(self.core, of.removeprefix("chain:")))
            case _ if of.startswith("history:"):
                return json.dumps(history_told(self.core, of.removeprefix("history:")))
            case "worth":
                return json.dumps(self.core.drain.worth_of_all())
        return super().status_of(of)

    def status(self) -> str:
        return json.dumps(holder_status(self))
