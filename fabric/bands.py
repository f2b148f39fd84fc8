"""Bands: what one life has alike in several groups along a run, packed, and laid open while a batch changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .bitmaps import octets_of, unpacked
from .chains import BAND_BYTES, Band, Owner, Run, shared_bits
from .messages import Lane
from .segments import SEGMENT_OBJECTS
from .versions import Versions, decode_versions, encode_versions

GONE, IN_MEMORY, ON_TIER, EVICTED = 0, 1, 2, 3
"""States of a lane. EVICTED is the index's own: the last copy was taken out by choice."""
NOBODY = 0
"""The life that bears what was evicted."""


UNTOLD: Versions = np.zeros(SEGMENT_OBJECTS, np.uint64)
"""The versions of what has none."""
UNTOLD.setflags(write=False)


@dataclass(slots=True)
class Cell:
    """One lane of a run laid open: bits and versions by offset in the segment."""

    bits: int
    versions: Versions


def pack(life: int, cells: Mapping[Lane, Cell], owner: Callable[[int, tuple[Lane, ...]], Owner]) -> list[Band]:
    """One life's part of a run as bands: lanes with equal bitmaps share one."""
    by_bits: dict[int, list[Lane]] = {}
    for lane, cell in cells.items():
        if cell.bits:
            by_bits.setdefault(cell.bits, []).append(lane)
    bands = []
    for bits, lanes in by_bits.items():
        if len(lanes) > 1:
            lanes.sort(key=_by_place)
        versions = b""
        if life != NOBODY:
            offsets = _offsets(bits)
            if len(lanes) == 1:
                held = cells[lanes[0]].versions[offsets][None]
            else:
                held = np.array([cells[lane].versions[offsets] for lane in lanes])
            versions = encode_versions(held) if np.count_nonzero(held) else b""
        bands.append(Band(owner(life, tuple(lanes)), shared_bits(bits), versions))
    return bands


def unpack(band: Band, cells: dict[Lane, Cell]) -> None:
    """Lay a band open, a cell a lane."""
    lanes = band.owner.lanes
    if band.owner.life == NOBODY:
        for lane in lanes:
            cells[lane] = Cell(band.bits, UNTOLD)
        return
    offsets = _offsets(band.bits)
    held = decode_versions(band.versions, len(lanes)) if band.versions else None
    for row, lane in enumerate(lanes):
        versions = np.zeros(SEGMENT_OBJECTS, np.uint64)
        if held is not None:
            versions[offsets] = held[row]
        cells[lane] = Cell(band.bits, versions)


def evicted_objects_of(run: Run) -> int:
    """How many objects of a run are remembered as evicted, counted a group."""
    return sum(band.bits.bit_count() * len(band.owner.lanes) for band in run.bands if band.life == NOBODY)


def cost_bytes(bands: tuple[Band, ...]) -> int:
    """About what these bands take in memory."""
    return BAND_BYTES * len(bands) + sum([len(band.versions) for band in bands])


def _by_place(lane: Lane) -> tuple[int, int, int]:
    return lane.group, lane.shard, lane.revision


def _offsets(bits: int) -> slice | NDArray[np.int64]:
    low = (bits & -bits).bit_length() - 1
    top = bits.bit_length()
    if bits.bit_count() == top - low:
        return slice(low, top)
    return np.flatnonzero(unpacked(octets_of(bits, SEGMENT_OBJECTS)))
