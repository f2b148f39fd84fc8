"""Pieces of an engine's host memory, and how they are cut into the fabric's blocks without a copy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Parts = list[Bytes]
"""Pieces of memory that follow each other in an object or in one block of it."""


@lru_cache(1024)
def _array_of(size_bytes: int) -> Any:
    """A class for each size, made once: each call of ctypes would make and keep another."""
    return ctypes.c_uint8 * size_bytes


def memory(address: int, size_bytes: int) -> Bytes:
    """Host memory as an array that shares it. Whoever owns it must outlive the array."""
    return np.ctypeslib.as_array(_array_of(size_bytes).from_address(address))


def blocks_of(parts: Sequence[Bytes], block_bytes: int) -> list[Parts]:
    """An object cut into blocks: at least one, also of an object without bytes."""
    blocks: list[Parts] = [[]]
    room = block_bytes
    for part in parts:
        at = 0
        while at < part.nbytes:
            if room == 0:
                blocks.append([])
                room = block_bytes
            step = min(room, part.nbytes - at)
            blocks[-1].append(part[at : at + step])
            at, room = at + step, room - step
    return blocks


def block_count(size_bytes: int, block_bytes: int) -> int:
    """Blocks of an object."""
    return max(1, -(-size_bytes // block_bytes))
