"""What a holder and its link process tell each other, as msgpack: see :mod:`isolated_link`.

::

    request   [verb, region or nil, argument, deadline in seconds]
    reply     [error or nil, value]          error: [failure, detail]

Pairs travel as rows of three int64, results as four columns; both sides run one version of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np

from ..fabric.arena import SLOT_HEADER
from ..fabric.kinds import WireError
from .digest import CHECKSUM_BYTES
from .link import Headers, LinkError, LinkFailure, Pair, PairResult, QuietToken, Region


class Verb(StrEnum):
    """What the link process is asked; the names of the ``Link`` methods behind them."""

    CONNECT = "connect"
    DISCONNECT = "disconnect"
    FETCH = "fetch"
    HEADERS = "headers"
    QUIET = "quiet"


def pack_request(verb: Verb, region: Region | None, argument: Any, deadline_s: float) -> bytes:
    """One request; ``argument`` is what the ``pack_*`` functions made, or None."""
    packed: bytes = msgpack.packb([verb, region and region.to_plain(), argument, deadline_s])
    return packed


def unpack_request(data: bytes) -> tuple[Verb, Region | None, Any, float]:
    """Raises WireError."""
    try:
        verb, region, argument, deadline_s = msgpack.unpackb(data)
        return Verb(verb), None if region is None else Region.from_plain(region), argument, float(deadline_s)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"link request: {error!r}") from None


def pack_reply(error: LinkError | None, value: Any = None) -> bytes:
    """One reply: an error, or a value."""
    packed: bytes = msgpack.packb([error and [error.failure, error.detail], value])
    return packed


def unpack_reply(data: bytes) -> tuple[LinkError | None, Any]:
    """Raises WireError."""
    try:
        error, value = msgpack.unpackb(data)
        return error and LinkError(LinkFailure(error[0]), str(error[1])), value
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as cause:
        raise WireError(f"link reply: {cause!r}") from None


def pack_pairs(pairs: Sequence[Pair]) -> bytes:
    """Rows of source slot, destination slot, length in bytes."""
    rows = [(pair.src_slot, pair.dst_slot, pair.length_bytes) for pair in pairs]
    return np.array(rows, dtype="<i8").reshape(-1, 3).tobytes()


def unpack_pairs(data: bytes) -> list[Pair]:
    """The inverse of :func:`pack_pairs`."""
    return [Pair(*row) for row in np.frombuffer(data, dtype="<i8").reshape(-1, 3).tolist()]


def pack_results(results: Sequence[PairResult]) -> list[Any]:
    """Columns: checksums (16 bytes each, zeros where there is none), and failure, detail, token of those that failed."""
    checksums = b"".join(result.checksum or bytes(CHECKSUM_BYTES) for result in results)
    failed = [
        [index, result.failure, result.detail, result.token]
        for index, result in enumerate(results)
        if result.failure is not None
    ]
    return [checksums, failed]


def unpack_results(value: Any, pairs: Sequence[Pair]) -> list[PairResult]:
    """Raises WireError."""
    try:
        checksums, failed = value
        size = CHECKSUM_BYTES
        results = [
            PairResult(pair.dst_slot, checksums[index * size : (index + 1) * size]) for index, pair in enumerate(pairs)
        ]
        for index, failure, detail, token in failed:
            quarantine = None if token is None else QuietToken(token)
            results[index] = PairResult(pairs[index].dst_slot, LinkFailure(failure), detail, quarantine)
    except (ValueError, TypeError, IndexError) as cause:
        raise WireError(f"link results: {cause!r}") from None
    return results


def pack_headers(rows: Headers) -> bytes:
    """64 bytes a row."""
    return rows.tobytes()


def unpack_headers(data: bytes) -> Headers:
    """The inverse of :func:`pack_headers`."""
    rows: Headers = np.frombuffer(data, dtype=SLOT_HEADER).copy()
    return rows
