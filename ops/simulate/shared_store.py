"""The store that all nodes share, in a simulated world, and what the driver of one life knows of it.

An object is put under a name that is given once, and stays as it was put: where the answer to a put is
lost, the next look finds it. The store may be away, slow, lose objects, and give other bytes than it took.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...fabric.effects import (
    DiskFound,
    DiskLost,
    DiskRead,
    DropLocal,
    ExtentEntry,
    ExtentUploaded,
    ReadExtent,
    RemoteState,
    Restored,
    UploadExtent,
)
from ...fabric.kinds import Reason

if TYPE_CHECKING:
    from .machine import Machine

Uid = tuple[str, int]
"""Who wrote an extent, and its number there: a name given once."""
Content = list[tuple[ExtentEntry, bytearray]]

STORE = "g4"
"""The place where it is: nodes may be cut off from it."""
OBJECTS_MAX = 10
"""What the store's cap leaves room for: the oldest go."""
LOOK_S = 1.7


@dataclass(slots=True)
class SharedStore:
    """What lies there, oldest first, whoever put it; ``ever``: what was put at any time."""

    objects: dict[Uid, Content] = field(default_factory=dict)
    ever: set[Uid] = field(default_factory=set)
    down: bool = False
    slow: bool = False

    def put(self, uid: Uid, content: Content) -> None:
        """Take an object, unless there is one of that name."""
        if uid in self.objects:
            return
        self.objects[uid] = [(entry, bytearray(held)) for entry, held in content]
        self.ever.add(uid)
        while len(self.objects) > OBJECTS_MAX:
            del self.objects[next(iter(self.objects))]


class StoreDriver:
    """One life's way to the store: it names extents, looks what is there, and moves bytes; it decides nothing."""

    def __init__(self, store: SharedStore, machine: Machine, holder: str, reachable: Callable[[], bool]) -> None:
        self.store = store
        self._machine = machine
        self._holder = holder
        self._reachable = reachable
        self._uids: dict[int, Uid] = {}
        self._numbers: dict[Uid, int] = {}
        self._known: set[Uid] = set()
        """What this life was told is there."""
        self._own: set[Uid] = set()
        """What it put there: nobody else deletes that."""
        self._found = 0
        self._refused: Reason | None = Reason.DISK_UNAVAILABLE
        for extent in machine.disk.extents:
            self.written(extent)

    def written(self, extent: int) -> None:
        """An extent of this holder's stands on its disk."""
        self._name(extent, (self._holder, extent))

    def _name(self, extent: int, uid: Uid) -> None:
        self._uids[extent], self._numbers[uid] = uid, extent

    def uid(self, extent: int) -> Uid | None:
        """The name of an extent; None for one that this life does not know."""
        return self._uids.get(extent)

    @property
    def _works(self) -> bool:
        return not self.store.down and self._reachable()

    def _latency_s(self) -> float:
        return self._machine.rng.uniform(0.01, 0.2) * (15 if self.store.slow and not self._machine.calm else 1)

    def _become(self, refused: Reason | None) -> None:
        if refused is not self._refused:
            self._refused = refused
            self._machine.tell(RemoteState(refused))

    # --- looking -------------------------------------------------------------------------------

    def look(self) -> None:
        """List the store again and again; tell what came and went, and whether it works."""
        machine = self._machine
        if not machine.alive:
            return
        machine.queue.after(machine.rng.uniform(0.8, 1.2) * LOOK_S, self.look)
        if not self._works:
            self._become(Reason.DISK_UNAVAILABLE)
            return
        self._lost([uid for uid in self._known if uid not in self.store.objects])
        for uid, content in list(self.store.objects.items()):
            if uid not in self._known:
                self._known.add(uid)
                self._tell_of(uid, content)
        self._become(None)

    def _tell_of(self, uid: Uid, content: Content) -> None:
        number = self._numbers.get(uid)
        if number is not None:
            self._machine.tell(ExtentUploaded(number))
            return
        self._found += 1
        self._name(self._found, uid)
        entries = tuple((self._found, place, entry) for place, (entry, _) in enumerate(content))
        self._machine.tell(DiskFound(entries, remote=True))

    def _lost(self, uids: list[Uid]) -> None:
        self._known.difference_update(uids)
        numbers = tuple(self._numbers[uid] for uid in uids if uid in self._numbers)
        if numbers:
            self._machine.tell(DiskLost(numbers, remote=True))

    # --- effects -------------------------------------------------------------------------------

    def upload(self, effect: UploadExtent) -> None:
        self._machine.queue.after(self._latency_s(), self._put, effect.extent, self._uids.get(effect.extent))

    def _put(self, extent: int, uid: Uid | None) -> None:
        """A put that failed may have got through all the same; then the store counts as away until the next look."""
        machine = self._machine
        content = machine.disk.extents.get(extent) if machine.owned else None
        if content is None or uid is None or not self._works:
            machine.tell(ExtentUploaded(extent, Reason.DISK_UNAVAILABLE))
            if not self._works:
                self._become(Reason.DISK_UNAVAILABLE)
            return
        fault = machine.disk_fault()
        if not fault or machine.rng.random() < 0.5:
            self.store.put(uid, content)
        if fault:
            machine.counts["uploads whose answer was lost"] += uid in self.store.objects
            machine.tell(ExtentUploaded(extent, Reason.DISK_UNAVAILABLE))
            self._become(Reason.DISK_UNAVAILABLE)
            return
        machine.counts["uploaded"] += 1
        self._known.add(uid)
        self._own.add(uid)
        machine.tell(ExtentUploaded(extent))

    def delete(self, extent: int) -> None:
        """Nobody refers to it: what this life put there goes, what others did is theirs."""
        uid = self._uids.pop(extent, None)
        if uid is None:
            return
        del self._numbers[uid]
        if uid in self._own:
            self._machine.queue.after(self._latency_s(), self._remove, uid)

    def _remove(self, uid: Uid) -> None:
        if self._machine.alive and self._works:
            self.store.objects.pop(uid, None)

    def drop_local(self, effect: DropLocal) -> None:
        if self._machine.owned:
            self._machine.disk.extents.pop(effect.extent, None)

    def read(self, effect: ReadExtent) -> None:
        self._machine.queue.after(self._latency_s(), self._read, effect)

    def _read(self, effect: ReadExtent) -> None:
        """Whole blocks into their slots; what the store says of itself comes before the answer."""
        machine = self._machine
        if not machine.alive:
            return
        works = self._works and not machine.disk_fault()
        uids = {extent: self._uids.get(extent) for extent, _, _ in effect.reads}
        restored = []
        for extent, number, slot in effect.reads:
            uid = uids[extent]
            content = self.store.objects.get(uid) if uid is not None else None
            if works and content is not None:
                machine.counts["restored"] += 1
                machine.counts["restored from the store"] += 1
                restored.append(Restored(slot, machine.land(slot, content[number][1])))
            else:
                restored.append(Restored(slot, None, Reason.RESTORE_FAILED if works else Reason.DISK_UNAVAILABLE))
        if works:
            self._lost([uid for uid in uids.values() if uid in self._known and uid not in self.store.objects])
        else:
            self._become(Reason.DISK_UNAVAILABLE)
        machine.tell(DiskRead(effect.token, tuple(restored)))
