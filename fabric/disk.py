"""The disk desk: which objects go to the local disk, come back, and what a failure means.

Bytes on disk are used only after their own digest proved right: an object that was read wrong is
marked bad and cuts the hit there. The driver writes an extent whole or not at all and reads entries
into slots; it decides nothing.

Room on the disk is made here before anything is written (:mod:`extent_book`), and whose bytes are
read next is decided here too (:mod:`restores`); the driver only moves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .books import Obj, held_refusal
from .context import HolderContext
from .effects import DeleteExtent, DiskFound, DiskRead, DiskState, DiskWritten, ExtentEntry, ReadExtent, WriteExtent
from .expected import Measured, Work
from .extent_book import ExtentBook
from .extents import extent_bytes
from .kinds import Reason
from .lifecycle import State
from .messages import Done, SwapIn, SwapOut
from .passport import Abi
from .restores import PATIENCE_S, Rate, RestoreLimit, RestoreLine, RestoreQueue
from .segments import ChainPlace

GOOD_AFTER_RETRY = frozenset({Reason.DISK_UNAVAILABLE, Reason.RESTORE_FAILED})
"""Failures that say nothing of the bytes: the object stays on its tier, unmarked."""


@dataclass(slots=True)
class Demotion:
    """One request to write objects to disk: answered once all its extents stand or failed."""

    client: str
    request: str
    left: int
    refused: Reason | None = None


@dataclass(slots=True)
class Writing:
    """An extent being written, and for whom."""

    objects: list[Obj]
    extent: int
    bytes_max: int
    demotion: Demotion


@dataclass(slots=True)
class Reading:
    """One read under way: its objects by slot, since when."""

    objects: dict[int, tuple[Obj, int]]
    """By slot: the object, and the extent it is read from."""
    since_s: float
    nbytes: int


class DiskDesk:
    """Swap-out, swap-in and restores of one holder."""

    def __init__(self, ctx: HolderContext) -> None:
        self.ctx = ctx
        self.refused: Reason | None = None
        self.writes_refused: Reason | None = None
        config = ctx.config
        self.extents = ExtentBook(config.disk_bytes_max)
        ctx.books.taken_over = self.extents.taken_over
        everything = RestoreLimit(config.restore_bytes_max, config.restore_extents_max)
        self._queue = RestoreQueue((everything, *config.restore_limits))
        self.line = RestoreLine(
            {key: max(1, int(config.restore_share * pool.slots)) for key, pool in ctx.books.pools.items()}
        )
        self.rate = Rate(config.restore_bytes_per_s)
        self._writing: dict[int, Writing] = {}
        self._reading: dict[int, Reading] = {}

    @property
    def restoring(self) -> int:
        return sum(len(reading.objects) for reading in self._reading.values())

    @property
    def restoring_bytes(self) -> int:
        return sum(reading.nbytes for reading in self._reading.values())

    @property
    def waiting(self) -> int:
        """Objects that have a slot and wait to be read into it."""
        return len(self._queue)

    def bytes_before(self, place_s: float = float("inf")) -> int:
        """What is being read, and what goes before that place."""
        return self.restoring_bytes + self._queue.bytes_before(place_s)

    def expected_s(self, nbytes: int, place_s: float = float("inf")) -> float:
        """When that many bytes would be here, at the rate learned, behind what goes before that place."""
        return self.rate.seconds(self.bytes_before(place_s) + nbytes)

    # --- what the driver tells -----------------------------------------------------------------

    def found(self, entries: Iterable[tuple[int, int, ExtentEntry]], file_bytes: int = 0) -> None:
        """What the disk holds from an earlier life (extent, entry number, entry), verified by the driver.

        Of several copies of one object the latest written counts; an extent of none that counts is deleted.
        ``file_bytes``: of the one extent told, 0 if not known.
        """
        by_extent: dict[int, list[tuple[int, ExtentEntry]]] = {}
        for extent, number, entry in entries:
            by_extent.setdefault(extent, []).append((number, entry))
        for extent in sorted(by_extent, reverse=True):
            there = sorted(by_extent[extent], key=lambda entry: entry[0])
            live = {number: obj for number, e in there if (obj := self._found_object(extent, number, e)) is not None}
            if live:
                self.extents.add(extent, live, file_bytes or extent_bytes([e for _, e in there]), 0.0)
            else:
                self.ctx.do(DeleteExtent(extent))
        self._make_room(0)

    def found_later(self, event: DiskFound) -> None:
        """The tier came (back) with an extent that was not known."""
        self.found(event.entries, event.file_bytes)

    def _found_object(self, extent: int, number: int, e: ExtentEntry) -> Obj | None:
        ctx = self.ctx
        if e.shard not in ctx.books.shards or e.group >= len(ctx.model.groups):
            return None
        spec = ctx.model.groups[e.group]
        if e.length > spec.block_bytes or e.position % spec.unit_tokens:
            return None
        if ctx.books.find(e.group, e.shard, e.digest) is not None:
            return None
        obj = Obj(
            spec.kind,
            e.group,
            e.shard,
            e.digest,
            e.position,
            e.namespace,
            e.weights,
            e.tenant,
            e.revision,
            e.length,
            Abi(e.fingerprint, e.alignment_bytes),
            e.checksum,
            place=ChainPlace(e.anchor, e.parent) if e.anchor else None,
        )
        obj.on_disk = (extent, number)
        ctx.books.find_on_disk(obj)
        return obj

    def state(self, event: DiskState) -> None:
        """The tier failed as a whole, or for writing only, or healed."""
        self.refused = event.refused
        self.writes_refused = event.refused or event.writes_refused

    def lost(self, extents: Sequence[int]) -> None:
        """Extents went: what only they held is stored no more."""
        for extent in extents:
            for obj in self.extents.gone(extent):
                self._lose(obj, evicted=False)

    def _lose(self, obj: Obj, *, evicted: bool) -> None:
        """An object's copy on disk is gone; one being read is told so by its read."""
        obj.on_disk = None
        if obj.state is State.ON_TIER:
            self.ctx.books.forget(obj, evicted=evicted)

    def _make_room(self, nbytes: int) -> bool:
        """Let extents go until ``nbytes`` more fit under the cap; False, and none goes, where they cannot."""
        if not self.extents.lacks(nbytes):
            return True
        victims = self.extents.victims(nbytes, self.ctx.retired)
        if victims is None:
            return False
        for extent in victims:
            for obj in self.extents.gone(extent):
                self._lose(obj, evicted=True)
            self.ctx.counters["extents_evicted"] += 1
            self.ctx.do(DeleteExtent(extent))
        return True

    # --- out -----------------------------------------------------------------------------------

    def swap_out(self, client: str, message: SwapOut) -> None:
        """Write objects to disk, then free their slots. A pinned object refuses all.

        What has a valid copy there already is not written again.
        """
        ctx = self.ctx
        objects = [obj for obj in ctx.books.find_all(message.objects) if obj.state is State.SEALED and obj.bad is None]
        refused = held_refusal(objects) or self.writes_refused or self.refused
        if refused is not None:
            ctx.send(client, Done(message.request, refused, ""))
            return
        if not objects:
            ctx.send(client, Done(message.request, None, "nothing was in memory"))
            return
        self.demote(objects, client, message.request)

    def demote(self, objects: list[Obj], client: str, request: str) -> None:
        """Write unpinned, sealed objects to disk and free their slots; answer the request with Done."""
        ctx = self.ctx
        chunks = list(self._chunks([obj for obj in objects if obj.on_disk is None]))
        demotion = Demotion(client, request, len(chunks))
        for obj in objects:
            if obj.on_disk is not None:
                self.extents.used(obj.on_disk[0], ctx.now)
                ctx.books.evict(obj)
        for chunk in chunks:
            self._write(chunk, demotion)
        if not demotion.left:
            ctx.send(client, Done(request, demotion.refused, ""))

    def _chunks(self, objects: list[Obj]) -> Iterator[list[Obj]]:
        """What goes into one extent each."""
        config, chunk, size = self.ctx.config, list[Obj](), 0
        for obj in objects:
            if chunk and (len(chunk) >= config.extent_objects_max or size + obj.length > config.extent_bytes_max):
                yield chunk
                chunk, size = [], 0
            chunk.append(obj)
            size += obj.length
        if chunk:
            yield chunk

    def _write(self, objects: list[Obj], demotion: Demotion) -> None:
        ctx = self.ctx
        entries = tuple(entry_of(obj) for obj in objects)
        nbytes = extent_bytes(entries)
        if not self._make_room(nbytes):
            demotion.left -= 1
            demotion.refused = Reason.DISK_FULL
            return
        token, extent = ctx.number(), ctx.number()
        self.extents.used_bytes += nbytes
        for obj in objects:
            ctx.books.demote(obj)
        self._writing[token] = Writing(objects, extent, nbytes, demotion)
        ctx.do(WriteExtent(token, extent, entries, tuple(obj.slot for obj in objects)))

    def written(self, event: DiskWritten) -> None:
        writing = self._writing.pop(event.token, None)
        if writing is None:
            return
        books, demotion = self.ctx.books, writing.demotion
        self.extents.used_bytes -= writing.bytes_max
        if event.refused is None:
            size = event.file_bytes or writing.bytes_max
            self.ctx.counters["written_bytes"] += sum(obj.length for obj in writing.objects)
            self.extents.add(writing.extent, dict(enumerate(writing.objects)), size, self.ctx.now)
        for number, obj in enumerate(writing.objects):
            if event.refused is None:
                books.demoted(obj, writing.extent, number)
            else:
                books.demotion_failed(obj)
        demotion.left -= 1
        demotion.refused = demotion.refused or event.refused
        if not demotion.left:
            self.ctx.send(demotion.client, Done(demotion.request, demotion.refused, ""))

    # --- back ----------------------------------------------------------------------------------

    def swap_in(self, client: str, message: SwapIn) -> None:
        """Restore objects; the reply waits until each stands or failed."""
        ctx = self.ctx
        objects = [o for o in ctx.books.find_all(message.objects) if o.state in (State.ON_TIER, State.RESTORING)]
        to_restore = [o for o in objects if o.state is State.ON_TIER and o.bad is None]
        refused = self._restore_refusal(to_restore)
        if refused is not None:
            ctx.send(client, Done(message.request, refused, ""))
            return
        failures = [o.bad for o in objects if o.bad is not None]
        open_count = len(objects) - len(failures)

        def stands(_: Obj, why: Reason | None) -> None:
            nonlocal open_count
            open_count -= 1
            if why is not None:
                failures.append(why)
            if not open_count:
                ctx.send(client, Done(message.request, failures[0] if failures else None, ""))

        with ctx.on_behalf(message.request, ctx.now + PATIENCE_S):
            for obj in objects:
                if obj.bad is None:
                    ctx.await_object(obj, stands)
            self.restore(to_restore)
        if not objects:
            ctx.send(client, Done(message.request, None, "nothing was on disk"))
        elif not to_restore and not open_count:
            ctx.send(client, Done(message.request, failures[0], ""))

    def _restore_refusal(self, objects: list[Obj]) -> Reason | None:
        if objects and self.refused is not None:
            return self.refused
        lacking = self.ctx.books.lacking(objects)
        return None if lacking is None else lacking.reason

    def restore(self, objects: list[Obj]) -> None:
        """Reserve slots for ON_TIER objects and read them, as their place in line and the caps allow.

        Whoever cares waits with ``ctx.await_object``. The caller asked for room in the same step.
        """
        place_s = self.ctx.behalf.place_s if self.ctx.behalf.op else self.ctx.now + PATIENCE_S
        for obj in objects:
            self.ctx.books.reserve_restore(obj)
            self.line.reserved[obj.group, obj.shard] += 1
            self._queue.put(obj, place_s)
        self._read_more()

    def cancel(self, op: str) -> None:
        """Nobody acts for this exchange any more: what only it waits for and is not being read yet stays on disk."""
        for obj in [obj for obj in self._queue if self.ctx.awaited_only_by(obj, op)]:
            self._queue.take(obj)
            self._unreserve(obj)
            if obj.state is State.QUARANTINED:
                self.ctx.books.quiet(obj)
            else:
                self._fall_back(obj, Reason.VERSION_CHANGED, for_good=False)
            self.ctx.counters["restores_cancelled"] += 1
            self.ctx.arrived(obj, Reason.VERSION_CHANGED)

    def _unreserve(self, obj: Obj) -> None:
        self.line.reserved[obj.group, obj.shard] -= 1

    def _fall_back(self, obj: Obj, reason: Reason, *, for_good: bool) -> None:
        """A restore failed: the object is on its tier again, if the tier still has it."""
        self.ctx.books.restore_failed(obj, reason, for_good=for_good)
        if obj.on_disk is None:
            self.ctx.books.forget(obj, evicted=False)

    def _read_more(self) -> None:
        config = self.ctx.config
        picked: list[Obj] = []
        while self.restoring + len(picked) < config.restores_max:
            obj = self._queue.next()
            if obj is None:
                break
            if obj.state is State.QUARANTINED or obj.on_disk is None:
                self._never_read(obj)
                continue
            picked.append(obj)
        for batch in self._batches(picked):
            token = self.ctx.number()
            reads, objects = [], {}
            for obj in batch:
                assert obj.on_disk is not None
                reads.append((*obj.on_disk, obj.slot))
                objects[obj.slot] = (obj, obj.on_disk[0])
                self.extents.used(obj.on_disk[0], self.ctx.now)
            self._reading[token] = Reading(objects, self.ctx.now, sum(obj.length for obj in batch))
            self.ctx.do(ReadExtent(token, tuple(reads)))

    def _never_read(self, obj: Obj) -> None:
        """Outdated, or gone from the disk, before it was its turn."""
        self._queue.arrived(obj, None if obj.on_disk is None else obj.on_disk[0])
        self._unreserve(obj)
        if obj.state is State.QUARANTINED:
            self.ctx.books.quiet(obj)
            self.ctx.arrived(obj, Reason.VERSION_CHANGED)
        else:
            self._fall_back(obj, Reason.RESTORE_FAILED, for_good=False)
            self.ctx.arrived(obj, Reason.RESTORE_FAILED)

    def _batches(self, objects: list[Obj]) -> Iterator[list[Obj]]:
        config, batch, size = self.ctx.config, list[Obj](), 0
        for obj in objects:
            if batch and (len(batch) >= config.restore_batch_objects or size + obj.length > config.restore_batch_bytes):
                yield batch
                batch, size = [], 0
            batch.append(obj)
            size += obj.length
        if batch:
            yield batch

    def read(self, event: DiskRead) -> None:
        """Bytes came from the disk: each stands only if its own digest is the recorded one."""
        reading = self._reading.pop(event.token, None)
        if reading is None:
            return
        books, good_bytes = self.ctx.books, 0
        for result in event.restored:
            obj, extent = reading.objects.pop(result.slot)
            self._queue.arrived(obj, extent)
            self._unreserve(obj)
            refused = self.restore_refusal(obj, result.checksum, result.refused)
            if obj.state is State.QUARANTINED:
                books.quiet(obj)
                refused = Reason.VERSION_CHANGED
            elif refused is None:
                books.restored(obj, obj.checksum)
                good_bytes += obj.length
                self.ctx.counters["restored_objects"] += 1
                self.ctx.counters["restored_bytes"] += obj.length
            else:
                self._fall_back(obj, refused, for_good=refused not in GOOD_AFTER_RETRY)
                self.ctx.counters["restores_failed"] += 1
            self.ctx.arrived(obj, refused)
        busy_s = self.rate.done(good_bytes, reading.since_s, self.ctx.now)
        self.ctx.learn(Measured(Work.RESTORE, good_bytes, busy_s))
        self._read_more()

    def restore_refusal(self, obj: Obj, checksum: bytes | None, refused: Reason | None) -> Reason | None:
        """Why restored bytes may not be used; None where their digest is the recorded one."""
        if refused is not None:
            return refused
        return None if checksum == obj.checksum else Reason.CHECKSUM_MISMATCH

    def start_due(self) -> bool:
        """Let the first in line start, if it is its turn; whether it did. What it reserves is seen by the next."""
        turn = self.line.next()
        if turn is not None:
            turn.start()
        return turn is not None

    def in_hand(self) -> Iterator[Obj]:
        """Every object whose slot a restore answers for."""
        yield from self._queue
        for reading in self._reading.values():
            yield from (obj for obj, _ in reading.objects.values())

    def pinned(self) -> Iterator[Obj]:
        """Every object pinned while it is written to disk."""
        for writing in self._writing.values():
            yield from writing.objects

    # --- parked --------------------------------------------------------------------------------

    def park(self, client: str, request: str, objects: list[Obj]) -> None:
        """Put what a preempted request leaves behind on disk, as far as nobody else holds it."""
        free = [o for o in objects if o.visible and o.state is State.SEALED and o.bad is None and not held_refusal([o])]
        refused = self.writes_refused or self.refused
        if refused is not None or not free:
            self.ctx.send(client, Done(request, refused, "" if refused else "nothing was left to nobody"))
            return
        self.demote(free, client, request)

    # --- extents -------------------------------------------------------------------------------

    def forget_dropped(self) -> None:
        """Extents whose last entry no object refers to are deleted."""
        dropped = self.ctx.books.disk_dropped
        while dropped:
            extent, entry = dropped.pop()
            if self.extents.dropped(extent, entry):
                self.ctx.do(DeleteExtent(extent))


def entry_of(obj: Obj) -> ExtentEntry:
    """What an extent's index says of one object."""
    return ExtentEntry(
        obj.group,
        obj.shard,
        obj.digest,
        obj.position,
        obj.revision,
        obj.length,
        obj.checksum,
        obj.abi.fingerprint,
        obj.abi.alignment_bytes,
        obj.namespace,
        obj.weights,
        obj.tenant,
        *(obj.place or (b"", b"")),
    )
