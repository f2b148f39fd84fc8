"""Positioned reads and writes of whole pages, past the page cache where the file system can.

Plain ``preadv`` and ``pwritev`` with O_DIRECT straight between the arena's pages and the file: why
this and not NIXL's POSIX backend is in docs/decisions/0003-disk-io.md.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np

from ...fabric.arena import PAGE_BYTES, Bytes

IO_BYTES = 4 << 20
"""Moved by one system call at most: larger gains nothing, and a cancelled job ends within one."""
VECTORS_MAX = 512

FILE_MODE = 0o600


def page_buffer(nbytes: int) -> Bytes:
    """Zeroed private memory on page boundaries, uint8 of shape (nbytes rounded up to pages,)."""
    size = max(-(-nbytes // PAGE_BYTES) * PAGE_BYTES, PAGE_BYTES)
    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)


def open_at(folder: int, name: str, flags: int) -> int:
    """A descriptor past the page cache; through it where the file system knows no O_DIRECT (tmpfs)."""
    try:
        return os.open(name, flags | os.O_DIRECT | os.O_CLOEXEC, FILE_MODE, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(name, flags & ~os.O_EXCL | os.O_CLOEXEC, FILE_MODE, dir_fd=folder)


def write_all(fd: int, buffers: Sequence[Bytes], offset: int) -> int:
    """Write whole pages one after another; returns their bytes. Raises OSError for a disk that takes less."""
    left = [buffer.data for buffer in buffers]
    done = 0
    while left:
        wrote = os.pwritev(fd, left[:VECTORS_MAX], offset + done)
        if wrote <= 0:
            raise OSError(errno.EIO, "the disk took no bytes")
        done += wrote
        left = _rest(left, wrote)
    return done


def read_all(fd: int, buffers: Sequence[Bytes], offset: int) -> int:
    """Fill whole pages one after another; returns how many bytes came before the file ended."""
    left = [buffer.data for buffer in buffers]
    done = 0
    while left:
        got = os.preadv(fd, left[:VECTORS_MAX], offset + done)
        done += got
        if got == 0 or got % PAGE_BYTES:
            break
        left = _rest(left, got)
    return done


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What of the buffers lies behind the first ``done`` bytes."""
    for number, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[number + 1 :]]
        done -= buffer.nbytes
    return []


def sync_folder(folder: int) -> None:
    """Make renames and removals in a folder last."""
    os.fsync(folder)
