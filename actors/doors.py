"""What a rehearsal may do to the transfers and the memory of a holder: only where the spec says ``testing``.

The faults have the scenario format's names. One ``StartTransfer`` of the core is one operation; what it
meets is decided when it starts, and the bytes really move before they are spoilt.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from ..fabric.effects import DiskRead, Event, Moved, ReadExtent, Restored, StartTransfer, TransferFault
from ..fabric.holder import HolderCore
from ..fabric.kinds import FabricError, Reason
from ..transport.damage import damage
from ..transport.digest import checksum

LOAD_FAIL, TRANSFER_FAIL, TRANSFER_TORN, NOTIFY_EARLY = "load_fail", "transfer_fail", "transfer_torn", "notify_early"
TRANSFER_FAULTS = (TRANSFER_FAIL, TRANSFER_TORN, NOTIFY_EARLY)


@dataclass(frozen=True, slots=True)
class Spoil:
    """What one transfer meets. ``failing``: destination slots whose objects cannot be loaded."""

    fault: TransferFault | None = None
    torn: bool = False
    early: bool = False
    failing: frozenset[int] = frozenset()


UNSPOILT = Spoil()


@dataclass(frozen=True, slots=True)
class Late:
    """Bytes that arrive in a slot after their transfer was said to be over."""

    slot: int
    content: bytes


@dataclass(slots=True)
class TransferDoor:
    """The faults that wait for one holder's transfers, and its memory to damage."""

    core: HolderCore
    left: dict[str, int] = field(default_factory=dict)
    unrestored: dict[int, frozenset[int]] = field(default_factory=dict)
    """Disk reads under way, by token: the slots whose objects cannot be restored."""
    loads: dict[tuple[int, int], int] = field(default_factory=dict)
    failed: set[tuple[int, int]] = field(default_factory=set)
    """(slot, version) of every load that met its fault: a retry into the same slot is the same load."""

    def inject(self, fault: str, times: int, load: tuple[int, int] | None) -> None:
        """The next ``times`` operations meet it. Raises FabricError for a fault that is none of memory's or links'."""
        if fault == LOAD_FAIL and load is not None:
            self.loads[load] = times
        elif fault == LOAD_FAIL and times == 0:
            self.loads.clear()
        elif fault in TRANSFER_FAULTS and load is None:
            self.left[fault] = times
        else:
            raise FabricError(f"fault: {fault!r} cannot be injected here with load={load}")

    def waiting(self) -> list[tuple[str, int | None, int | None, int]]:
        """(fault, group, index, operations that will still meet it)."""
        loads = [(LOAD_FAIL, group, index, left) for (group, index), left in self.loads.items()]
        return [*((fault, None, None, left) for fault, left in self.left.items()), *loads]

    def _meets(self, fault: str) -> bool:
        left = self.left.get(fault, 0)
        if left:
            self.left[fault] = left - 1
        return left > 0

    def load_fails(self, slot: int) -> bool:
        """Whether what is to be loaded into a slot cannot be; the first try uses one failure up."""
        ctx = self.core.ctx
        obj = ctx.books.owner[slot]
        if obj is None:
            return False
        load = (obj.group, obj.position // ctx.model.groups[obj.group].unit_tokens - 1)
        left = self.loads.get(load, 0)
        if left and (slot, obj.version) not in self.failed:
            self.loads[load] = left - 1
            self.failed.add((slot, obj.version))
        return (slot, obj.version) in self.failed

    def next(self, effect: StartTransfer, unreachable: AbstractSet[str]) -> Spoil:
        """What this transfer meets."""
        if effect.source in unreachable:
            return Spoil(TransferFault.PEER_LOST)
        if self._meets(TRANSFER_FAIL):
            return Spoil(TransferFault.FAILED)
        torn = self._meets(TRANSFER_TORN)
        early = not torn and self._meets(NOTIFY_EARLY)
        return Spoil(None, torn, early, frozenset(p.slot for p in effect.pairs if self.load_fails(p.slot)))

    def failing_copies(self, effect: StartTransfer) -> frozenset[int]:
        """What of a copy within this memory cannot be restored from host memory."""
        below = self.core.ctx.arena.layout.below_readers
        return frozenset(p.slot for p in effect.pairs if below(p.source_slot) and self.load_fails(p.slot))

    def before_restore(self, effect: ReadExtent) -> None:
        """Decide what of this read from disk cannot be restored."""
        failing = frozenset(slot for _, _, slot in effect.reads if self.load_fails(slot))
        if failing:
            self.unrestored[effect.token] = failing

    def after_restore(self, event: Event) -> Event:
        """An event of the disk's, with what cannot be restored reported so."""
        if not isinstance(event, DiskRead):
            return event
        failing = self.unrestored.pop(event.token, frozenset())
        return DiskRead(
            event.token,
            tuple(Restored(r.slot, None, Reason.RESTORE_FAILED) if r.slot in failing else r for r in event.restored),
        )

    def spoil(
        self, spoil: Spoil, landed: tuple[Moved, ...], lengths: Mapping[int, int]
    ) -> tuple[tuple[Moved, ...], list[Late]]:
        """Spoil what landed: the results to report, with honest checksums of wrong bytes, and what arrives late."""
        if not (spoil.torn or spoil.early):
            return landed, []
        moved = []
        late = []
        for one in landed:
            length = lengths[one.slot]
            if one.checksum is None or not length:
                moved.append(one)
                continue
            view = self.core.ctx.arena.payload(one.slot)[:length]
            if spoil.early:
                late.append(Late(one.slot, view.tobytes()))
            np.invert(view[length // 2 :], out=view[length // 2 :])
            moved.append(Moved(one.slot, checksum(view)))
        return tuple(moved), late

    def land(self, late: list[Late]) -> None:
        """The late bytes arrive."""
        for one in late:
            view = self.core.ctx.arena.payload(one.slot)[: len(one.content)]
            np.copyto(view, np.frombuffer(one.content, dtype=np.uint8))

    def corrupt(self, group: int, digest: bytes, how: str) -> None:
        """Damage every copy of an object in this memory."""
        ctx = self.core.ctx
        for slot, obj in [*enumerate(ctx.books.owner), *self.core.disk.host.pools.copies().items()]:
            if obj is not None and obj.group == group and obj.digest == digest:
                payload = ctx.arena.payload(slot)[: obj.length]
                np.copyto(payload, np.frombuffer(damage(payload.tobytes(), how), dtype=np.uint8))
