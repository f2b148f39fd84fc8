"""Laws of rows that go into and out of slots by the arena's descriptor: the same bytes and digests as by a mapping."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvfabric.fabric.arena import ArenaLayout, Checksum, PoolLayout
from kvfabric.fabric.budget import in_slabs
from kvfabric.fabric.kinds import ProtocolError
from kvfabric.transport.digest import digester
from kvfabric.transport.memfd import ArenaMemory, WritableSlots, map_read_only
from kvfabric.transport.slot_files import SlotReader, SlotWriter

POOLS = [PoolLayout(0, 0, 8, 8192), PoolLayout(1, 0, 6, 5000)]
LAYOUTS = {
    "ranges": ArenaLayout(POOLS),
    "slabs": in_slabs(ArenaLayout(POOLS), 3)[0],
    "lanes": ArenaLayout(POOLS, Checksum.LANES_128),
}
RNG = np.random.default_rng(3)


@pytest.fixture(params=list(LAYOUTS))
def memory(request: pytest.FixtureRequest) -> ArenaMemory:
    return ArenaMemory.create(LAYOUTS[request.param], 5)


def size_of(layout: ArenaLayout, slot: int) -> int:
    return layout.pools[layout.pool_of(slot)].slot_bytes


def random_row(size: int, parts: int = 1) -> list[Any]:
    whole = RNG.integers(0, 256, size, dtype=np.uint8)
    return [np.ascontiguousarray(part) for part in np.array_split(whole, parts)]


def last_and_first_of_two_pools(layout: ArenaLayout) -> list[int]:
    """Slots in an order that is not the file's; two of them have numbers that follow each other, in two pools."""
    second = layout.first_slot[1]
    return [6, 4, 5, second, second - 1, second + 2]


def test_what_is_written_lies_in_the_slots_with_zeros_behind_and_nowhere_else(memory: ArenaMemory) -> None:
    layout = memory.layout
    slots = last_and_first_of_two_pools(layout)
    for slot in slots:
        memory.arena.payload(slot)[:] = 0xAA
    # What lies there: with slabs slots of either pool lie over one another, and only these are open.
    own = [(layout.offset_of(slot), layout.offset_of(slot) + size_of(layout, slot)) for slot in slots]
    others = np.ones(layout.size_bytes, dtype=bool)
    for begin, end in own:
        others[begin : -(-end // 4096) * 4096] = False
    before = memory.arena.bytes[others].copy()
    rows = [
        (slot, random_row(size_of(layout, slot) - 100 * (place % 2), 1 + place)) for place, slot in enumerate(slots)
    ]
    sums = SlotWriter(memory.read_write_fd(), layout).write(rows)
    for (slot, row), summed in zip(rows, sums, strict=True):
        given = np.concatenate(row)
        lies = memory.arena.payload(slot)
        assert np.array_equal(lies[: given.nbytes], given)
        assert not lies[given.nbytes :].any()
        assert summed == digester(layout.checksum).checksum(lies)
    assert np.array_equal(memory.arena.bytes[others], before)


def test_rows_are_filled_from_the_start_of_their_slots(memory: ArenaMemory) -> None:
    layout = memory.layout
    slots = last_and_first_of_two_pools(layout)
    stored = [(slot, random_row(size_of(layout, slot))) for slot in slots]
    SlotWriter(memory.read_write_fd(), layout).write(stored)
    rows = [(slot, [np.zeros(1000, np.uint8), np.zeros(3000 + slot, np.uint8)]) for slot in slots]
    SlotReader(memory.read_only_fd(), layout).read(rows)
    for (_, whole), (_, row) in zip(stored, rows, strict=True):
        got = np.concatenate(row)
        assert np.array_equal(got, whole[0][: got.nbytes])


def test_slots_that_follow_each_other_are_one_call_and_the_kernel_may_stop_at_any_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = LAYOUTS["ranges"]
    memory = ArenaMemory.create(layout, 5)
    calls: list[int] = []
    write = os.pwritev

    def at_most_5001(fd: int, parts: list[Any], offset: int) -> int:
        calls.append(offset)
        return write(fd, [np.concatenate(parts)[:5001].data], offset)

    rows = [(slot, random_row(8192, 3)) for slot in (4, 5, 6)]
    writer = SlotWriter(memory.read_write_fd(), layout)
    monkeypatch.setattr(os, "pwritev", at_most_5001)
    writer.write(rows)
    assert calls == [layout.offset_of(4) + 5001 * n for n in range(5)]
    assert all(np.array_equal(memory.arena.payload(slot), np.concatenate(row)) for slot, row in rows)


def test_a_row_of_more_parts_than_one_call_takes_goes_through(memory: ArenaMemory) -> None:
    row = random_row(8192, 3000)
    SlotWriter(memory.read_write_fd(), memory.layout).write([(2, row)])
    assert np.array_equal(memory.arena.payload(2), np.concatenate(row))
    into = [np.zeros(part.nbytes, np.uint8) for part in row]
    SlotReader(memory.read_only_fd(), memory.layout).read([(2, into)])
    assert np.array_equal(np.concatenate(into), np.concatenate(row))


def test_a_row_longer_than_its_slot_is_refused_and_nothing_moves(memory: ArenaMemory) -> None:
    rows = [(0, random_row(8192)), (1, random_row(8193))]
    with pytest.raises(ValueError, match="8193 bytes, a slot has 8192"):
        SlotWriter(memory.read_write_fd(), memory.layout).write(rows)
    assert not memory.arena.payload(0).any()
    with pytest.raises(ValueError, match="8193 bytes, a slot has 8192"):
        SlotReader(memory.read_only_fd(), memory.layout).read(rows)


def test_a_descriptor_is_closed_with_its_owner_and_a_reader_cannot_write() -> None:
    memory = ArenaMemory.create(LAYOUTS["ranges"], 1077)

    def held() -> int:
        links = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
        return sum("kvfabric-arena-1077" in str(link) for link in links)

    writer, reader = (
        SlotWriter(memory.read_write_fd(), memory.layout),
        SlotReader(memory.read_only_fd(), memory.layout),
    )
    assert held() == 3
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(reader.fd, b"x", memory.layout.offset_of(0))
    writer.close()
    with pytest.raises(ProtocolError, match="closed"):
        writer.write([(0, random_row(8192))])
    taken = reader.take()
    del reader
    assert held() == 2
    os.close(taken)
    another = SlotWriter(memory.read_write_fd(), memory.layout)
    assert held() == 2
    del another
    assert held() == 1


def test_slots_of_pools_that_lie_over_one_another_are_mapped_each_by_its_own_place() -> None:
    """In slabs the last slot of a pool and the first of the next have numbers that follow each other, and places that do not."""
    layout = LAYOUTS["slabs"]
    memory = ArenaMemory.create(layout, 5)
    first = layout.first_slot[1]
    assert layout.offset_of(first - 1) > layout.offset_of(first)
    slots = WritableSlots.map(memory.read_write_fd(), layout, [first - 1, first])
    for slot in slots.slots:
        slots.view(slot)[:] = slot
    reader = map_read_only(memory.read_only_fd(), layout)
    assert all((reader.payload(slot) == slot).all() for slot in slots.slots)
