"""The part desk: one holder's share of an acquire, from reservation to proof.

    open: pin what is here, reserve for the rest (all or nothing), join what others fetch already
      -> pin at the sources -> transfer -> re-read the source's headers -> seal, install
      -> prove -> ready -> granted | let go

A share that fails runs to its end (what is in flight arrives or fails), keeps what arrived as an
ordinary copy, and answers with the truth; the leader erodes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .claims import Claim
from .context import HolderContext
from .disk import DiskDesk
from .effects import DigestSlots, Moved, Pair, StartTransfer, TransferDone, TransferFault
from .expected import Measured, Work
from .kinds import Reason
from .leases import LeaseRecord, grace_s, part_of
from .lifecycle import State
from .messages import (
    BadCopy,
    Cap,
    Column,
    Fetch,
    Objects,
    PartCheck,
    PartGrant,
    PartGranted,
    PartOpen,
    PartReply,
    PinEnd,
    PinEnded,
    PinReply,
    PinRequest,
    Prompt,
    Room,
    SourceRun,
)
from .model import ModelSpec
from .objects import Obj, split
from .passport import abi_refusal
from .placing import Placer
from .replay import replay_of
from .segments import stands_at
from .tally import Outcome, Unreused, Way
from .validation import Held, HeldRun, Proof, Verdict, prove
from .wakes import Wake


@dataclass(slots=True)
class Arriving:
    """One object on its way from a source: the hidden local object and what was promised of it."""

    index: int
    obj: Obj
    revision: int | None = None
    """The one it is wanted in; None: any."""
    source_slot: int = -1
    version: bytes = b""
    checksum: bytes = b""
    landed: bytes | None = None
    fault: Reason | None = None
    tries: int = 0


@dataclass(slots=True)
class Source:
    """One source of a share: its pin, its objects, its transfer."""

    holder: str
    incarnation: int
    fetches: list[Fetch]
    arriving: list[Arriving]
    transferring: int = 0
    ended: bool = False


@dataclass(slots=True)
class Part:
    """One share in progress."""

    leader: str
    request: PartOpen
    held: Held = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    awaited: int = 0
    digests: dict[int, bytes] = field(default_factory=dict)
    refused: Reason | None = None
    group: int = 0
    bad: list[BadCopy] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    truth: list[Column] = field(default_factory=list)
    moved_bytes: dict[int, int] = field(default_factory=dict)
    proof: Proof | None = None
    replied: PartReply | None = None
    let_go: bool = False
    placing: bool = False
    """Objects are being copied to a graph's slots, from those that are held."""
    expiry: Wake | None = None


class PartDesk:
    """All shares in progress at one holder, its own and those of other leaders."""

    def __init__(self, ctx: HolderContext, disk: DiskDesk, placer: Placer) -> None:
        self.ctx = ctx
        self.disk = disk
        self.placer = placer
        self.open_parts: dict[str, Part] = {}
        self._transfers: dict[int, tuple[Part, Source, dict[int, Arriving], float]] = {}
        self._digests: dict[int, tuple[Part, tuple[int, ...]]] = {}
        self._quarantined: dict[int, list[Obj]] = {}

    # --- open ----------------------------------------------------------------------------------

    def open(self, leader: str, message: PartOpen) -> None:
        known = self.open_parts.get(message.op)
        if known is not None:
            if known.replied is not None:
                self.ctx.send(leader, known.replied)
            return
        part = Part(leader, message)
        self.open_parts[message.op] = part
        part.expiry = self.ctx.wake_at(self.ctx.now + message.ttl_s, lambda: self.let_go(message.op))
        to_restore = self._pin_local(part)
        to_fetch = self._plan_fetches(part)
        if part.refused is None:
            self._reserve(part, [obj for _, obj, _ in to_restore], to_fetch)
        if part.refused is not None:
            self._reply(part)
            return
        for index, obj, revision in to_restore:
            self._await(part, index, obj, revision, from_tier=True)
        self.disk.restore([obj for _, obj, _ in to_restore])
        for source in part.sources.values():
            self._pin_at(part, source)
        if self.ctx.config.verify_always:
            self._digest_local(part)
        self._advance(part)

    def _hold(self, part: Part, index: int, obj: Obj) -> None:
        self.ctx.books.pin(obj)
        run = part.held.setdefault((obj.group, obj.shard), HeldRun())
        run.add(index, obj.slot)

    def _hold_run(self, part: Part, objects: Objects) -> bool:
        """Pin a whole run at once, where all of it is in memory and usable; else nothing of it."""
        books = self.ctx.books
        group, shard = objects.group, objects.shard
        slots = books.locate(group, shard, split(objects.digests))
        if -1 in slots or (group, shard) in part.held:
            return False
        array = np.array(slots, dtype=np.int64)
        revision = _revision(part, objects)
        if revision is not None and (books.revisions[array] != revision).any():
            return False
        reader = part.request.abis[group]
        if any(abi_refusal(books.abis[number], reader) is not None for number in books.abi_numbers_of(array)):
            return False
        books.pin_slots(Claim.of([(group, shard, array)]))
        part.held[group, shard] = HeldRun(list(objects.indices), slots)
        return True

    def _usable(self, part: Part, obj: Obj | None, revision: int | None) -> bool:
        if obj is None or obj.bad is not None:
            return False
        if revision is not None and obj.revision != revision:
            return False
        return abi_refusal(obj.abi, part.request.abis[obj.group]) is None

    def _pin_local(self, part: Part) -> list[tuple[int, Obj, int | None]]:
        """Pin what is in memory, wait for what is being restored, list what must be: index, object, revision."""
        to_restore = []
        for objects in part.request.local:
            if self._hold_run(part, objects):
                continue
            revision = _revision(part, objects)
            for index, digest in zip(objects.indices, split(objects.digests), strict=True):
                obj = self.ctx.books.find(objects.group, objects.shard, digest)
                if obj is None or not self._usable(part, obj, revision):
                    self._refuse(part, Reason.VERSION_CHANGED, objects.group)
                elif obj.state in (State.SEALED, State.DEMOTING):
                    self._hold(part, index, obj)
                elif obj.state is State.RESTORING:
                    self._await(part, index, obj, revision, from_tier=True)
                elif (refused := self.disk.read_refusal(obj)) is not None:
                    self._refuse(part, refused, objects.group)
                    self._bad_here(part, obj, index, refused, from_tier=True)
                else:
                    to_restore.append((index, obj, revision))
        return to_restore

    def _plan_fetches(self, part: Part) -> list[tuple[Source, Arriving]]:
        """What must really be fetched: not what arrived meanwhile or is on its way for another."""
        planned = []
        units = dict(part.request.prompt.keys)
        for fetch in part.request.fetches:
            spec = self.ctx.model.groups[fetch.objects.group]
            revision = _revision(part, fetch.objects)
            keys = units[spec.unit_tokens]
            indices, digests, versions = [], [], []
            for at, (index, digest) in enumerate(zip(fetch.objects.indices, split(fetch.objects.digests), strict=True)):
                group, shard = fetch.objects.group, fetch.objects.shard
                here = self.ctx.books.find(group, shard, digest)
                sealed = here is not None and here.state in (State.SEALED, State.DEMOTING)
                if here is not None and sealed and self._usable(part, here, revision):
                    self._hold(part, index, here)
                    continue
                coming = self.ctx.inflight.get((group, shard, digest))
                if coming is not None and self._usable(part, coming, revision):
                    self._await(part, index, coming, revision, from_tier=False)
                    continue
                prompt = part.request.prompt
                base, home = self.ctx.books.leaving.structure.rests_on(group, index, units)
                position, place = stands_at(self.ctx.model, spec.unit_tokens, keys, index)
                obj = Obj(
                    spec.kind,
                    group,
                    shard,
                    digest,
                    position,
                    prompt.namespace,
                    prompt.weights,
                    prompt.tenant,
                    revision or 0,
                    spec.block_bytes,
                    part.request.abis[group],
                    place=place,
                    base=base,
                    home=home,
                )
                indices.append(index)
                digests.append(digest)
                versions.append(fetch.versions[at * 8 : at * 8 + 8])
                source = part.sources.setdefault(fetch.source, Source(fetch.source, fetch.incarnation, [], []))
                arriving = Arriving(index, obj, revision)
                source.arriving.append(arriving)
                planned.append((source, arriving))
            if indices:
                wanted = fetch.objects
                objects = Objects(wanted.group, wanted.shard, tuple(indices), b"".join(digests), wanted.revision)
                part.sources[fetch.source].fetches.append(
                    Fetch(fetch.source, fetch.incarnation, objects, b"".join(versions))
                )
        return planned

    def _reserve(self, part: Part, to_restore: list[Obj], to_fetch: list[tuple[Source, Arriving]]) -> None:
        """Room for the whole need in every pool in one step, or none of it."""
        lacking = self.ctx.books.lacking([*to_restore, *(a.obj for _, a in to_fetch)])
        if lacking is not None:
            self._refuse(part, lacking.reason, lacking.group)
            return
        for _, arriving in to_fetch:
            obj = arriving.obj
            self.ctx.books.reserve(obj)
            self.ctx.tally.recovery(Way.FETCH, obj.kind, Outcome.ATTEMPTED)
            self.ctx.inflight[obj.group, obj.shard, obj.digest] = obj
            part.awaited += 1

    def _await(self, part: Part, index: int, obj: Obj, revision: int | None, *, from_tier: bool) -> None:
        part.awaited += 1

        def stands(arrived: Obj, refused: Reason | None) -> None:
            part.awaited -= 1
            wanted = part.replied is None and not part.let_go
            if refused is None and wanted and self._usable(part, arrived, revision):
                self._hold(part, index, arrived)
                part.digests[arrived.slot] = arrived.checksum
            else:
                self._refuse(part, refused or Reason.VERSION_CHANGED, arrived.group)
                if refused is not None and from_tier and refused is not Reason.VERSION_CHANGED:
                    self._bad_here(part, arrived, index, refused, from_tier=True)
            self._advance(part)

        self.ctx.await_object(obj, stands)

    def _bad_here(self, part: Part, obj: Obj, index: int, reason: Reason, *, from_tier: bool) -> None:
        part.bad.append(BadCopy(self.ctx.config.holder, obj.group, obj.shard, index, reason, from_tier))

    def _refuse(self, part: Part, reason: Reason, group: int) -> None:
        if part.refused is None:
            part.refused, part.group = reason, group

    def _digest_local(self, part: Part) -> None:
        slots = tuple(slot for run in part.held.values() for slot in run.slots if slot not in part.digests)
        if slots:
            token = self.ctx.number()
            self._digests[token] = (part, slots)
            part.awaited += 1
            self.ctx.do(DigestSlots(token, slots))

    def digested(self, token: int, checksums: tuple[bytes, ...]) -> bool:
        """Checksums of pinned local slots; a wrong one is the prover's to refuse."""
        entry = self._digests.pop(token, None)
        if entry is None:
            return False
        part, slots = entry
        part.digests.update(zip(slots, checksums, strict=True))
        part.awaited -= 1
        self._advance(part)
        return True

    # --- sources -------------------------------------------------------------------------------

    def _pin_at(self, part: Part, source: Source) -> None:
        ctx = self.ctx
        message = PinRequest(
            part.request.op,
            source.incarnation,
            part.request.prompt,
            tuple(fetch.objects for fetch in source.fetches),
            part.request.revisions,
            part.request.abis,
            False,
            True,
            ctx.config.pins_s,
        )
        ctx.send(source.holder, message)
        deadline_s = ctx.now + ctx.config.request_timeout_s
        if any(bytes(8) in _versions(fetch) for fetch in source.fetches):
            deadline_s += ctx.config.recovery_wait_s  # the source restores it from its tier first
        ctx.wake_at(deadline_s, lambda: self._source_silent(part, source))

    def pin_reply(self, peer: str, message: PinReply) -> None:
        part = self.open_parts.get(message.op)
        source = part.sources.get(peer) if part is not None else None
        if part is None or source is None or source.ended:
            if message.refused is None and message.runs:
                self.ctx.send(peer, PinEnd(message.op, ()))
            return
        if source.transferring or any(a.source_slot >= 0 for a in source.arriving):
            return
        if message.refused is not None:
            part.truth.extend(message.truth)
            part.bad.extend(message.bad)
            if message.refused is Reason.HOLDER_LOST:
                part.lost.append(peer)
            self._source_failed(part, source, message.refused)
            return
        if not self._promises_fit(part, source, message.runs):
            self.ctx.send(peer, PinEnd(message.op, ()))
            self._source_failed(part, source, Reason.VERSION_CHANGED)
            return
        self._transfer(part, source, source.arriving)

    def _promises_fit(self, part: Part, source: Source, runs: tuple[SourceRun, ...]) -> bool:
        """Take the promised slots, versions and checksums; False where they are not what was asked for."""
        at = {(a.obj.group, a.obj.shard, a.index): a for a in source.arriving}
        for run in runs:
            for place, index in enumerate(run.slots.indices):
                arriving = at.pop((run.slots.group, run.slots.shard, index), None)
                if arriving is None or run.lengths[place] > self.ctx.model.groups[run.slots.group].block_bytes:
                    return False
                arriving.source_slot = int.from_bytes(run.slots.slots[place * 4 : place * 4 + 4], "little")
                arriving.version = run.slots.versions[place * 8 : place * 8 + 8]
                arriving.checksum = run.checksums[place * 16 : place * 16 + 16]
                arriving.obj.length = run.lengths[place]
                arriving.obj.revision = run.revisions[place]
                arriving.obj.abi = run.abis[place]
                if not self._usable(part, arriving.obj, arriving.revision):
                    return False
        return not at

    def _transfer(self, part: Part, source: Source, arriving: list[Arriving]) -> None:
        ctx = self.ctx
        token = ctx.number()
        source.transferring += 1
        self._transfers[token] = (part, source, {a.obj.slot: a for a in arriving}, ctx.now)
        pairs = tuple(Pair(a.source_slot, a.obj.slot, a.obj.length) for a in arriving)
        for a in arriving:
            a.tries += 1
        deadline_s = ctx.now + ctx.config.transfer_timeout_s
        ctx.do(StartTransfer(token, source.holder, source.incarnation, pairs, deadline_s))

    def transferred(self, event: TransferDone) -> None:
        entry = self._transfers.pop(event.token, None)
        if entry is None:
            self.placer.moved(event)
            return
        part, source, arriving, since_s = entry
        source.transferring -= 1
        again, landed_bytes = [], 0
        for moved in event.moved:
            a = arriving[moved.slot]
            if not moved.quiet:
                self._quarantine(event.token, a)
            elif self.landed_whole(a, moved):
                a.landed = moved.checksum
                part.moved_bytes[a.obj.group] = part.moved_bytes.get(a.obj.group, 0) + a.obj.length
                landed_bytes += a.obj.length
            elif moved.fault is not TransferFault.PEER_LOST and a.tries <= self.ctx.config.transfer_retries:
                again.append(a)
            else:
                a.fault = Reason.HOLDER_LOST if moved.fault is TransferFault.PEER_LOST else Reason.TRANSFER_FAILED
        if landed_bytes and not again:
            self.ctx.learn(Measured(Work.TRANSFER, landed_bytes, self.ctx.now - since_s, source.holder))
        if again:
            self.ctx.counters["transfer_retries"] += len(again)
            self._transfer(part, source, again)
        elif not source.transferring:
            self._end_pins(part, source)

    def landed_whole(self, a: Arriving, moved: Moved) -> bool:
        """The bytes that landed are the promised ones, by their digest."""
        return moved.fault is None and moved.checksum == a.checksum

    def _quarantine(self, token: int, a: Arriving) -> None:
        """Foreign bytes may still reach this slot: nobody gets it until that is proven over."""
        a.fault = Reason.TRANSFER_FAILED
        self.ctx.inflight.pop((a.obj.group, a.obj.shard, a.obj.digest), None)
        self.ctx.books.quarantine(a.obj)
        self._quarantined.setdefault(token, []).append(a.obj)

    def transfer_quiet(self, token: int) -> None:
        for obj in self._quarantined.pop(token, ()):
            self.ctx.books.quiet(obj)
        self.placer.quiet(token)

    def _end_pins(self, part: Part, source: Source) -> None:
        ctx = self.ctx
        torn: dict[tuple[int, int], list[Arriving]] = {}
        for a in source.arriving:
            if a.fault is Reason.TRANSFER_FAILED and a.obj.state is State.FILLING:
                torn.setdefault((a.obj.group, a.obj.shard), []).append(a)
        suspect = tuple(
            Objects(g, s, tuple(a.index for a in run), b"".join(a.obj.digest for a in run))
            for (g, s), run in torn.items()
        )
        ctx.send(source.holder, PinEnd(part.request.op, suspect))
        ctx.wake_at(ctx.now + ctx.config.request_timeout_s, lambda: self._source_silent(part, source))

    def pin_ended(self, peer: str, message: PinEnded) -> None:
        """The source's headers after the transfer: unchanged versions prove what was read."""
        part = self.open_parts.get(message.op)
        source = part.sources.get(peer) if part is not None else None
        if part is None or source is None or source.ended or source.transferring:
            return
        source.ended = True
        part.bad.extend(message.bad)
        part.truth.extend(message.truth)
        wrong_there = {(b.group, b.shard, b.index) for b in message.bad}
        versions: dict[tuple[int, int, int], bytes] = {}
        for fetch, blob in zip(source.fetches, message.versions, strict=False):
            for place, index in enumerate(fetch.objects.indices):
                versions[fetch.objects.group, fetch.objects.shard, index] = blob[place * 8 : place * 8 + 8]
        stood = []
        for a in source.arriving:
            key = (a.obj.group, a.obj.shard, a.index)
            if a.fault is None and self.unchanged_at_source(a, versions.get(key, b"")):
                stood.append(a)
                continue
            moved = bool(message.truth) and versions.get(key) == bytes(8)
            reason = Reason.VERSION_CHANGED if moved or a.fault is None else a.fault
            if key not in wrong_there and reason is not Reason.VERSION_CHANGED:
                part.bad.append(BadCopy(source.holder, *key, reason, False))
            self._arriving_failed(part, a, reason)
        for a in stood:
            self._arrived(part, a)
        self._advance(part)

    def unchanged_at_source(self, a: Arriving, version: bytes) -> bool:
        """The source slot still bore the promised version after the last byte was read."""
        return version == a.version and bool(version)

    def _arrived(self, part: Part, a: Arriving) -> None:
        books = self.ctx.books
        books.seal(a.obj, a.checksum)
        books.install(a.obj)
        self.ctx.inflight.pop((a.obj.group, a.obj.shard, a.obj.digest), None)
        self.ctx.tally.recovery(Way.FETCH, a.obj.kind, Outcome.SUCCEEDED)
        self.ctx.counters["fetched_objects"] += 1
        self.ctx.counters["fetched_bytes"] += a.obj.length
        self._hold(part, a.index, a.obj)
        part.digests[a.obj.slot] = a.landed or b""
        part.awaited -= 1
        self.ctx.arrived(a.obj, None)

    def _arriving_failed(self, part: Part, a: Arriving, reason: Reason) -> None:
        self.ctx.inflight.pop((a.obj.group, a.obj.shard, a.obj.digest), None)
        self.ctx.tally.recovery(Way.FETCH, a.obj.kind, Outcome.FAILED, reason)
        if a.obj.state is State.FILLING:
            self.ctx.books.give_up(a.obj)
        part.awaited -= 1
        self._refuse(part, reason, a.obj.group)
        self.ctx.arrived(a.obj, reason)

    def _source_failed(self, part: Part, source: Source, reason: Reason) -> None:
        """Nothing of this source was or will be transferred."""
        source.ended = True
        for a in source.arriving:
            self._arriving_failed(part, a, reason)
        self._advance(part)

    def _source_silent(self, part: Part, source: Source) -> None:
        """No reply in time: the source counts as lost. A running transfer has its own deadline."""
        if not source.ended and not source.transferring and self.open_parts.get(part.request.op) is part:
            part.lost.append(source.holder)
            self._source_failed(part, source, Reason.HOLDER_LOST)

    def unreachable(self, peer: str, op: str) -> None:
        part = self.open_parts.get(op)
        source = part.sources.get(peer) if part is not None else None
        if part is not None and source is not None:
            self._source_silent(part, source)

    def in_hand(self) -> Iterator[Obj]:
        """Every object whose slot a fetch answers for, landing or not yet quiet."""
        for part in self.open_parts.values():
            for source in part.sources.values():
                yield from (a.obj for a in source.arriving)
        for objects in self._quarantined.values():
            yield from objects
        yield from self.placer.in_hand()

    def pinned(self) -> Iterator[int]:
        """Every slot pinned for a share in progress, once a pin."""
        for part in self.open_parts.values():
            for run in part.held.values():
                yield from run.slots

    # --- ready ---------------------------------------------------------------------------------

    def _advance(self, part: Part) -> None:
        if part.awaited or part.replied is not None:
            return
        if part.let_go:
            self._forget(part)
            return
        if part.refused is None and part.request.graph_number and not self._in_place(part):
            return
        if part.refused is None:
            self._prove(part)
        self._reply(part)

    def _in_place(self, part: Part) -> bool:
        """Whether everything lies in the graph's slots, or never will; a round of moves comes back here."""

        def round_over() -> None:
            part.awaited -= 1
            part.placing = False
            self._advance(part)

        done = self.placer.place(
            part.request.graph_number,
            part.held,
            part.digests,
            refuse=lambda reason, group: self._refuse(part, reason, group),
            then=round_over,
        )
        if not done:
            part.awaited += 1
            part.placing = True
        return done

    def _prove(self, part: Part) -> None:
        request = part.request
        result = prove(
            _rules(self.ctx.model, request),
            tokens=request.tokens,
            n=request.prompt.n,
            shards=request.shards,
            revisions=request.revisions,
            abis=request.abis,
            held=part.held,
            books=self.ctx.books,
            digests=part.digests,
        )
        if isinstance(result, Proof):
            part.proof = result
            return
        self._disproved(part, result)

    def _disproved(self, part: Part, verdict: Verdict) -> None:
        assert verdict.reason is not None
        self.ctx.counters["validation_failures"] += 1
        if verdict.reason is Reason.CHECKSUM_MISMATCH:
            for run in part.held.values():
                for index, slot in zip(run.indices, run.slots, strict=True):
                    obj = self.ctx.books.owner[slot]
                    if obj is None or part.digests.get(slot, obj.checksum) == obj.checksum:
                        continue
                    if self.ctx.books.mark_bad(obj, Reason.CHECKSUM_MISMATCH):
                        self._bad_here(part, obj, index, Reason.CHECKSUM_MISMATCH, from_tier=False)
        elif verdict.reason is Reason.MISALIGNED:
            key = (verdict.group, verdict.shard, verdict.index)
            part.bad.append(BadCopy(self.ctx.config.holder, *key, Reason.MISALIGNED, False))
        self._refuse(part, verdict.reason, verdict.group)

    def _reply(self, part: Part) -> None:
        ctx = self.ctx
        stale = list(part.truth)
        rooms: tuple[Room, ...] = ()
        caps: tuple[Cap, ...] = ()
        if part.refused is not None:
            self._unpin(part)
            prompt = part.request.prompt
            stale.extend(ctx.books.columns(ctx.config.holder, ctx.incarnation, prompt, ctx.books.shards))
            rooms = tuple(ctx.books.rooms(prompt))
            caps = ctx.books.admission.caps(prompt.tenant)
        part.replied = PartReply(
            part.request.op,
            part.refused,
            part.group,
            tuple(part.bad),
            tuple(part.lost),
            tuple(stale),
            rooms,
            tuple(part.moved_bytes.items()),
            caps,
        )
        ctx.send(part.leader, part.replied)
        if part.refused is not None:
            self._forget(part)

    # --- grant ---------------------------------------------------------------------------------

    def grant(self, leader: str, message: PartGrant) -> None:
        """Turn a ready share into a lease; refused where this holder may not grant (any more)."""
        ctx = self.ctx
        part = self.open_parts.get(message.op)
        refused = self.grant_refusal(part)
        if refused is not None or part is None or part.proof is None:
            ctx.send(leader, PartGranted(message.op, refused or Reason.LEASE_EXPIRED, 0.0, 0, None))
            return
        prompt = part.request.prompt
        record = self.lease(leader, message, part.proof, prompt, part.request.graph_number)
        reply = PartGranted(
            message.op,
            None,
            record.deadline_s,
            record.lease,
            part_of(record, ctx.config.holder, ctx.incarnation),
        )
        self.let_go(message.op)
        ctx.send(leader, reply)

    def lease(
        self, leader: str, message: PartGrant, proof: Proof, prompt: Prompt, graph_number: int = 0
    ) -> LeaseRecord:
        """A lease on what is proven, its end watched. The caller asked whether this holder may grant."""
        ctx = self.ctx
        record = ctx.leases.grant(
            proof,
            leader=leader,
            client=message.client,
            now=ctx.now,
            lease_s=message.lease_s,
            weights=prompt.weights,
            tenant=prompt.tenant,
            graph=message.graph,
            graph_number=graph_number,
        )
        ctx.books.touch_slots(proof.claim.slots)
        self._watch(record)
        return record

    def _watch(self, record: LeaseRecord) -> None:
        """End the lease once its grace is over; a renewed one is looked at again then.

        An expired graph lease ends only by release, or with its reader's process, which may replay the
        graph at any time. Its leader is asked now and then, so that no lost release keeps it for ever.
        """
        ctx = self.ctx
        due_s = record.deadline_s + grace_s(record.lease_s)

        def over() -> None:
            if ctx.leases.live.get(record.lease) is not record:
                return
            if ctx.now < record.deadline_s + grace_s(record.lease_s):
                self._watch(record)
            elif record.graph:
                if record.leader != ctx.config.holder:
                    ctx.send(record.leader, PartCheck(record.lease))
                record.watch = ctx.wake_at(ctx.now + ctx.config.graph_check_s, over)
            else:
                ctx.counters["leases_expired"] += 1
                if record.leader == ctx.config.holder:
                    ctx.tally.unreused(Unreused.EXPIRED, record.proof.tokens, Reason.LEASE_EXPIRED)
                ctx.leases.end(record.lease, ctx.now)

        record.watch = ctx.wake_at(due_s, over)

    def grant_refusal(self, part: Part | None) -> Reason | None:
        """Why a ready share may not become a lease at this moment."""
        if part is None or part.let_go:
            return Reason.LEASE_EXPIRED
        return self.lease_refusal(part.request.prompt)

    def lease_refusal(self, prompt: Prompt) -> Reason | None:
        """Why this holder leases nothing of such a prompt now, whatever is proven."""
        ctx = self.ctx
        if ctx.draining:
            return Reason.DRAINING
        if not ctx.may_grant:
            return Reason.NOT_GRANTING
        if prompt.weights != ctx.weights:
            return Reason.WEIGHTS_MISMATCH
        return None if ctx.books.admission.may_lease(prompt.tenant) else Reason.QUOTA

    def holder_gone(self, holder: str) -> None:
        """Nobody will grant the shares of a leader that died, and a source that died sends nothing more."""
        for op, part in list(self.open_parts.items()):
            if part.leader == holder:
                self.let_go(op)
            else:
                self.unreachable(holder, op)

    def let_go(self, op: str) -> None:
        """End a share; what is in flight still runs to its end, and keeps what it copies from."""
        part = self.open_parts.get(op)
        if part is None or part.let_go:
            return
        part.let_go = True
        if not part.placing:
            self._unpin(part)
        if not part.awaited:
            self._forget(part)

    def _unpin(self, part: Part) -> None:
        held, part.held = part.held, {}
        self.ctx.books.unpin_slots(Claim.of((group, shard, run.array) for (group, shard), run in held.items()))

    def _forget(self, part: Part) -> None:
        self._unpin(part)
        self.open_parts.pop(part.request.op, None)
        if part.expiry is not None:
            part.expiry.cancel()


def _rules(model: ModelSpec, request: PartOpen) -> ModelSpec:
    """The rules that a share is proven by: with replay, nothing is needed of what is computed again."""
    replay = replay_of(model) if request.replays else None
    return model if replay is None else replay.model


def _revision(part: Part, objects: Objects) -> int | None:
    """The revision that objects are wanted in; None: any."""
    return objects.revision if objects.revision is not None else part.request.revisions[objects.group]


def _versions(fetch: Fetch) -> list[bytes]:
    return [fetch.versions[i : i + 8] for i in range(0, len(fetch.versions), 8)]
