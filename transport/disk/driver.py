"""The disk tier from the holder's side: effects in, events out, a child process in between.

::

    start -> child starts -> Setup -> found extents, condition -> serving
    child ends or hangs -> everything outstanding is answered -> the tier is refused -> a new child

A child that ended writes to no slot any more: the socket's end is seen only after its last thread
has left its last system call. So nothing is answered before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...fabric import wire
from ...fabric.effects import (
    DeleteExtent,
    DiskFound,
    DiskLost,
    DiskRead,
    DiskState,
    DiskWritten,
    DropLocal,
    Event,
    ExtentScrubbed,
    ExtentUploaded,
    ReadExtent,
    RemoteState,
    Restored,
    ScrubExtent,
    UploadExtent,
    WriteExtent,
)
from ...fabric.kinds import Reason, WireError
from ...fabric.passport import AbiPassport
from ..frames import FRAME_BYTES_MAX, FrameDecoder, FrameStatus, encode
from ..loop_share import LoopShare
from ..memfd import ArenaMemory
from .child import command
from .codecs import CODECS
from .faults import DiskFault
from .format import UID_BYTES
from .protocol import (
    Cancel,
    Condition,
    Delete,
    Extent,
    Gone,
    Health,
    Inject,
    Listed,
    Opened,
    Read,
    ReadDone,
    RemoteCondition,
    RemoteSetup,
    Scrub,
    Scrubbed,
    Settled,
    Setup,
    Upload,
    Uploaded,
    Write,
    Wrote,
)

logger = logging.getLogger(__name__)

DiskEffect = WriteExtent | ReadExtent | DeleteExtent | UploadExtent | DropLocal | ScrubExtent

SLOW_S = 5.0
HUNG_S = 60.0
WATCH_S = 0.5
RESTART_S = (0.2, 10.0)
DOOMED_MAX = 4096
EXTENT_NUMBERS_FOUND_MAX = 1 << 32
"""Numbers of found extents lie below those of any life (incarnation << 32)."""


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """One holder's disk. ``root``: the fabric's folder on it; ``place``: which holder of the node.

    ``bytes_max``: the cap on extent files; ``free_floor_bytes``: what must stay free on the file
    system; ``bytes_per_s``: what reads and writes together may move, None without limit;
    ``passports``: written into each extent as data.
    """

    root: str
    place: str
    owner: str
    bytes_max: int
    free_floor_bytes: int = 0
    codec: str = "none"
    bytes_per_s: float | None = None
    passports: tuple[AbiPassport, ...] = ()
    remote: RemoteSetup | None = None
    """The store that all nodes share; None for none."""


@dataclass(slots=True)
class _Outstanding:
    """An effect that the child has not answered yet."""

    effect: WriteExtent | ReadExtent | ScrubExtent
    since_s: float
    uid: bytes = b""


@dataclass(slots=True)
class _Child:
    """One life of the child process."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    outbox: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)


class DiskTier:
    """The tier of one holder. Methods run on the event loop; ``tell`` is called there too."""

    def __init__(
        self,
        settings: DiskSettings,
        memory: ArenaMemory,
        tell: Callable[[Event], None],
        share: LoopShare | None = None,
    ) -> None:
        self.settings = settings
        self._memory = memory
        self._tell = tell
        self._share = share or LoopShare()
        self._child: _Child | None = None
        self._uids: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        self._local: set[bytes] = set()
        self._remote: set[bytes] = set()
        """Uids of what is on the disk, and of what is in the store."""
        self._own: set[bytes] = set()
        """Of those in the store: what this life put there, to be deleted by it."""
        self._uploading: dict[bytes, int] = {}
        """The extents on their way to the store, by uid: each is answered, whatever becomes of it."""
        self._store = RemoteCondition(Health.STARTING, Reason.DISK_UNAVAILABLE, "", 0, 0, 0)
        self._found = 0
        self._doomed: dict[bytes, None] = {}
        self._jobs: dict[int, _Outstanding] = {}
        self._condition = Condition(Health.STARTING, Reason.DISK_UNAVAILABLE, Reason.DISK_UNAVAILABLE, "", 0, 0, 0, 0)
        self._opened = Opened((), (), 0, 0)
        self._settled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._slow = False
        self._restarts = -1
        self._moved = {"written_bytes": 0, "read_bytes": 0}
        self._problem = ""
        self._rehearsed = False
        self._unsettled: set[int] = set()
        self.faults_left: dict[str, int] = {}
        """Operations that will still meet an injected fault."""

    # --- life ----------------------------------------------------------------------------------

    async def start(self, timeout_s: float) -> bool:
        """Start the child; True once the tier told its condition, False if it did not in time.

        What the disk still holds is told as :class:`DiskFound` before that.
        """
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._live()), loop.create_task(self._watch())]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), timeout_s)
        return self._settled.is_set()

    async def close(self) -> None:
        """End the child. What it was doing is swept up by the next life."""
        self._closing = True
        child = self._child
        if child is not None:
            child.process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if child is not None:
            child.channel.close()
            await asyncio.to_thread(child.process.wait)

    async def _live(self) -> None:
        delay_s = RESTART_S[0]
        while not self._closing:
            self._restarts += 1
            began = time.monotonic()
            try:
                self._child = await asyncio.to_thread(self._spawn)
                await self._serve(self._child)
            except (OSError, WireError) as error:
                self._problem = f"disk child: {error}"
                logger.warning("%s", self._problem)
            except Exception:  # what its answers were taken for: the tier goes on, and answers what it owes
                self._problem = "an answer of the disk child could not be taken"
                logger.exception("%s", self._problem)
            await self._ended()
            delay_s = RESTART_S[0] if time.monotonic() - began > RESTART_S[1] else min(2 * delay_s, RESTART_S[1])
            await asyncio.sleep(delay_s)

    def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair()
        arena = self._memory.read_write_fd()
        try:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            process = subprocess.Popen(
                command(theirs.fileno(), arena),
                pass_fds=(theirs.fileno(), arena),
                env=environment,
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is not meant for it. In a session of its own niceness counts for nothing
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(arena)
        ours.setblocking(False)
        return _Child(process, ours)

    async def _serve(self, child: _Child) -> None:
        """Until the child's end of the socket is closed."""
        loop = asyncio.get_running_loop()
        settings, layout = self.settings, self._memory.layout
        self._post(
            Setup(
                settings.root,
                settings.place,
                settings.owner,
                settings.bytes_max,
                settings.free_floor_bytes,
                CODECS[settings.codec],
                settings.bytes_per_s,
                layout.pools_plain(),
                layout.places_plain(),
                settings.passports,
                settings.remote,
                layout.slab_bytes,
            )
        )
        writer = loop.create_task(self._write_out(child))
        decoder = FrameDecoder(FRAME_BYTES_MAX)
        try:
            while data := await loop.sock_recv(child.channel, 1 << 20):
                for frame in decoder.feed(data):
                    await self._share.turn(partial(self._take, frame.payload))
        except ConnectionError:
            return
        finally:
            writer.cancel()

    def _take(self, payload: bytes) -> None:
        self._receive(wire.decode(payload))

    async def _write_out(self, child: _Child) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frame = await child.outbox.get()
            try:
                await loop.sock_sendall(child.channel, frame)
            except OSError:
                return  # the reader sees the same end

    async def _ended(self) -> None:
        """The child is gone: answer what it owed, refuse the rest until another stands."""
        child, self._child = self._child, None
        if child is None:
            return
        child.process.kill()
        code = await asyncio.to_thread(child.process.wait)
        child.channel.close()
        if self._closing:
            return
        self._problem = f"the disk child ended with status {code}"
        logger.warning("%s; %d jobs outstanding", self._problem, len(self._jobs))
        self._become(
            Condition(Health.UNAVAILABLE, Reason.DISK_UNAVAILABLE, Reason.DISK_UNAVAILABLE, self._problem, 0, 0, 0, 0)
        )
        self._unsettled.clear()
        self._store_is(RemoteCondition(Health.UNAVAILABLE, Reason.DISK_UNAVAILABLE, self._problem, 0, 0, 0))
        for token in list(self._jobs):
            self._refuse(token)
        uploading, self._uploading = self._uploading, {}
        for extent in uploading.values():
            self._tell(ExtentUploaded(extent, Reason.DISK_UNAVAILABLE))

    def _refuse(self, token: int) -> None:
        match effect := self._jobs.pop(token).effect:
            case WriteExtent():
                self._tell(DiskWritten(token, Reason.DISK_UNAVAILABLE))
            case ReadExtent():
                failed = tuple(Restored(slot, None, Reason.DISK_UNAVAILABLE) for _, _, slot in effect.reads)
                self._tell(DiskRead(token, failed))
            case ScrubExtent():
                self._tell(ExtentScrubbed(token, ()))

    async def _watch(self) -> None:
        """See the disk that is slow, and end the child that hangs."""
        while True:
            await asyncio.sleep(WATCH_S)
            # What is only looked at again waits behind everything else, however fast the disk is.
            awaited = (job.since_s for job in self._jobs.values() if not isinstance(job.effect, ScrubExtent))
            oldest = min(awaited, default=None)
            waited_s = 0.0 if oldest is None else time.monotonic() - oldest
            self._slow = waited_s > SLOW_S
            if waited_s > HUNG_S and self._child is not None and self._child.process.poll() is None:
                logger.warning("the disk has not answered for %.0f s", waited_s)
                self._child.process.kill()

    # --- effects -------------------------------------------------------------------------------

    def carry_out(self, effect: DiskEffect) -> None:
        """Do what the core asks."""
        match effect:
            case UploadExtent():
                self.upload(effect)
            case DropLocal():
                self.drop_local(effect)
            case WriteExtent():
                self.write(effect)
            case ReadExtent():
                self.read(effect)
            case DeleteExtent():
                self.delete(effect)
            case ScrubExtent():
                self.scrub(effect)

    def write(self, effect: WriteExtent) -> None:
        """Write slots as one extent; DiskWritten follows."""
        uid = secrets.token_bytes(UID_BYTES)
        self._jobs[effect.token] = _Outstanding(effect, time.monotonic(), uid)
        self._send(effect.token, Write(effect.token, uid, effect.entries, effect.slots))

    def read(self, effect: ReadExtent) -> None:
        """Read entries into slots and digest them; DiskRead follows."""
        self._jobs[effect.token] = _Outstanding(effect, time.monotonic())
        blocks = tuple(
            (self._uids.get(extent, bytes(UID_BYTES)), number, slot) for extent, number, slot in effect.reads
        )
        self._send(effect.token, Read(effect.token, blocks, effect.remote))

    def scrub(self, effect: ScrubExtent) -> None:
        """Read entries again and digest them; ExtentScrubbed follows."""
        self._jobs[effect.token] = _Outstanding(effect, time.monotonic())
        uid = self._uids.get(effect.extent, bytes(UID_BYTES))
        self._send(effect.token, Scrub(effect.token, uid, effect.entries))

    def delete(self, effect: DeleteExtent) -> None:
        """Remove an extent; while the disk is away, as soon as it is back."""
        uid = self._uids.pop(effect.extent, None)
        if uid is None:
            return
        del self._numbers[uid]
        if uid in self._local or uid in self._own:
            self._doom(uid, remote=uid in self._own)
        self._local.discard(uid)
        self._own.discard(uid)
        self._remote.discard(uid)

    def upload(self, effect: UploadExtent) -> None:
        """Copy an extent to the store; ExtentUploaded follows."""
        uid = self._uids.get(effect.extent)
        if uid is None or self._child is None:
            refused = ExtentUploaded(effect.extent, Reason.DISK_UNAVAILABLE)
            asyncio.get_running_loop().call_soon(self._tell, refused)
        else:
            self._uploading[uid] = effect.extent
            self._post(Upload(uid))

    def drop_local(self, effect: DropLocal) -> None:
        """Remove an extent from the disk; it stays known, for the store has it."""
        uid = self._uids.get(effect.extent)
        if uid is not None and uid in self._local:
            self._local.discard(uid)
            self._doom(uid, remote=False)

    def cancel(self, token: int) -> None:
        """Call a job off; it is answered all the same, with what happened."""
        self._post(Cancel(token))

    def inject(self, fault: DiskFault, times: int) -> None:
        """Let the next operations on the disk meet a fault; 0 clears it, and the disk is looked at."""
        if self._child is not None:
            self._rehearsed = True
            self._unsettled.add(0)
        self._post(Inject(str(fault), times))

    def _doom(self, uid: bytes, *, remote: bool) -> None:
        self._doomed[uid] = None
        while len(self._doomed) > DOOMED_MAX:
            del self._doomed[next(iter(self._doomed))]
        self._post(Delete(uid, remote))

    def _send(self, token: int, message: Any) -> None:
        """Have the child do a job; without a child it is refused in a later step, as an answer would be."""
        if self._child is None:
            asyncio.get_running_loop().call_soon(lambda: self._refuse(token) if token in self._jobs else None)
        else:
            if self._rehearsed:
                self._unsettled.add(token)
            self._post(message)

    def _post(self, message: Any) -> None:
        if self._child is not None:
            self._child.outbox.put_nowait(encode(0, FrameStatus.REQUEST, wire.encode(message)))

    # --- answers -------------------------------------------------------------------------------

    def _receive(self, message: Any) -> None:
        match message:
            case Wrote():
                self._wrote(message)
            case ReadDone():
                self._read_done(message)
            case Scrubbed():
                if self._jobs.pop(message.token, None) is not None:
                    self._tell(ExtentScrubbed(message.token, message.checksums))
            case Extent():
                self._found_extent(message)
            case Opened():
                self._reopened(message)
            case Gone():
                self._lost(message.uids, remote=message.remote)
            case Uploaded():
                self._uploaded(message)
            case Listed():
                there = set(message.uids)
                self._lost(tuple(uid for uid in self._remote if uid not in there), remote=True)
            case RemoteCondition():
                self._store_is(message)
            case Condition():
                self._become(message)
                self._settled.set()
            case Settled():
                self._unsettled.discard(message.token)
                self.faults_left = dict(message.left)

    def _wrote(self, message: Wrote) -> None:
        job = self._jobs.pop(message.token, None)
        if job is None or not isinstance(job.effect, WriteExtent):
            return
        if message.refused is None:
            self._uids[job.effect.extent] = job.uid
            self._numbers[job.uid] = job.effect.extent
            self._local.add(job.uid)
            self._moved["written_bytes"] += sum(e.length for e in job.effect.entries)
        else:
            logger.info("an extent was not written: %s", message.detail)
        self._tell(DiskWritten(message.token, message.refused, message.file_bytes))

    def _read_done(self, message: ReadDone) -> None:
        job = self._jobs.pop(message.token, None)
        if job is None:
            return
        if message.detail:
            logger.info("blocks were not restored: %s", message.detail)
        layout = self._memory.layout
        for slot, _, refused in message.blocks:
            if refused is None:
                self._moved["read_bytes"] += layout.pools[layout.pool_of(slot)].slot_bytes
        self._tell(DiskRead(message.token, tuple(Restored(*block) for block in message.blocks)))

    def _found_extent(self, message: Extent) -> None:
        """An extent of an earlier life, or one in the store that is not on this disk."""
        if message.uid in self._doomed and not message.remote:
            return
        (self._remote if message.remote else self._local).add(message.uid)
        known = self._numbers.get(message.uid)
        if known is not None:
            if message.remote:
                self._tell(ExtentUploaded(known))
            return
        self._found += 1
        number = self._found % EXTENT_NUMBERS_FOUND_MAX
        self._uids[number], self._numbers[message.uid] = message.uid, number
        entries = tuple((number, place, entry) for place, entry in enumerate(message.entries))
        self._tell(DiskFound(entries, message.file_bytes, message.remote))

    def _reopened(self, message: Opened) -> None:
        """All extents that are there now: what is known and not among them is lost."""
        self._opened = message
        there = set(message.uids)
        for uid in [uid for uid in self._doomed if uid in there]:
            self._post(Delete(uid))
        self._lost(tuple(uid for uid in self._local if uid not in there), remote=False)

    def _lost(self, uids: tuple[bytes, ...], *, remote: bool) -> None:
        """Extents are on the disk (or in the store) no more; one that is nowhere has no number any more."""
        where, other = (self._remote, self._local) if remote else (self._local, self._remote)
        where.difference_update(uids)
        numbers = tuple(self._numbers[uid] for uid in uids if uid in self._numbers)
        for uid in uids:
            if uid in self._numbers and uid not in other:
                del self._uids[self._numbers.pop(uid)]
        if numbers:
            self._tell(DiskLost(numbers, remote))

    def _uploaded(self, message: Uploaded) -> None:
        number = self._numbers.get(message.uid)
        asked = self._uploading.pop(message.uid, number)
        if message.refused is not None:
            logger.info("an extent is not in the store: %s", message.detail)
        elif number is None:
            self._post(Delete(message.uid, remote=True))  # it was deleted here meanwhile
        else:
            self._remote.add(message.uid)
            self._own.add(message.uid)
        if asked is not None:
            self._tell(ExtentUploaded(asked, message.refused))

    def _store_is(self, condition: RemoteCondition) -> None:
        """The store's condition as told; the core learns what concerns it."""
        if self.settings.remote is None:
            return
        before, self._store = self._store, condition
        if before.refused != condition.refused:
            self._tell(RemoteState(condition.refused))
        if before.health is not condition.health:
            level = logging.INFO if condition.health is Health.OK else logging.WARNING
            logger.log(level, "shared store: %s %s", condition.health, condition.detail)

    def _become(self, condition: Condition) -> None:
        before, self._condition = self._condition, condition
        if (before.refused, before.writes_refused) != (condition.refused, condition.writes_refused):
            self._tell(DiskState(condition.refused, condition.writes_refused))
        if before.health is not condition.health:
            logger.log(
                logging.INFO if condition.health is Health.OK else logging.WARNING,
                "disk tier: %s %s",
                condition.health,
                condition.detail,
            )

    # --- status --------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The tier's state, with the reason in words, as plain data."""
        condition = self._condition
        health = Health.SLOW if self._slow and condition.refused is None else condition.health
        detail = (
            f"the disk has not answered for more than {SLOW_S:.0f} s" if health is Health.SLOW else condition.detail
        )
        return {
            "state": str(health),
            "reason": self.refused,
            "detail": detail,
            "path": self.settings.root,
            "used_bytes": condition.used_bytes,
            "bytes_max": self.settings.bytes_max,
            "free_bytes": condition.free_bytes,
            "free_floor_bytes": self.settings.free_floor_bytes,
            "codec": self.settings.codec,
            "extents": len(self._local),
            "wrong_blocks": condition.wrong_blocks,
            "outstanding": self.outstanding,
            "restarts": self._restarts,
            "removed_at_start": list(self._opened.removed),
            "store": self._store_status(),
            **self._moved,
        }

    def _store_status(self) -> dict[str, Any] | None:
        remote, condition = self.settings.remote, self._store
        if remote is None:
            return None
        return {
            "state": str(condition.health),
            "reason": condition.refused,
            "detail": condition.detail,
            "url": remote.url,
            "used_bytes": condition.used_bytes,
            "bytes_max": remote.bytes_max,
            "extents": condition.extents,
            "known_here": len(self._remote),
            "wrong_blocks": condition.wrong_blocks,
        }

    @property
    def outstanding(self) -> int:
        """Effects that the child has not answered yet; where faults are injected, also what answered ones set off."""
        return len(self._jobs.keys() | self._unsettled)

    @property
    def refused(self) -> Reason | None:
        """Why the tier takes no reads or no writes now."""
        return self._condition.refused or self._condition.writes_refused

    @property
    def child_pid(self) -> int | None:
        """Process id of the running child."""
        return None if self._child is None else self._child.process.pid
