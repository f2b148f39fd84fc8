"""The disk desk: which objects go down the ladder of tiers, come back, and what a failure means.

Bytes on disk are used only after their own digest proved right: an object that was read wrong is
marked bad and cuts the hit there. The driver writes an extent whole or not at all and reads entries
into slots; it decides nothing.

Room on the disk is made here before anything is written (:mod:`extent_book`), and whose bytes are
read next is decided here too (:mod:`restores`); the driver only moves them.

Where the readers' pools are GPU memory, the step in between is host memory (:mod:`ladder`): what is
swapped out goes there first, and what comes from the disk comes through it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .context import HolderContext
from .effects import (
    DeleteExtent,
    DiskFound,
    DiskLost,
    DiskRead,
    DiskState,
    DiskWritten,
    DropLocal,
    ExtentEntry,
    Pair,
    ReadExtent,
    StartTransfer,
    TransferDone,
    WriteExtent,
)
from .expected import Measured, Work
from .extent_book import ExtentBook
from .extents import extent_bytes
from .kinds import Reason
from .ladder import Demotion, HostDesk, entry_of
from .lifecycle import State
from .messages import Done, Objects, SwapIn, SwapOut
from .model import ModelSpec
from .objects import Obj, held_refusal, split
from .passport import Abi
from .remote_copies import RemoteCopies
from .restores import PATIENCE_S, Rate, RestoreLimit, RestoreLine, RestoreQueue, Where
from .segments import ChainPlace
from .tally import Outcome, Way

Landed = tuple[Obj, int | None, Reason | None]
"""An object that was read, the extent it counts for, and why its bytes may not be used."""

GOOD_AFTER_RETRY = frozenset({Reason.DISK_UNAVAILABLE, Reason.RESTORE_FAILED})
"""Failures that say nothing of the bytes: the object stays on its tier, unmarked."""


@dataclass(slots=True)
class Writing:
    """An extent being written, and for whom."""

    objects: list[Obj]
    extent: int
    bytes_max: int
    demotion: Demotion


@dataclass(slots=True)
class Reading:
    """One read under way: its objects by slot, since when, from where.

    ``below``: host slots that are read from, by slot; empty where the disk is read.
    """

    objects: dict[int, tuple[Obj, int | None]]
    """By the slot read into: the object, and the extent it counts for."""
    since_s: float
    weight_bytes: float
    below: dict[int, int] = field(default_factory=dict)
    from_store: bool = False


class DiskDesk:
    """Swap-out, swap-in and restores of one holder."""

    def __init__(self, ctx: HolderContext) -> None:
        self.ctx = ctx
        self.refused: Reason | None = None
        self.writes_refused: Reason | None = None
        config = ctx.config
        self.extents = ExtentBook(config.disk_bytes_max)
        ctx.books.taken_over = self._taken_over
        self.remote = RemoteCopies(ctx, self.extents)
        everything = RestoreLimit(config.restore_bytes_max, config.restore_extents_max)
        self._queue = RestoreQueue((everything, *config.restore_limits))
        self.line = RestoreLine(lambda key: max(1, int(config.restore_share * ctx.books.pools[key].capacity)))
        self.rate = Rate(config.restore_bytes_per_s)
        self.host_rate = Rate(config.host_bytes_per_s)
        self.store_rate = Rate(config.store_bytes_per_s)
        self.host = HostDesk(ctx, self)
        self._restless: dict[int, list[Obj]] = {}
        """By transfer: objects whose slots its bytes may still reach."""
        self._writing: dict[int, Writing] = {}
        self._reading: dict[int, Reading] = {}

    @property
    def restoring(self) -> int:
        return sum(len(reading.objects) for reading in self._reading.values())

    @property
    def waiting(self) -> int:
        """Objects that have a slot and wait to be read into it."""
        return len(self._queue)

    def bytes_before(self, place_s: float = float("inf")) -> float:
        """What is being read, and what goes before that place (:meth:`weight_bytes`)."""
        if not self._reading and not len(self._queue):
            return 0.0
        reading = sum(reading.weight_bytes for reading in self._reading.values())
        waiting = self._queue.bytes_before(place_s)
        return reading + sum(nbytes * self._weight_in(where) for where, nbytes in waiting.items())

    def expected_s(self, nbytes: float, place_s: float = float("inf")) -> float:
        """When that many bytes (:meth:`weight_bytes`) would be here, behind what goes before that place."""
        return self.rate.seconds(self.bytes_before(place_s) + nbytes)

    def weight_bytes(self, run: Objects, tier: int) -> float:
        """Bytes of a run of this holder's that lie on a tier (bits by index), as :meth:`expected_s` counts them.

        A copy in host memory, or in the store, counts as what the disk reads while it comes.
        """
        lying = [digest for i, digest in zip(run.indices, split(run.digests), strict=True) if tier >> i & 1]
        found = (self.ctx.books.find(run.group, run.shard, digest) for digest in lying)
        size_bytes = self.ctx.model.groups[run.group].block_bytes
        return sum(size_bytes if obj is None else self._weight(obj) for obj in found)

    def _weight(self, obj: Obj) -> float:
        where = Where.HOST if obj.below >= 0 else Where.STORE if self._from_store(obj) else Where.DISK
        return obj.length * self._weight_in(where)

    def _weight_in(self, where: Where) -> float:
        """Bytes of the disk that are read while one byte of there comes."""
        if where is Where.DISK:
            return 1.0
        return self.rate.bytes_per_s / (self.host_rate if where is Where.HOST else self.store_rate).bytes_per_s

    @property
    def takes_writes(self) -> bool:
        """Whether anything can be written to the disk now."""
        return self.refused is None and self.writes_refused is None

    # --- what the driver tells -----------------------------------------------------------------

    def found(
        self, entries: Iterable[tuple[int, int, ExtentEntry]], file_bytes: int = 0, *, remote: bool = False
    ) -> None:
        """What the disk holds from an earlier life (extent, entry number, entry), verified by the driver.

        Of several copies of one object the latest written counts; an extent of none that counts is deleted.
        ``file_bytes``: of the one extent told, 0 if not known. ``remote``: in the shared store, where an
        extent is its writer's to delete, and only what is of the weights in force counts.
        """
        by_extent: dict[int, list[tuple[int, ExtentEntry]]] = {}
        for extent, number, entry in entries:
            by_extent.setdefault(extent, []).append((number, entry))
        for extent in sorted(by_extent, reverse=True):
            there = sorted(by_extent[extent], key=lambda entry: entry[0])
            wanted = [(number, e) for number, e in there if not remote or e.weights == self.ctx.weights]
            live = {number: obj for number, e in wanted if (obj := self._found_object(extent, number, e)) is not None}
            if remote:
                if live:
                    self.extents.add_remote(extent, live)
            elif live:
                self.extents.add(extent, live, file_bytes or extent_bytes([e for _, e in there]), 0.0)
                self.remote.written(extent)
            else:
                self.ctx.do(DeleteExtent(extent))
        self.make_room(0)

    def found_later(self, event: DiskFound) -> None:
        """The tier came (back) with an extent that was not known."""
        self.found(event.entries, event.file_bytes, remote=event.remote)

    def _found_object(self, extent: int, number: int, e: ExtentEntry) -> Obj | None:
        if self.ctx.books.find(e.group, e.shard, e.digest) is not None:
            return None
        obj = object_of(e, self.ctx.model, self.ctx.books.shards)
        if obj is None:
            return None
        obj.on_disk = (extent, number)
        self.ctx.books.find_on_disk(obj)
        return obj

    def state(self, event: DiskState) -> None:
        """The tier failed as a whole, or for writing only, or healed."""
        self.refused = event.refused
        self.writes_refused = event.refused or event.writes_refused

    def lose_everywhere(self, extents: Iterable[int]) -> None:
        """Extents are deleted, from the store too: what only they held is stored no more."""
        for extent in extents:
            for obj in self.extents.gone(extent):
                self._lose(obj, evicted=False)

    def lost(self, event: DiskLost) -> None:
        """Extents went from the disk or from the store: what only they held is stored no more."""
        for extent in event.extents:
            for obj in self.extents.gone_from(extent, remote=event.remote):
                self._lose(obj, evicted=False)

    def read_refusal(self, obj: Obj) -> Reason | None:
        """Why an object on a tier cannot be restored now; None where it can."""
        if obj.below >= 0:
            return None
        if obj.on_disk is None or not self.extents.is_remote(obj.on_disk[0]):
            return self.refused
        if self.remote.refused is None or self.extents.only_remote(obj.on_disk[0]):
            return self.remote.refused
        return self.refused

    def _from_store(self, obj: Obj) -> bool:
        """Whether it is read from the store: the disk does not have it, or does not work."""
        if obj.below >= 0 or obj.on_disk is None:
            return False
        return self.extents.only_remote(obj.on_disk[0]) or (
            self.refused is not None and self.extents.is_remote(obj.on_disk[0])
        )

    def _taken_over(self, obj: Obj) -> None:
        """The copies below that were another's are this object's from here on."""
        if obj.on_disk is not None:
            self.extents.taken_over(obj)
        if obj.below >= 0:
            self.host.pools.taken_over(obj)

    def _lose(self, obj: Obj, *, evicted: bool) -> None:
        """An object's copy on disk is gone; one being read is told so by its read."""
        obj.on_disk = None
        if obj.state is State.ON_TIER and not obj.on_a_tier:
            self.ctx.books.forget(obj, evicted=evicted)

    def make_room(self, nbytes: int) -> bool:
        """Let extents go until ``nbytes`` more fit under the cap; False, and none goes, where they cannot."""
        if not self.extents.lacks(nbytes):
            return True
        victims = self.extents.victims(nbytes, self.ctx.retired)
        if victims is None:
            return False
        for extent in victims:
            self.ctx.do(DropLocal(extent) if self.extents.is_remote(extent) else DeleteExtent(extent))
            for obj in self.extents.gone_from(extent, remote=False):
                self._lose(obj, evicted=True)
            self.ctx.counters["extents_evicted"] += 1
        return True

    # --- out -----------------------------------------------------------------------------------

    def swap_out(self, client: str, message: SwapOut) -> None:
        """Move objects one tier down, then free their slots. A pinned object refuses all.

        What has a valid copy there already is not written again.
        """
        ctx = self.ctx
        objects = [obj for obj in ctx.books.find_all(message.objects) if obj.state is State.SEALED and obj.bad is None]
        refused = held_refusal(objects) or self._write_refusal(objects)
        if refused is not None:
            ctx.send(client, Done(message.request, refused, ""))
            return
        if not objects:
            ctx.send(client, Done(message.request, None, "nothing was in memory"))
            return
        self.demote(self.worth_writing(objects), client, message.request)

    def worth_writing(self, objects: list[Obj]) -> list[Obj]:
        """Of objects that might go to disk, those that the admission to it lets in, or that have a copy there."""
        writing = self.ctx.books.writing
        if writing is None:
            return objects
        uses = self.ctx.books.uses
        worth = [o for o in objects if o.on_disk is not None or writing.admits(o.digest, int(uses[o.slot]))]
        self.ctx.counters["writes_not_worth"] += len(objects) - len(worth)
        return worth

    def _write_refusal(self, objects: Iterable[Obj]) -> Reason | None:
        """Why objects cannot be moved down now: there is no host memory for one, and the disk takes nothing."""
        if all(map(self.host.covers, objects)):
            return None
        return self.writes_refused or self.refused

    def demote(self, objects: list[Obj], client: str, request: str) -> None:
        """Move unpinned, sealed objects down and free their slots; answer the request with Done."""
        ctx = self.ctx
        new = [obj for obj in objects if not obj.on_a_tier]
        to_host = [obj for obj in new if self.host.covers(obj)]
        chunks = list(self._chunks([obj for obj in new if not self.host.covers(obj)]))
        demotion = Demotion(client, request, 1 + len(to_host) + len(chunks))
        for obj in objects:
            if obj.on_a_tier:
                self._used(obj)
                ctx.books.evict(obj)
        for chunk in chunks:
            self._write(chunk, demotion)
        self.host.demote(to_host, demotion)
        demotion.ended(ctx)

    def _used(self, obj: Obj) -> None:
        """A use of whatever copies lie below."""
        if obj.below >= 0:
            self.host.pools.use(obj.below)
        if obj.on_disk is not None:
            self.extents.used(obj.on_disk[0], self.ctx.now)

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
        if not self.make_room(nbytes):
            demotion.ended(ctx, Reason.DISK_FULL)
            return
        token, extent = ctx.number(), ctx.number()
        self.extents.used_bytes += nbytes
        for obj in objects:
            ctx.books.demote(obj)
        self._writing[token] = Writing(objects, extent, nbytes, demotion)
        ctx.do(WriteExtent(token, extent, entries, tuple(obj.slot for obj in objects)))

    def written(self, event: DiskWritten) -> None:
        if self.host.sunk(event):
            self._go_on()
            return
        writing = self._writing.pop(event.token, None)
        if writing is None:
            return
        books, demotion = self.ctx.books, writing.demotion
        self.extents.used_bytes -= writing.bytes_max
        if event.refused is None:
            size = event.file_bytes or writing.bytes_max
            self.ctx.counters["written_bytes"] += sum(obj.length for obj in writing.objects)
            self.extents.add(writing.extent, dict(enumerate(writing.objects)), size, self.ctx.now)
            self.remote.written(writing.extent)
        if event.refused is None:
            self.ctx.journal.happened(self.ctx.now, "demoted", writing.objects)
        for number, obj in enumerate(writing.objects):
            if event.refused is None:
                books.demoted(obj, writing.extent, number)
            else:
                books.stays(obj)
        demotion.ended(self.ctx, event.refused)

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
        refused = next(filter(None, map(self.read_refusal, objects)), None)
        if refused is not None:
            return refused
        lacking = self.ctx.books.lacking(objects)
        return None if lacking is None else lacking.reason

    def restore(self, objects: list[Obj]) -> None:
        """Reserve slots for ON_TIER objects and read them, as their place in line and the caps allow.

        Whoever cares waits with ``ctx.await_object``. The caller asked for room in the same step.
        """
        place_s = self.ctx.behalf.place_s if self.ctx.behalf.op else self.ctx.now + PATIENCE_S
        self.ctx.books.reserve_restores(objects)
        for obj in objects:
            self.ctx.tally.recovery(Way.RESTORE, obj.kind, Outcome.ATTEMPTED)
            self.line.reserved[obj.group, obj.shard] += 1
            self._queue.put(obj, place_s, store=self._from_store(obj))
        self._read_more()

    def hurry(self, obj: Obj, place_s: float) -> None:
        """What is on its way to this object's slot is wanted by then at the latest: a request joined one in less haste."""
        if self._queue.hurry(obj, place_s):
            for token, reading in self._reading.items():
                if any(there is obj for there, _ in reading.objects.values()):
                    self.ctx.hurried[token] = place_s

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
            self.ctx.tally.recovery(Way.RESTORE, obj.kind, Outcome.FAILED, Reason.VERSION_CHANGED)
            self.ctx.arrived(obj, Reason.VERSION_CHANGED)
        self._go_on()

    def _unreserve(self, obj: Obj) -> None:
        self.line.reserved[obj.group, obj.shard] -= 1

    def _fall_back(self, obj: Obj, reason: Reason, *, for_good: bool) -> None:
        """A restore failed: the object is on its tier again, if the tier still has it."""
        self.ctx.books.restore_failed(obj, reason, for_good=for_good)
        if not obj.on_a_tier:
            self.ctx.books.forget(obj, evicted=False)

    def _go_on(self) -> None:
        """Host slots, or turns to read, may have come free."""
        self.host.go_on()
        self._read_more()

    def _read_more(self) -> None:
        if not len(self._queue):
            return
        config = self.ctx.config
        from_host: list[Obj] = []
        from_disk: list[tuple[Obj, int]] = []
        """Objects, and the slots to read them into."""
        for _ in range(config.restores_max - self.restoring):
            obj = self._queue.next(self._has_a_way)
            if obj is None:
                break
            if obj.state is State.QUARANTINED or not obj.on_a_tier:
                self._never_read(obj)
            elif obj.below >= 0:
                from_host.append(obj)
            elif self.host.covers(obj):
                from_disk.append((obj, self.host.pools.take((obj.group, obj.shard))))
            else:
                from_disk.append((obj, obj.slot))
        for objects in self._batches([(obj, obj.slot) for obj in from_host]):
            self._copy_up([(obj, _extent(obj)) for obj, _ in objects])
        for batch in self._batches(from_disk):
            self._read_batch(batch)

    def _has_a_way(self, obj: Obj) -> bool:
        """Whether an object's bytes can come now: from host memory, or through it, or without it."""
        if obj.below >= 0 or obj.on_disk is None or obj.state is State.QUARANTINED or not self.host.covers(obj):
            return True
        return self.host.room((obj.group, obj.shard))

    def _read_batch(self, batch: list[tuple[Obj, int]]) -> None:
        token, reads, objects = self.ctx.number(), [], {}
        for obj, slot in batch:
            assert obj.on_disk is not None
            reads.append((*obj.on_disk, slot))
            objects[slot] = (obj, _extent(obj))
            self._used(obj)
        store = self._from_store(batch[0][0])
        weight = sum(self._weight(obj) for obj, _ in batch)
        self._reading[token] = Reading(objects, self.ctx.now, weight, from_store=store)
        self.ctx.do(ReadExtent(token, tuple(reads), store, self._wanted_s(obj for obj, _ in batch)))

    def _copy_up(self, batch: list[tuple[Obj, int | None]]) -> None:
        """Copy objects from host memory to the slots that were reserved for them."""
        ctx = self.ctx
        token = ctx.number()
        reading = Reading({}, ctx.now, sum(self._weight(obj) for obj, _ in batch))
        pairs = []
        for obj, extent in batch:
            reading.objects[obj.slot] = (obj, extent)
            reading.below[obj.slot] = obj.below
            self.host.pools.borrow(obj.below)
            self._used(obj)
            pairs.append(Pair(obj.below, obj.slot, obj.length))
        self._reading[token] = reading
        deadline_s = ctx.now + ctx.config.transfer_timeout_s
        wanted_s = self._wanted_s(obj for obj, _ in batch)
        ctx.do(StartTransfer(token, ctx.config.holder, ctx.incarnation, tuple(pairs), deadline_s, wanted_s))

    def _wanted_s(self, objects: Iterable[Obj]) -> float:
        """By when the first of these is wanted."""
        return min(map(self._queue.place_s, objects))

    def _ahead(self, obj: Obj) -> bool:
        """Whether it is read ahead of a request: nobody is kept waiting by what goes before it."""
        return self._queue.place_s(obj) > self.ctx.now + PATIENCE_S

    def _never_read(self, obj: Obj) -> None:
        """Outdated, or gone from the disk, before it was its turn."""
        self._queue.arrived(obj, _extent(obj))
        self._unreserve(obj)
        refused = Reason.VERSION_CHANGED if obj.state is State.QUARANTINED else Reason.RESTORE_FAILED
        self.ctx.tally.recovery(Way.RESTORE, obj.kind, Outcome.FAILED, refused)
        if obj.state is State.QUARANTINED:
            self.ctx.books.quiet(obj)
        else:
            self._fall_back(obj, refused, for_good=False)
        self.ctx.arrived(obj, refused)

    def _batches(self, objects: list[tuple[Obj, int]]) -> Iterator[list[tuple[Obj, int]]]:
        config, size = self.ctx.config, 0
        batch: list[tuple[Obj, int]] = []
        first_way = None
        for obj, slot in objects:
            full = len(batch) >= config.restore_batch_objects or size + obj.length > config.restore_batch_bytes
            way = (self._from_store(obj), self._ahead(obj))
            if batch and (full or way != first_way):
                yield batch
                batch, size = [], 0
            if not batch:
                first_way = way
            batch.append((obj, slot))
            size += obj.length
        if batch:
            yield batch

    def read(self, event: DiskRead) -> None:
        """Bytes came from the disk: each stands only if its own digest is the recorded one."""
        reading = self._reading.pop(event.token, None)
        if reading is None:
            return
        landed: list[Landed] = []
        halfway: list[tuple[Obj, int | None]] = []
        good_bytes = 0
        for result in event.restored:
            obj, extent = reading.objects.pop(result.slot)
            refused = self.restore_refusal(obj, result.checksum, result.refused)
            good_bytes += obj.length if refused is None else 0
            if result.slot == obj.slot:
                landed.append((obj, extent, refused))
            elif refused is None and obj.state is State.RESTORING:
                self.host.pools.stand(result.slot, obj)
                halfway.append((obj, extent))
            else:
                self.host.pools.give_up(result.slot)
                landed.append((obj, extent, refused))
        self._land(landed, reading.since_s)
        rate = self.store_rate if reading.from_store else self.rate
        busy_s = rate.done(good_bytes, reading.since_s, self.ctx.now)
        self.ctx.learn(Measured(Work.RESTORE, good_bytes, busy_s))
        if halfway:
            self._copy_up(halfway)
        self._go_on()

    def copied(self, event: TransferDone) -> bool:
        """Bytes were copied between host memory and the readers' slots; False if the copy is not of this desk."""
        reading = self._reading.pop(event.token, None)
        if reading is None:
            if not self.host.copied(event):
                return False
            self._go_on()
            return True
        landed: list[Landed] = []
        good_bytes = 0
        for moved in event.moved:
            obj, extent = reading.objects.pop(moved.slot)
            copy = reading.below[moved.slot]
            if not moved.quiet:
                self._restless.setdefault(event.token, []).append(obj)
                self._out_of_reach(obj, extent)
            else:
                refused = Reason.RESTORE_FAILED if moved.fault is not None else None
                refused = self.restore_refusal(obj, moved.checksum, refused)
                good_bytes += obj.length if refused is None else 0
                if refused is Reason.CHECKSUM_MISMATCH and obj.below == copy and obj.on_disk is not None:
                    self._try_the_disk(obj, extent)
                else:
                    landed.append((obj, extent, refused))
        self._land(landed, reading.since_s)
        for copy in reading.below.values():
            self.host.pools.give_back(copy)
        busy_s = self.host_rate.done(good_bytes, reading.since_s, self.ctx.now)
        self.ctx.learn(Measured(Work.COPY, good_bytes, busy_s))
        self._go_on()
        return True

    def _try_the_disk(self, obj: Obj, extent: int | None) -> None:
        """The copy in host memory proved wrong, and the disk has another: that one is read."""
        self.host.pools.drop(obj.below)
        self._queue.arrived(obj, extent)
        self._queue.put(obj, self.ctx.now, store=self._from_store(obj))
        self.ctx.counters["host_copies_wrong"] += 1

    def _out_of_reach(self, obj: Obj, extent: int | None) -> None:
        """Bytes may still arrive in the object's slot: nobody gets it until that is proven over."""
        self._queue.arrived(obj, extent)
        self._unreserve(obj)
        if obj.state is not State.QUARANTINED:
            self.ctx.books.quarantine(obj)
        self.ctx.counters["restores_failed"] += 1
        self.ctx.tally.recovery(Way.RESTORE, obj.kind, Outcome.FAILED, Reason.RESTORE_FAILED)
        self.ctx.arrived(obj, Reason.RESTORE_FAILED)

    def quiet(self, token: int) -> None:
        """Proven: no byte of this transfer can still arrive."""
        for obj in self._restless.pop(token, ()):
            self.ctx.books.quiet(obj)
        self.host.quiet(token)
        self._go_on()

    def _land(self, landed: Sequence[Landed], since_s: float) -> None:
        """What was read for objects since then stands in their slots, or the reason it does not.

        Those that stand do so together: one by one they would take three times as long, and requests wait meanwhile.
        """
        good, told = list[Obj](), list[tuple[Obj, Reason | None]]()
        for obj, extent, refused in landed:
            self._queue.arrived(obj, extent)
            self._unreserve(obj)
            if obj.state is State.QUARANTINED:
                self.ctx.books.quiet(obj)
                told.append((obj, Reason.VERSION_CHANGED))
            elif refused is None:
                good.append(obj)
                told.append((obj, None))
            else:
                self._fall_back(obj, refused, for_good=refused not in GOOD_AFTER_RETRY)
                self.ctx.counters["restores_failed"] += 1
                told.append((obj, refused))
        self._stand(good, since_s)
        for obj, refused in told:
            if refused is not None:
                self.ctx.tally.recovery(Way.RESTORE, obj.kind, Outcome.FAILED, refused)
            self.ctx.arrived(obj, refused)

    def _stand(self, objects: Sequence[Obj], since_s: float) -> None:
        tally = self.ctx.tally
        self.ctx.books.restored_all(objects)
        for obj in objects:
            tally.recovery(Way.RESTORE, obj.kind, Outcome.SUCCEEDED)
            tally.swap_in_s[obj.kind].add(self.ctx.now - since_s)
        self.ctx.counters["restored_objects"] += len(objects)
        self.ctx.counters["restored_bytes"] += sum(obj.length for obj in objects)

    def restore_refusal(self, obj: Obj, checksum: bytes | None, refused: Reason | None) -> Reason | None:
        """Why restored bytes may not be used; None where their digest is the recorded one."""
        if refused is not None:
            return refused
        return None if checksum == obj.checksum else Reason.CHECKSUM_MISMATCH

    @property
    def turn_due(self) -> bool:
        """Whether somebody in line may start."""
        return self.line.first() is not None

    def start_due(self) -> None:
        """Let the first in line start, if it is its turn. What it reserves is seen by the next."""
        turn = self.line.first()
        if turn is not None:
            self.line.leave(turn)
            turn.start()

    def in_hand(self) -> Iterator[Obj]:
        """Every object whose slot a restore answers for."""
        yield from self._queue
        for reading in self._reading.values():
            yield from (obj for obj, _ in reading.objects.values())
        for objects in self._restless.values():
            yield from objects

    def pinned(self) -> Iterator[Obj]:
        """Every object pinned while it is moved down."""
        for writing in self._writing.values():
            yield from writing.objects
        yield from self.host.pinned()

    # --- parked --------------------------------------------------------------------------------

    def park(self, client: str, request: str, objects: list[Obj]) -> None:
        """Move down what a preempted request leaves behind, as far as nobody else holds it."""
        free = [o for o in objects if o.visible and o.state is State.SEALED and o.bad is None and not held_refusal([o])]
        refused = self._write_refusal(free)
        if refused is not None or not free:
            self.ctx.send(client, Done(request, refused, "" if refused else "nothing was left to nobody"))
            return
        self.demote(free, client, request)

    # --- extents -------------------------------------------------------------------------------

    def in_store(self, obj: Obj) -> bool:
        """Whether the store that all nodes share has this object."""
        extent = _extent(obj)
        return extent is not None and self.extents.is_remote(extent)

    def forget_dropped(self) -> bool:
        """Extents whose last entry no object refers to are deleted, and host slots freed; whether any came free."""
        freed = self.host.forget_dropped()
        if freed:
            self._go_on()
        dropped = self.ctx.books.disk_dropped
        while dropped:
            extent, entry = dropped.pop()
            if self.extents.dropped(extent, entry):
                self.ctx.do(DeleteExtent(extent))
        return freed


def _extent(obj: Obj) -> int | None:
    return None if obj.on_disk is None else obj.on_disk[0]


def object_of(e: ExtentEntry, model: ModelSpec, shards: Collection[int]) -> Obj | None:
    """The object that an entry describes; None where it is none of this model's and these shards'."""
    if e.shard not in shards or not 0 <= e.group < len(model.groups):
        return None
    spec = model.groups[e.group]
    if e.length > spec.block_bytes or e.position % spec.unit_tokens:
        return None
    return Obj(
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
