"""Laws of the protocol that no single holder's books can show: watched from outside, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...fabric.effects import (
    DropLocal,
    Effect,
    Event,
    ReadExtent,
    Received,
    ScrubExtent,
    Send,
    StartTransfer,
    UploadExtent,
    WriteExtent,
)
from ...fabric.extents import extent_bytes
from ...fabric.lifecycle import State
from ...fabric.messages import (
    Done,
    DumpPart,
    EventBatch,
    Heartbeat,
    HolderGone,
    PinEnded,
    StoreBegin,
    StoreBegun,
    StoreCommit,
)
from ...fabric.objects import Obj
from ...fabric.stores import Attempt
from .machine import digest
from .models import BLOCK_BYTES

if TYPE_CHECKING:
    from ...fabric.directory import DirectoryCore
    from .world import Life, World

UNFINISHED = frozenset({State.RESERVED, State.FILLING})


BURST_S = 0.25
"""How much of a second's bytes may be moved at once after a pause; as documented, not as imported."""


@dataclass(slots=True)
class Pace:
    """What one life may still move, in seconds of its budget, and until when its scrubber must wait."""

    at_s: float
    credit_s: float = BURST_S
    scrub_due_s: float = 0.0


class Laws:
    """What the simulator knows and the protocol must respect, whatever it believes itself."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._attempt: Attempt | None = None
        self._unproven: list[Obj] = []
        self._stream: tuple[str, tuple[int, int, int] | None] | None = None
        self._least: dict[tuple[int, str], int] = {}
        self._paces: dict[tuple[str, int], Pace] = {}

    # --- stores --------------------------------------------------------------------------------

    def before(self, life: Life, event: Event) -> None:
        """Note what a record speaks of, as it stands before: a write attempt, objects that arrived."""
        self._attempt = None
        self._unproven = []
        if isinstance(event, Received):
            message = event.message
            if isinstance(message, StoreCommit):
                self._attempt = life.core.stores.attempts.get(message.attempt)
            elif isinstance(message, PinEnded):
                self._unproven = list(self._changed_at_source(life, event.sender, message))

    def after(self, life: Life, event: Event, effects: list[Effect]) -> None:
        if isinstance(event, Received):
            message = event.message
            if isinstance(message, StoreCommit) and self._attempt is not None:
                self._committed(life, message, self._attempt, effects)
            elif isinstance(message, StoreBegin):
                self._begun(life, effects)
        if any(obj.state is State.SEALED for obj in self._unproven):
            self.world.fail("proof", f"{life}: kept what did not arrive as it was promised", life.name)
        self._rights(life)

    def _changed_at_source(self, life: Life, source: str, message: PinEnded) -> Iterator[Obj]:
        """Objects of a transfer that did not land whole, or whose source does not say that they are still what was promised."""
        intake = life.core.intake.open.get(message.op)
        if intake is not None and intake.source == source and intake.ready:
            for run, blob in intake.told(message.versions):
                for at, incoming in enumerate(run):
                    obj = incoming.obj
                    if blob[at * 8 : at * 8 + 8] != incoming.version or _landed(life, obj) != obj.checksum:
                        yield obj
            return
        part = life.core.parts.open_parts.get(message.op)
        known = part.sources.get(source) if part is not None else None
        if known is None or known.ended or known.transferring:
            return
        told: dict[tuple[int, int, int], bytes] = {}
        for fetch, blob in zip(known.fetches, message.versions, strict=False):
            for place, index in enumerate(fetch.objects.indices):
                told[fetch.objects.group, fetch.objects.shard, index] = blob[place * 8 : place * 8 + 8]
        for a in known.arriving:
            if told.get((a.obj.group, a.obj.shard, a.index), b"") != a.version:
                yield a.obj

    def _begun(self, life: Life, effects: list[Effect]) -> None:
        """The latest attempt at each object, as the writers were told."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, StoreBegun) and not effect.message.refused:
                attempt = life.core.stores.attempts.get(effect.message.attempt)
                for obj in attempt.objects if attempt is not None else ():
                    key = (obj.group, obj.shard, obj.digest)
                    life.latest[key] = max(life.latest.get(key, 0), effect.message.attempt)

    def _committed(self, life: Life, message: StoreCommit, attempt: Attempt, effects: list[Effect]) -> None:
        done = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Done)]
        accepted = any(d.request == message.request and d.refused is None for d in done)
        if not accepted:
            return
        late = [o for o in attempt.objects if life.latest.get((o.group, o.shard, o.digest), 0) > attempt.number]
        if late:
            self.world.fail("late_commit", f"{life}: attempt {attempt.number} was superseded and accepted", life.name)
        if attempt.weights in life.core.ctx.retired:
            self.world.fail("late_commit", f"{life}: attempt {attempt.number} of retired weights accepted", life.name)
        self._visible_at_once(life, attempt)

    def _visible_at_once(self, life: Life, attempt: Attempt) -> None:
        """All of a commit is visible in its step, and nothing of what it retires."""
        if any(obj.state in UNFINISHED for obj in attempt.objects):
            self.world.fail("one_commit", f"{life}: attempt {attempt.number} is visible in part", life.name)
        new = {id(obj) for obj in attempt.objects}
        stale: list[Obj] = [o for o in life.core.ctx.books.find_all(attempt.retire) if id(o) not in new]
        if stale:
            self.world.fail("one_commit", f"{life}: attempt {attempt.number} left what it retires", life.name)

    def contents(self, life: Life) -> None:
        """What is visible in memory is what was published under its name, revision and layout; what is called bad is."""
        if self.world.verify_always:
            return  # bytes turn in memory there, and every grant looks at them
        arena, content = life.arena, self.world.content
        for slot, obj in enumerate(life.core.ctx.books.owner):
            if obj is None or obj.state is not State.SEALED or not obj.visible:
                continue
            due = content.of(obj.digest, obj.group, obj.shard, revision=obj.revision, abi=obj.abi, length=obj.length)
            right = arena.content(slot).tobytes() == due
            if right != (obj.bad is None):
                name = self.world.model.groups[obj.group].name
                said = "called bad and is not" if right else f"not {name} of revision {obj.revision}"
                self.world.fail("content", f"{life}: slot {slot} is {said}", life.name)
                return

    # --- bytes ---------------------------------------------------------------------------------

    def moved(self, life: Life, effect: Effect) -> None:
        """What a life has moved keeps to its budget, what it reads again to its pace, and what it drops is elsewhere."""
        now = life.core.ctx.now
        pace = self._paces.setdefault((life.name, life.incarnation), Pace(now))
        rate = self.world.budget_bytes_per_s
        nbytes = self._bytes_of(life, effect)
        if rate is not None and nbytes:
            pace.credit_s = min(pace.credit_s + now - pace.at_s, BURST_S)
            pace.at_s = now
            if pace.credit_s < -1e-6:
                late_s = -pace.credit_s
                self.world.fail("budget", f"{life}: {type(effect).__name__} goes {late_s:.3f} s too early", life.name)
            pace.credit_s -= nbytes / rate
        if isinstance(effect, ScrubExtent) and rate is None:
            scrub_bytes_per_s = self.world.extras.scrub_bytes_per_s
            if scrub_bytes_per_s is None or now < pace.scrub_due_s - 1e-6:
                self.world.fail("scrub_pace", f"{life}: reads extent {effect.extent} again too early", life.name)
            else:
                pace.scrub_due_s = now + nbytes / scrub_bytes_per_s
        store = life.machine.store
        if isinstance(effect, DropLocal) and store is not None and store.uid(effect.extent) not in store.store.ever:
            self.world.fail("lost", f"{life}: drops extent {effect.extent}, which was never in the store", life.name)

    def _bytes_of(self, life: Life, effect: Effect) -> int:
        """Payload that an effect moves, from what is known outside the core."""
        match effect:
            case ReadExtent():
                return BLOCK_BYTES * len(effect.reads)
            case WriteExtent():
                return sum(entry.length for entry in effect.entries)
            case StartTransfer():
                return sum(pair.length for pair in effect.pairs)
            case ScrubExtent():
                there = life.machine.disk.extents.get(effect.extent, [])
                return sum(there[number][0].length for number in effect.entries if number < len(there))
            case UploadExtent():
                return extent_bytes([entry for entry, _ in life.machine.disk.extents.get(effect.extent, [])])
        return 0

    # --- lives ---------------------------------------------------------------------------------

    def _rights(self, life: Life) -> None:
        """At most one life of a holder may grant at any time."""
        if self.world.lives.get(life.name) is not life and life.core.ctx.may_grant:
            self.world.fail("one_granting_life", f"{life} may grant beside its successor", life.name)

    # --- directory -----------------------------------------------------------------------------

    def before_directory(self, core: DirectoryCore, message: object) -> None:
        """Note where a stream stands that an earlier life tries to speak for."""
        self._stream = None
        holder, incarnation = getattr(message, "holder", ""), getattr(message, "incarnation", 0)
        if not isinstance(message, (EventBatch, DumpPart, Heartbeat, HolderGone)):
            return
        least = incarnation + isinstance(message, HolderGone)
        known = self._least.get((core.epoch, holder), 0)
        if incarnation < known and not isinstance(message, HolderGone):
            self._stream = (holder, self._place(core, holder))
        self._least[core.epoch, holder] = max(known, least)

    def after_directory(self, core: DirectoryCore) -> None:
        """What a dead life says changes nothing."""
        if self._stream is not None:
            holder, place = self._stream
            if self._place(core, holder) != place:
                self.world.fail("old_life", f"directory: an earlier life of {holder} was listened to", holder)

    def _place(self, core: DirectoryCore, holder: str) -> tuple[int, int, int] | None:
        stream = core.streams.get(holder)
        return None if stream is None else (stream.incarnation, stream.seq, stream.applied)


def _landed(life: Life, obj: Obj) -> bytes:
    """The checksum of what lies in an object's slot."""
    return digest(life.arena.payload(obj.slot)[: obj.length])
