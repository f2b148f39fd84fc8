"""Whole rows into and out of an arena's slots by its descriptor: one system call for many slots that follow each other.

    SlotWriter    a writer's: digests what is written, then writes it   from ArenaMemory.read_write_fd()
    SlotReader    a reader's: fills rows                                from ArenaMemory.read_only_fd()

The mapping and the descriptor show the same pages. Through the descriptor nothing is mapped, so no page is faulted in, and
a new one is not zeroed first: storing and digesting 64 MiB in slots never used took 35 ms of a core, 51 by a
mapping. And the interpreter lock is let go once a call, not once a row: beside a thread that holds it, each row cost
a turn of 5 ms.

The digest is of the rows as they are given, before they are written, so that what is damaged on the way is found wherever
digests are compared. A descriptor is closed with its owner.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..fabric.arena import ArenaLayout, Bytes
from ..fabric.kinds import ProtocolError
from .digest import digester

PIECES_MAX = 1024
"""Linux's limit on the parts of one call (IOV_MAX)."""

Row = Sequence[Bytes]
"""Contiguous uint8 arrays that follow each other in a slot."""


@dataclass(slots=True)
class _Run:
    """Rows of slots that follow each other in the file: where they begin, all their parts, where they end."""

    offset: int
    parts: list[Bytes]
    end: int


class _Descriptor:
    """An open file that is closed once, by hand or with its owner. ``fd`` is taken over."""

    def __init__(self, fd: int, layout: ArenaLayout) -> None:
        self._fd = fd
        self._closer = weakref.finalize(self, os.close, fd)
        self._layout = layout

    @property
    def fd(self) -> int:
        if not self._closer.alive:
            raise ProtocolError("arena: this descriptor is closed")
        return self._fd

    def take(self) -> int:
        """The descriptor, which is the caller's from here on. Raises ProtocolError if it is closed."""
        fd = self.fd
        self._closer.detach()
        return fd

    def close(self) -> None:
        """Idempotent."""
        self._closer()


class SlotWriter(_Descriptor):
    """Writes whole slots of an open attempt; the caller names no others."""

    def write(self, rows: Sequence[tuple[int, Row]]) -> list[bytes]:
        """Fill slots (number, row) from their start, the rest of each with zeros; the digests of whole slots, in order.

        Raises ValueError for a row longer than its slot, OSError where there is no memory for it.
        """
        layout, ways = self._layout, digester(self._layout.checksum)
        whole = [(slot, _padded(row, layout.pools[layout.pool_of(slot)].slot_bytes)) for slot, row in rows]
        sums = [ways.of_parts(row) for _, row in whole]
        for run in _runs(layout, whole):
            _all_of(os.pwritev, self.fd, run)
        return sums


class SlotReader(_Descriptor):
    """Reads slots; what a row then holds is proven by the check of its lease."""

    def read(self, rows: Sequence[tuple[int, Row]]) -> None:
        """Fill rows (number of a slot, row) from the start of their slots.

        Raises ValueError for a row longer than its slot.
        """
        for slot, row in rows:
            pool = self._layout.pools[self._layout.pool_of(slot)]
            if (size := sum(part.nbytes for part in row)) > pool.slot_bytes:
                raise ValueError(f"a row of {size} bytes, a slot has {pool.slot_bytes}")
        for run in _runs(self._layout, rows):
            _all_of(os.preadv, self.fd, run)


def _padded(row: Row, slot_bytes: int) -> Row:
    """The row with zeros up to the slot's end."""
    lacking = slot_bytes - sum(part.nbytes for part in row)
    if lacking < 0:
        raise ValueError(f"a row of {slot_bytes - lacking} bytes, a slot has {slot_bytes}")
    return row if not lacking else [*row, np.zeros(lacking, dtype=np.uint8)]


def _runs(layout: ArenaLayout, rows: Sequence[tuple[int, Row]]) -> list[_Run]:
    """Rows in the order of the file, joined where one ends at the next one's beginning."""
    runs: list[_Run] = []
    for offset, place in sorted((layout.offset_of(slot), place) for place, (slot, _) in enumerate(rows)):
        row = rows[place][1]
        if not runs or runs[-1].end != offset:
            runs.append(_Run(offset, [], offset))
        runs[-1].parts.extend(row)
        runs[-1].end += sum(part.nbytes for part in row)
    return runs


def _all_of(call: Callable[..., int], fd: int, run: _Run) -> None:
    """Call until all parts are through: the kernel may stop at any byte, and takes so many parts at a time."""
    parts, offset = run.parts, run.offset
    while parts:
        count = call(fd, parts[:PIECES_MAX], offset)
        if not count:
            raise OSError(errno.EIO, "the arena ends within a slot")
        offset += count
        parts = _behind(parts, count)


def _behind(parts: list[Bytes], count: int) -> list[Bytes]:
    """What is left of the parts behind their first ``count`` bytes."""
    for place, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[place + 1 :]]
        count -= part.nbytes
    return []
