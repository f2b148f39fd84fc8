"""The part desk: one holder's share of an acquire, from reservation to proof.

    open: pin what is here, reserve for the rest (all or nothing), join what others fetch already
      -> pin at the sources -> transfer -> re-read the source's headers -> seal, install
      -> prove -> ready -> granted | let go

A share that fails runs to its end (what is in flight arrives or fails), keeps what arrived as an
ordinary copy, and answers with the truth; the leader erodes again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .births import Births
from .claims import Claim, every
from .context import HolderContext
from .disk import DiskDesk
from .effects import DigestSlots, TransferDone
from .fetching import FetchDesk
from .grants import GrantDesk
from .kinds import Reason
from .leases import part_of
from .lifecycle import State
from .messages import (
    BadCopy,
    Cap,
    Fetch,
    Objects,
    PartGrant,
    PartGranted,
    PartOpen,
    PartReply,
    Room,
)
from .model import ModelSpec
from .objects import Obj, split
from .passport import abi_refusal
from .placing import Placer
from .replay import replay_of
from .shares import Arriving, Part, Source
from .tally import Outcome, Way
from .validation import HeldRun, Proof, Verdict, prove


class PartDesk:
    """All shares in progress at one holder, its own and those of other leaders."""

    def __init__(self, ctx: HolderContext, disk: DiskDesk, placer: Placer) -> None:
        self.ctx = ctx
        self.disk = disk
        self.placer = placer
        self.open_parts: dict[str, Part] = {}
        self.fetches = FetchDesk(ctx, self.open_parts, self._advance)
        self.grants = GrantDesk(ctx)
        self._digests: dict[int, tuple[Part, tuple[int, ...]]] = {}

    # --- open ----------------------------------------------------------------------------------

    def open(self, leader: str, message: PartOpen) -> None:
        known = self.open_parts.get(message.op)
        if known is not None:
            if known.replied is not None:
                self.ctx.send(leader, known.replied)
            return
        part = Part(leader, message, self.ctx.now + message.patience_s)
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
            self._await(part, index, obj, revision, from_tier=True, coming=False)
        self.disk.restore([obj for _, obj, _ in to_restore])
        for source in part.sources.values():
            self.fetches.begin(part, source)
        if self.ctx.config.verify_always:
            self._digest_local(part)
        self._advance(part)

    def _hold(self, part: Part, index: int, obj: Obj) -> None:
        self.ctx.books.pin(obj)
        part.hold(index, obj)

    def _hold_run(self, part: Part, objects: Objects) -> bool:
        """Pin a whole run at once, where all of it is in memory and usable; else nothing of it."""
        books = self.ctx.books
        group, shard = objects.group, objects.shard
        slots = books.locate(group, shard, split(objects.digests))
        if -1 in slots or (group, shard) in part.held:
            return False
        array = np.array(slots, dtype=np.int64)
        revision = part.revision_of(objects)
        if revision is not None and not every(books.revisions[array] == revision):
            return False
        reader = part.request.abis[group]
        if any(abi_refusal(books.abis[number], reader) is not None for number in books.abi_numbers_of(array)):
            return False
        books.pin_slots(Claim.of([(group, shard, array)]))
        part.held[group, shard] = HeldRun(list(objects.indices), slots)
        return True

    def _pin_local(self, part: Part) -> list[tuple[int, Obj, int | None]]:
        """Pin what is in memory, wait for what is being restored, list what must be: index, object, revision."""
        to_restore = []
        for objects in part.request.local:
            if self._hold_run(part, objects):
                continue
            revision = part.revision_of(objects)
            for index, digest in zip(objects.indices, split(objects.digests), strict=True):
                obj = self.ctx.books.find(objects.group, objects.shard, digest)
                if obj is None or not part.usable(obj, revision):
                    part.refuse(Reason.VERSION_CHANGED, objects.group)
                elif obj.state in (State.SEALED, State.DEMOTING):
                    self._hold(part, index, obj)
                elif obj.state is State.RESTORING:
                    self._await(part, index, obj, revision, from_tier=True)
                elif (refused := self.disk.read_refusal(obj)) is not None:
                    part.refuse(refused, objects.group)
                    part.bad_at(self.ctx.config.holder, obj, index, refused, from_tier=True)
                else:
                    to_restore.append((index, obj, revision))
        return to_restore

    def _plan_fetches(self, part: Part) -> list[tuple[Source, Arriving]]:
        """What must really be fetched: not what arrived meanwhile or is on its way for another."""
        planned = []
        births = Births(self.ctx.model, self.ctx.books.leaving.structure, part.request.prompt)
        for fetch in part.request.fetches:
            spec = self.ctx.model.groups[fetch.objects.group]
            revision = part.revision_of(fetch.objects)
            indices, digests, versions = [], [], []
            for at, (index, digest) in enumerate(zip(fetch.objects.indices, split(fetch.objects.digests), strict=True)):
                group, shard = fetch.objects.group, fetch.objects.shard
                here = self.ctx.books.find(group, shard, digest)
                sealed = here is not None and here.state in (State.SEALED, State.DEMOTING)
                if here is not None and sealed and part.usable(here, revision):
                    self._hold(part, index, here)
                    continue
                coming = self.ctx.inflight.get((group, shard, digest))
                if coming is not None and part.usable(coming, revision):
                    self._await(part, index, coming, revision, from_tier=False)
                    continue
                abi = part.request.abis[group]
                (obj,) = births.of(group, shard, (index,), (digest,), revision or 0, spec.block_bytes, abi)
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
            part.refuse(lacking.reason, lacking.group)
            return
        for _, arriving in to_fetch:
            obj = arriving.obj
            self.ctx.books.reserve(obj)
            self.ctx.tally.recovery(Way.FETCH, obj.kind, Outcome.ATTEMPTED)
            self.ctx.inflight[obj.group, obj.shard, obj.digest] = obj
            part.awaited += 1

    def _await(
        self, part: Part, index: int, obj: Obj, revision: int | None, *, from_tier: bool, coming: bool = True
    ) -> None:
        """``coming``: it is on its way for somebody else already, who may be in less haste."""
        part.awaited += 1
        if coming:
            self.fetches.hurry(obj, part.wanted_s)
            self.disk.hurry(obj, part.wanted_s)

        def stands(arrived: Obj, refused: Reason | None) -> None:
            part.awaited -= 1
            wanted = part.replied is None and not part.let_go
            if refused is None and wanted and part.usable(arrived, revision):
                self._hold(part, index, arrived)
                part.digests[arrived.slot] = arrived.checksum
            else:
                part.refuse(refused or Reason.VERSION_CHANGED, arrived.group)
                if refused is not None and from_tier and refused is not Reason.VERSION_CHANGED:
                    part.bad_at(self.ctx.config.holder, arrived, index, refused, from_tier=True)
            self._advance(part)

        self.ctx.await_object(obj, stands)

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

    def transferred(self, event: TransferDone) -> None:
        """Bytes of a fetch, or of a move to a graph's slots, arrived or did not."""
        if not self.fetches.transferred(event):
            self.placer.moved(event)

    def transfer_quiet(self, token: int) -> None:
        """Proven: no byte of this transfer can still arrive."""
        self.fetches.transfer_quiet(token)
        self.placer.quiet(token)

    def in_hand(self) -> Iterator[Obj]:
        """Every object whose slot a share answers for, landing or not yet quiet."""
        yield from self.fetches.in_hand()
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
            refuse=part.refuse,
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
                        part.bad_at(self.ctx.config.holder, obj, index, Reason.CHECKSUM_MISMATCH, from_tier=False)
        elif verdict.reason is Reason.MISALIGNED:
            key = (verdict.group, verdict.shard, verdict.index)
            part.bad.append(BadCopy(self.ctx.config.holder, *key, Reason.MISALIGNED, False))
        part.refuse(verdict.reason, verdict.group)

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
        record = self.grants.lease(leader, message, part.proof, prompt, part.request.graph_number)
        reply = PartGranted(
            message.op,
            None,
            record.deadline_s,
            record.lease,
            part_of(record, ctx.config.holder, ctx.incarnation),
        )
        self.let_go(message.op)
        ctx.send(leader, reply)

    def grant_refusal(self, part: Part | None) -> Reason | None:
        """Why a ready share may not become a lease at this moment."""
        if part is None or part.let_go:
            return Reason.LEASE_EXPIRED
        return self.grants.refusal(part.request.prompt)

    def holder_gone(self, holder: str) -> None:
        """Nobody will grant the shares of a leader that died, and a source that died sends nothing more."""
        for op, part in list(self.open_parts.items()):
            if part.leader == holder:
                self.let_go(op)
            else:
                self.fetches.unreachable(holder, op)

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
