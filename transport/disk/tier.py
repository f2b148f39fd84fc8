"""The tier as the child sees it: the store where it can be opened, the reason where it cannot.

::

    unavailable, vanished, lying --probe passes--> ok --a write or read fails, and so does a probe--> ...
    full, read_only: reading goes on, writing waits until a probe passes

A failure of one operation is that operation's; the tier's state changes only where a look at the
disk itself confirms it, and heals by the same look.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from ...fabric.arena import PAGE_BYTES, Arena
from ...fabric.extents import extent_bytes
from ...fabric.kinds import Reason
from .blocks import Known, Pace, Want
from .codecs import Codec
from .faults import DiskFault, DiskFaults
from .folders import FolderBusy
from .io import open_at, page_buffer, read_all, write_all
from .lies import Lies
from .protocol import Condition, Extent, Gone, Health, Opened, Read, ReadDone, Scrub, Scrubbed, Setup, Write, Wrote
from .store import Draft, ExtentStore, NoRoom

CHECK_S = 1.0
PROBE = "probe"
PROBE_BYTES = 256 * 1024
REMOVED_TOLD_MAX = 32
WANTED_BYTES_MAX = 16 << 20
"""A disk with this much room is not full, whatever did not fit: smaller extents go on."""

DiskError = (OSError, sqlite3.Error)


class Tier:
    """One disk folder over its good and bad times. Thread-safe; ``tell`` sends to the holder."""

    def __init__(self, setup: Setup, arena: Arena, faults: DiskFaults, tell: Callable[[Any], None]) -> None:
        self._setup = setup
        self._arena = arena
        self._faults = faults
        self._tell = tell
        self._codec = Codec(setup.codec)
        self._passports = {p.layout_fingerprint(): p for p in setup.passports}
        self._lock = threading.Lock()
        self._looking = threading.RLock()
        """Held while the tier's health is looked at, changed and told."""
        self._store: ExtentStore | None = None
        self._users: dict[int, int] = {}
        self._retired: dict[int, ExtentStore] = {}
        self._health = Health.STARTING
        self._detail = ""
        self._lies = Lies()
        self._told: Condition | None = None
        self._wanted_bytes = 0
        """Bytes that a write found no room for: room for as many is what heals a full disk."""

    # --- the store in use ----------------------------------------------------------------------

    def _borrow(self) -> ExtentStore | None:
        with self._lock:
            store = self._store
            if store is not None:
                self._users[id(store)] = self._users.get(id(store), 0) + 1
            return store

    def _give_back(self, store: ExtentStore) -> None:
        """Close a store that was replaced once nobody uses it: never a descriptor under a running read."""
        with self._lock:
            self._users[id(store)] -= 1
            close = not self._users[id(store)] and self._retired.pop(id(store), None) is not None
            if not self._users[id(store)]:
                del self._users[id(store)]
        if close:
            store.close()

    def _drop_store(self) -> None:
        with self._lock:
            store, self._store = self._store, None
            if store is None:
                return
            if id(store) in self._users:
                self._retired[id(store)] = store
                return
        store.close()

    # --- looking after it ----------------------------------------------------------------------

    def check(self) -> None:
        """Open what can be opened, look whether the disk is still there, tell what changed."""
        with self._looking:
            if self._store is None:
                self._open()
            store = self._borrow()
            if store is not None:
                try:
                    self._look(store)
                finally:
                    self._give_back(store)
            self._say()

    def _open(self) -> None:
        if self._retired:
            return  # the folder's lock is still held by a read that hangs
        setup = self._setup
        try:
            store, found = ExtentStore.open(
                Path(setup.root),
                setup.place,
                setup.owner,
                self._arena,
                bytes_max=setup.bytes_max,
                free_floor_bytes=setup.free_floor_bytes,
                faults=self._faults,
            )
        except DiskError as error:
            if self._health is not Health.VANISHED or not isinstance(error, FolderBusy):
                self._health = Health.UNAVAILABLE
            self._detail = _words(error)
            return
        for header in found.headers:
            self._tell(Extent(header.uid, header.entries, header.file_bytes))
        removed = tuple(found.refused[:REMOVED_TOLD_MAX])
        self._tell(Opened(tuple(store.uids()), removed, found.adopted, found.temporary))
        with self._lock:
            self._store = store
        self._health, self._detail = Health.OK, found.catalogue
        self._lies.clear()

    def _look(self, store: ExtentStore) -> None:
        """Ask the disk itself."""
        if store.folder.moved():
            self._health, self._detail = Health.VANISHED, f"{store.folder.path} is not the folder that was opened"
            self._drop_store()
            return
        if self._lies.found:
            self._health, self._detail = Health.LYING, self._lies.words
        if self._health is not Health.OK:
            self._probe(store)
        elif self._floor_passed(store):
            self._health, self._detail = Health.FULL, self._floor_words(store)

    def _floor_passed(self, store: ExtentStore) -> bool:
        return store.free_bytes() - self._wanted_bytes < self._setup.free_floor_bytes

    def _floor_words(self, store: ExtentStore) -> str:
        wanted = f" beside {self._wanted_bytes} to be written" if self._wanted_bytes else ""
        return f"{store.free_bytes()} bytes are free, {self._setup.free_floor_bytes} must stay so{wanted}"

    def _probe(self, store: ExtentStore) -> None:
        """Write, read back and compare a small file: what fails names the state, what passes heals."""
        try:
            self._faults.raise_for(DiskFault.OPEN_FAILS)
            self._faults.raise_for(DiskFault.READ_ONLY)
            if self._floor_passed(store):
                raise NoRoom(self._floor_words(store))
            if not _remembers(store.folder.handle, self._faults):
                self._health, self._detail = Health.LYING, "a probe read back other bytes than were written"
                return
        except OSError as error:
            self._health, self._detail = _health_of(error), _words(error)
            return
        if self._health is Health.LYING:
            self._lies.clear()
        self._health, self._detail, self._wanted_bytes = Health.OK, "", 0

    def _suspect(self, store: ExtentStore, wanted_bytes: int = 0) -> None:
        """An operation failed: look at once whether the disk did."""
        with self._looking:
            self._wanted_bytes = min(wanted_bytes, WANTED_BYTES_MAX)
            if store.folder.moved():
                self._look(store)
            else:
                self._probe(store)
            self._say()

    # --- jobs ----------------------------------------------------------------------------------

    def write(self, message: Write, pace: Pace) -> None:
        """Write and answer. Raises Cancelled."""
        refused = self._refused_writes()
        store = None if refused is not None else self._borrow()
        if store is None:
            self._tell(Wrote(message.token, refused or Reason.DISK_UNAVAILABLE, self._detail, 0))
            return
        draft = Draft(message.uid, message.entries, message.slots, self._passports, self._codec)
        try:
            file_bytes = store.write(draft, pace)
            self._tell(Wrote(message.token, None, "", file_bytes))
        except DiskError as error:
            self._tell(Wrote(message.token, _reason_of(error), _words(error), 0))
            self._suspect(store, extent_bytes(message.entries))
        finally:
            self._give_back(store)

    def read(self, message: Read, pace: Pace) -> None:
        """Read and answer. Raises Cancelled."""
        store = None if self._refused() is not None else self._borrow()
        if store is None:
            self.refuse_read(message)
            return
        try:
            got = store.read([Want(*block) for block in message.blocks], pace)
            details = [g.detail for g in got if g.detail]
            blocks = tuple((g.slot, g.checksum, g.refused) for g in got)
            self._tell(ReadDone(message.token, blocks, details[0] if details else ""))
            with self._looking:
                self._lies.add(got)
            failed = [g for g in got if g.refused is not None]
            if failed:
                self._forget_missing(store, {uid for uid, _, _ in message.blocks})
            if self._lies.found or any(g.refused is Reason.DISK_UNAVAILABLE for g in got):
                self._suspect(store)
        finally:
            self._give_back(store)

    def scrub(self, message: Scrub, pace: Pace) -> None:
        """Read blocks again and answer; many that are wrong are the disk's fault. Raises Cancelled."""
        store = None if self._refused() is not None else self._borrow()
        if store is None:
            self.refuse_scrub(message)
            return
        try:
            got = store.scrub(message.uid, message.numbers, pace)
            self._tell(Scrubbed(message.token, tuple(g.checksum for g in got)))
            with self._looking:
                self._lies.add(got)
            if self._lies.found:
                self._suspect(store)
        except OSError:
            self.refuse_scrub(message)
            self._forget_missing(store, {message.uid})
            self._suspect(store)
        finally:
            self._give_back(store)

    def refuse_scrub(self, message: Scrub) -> None:
        """Answer a look that does not happen, or not to its end."""
        self._tell(Scrubbed(message.token, ()))

    def _forget_missing(self, store: ExtentStore, uids: Collection[bytes]) -> None:
        gone = tuple(uid for uid in uids if store.missing(uid))
        if gone and not store.folder.moved():
            for uid in gone:
                store.lost(uid)
            self._tell(Gone(gone))

    def refuse_write(self, message: Write) -> None:
        """Answer a write that does not happen."""
        self._tell(Wrote(message.token, Reason.DISK_UNAVAILABLE, self._detail or "called off", 0))

    def refuse_read(self, message: Read) -> None:
        """Answer a read that does not happen, or not to its end."""
        refused = self._refused() or Reason.RESTORE_FAILED
        blocks = tuple((slot, None, refused) for _, _, slot in message.blocks)
        self._tell(ReadDone(message.token, blocks, self._detail or "called off"))

    def file_of(self, uid: bytes) -> tuple[Path, Known] | None:
        """The file of an extent that stands here, and what is in it; None for any other."""
        store = self._store
        return None if store is None else store.file_of(uid)

    def delete(self, uid: bytes) -> None:
        """Remove an extent; where the disk does not let it, the next opening does."""
        store = self._borrow()
        if store is None:
            return
        try:
            store.delete(uid)
        except DiskError:
            self._suspect(store)
        finally:
            self._give_back(store)

    # --- telling -------------------------------------------------------------------------------

    def _refused(self) -> Reason | None:
        """Why nothing works; None where reading does."""
        broken = self._health in (Health.STARTING, Health.UNAVAILABLE, Health.VANISHED, Health.LYING)
        return Reason.DISK_UNAVAILABLE if broken or self._store is None else None

    def _refused_writes(self) -> Reason | None:
        if self._health is Health.FULL:
            return Reason.DISK_FULL
        return Reason.DISK_UNAVAILABLE if self._health is Health.READ_ONLY else self._refused()

    def _say(self) -> None:
        """Tell the tier's condition, if it is another than last time."""
        store = self._borrow()
        used = free = extents = 0
        if store is not None:
            try:
                used, free, extents = store.used_bytes, store.free_bytes(), store.extents
            except OSError as error:
                self._health, self._detail = Health.UNAVAILABLE, _words(error)
            finally:
                self._give_back(store)
        condition = Condition(
            self._health,
            self._refused(),
            self._refused_writes(),
            self._detail,
            used,
            free,
            extents,
            self._lies.wrong_blocks,
        )
        if condition != self._told:
            self._told = condition
            self._tell(condition)


def _remembers(folder: int, faults: DiskFaults) -> bool:
    """Whether what is written to the folder is what is read from it. Raises OSError."""
    pattern = page_buffer(PROBE_BYTES)
    pattern[:] = np.frombuffer(os.urandom(PROBE_BYTES), dtype=np.uint8)
    back = page_buffer(PROBE_BYTES)
    fd = open_at(folder, PROBE, os.O_RDWR | os.O_CREAT)
    try:
        write_all(fd, [pattern], 0)
        os.fsync(fd)
        came = read_all(fd, [back], 0)
        if faults.meets(DiskFault.FLIPPED):
            back[PAGE_BYTES] ^= 0xFF
    finally:
        os.close(fd)
        os.unlink(PROBE, dir_fd=folder)
    return came == PROBE_BYTES and bool(np.array_equal(pattern, back))


def _health_of(error: OSError) -> Health:
    if isinstance(error, NoRoom) or error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Health.FULL
    return Health.READ_ONLY if error.errno == errno.EROFS else Health.UNAVAILABLE


def _reason_of(error: Exception) -> Reason:
    full = isinstance(error, OSError) and _health_of(error) is Health.FULL
    if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
        full = True
    return Reason.DISK_FULL if full else Reason.DISK_UNAVAILABLE


def _words(error: Exception) -> str:
    """One line: the file where there is one, and what the system says."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
