"""What an extent's header says, and that nothing else is taken for one."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.fabric.effects import ExtentEntry
from kvfabric.fabric.extents import extent_bytes, header_bytes
from kvfabric.fabric.kinds import WireError
from kvfabric.transport.disk import format as extent_format
from kvfabric.transport.disk.codecs import CannotUnpack, Codec, pack, unpack
from kvfabric.transport.disk.format import Place

from . import stage


def made(count: int) -> tuple[bytes, list[ExtentEntry], list[Place], int]:
    arena = stage.arena()
    drafted = stage.draft(stage.uid_of(1), arena, list(range(count)))
    entries = list(drafted.entries)
    offset, places = header_bytes(entries), []
    for e in entries:
        places.append(Place(offset, e.length, e.length, Codec.NONE, e.checksum))
        offset += -(-e.length // 4096) * 4096
    front = extent_format.encode(stage.uid_of(1), entries, places, drafted.passports)
    return front, entries, places, offset


@pytest.mark.parametrize("count", [0, 1, 30])
def test_a_header_says_what_was_written_into_it(count: int) -> None:
    front, entries, places, size = made(count)
    header = extent_format.decode(front, size)
    assert header.entries == tuple(entries)
    assert header.places == tuple(places)
    assert header.uid == stage.uid_of(1)
    assert len(front) == header.header_bytes == header_bytes(entries)
    assert size == extent_bytes(entries)
    if count:
        assert list(header.passports.values()) == [stage.PASSPORT]


@given(at=st.integers(0, 1 << 20), flip=st.integers(1, 255))
def test_no_flipped_byte_of_a_header_goes_unnoticed(at: int, flip: int) -> None:
    front, _, _, size = made(7)
    _, index = extent_format.index_bytes(front, size)
    at %= 64 + index
    wrong = front[:at] + bytes([front[at] ^ flip]) + front[at + 1 :]
    with pytest.raises(WireError):
        extent_format.decode(wrong, size)
    assert extent_format.decode(front, size).entries


@given(st.binary(max_size=300), st.integers(0, 1 << 20))
def test_strangers_bytes_are_no_header(raw: bytes, size: int) -> None:
    with pytest.raises(WireError):
        extent_format.decode(raw, size)


def test_a_file_of_another_length_or_schema_is_refused_by_name() -> None:
    front, _, _, size = made(3)
    with pytest.raises(WireError, match="bytes long"):
        extent_format.decode(front, size - 1)
    newer = front[:8] + (2).to_bytes(4, "little") + front[12:]
    with pytest.raises(WireError, match="schema 2 found, this version reads 1"):
        extent_format.decode(newer, size)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("length", [1, 96, 5000, 1 << 20])
def test_what_is_packed_comes_out_again(codec: Codec, length: int) -> None:
    right = stage.content(5, length, packs=True)
    packed = np.frombuffer(pack(codec, right), dtype=np.uint8)
    assert unpack(codec, packed, length) == right.tobytes()


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_nothing_unpacks_to_more_than_was_declared(codec: Codec) -> None:
    """64 MiB of zeros pack to little: the declared length bounds what is allocated."""
    bomb = np.frombuffer(pack(codec, np.zeros(64 << 20, dtype=np.uint8)), dtype=np.uint8)
    assert bomb.nbytes < 1 << 20
    with pytest.raises(CannotUnpack):
        unpack(codec, bomb, 4096)
    assert len(unpack(codec, bomb, 64 << 20)) == 64 << 20


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
@given(noise=st.binary(max_size=200), length=st.integers(0, 300))
def test_strangers_bytes_unpack_to_nothing_else_than_asked(codec: Codec, noise: bytes, length: int) -> None:
    with contextlib.suppress(CannotUnpack):
        assert len(unpack(codec, np.frombuffer(noise, dtype=np.uint8), length)) == length


def test_the_planned_size_bounds_the_index_of_any_entries() -> None:
    rng = random.Random(3)
    arena = stage.arena()
    base = stage.fill(arena, 0, 1)
    for count in (1, 17, 400):
        entries = [
            ExtentEntry(
                rng.randrange(8),
                rng.randrange(8),
                rng.randbytes(32),
                rng.randrange(1 << 40),
                rng.randrange(1 << 63),
                4096,
                rng.randbytes(16),
                rng.randbytes(8),
                rng.randrange(1, 4096),
                rng.randbytes(32),
                rng.randbytes(16),
                "é" * rng.randrange(200),
            )
            for _ in range(count)
        ]
        places = [
            Place(header_bytes(entries) + 4096 * n, 4096, 4096, Codec.NONE, e.checksum) for n, e in enumerate(entries)
        ]
        front = extent_format.encode(stage.uid_of(2), entries, places, {base.fingerprint: stage.PASSPORT})
        assert extent_format.decode(front, header_bytes(entries) + 4096 * count).entries == tuple(entries)
