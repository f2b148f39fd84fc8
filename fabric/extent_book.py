"""What lies on the local disk: which objects each extent still serves, and how many bytes it takes.

An extent goes once no object refers to it, or when room is needed: first those of retired weights,
then those longest not read. The driver's file sizes count where it told them, else what the extent
can take at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from .books import Obj
from .kinds import ObjectKind
from .lifecycle import State


@dataclass(slots=True)
class Extent:
    """One file: the objects it serves by entry number, its bytes, and when it was last used."""

    live: dict[int, Obj]
    file_bytes: int
    last_use_s: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether an object of it is on its way to memory."""
        return any(obj.state is State.RESTORING for obj in self.live.values())


class ExtentBook:
    """All extents of one holder's disk, at most ``bytes_max`` of them (None: the disk is the limit)."""

    def __init__(self, bytes_max: int | None) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self.bytes_of_kind: Counter[ObjectKind] = Counter()
        """Unpacked bytes of what the extents still serve."""
        self._extents: dict[int, Extent] = {}

    def __contains__(self, extent: int) -> bool:
        return extent in self._extents

    def __len__(self) -> int:
        return len(self._extents)

    def add(self, number: int, objects: dict[int, Obj], file_bytes: int, now: float) -> None:
        self._extents[number] = Extent(objects, file_bytes, now)
        self.used_bytes += file_bytes
        for obj in objects.values():
            self.bytes_of_kind[obj.kind] += obj.length

    def used(self, number: int, now: float) -> None:
        extent = self._extents.get(number)
        if extent is not None:
            extent.last_use_s = now

    def taken_over(self, obj: Obj) -> None:
        """Another object has this one's entry from here on: of the same key and length."""
        assert obj.on_disk is not None
        number, entry = obj.on_disk
        if number in self._extents:
            self._extents[number].live[entry] = obj

    def dropped(self, number: int, entry: int) -> bool:
        """An object refers to this entry no more; True where that was the extent's last."""
        extent = self._extents.get(number)
        if extent is None:
            return False
        obj = extent.live.pop(entry, None)
        if obj is not None:
            self.bytes_of_kind[obj.kind] -= obj.length
        if extent.live:
            return False
        self.gone(number)
        return True

    def gone(self, number: int) -> list[Obj]:
        """The file is no more: the objects that it served."""
        extent = self._extents.pop(number, None)
        if extent is None:
            return []
        self.used_bytes -= extent.file_bytes
        for obj in extent.live.values():
            self.bytes_of_kind[obj.kind] -= obj.length
        return list(extent.live.values())

    def lacks(self, nbytes: int) -> bool:
        """Whether that many bytes more would pass the cap."""
        return self.bytes_max is not None and self.used_bytes + nbytes > self.bytes_max

    def victims(self, nbytes: int, retired: Collection[bytes]) -> list[int] | None:
        """Which extents must go so that ``nbytes`` fit; None where no choice makes that room."""
        assert self.bytes_max is not None
        excess = self.used_bytes + nbytes - self.bytes_max
        order = sorted(
            ((not _all_of(e.live.values(), retired), e.last_use_s, n) for n, e in self._extents.items() if not e.busy),
        )
        chosen: list[int] = []
        for _, _, number in order:
            if excess <= 0:
                break
            chosen.append(number)
            excess -= self._extents[number].file_bytes
        return chosen if excess <= 0 else None


def _all_of(objects: Iterable[Obj], weights: Collection[bytes]) -> bool:
    return all(obj.weights in weights for obj in objects)
