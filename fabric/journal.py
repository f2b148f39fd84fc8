"""The last things a holder decided, in bounded memory: for its log lines, and for ``kvfabric record``.

On the way of an acquire an entry is one append; nothing is formatted here. Entries bear digests, never
token ids or salts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .messages import Acquire, Answer
from .objects import Obj

ENTRIES_MAX = 4096
WEIGHT_MAX = 1 << 23
"""Bound of the entries' weight together: prompt tokens of acquires (two bytes of digest each, at most), 16 for each object."""


@dataclass(slots=True)
class Answered:
    """An acquire was answered. Not frozen: one is made on the way of every acquire, in a third of the time."""

    at_s: float
    request: Acquire
    answer: Answer

    @property
    def weight(self) -> int:
        return self.request.prompt.n


class Place(NamedTuple):
    """One object, by what names it: what happened to it may since have freed the object itself."""

    group: int
    shard: int
    position: int
    digest: bytes
    revision: int


PlainPlace = tuple[int, int, int, bytes, int]
"""A :class:`Place` as it is noted: one is made of every object that is stored or dropped, in a third of the time."""


@dataclass(slots=True)
class Happened:
    """Something happened to objects: ``stored`` by a commit, ``dropped`` from memory, ``demoted`` to a tier."""

    at_s: float
    what: str
    places: tuple[PlainPlace, ...]

    @property
    def objects(self) -> tuple[Place, ...]:
        return tuple(Place(*place) for place in self.places)

    @property
    def weight(self) -> int:
        return 16 * len(self.places)


@dataclass(frozen=True, slots=True)
class Released:
    """A lease was given back; ``reused`` tokens of it were reported."""

    at_s: float
    lease: int
    reused: int

    @property
    def weight(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Weights:
    """Other weights were put in force."""

    at_s: float
    digest: bytes

    @property
    def weight(self) -> int:
        return 1


Entry = Answered | Happened | Released | Weights


class Journal:
    """A ring of entries, oldest out first; ``total`` numbers the next one."""

    def __init__(self, entries_max: int = ENTRIES_MAX, weight_max: int = WEIGHT_MAX) -> None:
        self._entries: deque[Entry] = deque()
        self._entries_max = entries_max
        self._weight_max = weight_max
        self._weight = 0
        self.total = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def add(self, entry: Entry) -> None:
        """Keep it; what is too heavy for the ring alone is counted and not kept."""
        self.total += 1
        self._entries.append(entry)
        self._weight += entry.weight
        while len(self._entries) > self._entries_max or self._weight > self._weight_max:
            self._weight -= self._entries.popleft().weight

    def happened(self, at_s: float, what: str, objects: Iterable[Obj]) -> None:
        """Something happened to these objects; next to one of the same kind and time they are one entry."""
        places = tuple([(obj.group, obj.shard, obj.position, obj.digest, obj.revision) for obj in objects])
        last = self._entries[-1] if self._entries else None
        if isinstance(last, Happened) and (last.what, last.at_s) == (what, at_s):
            self._weight -= self._entries.pop().weight
            self.total -= 1
            places = last.places + places
        self.add(Happened(at_s, what, places))

    def since(self, number: int, most: int) -> tuple[Sequence[Entry], int]:
        """The entries from that number on, at most ``most`` of the newest, and how many were passed over."""
        fresh = self.total - number
        kept = min(fresh, len(self._entries), most)
        entries = list(self._entries)[len(self._entries) - kept :] if kept else []
        return entries, fresh - kept
