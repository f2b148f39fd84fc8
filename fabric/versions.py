"""Versions of a band of objects as one compact ``bytes``: a base a lane and deltas of equal width.

::

    u8 width | lanes x u64 base | lanes x count x width delta        all little endian

``width`` is 0 (all of a lane equal its base), 1, 2, 4 or 8 bytes. Slots of one pool are reused at
about the same rate, so their versions lie near one another and most bands need one byte an object.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .kinds import WireError

Versions = NDArray[np.uint64]

FEW = 64
"""Up to so many versions of one lane are packed one by one."""
_WIDTHS = {0: None, 1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_BASE = np.dtype("<u8")


def encode_versions(values: Versions) -> bytes:
    """Bytes of versions of shape (lanes, count), count >= 1."""
    if values.shape[0] == 1 and values.shape[1] <= FEW:
        return _encode_few(values[0].tolist())
    bases = values.min(axis=1)
    deltas = values - bases[:, None]
    top = int(deltas.max())
    head: bytes = bases.astype(_BASE).tobytes()
    if top == 0:
        return b"\x00" + head
    width = 1 if top < 1 << 8 else 2 if top < 1 << 16 else 4 if top < 1 << 32 else 8
    return b"".join((bytes((width,)), head, deltas.astype(_WIDTHS[width]).tobytes()))


def _encode_few(values: list[int]) -> bytes:
    """:func:`encode_versions` of one lane: arrays would take several times as long."""
    base = min(values)
    top = max(values) - base
    head = base.to_bytes(8, "little")
    if top == 0:
        return b"\x00" + head
    if top < 1 << 8:
        return b"".join((b"\x01", head, bytes([value - base for value in values])))
    width = 2 if top < 1 << 16 else 4 if top < 1 << 32 else 8
    return b"".join((bytes((width,)), head, *[(value - base).to_bytes(width, "little") for value in values]))


def decode_versions(blob: bytes, lanes: int) -> Versions:
    """Versions of shape (lanes, count) as :func:`encode_versions` packed them; (lanes, 1) where all are equal.

    Raises WireError for bytes of another form.
    """
    head = 1 + 8 * lanes
    width = blob[0] if blob else -1
    if lanes < 1 or width not in _WIDTHS or len(blob) < head:
        raise WireError(f"versions: {len(blob)} bytes are no columns of {lanes} lanes")
    bases = np.frombuffer(blob, _BASE, lanes, 1).astype(np.uint64)
    kind = _WIDTHS[width]
    if kind is None:
        if len(blob) != head:
            raise WireError(f"versions: {len(blob)} bytes where {head} are expected")
        return bases[:, None]
    if (len(blob) - head) % (lanes * width):
        raise WireError(f"versions: {len(blob) - head} bytes do not divide into {lanes} lanes of {width} bytes")
    deltas = np.frombuffer(blob, kind, -1, head).reshape(lanes, -1)
    out: Versions = np.add(deltas, bases[:, None], dtype=np.uint64)
    return out
