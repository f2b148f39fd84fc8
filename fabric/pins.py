"""The pin desk: what a source promises a requester while its bytes are read.

A pin names the exact slots, versions and checksums. It ends by PinEnd (which re-reads the headers,
so that the requester learns whether anything changed) or by its own time, never by trust. A refusal
carries the truth: this holder's columns of the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from .context import HolderContext
from .disk import DiskDesk
from .effects import DigestSlots
from .kinds import Reason
from .lifecycle import State
from .messages import BadCopy, Column, PinEnd, PinEnded, PinReply, PinRequest, SourceRun
from .objects import Obj, slot_run, split
from .passport import abi_refusal
from .restores import Turn, need_of
from .wakes import Wake


@dataclass(slots=True)
class SourcePin:
    """One requester's pins here, by the order of its request."""

    peer: str
    request: PinRequest
    runs: list[list[tuple[int, Obj]]] = field(default_factory=list)
    pinned: list[Obj] = field(default_factory=list)
    awaited: int = 0
    refused: Reason | None = None
    bad: list[BadCopy] = field(default_factory=list)
    ended: bool = False
    turn: Turn | None = None
    """Its place in line to restore, while it stands there."""
    expiry: Wake | None = None


@dataclass(frozen=True, slots=True)
class Suspect:
    """A pinned object whose bytes did not arrive as promised, at the version that is digested."""

    obj: Obj
    index: int
    version: int


class PinDesk:
    """All pins that other holders have at this one."""

    def __init__(self, ctx: HolderContext, disk: DiskDesk) -> None:
        self.ctx = ctx
        self.disk = disk
        self.open: dict[tuple[str, str], SourcePin] = {}
        self._scrubs: dict[int, tuple[SourcePin, list[Suspect]]] = {}

    def request(self, peer: str, message: PinRequest) -> None:
        """Pin what is asked, restoring from the tier first where asked; or refuse with the truth."""
        key = (peer, message.op)
        if key in self.open:
            self._reply(self.open[key])
            return
        pin = SourcePin(peer, message)
        refused = self._refusal(message)
        if refused is None:
            refused = self._find(pin)
        if refused is not None:
            self._refuse(pin, refused)
            return
        if message.dry:
            self.ctx.send(peer, PinReply(message.op, self.ctx.config.holder, self.ctx.incarnation, None, (), (), ()))
            return
        self.open[key] = pin
        pin.expiry = self.ctx.wake_at(self.ctx.now + message.ttl_s, lambda: self._drop(key, pin))
        self._take(pin)

    def _refusal(self, message: PinRequest) -> Reason | None:
        if message.incarnation != self.ctx.incarnation:
            return Reason.HOLDER_LOST
        if message.prompt.weights in self.ctx.retired:
            return Reason.WEIGHTS_MISMATCH
        return None

    def _find(self, pin: SourcePin) -> Reason | None:
        """Fill the runs; the reason if any object is not here as it was asked for."""
        message = pin.request
        for objects in message.objects:
            run = []
            for index, digest in zip(objects.indices, split(objects.digests), strict=True):
                obj = self.ctx.books.find(objects.group, objects.shard, digest)
                if obj is None:
                    return Reason.VERSION_CHANGED
                revision = objects.revision if objects.revision is not None else message.revisions[objects.group]
                if obj.bad is not None or (revision is not None and obj.revision != revision):
                    return obj.bad or Reason.VERSION_CHANGED
                refusal = abi_refusal(obj.abi, message.abis[objects.group])
                if refusal is not None:
                    return refusal
                if obj.state in (State.ON_TIER, State.RESTORING) and not message.restore:
                    return Reason.RESTORE_PENDING
                refused = self.disk.read_refusal(obj) if obj.state is State.ON_TIER else None
                if refused is not None:
                    return refused
                run.append((index, obj))
            pin.runs.append(run)
        return None

    def _take(self, pin: SourcePin) -> None:
        """Pin what is in memory; what must be restored for it waits for its turn."""
        ctx, line = self.ctx, self.disk.line
        for run in pin.runs:
            for _, obj in run:
                if obj.state in (State.SEALED, State.DEMOTING):
                    ctx.books.pin(obj)
                    pin.pinned.append(obj)
        ctx.books.touch(pin.pinned)
        need = need_of(obj for run in pin.runs for _, obj in run if obj.state is State.ON_TIER)
        if need and (len(line) or not line.admits(need)):
            behalf = ctx.behalf

            def start() -> None:
                with ctx.on_behalf(behalf.op, behalf.place_s):
                    self._restore(pin)

            pin.awaited = 1
            pin.turn = Turn(need, behalf.place_s, start)
            line.stand(pin.turn)
            return
        self._restore(pin)

    def _restore(self, pin: SourcePin) -> None:
        """Restore or join what is not in memory yet; reply once all stands."""
        ctx, pinned = self.ctx, {id(obj) for obj in pin.pinned}
        pin.turn = None
        to_restore: list[Obj] = []
        joined: list[Obj] = []
        for obj in (obj for run in pin.runs for _, obj in run if id(obj) not in pinned):
            if obj.state is State.ON_TIER and obj.bad is None:
                to_restore.append(obj)
            elif obj.state is State.RESTORING:
                joined.append(obj)
            elif obj.visible and obj.bad is None and obj.state in (State.SEALED, State.DEMOTING):
                ctx.books.pin(obj)
                pin.pinned.append(obj)
            else:
                self._fail(pin, Reason.VERSION_CHANGED)
                return
        lacking = ctx.books.lacking(to_restore)
        refused = next(filter(None, map(self.disk.read_refusal, to_restore)), None)
        if refused is not None or lacking is not None:
            self._fail(pin, refused or (Reason.ADMISSION_LIMIT if lacking is None else lacking.reason))
            return
        pin.awaited = len(to_restore) + len(joined)
        index_of = {id(obj): i for run in pin.runs for i, obj in run}

        def stands(obj: Obj, why: Reason | None) -> None:
            pin.awaited -= 1
            if pin.ended:
                return
            if why is None:
                ctx.books.pin(obj)
                pin.pinned.append(obj)
            else:
                if why is not Reason.VERSION_CHANGED:
                    pin.bad.append(BadCopy(ctx.config.holder, obj.group, obj.shard, index_of[id(obj)], why, True))
                pin.refused = why
            if not pin.awaited:
                self._settle(pin)

        for obj in (*joined, *to_restore):
            ctx.await_object(obj, stands)
        for obj in joined:
            self.disk.hurry(obj, ctx.behalf.place_s)
        self.disk.restore(to_restore)
        if not pin.awaited:
            self._settle(pin)

    def _settle(self, pin: SourcePin) -> None:
        if pin.refused is not None:
            self._fail(pin, pin.refused)
        else:
            self._reply(pin)

    def _fail(self, pin: SourcePin, refused: Reason) -> None:
        self.open.pop((pin.peer, pin.request.op), None)
        self._release(pin)
        self._refuse(pin, refused)

    def _refuse(self, pin: SourcePin, refused: Reason) -> None:
        ctx = self.ctx
        truth = () if refused is Reason.HOLDER_LOST else self._truth(pin)
        ctx.send(
            pin.peer,
            PinReply(pin.request.op, ctx.config.holder, ctx.incarnation, refused, (), truth, tuple(pin.bad)),
        )

    def _truth(self, pin: SourcePin) -> tuple[Column, ...]:
        """What this holder has along the prompt."""
        ctx = self.ctx
        return tuple(ctx.books.columns(ctx.config.holder, ctx.incarnation, pin.request.prompt, ctx.books.shards))

    def _reply(self, pin: SourcePin) -> None:
        if pin.awaited:
            return
        ctx = self.ctx
        runs = []
        for objects, run in zip(pin.request.objects, pin.runs, strict=True):
            pinned = [obj for _, obj in run]
            runs.append(
                SourceRun(
                    slot_run(objects.group, objects.shard, [i for i, _ in run], pinned),
                    tuple(obj.length for obj in pinned),
                    b"".join(obj.checksum for obj in pinned),
                    tuple(obj.revision for obj in pinned),
                    tuple(obj.abi for obj in pinned),
                    tuple(obj.position for obj in pinned),
                )
            )
        ctx.send(pin.peer, PinReply(pin.request.op, ctx.config.holder, ctx.incarnation, None, tuple(runs), (), ()))

    # --- end -----------------------------------------------------------------------------------

    def end(self, peer: str, message: PinEnd) -> None:
        """Tell each pinned slot's version now, digest the suspects, let go."""
        pin = self.open.get((peer, message.op))
        if pin is None:
            self.ctx.send(peer, PinEnded(message.op, self.ctx.config.holder, (), ()))
            return
        suspects: list[Suspect] = []
        at = {
            (o.group, o.shard, i): obj for o, run in zip(pin.request.objects, pin.runs, strict=True) for i, obj in run
        }
        for objects in message.suspect:
            for index in objects.indices:
                obj = at.get((objects.group, objects.shard, index))
                if obj is not None:
                    suspects.append(Suspect(obj, index, obj.version))
        if suspects:
            token = self.ctx.number()
            self._scrubs[token] = (pin, suspects)
            self.ctx.do(DigestSlots(token, tuple(suspect.obj.slot for suspect in suspects)))
            return
        self._ended(pin, [])

    def digested(self, token: int, checksums: tuple[bytes, ...]) -> bool:
        """The suspects' bytes as they lie here: a copy that is wrong at its source is marked so.

        The pin may have run out meanwhile, so that something else was digested: that says nothing.
        """
        entry = self._scrubs.pop(token, None)
        if entry is None:
            return False
        pin, suspects = entry
        bad: list[BadCopy] = []
        moved: set[int] = set()
        for suspect, checksum in zip(suspects, checksums, strict=True):
            obj = suspect.obj
            if obj.slot >= 0 and obj.version == suspect.version and checksum != obj.checksum:
                if not self.ctx.books.mark_bad(obj, Reason.CHECKSUM_MISMATCH):
                    moved.add(obj.slot)
                    continue
                here = self.ctx.config.holder
                bad.append(BadCopy(here, obj.group, obj.shard, suspect.index, Reason.CHECKSUM_MISMATCH, False))
        if not pin.ended:
            self._ended(pin, bad, moved)
        return True

    def _ended(self, pin: SourcePin, bad: list[BadCopy], moved: Collection[int] = ()) -> None:
        """``moved``: slots whose bytes are wrong, of objects that are on disk as well; they are told as without a version."""
        ctx = self.ctx

        def version(slot: int) -> bytes:
            return bytes(8) if slot in moved else ctx.arena.version(slot).to_bytes(8, "little")

        versions = tuple(b"".join(version(obj.slot) for _, obj in run) for run in pin.runs)
        truth = self._truth(pin) if moved else ()
        ctx.send(pin.peer, PinEnded(pin.request.op, ctx.config.holder, versions, tuple(bad), truth))
        self.open.pop((pin.peer, pin.request.op), None)
        self._release(pin)

    def holder_gone(self, holder: str) -> None:
        """A requester died: nobody will end its pins. One that lives on unseen gets no proof of what it reads."""
        for key, pin in [(key, pin) for key, pin in self.open.items() if key[0] == holder]:
            self._drop(key, pin)

    def _drop(self, key: tuple[str, str], pin: SourcePin) -> None:
        """The requester never came back: its time is over."""
        if self.open.get(key) is pin:
            del self.open[key]
            self.ctx.counters["pins_expired"] += 1
            self._release(pin)

    def pinned(self) -> Iterator[Obj]:
        """Every object pinned for another holder, once a pin."""
        for pin in self.open.values():
            yield from pin.pinned

    def _release(self, pin: SourcePin) -> None:
        pin.ended = True
        if pin.expiry is not None:
            pin.expiry.cancel()
        if pin.turn is not None:
            self.disk.line.leave(pin.turn)
            pin.turn = None
        for obj in pin.pinned:
            self.ctx.books.unpin(obj)
        pin.pinned = []
