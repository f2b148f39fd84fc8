"""Payload digests: xxh3-128, 16 bytes, as they stand in slot headers, disk extents and wire records.

Bytes are digested in steps small enough to be found in the second-level cache again: a copy followed
at once by its digest reads memory once, not twice.
"""

from __future__ import annotations

import numpy as np
import xxhash

from ..fabric.arena import Bytes

CHECKSUM_BYTES = 16

STEP_BYTES = 256 * 1024
"""Copied, then digested, at a time."""


def checksum(view: Bytes) -> bytes:
    """xxh3-128 of a contiguous uint8 array, 16 bytes in the canonical (big-endian) order."""
    return xxhash.xxh3_128_digest(view.data)


def copy_and_checksum(dst: Bytes, src: Bytes) -> bytes:
    """Copy ``src`` into ``dst`` (equal lengths) and return the xxh3-128 of what then lies in ``dst``."""
    digest = xxhash.xxh3_128()
    for start in range(0, src.nbytes, STEP_BYTES):
        part = dst[start : start + STEP_BYTES]
        np.copyto(part, src[start : start + STEP_BYTES])
        digest.update(part.data)
    return digest.digest()
