"""The extents in one folder: written whole or not at all, found again, read block by block.

    write    catalogue: writing -> temporary file -> fsync -> rename -> fsync folder -> catalogue: stands
    delete   catalogue: doomed -> unlink -> catalogue: forgotten
    open     what was doomed goes, temporary files go, what does not verify goes, the rest is served

A file's name is its uid, drawn anew for each write, so that no clean-up can meet a successor of the
file it was meant for.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...fabric.arena import PAGE_BYTES, Arena, Bytes
from ...fabric.effects import ExtentEntry
from ...fabric.extents import PROLOGUE_BYTES, extent_bytes, header_bytes, pages
from ...fabric.kinds import Reason, WireError
from ...fabric.passport import AbiPassport
from . import format as extent_format
from .blocks import NO_SLOT, Block, Got, Known, Pace, Want, by_extent, found_in, judge, runs, target
from .catalogue import Catalogue, Stage
from .codecs import Codec, pack
from .faults import DiskFault, DiskFaults
from .folders import Folder, take
from .format import Header, Place
from .io import IO_BYTES, VECTORS_MAX, open_at, page_buffer, read_all, sync_folder, write_all

SUFFIX = ".kvx"
TEMPORARY = ".tmp"


class NoRoom(OSError):
    """The byte cap or the free-space floor would be passed."""


@dataclass(slots=True)
class Reconciled:
    """What opening a folder found: the extents that verify, and what was removed."""

    headers: list[Header] = field(default_factory=list)
    temporary: int = 0
    doomed: int = 0
    refused: list[str] = field(default_factory=list)
    missing: int = 0
    adopted: int = 0
    catalogue: str = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """One extent to be written: its uid, what it holds, and how it is packed."""

    uid: bytes
    entries: Sequence[ExtentEntry]
    slots: Sequence[int]
    passports: Mapping[bytes, AbiPassport]
    """Those known, by layout fingerprint."""
    codec: Codec = Codec.NONE


class ExtentStore:
    """An open folder of extents over one arena. Thread-safe."""

    def __init__(
        self,
        folder: Folder,
        catalogue: Catalogue,
        arena: Arena,
        *,
        bytes_max: int,
        free_floor_bytes: int,
        faults: DiskFaults,
    ) -> None:
        self.folder = folder
        self.catalogue = catalogue
        self.arena = arena
        self.bytes_max = bytes_max
        self.free_floor_bytes = free_floor_bytes
        self.faults = faults
        self._lock = threading.Lock()
        self._extents: dict[bytes, Known] = {}
        self._promised: dict[bytes, int] = {}
        """Bytes of files being written, by uid."""

    # --- opening -------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        root: Path,
        place: str,
        owner: str,
        arena: Arena,
        *,
        bytes_max: int,
        free_floor_bytes: int,
        faults: DiskFaults | None = None,
    ) -> tuple[ExtentStore, Reconciled]:
        """Take the folder, reconcile it with its catalogue. Raises OSError or sqlite3.Error."""
        faults = faults or DiskFaults()
        faults.raise_for(DiskFault.OPEN_FAILS)
        folder = take(root, place, owner)
        try:
            catalogue, given_up = Catalogue.open(folder.path)
        except BaseException:
            folder.close()
            raise
        store = cls(folder, catalogue, arena, bytes_max=bytes_max, free_floor_bytes=free_floor_bytes, faults=faults)
        try:
            found = store._reconcile()
        except BaseException:
            store.close()
            raise
        found.catalogue = given_up
        return store, found

    def _reconcile(self) -> Reconciled:
        found = Reconciled()
        rows = {row.uid: row for row in self.catalogue.rows()}
        present = set()
        for name in os.listdir(self.folder.handle):  # noqa: PTH208 - of the folder that was opened
            uid = uid_of(name)
            if uid is None:
                continue  # not ours to judge
            row = rows.get(uid)
            if name.endswith(TEMPORARY):
                self._unlink(name)
                found.temporary += 1
            elif row is not None and row.stage is Stage.DOOMED:
                self._unlink(name)
                found.doomed += 1
            else:
                present.add(uid)
        order = sorted(present, key=lambda uid: rows[uid].number if uid in rows else 0, reverse=True)
        wrong: list[bytes] = []
        unreadable: OSError | None = None
        for uid in order:
            try:
                header = self._verify(uid)
            except (WireError, OSError) as error:
                unreadable = error if isinstance(error, OSError) else unreadable
                found.refused.append(f"{uid.hex()}: {error}")
                wrong.append(uid)
                continue
            if uid not in rows or rows[uid].stage is not Stage.STANDS or rows[uid].file_bytes != header.file_bytes:
                self.catalogue.stands(uid, header.file_bytes)
                found.adopted += 1
            self._extents[uid] = Known(header.file_bytes, header.places)
            found.headers.append(header)
        if unreadable is not None and not found.headers:
            raise unreadable  # the disk's fault rather than the files'
        for uid in wrong:
            self.delete(uid)
        for uid, row in rows.items():
            if uid not in self._extents:
                found.missing += row.stage is Stage.STANDS and uid not in present
                self.catalogue.forget(uid)
        sync_folder(self.folder.handle)
        return found

    def _verify(self, uid: bytes) -> Header:
        """The header of a file, if the file is what it says. Raises WireError, or OSError for the disk."""
        fd = open_at(self.folder.handle, uid.hex() + SUFFIX, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            front = page_buffer(PAGE_BYTES)
            got = read_all(fd, [front], 0)
            total, _ = extent_format.index_bytes(front[: min(got, PROLOGUE_BYTES)].tobytes(), size)
            whole = page_buffer(total)
            got = read_all(fd, [whole], 0)
        finally:
            os.close(fd)
        header = extent_format.decode(whole[: min(got, total)].tobytes(), size)
        if header.uid != uid:
            raise WireError("extent: under another name than its own")
        return header

    # --- sizes ---------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of the files that stand or are being written."""
        with self._lock:
            return self._used()

    def _used(self) -> int:
        return sum(known.file_bytes for known in self._extents.values()) + sum(self._promised.values())

    def file_of(self, uid: bytes) -> tuple[Path, Known] | None:
        """The file of an extent that stands here, and what is in it; None for any other."""
        known = self._extents.get(uid)
        return None if known is None else (self.folder.path / (uid.hex() + SUFFIX), known)

    @property
    def extents(self) -> int:
        return len(self._extents)

    def uids(self) -> list[bytes]:
        with self._lock:
            return list(self._extents)

    def free_bytes(self) -> int:
        """Bytes the file system still gives to this user."""
        found = os.fstatvfs(self.folder.handle)
        return found.f_bavail * found.f_frsize

    def _promise(self, uid: bytes, nbytes: int) -> None:
        with self._lock:
            if self._used() + nbytes > self.bytes_max:
                raise NoRoom(f"{nbytes} bytes more would pass the cap of {self.bytes_max}")
            left = self.free_bytes() - sum(self._promised.values()) - nbytes
            if left < self.free_floor_bytes:
                raise NoRoom(f"{nbytes} bytes more would leave less than {self.free_floor_bytes} bytes free")
            self._promised[uid] = nbytes

    # --- writing -------------------------------------------------------------------------------

    def write(self, draft: Draft, pace: Pace) -> int:
        """Write slots as one extent; returns the file's bytes.

        Raises OSError (NoRoom among them), sqlite3.Error or Cancelled; then there is no file.
        """
        uid, room = draft.uid, extent_bytes(draft.entries)
        self.faults.raise_for(DiskFault.OPEN_FAILS)
        self.faults.raise_for(DiskFault.READ_ONLY)
        self._promise(uid, room)
        try:
            self.faults.raise_for(DiskFault.FULL)
            self.catalogue.begin(uid, room)
            known = self._stand(draft, pace)
        finally:
            with self._lock:
                del self._promised[uid]
        with self._lock:
            self._extents[uid] = known
        return known.file_bytes

    def _stand(self, draft: Draft, pace: Pace) -> Known:
        """Bring a whole file under its name; a failure leaves neither file nor row."""
        stem, folder = draft.uid.hex(), self.folder.handle
        try:
            known = self._write_file(draft, pace)
            os.rename(stem + TEMPORARY, stem + SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
            sync_folder(folder)
            self.catalogue.stands(draft.uid, known.file_bytes)
        except BaseException:
            self._unlink(stem + TEMPORARY)
            self._unlink(stem + SUFFIX)
            self.catalogue.forget(draft.uid)
            raise
        return known

    def _write_file(self, draft: Draft, pace: Pace) -> Known:
        """A whole, synced file under a temporary name."""
        entries, room = draft.entries, header_bytes(draft.entries)
        fd = open_at(self.folder.handle, draft.uid.hex() + TEMPORARY, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            if draft.codec is Codec.NONE:
                os.posix_fallocate(fd, 0, extent_bytes(entries))
            places: list[Place] = []
            torn = self.faults.meets(DiskFault.TORN_WRITE)
            offset = room
            for batch in self._payload(draft, places, offset):
                pace(sum(part.nbytes for part in batch))
                self.faults.delay()
                offset += write_all(fd, batch, offset)
            header = page_buffer(room)
            header[:] = memoryview(extent_format.encode(draft.uid, entries, places, draft.passports))
            write_all(fd, [header], 0)
            os.ftruncate(fd, offset)
            if torn and places:
                _tear(fd, places, offset)
            os.fsync(fd)
        finally:
            os.close(fd)
        return Known(offset, tuple(places))

    def _payload(self, draft: Draft, places: list[Place], offset: int) -> Iterator[list[Bytes]]:
        """Whole pages to write in order, a system call's worth at a time; fills ``places``.

        Plain blocks are written from the arena's own pages; the last page of one that does not fill
        it from a copy, so that nobody else's bytes come along.
        """
        batch: list[Bytes] = []
        size = 0
        for entry, slot in zip(draft.entries, draft.slots, strict=True):
            content = self.arena.payload(slot)[: entry.length]
            parts, stored, packing = _plain_parts(content), entry.length, Codec.NONE
            if draft.codec is not Codec.NONE:
                packed = pack(draft.codec, content)
                if pages(len(packed)) < pages(entry.length):
                    parts, stored, packing = [_padded(packed)], len(packed), draft.codec
            places.append(Place(offset, stored, entry.length, packing, entry.checksum))
            offset += pages(stored)
            for part in parts:
                if batch and (size + part.nbytes > IO_BYTES or len(batch) >= VECTORS_MAX):
                    yield batch
                    batch, size = [], 0
                batch.append(part)
                size += part.nbytes
        if batch:
            yield batch

    # --- reading -------------------------------------------------------------------------------

    def read(self, wants: Sequence[Want], pace: Pace) -> list[Got]:
        """Read blocks into their slots and digest them there, each judged by itself.

        Neighbours in a file are read together. A file that ends early leaves zeros and their digest.
        """
        got, by_file = by_extent(wants, self._extents, self.arena)
        for uid, blocks in by_file.items():
            got += self._read_file(uid, blocks, pace)
        return got

    def _read_file(self, uid: bytes, blocks: list[Block], pace: Pace) -> list[Got]:
        got: list[Got] = []
        try:
            self.faults.raise_for(DiskFault.OPEN_FAILS)
            fd = open_at(self.folder.handle, uid.hex() + SUFFIX, os.O_RDONLY)
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            refused = Reason.RESTORE_FAILED if gone else Reason.DISK_UNAVAILABLE
            return [Got(want.slot, None, refused, f"{uid.hex()}: {error.strerror}") for _, want in blocks]
        try:
            for run in runs(blocks):
                pace(sum(pages(place.stored_bytes) for place, _ in run))
                try:
                    got += self._read_run(fd, run)
                except OSError as error:
                    detail = f"{uid.hex()}: {error.strerror}"
                    got += [Got(want.slot, None, Reason.RESTORE_FAILED, detail) for _, want in run]
        finally:
            os.close(fd)
        return got

    def _read_run(self, fd: int, run: list[Block]) -> list[Got]:
        self.faults.raise_for(DiskFault.READ_ERROR)
        self.faults.delay()
        start = run[0][0].offset
        buffers = [target(self.arena, place, want.slot) for place, want in run]
        wanted = sum(buffer.nbytes for buffer in buffers)
        came = read_all(fd, buffers, start)
        if self.faults.meets(DiskFault.SHORT_READ):
            came = min(came, wanted - PAGE_BYTES // 2)
        if self.faults.meets(DiskFault.FLIPPED):
            buffers[0][0] ^= 0xFF
        got = []
        for (place, want), buffer in zip(run, buffers, strict=True):
            here = came - (place.offset - start)
            if here < place.stored_bytes:
                buffer[max(here, 0) :] = 0
            got.append(judge(self.arena, place, want, buffer))
        return got

    def scrub(self, uid: bytes, numbers: Sequence[int], pace: Pace) -> list[Got]:
        """Read blocks again into memory that is thrown away; each is judged by itself. Raises OSError or Cancelled."""
        known = self._extents.get(uid)
        if known is None:
            return []
        self.faults.raise_for(DiskFault.OPEN_FAILS)
        fd = open_at(self.folder.handle, uid.hex() + SUFFIX, os.O_RDONLY)
        try:
            return [self._scrub_block(fd, known.places[number], pace) for number in numbers]
        finally:
            os.close(fd)

    def _scrub_block(self, fd: int, place: Place, pace: Pace) -> Got:
        buffer = page_buffer(place.stored_bytes)
        pace(buffer.nbytes)
        try:
            self.faults.raise_for(DiskFault.READ_ERROR)
            read_all(fd, [buffer], place.offset)
        except OSError as error:
            return Got(NO_SLOT, None, Reason.RESTORE_FAILED, error.strerror or "")
        if self.faults.meets(DiskFault.FLIPPED):
            buffer[0] ^= 0xFF
        return found_in(self.arena, place, buffer)

    # --- removing ------------------------------------------------------------------------------

    def delete(self, uid: bytes) -> None:
        """Remove an extent; one that is not there is ok. Raises OSError or sqlite3.Error."""
        self.catalogue.doom(uid)
        self._unlink(uid.hex() + SUFFIX)
        with self._lock:
            self._extents.pop(uid, None)
        self.catalogue.forget(uid)

    def missing(self, uid: bytes) -> bool:
        """Whether an extent that should stand is gone from the folder."""
        try:
            os.stat(uid.hex() + SUFFIX, dir_fd=self.folder.handle)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False

    def lost(self, uid: bytes) -> None:
        """Forget an extent whose file went behind the tier's back."""
        with self._lock:
            self._extents.pop(uid, None)
        self.catalogue.forget(uid)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.folder.handle)

    def close(self) -> None:
        """Give the folder up; its files stay."""
        self.catalogue.close()
        self.folder.close()


def uid_of(name: str) -> bytes | None:
    """The uid in the name of a file of ours; None for any other file."""
    stem, dot, _ = name.partition(".")
    if dot and name[len(stem) :] in (SUFFIX, TEMPORARY) and len(stem) == 2 * extent_format.UID_BYTES:
        with contextlib.suppress(ValueError):
            return bytes.fromhex(stem)
    return None


def _plain_parts(content: Bytes) -> list[Bytes]:
    """A block's own pages, a system call's worth each, and a copy of what its last page holds of it."""
    whole = content.nbytes // PAGE_BYTES * PAGE_BYTES
    parts = [content[at : min(at + IO_BYTES, whole)] for at in range(0, whole, IO_BYTES)]
    return [*parts, _padded(content[whole:].tobytes())] if whole < content.nbytes else parts


def _padded(content: bytes) -> Bytes:
    """The bytes on pages of their own, zeros behind them."""
    buffer = page_buffer(len(content))
    buffer[: len(content)] = memoryview(content)
    return buffer


def _tear(fd: int, places: Sequence[Place], end: int) -> None:
    """What a disk that lies leaves behind: nothing after the middle of the first block."""
    middle = places[0].offset + places[0].stored_bytes // 2
    os.ftruncate(fd, middle)
    os.ftruncate(fd, end)
