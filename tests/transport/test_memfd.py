"""Laws of the arena in shared memory: who can write what, and what stays behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvfabric.fabric.arena import ArenaLayout, PoolLayout
from kvfabric.fabric.kinds import ProtocolError, SpecError, WireError
from kvfabric.transport.digest import checksum, copy_and_checksum
from kvfabric.transport.memfd import Access, ArenaMemory, WritableSlots, map_read_only, memory_available_bytes

LAYOUT = ArenaLayout([PoolLayout(0, 0, 6, 5000), PoolLayout(1, 0, 4, 4096)])


@pytest.fixture
def memory() -> ArenaMemory:
    return ArenaMemory.create(LAYOUT, incarnation=7)


def died_of_fault(action: Callable[[], None]) -> bool:
    """Run ``action`` in a forked child; whether the kernel ended the child with SIGSEGV."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 2)
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV


def poke(view: np.ndarray) -> None:
    ctypes.memset(view.__array_interface__["data"][0], 0xEE, 1)


def test_a_reader_sees_what_the_holder_writes(memory: ArenaMemory) -> None:
    reader = map_read_only(memory.read_only_fd(), LAYOUT)
    memory.arena.begin_write(3)
    memory.arena.payload(3)[:] = 42
    assert reader.incarnation == 7
    assert reader.version(3) == 1
    assert (reader.payload(3) == 42).all()


def test_a_write_through_a_leased_view_fails_in_numpy_and_in_the_kernel(memory: ArenaMemory) -> None:
    reader = map_read_only(memory.read_only_fd(), LAYOUT)
    leased = reader.payload(2)
    with pytest.raises(ValueError, match="read-only"):
        leased[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        leased.flags.writeable = True
    assert died_of_fault(lambda: poke(leased))
    assert not died_of_fault(lambda: poke(memory.arena.payload(2)))
    assert not leased.any() or leased[0] == 0xEE  # the positive control wrote through the holder's mapping


def test_a_read_only_descriptor_cannot_be_mapped_for_writing(memory: ArenaMemory) -> None:
    fd = memory.read_only_fd()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, LAYOUT.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)


def test_an_arena_can_be_neither_shrunk_nor_grown(memory: ArenaMemory) -> None:
    fd = memory.read_write_fd()
    for size in (0, LAYOUT.size_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def mapped_ranges() -> list[tuple[int, int, str]]:
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, perms, *_ = line.split()
        begin, end = (int(part, 16) for part in span.split("-"))
        ranges.append((begin, end, perms))
    return ranges


def test_only_an_attempts_own_slots_are_writable(memory: ArenaMemory) -> None:
    before = set(mapped_ranges())
    slots = WritableSlots.map(memory.read_write_fd(), LAYOUT, [1, 2, 4, 7])
    for slot in slots.slots:
        slots.view(slot)[:] = slot
    for slot in range(LAYOUT.slots):
        expected = slot if slot in {1, 2, 4, 7} else 0
        assert (memory.arena.payload(slot) == expected).all()
    with pytest.raises(KeyError):
        slots.view(3)
    # Slots 1 and 2 share one mapping; behind it nothing of the arena is mapped for this writer.
    first = slots.view(1).__array_interface__["data"][0]
    assert slots.view(2).__array_interface__["data"][0] == first + 8192
    spans = sorted(end - begin for begin, end, perms in set(mapped_ranges()) - before if perms == "rw-s")
    assert spans == [4096, 8192, 2 * 8192]
    assert slots.access is Access.OPEN


def test_a_writer_keeps_no_descriptor_of_the_arena() -> None:
    memory = ArenaMemory.create(LAYOUT, 77)

    def arena_descriptors() -> int:
        links = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
        return sum("kvfabric-arena-77" in str(link) for link in links)

    assert arena_descriptors() == 1  # the holder's own
    slots = WritableSlots.map(memory.read_write_fd(), LAYOUT, [0])
    reader = map_read_only(memory.read_only_fd(), LAYOUT)
    assert arena_descriptors() == 1
    assert slots.view(0).nbytes == reader.payload(0).nbytes


def test_a_late_write_after_the_seal_fails(memory: ArenaMemory) -> None:
    slots = WritableSlots.map(memory.read_write_fd(), LAYOUT, [5])
    view = slots.view(5)
    alias = view[10:20]
    view[:] = 9
    slots.seal()
    assert (view == 9).all()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    assert died_of_fault(lambda: poke(alias))
    assert (memory.arena.payload(5) == 9).all()


def test_a_late_write_after_a_revocation_neither_faults_nor_reaches_the_arena(memory: ArenaMemory) -> None:
    slots = WritableSlots.map(memory.read_write_fd(), LAYOUT, [5])
    view = slots.view(5)
    alias = view[10:20]
    view[:] = 9
    slots.revoke()
    slots.seal()
    assert slots.access is Access.REVOKED
    assert not died_of_fault(lambda: poke(alias))
    alias[:] = 77
    assert (alias == 77).all()
    assert (memory.arena.payload(5) == 9).all()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_mapping_ends_with_its_last_view(memory: ArenaMemory) -> None:
    def shared_read_only() -> int:
        return sum(perms == "r--s" for _, _, perms in mapped_ranges())

    before = shared_read_only()
    reader = map_read_only(memory.read_only_fd(), LAYOUT)
    kept = reader.payload(0)[:16]
    del reader
    gc.collect()
    assert shared_read_only() == before + 1
    assert not kept.any()
    del kept
    gc.collect()
    assert shared_read_only() == before


@pytest.mark.parametrize("kind", ["file", "unsealed", "size", "blank"])
def test_a_descriptor_that_is_no_arena_is_refused(kind: str, tmp_path: Path) -> None:
    if kind == "file":
        path = tmp_path / "file"
        path.write_bytes(bytes(LAYOUT.size_bytes))
        fd = os.open(path, os.O_RDWR)
    elif kind == "unsealed":
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, LAYOUT.size_bytes)
    elif kind == "size":
        fd = ArenaMemory.create(ArenaLayout([PoolLayout(0, 0, 1, 1)]), 1).read_write_fd()
    else:
        memory = ArenaMemory.create(LAYOUT, 1)
        memory.arena.bytes[:8] = 0
        fd = memory.read_write_fd()
    with pytest.raises(WireError, match="arena"):
        map_read_only(fd, LAYOUT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_closed_arena_hands_out_nothing_and_stays_mapped(memory: ArenaMemory) -> None:
    memory.close()
    memory.close()
    with pytest.raises(ProtocolError, match="closed"):
        memory.read_only_fd()
    memory.arena.payload(0)[:] = 1


def taken_bytes(memory: ArenaMemory) -> int:
    fd = memory.read_only_fd()
    taken = os.fstat(fd).st_blocks * 512
    os.close(fd)
    return taken


def test_a_reserved_arena_takes_its_pages_at_once_and_an_ordinary_one_as_they_are_written() -> None:
    layout = ArenaLayout([PoolLayout(0, 0, 16, 1 << 20)])
    assert taken_bytes(ArenaMemory.create(layout, 1)) < 64 * 1024
    assert taken_bytes(ArenaMemory.create(layout, 1, reserve=True)) >= layout.size_bytes


def test_a_reservation_beyond_free_memory_is_refused_before_it_takes_any() -> None:
    blocks = 2 * memory_available_bytes() // (1 << 30) + 1
    huge = ArenaLayout([PoolLayout(0, 0, blocks, 1 << 30)])
    free = memory_available_bytes()
    with pytest.raises(SpecError, match="does not fit"):
        ArenaMemory.create(huge, 1, reserve=True)
    assert memory_available_bytes() > free - (1 << 30)


HOLDER = """
import socket, sys
from kvfabric.fabric.arena import ArenaLayout, PoolLayout
from kvfabric.transport.memfd import ArenaMemory
layout = ArenaLayout([PoolLayout(0, 0, 64, 1 << 20)])
memory = ArenaMemory.create(layout, int(sys.argv[2]), reserve=True)
memory.arena.payload(9)[:] = 9
sock = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(sock, [b"x"], [memory.read_only_fd()])
sock.recv(1)
"""


def _what_it_has(process: Path) -> str:
    text = []
    with contextlib.suppress(OSError):  # it ended meanwhile
        text.append((process / "maps").read_text())
        for path in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
                text.append(str(path.readlink()))
    return "\n".join(text)


def processes_with(name: str) -> set[int]:
    """Processes that map a memfd of this name or hold a descriptor of it."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and name in _what_it_has(process):
            found.add(int(process.name))
    return found


def test_kill_9_of_a_holder_leaves_readers_readable_and_then_no_memory_and_no_file(tmp_path: Path) -> None:
    layout = ArenaLayout([PoolLayout(0, 0, 64, 1 << 20)])
    incarnation = os.getpid() << 20 | 1
    name = f"kvfabric-arena-{incarnation}"
    ours, theirs = socket.socketpair()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(theirs.fileno()), str(incarnation)],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    theirs.close()
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    reader = map_read_only(descriptors[0], layout)
    assert processes_with(name) == {os.getpid(), holder.pid}
    holder.kill()
    holder.wait()
    assert (reader.payload(9) == 9).all()
    assert processes_with(name) == {os.getpid()}
    del reader
    gc.collect()
    assert processes_with(name) == set()  # a memfd's pages live exactly as long as its mappings and descriptors
    assert not list(tmp_path.iterdir())
    assert not list(Path("/dev/shm").glob("*kvfabric*"))
    ours.close()


@pytest.mark.parametrize("length", [0, 1, 4096, 256 * 1024, 700_001])
def test_a_copy_is_digested_as_its_destination(length: int) -> None:
    source = np.arange(length, dtype=np.uint64).astype(np.uint8)
    target = np.zeros(length, dtype=np.uint8)
    assert copy_and_checksum(target, source) == checksum(target) == checksum(source)
    assert (target == source).all()


def test_the_checksum_is_xxh3_128_in_canonical_order() -> None:
    assert checksum(np.zeros(0, dtype=np.uint8)).hex() == "99aa06d3014798d86001c324468d497f"
