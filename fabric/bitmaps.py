"""Presence as Python ints: bit i of a bitmap speaks of object i (or of grid position i).

A bitmap of 8,192 objects is one kilobyte and one AND takes a tenth of a microsecond.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ones(count: int) -> int:
    """The `count` lowest bits set; 0 for a count below 1."""
    return (1 << count) - 1 if count > 0 else 0


def leading(bits: int) -> int:
    """How many objects are present from the start without a gap."""
    return (bits ^ (bits + 1)).bit_length() - 1


def gather(bits: int, stride: int, count: int) -> int:
    """Every stride-th bit, from bit 0, at least `count` of them."""
    if stride == 1:
        return bits
    octets = octets_of(bits, stride * count)
    picked = octets[:: stride // 8] & np.uint8(1) if stride % 8 == 0 else unpacked(octets)[::stride]
    return packed(picked[:count])


def runs(bits: int, width: int) -> int:
    """Bit i of the answer: the objects i to i + width - 1 are all present."""
    have = 1
    while have < width:
        step = min(have, width - have)
        bits &= bits >> step
        have += step
    return bits


def octets_of(bits: int, count: int) -> NDArray[np.uint8]:
    """The first `count` bits as bytes, the lowest bit first; what lies behind `count` is undefined."""
    length = max(1, -(-count // 8))
    if bits.bit_length() > 8 * length:
        bits &= ones(8 * length)
    return np.frombuffer(bits.to_bytes(length, "little"), np.uint8)


def unpacked(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One 0 or 1 a bit."""
    return np.unpackbits(octets, bitorder="little")


def packed(flags: NDArray[np.uint8] | NDArray[np.bool_]) -> int:
    """The bitmap of an array: bit i is set where item i is not 0."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
