"""Blocks of extents on their way back: what is wanted, how it is read in runs, and how it is judged.

The same for files on the local disk and for objects in a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...fabric.arena import Arena, Bytes
from ...fabric.extents import pages
from ...fabric.kinds import Reason
from ..digest import digester
from .codecs import CannotUnpack, Codec, unpack
from .format import Place
from .io import IO_BYTES, VECTORS_MAX, page_buffer


class Cancelled(Exception):
    """The job was called off between two reads or writes."""


@dataclass(slots=True)
class Known:
    """One extent file that stands."""

    file_bytes: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """One block to read: its extent, its number there, the slot it goes to."""

    uid: bytes
    number: int
    slot: int


@dataclass(frozen=True, slots=True)
class Got:
    """One block read: the checksum of what lies in the slot now, or why there is nothing to judge.

    ``wrong``: the bytes were read and are not those that were written.
    """

    slot: int
    checksum: bytes | None
    refused: Reason | None = None
    detail: str = ""
    wrong: bool = False


NO_SLOT = -1

Pace = Callable[[int], None]
"""Called with the bytes about to be moved; waits for the budget, raises Cancelled."""

Block = tuple[Place, Want]


def by_extent(
    wants: Sequence[Want], known: Mapping[bytes, Known], arena: Arena
) -> tuple[list[Got], dict[bytes, list[Block]]]:
    """What can be read, an extent at a time and in the order it lies there; first what cannot, with the reason."""
    refused: list[Got] = []
    found: dict[bytes, list[Block]] = {}
    for want in wants:
        extent = known.get(want.uid)
        if extent is None or want.number >= len(extent.places):
            refused.append(Got(want.slot, None, Reason.RESTORE_FAILED, "there is no such block"))
            continue
        place = extent.places[want.number]
        room = arena.payload(want.slot).nbytes
        if place.length > room:
            too_long = f"{place.length} bytes do not fit a slot of {room}"
            refused.append(Got(want.slot, None, Reason.RESTORE_FAILED, too_long))
            continue
        found.setdefault(want.uid, []).append((place, want))
    return refused, {uid: sorted(blocks, key=lambda b: b[0].offset) for uid, blocks in found.items()}


def runs(blocks: list[Block]) -> Iterator[list[Block]]:
    """Neighbours in a file, a system call's worth at a time."""
    run: list[Block] = []
    size = end = 0
    for place, want in blocks:
        stored = pages(place.stored_bytes)
        if run and (place.offset != end or size + stored > IO_BYTES or len(run) >= VECTORS_MAX):
            yield run
            run, size = [], 0
        run.append((place, want))
        size += stored
        end = place.offset + stored
    if run:
        yield run


def target(arena: Arena, place: Place, slot: int) -> Bytes:
    """Where a block's pages go: a plain one to its slot's own pages, a packed one to a buffer."""
    if place.codec is not Codec.NONE:
        return page_buffer(place.stored_bytes)
    offset = arena.layout.offset_of(slot)
    return arena.bytes[offset : offset + pages(place.length)]


def found_in(arena: Arena, place: Place, buffer: Bytes) -> Got:
    """What came of a block, judged where it lies: it goes to no slot."""
    content = buffer[: place.stored_bytes]
    if place.codec is not Codec.NONE:
        try:
            content = np.frombuffer(unpack(place.codec, content, place.length), dtype=np.uint8)
        except CannotUnpack as error:
            return Got(NO_SLOT, bytes(16), None, str(error), wrong=True)
    found = digester(arena.layout.checksum).checksum(content)
    return Got(NO_SLOT, found, wrong=found != place.checksum)


def judge(arena: Arena, place: Place, want: Want, buffer: Bytes) -> Got:
    """What came, unpacked into its slot if need be, and its digest."""
    content = arena.payload(want.slot)[: place.length]
    if place.codec is not Codec.NONE:
        try:
            unpacked = unpack(place.codec, buffer[: place.stored_bytes], place.length)
        except CannotUnpack as error:
            return Got(want.slot, bytes(16), None, str(error), wrong=True)
        content[:] = memoryview(unpacked)
    found = digester(arena.layout.checksum).checksum(content)
    return Got(want.slot, found, wrong=found != place.checksum)
