"""One object of one shard at a holder: what it is, what it is doing, where its copies lie."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .kinds import ObjectKind, Reason
from .lifecycle import State, Verb, advance
from .messages import SlotRun
from .passport import Abi
from .segments import ChainPlace

DIGEST_BYTES = 32
_SEALED = State.SEALED
KEPT_BYTES_MAX = 1 << 20
"""Larger blobs of digests are cut anew each time."""


class SlotCounts(Protocol):
    """What is counted by slot, as an object asks for its own."""

    pins: npt.NDArray[np.int32]
    frozen: npt.NDArray[np.int32]
    last_use: npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Obj:
    """One object of one shard at this holder."""

    kind: ObjectKind
    group: int
    shard: int
    digest: bytes
    position: int
    namespace: bytes
    weights: bytes
    tenant: str
    revision: int
    length: int
    abi: Abi
    checksum: bytes = b""
    state: State = State.ABSENT
    slot: int = -1
    version: int = 0
    on_disk: tuple[int, int] | None = None
    """(extent, entry) of a copy on the local disk, valid beside the copy in memory."""
    below: int = -1
    """The host slot of a copy below the readers' pools, valid beside those in memory and on disk; -1: none."""
    bad: Reason | None = None
    bad_from_tier: bool = False
    visible: bool = False
    place: ChainPlace | None = None
    """Where it lies in its chain; without one the directory is not told of it."""
    first_out: bool = False
    """Makes room before anything else: unusable, or of retired weights."""
    base: bytes = b""
    """Digest of the object before it in its chain, where a resume needs both."""
    home: bytes = b""
    """Digest of the history block that it ends in, without which it serves nobody."""
    linked: bool = False
    """What it rests on counts it."""
    books: SlotCounts | None = None
    """Whose slot it has: pins, uses and graph leases are counted there, by slot."""

    def advance(self, verb: Verb) -> None:
        self.state = advance(self.kind, self.state, verb)

    def elsewhere(self) -> Obj:
        """The same object without a slot and without copies below: to be brought to another slot."""
        return replace(
            self,
            state=State.ABSENT,
            slot=-1,
            version=0,
            visible=False,
            books=None,
            on_disk=None,
            below=-1,
            linked=False,
        )

    @property
    def pins(self) -> int:
        """What forbids moving or freeing it; an object without a slot has none."""
        return 0 if self.books is None or self.slot < 0 else int(self.books.pins[self.slot])

    @property
    def frozen(self) -> int:
        """Graph leases over it: it may be neither moved nor freed, whatever its pins."""
        return 0 if self.books is None or self.slot < 0 else int(self.books.frozen[self.slot])

    @property
    def last_use(self) -> int:
        """The tick of its last use; objects of one use share a tick."""
        return 0 if self.books is None or self.slot < 0 else int(self.books.last_use[self.slot])

    @property
    def on_a_tier(self) -> bool:
        """Whether a copy lies below, from which it can be restored."""
        return self.below >= 0 or self.on_disk is not None

    @property
    def evictable(self) -> bool:
        # Asked of every victim: without another call for its pins.
        return (
            self.visible
            and self.state is _SEALED
            and (self.books is None or self.slot < 0 or not self.books.pins[self.slot])
        )


class Change(NamedTuple):
    """What the directory is to learn of different objects that changed alike: their state after the change."""

    objects: Sequence[Obj]
    gone: bool
    evicted: bool


def split(blob: bytes) -> tuple[bytes, ...]:
    """The digests in a blob of 32-byte digests."""
    return _split(blob) if len(blob) <= KEPT_BYTES_MAX else _cut(blob)


def _cut(blob: bytes) -> tuple[bytes, ...]:
    return tuple([blob[i : i + DIGEST_BYTES] for i in range(0, len(blob), DIGEST_BYTES)])


# One request is asked about a dozen times on its way, and a digest that was looked up once keeps its hash.
_split = lru_cache(8)(_cut)


def held_refusal(objects: Iterable[Obj]) -> Reason | None:
    """Why objects may not be moved or freed: a graph holds one, or a pin does."""
    pinned: Reason | None = None
    for obj in objects:
        if obj.frozen:
            return Reason.GRAPH_FROZEN
        if obj.pins:
            pinned = Reason.PINNED
    return pinned


def slot_run(group: int, shard: int, indices: Sequence[int], objects: Sequence[Obj]) -> SlotRun:
    """The slots and versions of objects, packed."""
    slots = struct.pack(f"<{len(objects)}I", *[obj.slot for obj in objects])
    versions = struct.pack(f"<{len(objects)}Q", *[obj.version for obj in objects])
    return SlotRun(group, shard, tuple(indices), slots, versions)


def slots_of(objects: Iterable[Obj]) -> npt.NDArray[np.int64]:
    """The objects' slots, as the books' columns are asked by them."""
    return np.array([obj.slot for obj in objects], dtype=np.int64)


def place_of(obj: Obj) -> tuple[int, int]:
    """The group and shard: which pool and which table an object is of."""
    return obj.group, obj.shard


def by_place(objects: Sequence[Obj]) -> Iterator[tuple[tuple[int, int], Sequence[Obj]]]:
    """Neighbours of one group and shard, with these: which pool and which table they are of."""
    start = 0
    group = shard = -1
    for at, obj in enumerate(objects):
        if obj.group != group or obj.shard != shard:
            if at:
                yield (group, shard), objects[start:at]
            group, shard, start = obj.group, obj.shard, at
    if objects:
        yield (group, shard), objects[start:] if start else objects


def advance_all(objects: Iterable[Obj], *verbs: Verb) -> None:
    """Each object on by these verbs. Those of one kind and state share one look at the table."""
    kind: ObjectKind | None = None
    before = after = State.ABSENT
    for obj in objects:
        if obj.kind is not kind or obj.state is not before:
            kind, before = obj.kind, obj.state
            after = before
            for verb in verbs:
                after = advance(kind, after, verb)
        obj.state = after
