"""The host desk: the step of the ladder between GPU pools and the disk (G1 -> G2 -> G3).

::

    swap-out:   reader's slot --copy--> host slot                 DEMOTING -> ON_TIER
    overflow:   host slot --extent--> disk, the oldest copies     ON_TIER stays ON_TIER
    swap-in:    host slot --copy--> reader's slot                 RESTORING -> SEALED
                disk --read--> host slot --copy--> reader's slot

To everyone else a copy in host memory is a copy on a tier: PENDING, restored in the same line, under
the same caps, and used only after the digest of what landed in the reader's slot proved right. Whose
turn it is decides the disk desk, which drives this one.

Where no host slot is free the copy used longest ago leaves: at once if it is a second copy (the
object is in memory or on disk as well), onto the disk if one takes it, and else for good. A demotion
loses nothing newer than itself: it is refused (``disk_full``) for want of room. A restore from disk
may, for it must pass through: without a disk that takes writes, host memory is the last tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .context import HolderContext
from .effects import DeleteExtent, DiskWritten, ExtentEntry, Moved, Pair, StartTransfer, TransferDone, WriteExtent
from .extent_book import ExtentBook
from .extents import extent_bytes
from .host_pool import HostPools, Key
from .kinds import Reason
from .lifecycle import State
from .messages import Done
from .objects import Obj
from .remote_copies import RemoteCopies

SINK_TOGETHER = 16
"""Copies that leave for the disk together where the pool is large: an extent of one block wastes the disk."""
SINK_RETRY_S = 1.0
"""How long nothing is written to the disk for room after a write failed."""


@dataclass(slots=True)
class Demotion:
    """One request to move objects down: answered once each of its parts stands or failed."""

    client: str
    request: str
    left: int
    refused: Reason | None = None

    def ended(self, ctx: HolderContext, refused: Reason | None = None) -> None:
        """One part stands, or why it does not."""
        self.left -= 1
        self.refused = self.refused or refused
        if not self.left and self.client:
            ctx.send(self.client, Done(self.request, self.refused, ""))


class NextTier(Protocol):
    """The tier below host memory, as this desk needs it."""

    extents: ExtentBook
    remote: RemoteCopies

    @property
    def takes_writes(self) -> bool:
        """Whether anything can be written there now."""

    def make_room(self, nbytes: int) -> bool:
        """Let extents go until that many bytes fit; False where they cannot."""


@dataclass(slots=True)
class Waiting:
    """An object that waits for a host slot. ``since``: the count of uses of host copies at that time."""

    obj: Obj
    demotion: Demotion
    since: int
    ahead: float | None = None
    """What it is worth, where only a copy is wanted and the object stays in memory."""


@dataclass(slots=True)
class Sinking:
    """Host copies being written to the disk as one extent."""

    extent: int
    bytes_max: int
    copies: list[tuple[int, Obj]] = field(default_factory=list)


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


class HostDesk:
    """All copies in host memory of one holder. Without host pools it covers nothing and does nothing."""

    def __init__(self, ctx: HolderContext, lower: NextTier) -> None:
        self.ctx = ctx
        self.lower = lower
        self.pools = HostPools(ctx.arena)
        self._lines: dict[Key, deque[Waiting]] = {key: deque() for key in self.pools.pools}
        self._moving: dict[int, dict[int, Waiting]] = {}
        """By transfer: what is copied into each host slot."""
        self._sinking: dict[int, Sinking] = {}
        self._restless: dict[int, list[int]] = {}
        """By transfer: host slots that its bytes may still reach."""
        self._sinks_from_s = 0.0

    def covers(self, obj: Obj) -> bool:
        return self.pools.covers(obj)

    # --- down ----------------------------------------------------------------------------------

    def demote(self, objects: Iterable[Obj], demotion: Demotion) -> None:
        """Copy unpinned, sealed objects to host slots as those come free, each a part of the demotion."""
        for obj in objects:
            self.ctx.books.demote(obj)
            self._lines[obj.group, obj.shard].append(Waiting(obj, demotion, self.pools.uses))
        self.go_on()

    def copy_ahead(self, objects: Sequence[Obj], worths: Sequence[float]) -> None:
        """Copy unpinned, sealed objects to host slots too: they stay in memory, and fall back to these once evicted."""
        demotion = Demotion("", "", len(objects))
        for obj, worth in zip(objects, worths, strict=True):
            self.ctx.books.demote(obj)
            self._lines[obj.group, obj.shard].append(Waiting(obj, demotion, self.pools.uses, worth))
        self.go_on()

    def go_on(self) -> None:
        """Let whoever waits for a host slot have it, as far as there are any."""
        for key, line in self._lines.items():
            if line:
                self._serve(key, line)

    def _serve(self, key: Key, line: deque[Waiting]) -> None:
        ctx = self.ctx
        copying: dict[int, Waiting] = {}
        while line:
            first = line[0]
            if first.obj.state is not State.DEMOTING:  # a commit outdated it while it waited
                line.popleft()
                ctx.books.unpin(first.obj)
                first.demotion.ended(ctx)
                continue
            if self.room(key, first.since, len(line)):
                copying[self.pools.take(key)] = line.popleft()
            elif self.pools.busy(key):
                break
            else:
                self._failed(line.popleft(), Reason.DISK_FULL)
        if copying:
            token = ctx.number()
            self._moving[token] = copying
            self._copy(token, [Pair(w.obj.slot, slot, w.obj.length) for slot, w in copying.items()])

    def _copy(self, token: int, pairs: list[Pair]) -> None:
        ctx = self.ctx
        deadline_s = ctx.now + ctx.config.transfer_timeout_s
        ctx.do(StartTransfer(token, ctx.config.holder, ctx.incarnation, tuple(pairs), deadline_s))

    def _failed(self, waiting: Waiting, reason: Reason) -> None:
        self.ctx.books.stays(waiting.obj)
        waiting.demotion.ended(self.ctx, reason)

    def copied(self, event: TransferDone) -> bool:
        """Bytes came down: each is a copy only if its digest is the recorded one; False if it is not ours."""
        copying = self._moving.pop(event.token, None)
        if copying is None:
            return False
        for moved in event.moved:
            self._came_down(event.token, copying.pop(moved.slot), moved)
        return True

    def _came_down(self, token: int, waiting: Waiting, moved: Moved) -> None:
        obj, books = waiting.obj, self.ctx.books
        if not moved.quiet:
            self.pools.give_up(moved.slot, quiet=False)
            self._restless.setdefault(token, []).append(moved.slot)
            self._failed(waiting, Reason.TRANSFER_FAILED)
        elif moved.checksum != obj.checksum:
            self.pools.give_up(moved.slot)  # what lies in memory is judged where it is used
            self._failed(waiting, Reason.TRANSFER_FAILED if moved.checksum is None else Reason.CHECKSUM_MISMATCH)
        elif obj.state is not State.DEMOTING:
            self.pools.give_up(moved.slot)
            books.unpin(obj)
            waiting.demotion.ended(self.ctx)
        else:
            self.pools.stand(moved.slot, obj)
            if waiting.ahead is None:
                books.copied_down(obj)
            else:
                self.pools.worth[moved.slot] = waiting.ahead
                books.stays(obj)
            self.ctx.counters["host_copied_bytes"] += obj.length
            waiting.demotion.ended(self.ctx)

    def quiet(self, token: int) -> None:
        """Proven: no byte of this transfer can still arrive."""
        for slot in self._restless.pop(token, ()):
            self.pools.quiet(slot)

    # --- room ----------------------------------------------------------------------------------

    def room(self, key: Key, used_before: int | None = None, wanted: int = 1) -> bool:
        """Whether a host slot is free; where none is, one is freed, or room for ``wanted`` is on its way.

        ``used_before``: a copy used later than that is lost to nobody.
        """
        pool = self.pools.pools[key]
        if pool.free:
            return True
        sinks = self.lower.takes_writes and self.ctx.now >= self._sinks_from_s
        wanted = max(wanted, min(SINK_TOGETHER, pool.slots // 8))
        under_way = sum((obj.group, obj.shard) == key for sink in self._sinking.values() for _, obj in sink.copies)
        sinking: list[tuple[int, Obj]] = []
        for victim in self.pools.idle(key):
            obj = pool.standing[victim]
            second = obj.state is not State.ON_TIER or obj.on_disk is not None
            if second or obj.weights in self.ctx.retired:
                self._let_go(victim, obj)
                break
            if sinks and under_way + len(sinking) < wanted:
                sinking.append((victim, obj))
            elif sinks:
                break
            elif used_before is None or self.pools.used_at[victim] <= used_before:
                self._let_go(victim, obj)
                break
        self._sink(sinking)
        return bool(pool.free)

    def _let_go(self, slot: int, obj: Obj) -> None:
        """A copy leaves host memory; an object that was nowhere else is gone."""
        self.pools.drop(slot)
        if obj.state is State.ON_TIER and not obj.on_a_tier:
            self.ctx.books.forget(obj, evicted=True)
            self.ctx.counters["host_evicted"] += 1

    # --- overflow ------------------------------------------------------------------------------

    def _sink(self, copies: list[tuple[int, Obj]]) -> None:
        """Write host copies to the disk, in extents of a bounded size."""
        config = self.ctx.config
        while copies:
            sink, size = Sinking(0, 0), 0
            while copies and len(sink.copies) < config.extent_objects_max:
                size += copies[0][1].length
                if sink.copies and size > config.extent_bytes_max:
                    break
                sink.copies.append(copies.pop(0))
            entries = tuple(entry_of(obj) for _, obj in sink.copies)
            sink.bytes_max = extent_bytes(entries)
            if not self.lower.make_room(sink.bytes_max):
                self._sinks_from_s = self.ctx.now + SINK_RETRY_S
                return
            token, sink.extent = self.ctx.number(), self.ctx.number()
            self.lower.extents.used_bytes += sink.bytes_max
            for slot, _ in sink.copies:
                self.pools.borrow(slot)
            self._sinking[token] = sink
            self.ctx.do(WriteExtent(token, sink.extent, entries, tuple(slot for slot, _ in sink.copies)))

    def sunk(self, event: DiskWritten) -> bool:
        """An extent of host copies stands, or does not; False if it is not of this desk."""
        sink = self._sinking.pop(event.token, None)
        if sink is None:
            return False
        extents = self.lower.extents
        extents.used_bytes -= sink.bytes_max
        live = {}
        for number, (slot, obj) in enumerate(sink.copies):
            current = obj.below == slot
            if current and event.refused is None:
                obj.on_disk = (sink.extent, number)
                live[number] = obj
                self.ctx.counters["written_bytes"] += obj.length
                if obj.state is State.ON_TIER:
                    self._let_go(slot, obj)
            self.pools.give_back(slot)
        if live:
            extents.add(sink.extent, live, event.file_bytes or sink.bytes_max, self.ctx.now)
            self.lower.remote.written(sink.extent)
        elif event.refused is None:
            self.ctx.do(DeleteExtent(sink.extent))
        else:
            self._sinks_from_s = self.ctx.now + SINK_RETRY_S
        self.ctx.counters["host_overflows"] += 1
        return True

    # --- what is owed --------------------------------------------------------------------------

    def forget_dropped(self) -> bool:
        """Copies that no object refers to any more are freed; whether there were any."""
        dropped, self.ctx.books.below_dropped = self.ctx.books.below_dropped, []
        for slot in dropped:
            self.pools.drop(slot)
        return bool(dropped)

    def pinned(self) -> Iterator[Obj]:
        """Every object pinned until it was copied down."""
        for line in self._lines.values():
            yield from (waiting.obj for waiting in line)
        for copying in self._moving.values():
            yield from (waiting.obj for waiting in copying.values())

    @property
    def at_work(self) -> int:
        """Objects on their way down, waiting ones included."""
        lines = sum(map(len, self._lines.values()))
        down = sum(map(len, self._moving.values()))
        return lines + down + sum(len(sink.copies) for sink in self._sinking.values())
