"""The disk desk: which objects go to the local disk, come back, and what a failure means.

Bytes on disk are used only after their own digest proved right: an object that was read wrong is
marked bad and cuts the hit there. The driver writes an extent whole or not at all and reads entries
into slots; it decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .books import Obj, held_refusal
from .context import HolderContext
from .effects import DeleteExtent, DiskRead, DiskWritten, ExtentEntry, ReadExtent, WriteExtent
from .kinds import Reason
from .lifecycle import State
from .messages import Done, SwapIn, SwapOut
from .passport import Abi

GOOD_AFTER_RETRY = frozenset({Reason.DISK_UNAVAILABLE, Reason.RESTORE_FAILED})
"""Failures that say nothing of the bytes: the object stays on its tier, unmarked."""


@dataclass(slots=True)
class Writing:
    """An extent being written, and who asked for it."""

    objects: list[Obj]
    extent: int
    client: str
    request: str


class DiskDesk:
    """Swap-out, swap-in and restores of one holder, bounded by ``restores_max`` at a time."""

    def __init__(self, ctx: HolderContext) -> None:
        self.ctx = ctx
        self.refused: Reason | None = None
        self.extents: dict[int, int] = {}
        """Live entries by extent; an extent without any is deleted."""
        self._writing: dict[int, Writing] = {}
        self._reading: dict[int, dict[int, Obj]] = {}
        self._queue: deque[Obj] = deque()

    @property
    def restoring(self) -> int:
        return sum(len(objects) for objects in self._reading.values())

    @property
    def restoring_bytes(self) -> int:
        return sum(obj.length for objects in self._reading.values() for obj in objects.values())

    # --- start ---------------------------------------------------------------------------------

    def found(self, entries: Iterable[tuple[int, int, ExtentEntry]]) -> None:
        """What the disk holds from an earlier life (extent, entry number, entry), verified by the driver.

        Of several copies of one object the latest written counts; an extent of none that counts is deleted.
        """
        ctx = self.ctx
        known = sorted(entries, key=lambda entry: (-entry[0], entry[1]))
        for extent, number, e in known:
            if e.shard not in ctx.books.shards or e.group >= len(ctx.model.groups):
                continue
            if ctx.books.find(e.group, e.shard, e.digest) is not None:
                continue
            spec = ctx.model.groups[e.group]
            abi = Abi(e.fingerprint, e.alignment_bytes)
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
                abi,
                e.checksum,
            )
            obj.on_disk = (extent, number)
            ctx.books.find_on_disk(obj)
            self.extents[extent] = self.extents.get(extent, 0) + 1
        for extent in sorted({extent for extent, _, _ in known} - self.extents.keys()):
            ctx.do(DeleteExtent(extent))

    def state(self, refused: Reason | None) -> None:
        """The tier failed as a whole, or healed."""
        self.refused = refused

    # --- out -----------------------------------------------------------------------------------

    def swap_out(self, client: str, message: SwapOut) -> None:
        """Write objects as one extent, then free their slots. A pinned object refuses all."""
        ctx = self.ctx
        objects = [obj for obj in ctx.books.find_all(message.objects) if obj.state is State.SEALED and obj.bad is None]
        refused = self._swap_refusal(objects)
        if refused is not None:
            ctx.send(client, Done(message.request, refused, ""))
            return
        if not objects:
            ctx.send(client, Done(message.request, None, "nothing was in memory"))
            return
        token, extent = ctx.number(), self._extent_number()
        for obj in objects:
            ctx.books.demote(obj)
        self._writing[token] = Writing(objects, extent, client, message.request)
        ctx.do(WriteExtent(token, extent, tuple(entry_of(obj) for obj in objects), tuple(obj.slot for obj in objects)))

    def _swap_refusal(self, objects: list[Obj]) -> Reason | None:
        return held_refusal(objects) or self.refused

    def _extent_number(self) -> int:
        return self.ctx.incarnation << 32 | self.ctx.number()

    def written(self, event: DiskWritten) -> None:
        writing = self._writing.pop(event.token, None)
        if writing is None:
            return
        books = self.ctx.books
        if event.refused is None:
            self.extents[writing.extent] = len(writing.objects)
        for number, obj in enumerate(writing.objects):
            if event.refused is None:
                books.demoted(obj, writing.extent, number)
            else:
                books.demotion_failed(obj)
        self.ctx.send(writing.client, Done(writing.request, event.refused, ""))

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
        open_count = len([o for o in objects if o.bad is None])
        failures: list[Reason] = []

        def stands(_: Obj, why: Reason | None) -> None:
            nonlocal open_count
            open_count -= 1
            if why is not None:
                failures.append(why)
            if not open_count:
                ctx.send(client, Done(message.request, failures[0] if failures else None, ""))

        for obj in objects:
            if obj.bad is None:
                ctx.await_object(obj, stands)
        self.restore(to_restore)
        if not open_count:
            ctx.send(client, Done(message.request, None, "nothing was on disk"))

    def _restore_refusal(self, objects: list[Obj]) -> Reason | None:
        if objects and self.refused is not None:
            return self.refused
        lacking = self.ctx.books.lacking(objects)
        return None if lacking is None else lacking.reason

    def restore(self, objects: list[Obj]) -> None:
        """Reserve slots for ON_TIER objects and read them, at most ``restores_max`` at a time.

        Whoever cares waits with ``ctx.await_object``. The caller asked for room in the same step.
        """
        for obj in objects:
            self.ctx.books.reserve_restore(obj)
            self._queue.append(obj)
        self._read_more()

    def _read_more(self) -> None:
        batch: dict[int, Obj] = {}
        reads: list[tuple[int, int, int]] = []
        config = self.ctx.config
        room, room_bytes = config.restores_max - self.restoring, config.restore_bytes_max - self.restoring_bytes
        while self._queue and len(reads) < room:
            if self._queue[0].length > room_bytes and (reads or self._reading):
                break
            obj = self._queue.popleft()
            room_bytes -= obj.length
            if obj.state is State.QUARANTINED:
                self.ctx.books.quiet(obj)
                self.ctx.arrived(obj, Reason.VERSION_CHANGED)
                continue
            assert obj.on_disk is not None
            batch[obj.slot] = obj
            reads.append((*obj.on_disk, obj.slot))
        if reads:
            token = self.ctx.number()
            self._reading[token] = batch
            self.ctx.do(ReadExtent(token, tuple(reads)))

    def read(self, event: DiskRead) -> None:
        """Bytes came from the disk: each stands only if its own digest is the recorded one."""
        batch = self._reading.pop(event.token, None)
        if batch is None:
            return
        books = self.ctx.books
        for result in event.restored:
            obj = batch.pop(result.slot)
            refused = self.restore_refusal(obj, result.checksum, result.refused)
            if obj.state is State.QUARANTINED:
                books.quiet(obj)
                refused = Reason.VERSION_CHANGED
            elif refused is None:
                books.restored(obj, obj.checksum)
                self.ctx.counters["restored_objects"] += 1
            else:
                books.restore_failed(obj, refused, for_good=refused not in GOOD_AFTER_RETRY)
                self.ctx.counters["restores_failed"] += 1
            self.ctx.arrived(obj, refused)
        self._read_more()

    def restore_refusal(self, obj: Obj, checksum: bytes | None, refused: Reason | None) -> Reason | None:
        """Why restored bytes may not be used; None where their digest is the recorded one."""
        if refused is not None:
            return refused
        return None if checksum == obj.checksum else Reason.CHECKSUM_MISMATCH

    def in_hand(self) -> Iterator[Obj]:
        """Every object whose slot a restore answers for."""
        yield from self._queue
        for batch in self._reading.values():
            yield from batch.values()

    def pinned(self) -> Iterator[Obj]:
        """Every object pinned while it is written to disk."""
        for writing in self._writing.values():
            yield from writing.objects

    # --- extents -------------------------------------------------------------------------------

    def forget_dropped(self) -> None:
        """Extents whose last entry no object refers to are deleted."""
        dropped = self.ctx.books.disk_dropped
        while dropped:
            extent, _ = dropped.pop()
            left = self.extents.get(extent, 0) - 1
            if left > 0:
                self.extents[extent] = left
            elif extent in self.extents:
                del self.extents[extent]
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
    )
