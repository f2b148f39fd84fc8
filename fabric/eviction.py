"""What decides who makes room: the interface of an eviction policy, and the order of last use.

A policy says what each object is worth; the core (``room.py``) takes the least worth first and keeps
the structure whatever a policy says: nothing leaves before what rests on it, what is pinned never
does, and what became useless goes first. So a wrong policy costs hits and never correctness.

A policy is pure: it is told the time, and keeps what it knows in columns by slot number, so that one
call speaks of many objects. One object of it serves one life of one holder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .kinds import ObjectKind

Slots = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


class PoolShape(NamedTuple):
    """One pool as a policy sees it: slots ``first`` .. ``first + slots``, each for one object.

    ``unit_tokens``: tokens from one object of the group to the next; ``object_bytes``: a slot's payload;
    ``prefix``: whether a resume needs all objects of the group up to its position.
    """

    group: int
    shard: int
    first: int
    slots: int
    kind: ObjectKind
    unit_tokens: int
    object_bytes: int
    prefix: bool


class Arrivals(NamedTuple):
    """Objects of one group and shard that became visible together, by index in their chain."""

    pool: PoolShape
    slots: Slots
    digests: Sequence[bytes]
    positions: Sequence[int]
    """Tokens up to the end of each."""
    tick: int
    """Of the use they came with: a larger one is later."""
    base: int = -1
    """The slot of the object that the first of them rests on; -1: none, or not here."""


class Eviction(Protocol):
    """What one holder's objects are worth.

    ``structured``: whether an object that leaves takes along, in other groups, what nobody can reach
    without it.
    """

    @property
    def structured(self) -> bool: ...

    def arrived(self, arrivals: Arrivals, now_s: float) -> None:
        """Objects were stored, fetched or restored into these slots."""

    def used(self, slots: Slots, tick: int, now_s: float) -> None:
        """These slots' objects were leased, or read by another holder."""

    def left(self, slots: Slots, digests: Sequence[bytes], now_s: float) -> None:
        """These slots' objects make room now, in this order."""

    def moved(self, old: int, new: int) -> None:
        """One slot's object lies in another slot of its pool from here on."""

    def values(self, slots: Slots, count: int, now_s: float) -> Values:
        """What each slot's object is worth, of shape (len(slots),): about ``count`` of the least will leave."""


@runtime_checkable
class HearsOutputs(Protocol):
    """An :class:`Eviction` that wants to know how long the outputs were that followed prompts."""

    def generated(self, slots: Slots, output_tokens: int, now_s: float) -> None:
        """A prompt's output became so long; ``slots``: its last object in memory of each group and shard."""


EvictionFactory = Callable[[Sequence[PoolShape]], Eviction]
"""Makes the policy of one holder's life for its pools."""


class LeastRecentlyUsed:
    """The order of last use; objects of one use leave from the far end of their chain.

    What the scenario format promises, so it is what a core without another policy does.
    """

    structured = False

    def __init__(self, pools: Sequence[PoolShape]) -> None:
        self._last = np.zeros(slots_of(pools), dtype=np.float64)

    def arrived(self, arrivals: Arrivals, now_s: float) -> None:
        del now_s
        self._last[arrivals.slots] = arrivals.tick

    def used(self, slots: Slots, tick: int, now_s: float) -> None:
        del now_s
        self._last[slots] = tick

    def left(self, slots: Slots, digests: Sequence[bytes], now_s: float) -> None:
        """Nothing is remembered of what left."""

    def moved(self, old: int, new: int) -> None:
        self._last[new] = self._last[old]

    def values(self, slots: Slots, count: int, now_s: float) -> Values:
        del count, now_s
        return self._last[slots]


def slots_of(pools: Sequence[PoolShape]) -> int:
    """How many slot numbers there are: columns by slot are that long."""
    return max((pool.first + pool.slots for pool in pools), default=0)
