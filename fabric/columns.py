"""Columns: what one holder has along a prompt, as it is told to whoever plans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .kinds import Reason
from .lifecycle import State
from .messages import Column
from .objects import Obj
from .passport import Abi


def bits_of(mask: npt.NDArray[np.bool_]) -> int:
    """A mask as a bitmap: bit i for entry i."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


class Entry(NamedTuple):
    """What one holder has of one object, as columns are built from it."""

    in_memory: bool
    revision: int
    abi: Abi
    bad: Reason | None
    bad_from_tier: bool
    version: bytes


def entry_of(obj: Obj) -> Entry:
    """An object's entry: bytes that are being written to disk are still in memory."""
    in_memory = obj.state is State.SEALED or obj.state is State.DEMOTING
    return Entry(in_memory, obj.revision, obj.abi, obj.bad, obj.bad_from_tier, obj.version.to_bytes(8, "little"))


def column_of(holder: str, incarnation: int, group: int, shard: int, entries: Iterable[tuple[int, Entry]]) -> Column:
    """One holder's column from its entries by index, ascending."""
    memory = tier = 0
    revisions: dict[int, int] = {}
    abis: dict[Abi, int] = {}
    bad: dict[tuple[Reason, bool], int] = {}
    versions = []
    for i, entry in entries:
        bit = 1 << i
        if entry.bad is not None:
            bad[entry.bad, entry.bad_from_tier] = bad.get((entry.bad, entry.bad_from_tier), 0) | bit
        elif entry.in_memory:
            memory |= bit
            versions.append(entry.version)
        else:
            tier |= bit
        revisions[entry.revision] = revisions.get(entry.revision, 0) | bit
        abis[entry.abi] = abis.get(entry.abi, 0) | bit
    return Column(
        holder,
        incarnation,
        group,
        shard,
        memory,
        tier,
        revisions,
        tuple(abis.items()),
        tuple((reason, from_tier, bits) for (reason, from_tier), bits in bad.items()),
        b"".join(versions),
    )
