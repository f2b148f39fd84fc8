"""Columns of a lease on the wire: runs instead of entries, where that is shorter.

::

    indices     [first, count, first, count, ...]     each run ascends by one
    slots       bytes, uint32 each | [firsts, counts]  each run ascends by one
    versions    bytes, uint64 each | [values, counts]  each run is one value

A million tokens lie in a few runs as long as their slots were free in a row and written once. What is
expanded from runs is bounded a frame, so that a short frame cannot ask for endless memory.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .kinds import WireError

EXPANDED_MAX = 1 << 22
"""Entries that one frame's runs may stand for."""
SHORT_BYTES = 2048
"""Shorter columns go as they are: looking for runs would take longer than sending them."""

KEPT_MAX = 4096
"""Longer spans are not kept."""

_COUNT = np.dtype("<u4")
_SLOT = np.dtype("<u4")
_VERSION = np.dtype("<u8")

_left: ContextVar[int] = ContextVar("entries left to expand", default=EXPANDED_MAX)


def begin_frame() -> None:
    """What is decoded from here on counts anew."""
    _left.set(EXPANDED_MAX)


def _expand(count: int) -> None:
    left = _left.get() - count
    if left < 0:
        raise WireError(f"runs of more than {EXPANDED_MAX} entries in one frame")
    _left.set(left)


def span(first: int, count: int) -> tuple[int, ...]:
    """``count`` indices from ``first`` on: the same object each time, so that all groups of a lease share it."""
    return _span(first, count) if count <= KEPT_MAX else tuple(range(first, first + count))


@lru_cache(64)
def _span(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def pack_indices(values: tuple[int, ...]) -> list[int]:
    """Runs of indices: first and count of each."""
    if not values:
        return []
    first = values[0]
    if values[-1] - first + 1 == len(values) and values == span(first, len(values)):
        return [first, len(values)]
    runs: list[int] = []
    for value in values:
        if runs and value == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += (value, 1)
    return runs


def unpack_indices(plain: Any) -> tuple[int, ...]:
    """The indices that runs stand for. Raises WireError for anything else."""
    if type(plain) is not list or len(plain) % 2 or not {int}.issuperset(map(type, plain)):
        raise WireError("runs of indices are expected")
    if len(plain) == 2 and plain[1] > 0:
        first, count = plain
        _expand(count)
        return span(first, count)
    counts = plain[1::2]
    if counts and min(counts) < 1:
        raise WireError("a run of indices has at least one")
    _expand(sum(counts))
    return tuple([i for first, count in zip(plain[::2], counts, strict=True) for i in range(first, first + count)])


def pack_slots(blob: bytes) -> bytes | list[bytes]:
    """Slots (uint32 each), as runs that ascend by one where that is shorter."""
    return blob if len(blob) < SHORT_BYTES else _pack(blob, _SLOT, step=1)


def unpack_slots(plain: Any) -> bytes:
    """The slots that :func:`pack_slots` was given. Raises WireError for anything else."""
    return plain if type(plain) is bytes else _unpack(plain, _SLOT, step=1)


def pack_versions(blob: bytes) -> bytes | list[bytes]:
    """Versions (uint64 each), as runs of one value where that is shorter."""
    return blob if len(blob) < SHORT_BYTES else _pack(blob, _VERSION, step=0)


def unpack_versions(plain: Any) -> bytes:
    """The versions that :func:`pack_versions` was given. Raises WireError for anything else."""
    return plain if type(plain) is bytes else _unpack(plain, _VERSION, step=0)


def _pack(blob: bytes, dtype: npt.DTypeLike, *, step: int) -> bytes | list[bytes]:
    values = np.frombuffer(blob, dtype)
    begins = np.flatnonzero(np.diff(values) != step) + 1
    begins = np.concatenate((np.zeros(1, begins.dtype), begins))
    if len(begins) * (values.itemsize + _COUNT.itemsize) >= len(blob):
        return blob
    counts = np.diff(begins, append=len(values)).astype(_COUNT)
    return [values[begins].tobytes(), counts.tobytes()]


def _unpack(plain: Any, dtype: np.dtype[Any], *, step: int) -> bytes:
    if type(plain) is not list or [type(part) for part in plain] != [bytes, bytes]:
        raise WireError("bytes are expected, or runs of them")
    if len(plain[0]) % dtype.itemsize or len(plain[1]) % _COUNT.itemsize:
        raise WireError("runs are cut off")
    firsts, counts = np.frombuffer(plain[0], dtype), np.frombuffer(plain[1], _COUNT).astype(np.int64)
    if len(firsts) != len(counts):
        raise WireError("as many runs as counts are expected")
    total = int(counts.sum())
    _expand(total)
    values = np.repeat(firsts, counts)
    if step:
        values += (np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)).astype(dtype)
    return values.tobytes()
