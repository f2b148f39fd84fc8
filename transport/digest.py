"""Payload digests, 16 bytes, as they stand in slot headers, disk extents and wire records.

Bytes are digested in steps small enough to be found in the second-level cache again: a copy followed
at once by its digest reads memory once, not twice.

A layout names the way its payload is digested:

* ``xxh3_128``: xxh3-128 in the canonical (big-endian) order; the fastest on a CPU, and a chain, so
  of no use on a GPU;
* ``lanes_128``: every 8-byte word is combined with its position (exclusive or with a multiple of an odd
  constant, plus the lane's key) and mixed by a bijection of 64 bits (the finaliser of SplitMix64, Steele,
  Lea and Flood, OOPSLA 2014); the results are added up modulo 2**64, in two lanes. So all words may be taken at once, in any order: on a GPU it
  is a few elementwise kernels and a sum (:mod:`gpu_digest`). A change of one word always changes both
  lanes; any other accident goes unseen with probability 2**-128, were the mix random. Neither way
  withstands someone who wants a collision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ..fabric.arena import Bytes, Checksum

CHECKSUM_BYTES = 16

STEP_BYTES = 256 * 1024
"""Copied, then digested, at a time."""

WORD_BYTES = 8
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
GAMMA = 0x9E3779B97F4A7C15
LANE_KEYS = (0x243F6A8885A308D3, 0x13198A2E03707344)
"""The first hexadecimal digits of pi: what the positions of each lane begin from."""

Words = npt.NDArray[np.uint64]
_U64 = (1 << 64) - 1


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


def checksum_of_parts(parts: Sequence[Bytes]) -> bytes:
    """:func:`checksum` of arrays as if they were one."""
    if len(parts) == 1:
        return checksum(parts[0])
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.data)
    return digest.digest()


# --- lanes -------------------------------------------------------------------------------------


def mixed(x: int) -> int:
    """SplitMix64's finaliser of one word: what :func:`lanes_checksum` does to many at once."""
    x = ((x ^ x >> 30) * MIX_1) & _U64
    x = ((x ^ x >> 27) * MIX_2) & _U64
    return x ^ x >> 31


def lanes_end(sums: tuple[int, int], nbytes: int) -> bytes:
    """The digest of ``nbytes`` bytes from the sum of each lane: the length counts, then each lane is mixed once more."""
    ends = (mixed((lane + (nbytes + 1) * GAMMA) & _U64) for lane in sums)
    return b"".join(end.to_bytes(8, "little") for end in ends)


def _mix(words: Words, scratch: Words) -> None:
    """As :func:`mixed`, in place."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        np.right_shift(words, np.uint64(shift), out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        np.multiply(words, np.uint64(factor), out=words)
    np.right_shift(words, np.uint64(31), out=scratch)
    np.bitwise_xor(words, scratch, out=words)


_PLACES: Words = np.arange(1, STEP_BYTES // WORD_BYTES + 1, dtype=np.uint64) * np.uint64(GAMMA)
"""What the words of one step are told apart by."""


class _Lanes:
    """A lanes digest in steps, each of whole words but for the last."""

    def __init__(self) -> None:
        self._sums = [0, 0]
        self._words = 0
        self._nbytes = 0

    def update(self, part: Bytes) -> None:
        whole = part.nbytes // WORD_BYTES * WORD_BYTES
        self._nbytes += part.nbytes
        if whole:
            # A slot begins on a page, a view of a reader's array may not: unaligned words are copied.
            self._add(np.frombuffer(part[:whole].data, dtype="<u8"))
        if whole < part.nbytes:
            rest = np.zeros(WORD_BYTES, dtype=np.uint8)
            rest[: part.nbytes - whole] = part[whole:]
            self._add(rest.view("<u8"))

    def _add(self, words: Words) -> None:
        keyed, scratch = np.empty_like(words), np.empty_like(words)
        for lane, key in enumerate(LANE_KEYS):
            begin = (key + self._words * GAMMA) & _U64
            np.add(_PLACES[: len(words)], np.uint64(begin), out=keyed)
            np.bitwise_xor(keyed, words, out=keyed)
            _mix(keyed, scratch)
            self._sums[lane] = (self._sums[lane] + int(keyed.sum(dtype=np.uint64))) & _U64
        self._words += len(words)

    def digest(self) -> bytes:
        return lanes_end((self._sums[0], self._sums[1]), self._nbytes)


def lanes_checksum(view: Bytes) -> bytes:
    """``lanes_128`` of a contiguous uint8 array, 16 bytes."""
    lanes = _Lanes()
    for start in range(0, view.nbytes, STEP_BYTES):
        lanes.update(view[start : start + STEP_BYTES])
    return lanes.digest()


def lanes_checksum_of_parts(parts: Sequence[Bytes]) -> bytes:
    """:func:`lanes_checksum` of arrays as if they were one."""
    return lanes_checksum(parts[0] if len(parts) == 1 else np.concatenate(parts))


def copy_and_lanes_checksum(dst: Bytes, src: Bytes) -> bytes:
    """Copy ``src`` into ``dst`` (equal lengths) and return the ``lanes_128`` of what then lies in ``dst``."""
    lanes = _Lanes()
    for start in range(0, src.nbytes, STEP_BYTES):
        part = dst[start : start + STEP_BYTES]
        np.copyto(part, src[start : start + STEP_BYTES])
        lanes.update(part)
    return lanes.digest()


class Digester(Protocol):
    """One way to digest payload that lies in host memory."""

    @property
    def checksum(self) -> Callable[[Bytes], bytes]:
        """16 bytes over a contiguous uint8 array."""

    @property
    def of_parts(self) -> Callable[[Sequence[Bytes]], bytes]:
        """16 bytes over contiguous uint8 arrays, one or more, as if they were one."""

    @property
    def copy(self) -> Callable[[Bytes, Bytes], bytes]:
        """Copy the second into the first, of equal length; the digest of what then lies there."""


class _Way:
    """A Digester of three functions."""

    def __init__(
        self,
        checksum_of: Callable[[Bytes], bytes],
        of_parts: Callable[[Sequence[Bytes]], bytes],
        copy: Callable[[Bytes, Bytes], bytes],
    ) -> None:
        self.checksum = checksum_of
        self.of_parts = of_parts
        self.copy = copy


_WAYS: dict[Checksum, Digester] = {
    Checksum.XXH3_128: _Way(checksum, checksum_of_parts, copy_and_checksum),
    Checksum.LANES_128: _Way(lanes_checksum, lanes_checksum_of_parts, copy_and_lanes_checksum),
}


def digester(way: Checksum) -> Digester:
    """How payload of a layout with this checksum is digested in host memory."""
    return _WAYS[way]
