"""Faults waiting for operations, and the simulated disk of one holder."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...fabric.effects import ExtentEntry
from ...transport.damage import damage
from .story import Fault, How


@dataclass(slots=True)
class Faults:
    """What the next operations at one node meet, by how many of them."""

    left: dict[Fault, int] = field(default_factory=dict)
    loads: dict[tuple[int, int], int] = field(default_factory=dict)
    """(group, index) -> how many more loads of it fail."""

    def inject(self, fault: Fault, times: int, load: tuple[int, int] | None) -> None:
        if load is not None:
            self.loads[load] = times
        elif fault is Fault.LOAD_FAIL:
            self.loads.clear()
        else:
            self.left[fault] = times

    def meets(self, fault: Fault) -> bool:
        """Whether this operation meets the fault; uses one up."""
        left = self.left.get(fault, 0)
        if left:
            self.left[fault] = left - 1
        return left > 0

    def load_fails(self, group: int, index: int) -> bool:
        left = self.loads.get((group, index), 0)
        if left:
            self.loads[group, index] = left - 1
        return left > 0


@dataclass(slots=True)
class Extent:
    """One extent: its index, which stands at its front, and the bytes of each entry as they lie there."""

    entries: tuple[ExtentEntry, ...]
    data: list[bytearray]


@dataclass(slots=True)
class Disk:
    """What one holder has on its machine's disk; it outlives the holder."""

    extents: dict[int, Extent] = field(default_factory=dict)

    def found(self) -> list[tuple[int, int, ExtentEntry]]:
        """(extent, entry number, entry) of everything, the newest extent first."""
        return [
            (number, place, entry)
            for number, extent in reversed(self.extents.items())
            for place, entry in enumerate(extent.entries)
        ]

    def write(self, number: int, entries: tuple[ExtentEntry, ...], data: list[bytearray], *, torn: bool) -> None:
        if torn and data:
            data = [data[0][: len(data[0]) // 2], *(bytearray() for _ in data[1:])]
        self.extents[number] = Extent(entries, data)

    def read(self, number: int, place: int) -> bytearray | None:
        extent = self.extents.get(number)
        return None if extent is None else extent.data[place]

    def delete(self, number: int) -> None:
        self.extents.pop(number, None)

    def corrupt(self, group: int, digest: bytes, how: How) -> None:
        for extent in self.extents.values():
            for entry, data in zip(extent.entries, extent.data, strict=True):
                if entry.group == group and entry.digest == digest:
                    damaged = damage(bytes(data), how)
                    data[:] = damaged[:-1] if how is How.TRUNCATE else damaged
