"""The arena in shared memory: one memfd, mapped by its holder, its writers and its readers.

Who maps what::

    holder    whole arena, read-write      ArenaMemory.create(layout, incarnation)
    its own child processes, likewise      map_read_write(fd, layout), fd from ArenaMemory.read_write_fd()
    reader    whole arena, read-only       map_read_only(fd, layout), fd from ArenaMemory.read_only_fd()
    writer    own attempt's slots only     WritableSlots.map(fd, layout, slots), fd from ArenaMemory.read_write_fd()

Whole rows are written and read by the descriptors themselves (``slot_files``), and nothing is mapped for it.

A memfd has no name: it lives as long as a descriptor or a mapping of it does, so kill -9 leaves
nothing behind. It is sealed against shrinking and growing, because a reader of a shrunken file
dies of SIGBUS. What each handle does when dropped: a mapping ends with the last numpy view into it,
never earlier, so that no view points at memory that is gone; descriptors are closed by whoever
received them (``map_read_only`` and ``WritableSlots.map`` take the descriptor over and close it).

The read-write descriptor is trust among processes of one user, not a wall between users: a writer maps its own
slots only and closes the descriptor with it, or writes them and closes it then, so that a stray pointer cannot reach more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..fabric.arena import Arena, ArenaLayout, Bytes
from ..fabric.kinds import ProtocolError, SpecError, WireError
from .digest import Digester, digester

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL = 0x8
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _raise_errno(what: str) -> NoReturn:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")


class _Mapping:
    """A range of mapped memory that unmaps when the last numpy view into it is gone.

    ``mmap.mmap`` is not used: it keeps a duplicate of the descriptor open, which a writer must not,
    and it can neither change the protection of a range nor replace it.
    """

    def __init__(self, fd: int, offset: int, size: int, *, writeable: bool) -> None:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writeable else 0)
        address = _libc.mmap(None, size, prot, mmap.MAP_SHARED, fd, offset)
        if address == _MAP_FAILED:
            _raise_errno("arena: mmap")
        self.address = int(address)
        self.size = size
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, not writeable),
        }
        finalizer = weakref.finalize(self, _libc.munmap, self.address, size)
        # At interpreter exit other threads may still read the range; the kernel unmaps it with the process.
        finalizer.atexit = False

    def array(self) -> Bytes:
        """The range as uint8 of shape (size,); the array keeps the mapping alive."""
        return np.asarray(self)

    def protect(self) -> None:
        """Make the range read-only in this process: a write to it is a fault."""
        if _libc.mprotect(self.address, self.size, mmap.PROT_READ) != 0:
            _raise_errno("arena: mprotect")

    def detach(self) -> None:
        """Put private memory in the range's place, in one step: no access faults, no write reaches the arena."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        got = _libc.mmap(self.address, self.size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if got == _MAP_FAILED:
            _raise_errno("arena: mmap over a revoked range")

    def advise(self, advice: int) -> bool:
        """Whether the kernel took the hint."""
        return int(_libc.madvise(self.address, self.size, advice)) == 0


def _new_memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)  # kernels before 6.3 do not know the flag


class ArenaMemory:
    """A holder's arena: the memfd, its read-write mapping and the ``Arena`` over it.

    Closing it closes the descriptor; the mapping stays until the last view is gone, which a link
    that registered it relies on.
    """

    def __init__(self, fd: int, mapping: _Mapping, arena: Arena) -> None:
        self._fd = fd
        self._closer = weakref.finalize(self, os.close, fd)
        self._mapping = mapping
        self.arena = arena

    @classmethod
    def create(cls, layout: ArenaLayout, incarnation: int, *, reserve: bool = False) -> ArenaMemory:
        """Make, seal, map and format an arena.

        With ``reserve`` all pages are taken now: want of memory is then a SpecError here instead of
        a SIGBUS at the first write to a page. Raises OSError if the kernel refuses.
        """
        fd = _new_memfd(f"kvfabric-arena-{incarnation}")
        try:
            os.ftruncate(fd, layout.size_bytes)
            os.fchmod(fd, 0o600)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = _Mapping(fd, 0, layout.size_bytes, writeable=True)
            if reserve:
                _reserve(fd, mapping)
            arena = Arena(layout, mapping.array())
            arena.format(incarnation)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, mapping, arena)

    @property
    def layout(self) -> ArenaLayout:
        return self.arena.layout

    @property
    def address(self) -> int:
        """Virtual address of the arena's first byte in this process, for registering it with a link."""
        return self._mapping.address

    def read_only_fd(self) -> int:
        """A descriptor that can only be mapped for reading; the caller closes it (or sends it, then closes it)."""
        return os.open(f"/proc/self/fd/{self._open_fd()}", os.O_RDONLY | os.O_CLOEXEC)

    def read_write_fd(self) -> int:
        """A descriptor for a writer, whose ``WritableSlots`` takes it over; the caller closes its own copy."""
        return os.dup(self._open_fd())

    def close(self) -> None:
        """Close the descriptor. Views and mappings, here and elsewhere, stay valid."""
        self._closer()

    def _open_fd(self) -> int:
        if not self._closer.alive:
            raise ProtocolError("arena: closed, it hands out no more descriptors")
        return self._fd


def _reserve(fd: int, mapping: _Mapping) -> None:
    """Take all pages. The kernel would rather kill a process than refuse them, so what is free is asked first."""
    available = memory_available_bytes()
    if mapping.size > available:
        raise SpecError(f"pools: an arena of {mapping.size} bytes does not fit the {available} bytes of free memory")
    try:
        os.posix_fallocate(fd, 0, mapping.size)
    except OSError as error:
        raise SpecError(f"pools: no memory for an arena of {mapping.size} bytes ({error.strerror})") from None
    mapping.advise(_MADV_POPULATE_WRITE)  # only a hint: without it each page costs a soft fault once


def memory_available_bytes() -> int:
    """Free memory of the machine, or of this process's memory control group where that is less."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = next(
        (line[3:] for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines() if line[:3] == "0::"),
        "/",
    )
    folder = Path("/sys/fs/cgroup") / group.lstrip("/")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = (folder / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return available  # no unified hierarchy, or its root, which has no limit
    return available if limit == "max" else min(available, int(limit) - int(used))


def _check_fd(fd: int, layout: ArenaLayout) -> None:
    """Raises WireError unless ``fd`` is a memfd of the layout's size that nobody can shrink."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise WireError("arena: the descriptor is not a memfd") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise WireError("arena: the memfd is not sealed against shrinking")
    size = os.fstat(fd).st_size
    if size != layout.size_bytes:
        raise WireError(f"arena: the memfd has {size} bytes, the layout {layout.size_bytes}")


def map_read_only(fd: int, layout: ArenaLayout) -> Arena:
    """Map another process's arena for reading; takes ``fd`` over and closes it.

    numpy refuses writes through the views with ValueError; any other write (torch, ctypes) faults,
    because the kernel mapped the pages PROT_READ. Raises WireError for a descriptor that is no
    sealed memfd of this layout or holds no arena.
    """
    try:
        _check_fd(fd, layout)
        mapping = _Mapping(fd, 0, layout.size_bytes, writeable=False)
    finally:
        os.close(fd)
    arena = Arena(layout, mapping.array())
    arena.verify_format()
    return arena


def map_read_write(fd: int, layout: ArenaLayout) -> Arena:
    """Map a holder's whole arena for its own child process; takes ``fd`` over and closes it.

    Raises WireError for a descriptor that is no sealed memfd of this layout or holds no arena.
    """
    try:
        _check_fd(fd, layout)
        mapping = _Mapping(fd, 0, layout.size_bytes, writeable=True)
    finally:
        os.close(fd)
    arena = Arena(layout, mapping.array())
    arena.verify_format()
    return arena


class Access(Enum):
    """What a writer may still do with its slots."""

    OPEN = "open"
    SEALED = "sealed"
    REVOKED = "revoked"


class WritableSlots:
    """What a writer holds of an arena while its attempt is open: its own slots' pages, nothing else.

    ``seal`` ends writing after the writer's own commit: views stay readable, numpy refuses to write
    through the views handed out (ValueError), and a write through a slice or tensor made from them
    faults; the writer said it was done, so a write after it is a bug that should be loud.

    ``revoke`` ends it when the attempt was taken away (superseded, timed out, holder lost) while a
    copy may be under way in another thread or library: the same addresses become private memory, so
    the copy ends harmlessly and none of it reaches the arena. What is read afterwards means nothing.
    """

    def __init__(self, mappings: list[_Mapping], views: dict[int, Bytes], digests: Digester) -> None:
        self._digests = digests
        self._mappings = mappings
        self._views = views
        self.access = Access.OPEN

    @classmethod
    def map(cls, fd: int, layout: ArenaLayout, slots: Sequence[int]) -> WritableSlots:
        """Map the pages of ``slots``, neighbours in one mapping; takes ``fd`` over and closes it.

        Raises WireError for a descriptor that is not this arena's, IndexError for a slot outside it.
        """
        mappings: list[_Mapping] = []
        views: dict[int, Bytes] = {}
        try:
            _check_fd(fd, layout)
            for run in _page_runs(layout, slots):
                first = layout.offset_of(run[0])
                end = layout.offset_of(run[-1]) + layout.pools[layout.pool_of(run[-1])].stride_bytes
                mapping = _Mapping(fd, first, end - first, writeable=True)
                # All of it will be written: one call in place of a fault a page, which took longer than the copy.
                mapping.advise(_MADV_POPULATE_WRITE)
                mappings.append(mapping)
                whole = mapping.array()
                for slot in run:
                    start = layout.offset_of(slot) - first
                    views[slot] = whole[start : start + layout.pools[layout.pool_of(slot)].slot_bytes]
        finally:
            os.close(fd)
        return cls(mappings, views, digester(layout.checksum))

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(self._views)

    def view(self, slot: int) -> Bytes:
        """The slot's payload, uint8 of shape (slot_bytes,). Raises KeyError for a slot of another attempt."""
        return self._views[slot]

    def checksums(self, slots: Sequence[int]) -> list[bytes]:
        """The digests of whole slots, in order."""
        return [self._digests.checksum(self._views[slot]) for slot in slots]

    def seal(self) -> None:
        """End writing; reading goes on. Idempotent; a revoked attempt stays revoked."""
        if self.access is Access.OPEN:
            self._end(Access.SEALED)

    def revoke(self) -> None:
        """Cut the views off from the arena. Idempotent."""
        if self.access is not Access.REVOKED:
            self._end(Access.REVOKED)

    def _end(self, access: Access) -> None:
        for view in self._views.values():
            view.flags.writeable = False
        for mapping in self._mappings:
            if access is Access.SEALED:
                mapping.protect()
            else:
                mapping.detach()
        self.access = access


def _page_runs(layout: ArenaLayout, slots: Sequence[int]) -> list[list[int]]:
    """Slots in the order of the file, cut where the next one does not begin where the last one's pages end."""
    runs: list[list[int]] = []
    end = -1
    for offset, slot in sorted((layout.offset_of(slot), slot) for slot in set(slots)):
        if offset == end:
            runs[-1].append(slot)
        else:
            runs.append([slot])
        end = offset + layout.pools[layout.pool_of(slot)].stride_bytes
    return runs
