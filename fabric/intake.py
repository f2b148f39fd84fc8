"""The intake desk: what a holder that drains offers, fetched into whatever room it is worth.

    offered -> reserved -> pins asked -> transfer -> source's headers re-read -> installed, told as taken

Nothing is taken on trust: an object stands here by the promised digest of what landed and by an unchanged
version at its source, as with any fetch. Room is what is free, and what is worth less than what is offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from .context import HolderContext, Recent
from .disk import object_of
from .effects import Moved, Pair, StartTransfer, TransferDone
from .kinds import Reason
from .messages import Objects, Offer, Offered, PinEnd, PinEnded, PinReply, PinRequest, Prompt, SourceRun, Taken
from .objects import Obj
from .passport import Abi
from .wakes import Wake

INTAKES_MAX = 64
ANSWERS_KEPT = 256
NO_PROMPT = Prompt(b"", b"", "", 0, ())
"""A pin asked for by digests alone: a refusal then tells no columns."""


@dataclass(slots=True)
class Incoming:
    """One object of an offer on its way here."""

    place: int
    obj: Obj
    source_slot: int = -1
    version: bytes = b""
    landed: bool = False


@dataclass(slots=True)
class Intake:
    """One offer being taken."""

    source: str
    offer: Offer
    until_s: float
    coming: list[Incoming]
    runs: list[list[Incoming]]
    had: int = 0
    no_room: int = 0
    token: int = 0
    ready: bool = False
    """Nothing is awaited but the source's word on its headers."""
    timer: Wake | None = None

    def told(self, versions: Sequence[bytes]) -> Iterator[tuple[list[Incoming], bytes]]:
        """Each run with the versions (uint64 each) that its source tells of it; b"" where it tells none."""
        return zip(self.runs, chain(versions, repeat(b"")))  # noqa: B905 - the second never ends


class IntakeDesk:
    """All offers that this holder takes."""

    def __init__(self, ctx: HolderContext) -> None:
        self.ctx = ctx
        self.open: dict[str, Intake] = {}
        self._by_token: dict[int, Intake] = {}
        self._quarantined: dict[int, list[Obj]] = {}
        self._recent = Recent(ANSWERS_KEPT)

    # --- offered -------------------------------------------------------------------------------

    def offered(self, source: str, message: Offer) -> None:
        """Reserve what is wanted and there is room for, and fetch it; the answer tells of every object."""
        if message.op in self.open:
            return
        known = self._recent.get(message.op)
        if known is None and (self.ctx.draining or len(self.open) >= INTAKES_MAX):
            known = Taken(message.op, 0, 0, (1 << len(message.objects)) - 1)
        if known is not None:
            self.ctx.send(source, known)
            return
        intake = Intake(source, message, self.ctx.now + message.within_s, [], [])
        self.open[message.op] = intake
        for place, offered in enumerate(message.objects):
            self._consider(intake, place, offered)
        if intake.coming:
            self._ask(intake)
        else:
            self._finish(intake)

    def _consider(self, intake: Intake, place: int, offered: Offered) -> None:
        ctx, bit = self.ctx, 1 << place
        obj = object_of(offered.entry, ctx.model, ctx.books.shards)
        if obj is None or obj.weights in ctx.retired:
            return
        obj.base, obj.home = offered.base, offered.home
        key = (obj.group, obj.shard, obj.digest)
        there = ctx.books.find(*key)
        if there is not None and there.bad is None:
            intake.had |= bit
        elif there is None and key not in ctx.inflight:
            if ctx.books.room_for(obj, offered.worth):
                ctx.books.reserve(obj)
                ctx.inflight[key] = obj
                intake.coming.append(Incoming(place, obj))
            else:
                intake.no_room |= bit

    # --- pins at the source --------------------------------------------------------------------

    def _ask(self, intake: Intake) -> None:
        """Ask the source to pin what is coming, in runs of one group, shard and revision."""
        ctx = self.ctx
        abis: list[Abi] = [Abi(b"", 1)] * len(ctx.model.groups)
        runs: dict[tuple[int, int, int], list[Incoming]] = {}
        for incoming in intake.coming:
            obj = incoming.obj
            abis[obj.group] = obj.abi
            runs.setdefault((obj.group, obj.shard, obj.revision), []).append(incoming)
        intake.runs = list(runs.values())
        objects = tuple(
            Objects(group, shard, tuple(i.place for i in run), b"".join(i.obj.digest for i in run), revision)
            for (group, shard, revision), run in runs.items()
        )
        revisions = (None,) * len(ctx.model.groups)
        op, incarnation, ttl_s = intake.offer.op, intake.offer.incarnation, ctx.config.pins_s
        ctx.send(
            intake.source,
            PinRequest(op, incarnation, NO_PROMPT, objects, revisions, tuple(abis), False, False, ttl_s),
        )
        self._wait(intake, ctx.config.request_timeout_s)

    def _wait(self, intake: Intake, seconds: float) -> None:
        """Give the offer up unless its next step comes in time."""
        if intake.timer is not None:
            intake.timer.cancel()
        intake.timer = self.ctx.wake_at(self.ctx.now + seconds, lambda: self._lost(intake))

    def _lost(self, intake: Intake) -> None:
        """The source does not answer; a running transfer has its own deadline."""
        if self.open.get(intake.offer.op) is intake and intake.token not in self._by_token:
            self._finish(intake)

    def pin_reply(self, peer: str, message: PinReply) -> bool:
        """The source's promises; False if this is none of this desk's."""
        intake = self.open.get(message.op)
        if intake is None or intake.source != peer:
            return False
        if intake.token:
            return True
        if message.refused is not None or not self._promised(intake, message.runs):
            if message.refused is None:
                self.ctx.send(peer, PinEnd(message.op, ()))
            self._finish(intake)
            return True
        self._fetch(intake)
        return True

    def _promised(self, intake: Intake, runs: Sequence[SourceRun]) -> bool:
        """Take the slots and versions; False where the source promises other bytes than it offered."""
        if len(runs) != len(intake.runs):
            return False
        for run, coming in zip(runs, intake.runs, strict=True):
            if tuple(i.place for i in coming) != tuple(run.slots.indices) or len(run.lengths) != len(coming):
                return False
            for at, incoming in enumerate(coming):
                obj = incoming.obj
                if run.lengths[at] != obj.length or run.checksums[at * 16 : at * 16 + 16] != obj.checksum:
                    return False
                incoming.source_slot = int.from_bytes(run.slots.slots[at * 4 : at * 4 + 4], "little")
                incoming.version = run.slots.versions[at * 8 : at * 8 + 8]
        return True

    # --- bytes ---------------------------------------------------------------------------------

    def _fetch(self, intake: Intake) -> None:
        ctx = self.ctx
        intake.token = ctx.number()
        self._by_token[intake.token] = intake
        pairs = tuple(Pair(i.source_slot, i.obj.slot, i.obj.length) for i in intake.coming)
        deadline_s = min(intake.until_s, ctx.now + ctx.config.transfer_timeout_s)
        ctx.do(StartTransfer(intake.token, intake.source, intake.offer.incarnation, pairs, deadline_s))

    def transferred(self, event: TransferDone) -> bool:
        """What landed, pair by pair; False if this transfer is none of this desk's."""
        intake = self._by_token.pop(event.token, None)
        if intake is None:
            return False
        moved = {m.slot: m for m in event.moved}
        for incoming in list(intake.coming):
            told = moved.get(incoming.obj.slot)
            if told is not None and not told.quiet:
                self._quarantine(event.token, intake, incoming)
            else:
                incoming.landed = told is not None and self.landed_whole(incoming, told)
        intake.ready = True
        self.ctx.send(intake.source, PinEnd(intake.offer.op, ()))
        self._wait(intake, self.ctx.config.request_timeout_s)
        return True

    def landed_whole(self, incoming: Incoming, moved: Moved) -> bool:
        """The bytes that landed are the promised ones, by their digest."""
        return moved.fault is None and moved.checksum == incoming.obj.checksum

    def _quarantine(self, token: int, intake: Intake, incoming: Incoming) -> None:
        """Foreign bytes may still reach this slot: nobody gets it until that is proven over."""
        obj = incoming.obj
        intake.coming.remove(incoming)
        self._no_longer_coming(obj)
        self.ctx.books.quarantine(obj)
        self._quarantined.setdefault(token, []).append(obj)

    def transfer_quiet(self, token: int) -> None:
        for obj in self._quarantined.pop(token, ()):
            self.ctx.books.quiet(obj)

    def pin_ended(self, peer: str, message: PinEnded) -> bool:
        """The source's headers after the transfer; False if this is none of this desk's."""
        intake = self.open.get(message.op)
        if intake is None or intake.source != peer:
            return False
        if not intake.ready:
            return True
        stood = [
            incoming
            for run, blob in intake.told(message.versions)
            for at, incoming in enumerate(run)
            if incoming.landed and self.unchanged_at_source(incoming, blob[at * 8 : at * 8 + 8])
        ]
        self._finish(intake, self._install(intake, stood))
        return True

    def unchanged_at_source(self, incoming: Incoming, version: bytes) -> bool:
        """The source slot still bore the promised version after the last byte was read."""
        return version == incoming.version and bool(version)

    def _install(self, intake: Intake, stood: list[Incoming]) -> int:
        """Make visible what no newer one came for meanwhile and whose weights still count; as bits of the offer."""
        ctx, landed = self.ctx, 0
        fresh: list[Obj] = []
        for incoming in stood:
            obj = incoming.obj
            if ctx.books.find(obj.group, obj.shard, obj.digest) is None and obj.weights not in ctx.retired:
                intake.coming.remove(incoming)
                self._no_longer_coming(obj)
                ctx.books.seal(obj, obj.checksum)
                landed |= 1 << incoming.place
                fresh.append(obj)
        fresh.sort(key=lambda obj: (obj.group, obj.shard, obj.position))
        ctx.books.install_all(fresh)
        ctx.counters["taken_objects"] += len(fresh)
        ctx.counters["taken_bytes"] += sum(obj.length for obj in fresh)
        for obj in fresh:
            ctx.arrived(obj, None)
        return landed

    def _no_longer_coming(self, obj: Obj) -> None:
        key = (obj.group, obj.shard, obj.digest)
        if self.ctx.inflight.get(key) is obj:
            del self.ctx.inflight[key]

    # --- end -----------------------------------------------------------------------------------

    def _finish(self, intake: Intake, landed: int = 0) -> None:
        """Let go of what did not come, and tell the source what did."""
        ctx = self.ctx
        if intake.timer is not None:
            intake.timer.cancel()
        self.open.pop(intake.offer.op, None)
        for incoming in intake.coming:
            obj = incoming.obj
            self._no_longer_coming(obj)
            ctx.books.give_up(obj)
            ctx.arrived(obj, Reason.VERSION_CHANGED)
        intake.coming = []
        taken = Taken(intake.offer.op, landed, intake.had, intake.no_room)
        self._recent.put(intake.offer.op, taken)
        ctx.send(intake.source, taken)

    def holder_gone(self, holder: str) -> None:
        """A source died: what it promised cannot be proven any more. A running transfer ends by itself."""
        for intake in [intake for intake in self.open.values() if intake.source == holder]:
            self._lost(intake)

    def unreachable(self, peer: str, op: str) -> None:
        intake = self.open.get(op)
        if intake is not None and intake.source == peer:
            self._lost(intake)

    def in_hand(self) -> Iterator[Obj]:
        """Every object whose slot an offer answers for, landing or not yet quiet."""
        for intake in self.open.values():
            yield from (incoming.obj for incoming in intake.coming)
        for objects in self._quarantined.values():
            yield from objects
