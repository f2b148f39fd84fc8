"""Columns as runs: what was packed comes back, and a short frame cannot ask for endless memory."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.fabric import run_encoding, wire
from kvfabric.fabric.kinds import WireError
from kvfabric.fabric.messages import LeaseGrant, LeasePart, SlotRun

RUNS = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 400)), max_size=12)


@given(st.lists(st.integers(0, 1 << 40)))
def test_any_indices_come_back(values: list[int]) -> None:
    assert run_encoding.unpack_indices(run_encoding.pack_indices(tuple(values))) == tuple(values)


@given(RUNS)
def test_indices_in_runs_come_back(runs: list[tuple[int, int]]) -> None:
    values = tuple(i for first, count in runs for i in range(first, first + count))
    packed = run_encoding.pack_indices(values)
    assert run_encoding.unpack_indices(packed) == values
    assert len(packed) <= 2 * len(runs)


@given(RUNS, st.booleans())
def test_slots_and_versions_come_back(runs: list[tuple[int, int]], constant: bool) -> None:
    step = 0 if constant else 1
    values = [first + step * i for first, count in runs for i in range(count)]
    slots, versions = np.array(values, "<u4").tobytes(), np.array(values, "<u8").tobytes()
    assert run_encoding.unpack_slots(run_encoding.pack_slots(slots)) == slots
    assert run_encoding.unpack_versions(run_encoding.pack_versions(versions)) == versions


def test_slots_that_wrap_around_come_back() -> None:
    values = np.arange(2**32 - 1000, 2**32 + 1000).astype("<u4").tobytes()
    packed = run_encoding.pack_slots(values)
    assert run_encoding.unpack_slots(packed) == values


def lease(blocks: int, scattered: bool) -> LeaseGrant:
    slots = np.random.default_rng(1).permutation(blocks) if scattered else np.arange(blocks)
    run = SlotRun(0, 0, tuple(range(blocks)), slots.astype("<u4").tobytes(), np.full(blocks, 3, "<u8").tobytes())
    return LeaseGrant("n0", 1, blocks * 16, 9.0, bytes(16), (LeasePart("n0", 1, 1, (run,)),))


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("blocks", [1, 64, 8192])
def test_a_lease_comes_back_whole(blocks: int, scattered: bool) -> None:
    grant = lease(blocks, scattered)
    assert wire.decode_plain(LeaseGrant, wire.encode_plain(grant)) == grant


def test_a_long_lease_in_runs_is_short() -> None:
    assert len(wire.encode_plain(lease(8192, scattered=False))) < 200
    assert len(wire.encode_plain(lease(8192, scattered=True))) > 8192 * 4


COUNT = run_encoding.EXPANDED_MAX // 2 + 1


@pytest.mark.parametrize(
    ("unpack", "plain"),
    [
        (run_encoding.unpack_indices, [0, COUNT]),
        (run_encoding.unpack_slots, [bytes(4), COUNT.to_bytes(4, "little")]),
        (run_encoding.unpack_versions, [bytes(8), COUNT.to_bytes(4, "little")]),
    ],
)
def test_a_frame_stands_for_so_many_entries_and_no_more(unpack: Any, plain: Any) -> None:
    run_encoding.begin_frame()
    unpack(plain)
    with pytest.raises(WireError, match="entries in one frame"):
        unpack(plain)
    run_encoding.begin_frame()
    unpack(plain)


def test_every_frame_counts_anew() -> None:
    frame = wire.encode_plain(lease(run_encoding.EXPANDED_MAX // 3, scattered=False))
    for _ in range(2):
        wire.decode_plain(LeaseGrant, frame)
    with pytest.raises(WireError, match="entries in one frame"):
        wire.decode_plain(LeaseGrant, wire.encode_plain(lease(run_encoding.EXPANDED_MAX // 2, scattered=False)))


@pytest.mark.parametrize(
    "plain",
    [[1], [0, 0], [0, -1], [0, True], ["0", 1], 3, None, [0, 1.0]],
)
def test_what_are_no_runs_of_indices_is_refused(plain: Any) -> None:
    with pytest.raises(WireError):
        run_encoding.unpack_indices(plain)


@pytest.mark.parametrize(
    "plain",
    [[b"", b""][:1], [bytes(4)], [bytes(3), bytes(4)], [bytes(4), bytes(3)], [bytes(8), bytes(4)], 3, [bytes(4), 1]],
)
def test_what_are_no_runs_of_slots_is_refused(plain: Any) -> None:
    with pytest.raises(WireError):
        run_encoding.unpack_slots(plain)


def test_runs_are_data_on_the_wire() -> None:
    assert msgpack.unpackb(wire.encode_plain(lease(64, scattered=False)))[2][5][0][3][0][2] == [0, 64]
