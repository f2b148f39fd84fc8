"""The holder: one life of the actor that owns an arena. ``handle(event, now) -> effects``.

The desks decide; this class routes records to them, runs due wake-ups, flushes events to the
directory and lets those in line for room try again, after every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from .arena import Arena
from .candidates import last_used
from .context import HolderConfig, HolderContext
from .copies import CopyDesk, Placement
from .disk import DiskDesk
from .disk_scrub import DiskScrubber
from .drain import DrainDesk
from .effects import (
    Digested,
    DiskEvent,
    DiskFound,
    DiskLost,
    DiskRead,
    DiskState,
    DiskWritten,
    Effect,
    Event,
    ExtentEntry,
    ExtentScrubbed,
    ExtentUploaded,
    PeerClosed,
    Received,
    RemoteState,
    Tick,
    TransferDone,
    TransferQuiet,
    Undeliverable,
)
from .events import EventDesk
from .eviction import EvictionFactory, LeastRecentlyUsed
from .expected import Measured
from .flow import Flow
from .graphs import GraphDesk
from .intake import IntakeDesk
from .journal import Released, Weights
from .kinds import Reason
from .leader import Leader
from .lifecycle import State
from .messages import (
    Acquire,
    Answer,
    Audited,
    Cancel,
    Computed,
    CopiesFound,
    Done,
    Drain,
    Drop,
    EventsSeen,
    Found,
    Generated,
    GrantUntil,
    GraphIdle,
    GraphRegister,
    HolderGone,
    Load,
    Lookup,
    MateColumns,
    MateLookup,
    Members,
    Offer,
    Park,
    PartAbort,
    PartCheck,
    PartGrant,
    PartGranted,
    PartOpen,
    PartRelease,
    PartRenew,
    PartRenewed,
    PartReply,
    PinEnd,
    PinEnded,
    PinReply,
    PinRequest,
    Purged,
    Release,
    Renew,
    Renewed,
    Replicate,
    Retain,
    SetMode,
    SetWeights,
    ShardMap,
    StoreAbort,
    StoreBegin,
    StoreCommit,
    StoreQuiet,
    SwapIn,
    SwapOut,
    Taken,
    Warm,
)
from .model import ModelSpec
from .objects import held_refusal
from .offers import Planning
from .parts import PartDesk
from .pins import PinDesk
from .placing import Placer
from .purge import Pass, PurgeDesk
from .restores import PATIENCE_S
from .room import RETAIN_S_MAX, RETAIN_WEIGHT_MAX
from .sampling import Sampler
from .scrub import Scrubber
from .series import Sample
from .slab_desk import SlabDesk
from .spilling import SpillDesk
from .stores import StoreDesk
from .tally import Unreused
from .wakes import Wake
from .warming import WarmDesk
from .writing import DiskAdmission


class HolderCore:
    """All decisions of one holder's life. One thread at a time."""

    def __init__(
        self,
        config: HolderConfig,
        model: ModelSpec,
        arena: Arena,
        incarnation: int,
        weights: bytes,
        *,
        planning: Planning | None = None,
        writing: DiskAdmission | None = None,
        eviction: EvictionFactory = LeastRecentlyUsed,
        placement: Placement | None = None,
    ) -> None:
        self.ctx = HolderContext(
            config, model, arena, incarnation, weights, planning=planning, writing=writing, eviction=eviction
        )
        self.disk = DiskDesk(self.ctx)
        self.stores = StoreDesk(self.ctx)
        self.pins = PinDesk(self.ctx, self.disk)
        self.graphs = GraphDesk(self.ctx)
        self.parts = PartDesk(self.ctx, self.disk, Placer(self.ctx, self.graphs))
        self.leader = Leader(self.ctx, self.disk, self.parts)
        self.events = EventDesk(self.ctx)
        self.graphs.release = self.leader.release
        self.copies = CopyDesk(self.ctx, placement, self.leader.release)
        self.leader.granted = self.copies.granted
        self.scrubber = Scrubber(self.ctx)
        self.spill = SpillDesk(self.ctx, self.disk.host)
        self.slabs = SlabDesk(self.ctx, self.graphs)
        self.disk_scrubber = DiskScrubber(self.ctx, self.disk.extents)
        self.intake = IntakeDesk(self.ctx)
        self.purges = PurgeDesk(self.ctx, self.disk, self.stores, self.leader.release)
        self.drain = DrainDesk(self.ctx)
        self.drain.release = self.leader.release
        self.warming = WarmDesk(self.ctx, self.drain)
        self.drain.writing = lambda: bool(self.stores.attempts)
        self.drain.uploading = lambda: self.disk.remote.uploading > 0
        self.drain.in_store = self.disk.in_store
        self.drain.below.find, self.drain.below.restore = partial(last_used, self.disk), self.disk.restore
        self.sampler = Sampler(self.ctx, self.disk)
        self.flow = Flow(config.move_bytes_per_s, arena.layout, self.disk.extents.file_bytes)
        self._flow_due_s: float | None = None
        self._turn: Wake | None = None
        self.weights_number = 0
        self.mode_number = 0
        self.supervisor = 0
        """The latest supervisor that gave a right to grant."""
        self._renewals: dict[str, tuple[str, Renew, float, dict[str, PartRenewed | None]]] = {}
        self._routes: dict[type, Any] = {
            Acquire: self.leader.start,
            Answer: self.copies.answered,
            Members: lambda _, m: self.copies.told_members(m),
            Replicate: lambda _, m: self.copies.replicate(m),
            Renew: self._renew,
            Release: self._release,
            Cancel: self.leader.cancel,
            Computed: self._computed,
            Park: self._park,
            Retain: self._retain,
            Generated: self._generated,
            GraphRegister: self.graphs.register,
            GraphIdle: self.graphs.idle,
            StoreBegin: self.stores.begin,
            StoreCommit: self.stores.commit,
            StoreAbort: self.stores.abort,
            StoreQuiet: self.stores.quiet,
            Drop: self._drop,
            SwapOut: self.disk.swap_out,
            SwapIn: self.disk.swap_in,
            MateLookup: self._mate_lookup,
            MateColumns: self.leader.mate_columns,
            PartOpen: self._part_open,
            PartReply: self.leader.part_reply,
            PartGrant: self.parts.grant,
            PartGranted: self.leader.part_granted,
            PartAbort: lambda _, m: self._part_abort(m),
            PartRenew: self._part_renew,
            PartRenewed: self._part_renewed,
            PartCheck: self._part_check,
            PartRelease: lambda _, m: self.leader.release(m.lease),
            PinRequest: self._pin_request,
            PinReply: self._pin_reply,
            PinEnd: self.pins.end,
            PinEnded: self._pin_ended,
            Offer: self.intake.offered,
            Audited: self.purges.audited,
            Taken: self._taken,
            Warm: lambda _, m: self.warming.asked(m),
            Drain: lambda _, m: self.drain.asked(m),
            CopiesFound: lambda _, m: self.drain.copies_found(m),
            Found: self.leader.found,
            EventsSeen: lambda _, m: self.events.seen(m),
            ShardMap: lambda _, m: self.events.told_map(m),
            GrantUntil: self._grant_until,
            SetWeights: lambda _, m: self._set_weights(m),
            SetMode: lambda _, m: self._set_mode(m),
            HolderGone: lambda _, m: self._mate_gone(m),
        }

    # --- driving -------------------------------------------------------------------------------

    def start(self, now: float, found: Iterable[tuple[int, int, ExtentEntry]] = ()) -> list[Effect]:
        """Begin this life with what the disk still holds (extent, entry number, entry)."""
        self.ctx.now = self.ctx.books.now_s = now
        if self.ctx.config.grants_always:
            self.ctx.arena.set_grants_until(2**64 - 1)
        self.disk.found(found)
        self.events.start()
        self.scrubber.start()
        self.slabs.start()
        self.disk_scrubber.start()
        return self._settle()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One step: an event in, everything to do about it out. ``now``: monotonic seconds."""
        ctx = self.ctx
        ctx.now = ctx.books.now_s = max(now, ctx.now)
        ctx.wake_due()
        match event:
            case Received():
                self._receive(event.sender, event.message)
            case Undeliverable():
                self._undeliverable(event.to, event.message)
            case TransferDone():
                if not (self.disk.copied(event) or self.intake.transferred(event) or self.slabs.transferred(event)):
                    self.parts.transferred(event)
            case TransferQuiet():
                self.intake.transfer_quiet(event.token)
                self.parts.transfer_quiet(event.token)
                self.disk.quiet(event.token)
                self.slabs.quiet(event.token)
            case Digested():
                if not (
                    self.parts.digested(event.token, event.checksums)
                    or self.scrubber.digested(event.token, event.checksums)
                ):
                    self.pins.digested(event.token, event.checksums)
            case PeerClosed():
                self.stores.client_gone(event.peer)
                self.graphs.client_gone(event.peer)
                self.leader.client_gone(event.peer)
            case Tick():
                self.disk.start_due()  # here alone, in a step of its own: live requests come between any two
            case _:
                self._disk_told(event)
        return self._settle()

    def _disk_told(self, event: DiskEvent) -> None:
        match event:
            case DiskWritten():
                self.disk.written(event)
            case DiskRead():
                self.disk.read(event)
            case DiskState():
                self.disk.state(event)
            case DiskFound():
                self.disk.found_later(event)
            case DiskLost():
                self.disk.lost(event)
            case ExtentUploaded():
                self.disk.remote.uploaded(event)
            case RemoteState():
                self.disk.remote.state(event)
            case ExtentScrubbed():
                self.disk_scrubber.scrubbed(event)

    def go_on_purging(self, work: Pass, now: float) -> tuple[Purged | None, list[Effect]]:
        """A slice of a pass that ``purges.purge`` began: what the pass did once it is over, and what is to be done."""
        self.ctx.now = max(now, self.ctx.now)
        purged = None
        try:
            next(work)
        except StopIteration as over:
            purged = over.value
        return purged, self._settle()

    @property
    def next_deadline_s(self) -> float | None:
        """When this core wants a Tick, on the clock of ``now``."""
        return self.ctx.next_wake_s

    def for_a_tier(self, event: Received | Undeliverable) -> bool:
        """Whether only an acquire waits for this event that takes something from this holder's tiers: it can wait itself."""
        message = event.message
        return isinstance(message, Found | Lookup) and self.leader.for_a_tier(message.op)

    def load(self, clients: int) -> Load:
        """What this holder has to do, so many clients of its node included."""
        counters, books = self.ctx.counters, self.ctx.books
        used = sum(pool.used * books.model.groups[pool.group].block_bytes for pool in books.pools.values())
        waiting = len(self.disk.line) + self.disk.waiting
        evicted = self.ctx.tally.lost_tokens.get(Reason.EVICTED, 0)
        return Load(clients, counters["admission_refusals"], evicted, waiting, used)

    def series(self) -> list[Sample]:
        """What this life did over time, up to the last step."""
        return self.sampler.series()

    def _settle(self) -> list[Effect]:
        ctx = self.ctx
        if ctx.local:
            self._drain_local()
        self.leader.room.room_gained()
        if ctx.local:
            self._drain_local()
        if self.disk.turn_due and (self._turn is None or self._turn.call is None):
            self._turn = ctx.wake_at(ctx.now, self._next_turn)
        self.drain.look()
        self.spill.look()
        while self.disk.forget_dropped():
            self._drain_local()
        self.events.flush()
        self.sampler.step()
        effects, ctx.effects = self.flow.through(ctx.effects, ctx.now, ctx.hurried), []
        ctx.hurried.clear()
        if self.flow.due_s is not None and self.flow.due_s != self._flow_due_s:
            self._flow_due_s = self.flow.due_s
            ctx.wake_at(self._flow_due_s, self._next_turn)
        return effects

    def _next_turn(self) -> None:
        """Nothing to do but to have a Tick come, in which the next in line to restore, and the next bytes, get their turn."""

    def _drain_local(self) -> None:
        while self.ctx.local:
            self._receive(self.ctx.config.holder, self.ctx.local.popleft())

    def _receive(self, sender: str, message: Any) -> None:
        route = self._routes.get(type(message))
        if route is None:
            self.ctx.counters["unknown_records"] += 1
            return
        route(sender, message)

    def _undeliverable(self, to: str, message: Any) -> None:
        """Only exchanges that wait for this very peer care; everything else has its own time-out."""
        op = getattr(message, "op", None)
        if isinstance(op, str):
            self.parts.fetches.unreachable(to, op)
            self.leader.unreachable(to, op)
            self.intake.unreachable(to, op)
            self.drain.unreachable(to, op)
        if isinstance(message, PartRenew):
            self._part_renewed(to, PartRenewed(message.op, Reason.HOLDER_LOST, 0.0))

    # --- small verbs ---------------------------------------------------------------------------

    def _mate_lookup(self, peer: str, message: MateLookup) -> None:
        ctx = self.ctx
        columns = ctx.books.columns(ctx.config.holder, ctx.incarnation, message.prompt, ctx.books.shards)
        rooms, caps = ctx.books.rooms(message.prompt), ctx.books.admission.caps(message.prompt.tenant)
        ctx.send(peer, MateColumns(message.op, tuple(columns), tuple(rooms), caps))

    def _part_open(self, leader: str, message: PartOpen) -> None:
        with self.ctx.on_behalf(message.op, self.ctx.now + message.patience_s):
            self.parts.open(leader, message)

    def _pin_request(self, peer: str, message: PinRequest) -> None:
        with self.ctx.on_behalf(message.op, self.ctx.now + PATIENCE_S):
            self.pins.request(peer, message)

    def _part_abort(self, message: PartAbort) -> None:
        self.parts.let_go(message.op)
        if message.cancel:
            self.disk.cancel(message.op)

    def _pin_reply(self, peer: str, message: PinReply) -> None:
        if not self.leader.pin_reply(peer, message) and not self.intake.pin_reply(peer, message):
            self.parts.fetches.pin_reply(peer, message)

    def _taken(self, peer: str, message: Taken) -> None:
        if not self.warming.taken(peer, message):
            self.drain.taken(peer, message)

    def _pin_ended(self, peer: str, message: PinEnded) -> None:
        if not self.intake.pin_ended(peer, message):
            self.parts.fetches.pin_ended(peer, message)

    def _drop(self, client: str, message: Drop) -> None:
        books = self.ctx.books
        objects = [obj for obj in books.find_all(message.objects) if obj.state in (State.SEALED, State.DEMOTING)]
        refused = held_refusal(objects)
        if refused is None:
            for obj in objects:
                books.evict(obj)
        self.ctx.send(client, Done(message.request, refused, ""))

    # --- leases --------------------------------------------------------------------------------

    def _renew(self, client: str, message: Renew) -> None:
        ctx = self.ctx
        lease_s = min(message.lease_s, ctx.config.lease_s_max)
        record = ctx.leases.live.get(message.lease)
        refused = self._renew_refusal(message.lease)
        if refused is not None or record is None:
            ctx.send(client, Renewed(message.request, refused or Reason.LEASE_EXPIRED, 0.0))
            return
        if not record.mates:
            renewed = ctx.leases.renew(message.lease, ctx.now, lease_s, ctx.weights)
            self._renewed(client, message.request, renewed)
            return
        op = ctx.op()
        self._renewals[op] = (client, message, ctx.now, {holder: None for holder, _ in record.mates})
        for holder, theirs in record.mates:
            ctx.send(holder, PartRenew(op, theirs, lease_s))
        ctx.wake_at(ctx.now + ctx.config.request_timeout_s, lambda: self._renewal_over(op))

    def _renew_refusal(self, lease: int) -> Reason | None:
        """Why a lease may not be renewed at this moment, before its record is asked."""
        if not self.ctx.of_this_life(lease):
            return Reason.HOLDER_LOST
        if self.ctx.leases.live.get(lease) is None:
            return Reason.LEASE_EXPIRED
        if not self.ctx.may_grant:
            return Reason.NOT_GRANTING
        if self.ctx.bypassed:
            return Reason.BYPASSED
        return Reason.DRAINING if self.ctx.draining else None

    def _renewed(self, client: str, request: str, renewed: Reason | float) -> None:
        if isinstance(renewed, Reason):
            self.ctx.send(client, Renewed(request, renewed, 0.0))
        else:
            self.ctx.send(client, Renewed(request, None, renewed))

    def _part_renew(self, peer: str, message: PartRenew) -> None:
        ctx = self.ctx
        refused = self._renew_refusal(message.lease)
        renewed: Reason | float = refused or ctx.leases.renew(message.lease, ctx.now, message.lease_s, ctx.weights)
        if isinstance(renewed, Reason):
            ctx.send(peer, PartRenewed(message.op, renewed, 0.0))
        else:
            ctx.send(peer, PartRenewed(message.op, None, renewed))

    def _part_renewed(self, peer: str, message: PartRenewed) -> None:
        entry = self._renewals.get(message.op)
        if entry is None or peer not in entry[3]:
            return
        entry[3][peer] = message
        if all(entry[3].values()):
            self._renewal_over(message.op)

    def _renewal_over(self, op: str) -> None:
        """All ranks renewed, or the lease stays as it was; a rank that has it no more ends it on all of them.

        The new deadline counts from when the ranks were asked: none of them ends its share before that.
        """
        entry = self._renewals.pop(op, None)
        if entry is None:
            return
        client, message, asked_s, replies = entry
        refusals = [Reason.HOLDER_LOST if r is None else r.refused for r in replies.values()]
        refused = next((r for r in refusals if r is not None), None)
        if refused is not None:
            record = self.ctx.leases.live.get(message.lease)
            if Reason.LEASE_EXPIRED in refusals and record is not None and not record.graph:
                self.leader.release(message.lease)
            self.ctx.send(client, Renewed(message.request, refused, 0.0))
            return
        lease_s = min(message.lease_s, self.ctx.config.lease_s_max)
        own = self.ctx.leases.renew(message.lease, self.ctx.now, lease_s, self.ctx.weights, asked_s)
        self._renewed(client, message.request, own)

    def _release(self, client: str, message: Release) -> None:
        record = self.ctx.leases.live.get(message.lease)
        if record is not None:
            self.ctx.tally.lease_released(record.proof, message.reused_tokens or 0, message.refused)
            self.ctx.journal.add(Released(self.ctx.now, message.lease, message.reused_tokens or 0))
        self.leader.release(message.lease)
        self.ctx.send(client, Done(message.request, None, ""))

    def _computed(self, client: str, message: Computed) -> None:
        self.ctx.learn(Measured(message.work, message.tokens, message.seconds))
        self.ctx.send(client, Done(message.request, None, ""))

    def _park(self, client: str, message: Park) -> None:
        record = self.ctx.leases.live.get(message.lease)
        if record is None:
            self.ctx.send(client, Done(message.request, Reason.LEASE_EXPIRED, ""))
            return
        self.ctx.tally.unreused(Unreused.PARKED, record.proof.tokens)
        owners = [self.ctx.books.owner[slot] for run in record.proof.runs for slot in run.slots.tolist()]
        self.leader.release(message.lease)
        self.disk.park(client, message.request, [obj for obj in owners if obj is not None])

    def _retain(self, client: str, message: Retain) -> None:
        """Raise the worth of what is here of a prompt."""
        books, refused = self.ctx.books, None
        if not 0 < message.ttl_s <= RETAIN_S_MAX or not 0 <= message.weight <= RETAIN_WEIGHT_MAX:
            refused = Reason.QUOTA
        else:
            books.retain(message.prompt, message.weight, message.ttl_s)
        self.ctx.send(client, Done(message.request, refused, ""))

    def _generated(self, client: str, message: Generated) -> None:
        self.ctx.books.generated(message.prompt, message.output_tokens)
        self.ctx.send(client, Done(message.request, None, ""))

    def _mate_gone(self, message: HolderGone) -> None:
        """A holder died: a lease that it shared is over on every rank, but for what a graph may still read.

        What is held here for its requests is let go: nothing that it reads from now on can be proven to it. Who waits
        for it waits no longer.
        """
        self.pins.holder_gone(message.holder)
        self.parts.holder_gone(message.holder)
        self.intake.holder_gone(message.holder)
        self.leader.holder_gone(message.holder)
        for record in list(self.ctx.leases.live.values()):
            shared = record.leader == message.holder or any(holder == message.holder for holder, _ in record.mates)
            if shared and not record.graph:
                if record.leader == self.ctx.config.holder:
                    self.ctx.tally.unreused(Unreused.LOST, record.proof.tokens, Reason.HOLDER_LOST)
                self.leader.release(record.lease)

    def _part_check(self, peer: str, message: PartCheck) -> None:
        """A mate wonders whether its graph share is still leased."""
        if not self.leader.leads(peer, message.lease):
            self.ctx.send(peer, PartRelease(message.lease))

    # --- supervisor ----------------------------------------------------------------------------

    def _grant_until(self, peer: str, message: GrantUntil) -> None:
        """The right to grant, for this life only."""
        ctx = self.ctx
        if message.supervisor < self.supervisor:
            return
        self.supervisor = message.supervisor
        if message.incarnation == ctx.incarnation and not ctx.cut:
            since_s = ctx.now if message.since_s is None else min(message.since_s, ctx.now)
            ctx.grants_until_s = max(ctx.grants_until_s, since_s + message.seconds)
            ctx.arena.set_grants_until(int(ctx.grants_until_s * 1e9))

    def _set_weights(self, message: SetWeights) -> None:
        """New weights: what was begun or leased under older ones is refused from here on."""
        ctx = self.ctx
        if message.number < self.weights_number:
            return
        self.weights_number = message.number
        if ctx.weights != message.weights:
            ctx.journal.add(Weights(ctx.now, message.weights))
        ctx.weights = message.weights
        ctx.retired = set(message.retired)
        ctx.arena.set_weights(message.weights)
        for table in ctx.books.table.values():
            for obj in table.values():
                if obj.weights in ctx.retired and not obj.first_out:
                    ctx.books.make_first_out(obj)
                    if obj.below >= 0:
                        self.disk.host.pools.first_out(obj.below)

    def _set_mode(self, message: SetMode) -> None:
        if message.number < self.mode_number:
            return
        self.mode_number = message.number
        self.ctx.draining = message.draining or self.ctx.cut
        self.ctx.bypassed = message.bypassed
        names = [group.name for group in self.ctx.model.groups]
        self.ctx.suspect = names.index(message.suspect) if message.suspect in names else 0
