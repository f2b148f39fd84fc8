"""What lies on the local disk and in the shared store: which objects each extent serves, and what it takes here.

An extent goes once no object refers to it, or when room is needed: first those of retired weights,
then those longest not read. One that is in the store as well leaves the disk only. The driver's file
sizes count where it told them, else what the extent can take at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from .kinds import ObjectKind, Tier
from .lifecycle import State
from .objects import Obj


@dataclass(slots=True)
class Extent:
    """One extent: the objects it serves by entry number, its bytes on the local disk, and when it was last used."""

    live: dict[int, Obj]
    file_bytes: int
    last_use_s: float = 0.0
    local: bool = True
    remote: bool = False
    """Whether it is in the store that all nodes share."""
    owners: frozenset[tuple[bytes, str]] = frozenset()
    """Namespace and tenant of everything that was ever in it."""
    holed: bool = False
    """Whether bytes lie in it that it serves no more."""

    @property
    def busy(self) -> bool:
        """Whether an object of it is on its way to memory."""
        return any(obj.state is State.RESTORING for obj in self.live.values())


class ExtentBook:
    """All extents of one holder's disk, at most ``bytes_max`` of them (None: the disk is the limit)."""

    def __init__(self, bytes_max: int | None) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self.bytes_held: Counter[tuple[ObjectKind, Tier]] = Counter()
        """Unpacked bytes of what the extents still serve, by kind, and by where the nearest copy lies."""
        self._extents: dict[int, Extent] = {}

    def __contains__(self, extent: int) -> bool:
        return extent in self._extents

    def __len__(self) -> int:
        return len(self._extents)

    def add(self, number: int, objects: dict[int, Obj], file_bytes: int, now: float) -> None:
        """An extent on the local disk."""
        self._add(number, Extent(objects, file_bytes, now))

    def add_remote(self, number: int, objects: dict[int, Obj]) -> None:
        """An extent that only the store has."""
        self._add(number, Extent(objects, 0, local=False, remote=True))

    def _add(self, number: int, extent: Extent) -> None:
        extent.owners = frozenset((obj.namespace, obj.tenant) for obj in extent.live.values())
        self._extents[number] = extent
        self.used_bytes += extent.file_bytes
        self._count(extent, 1)

    def _count(self, extent: Extent, sign: int) -> None:
        for obj in extent.live.values():
            self.bytes_held[obj.kind, _tier(extent)] += sign * obj.length

    def only_remote(self, number: int) -> bool:
        """Whether the store has it and the local disk does not."""
        extent = self._extents.get(number)
        return extent is not None and not extent.local

    def is_remote(self, number: int) -> bool:
        """Whether the store has it."""
        extent = self._extents.get(number)
        return extent is not None and extent.remote

    def file_bytes(self, number: int) -> int:
        """Bytes of an extent's file on the local disk; 0 for one that is not there."""
        extent = self._extents.get(number)
        return 0 if extent is None else extent.file_bytes

    def not_remote(self) -> list[int]:
        """What lies on the local disk alone."""
        return [number for number, extent in self._extents.items() if not extent.remote]

    def local(self) -> list[int]:
        """What lies on the local disk."""
        return [number for number, extent in self._extents.items() if extent.local]

    def live(self, number: int) -> Mapping[int, Obj]:
        """The objects that an extent serves, by entry number; none for one that is nowhere."""
        extent = self._extents.get(number)
        return {} if extent is None else extent.live

    def uploaded(self, number: int) -> None:
        """The store has it too."""
        extent = self._extents.get(number)
        if extent is not None:
            extent.remote = True

    def gone_from(self, number: int, *, remote: bool) -> list[Obj]:
        """The disk's copy (or the store's) is no more; the objects that nothing serves now."""
        extent = self._extents.get(number)
        if extent is None or not (extent.remote if remote else extent.local):
            return []
        if not (extent.local if remote else extent.remote):
            return self.gone(number)
        self._count(extent, -1)
        if remote:
            extent.remote = False
        else:
            extent.local = False
            self.used_bytes -= extent.file_bytes
            extent.file_bytes = 0
        self._count(extent, 1)
        return []

    def used(self, number: int, now: float) -> None:
        extent = self._extents.get(number)
        if extent is not None:
            extent.last_use_s = now

    def last_used(self) -> Iterator[Obj]:
        """What extents serve, extent by extent: the last used first, within one by position."""
        for _, extent in sorted(self._extents.items(), key=lambda item: (-item[1].last_use_s, item[0])):
            yield from sorted(extent.live.values(), key=lambda obj: obj.position)

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
        extent.holed = True
        obj = extent.live.pop(entry, None)
        if obj is not None:
            self.bytes_held[obj.kind, _tier(extent)] -= obj.length
        if extent.live:
            return False
        self.gone(number)
        return True

    def with_bytes_of(
        self, matches: Callable[[Obj], bool], owned: Callable[[bytes, str], bool], *, chain: bool
    ) -> list[int]:
        """Extents that serve, or may still bear, bytes of what matches; ``owned``: by namespace and tenant.

        ``chain``: only part of a namespace is meant, so an extent that serves all it ever had is judged by what it serves.
        """
        return [
            number
            for number, extent in self._extents.items()
            if any(owned(*owner) for owner in extent.owners)
            and (not chain or extent.holed or any(matches(obj) for obj in extent.live.values()))
        ]

    def gone(self, number: int) -> list[Obj]:
        """The file is no more: the objects that it served."""
        extent = self._extents.pop(number, None)
        if extent is None:
            return []
        self.used_bytes -= extent.file_bytes
        self._count(extent, -1)
        return list(extent.live.values())

    def lacks(self, nbytes: int) -> bool:
        """Whether that many bytes more would pass the cap."""
        return self.bytes_max is not None and self.used_bytes + nbytes > self.bytes_max

    def victims(self, nbytes: int, retired: Collection[bytes]) -> list[int] | None:
        """Which extents must leave the disk so that ``nbytes`` fit; None where no choice makes that room."""
        assert self.bytes_max is not None
        excess = self.used_bytes + nbytes - self.bytes_max
        order = sorted(
            (
                (not _all_of(e.live.values(), retired), e.last_use_s, n)
                for n, e in self._extents.items()
                if e.local and not e.busy
            ),
        )
        chosen: list[int] = []
        for _, _, number in order:
            if excess <= 0:
                break
            chosen.append(number)
            excess -= self._extents[number].file_bytes
        return chosen if excess <= 0 else None


def _tier(extent: Extent) -> Tier:
    return Tier.G3 if extent.local else Tier.G4


def _all_of(objects: Iterable[Obj], weights: Collection[bytes]) -> bool:
    return all(obj.weights in weights for obj in objects)
