"""The holder's process: one core, one arena, its links. It decides nothing.

The event loop runs the core and the sockets; copies, digests and transfers run in threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import msgpack
import numpy as np

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
    Moved,
    PeerClosed,
    ReadExtent,
    Received,
    Restored,
    Send,
    StartTransfer,
    Tick,
    TransferDone,
    TransferFault,
    TransferQuiet,
    Undeliverable,
    UploadExtent,
    WriteExtent,
)
from ..fabric.holder import HolderCore
from ..fabric.invariants import slots_lost
from ..fabric.kinds import FabricError, Reason, SpecError, WireError
from ..fabric.messages import (
    ArenaReply,
    ArenaRequest,
    Done,
    Drain,
    EventsSeen,
    GpuReply,
    GpuRequest,
    GrantSeen,
    GrantUntil,
    Members,
    Payload,
    Purge,
    ReadSlots,
    Regions,
    RegionsRequest,
    SeriesReply,
    SeriesRequest,
    ShardMap,
    SlotsRequest,
    WriteSlots,
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
from ..transport.link import Link, LinkFailure, LinkKind, Pair, PairResult, QuietToken, Region, preferred
from ..transport.memfd import ArenaMemory, memory_available_bytes
from ..transport.numa import stay_on
from ..transport.payloads import SlotCopy
from . import ray_api
from .addresses import place_of
from .alarm import Alarm
from .clock import Clock
from .disk import OPEN_WAIT_S, disk_tier, restore_settings
from .doors import UNSPOILT, TransferDoor
from .gpu import payloads_of, take_gpu
from .health import chain_told, health_of, history_told, leases_of
from .links import HolderMemory, start_links
from .log_lines import LINES_MAX, lines_of, tell, write_to
from .metrics import MetricsExport, link_points
from .notices import Notices
from .rehearsal import NO_REHEARSAL
from .service import UNIX_CLIENT, Service
from .spec import FabricSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

QUIET_POLL_S = 0.05
LOG_EVERY_S = 1.0
READ_BYTES_MAX = 8 << 20


class Holder(Service):
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
        spec = FabricSpec.model_validate_json(setup["spec"])
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
        layout = spec.layout(self.shards, setup["slots"])
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
            transfer_timeout_s=spec.transport.transfer_timeout_s,
            lease_s_max=spec.lease_s_max,
            attempt_ttl_s=spec.attempt_ttl_s,
            limits=spec.limits.byte_limits(spec.model),
            quotas=quotas(spec.limits.by_tenant),
            move_bytes_per_s=None if spec.node_bytes_per_s is None else spec.node_bytes_per_s / spec.holders_per_node,
            scrub_bytes_per_s=None if spec.testing else spec.scrub_bytes_per_s,
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
            spec, self.memory, self._from_disk, fabric=self.fabric, address=self.address, node=self.node
        )
        self.links: dict[LinkKind, Link] = {}
        self.link_problems: dict[str, str] = {}
        self.moved: Counter[str] = Counter()
        self.moved_s: defaultdict[str, float] = defaultdict(float)
        self.metrics: MetricsExport | None = None
        self.last_link: dict[str, str] = {}
        self._regions: dict[tuple[str, int], tuple[Region, ...]] = {}
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="kvfabric")
        self._tasks: set[asyncio.Task[Any]] = set()
        """Work in flight: while there is any, this process is not at rest."""
        self._lasting: list[asyncio.Task[None]] = []
        """What goes on as long as this process lives; it is no work in flight."""
        self._alarm = Alarm(self.clock, lambda: self._feed(Tick()))
        self._closing = False
        self.notices.spec = spec.notices
        self._sessions: set[str] = set()
        """Clients that mapped the memory and are still there."""

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> bytes:
        """Start the links, listen, begin this life; returns a Birth record."""
        self.links, self.link_problems = await self._in_thread(
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
        return await self.birth()

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
            points = [*collect(self.core), *link_points(dict(self.moved), dict(self.moved_s))]
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
        for link in self.links.values():
            await self._in_thread(link.close)
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
        self._feed(Received(sender, record))

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
        self._feed(Undeliverable(to, record))

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
                    self._spawn(self._transfer(effect))
                case DigestSlots():
                    self._spawn(self._digest(effect))
                case WriteExtent() | ReadExtent() | DeleteExtent() | UploadExtent() | DropLocal():
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
        self._lasting.append(asyncio.get_running_loop().create_task(work))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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

    # --- transfers -----------------------------------------------------------------------------

    async def _transfer(self, effect: StartTransfer) -> None:
        if effect.source == self.address:
            moved = await self._in_thread(lambda: self._copy_here(effect))
            self._feed(TransferDone(effect.token, moved))
            return
        spoil = UNSPOILT if self.door is None else self.door.next(effect, self.mesh.unreachable)
        carried = [p for p in effect.pairs if p.slot not in spoil.failing]
        pairs = [Pair(p.source_slot, p.slot, p.length) for p in carried]
        began_s = time.monotonic()
        results = spoil.fault or await self._over_links(effect, pairs)
        if isinstance(results, TransferFault):
            self._feed(TransferDone(effect.token, tuple(Moved(p.slot, None, results) for p in effect.pairs)))
            return
        kind, landed = results
        self.last_link = {a: k for a, k in self.last_link.items() if a in self.mesh.members} | {effect.source: kind}
        self.moved_s[kind] += time.monotonic() - began_s
        moved = tuple(_moved(result) for result in landed)
        self.moved[kind] += sum(p.length for p, m in zip(carried, moved, strict=True) if m.checksum is not None)
        if self.door is not None:
            moved, late = self.door.spoil(spoil, moved, {p.slot: p.length for p in carried})
            moved += tuple(Moved(slot, None, TransferFault.FAILED) for slot in spoil.failing)
            if late:
                asyncio.get_running_loop().call_soon(self.door.land, late)
        self._feed(TransferDone(effect.token, moved))
        tokens = [r.token for r in landed if r.token is not None]
        if tokens:
            await self._until_quiet(effect.token, LinkKind(kind), tokens)

    async def _over_links(
        self, effect: StartTransfer, pairs: list[Pair]
    ) -> tuple[str, list[PairResult]] | TransferFault:
        """Over the best link that connects; once more with fresh regions where the peer's link began anew."""
        if not pairs:
            return TransferFault.FAILED
        key = (effect.source, effect.incarnation)
        while True:
            known = key in self._regions
            left = self.clock.left(effect.deadline_s)
            try:
                regions = await self._regions_of(effect.source, effect.incarnation, left)
            except FabricError as error:
                logger.info("%s: its regions are not known: %s", effect.source, error)
                return TransferFault.PEER_LOST
            try:
                kind, landed = await self._in_thread(partial(self._fetch, regions, pairs, effect.deadline_s))
            except FabricError as error:
                logger.info("transfer from %s: %s", effect.source, error)
                kind, landed = "", []
            lost = not landed or any(r.failure in _FROM_ANEW for r in landed)
            if lost:
                self._regions.pop(key, None)
            if lost and known and all(r.token is None for r in landed):
                continue
            return (kind, landed) if landed else TransferFault.FAILED

    def _copy_here(self, effect: StartTransfer) -> tuple[Moved, ...]:
        """In a thread: from slot to slot of this arena."""
        failing = frozenset() if self.door is None else self.door.failing_copies(effect)
        copies = [SlotCopy(p.source_slot, p.slot, p.length) for p in effect.pairs if p.slot not in failing]
        try:
            landed = dict(zip((c.target for c in copies), self.payloads.copy(copies), strict=True))
        except RuntimeError as error:  # what torch raises where a GPU fails
            logger.warning("copies within the arena failed: %s", error)
            landed = {}
        return tuple(
            Moved(p.slot, landed[p.slot]) if p.slot in landed else Moved(p.slot, None, TransferFault.FAILED)
            for p in effect.pairs
        )

    def _fetch(self, regions: tuple[Region, ...], pairs: list[Pair], deadline_s: float) -> tuple[str, list[PairResult]]:
        """In a thread: over the best way that connects. Raises FabricError where none does."""
        problems = []
        for link, region in preferred(self.links, regions):
            left = self.clock.left(deadline_s)
            if left <= 0:
                break
            error = link.connect(region, left)
            if error is None:
                return str(link.kind), link.fetch(region, pairs, max(self.clock.left(deadline_s), 0.001))
            problems.append(f"{link.kind}: {error.detail}")
        raise FabricError("; ".join(problems) or "no link that both sides have")

    async def _regions_of(self, source: str, incarnation: int, timeout_s: float) -> tuple[Region, ...]:
        known = self._regions.get((source, incarnation))
        if known is None:
            reply = await self.mesh.ask(source, RegionsRequest("regions"), timeout_s)
            if not isinstance(reply, Regions) or reply.incarnation != incarnation:
                raise WireError(f"{source}: another incarnation answers")
            known = tuple(Region.from_plain(msgpack.unpackb(raw, raw=False)) for raw in reply.regions)
            for key in [key for key in self._regions if key[0] == source]:
                del self._regions[key]
            self._regions[source, incarnation] = known
        return known

    async def _until_quiet(self, token: int, kind: LinkKind, tokens: list[QuietToken]) -> None:
        link = self.links[kind]
        while not all(link.quiet(t) for t in tokens):  # noqa: ASYNC110 - a link is polled, it cannot call back
            await asyncio.sleep(QUIET_POLL_S)
        self._feed(TransferQuiet(token))

    # --- what this process answers itself ------------------------------------------------------

    def own_request(self, client: str, record: Any) -> Reply | None:
        match record:
            case ArenaRequest():
                self._maps_memory(client)
                return self._arena_reply(record), [self._for_readers]
            case GpuRequest():
                self._maps_memory(client)
                if self.gpu is None:
                    raise FabricError("this holder's memory is no GPU's: ask for its arena")
                return wire.encode(GpuReply(record.request, self.gpu.export()))
            case SlotsRequest():
                self._maps_memory(client)
                return self._slots_reply(client, record)
            case SeriesRequest():
                return wire.encode(SeriesReply(record.request, dumped(self.core.series())))
            case RegionsRequest():
                regions = tuple(msgpack.packb(link.region().to_plain()) for link in self.links.values())
                return wire.encode(Regions(record.request, self.address, self.incarnation, regions))
            case Purge() if client == SUPERVISOR:
                purged, effects = self.core.purge(record, self.clock.now())
                self._carry_out(effects)
                return wire.encode(purged)
            case WriteSlots():
                return wire.encode(self._write_slots(client, record))
            case ReadSlots():
                return wire.encode(self._read_slots(record))
        return super().own_request(client, record)

    def _maps_memory(self, client: str) -> None:
        """Raises FabricError for a client that cannot be handed descriptors."""
        if not client.startswith(UNIX_CLIENT):
            raise FabricError("memory is handed out over the holder's Unix socket only: use WriteSlots and ReadSlots")
        self._sessions.add(client)

    def _arena_reply(self, record: ArenaRequest) -> bytes:
        layout, weights = self.memory.layout, self.core.ctx.weights
        places = layout.places_plain()
        reply = ArenaReply(record.request, self.address, self.incarnation, weights, layout.pools_plain(), places)
        return wire.encode(reply)

    def _slots_reply(self, client: str, record: SlotsRequest) -> Reply:
        attempt = self.core.stores.attempts.get(record.attempt)
        if attempt is None or attempt.client != client:
            return wire.encode(Done(record.request, Reason.ATTEMPT_SUPERSEDED, "the attempt is not open"))
        return wire.encode(Done(record.request, None, "")), [self._for_writers]

    def _write_slots(self, client: str, record: WriteSlots) -> Done:
        attempt = self.core.stores.attempts.get(record.attempt)
        if attempt is None or attempt.client != client:
            return Done(record.request, Reason.ATTEMPT_SUPERSEDED, "the attempt is not open to this client")
        own = {obj.slot: obj for obj in attempt.objects}
        for slot, payload in record.writes:
            obj = own.get(slot)
            if obj is None or len(payload) != obj.length:
                raise FabricError(f"slot {slot}: not one of the attempt's, or not its length")
            self.payloads.write(slot, np.frombuffer(payload, dtype=np.uint8))
        return Done(record.request, None, "")

    def _read_slots(self, record: ReadSlots) -> Payload:
        lease = self.core.ctx.leases.live.get(record.lease)
        if lease is None or self.clock.now() >= lease.deadline_s:
            return Payload(record.request, Reason.LEASE_EXPIRED, ())
        if lease.weights != self.core.ctx.weights:
            return Payload(record.request, Reason.WEIGHTS_MISMATCH, ())
        slots = {
            (run.group, run.shard, index): slot
            for run in lease.proof.runs
            for index, slot in zip(run.indices, run.slots.tolist(), strict=True)
        }
        payload = []
        for index in record.indices:
            slot = slots.get((record.group, record.shard, index))
            if slot is None:
                raise FabricError(f"group {record.group}, index {index}: not part of the lease")
            payload.append(self.payloads.read(slot, int(self.memory.arena.lengths[slot])).tobytes())
            if sum(map(len, payload)) > READ_BYTES_MAX:
                raise FabricError(f"more than {READ_BYTES_MAX} bytes at once: ask for fewer indices")
        return Payload(record.request, None, tuple(payload))

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

    def _faults_waiting(self) -> list[tuple[str, int | None, int | None, int]]:
        """(fault, group, index, operations that will still meet it)."""
        disk = [] if self.disk is None else [(fault, None, None, left) for fault, left in self.disk.faults_left.items()]
        return [*([] if self.door is None else self.door.waiting()), *disk]

    def rest(self, request: str) -> Rest:
        disk = self.disk
        busy = self.mesh.busy or bool(self._tasks) or (disk is not None and disk.outstanding > 0)
        told = tuple(
            (stream.shard, -1 if stream.pending or stream.dump is not None else stream.seq)
            for stream in self.core.events.streams.values()
        )
        return replace(super().rest(request), busy=busy, due_s=self.core.next_deadline_s, told=told)

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
            case "health":
                problems = dict(self.link_problems)
                return json.dumps(health_of(self.core, problems, None if self.disk is None else self.disk.status()))
        return super().status_of(of)

    def _disk_status(self) -> dict[str, Any] | None:
        if self.disk is None:
            return None
        desk = self.core.disk
        return self.disk.status() | {
            "used_bytes": desk.extents.used_bytes,
            "restoring": desk.restoring,
            "restores_waiting": desk.waiting,
            "restores_in_line": len(desk.line),
            "moves_waiting": len(self.core.flow),
            "restore_bytes_per_s": round(desk.rate.bytes_per_s),
        }

    def _host_status(self) -> dict[str, Any] | None:
        """The tier of host memory below what readers map; None where there is none."""
        host = self.core.disk.host
        if not host.pools.pools:
            return None
        names = [g.name for g in self.spec.model.groups]
        pools = [
            {"group": names[group], "shard": shard, "slots": pool.slots, "free": len(pool.free)}
            for (group, shard), pool in host.pools.pools.items()
        ]
        return {
            "pools": pools,
            "objects": len(host.pools.copies()),
            "moving": host.at_work,
            "bytes_per_s": round(self.core.disk.host_rate.bytes_per_s),
        }

    def status(self) -> str:
        ctx = self.core.ctx
        names = [g.name for g in self.spec.model.groups]
        pools = [
            {
                "group": names[p.group],
                "kind": str(self.spec.model.groups[p.group].kind),
                "shard": p.shard,
                "slots": p.slots,
                "free": len(p.free),
                "evictable": p.evictable,
                "slot_bytes": self.spec.model.groups[p.group].block_bytes,
            }
            for p in ctx.books.pools.values()
        ]
        return json.dumps(
            {
                "address": self.address,
                "pid": os.getpid(),
                "node": self.node,
                "incarnation": self.incarnation,
                "arena_bytes": self.memory.layout.size_bytes,
                "grants": ctx.may_grant,
                "draining": ctx.draining,
                "drain": {"stage": str(self.core.drain.stage), **self.core.drain.counts},
                "bypassed": ctx.bypassed,
                "pools": pools,
                "leases": len(ctx.leases.live),
                "pinned_slots": sum(1 for obj in ctx.books.owner if obj is not None and obj.pins),
                "faults": self._faults_waiting(),
                "slots_lost": slots_lost(ctx.books) + self.core.disk.host.pools.lost(),
                "quarantined_slots": sum(
                    1 for obj in ctx.books.owner if obj is not None and obj.state.value == "quarantined"
                ),
                "attempts": len(self.core.stores.attempts),
                "requests_refused": self.requests_refused,
                "host_memory": self._host_status(),
                "disk": self._disk_status(),
                "links": [str(kind) for kind in self.links],
                "link_problems": self.link_problems,
                "moved_bytes": dict(self.moved),
                "link_of": self.last_link,
                "counters": dict(ctx.counters),
                "costs": None if ctx.planning is None else ctx.planning.known(),
                "placed_copies": {"prefixes": len(self.core.copies.copies), "bytes": self.core.copies.placed_bytes},
            }
        )


_FROM_ANEW = frozenset({LinkFailure.PEER_LOST, LinkFailure.REFUSED, LinkFailure.UNAVAILABLE})
"""Failures that a peer's link causes when it was started again: its region is another now."""

_FAULTS = {
    LinkFailure.PEER_LOST: TransferFault.PEER_LOST,
    LinkFailure.REFUSED: TransferFault.PEER_LOST,
    LinkFailure.TIMED_OUT: TransferFault.TIMED_OUT,
}


def _moved(result: PairResult) -> Moved:
    if result.checksum is not None:
        return Moved(result.dst_slot, result.checksum)
    failure = result.failure
    fault = TransferFault.FAILED if failure is None else _FAULTS.get(failure, TransferFault.FAILED)
    return Moved(result.dst_slot, None, fault, quiet=result.token is None)
