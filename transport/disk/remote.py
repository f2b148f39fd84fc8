"""The store that all nodes share, as the child sees it: the same extents, one object each, under the same names.

::

    look    list the store; read the headers of what is new; tell what came, what went, how the store is
    upload  put if there is no object of that name: an extent is never overwritten
    read    ranges of an object into slots, digested there, as from a file

The object store is reached through obstore, loaded only where a store is configured. Each request has a
time-out and one retry, each read an end: a store that is slow or away costs refusals, and no thread for ever.
"""

from __future__ import annotations

import datetime as dt
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ...fabric.arena import PAGE_BYTES, Arena, Bytes
from ...fabric.extents import PROLOGUE_BYTES
from ...fabric.kinds import Reason, WireError
from . import format as extent_format
from .blocks import Block, Got, Known, Pace, Want, by_extent, judge, runs, target
from .format import Header
from .lies import Lies
from .protocol import Extent, Gone, Health, Listed, Read, ReadDone, RemoteCondition, RemoteSetup, Upload, Uploaded
from .store import SUFFIX, uid_of

EXTENTS_MAX = 4096
"""Extents of the store that one holder takes in: the latest."""
REFUSED_MAX = 4096
CONNECT_S = 3.0
UPLOAD_TIMEOUTS = 6
"""An upload may take so many times what another request may."""
PROBE_BYTES = 64 * 1024


class StoreFault(Exception):
    """The store did not do what was asked: its own words in one line."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One object of the store."""

    size: int
    modified: dt.datetime


class ObjectStore:
    """One bucket and prefix. Raises StoreFault, and FileNotFoundError for an object that is not there."""

    def __init__(self, setup: RemoteSetup) -> None:
        try:
            self._obstore: Any = import_module("obstore")
            stores: Any = import_module("obstore.store")
        except ImportError:
            raise StoreFault("the library obstore is not installed: pip install 'kvfabric[remote]'") from None
        self._faults: tuple[type[Exception], ...] = (OSError, self._obstore.exceptions.BaseError)

        def client(timeout_s: float) -> Any:
            return stores.from_url(
                setup.url,
                config=dict(setup.options) or None,
                client_options={
                    "timeout": f"{timeout_s}s",
                    "connect_timeout": f"{min(CONNECT_S, timeout_s)}s",
                    "allow_http": setup.allow_http,
                },
                retry_config={"max_retries": 1, "retry_timeout": dt.timedelta(seconds=timeout_s)},
            )

        try:
            self._store = client(setup.timeout_s)
            self._patient = client(UPLOAD_TIMEOUTS * setup.timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever a wrong address or option raises is that
            raise StoreFault(_words(error)) from None

    def _do(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except FileNotFoundError:
            raise
        except self._faults as error:
            raise StoreFault(_words(error)) from None

    def listed(self) -> dict[bytes, Listing]:
        """All extents there, by uid."""
        chunks = self._do(lambda: list(self._obstore.list(self._store)))
        entries = ((uid_of(Path(one["path"]).name), one) for chunk in chunks for one in chunk)
        return {uid: Listing(one["size"], one["last_modified"]) for uid, one in entries if uid is not None}

    def put(self, name: str, content: bytes | Path) -> None:
        """Write an object that is not there yet; one of that name stays as it is, for a name is given once."""
        put, exists = self._obstore.put, self._obstore.exceptions.AlreadyExistsError

        def call() -> None:
            try:
                put(self._patient, name, content, mode="create", use_multipart=False)
            except exists:
                return  # an earlier try of ours got through

        self._do(call)

    def range(self, name: str, start: int, length: int) -> Bytes:
        """Bytes of an object, uint8; fewer where it ends."""
        got = self._do(lambda: self._obstore.get_range(self._store, name, start=start, length=length))
        return np.frombuffer(got, dtype=np.uint8)

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is ok."""
        try:
            self._do(lambda: self._obstore.delete(self._store, name))
        except FileNotFoundError:
            return


class RemoteTier:
    """The store over its good and bad times. Thread-safe; ``tell`` sends to the holder.

    ``file_of``: the local file of an extent that stands on this holder's disk, and what is in it; None for none.
    """

    def __init__(
        self,
        setup: RemoteSetup,
        arena: Arena,
        file_of: Callable[[bytes], tuple[Path, Known] | None],
        tell: Callable[[Any], None],
    ) -> None:
        self._setup = setup
        self._arena = arena
        self._file_of = file_of
        self._tell = tell
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._telling = threading.Lock()
        """Held while the store's health is changed and told: never across a request."""
        self._store: ObjectStore | None = None
        self._known: dict[bytes, Known] = {}
        self._refused: dict[bytes, None] = {}
        """Objects that are no extents: not looked at again."""
        self._there: dict[bytes, Listing] = {}
        self._lies = Lies()
        self._health = Health.STARTING
        self._detail = ""
        self._told: RemoteCondition | None = None
        self._first = True

    # --- looking after it ----------------------------------------------------------------------

    def watch(self) -> None:
        """Look now and then, for as long as the process lives."""
        while True:
            self.look()
            time.sleep(self._setup.check_s)

    def look(self) -> None:
        """List the store, take in what is new, tell what changed."""
        with self._looking:
            try:
                if self._store is None:
                    self._store = ObjectStore(self._setup)
                self._take_in(self._store, self._store.listed())
                if self._lies.found and not self._tells_the_truth(self._store):
                    self._become(Health.LYING, f"{self._setup.url}: a probe read back other bytes than were written")
                else:
                    self._become(Health.OK, "")
            except (StoreFault, OSError) as error:
                self._become(Health.UNAVAILABLE, f"{self._setup.url}: {_words(error)}")

    def _take_in(self, store: ObjectStore, there: dict[bytes, Listing]) -> None:
        latest = sorted(there, key=lambda uid: there[uid].modified)[-EXTENTS_MAX:]
        with self._lock:
            self._there = there
            gone = tuple(uid for uid in self._known if uid not in there)
            for uid in gone:
                del self._known[uid]
        if gone:
            self._tell(Gone(gone, remote=True))
        for uid in latest:
            if uid in self._known or uid in self._refused:
                continue
            local = self._file_of(uid)
            if local is not None:
                self._add(uid, local[1])
                self._tell(Uploaded(uid, None, ""))
                continue
            try:
                header = self._header(store, uid, there[uid].size)
            except (WireError, FileNotFoundError):
                self._refused[uid] = None
                while len(self._refused) > REFUSED_MAX:
                    del self._refused[next(iter(self._refused))]
                continue
            self._add(uid, Known(header.file_bytes, header.places))
            self._tell(Extent(uid, header.entries, header.file_bytes, remote=True))
        if self._first:
            self._first = False
            self._tell(Listed(tuple(self._known)))
        self._make_room(store, 0)

    def _add(self, uid: bytes, known: Known) -> None:
        with self._lock:
            self._known[uid] = known

    def _header(self, store: ObjectStore, uid: bytes, size: int) -> Header:
        """Raises WireError for what is no extent of that name."""
        name = uid.hex() + SUFFIX
        front = store.range(name, 0, PAGE_BYTES).tobytes()
        total, _ = extent_format.index_bytes(front[:PROLOGUE_BYTES], size)
        if total > len(front):
            front += store.range(name, len(front), total - len(front)).tobytes()
        header = extent_format.decode(front, size)
        if header.uid != uid:
            raise WireError("extent: under another name than its own")
        return header

    def _make_room(self, store: ObjectStore, nbytes: int) -> None:
        """Remove the oldest extents until so many bytes more fit under the cap. Every node would choose the same."""
        with self._lock:
            excess = sum(one.size for one in self._there.values()) + nbytes - self._setup.bytes_max
            order = sorted(self._there, key=lambda uid: self._there[uid].modified) if excess > 0 else []
        for uid in order:
            if excess <= 0:
                return
            store.delete(uid.hex() + SUFFIX)
            with self._lock:
                excess -= self._there.pop(uid).size
                known = self._known.pop(uid, None)
            if known is not None:
                self._tell(Gone((uid,), remote=True))

    def _tells_the_truth(self, store: ObjectStore) -> bool:
        """Put, read back and compare a small object: only that shows it after wrong bytes came."""
        name, content = f"probe-{secrets.token_hex(8)}", os.urandom(PROBE_BYTES)
        store.put(name, content)
        try:
            same = store.range(name, 0, PROBE_BYTES).tobytes() == content
        finally:
            store.delete(name)
        if same:
            self._lies.clear()
        return same

    def _failed(self, error: Exception) -> None:
        """A request failed: until a look succeeds, the store is away."""
        self._become(Health.UNAVAILABLE, f"{self._setup.url}: {_words(error)}")

    @property
    def refused(self) -> Reason | None:
        """Why nothing works now."""
        return None if self._health is Health.OK else Reason.DISK_UNAVAILABLE

    def _become(self, health: Health, detail: str) -> None:
        """Take a state and tell it, if anything changed."""
        with self._lock:
            used, extents = sum(one.size for one in self._there.values()), len(self._there)
        with self._telling:
            self._health, self._detail = health, detail
            condition = RemoteCondition(health, self.refused, detail, used, extents, self._lies.wrong_blocks)
            if condition != self._told:
                self._told = condition
                self._tell(condition)

    # --- jobs ----------------------------------------------------------------------------------

    def upload(self, message: Upload, pace: Pace) -> None:
        """Copy a local extent there and answer. Raises Cancelled."""
        local, store = self._file_of(message.uid), self._store
        if local is None or store is None or self.refused is not None:
            self.refuse_upload(message)
            return
        path, known = local
        try:
            self._make_room(store, known.file_bytes)
            pace(known.file_bytes)
            store.put(path.name, path)
        except FileNotFoundError:
            self.refuse_upload(message)
            return
        except StoreFault as error:
            self._tell(Uploaded(message.uid, Reason.DISK_UNAVAILABLE, _words(error)))
            self._failed(error)
            return
        self._add(message.uid, known)
        with self._lock:
            self._there[message.uid] = Listing(known.file_bytes, dt.datetime.now(dt.UTC))
        self._tell(Uploaded(message.uid, None, ""))

    def refuse_upload(self, message: Upload) -> None:
        """Answer an upload that does not happen."""
        self._tell(Uploaded(message.uid, Reason.DISK_UNAVAILABLE, self._detail or "called off"))

    def delete(self, uid: bytes) -> None:
        """Remove an extent that this holder wrote; where the store does not let it, its cap will."""
        with self._lock:
            self._known.pop(uid, None)
            self._there.pop(uid, None)
        self._refused[uid] = None  # not to be taken for another node's while the removal is not seen yet
        try:
            if self._store is not None:
                self._store.delete(uid.hex() + SUFFIX)
        except StoreFault as error:
            self._failed(error)

    def read(self, message: Read, pace: Pace) -> None:
        """Read and answer. Raises Cancelled."""
        store = self._store
        if store is None or self.refused is not None:
            self.refuse_read(message)
            return
        with self._lock:
            known = {uid: self._known[uid] for uid, _, _ in message.blocks if uid in self._known}
        got, by_uid = by_extent([Want(*block) for block in message.blocks], known, self._arena)
        until_s = time.monotonic() + UPLOAD_TIMEOUTS * self._setup.timeout_s / 2
        fault: Exception | None = None
        for uid, run in ((uid, run) for uid, blocks in by_uid.items() for run in runs(blocks)):
            try:
                if fault is not None or time.monotonic() > until_s:
                    raise fault or StoreFault("the store took too long")
                pace(sum(place.stored_bytes for place, _ in run))
                got += self._read_run(store, uid, run)
            except FileNotFoundError:
                got += [
                    Got(want.slot, None, Reason.RESTORE_FAILED, f"{uid.hex()}: not in the store") for _, want in run
                ]
                self._lost(uid)
            except StoreFault as error:
                fault = error
                got += [Got(want.slot, None, Reason.DISK_UNAVAILABLE, _words(error)) for _, want in run]
        if fault is not None:
            self._failed(fault)  # before the answer: who asks again is refused at once
        self._weigh(got)
        details = [g.detail for g in got if g.detail]
        blocks = tuple((g.slot, g.checksum, g.refused) for g in got)
        self._tell(ReadDone(message.token, blocks, details[0] if details else ""))

    def _read_run(self, store: ObjectStore, uid: bytes, run: list[Block]) -> Iterator[Got]:
        """One range of neighbours; what the object is too short for reads as zeros."""
        start = run[0][0].offset
        length = run[-1][0].offset + run[-1][0].stored_bytes - start
        came = store.range(uid.hex() + SUFFIX, start, length)
        for place, want in run:
            buffer = target(self._arena, place, want.slot)
            part = came[place.offset - start : place.offset - start + place.stored_bytes]
            np.copyto(buffer[: part.nbytes], part)
            buffer[part.nbytes :] = 0
            yield judge(self._arena, place, want, buffer)

    def _lost(self, uid: bytes) -> None:
        with self._lock:
            known = self._known.pop(uid, None)
            self._there.pop(uid, None)
        if known is not None:
            self._tell(Gone((uid,), remote=True))

    def _weigh(self, got: list[Got]) -> None:
        with self._telling:
            self._lies.add(got)
        if self._lies.found:
            self._become(Health.LYING, self._lies.words)

    def refuse_read(self, message: Read) -> None:
        """Answer a read that does not happen, or not to its end."""
        refused = self.refused or Reason.RESTORE_FAILED
        blocks = tuple((slot, None, refused) for _, _, slot in message.blocks)
        self._tell(ReadDone(message.token, blocks, self._detail or "called off"))


def _words(error: Exception) -> str:
    """One line, without what a library adds for its own debugging."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
