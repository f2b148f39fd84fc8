"""Whose restore goes next: turns by deadline with ageing, caps per kind, and the rate learned.

A *place* is the instant by which bytes are wanted, less what a priority is worth: the lowest place
is served first. A request without a deadline wants its bytes within ``PATIENCE_S`` of its coming,
so it overtakes everyone who comes later than that: nobody waits for ever.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from .kinds import ObjectKind
from .objects import Obj

PATIENCE_S = 60.0
"""By when a request that names no deadline wants its bytes, after it came."""
BACKGROUND_S = 60.0
"""How much longer what nobody waits for yet may take."""
LEARNING = 0.2
"""Weight of the newest measurement in a learned rate."""

Need = Mapping[tuple[int, int], int]
"""Slots to restore into, by group and shard."""


@dataclass(frozen=True, slots=True)
class RestoreLimit:
    """At most so many bytes and so many extents in flight from a tier, for one kind or (None) for all."""

    bytes_max: int
    extents_max: int
    kind: ObjectKind | None = None


@dataclass(frozen=True, slots=True)
class Behalf:
    """For whom a step acts: the exchange, and its place in line."""

    op: str = ""
    place_s: float = float("inf")


@dataclass(slots=True)
class Rate:
    """Bytes a second as measured, an exponential mean of what came while work was outstanding."""

    bytes_per_s: float
    samples: int = 0
    _last_s: float = float("-inf")

    def done(self, nbytes: int, since_s: float, now: float) -> float:
        """``nbytes`` asked for at ``since_s`` are here; what ran beside them counts from the last arrival.

        The seconds that counts for; 0 where it teaches nothing.
        """
        busy_s = now - max(since_s, self._last_s)
        self._last_s = now
        if busy_s <= 0 or nbytes <= 0:
            return 0.0
        self.samples += 1
        weight = max(LEARNING, 1 / self.samples)
        # The mean of seconds a byte, not of bytes a second: a burst out of a cache then counts for little.
        seconds = (1 - weight) / self.bytes_per_s + weight * busy_s / nbytes
        self.bytes_per_s = 1 / seconds
        return busy_s

    def seconds(self, nbytes: float) -> float:
        """How long that many bytes take."""
        return nbytes / self.bytes_per_s


class Where(Enum):
    """Where an object that waits is read from."""

    DISK = "disk"
    HOST = "host memory"
    STORE = "store"


class RestoreQueue:
    """Objects that wait to be read, by place within their kind, and what is being read of each kind.

    Those in host memory stand apart from those on disk: the latter may have to wait for the former to
    give their host slots back, so none of them stands before one.
    """

    def __init__(self, limits: Sequence[RestoreLimit]) -> None:
        self.limits = tuple(limits)
        self._heaps: dict[tuple[ObjectKind, bool], list[tuple[float, int, Obj]]] = {}
        """By kind, and whether they lie in host memory."""
        self._waiting_bytes: dict[Where, Counter[float]] = {where: Counter() for where in Where}
        """By the second of its place."""
        self._where: dict[int, Where] = {}
        """Of each that waits."""
        self._bytes: Counter[ObjectKind] = Counter()
        self._extents: dict[ObjectKind, Counter[int]] = {}
        self._count = 0
        self._places: dict[int, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def place_s(self, obj: Obj) -> float:
        """The place of one that waits or is being read."""
        return self._places[id(obj)]

    def __iter__(self) -> Iterator[Obj]:
        for heap in self._heaps.values():
            yield from (obj for _, _, obj in heap)

    def put(self, obj: Obj, place_s: float, *, store: bool = False) -> None:
        """``store``: it is read from the store that all nodes share, not from the disk."""
        self._count += 1
        self._places[id(obj)] = place_s
        in_host = obj.below >= 0
        heapq.heappush(self._heaps.setdefault((obj.kind, in_host), []), (place_s, self._count, obj))
        where = self._where[id(obj)] = Where.HOST if in_host else Where.STORE if store else Where.DISK
        self._waiting_bytes[where][_second(place_s)] += obj.length

    def bytes_before(self, place_s: float) -> dict[Where, int]:
        """Bytes that wait with a place up to the end of that one's second.

        Kept by the second: every acquire that asks for what lies on a tier asks this, and thousands may wait.
        """
        last = _second(place_s)
        return {
            where: sum(n for second, n in waiting.items() if second <= last)
            for where, waiting in self._waiting_bytes.items()
        }

    def take(self, obj: Obj) -> None:
        """Let one step out of line."""
        del self._places[id(obj)]
        for in_host in (False, True):
            heap = self._heaps.get((obj.kind, in_host), [])
            for place_s, _, waiting in heap:
                if waiting is obj:
                    self._leaves(place_s, obj)
            heap[:] = [entry for entry in heap if entry[2] is not obj]
            heapq.heapify(heap)

    def hurry(self, obj: Obj, place_s: float) -> bool:
        """Let one that waits or is being read have this place, if it is the earlier; whether it did."""
        if self._places.get(id(obj), place_s) <= place_s:
            return False
        where = self._where.get(id(obj))
        if where is not None:
            self.take(obj)
            self.put(obj, place_s, store=where is Where.STORE)
        self._places[id(obj)] = place_s
        return True

    def _leaves(self, place_s: float, obj: Obj) -> None:
        waiting, second = self._waiting_bytes[self._where.pop(id(obj))], _second(place_s)
        waiting[second] -= obj.length
        if not waiting[second]:
            del waiting[second]

    def next(self, ready: Callable[[Obj], bool]) -> Obj | None:
        """The next object that is ready and no limit holds back, now counted as being read; None if there is none."""
        heads = [(heap[0], key) for key, heap in self._heaps.items() if heap]
        if len(heads) > 1:
            heads.sort(key=lambda head: head[0][:2])
        for (place_s, _, obj), key in heads:
            if not self._held_back(obj) and ready(obj):
                heapq.heappop(self._heaps[key])
                self._leaves(place_s, obj)
                self._charge(obj)
                return obj
        return None

    def _charge(self, obj: Obj) -> None:
        self._bytes[obj.kind] += obj.length
        if obj.on_disk is not None:
            self._extents.setdefault(obj.kind, Counter())[obj.on_disk[0]] += 1

    def arrived(self, obj: Obj, extent: int | None) -> None:
        """An object is being read no more. ``extent``: where it was read from."""
        del self._places[id(obj)]
        self._bytes[obj.kind] -= obj.length
        if extent is not None:
            extents = self._extents[obj.kind]
            extents[extent] -= 1
            if not extents[extent]:
                del extents[extent]

    def _held_back(self, obj: Obj) -> bool:
        for limit in self.limits:
            if limit.kind not in (None, obj.kind):
                continue
            kinds = [obj.kind] if limit.kind is not None else list(self._bytes)
            used = sum(self._bytes[kind] for kind in kinds)
            if used and used + obj.length > limit.bytes_max:
                return True
            reading = [extents for kind in kinds if (extents := self._extents.get(kind))]
            here = obj.on_disk[0] if obj.on_disk is not None else None
            if sum(map(len, reading)) < limit.extents_max or any(here in extents for extents in reading):
                continue
            if len(set().union(*reading)) >= limit.extents_max:
                return True
        return False


def _second(place_s: float) -> float:
    return place_s if math.isinf(place_s) else math.floor(place_s)


@dataclass(slots=True, eq=False)
class Turn:
    """Someone who may start restoring once there is room for its need, and its tenant ``may``."""

    need: Need
    place_s: float
    start: Callable[[], None]
    may: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class RestoreLine:
    """Who may reserve slots to restore into: at most a share of each pool at a time.

    So a burst of disk prefixes never takes all the slots that stores and fetches of live requests
    need. A need larger than the share goes when nothing else of that pool is being restored.
    """

    share_slots: Callable[[tuple[int, int]], int]
    reserved: Counter[tuple[int, int]] = field(default_factory=Counter)
    _turns: list[tuple[float, int, Turn]] = field(default_factory=list)
    _count: int = 0

    def __len__(self) -> int:
        return len(self._turns)

    def admits(self, need: Need) -> bool:
        return all(
            not self.reserved[pool] or self.reserved[pool] + slots <= self.share_slots(pool)
            for pool, slots in need.items()
        )

    def stand(self, turn: Turn) -> None:
        self._count += 1
        bisect.insort(self._turns, (turn.place_s, self._count, turn))

    def leave(self, turn: Turn) -> None:
        """Step out of line; nothing happens if it does not stand there."""
        self._turns = [entry for entry in self._turns if entry[2] is not turn]

    def first(self) -> Turn | None:
        """The first in line that may start, if there is room for it; nobody else goes around it."""
        for _, _, turn in self._turns:
            if turn.may():
                return turn if self.admits(turn.need) else None
        return None


def need_of(objects: Iterable[Obj]) -> Counter[tuple[int, int]]:
    """The slots that restoring these objects takes."""
    return Counter((obj.group, obj.shard) for obj in objects)
