"""Memory, transfers and disks of the simulated hosts: bytes move in pieces, and not always whole.

The one-sided reads here protect nothing, like those they stand for: a read of reused memory
succeeds, a cancelled transfer may still write, a rewrite under a read tears it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ...fabric.arena import Arena
from ...fabric.effects import (
    DeleteExtent,
    Digested,
    DigestSlots,
    DiskRead,
    DiskWritten,
    DropLocal,
    Effect,
    Event,
    ExtentEntry,
    ExtentScrubbed,
    Moved,
    Pair,
    ReadExtent,
    Restored,
    ScrubExtent,
    StartTransfer,
    TransferDone,
    TransferFault,
    TransferQuiet,
    UploadExtent,
    WriteExtent,
)
from ...fabric.kinds import Reason
from .models import Chance
from .queue import Queue
from .shared_store import StoreDriver

Feed = Callable[[Event], None]


def digest(content: Any) -> bytes:
    """xxh3-128, as 16 bytes."""
    return xxhash.xxh3_128_digest(content)


@dataclass(slots=True)
class Disk:
    """One holder's local disk; it outlives the holder. Only the current life may touch it."""

    extents: dict[int, list[tuple[ExtentEntry, bytearray]]] = field(default_factory=dict)
    refused: Reason | None = None
    incarnation: int = 0

    def found(self) -> list[tuple[int, int, ExtentEntry]]:
        """What a fresh life finds: (extent, entry number, entry)."""
        return [(e, i, entry) for e, entries in self.extents.items() for i, (entry, _) in enumerate(entries)]


class Machine:
    """The driver of one life: performs its effects on memory and disk, in simulated time."""

    def __init__(
        self,
        *,
        rng: random.Random,
        queue: Queue,
        chance: Chance,
        arena: Arena,
        incarnation: int,
        disk: Disk,
        feed: Feed,
        peer: Callable[[str, int], Arena | None],
        counts: Counter[str],
    ) -> None:
        self.rng = rng
        self.queue = queue
        self.chance = chance
        self.arena = arena
        self.incarnation = incarnation
        self.disk = disk
        self.feed = feed
        self.peer = peer
        self.alive = True
        self.calm = False
        """No new faults: the run is being wound down."""
        self.counts = counts
        self.store: StoreDriver | None = None
        """The way to the store that all nodes share, where there is one."""

    def carry_out(self, effect: Effect) -> None:
        """Do what a core asks of memory, disk and store."""
        match effect:
            case StartTransfer():
                self.transfer(effect)
            case DigestSlots():
                self.digest_slots(effect)
            case WriteExtent():
                self.write(effect)
            case ReadExtent(remote=True) if self.store is not None:
                self.store.read(effect)
            case ReadExtent():
                self.read(effect)
            case DeleteExtent():
                self.delete(effect)
            case ScrubExtent():
                self.scrub(effect)
            case UploadExtent() if self.store is not None:
                self.store.upload(effect)
            case DropLocal() if self.store is not None:
                self.store.drop_local(effect)
            case _:
                raise TypeError(f"nobody here can do {type(effect).__name__}")

    # --- transfers -----------------------------------------------------------------------------

    def transfer(self, effect: StartTransfer) -> None:
        """READ in two pieces; some pairs fail, tear, or arrive after their deadline was given up."""
        rng = self.rng
        if self.peer(effect.source, effect.incarnation) is None:
            lost = tuple(Moved(pair.slot, None, TransferFault.PEER_LOST) for pair in effect.pairs)
            self.queue.after(rng.uniform(0.01, 0.3), self.tell, TransferDone(effect.token, lost))
            return
        fates = [self._fate() for _ in effect.pairs]
        first, rest = rng.uniform(0.001, 0.05), rng.uniform(0.001, 0.15)
        if rng.random() < self.chance.late and not self.calm:
            rest = rng.uniform(0.5, 2.5)
        self.queue.after(first, self._copy, effect, fates, 0)
        self.queue.after(first + rest, self._finish, effect, fates)

    def _fate(self) -> str:
        if self.calm or self.rng.random() >= self.chance.transfer_fault:
            return "whole"
        return self.rng.choice(("fails", "torn", "late", "early"))

    def _copy(self, effect: StartTransfer, fates: list[str], piece: int) -> None:
        source = self.peer(effect.source, effect.incarnation)
        if source is None or not self.alive:
            return
        for pair, fate in zip(effect.pairs, fates, strict=True):
            if fate == "whole" or (fate in ("torn", "early") and piece == 0):
                self._land(source, pair, piece)

    def _land(self, source: Arena, pair: Pair, piece: int) -> None:
        half = pair.length // 2
        part = slice(0, half) if piece == 0 else slice(half, pair.length)
        self.arena.payload(pair.slot)[part] = source.payload(pair.source_slot)[part]

    def _finish(self, effect: StartTransfer, fates: list[str]) -> None:
        if not self.alive:
            return
        if self.peer(effect.source, effect.incarnation) is None:
            fates = ["lost"] * len(fates)
        self._copy(effect, fates, 1)
        moved = []
        late = []
        for pair, fate in zip(effect.pairs, fates, strict=True):
            landed = digest(self.arena.payload(pair.slot)[: pair.length])
            if fate in ("whole", "torn"):
                self.counts["restored"] += fate == "whole" and self.arena.layout.below_readers(pair.source_slot)
                moved.append(Moved(pair.slot, landed))
            elif fate == "fails":
                moved.append(Moved(pair.slot, None, TransferFault.FAILED))
            elif fate == "lost":
                moved.append(Moved(pair.slot, None, TransferFault.PEER_LOST))
            else:
                early = fate == "early"
                moved.append(
                    Moved(pair.slot, landed if early else None, None if early else TransferFault.TIMED_OUT, quiet=False)
                )
                late.append(pair)
        self.tell(TransferDone(effect.token, tuple(moved)))
        if late:
            self.queue.after(self.rng.uniform(0.05, 2.0), self._land_late, effect, late)

    def _land_late(self, effect: StartTransfer, late: list[Pair]) -> None:
        """What was given up arrives after all, whatever lies there by now; only then is it quiet."""
        source = self.peer(effect.source, effect.incarnation)
        if self.alive:
            for pair in late:
                if source is not None:
                    self._land(source, pair, 0)
                    self._land(source, pair, 1)
                else:
                    self.arena.payload(pair.slot)[: pair.length // 2] = 0xA5
            self.tell(TransferQuiet(effect.token))

    def digest_slots(self, effect: DigestSlots) -> None:
        self.queue.after(self.rng.uniform(0.0005, 0.01), self._digested, effect)

    def _digested(self, effect: DigestSlots) -> None:
        if self.alive:
            self.tell(Digested(effect.token, tuple(digest(self.arena.content(slot)) for slot in effect.slots)))

    # --- disk ----------------------------------------------------------------------------------

    @property
    def owned(self) -> bool:
        """Whether the disk is this life's."""
        return self.disk.incarnation == self.incarnation

    def disk_fault(self) -> bool:
        """Whether one more operation on a disk, or the store, meets a fault."""
        return not self.calm and self.rng.random() < self.chance.disk_fault

    def write(self, effect: WriteExtent) -> None:
        """Bytes are taken in two pieces; a full disk takes nothing, a torn write claims that it did."""
        refused = self.disk.refused if self.owned else Reason.DISK_UNAVAILABLE
        if refused is None and self.disk_fault():
            refused = self.rng.choice((Reason.DISK_FULL, Reason.DISK_UNAVAILABLE, None))
            if refused is None:
                self.queue.after(self.rng.uniform(0.01, 0.1), self._written, effect, self._take(effect), True)
                return
        if refused is not None:
            self.queue.after(self.rng.uniform(0.005, 0.05), self.tell, DiskWritten(effect.token, refused))
            return
        self.queue.after(self.rng.uniform(0.01, 0.3), self._written, effect, self._take(effect), False)

    def _take(self, effect: WriteExtent) -> list[bytes]:
        return [
            self.arena.payload(slot)[: entry.length // 2].tobytes()
            for entry, slot in zip(effect.entries, effect.slots, strict=True)
        ]

    def _written(self, effect: WriteExtent, first: list[bytes], torn: bool) -> None:
        if not self.alive or not self.owned:
            return
        entries = []
        for number, (entry, slot) in enumerate(zip(effect.entries, effect.slots, strict=True)):
            rest = self.arena.payload(slot)[entry.length // 2 : entry.length].tobytes()
            if torn:
                rest = bytes(len(rest))
            whole = bytearray((bytes(len(first[number])) if torn and number else first[number]) + rest)
            entries.append((entry, whole))
        self.disk.extents[effect.extent] = entries
        if self.store is not None:
            self.store.written(effect.extent)
        self.tell(DiskWritten(effect.token, None))

    def read(self, effect: ReadExtent) -> None:
        self.queue.after(self.rng.uniform(0.002, 0.05), self._read_piece, effect, 0)
        self.queue.after(self.rng.uniform(0.06, 0.25), self._read, effect)

    def _bytes_at(self, extent: int, number: int) -> bytearray | None:
        entries = self.disk.extents.get(extent, [])
        return entries[number][1] if number < len(entries) else None

    def _read_piece(self, effect: ReadExtent, piece: int) -> None:
        if not self.alive or not self.owned:
            return
        for extent, number, slot in effect.reads:
            content = self._bytes_at(extent, number)
            if content is not None:
                half = len(content) // 2
                part = slice(0, half) if piece == 0 else slice(half, len(content))
                self.arena.payload(slot)[part] = memoryview(content)[part]

    def _read(self, effect: ReadExtent) -> None:
        if not self.alive:
            return
        self._read_piece(effect, 1)
        restored = []
        for extent, number, slot in effect.reads:
            content = self._bytes_at(extent, number)
            refused = self.disk.refused if self.owned else Reason.DISK_UNAVAILABLE
            if refused is None and (content is None or self.disk_fault()):
                refused = Reason.RESTORE_FAILED
            if refused is None and content is not None:
                self.counts["restored"] += 1
                restored.append(Restored(slot, digest(self.arena.payload(slot)[: len(content)])))
            else:
                restored.append(Restored(slot, None, refused))
        self.tell(DiskRead(effect.token, tuple(restored)))

    def land(self, slot: int, content: bytearray) -> bytes:
        """Bytes that came, into a slot; the checksum of what lies there then."""
        self.arena.payload(slot)[: len(content)] = memoryview(content)
        return digest(self.arena.payload(slot)[: len(content)])

    def scrub(self, effect: ScrubExtent) -> None:
        self.queue.after(self.rng.uniform(0.02, 0.3), self._scrub, effect)

    def _scrub(self, effect: ScrubExtent) -> None:
        """Entries read again into memory that is thrown away; () where the disk is not there."""
        if not self.alive:
            return
        there = [self._bytes_at(effect.extent, number) for number in effect.entries]
        if not self.owned or self.disk.refused is not None or None in there:
            self.tell(ExtentScrubbed(effect.token, ()))
            return
        found = tuple(None if content is None or self.disk_fault() else digest(content) for content in there)
        self.counts["scrubbed"] += len(found)
        self.tell(ExtentScrubbed(effect.token, found))

    def delete(self, effect: DeleteExtent) -> None:
        if self.store is not None:
            self.store.delete(effect.extent)
        if self.owned:
            self.disk.extents.pop(effect.extent, None)

    def tell(self, event: Event) -> None:
        """An event for this life, while it lasts."""
        if self.alive:
            self.feed(event)
