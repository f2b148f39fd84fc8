"""The arena: one range of memory with an arena header, a header table and slots in pools.

Pure: it works over any writable or read-only buffer (a memfd mapping, a bytearray). Writers and
readers in other processes see the same bytes, so the order of header writes is the protocol:

* a slot's ``version`` is bumped *before* its bytes change (seqlock), so a reader that finds the
  same version before and after a read has read the bytes it was granted;
* ``state`` WRITING is set with the bump, SEALED only after length and checksum stand;
* the arena header bears the holder's incarnation, the weights revision in force and
  ``grants_until_ns`` (CLOCK_MONOTONIC): a reader of a dead or silent holder sees it here.

Layout (all little endian): one page of arena header, the header table (64 bytes a slot, padded to
pages), then the slots; every slot begins on a page so that a writer's mapping covers only its own.

With slabs the pools of the readers' tier lie over one another: each has slots all over the tier's area, cut into
slabs of one size, and a slab is one pool's at a time (``slabs``). A slot number belongs to its pool for good, so its
version goes on counting whoever has the slab, and in the slabs of others its header says ELSEWHERE.

Slots of pools in GPU memory have their headers here, in host memory, and their payload there: at an
offset into the GPU's part, which is laid out likewise and begins with its first slot.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from .kinds import ProtocolError, SpecError, Tier, WireError

PAGE_BYTES = 4096
ARENA_MAGIC = b"KVFABRIC"
ARENA_SCHEMA = 1

ARENA_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("schema", "<u4"),
        ("slots", "<u4"),
        ("incarnation", "<u8"),
        ("grants_until_ns", "<u8"),
        ("weights", "V16"),
        ("layout", "V16"),
    ]
)
SLOT_HEADER = np.dtype(
    [
        ("version", "<u8"),
        ("state", "<u4"),
        ("length", "<u4"),
        ("checksum", "V16"),
        ("object", "V16"),
        ("revision", "<u8"),
        ("reserved", "<u8"),
    ]
)
assert SLOT_HEADER.itemsize == 64
WHOLE_HEADER = np.dtype("V64")
STAMP = np.dtype("V12")
STAMP_FIELDS = np.dtype([("version", "<u8"), ("state", "<u4")])
"""How a slot's header begins."""

_LIFE = struct.Struct("<QQ16s")
_LIFE_OFFSET = 16
"""Incarnation, grants_until_ns and weights in the arena's header."""

Bytes = npt.NDArray[np.uint8]


class SlotState(IntEnum):
    """What a slot's header says of its bytes. Only SEALED bytes may be read."""

    FREE = 0
    WRITING = 1
    SEALED = 2
    QUARANTINED = 3
    ELSEWHERE = 4
    """Another pool has the slab that the slot lies in: these bytes are none of this slot's."""


class Memory(StrEnum):
    """Which memory a pool's payload lies in."""

    HOST = "host"
    CUDA = "cuda"


class Checksum(StrEnum):
    """How payload is digested, 16 bytes each: xxh3-128, or one that a GPU computes in parallel."""

    XXH3_128 = "xxh3_128"
    LANES_128 = "lanes_128"


PlainPool = tuple[int, int, int, int, str]
"""A pool in a wire record: group, shard, slots, slot_bytes, tier."""
PlainPlace = tuple[str, str]
"""What else there is to say of a pool: memory, checksum. Unsaid, it is host memory and xxh3-128."""


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """``slots`` slots of ``slot_bytes`` payload for one group and shard on one tier, in one memory."""

    group: int
    shard: int
    slots: int
    slot_bytes: int
    tier: Tier = Tier.G2
    memory: Memory = Memory.HOST

    @property
    def stride_bytes(self) -> int:
        """Bytes from one slot to the next: whole pages."""
        return -(-self.slot_bytes // PAGE_BYTES) * PAGE_BYTES


class ArenaLayout:
    """Where each pool's slots lie. Slot numbers run through all pools in order; one way to digest serves all."""

    def __init__(
        self, pools: Sequence[PoolLayout], checksum: Checksum = Checksum.XXH3_128, slab_bytes: int = 0
    ) -> None:
        """``slab_bytes``: of a slab of the readers' tier; 0 where each pool has a range of its own.

        Raises SpecError for pools that do not fit: each of the readers' tier has as many slots as the slabs hold.
        """
        self.pools = tuple(pools)
        self.checksum = checksum
        self.slab_bytes = slab_bytes
        self.slots = sum(pool.slots for pool in self.pools)
        if not self.slots:
            raise SpecError("pools: an arena needs at least one slot")
        table_bytes = -(-self.slots * SLOT_HEADER.itemsize // PAGE_BYTES) * PAGE_BYTES
        self.table_offset = PAGE_BYTES
        self.headers_bytes = PAGE_BYTES + table_bytes
        offsets = {Memory.HOST: self.headers_bytes, Memory.CUDA: 0}
        self.readers_tier = min(pool.tier for pool in self.pools)
        """The tier that readers map: the highest there is. Pools of a lower one take what is swapped out of it."""
        self.slabs = self._slabs()
        """How many slabs the readers' pools share; 0 where each has a range of its own."""
        self.first_slot: list[int] = []
        self.pool_offset: list[int] = []
        slot, area = 0, -1
        for pool in self.pools:
            self.first_slot.append(slot)
            slot += pool.slots
            if not self._shares(pool):
                self.pool_offset.append(offsets[pool.memory])
                offsets[pool.memory] += pool.slots * pool.stride_bytes
                continue
            if area < 0:
                area = offsets[pool.memory]
                offsets[pool.memory] += self.slabs * slab_bytes
            self.pool_offset.append(area)
        self.size_bytes = offsets[Memory.HOST]
        """Bytes of the range in host memory: headers, and the payload that lies there."""
        self.cuda_bytes = offsets[Memory.CUDA]
        """Bytes of payload in GPU memory."""
        self._bounds = [first + pool.slots for first, pool in zip(self.first_slot, self.pools, strict=True)]

    def _shares(self, pool: PoolLayout) -> bool:
        """Whether a pool lies in the slabs of the readers' tier."""
        return bool(self.slab_bytes) and pool.tier is self.readers_tier

    def _slabs(self) -> int:
        sharing = [pool for pool in self.pools if self._shares(pool)]
        if not sharing:
            return 0
        if self.slab_bytes % PAGE_BYTES or self.slab_bytes < max(pool.stride_bytes for pool in sharing):
            raise SpecError(f"slab_bytes: {self.slab_bytes} are no whole pages, or less than a slot")
        counts = {divmod(pool.slots, self.slots_a_slab(pool)) for pool in sharing}
        if len(counts) > 1 or any(rest for _, rest in counts) or len({pool.memory for pool in sharing}) > 1:
            raise SpecError("slab_bytes: the pools of the readers' tier do not have the same slabs of one memory")
        return counts.pop()[0]

    def slots_a_slab(self, pool: PoolLayout) -> int:
        """How many slots of a pool fit a slab; at least one."""
        return self.slab_bytes // pool.stride_bytes

    def pool_of(self, slot: int) -> int:
        """Index of the pool a slot belongs to. Raises IndexError for a slot outside the arena."""
        if slot < 0:
            raise IndexError(slot)
        for index, bound in enumerate(self._bounds):
            if slot < bound:
                return index
        raise IndexError(slot)

    def offset_of(self, slot: int) -> int:
        """Byte offset of a slot's payload in the memory that its pool lies in."""
        index = self.pool_of(slot)
        pool, place = self.pools[index], slot - self.first_slot[index]
        if not self._shares(pool):
            return self.pool_offset[index] + place * pool.stride_bytes
        slab, inside = divmod(place, self.slots_a_slab(pool))
        return self.pool_offset[index] + slab * self.slab_bytes + inside * pool.stride_bytes

    def below_readers(self, slot: int) -> bool:
        """Whether a slot lies on a lower tier than readers map. Raises IndexError for a slot outside the arena."""
        return self.pools[self.pool_of(slot)].tier is not self.readers_tier

    def memory_of(self, slot: int) -> Memory:
        """Which memory a slot's payload lies in. Raises IndexError for a slot outside the arena."""
        return self.pools[self.pool_of(slot)].memory

    def pools_plain(self) -> tuple[PlainPool, ...]:
        """The pools for a wire record; :meth:`of_plain` is the inverse, with :meth:`places_plain`."""
        return tuple((p.group, p.shard, p.slots, p.slot_bytes, str(p.tier)) for p in self.pools)

    def places_plain(self) -> tuple[PlainPlace, ...]:
        """Where the pools lie and how they are digested; empty where that goes without saying."""
        places = tuple((str(p.memory), str(self.checksum)) for p in self.pools)
        return () if set(places) == {(str(Memory.HOST), str(Checksum.XXH3_128))} else places

    @classmethod
    def of_plain(
        cls, pools: Iterable[Sequence[Any]], places: Iterable[Sequence[Any]] = (), slab_bytes: int = 0
    ) -> ArenaLayout:
        """Raises WireError for what :meth:`pools_plain` and :meth:`places_plain` do not make."""
        try:
            rows = [PoolLayout(int(g), int(s), int(n), int(b), Tier(t)) for g, s, n, b, t in pools]
            said = [(Memory(memory), Checksum(checksum)) for memory, checksum in places]
            if not said:
                return cls(rows, slab_bytes=slab_bytes)
            placed = [replace(pool, memory=memory) for pool, (memory, _) in zip(rows, said, strict=True)]
            (checksum,) = {checksum for _, checksum in said}
            return cls(placed, checksum, slab_bytes)
        except (TypeError, ValueError, SpecError) as error:
            raise WireError(f"arena layout: {error}") from None

    def to_plain(self) -> list[list[Any]]:
        """Plain lists for a wire record, one a pool; :meth:`from_plain` is the inverse."""
        places = self.places_plain() or ((),) * len(self.pools)
        rows: list[list[Any]] = [[*pool, *place] for pool, place in zip(self.pools_plain(), places, strict=True)]
        return [*rows, [self.slab_bytes]] if self.slab_bytes else rows

    @classmethod
    def from_plain(cls, plain: Iterable[Sequence[Any]]) -> ArenaLayout:
        """Raises WireError for anything :meth:`to_plain` does not make."""
        try:
            rows = [tuple(row) for row in plain]
            slab_bytes = int(rows.pop()[0]) if rows and len(rows[-1]) == 1 else 0
        except (TypeError, ValueError) as error:
            raise WireError(f"arena layout: {error}") from None
        return cls.of_plain([row[:5] for row in rows], [row[5:] for row in rows if len(row) > 5], slab_bytes)


class Arena:
    """Headers and payload of an arena over ``buffer``; read-only if the buffer is.

    With ``headers_only`` the buffer ends before the first slot: slots have states and no bytes.
    """

    def __init__(self, layout: ArenaLayout, buffer: Any, *, headers_only: bool = False) -> None:
        self.layout = layout
        self.bytes: Bytes = np.frombuffer(buffer, dtype=np.uint8)
        least = layout.headers_bytes if headers_only else layout.size_bytes
        if self.bytes.nbytes < least:
            raise SpecError(f"arena: {self.bytes.nbytes} bytes are less than the layout's {least}")
        self.header = self.bytes[: ARENA_HEADER.itemsize].view(ARENA_HEADER)
        table_end = layout.table_offset + layout.slots * SLOT_HEADER.itemsize
        self.table = self.bytes[layout.table_offset : table_end].view(SLOT_HEADER)
        self.versions = self.table["version"]
        self.states = self.table["state"]
        self.lengths = self.table["length"]
        self.checksums = self.table["checksum"]
        self.stamps = np.ndarray(
            (layout.slots,), STAMP, self.bytes.data, offset=layout.table_offset, strides=(SLOT_HEADER.itemsize,)
        )
        """Version and state of each slot as one value: what a reader compares."""
        self.headers = np.ndarray((layout.slots,), WHOLE_HEADER, self.bytes.data, offset=layout.table_offset)
        """Each slot's header as one value."""

    def format(self, incarnation: int) -> None:
        """Write a fresh arena header; every slot is FREE at version 0."""
        self.table[:] = np.zeros((), dtype=SLOT_HEADER)
        self.header["schema"] = ARENA_SCHEMA
        self.header["slots"] = self.layout.slots
        self.header["incarnation"] = incarnation
        self.header["magic"] = ARENA_MAGIC

    def verify_format(self) -> None:
        """Raises WireError if the buffer holds no arena of this schema and size."""
        if bytes(self.header["magic"][0]) != ARENA_MAGIC:
            raise WireError("arena: the mapping holds no kvfabric arena")
        schema = int(self.header["schema"][0])
        if schema != ARENA_SCHEMA:
            raise WireError(f"arena: schema {schema} found, this version reads {ARENA_SCHEMA}")
        if int(self.header["slots"][0]) != self.layout.slots:
            raise WireError("arena: the layout has another number of slots than the arena's header")

    @property
    def incarnation(self) -> int:
        return int(self.header["incarnation"][0])

    @property
    def grants_until_ns(self) -> int:
        return int(self.header["grants_until_ns"][0])

    def life(self) -> tuple[int, int, bytes]:
        """Incarnation, grants_until_ns and weights as they are now: what a reader looks at before its slots."""
        incarnation, grants_until_ns, weights = _LIFE.unpack_from(self.bytes.data, _LIFE_OFFSET)
        return incarnation, grants_until_ns, weights

    def set_grants_until(self, now_plus_ns: int) -> None:
        """CLOCK_MONOTONIC nanoseconds until which this holder may grant and its readers may trust it."""
        self.header["grants_until_ns"] = now_plus_ns

    @property
    def weights(self) -> bytes:
        """16 bytes: digest of the weights revision in force."""
        return bytes(self.header["weights"][0])

    def set_weights(self, digest16: bytes) -> None:
        self.header["weights"] = np.void(digest16)

    def payload(self, slot: int) -> Bytes:
        """The slot's whole payload, uint8 of shape (slot_bytes,), zero-copy.

        Raises ProtocolError for one in GPU memory: the buffer does not hold it.
        """
        pool = self.layout.pools[self.layout.pool_of(slot)]
        if pool.memory is not Memory.HOST:
            raise ProtocolError(f"slot {slot} lies in GPU memory")
        offset = self.layout.offset_of(slot)
        return self.bytes[offset : offset + pool.slot_bytes]

    def content(self, slot: int) -> Bytes:
        """The bytes the header says were sealed, uint8 of shape (length,)."""
        return self.payload(slot)[: int(self.lengths[slot])]

    def begin_write(self, slot: int) -> int:
        """Bump the version and mark the slot WRITING, before any byte changes. Returns the version."""
        version = int(self.versions[slot]) + 1
        self.versions[slot] = version
        self.states[slot] = SlotState.WRITING
        return version

    def begin_write_all(self, slots: npt.NDArray[np.int64]) -> list[int]:
        """:meth:`begin_write` for many slots, each once. Returns their versions."""
        versions = self.versions[slots] + 1
        self.versions[slots] = versions
        self.states[slots] = SlotState.WRITING
        found: list[int] = versions.tolist()
        return found

    def seal(self, slot: int, length: int, checksum: bytes, object16: bytes, revision: int) -> None:
        """Mark the slot's bytes readable: ``length`` bytes with ``checksum`` (16 bytes, by the layout's way)."""
        row = self.table[slot]
        row["length"] = length
        row["checksum"] = np.void(checksum)
        row["object"] = np.void(object16)
        row["revision"] = revision
        self.states[slot] = SlotState.SEALED

    def seal_all(
        self,
        slots: npt.NDArray[np.int64],
        lengths: npt.ArrayLike,
        checksums: bytes,
        objects16: bytes,
        revisions: npt.ArrayLike,
    ) -> None:
        """:meth:`seal` for many slots at once; checksums and objects are 16 bytes each."""
        self.table["length"][slots] = lengths
        self.table["checksum"][slots] = np.frombuffer(checksums, dtype="V16")
        self.table["object"][slots] = np.frombuffer(objects16, dtype="V16")
        self.table["revision"][slots] = revisions
        self.states[slots] = SlotState.SEALED

    def vacate(self, slot: int, state: SlotState = SlotState.FREE) -> None:
        """Take the bytes away from readers: bump the version, then the state."""
        self.versions[slot] += 1
        self.states[slot] = state

    def vacate_all(self, slots: npt.NDArray[np.int64], state: SlotState) -> None:
        """:meth:`vacate` for many slots at once."""
        self.versions[slots] += 1
        self.states[slots] = state

    def version(self, slot: int) -> int:
        return int(self.versions[slot])

    def state(self, slot: int) -> SlotState:
        return SlotState(int(self.states[slot]))

    def checksum(self, slot: int) -> bytes:
        return bytes(self.checksums[slot])


def heap_arena(layout: ArenaLayout, incarnation: int) -> Arena:
    """A formatted arena in ordinary memory: for the simulator, scenarios and tests."""
    arena = Arena(layout, np.zeros(layout.size_bytes, dtype=np.uint8).data)
    arena.format(incarnation)
    return arena


def header_arena(layout: ArenaLayout, incarnation: int) -> Arena:
    """A formatted arena whose slots have headers and no bytes: where capacity is only a number."""
    arena = Arena(layout, np.zeros(layout.headers_bytes, dtype=np.uint8).data, headers_only=True)
    arena.format(incarnation)
    return arena
