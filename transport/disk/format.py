"""The extent file: one run of blocks of all its groups, self-describing, its index at the front.

::

    0   magic 8 | schema u32 | index bytes u32 | header bytes u64 | file bytes u64 | uid 16 | digest 16
    64  index: msgpack, see Index; zeros up to ``header bytes``
    ..  blocks, each on a page of its own, zeros up to the next page

all little endian. ``digest`` is xxh3-128 of the first 48 bytes and the index: a header that verifies
was written whole. Each block's own digest is in the index and proves its bytes when they are read.
Names, ABI passports and weights are data in the header: a holder of a later life judges a file by
the file alone.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import msgpack
import numpy as np
import xxhash

from ...fabric.arena import PAGE_BYTES
from ...fabric.effects import ExtentEntry
from ...fabric.extents import PASSPORT_BYTES_MAX, PROLOGUE_BYTES, header_bytes, pages
from ...fabric.kinds import INDEX_DIGEST_BYTES, WireError
from ...fabric.passport import AbiPassport
from .codecs import Codec

MAGIC = b"KVEXTENT"
SCHEMA = 1
UID_BYTES = 16
DIGEST_BYTES = 32
CHECKSUM_BYTES = 16
INDEX_BYTES_MAX = 64 << 20
BLOCKS_MAX = 1 << 19

_PROLOGUE = struct.Struct("<8sIIQQ16s16s")
assert _PROLOGUE.size == PROLOGUE_BYTES

__all__ = ["PROLOGUE_BYTES", "Header", "Place", "decode", "encode", "index_bytes"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one block lies in its file. ``stored_bytes`` < ``length`` where it is packed."""

    offset: int
    stored_bytes: int
    length: int
    codec: Codec
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What the front of an extent file says. ``passports``: those told at writing, by fingerprint."""

    uid: bytes
    header_bytes: int
    file_bytes: int
    entries: tuple[ExtentEntry, ...]
    places: tuple[Place, ...]
    passports: Mapping[bytes, AbiPassport]


def encode(
    uid: bytes, entries: Sequence[ExtentEntry], places: Sequence[Place], passports: Mapping[bytes, AbiPassport]
) -> bytes:
    """The header, whole pages. ``passports`` by layout fingerprint; those of no entry are left out."""
    owners = _numbered((e.namespace, e.weights, e.tenant) for e in entries)
    abis = _numbered((e.fingerprint, e.alignment_bytes) for e in entries)
    index = msgpack.packb(
        [
            [list(owner) for owner in owners],
            [[fingerprint, alignment, _plain(passports.get(fingerprint))] for fingerprint, alignment in abis],
            len(entries),
            _column("<u2", [e.group for e in entries]),
            _column("<u2", [e.shard for e in entries]),
            _column("<u2", [owners[e.namespace, e.weights, e.tenant] for e in entries]),
            _column("<u2", [abis[e.fingerprint, e.alignment_bytes] for e in entries]),
            _column("<u1", [p.codec for p in places]),
            b"".join(e.digest for e in entries),
            b"".join(e.checksum for e in entries),
            b"".join(e.anchor.ljust(INDEX_DIGEST_BYTES, b"\0") for e in entries),
            b"".join(e.parent.ljust(INDEX_DIGEST_BYTES, b"\0") for e in entries),
            _column("<u8", [e.position for e in entries]),
            _column("<u8", [e.revision for e in entries]),
            _column("<u8", [e.length for e in entries]),
            _column("<u8", [p.offset for p in places]),
            _column("<u8", [p.stored_bytes for p in places]),
        ]
    )
    room = header_bytes(entries)
    if PROLOGUE_BYTES + len(index) > room:
        raise WireError(f"extent: an index of {len(index)} bytes does not fit its room of {room}")
    end = max((p.offset + pages(p.stored_bytes) for p in places), default=room)
    front = _PROLOGUE.pack(MAGIC, SCHEMA, len(index), room, end, uid, bytes(16))[:48]
    digest = xxhash.xxh3_128_digest(front + index)
    return (front + digest + index).ljust(room, b"\0")


def index_bytes(prologue: bytes, file_bytes: int) -> tuple[int, int]:
    """Bytes of the whole header and of the index, from a file's first 64 bytes.

    Raises WireError for what is no extent of a known schema or is not as long as it says.
    """
    if len(prologue) < PROLOGUE_BYTES:
        raise WireError("extent: shorter than a header")
    magic, schema, index, header, total, _, _ = _PROLOGUE.unpack(prologue[:PROLOGUE_BYTES])
    if magic != MAGIC:
        raise WireError("extent: not an extent file")
    if schema != SCHEMA:
        raise WireError(f"extent: schema {schema} found, this version reads {SCHEMA}")
    if not (index <= INDEX_BYTES_MAX and PROLOGUE_BYTES + index <= header <= total and header % PAGE_BYTES == 0):
        raise WireError("extent: the header's own sizes do not fit together")
    if total != file_bytes:
        raise WireError(f"extent: {file_bytes} bytes long, {total} are written in its header")
    return header, index


def decode(front: bytes, file_bytes: int) -> Header:
    """The header in a file's first bytes. Raises WireError for anything :func:`encode` did not make."""
    header, length = index_bytes(front, file_bytes)
    *_, uid, digest = _PROLOGUE.unpack(front[:PROLOGUE_BYTES])
    index = front[PROLOGUE_BYTES : PROLOGUE_BYTES + length]
    if xxhash.xxh3_128_digest(front[:48] + index) != digest:
        raise WireError("extent: the header's digest does not match")
    try:
        return _decode(uid, header, file_bytes, msgpack.unpackb(index, raw=False))
    except WireError:
        raise
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise WireError(f"extent: index: {type(error).__name__}") from None


def _decode(uid: bytes, header: int, file_bytes: int, plain: Any) -> Header:
    owners, abis, count, groups, shards, owner, abi, codecs, digests, checksums, anchors, parents, *rest = plain
    if type(count) is not int or not 0 <= count <= BLOCKS_MAX:
        raise WireError(f"extent: {count!r} blocks")
    if len(digests) != count * DIGEST_BYTES or len(checksums) != count * CHECKSUM_BYTES:
        raise WireError("extent: columns of different lengths")
    if len(anchors) != count * INDEX_DIGEST_BYTES or len(parents) != count * INDEX_DIGEST_BYTES:
        raise WireError("extent: columns of different lengths")
    narrow = [_numbers("<u2", column, count) for column in (groups, shards, owner, abi)]
    packing = _numbers("<u1", codecs, count)
    position, revision, length, offset, stored = (_numbers("<u8", column, count) for column in rest)
    passports = {}
    for fingerprint, _, told in abis:
        passport = _passport(told)
        if passport is not None:
            if passport.layout_fingerprint() != fingerprint:
                raise WireError("extent: an ABI passport that is not its fingerprint's")
            passports[bytes(fingerprint)] = passport
    entries, places = [], []
    for i in range(count):
        namespace, weights, tenant = owners[narrow[2][i]]
        fingerprint, alignment, _ = abis[narrow[3][i]]
        check = checksums[i * CHECKSUM_BYTES : (i + 1) * CHECKSUM_BYTES]
        entry = ExtentEntry(
            narrow[0][i],
            narrow[1][i],
            digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES],
            position[i],
            revision[i],
            length[i],
            check,
            _typed(bytes, fingerprint),
            _typed(int, alignment),
            _typed(bytes, namespace),
            _typed(bytes, weights),
            _typed(str, tenant),
            _place_digest(anchors, i),
            _place_digest(parents, i),
        )
        place = Place(offset[i], stored[i], length[i], Codec(packing[i]), check)
        if not _within(place, header, file_bytes):
            raise WireError(f"extent: block {i} lies outside the file")
        entries.append(entry)
        places.append(place)
    return Header(uid, header, file_bytes, tuple(entries), tuple(places), passports)


def _place_digest(column: bytes, i: int) -> bytes:
    """An index digest of a column; zeros stand for none."""
    digest = column[i * INDEX_DIGEST_BYTES : (i + 1) * INDEX_DIGEST_BYTES]
    return digest if any(digest) else b""


def _within(place: Place, header: int, file_bytes: int) -> bool:
    if place.offset % PAGE_BYTES or place.offset < header or place.offset + pages(place.stored_bytes) > file_bytes:
        return False
    return place.stored_bytes == place.length if place.codec is Codec.NONE else place.stored_bytes < place.length


def _numbered(keys: Any) -> dict[Any, int]:
    return {key: number for number, key in enumerate(dict.fromkeys(keys))}


def _column(dtype: str, values: list[int]) -> bytes:
    return np.array(values, dtype=dtype).tobytes()


def _numbers(dtype: str, column: Any, count: int) -> list[int]:
    values: list[int] = np.frombuffer(_typed(bytes, column), dtype=dtype).tolist()
    if len(values) != count:
        raise WireError("extent: columns of different lengths")
    return values


def _typed(cls: type, value: Any) -> Any:
    if type(value) is not cls:
        raise WireError(f"extent: {cls.__name__} is expected, got {type(value).__name__}")
    return value


def _plain(passport: AbiPassport | None) -> list[Any] | None:
    """A passport as data; None where it is not known or too long for its room."""
    if passport is None:
        return None
    plain = [list(v) if isinstance(v, tuple) else v for v in astuple(passport)]
    return plain if len(msgpack.packb(plain)) <= PASSPORT_BYTES_MAX else None


def _passport(plain: Any) -> AbiPassport | None:
    if plain is None:
        return None
    values: list[Any] = [tuple(v) if isinstance(v, list) else v for v in plain]
    return AbiPassport(*values)
