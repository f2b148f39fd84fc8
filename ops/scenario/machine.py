"""One simulated holder's machine: memory, the way bytes reach it, and a disk that outlives the holder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash

from ...fabric.arena import Arena, ArenaLayout
from ...fabric.effects import Moved, ReadExtent, Restored, StartTransfer, TransferFault, WriteExtent
from ...fabric.holder import HolderCore
from ...fabric.kinds import Reason
from ...transport.damage import damage
from .faults import Disk, Faults
from .story import Fault, How
from .world import Books, Seat, Victim

Late = list[tuple[int, bytes]]
"""Bytes that arrive after their transfer was said to be over, by slot."""


@dataclass(slots=True)
class Place:
    """What of a holder outlives its lives: seat, pools, faults to come, disk, count of lives."""

    node: str
    seat: Seat
    layout: ArenaLayout
    faults: Faults
    slab_shares: tuple[int, ...] = ()
    disk: Disk = field(default_factory=Disk)
    incarnation: int = 0


@dataclass(slots=True, eq=False)
class Life:
    """One holder's life: its core, its memory, and what its core asks to be done."""

    place: Place
    core: HolderCore
    arena: Arena
    incarnation: int
    failed_loads: set[tuple[int, int]] = field(default_factory=set)
    """(slot, version) of every load that met its fault."""

    @property
    def node(self) -> str:
        return self.place.node

    # --- links ---------------------------------------------------------------------------------

    def transfer(self, effect: StartTransfer, source: Life | None) -> tuple[tuple[Moved, ...], Late]:
        """Read from a source that can be reached (None: none can); what landed, and what lands later."""
        if source is self:
            return self._within(effect), []
        faults = self.place.faults
        fault: TransferFault | None = None
        if source is None or source.incarnation != effect.incarnation:
            fault = TransferFault.PEER_LOST
        elif faults.meets(Fault.TRANSFER_FAIL):
            fault = TransferFault.FAILED
        torn = fault is None and faults.meets(Fault.TRANSFER_TORN)
        early = fault is None and not torn and faults.meets(Fault.NOTIFY_EARLY)
        moved = []
        late: Late = []
        for pair in effect.pairs:
            if fault is not None or source is None or self._load_fails(pair.slot):
                moved.append(Moved(pair.slot, None, fault or TransferFault.FAILED))
                continue
            data = source.arena.payload(pair.source_slot)[: pair.length].tobytes()
            here = self.arena.payload(pair.slot)[: pair.length]
            if early:
                late.append((pair.slot, data))
            else:
                landed = len(data) // 2 if torn else len(data)
                here[:landed] = np.frombuffer(data[:landed], dtype=np.uint8)
            moved.append(Moved(pair.slot, xxhash.xxh3_128_digest(here.data)))
        return tuple(moved), late

    def _within(self, effect: StartTransfer) -> tuple[Moved, ...]:
        """From slot to slot of this memory: no link's faults, but what cannot be restored is not."""
        moved = []
        for pair in effect.pairs:
            if self.arena.layout.below_readers(pair.source_slot) and self._load_fails(pair.slot):
                moved.append(Moved(pair.slot, None, TransferFault.FAILED))
                continue
            here = self.arena.payload(pair.slot)[: pair.length]
            here[:] = self.arena.payload(pair.source_slot)[: pair.length]
            moved.append(Moved(pair.slot, xxhash.xxh3_128_digest(here.data)))
        return tuple(moved)

    def land(self, late: Late) -> None:
        """What was announced too early arrives."""
        for slot, data in late:
            self.arena.payload(slot)[: len(data)] = np.frombuffer(data, dtype=np.uint8)

    def _load_fails(self, slot: int) -> bool:
        """Whether this load meets its fault. A retry into the same slot is the same load and fails as well."""
        obj = self.core.ctx.books.owner[slot]
        if obj is None:
            return False
        load = (slot, obj.version)
        index = obj.position // self.core.ctx.model.groups[obj.group].unit_tokens - 1
        if load not in self.failed_loads and self.place.faults.load_fails(obj.group, index):
            self.failed_loads.add(load)
        return load in self.failed_loads

    # --- disk ----------------------------------------------------------------------------------

    def write_extent(self, effect: WriteExtent) -> Reason | None:
        """Write an extent; why nothing was written."""
        faults = self.place.faults
        if faults.meets(Fault.DISK_OPEN_FAILS) or faults.meets(Fault.DISK_READ_ONLY):
            return Reason.DISK_UNAVAILABLE
        if faults.meets(Fault.DISK_FULL):
            return Reason.DISK_FULL
        data = [bytearray(self.arena.content(slot)) for slot in effect.slots]
        self.place.disk.write(effect.extent, effect.entries, data, torn=faults.meets(Fault.DISK_TORN_WRITE))
        return None

    def read_extent(self, effect: ReadExtent) -> tuple[Restored, ...]:
        """Read entries into their slots, as they lie on the disk."""
        faults = self.place.faults
        if faults.meets(Fault.DISK_OPEN_FAILS):
            return tuple(Restored(slot, None, Reason.DISK_UNAVAILABLE) for _, _, slot in effect.reads)
        if faults.meets(Fault.DISK_READ_ERROR):
            return tuple(Restored(slot, None, Reason.RESTORE_FAILED) for _, _, slot in effect.reads)
        faults.meets(Fault.DISK_SLOW)  # a virtual clock does not notice
        spoilt: dict[int, How] = {}
        if faults.meets(Fault.DISK_SHORT_READ):
            spoilt[effect.reads[-1][2]] = How.TORN
        if faults.meets(Fault.DISK_FLIPPED):
            spoilt[effect.reads[0][2]] = How.FLIP
        return tuple(self._restore(extent, entry, slot, spoilt.get(slot)) for extent, entry, slot in effect.reads)

    def _restore(self, extent: int, entry: int, slot: int, spoilt: How | None) -> Restored:
        data = self.place.disk.read(extent, entry)
        if data is None or self._load_fails(slot):
            return Restored(slot, None, Reason.RESTORE_FAILED)
        if spoilt is not None:
            data = bytearray(damage(bytes(data), spoilt))
        self.arena.payload(slot)[: len(data)] = np.frombuffer(bytes(data), dtype=np.uint8)
        return Restored(slot, xxhash.xxh3_128_digest(data))

    # --- behind the core's back ----------------------------------------------------------------

    def corrupt(self, victim: Victim, how: How) -> None:
        """Damage every copy in memory, those that only an older lease holds included."""
        for slot, obj in [*enumerate(self.core.ctx.books.owner), *self.core.disk.host.pools.copies().items()]:
            if obj is not None and obj.group == victim.group and obj.digest == victim.digest:
                payload = self.arena.payload(slot)[: obj.length]
                payload[:] = np.frombuffer(damage(payload.tobytes(), how), dtype=np.uint8)

    def count(self, books: Books) -> None:
        """Add this holder's pins, and slots that nobody answers for."""
        kept = self.core.ctx.books
        books.pins += sum(1 for obj in kept.owner if obj is not None and obj.pins)
        for pool in kept.pools.values():
            accounted = {*pool.free, *pool.closed} | set(self._owned(pool.first, pool.slots))
            books.slots_lost += pool.capacity - len(accounted)
        books.slots_lost += self.core.disk.host.pools.lost()

    def _owned(self, first: int, slots: int) -> Iterator[int]:
        for slot in range(first, first + slots):
            obj = self.core.ctx.books.owner[slot]
            if obj is not None and obj.slot == slot:
                yield slot
