"""What a drain may move: objects in memory, and those that lie below it, which are brought up first.

below -> coming   restored into room that is free here, as far as what was moved made some
      -> there    in line behind what was in memory, and moved like it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from .context import HolderContext
from .disk import DiskDesk
from .kinds import Reason
from .lifecycle import State
from .messages import DrainTally
from .objects import Obj, place_of
from .pools import Pool

IN_MEMORY = frozenset({State.SEALED, State.DEMOTING})
BELOW_OBJECTS_MAX = 1 << 16
COMING_OBJECTS_MAX = 512
COMING_BYTES_MAX = 16 << 20

Key = tuple[int, int, bytes]


def key_of(obj: Obj) -> Key:
    """Which object it is, wherever it lies."""
    return obj.group, obj.shard, obj.digest


@dataclass(slots=True)
class Candidate:
    """One object that might be moved."""

    obj: Obj
    worth: float
    tries: int = 0
    full: set[str] = field(default_factory=set)
    """Holders that had no room for it."""

    @property
    def key(self) -> Key:
        return key_of(self.obj)

    @property
    def there(self) -> bool:
        """Whether it is still this very object, in memory."""
        return self.obj.visible and self.obj.state in IN_MEMORY and self.obj.bad is None

    @property
    def below(self) -> bool:
        """Whether it is still this very object, on a tier and nowhere else."""
        return self.obj.visible and self.obj.state is State.ON_TIER and self.obj.bad is None


@dataclass(slots=True)
class Sum:
    """Objects that met with one fate, each counted once."""

    objects: int = 0
    size_bytes: int = 0
    value: float = 0.0

    def add(self, candidate: Candidate) -> None:
        self.objects += 1
        self.size_bytes += candidate.obj.length
        self.value += candidate.worth * candidate.obj.length

    def tally(self) -> DrainTally:
        return DrainTally(self.objects, self.size_bytes, self.value)


class Below:
    """What lies below memory, the last used first, and what of it is on its way up."""

    def __init__(self, ctx: HolderContext) -> None:
        self.ctx = ctx
        self.find: Callable[[int], Sequence[tuple[Obj, float]]] = lambda _: ()
        """So many objects, with what each is worth a byte as far as that is known; the last used first."""
        self.restore: Callable[[list[Obj]], None] = lambda _: None
        self.queue: deque[Candidate] = deque()
        self.coming: dict[Key, Candidate] = {}

    def line_up(self) -> None:
        """From the tiers, as they are now."""
        self.queue = deque(Candidate(obj, worth) for obj, worth in self.find(BELOW_OBJECTS_MAX))

    @property
    def coming_bytes(self) -> int:
        return sum(candidate.obj.length for candidate in self.coming.values())

    def with_room(self, chosen: list[Candidate]) -> list[Candidate]:
        """As many of these as there is room for here without anything that waits to be moved; the rest waits on, in front."""
        rooms = {key: self._room(pool) for key, pool in self.ctx.books.pools.items()}
        fit = 0
        for candidate in chosen:
            key = place_of(candidate.obj)
            if not rooms[key]:
                break
            rooms[key] -= 1
            fit += 1
        while fit and self.ctx.books.lacking([candidate.obj for candidate in chosen[:fit]]) is not None:
            fit //= 2
        self.queue.extendleft(reversed(chosen[fit:]))
        return chosen[:fit]

    def _room(self, pool: Pool) -> int:
        """Slots that are free, or have what makes room first: what was moved, or is unusable."""
        books, part = self.ctx.books, slice(pool.first, pool.first + pool.slots)
        leaving = books.first_out[part] & books.settled[part] & (books.pins[part] == 0)
        return pool.unused + int(np.count_nonzero(leaving))

    def bring(self, chosen: Sequence[Candidate], op: str, deadline_s: float, then: Callable[[Candidate], None]) -> None:
        """Restore them, behind whoever waits for bytes of a tier; ``then`` is told of each that stands or failed."""
        with self.ctx.on_behalf(op, deadline_s):
            for candidate in chosen:
                self.coming[candidate.key] = candidate

                def arrived(_obj: Obj, _refused: Reason | None, candidate: Candidate = candidate) -> None:
                    del self.coming[candidate.key]
                    then(candidate)

                self.ctx.await_object(candidate.obj, arrived)
            self.restore([candidate.obj for candidate in chosen])


def last_used(disk: DiskDesk, most: int) -> list[tuple[Obj, float]]:
    """So many of the objects that lie on a tier only and can be read, and what each is worth a byte, 0 where that is not known.

    Those in host memory first: what was written ahead of its eviction says what it was worth. Then extent by extent.
    """
    found = chain(disk.host.pools.last_used(), ((obj, 0.0) for obj in disk.extents.last_used() if obj.below < 0))
    return list(islice(((o, w) for o, w in found if Candidate(o, w).below and disk.read_refusal(o) is None), most))
