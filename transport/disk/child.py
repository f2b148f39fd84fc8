"""The disk child: ``python -m kvfabric.transport.disk.child SOCKET_FD ARENA_FD``.

Its main thread listens to the holder and looks after the tier once a second; two more threads read
and write, so that one digests while the other waits for the disk. It ends with the socket: a holder
that dies takes its child along, whatever the child is doing.
"""

from __future__ import annotations

import heapq
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from ...fabric import wire
from ...fabric.arena import ArenaLayout
from ...fabric.kinds import FabricError
from ..budget import Budget
from ..frames import FRAME_BYTES_MAX, FrameDecoder, FrameStatus, encode
from ..memfd import map_read_write
from .blocks import Cancelled
from .faults import DiskFault, DiskFaults
from .protocol import Cancel, Delete, Inject, Read, Scrub, Settled, Setup, Upload, Write
from .remote import RemoteTier
from .tier import CHECK_S, Tier

IO_THREADS = 2
REMOTE_THREADS = 2
"""Of their own: a store that is slow holds up nothing that the local disk has."""
NICENESS = 10
"""What it weighs beside live requests' processes: a tenth."""


class Job:
    """One read or write: what to run, how to answer if it never runs, and whether it was called off."""

    def __init__(self, token: int, run: Callable[[Callable[[int], None]], None], refuse: Callable[[], None]) -> None:
        self.token = token
        self.run = run
        self.refuse = refuse
        self.cancelled = threading.Event()


class Jobs:
    """Waiting jobs: reads before writes, both before what is only looked at again, each in order of coming."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._heap: list[tuple[int, int, Job]] = []
        self._by_token: dict[int, Job] = {}
        self._count = 0

    def put(self, rank: int, job: Job) -> None:
        with self._ready:
            self._count += 1
            self._by_token[job.token] = job
            heapq.heappush(self._heap, (rank, self._count, job))
            self._ready.notify()

    def take(self) -> Job:
        """The next job; waits for one."""
        with self._ready:
            while not self._heap:
                self._ready.wait()
            return heapq.heappop(self._heap)[2]

    def done(self, job: Job) -> None:
        with self._ready:
            self._by_token.pop(job.token, None)

    def cancel(self, token: int) -> None:
        """Call a job off; one that still waits is answered by whoever takes it, at once."""
        with self._ready:
            job = self._by_token.get(token)
            if job is None:
                return
            job.cancelled.set()
            for place, (_, count, waiting) in enumerate(self._heap):
                if waiting is job:
                    self._heap[place] = (-1, count, job)
                    heapq.heapify(self._heap)
                    break


class Child:
    """The child's life."""

    def __init__(self, channel: socket.socket, arena_fd: int) -> None:
        self._channel = channel
        self._arena_fd = arena_fd
        self._sending = threading.Lock()
        self._jobs = Jobs()
        self._faults = DiskFaults()
        self._rehearsed = False
        self._budget = Budget(None)
        self._tier: Tier | None = None
        self._remote: RemoteTier | None = None
        self._remote_jobs = Jobs()

    def tell(self, message: Any) -> None:
        frame = encode(0, FrameStatus.REPLY, wire.encode(message))
        with self._sending:
            self._channel.sendall(frame)

    def run(self) -> None:
        """Until the socket ends."""
        decoder = FrameDecoder(FRAME_BYTES_MAX)
        due = time.monotonic()
        while True:
            ready, _, _ = select.select([self._channel], [], [], max(due - time.monotonic(), 0.0))
            if ready:
                data = self._channel.recv(1 << 20)
                if not data:
                    return
                for frame in decoder.feed(data):
                    self._receive(wire.decode(frame.payload))
            if time.monotonic() >= due:
                if self._tier is not None:
                    self._tier.check()
                due = time.monotonic() + CHECK_S

    def _receive(self, message: Any) -> None:
        tier = self._tier
        match message:
            case Setup():
                self._set_up(message)
            case Inject():
                self._faults.inject(DiskFault(message.fault), message.times)
                self._rehearsed = True
                if tier is not None and not message.times:
                    tier.check()
                self._settle(0)
            case Cancel():
                self._jobs.cancel(message.token)
                self._remote_jobs.cancel(message.token)
            case Delete() if tier is not None:
                tier.delete(message.uid)
                if message.remote and self._remote is not None:
                    self._remote_job(2, 0, partial(_delete, self._remote, message.uid), lambda: None)
            case Upload() if self._remote is not None:
                remote = self._remote
                self._remote_job(1, 0, partial(remote.upload, message), partial(remote.refuse_upload, message))
            case Read() if message.remote and self._remote is not None:
                remote = self._remote
                self._remote_job(0, message.token, partial(remote.read, message), partial(remote.refuse_read, message))
            case Scrub() if tier is not None:
                self._jobs.put(
                    2, Job(message.token, lambda pace: tier.scrub(message, pace), lambda: tier.refuse_scrub(message))
                )
            case Write() if tier is not None:
                self._jobs.put(
                    1, Job(message.token, lambda pace: tier.write(message, pace), lambda: tier.refuse_write(message))
                )
            case Read() if tier is not None:
                self._jobs.put(
                    0, Job(message.token, lambda pace: tier.read(message, pace), lambda: tier.refuse_read(message))
                )
            case _:
                raise FabricError(f"disk child: {type(message).__name__} is not expected")

    def _set_up(self, message: Setup) -> None:
        arena = map_read_write(self._arena_fd, ArenaLayout.of_plain(message.pools, message.places, message.slab_bytes))
        self._budget = Budget(message.bytes_per_s)
        self._tier = Tier(message, arena, self._faults, self.tell)
        for number in range(IO_THREADS):
            threading.Thread(target=partial(self._work, self._jobs), name=f"disk-{number}", daemon=True).start()
        self._tier.check()
        if message.remote is not None:
            self._remote = RemoteTier(message.remote, arena, self._tier.file_of, self.tell)
            threading.Thread(target=self._watch_remote, name="store", daemon=True).start()
            for number in range(REMOTE_THREADS):
                work = partial(self._work, self._remote_jobs)
                threading.Thread(target=work, name=f"store-{number}", daemon=True).start()

    def _remote_job(
        self, rank: int, token: int, run: Callable[[Callable[[int], None]], None], refuse: Callable[[], None]
    ) -> None:
        self._remote_jobs.put(rank, Job(token, run, refuse))

    def _watch_remote(self) -> None:
        assert self._remote is not None
        try:
            self._remote.watch()
        except ConnectionError:
            os._exit(0)  # the holder is gone
        except Exception:  # noqa: BLE001 - without it the store would be as it was last seen, for ever
            traceback.print_exc()
            os._exit(1)

    def _work(self, jobs: Jobs) -> None:
        while True:
            job = jobs.take()

            def pace(nbytes: int, job: Job = job) -> None:
                if not self._budget.take(nbytes, job.cancelled):
                    raise Cancelled

            try:
                if job.cancelled.is_set():
                    raise Cancelled
                job.run(pace)
            except Cancelled:
                job.refuse()
            except ConnectionError:
                os._exit(0)  # the holder is gone
            except Exception:  # noqa: BLE001 - a job that is never answered would hold its slots for ever
                traceback.print_exc()
                os._exit(1)
            finally:
                jobs.done(job)
            if job.token:
                self._settle(job.token)

    def _settle(self, token: int) -> None:
        """Under injected faults, tell that a job and the looks at the disk it led to are over."""
        if not self._rehearsed:
            return
        try:
            self.tell(Settled(token, self._faults.waiting()))
        except ConnectionError:
            os._exit(0)


def _delete(remote: RemoteTier, uid: bytes, _: Callable[[int], None]) -> None:
    remote.delete(uid)


def stand_back() -> None:
    """Leave the cores to live requests' processes where those are short.

    A batch process never takes a core from one that runs as it wakes, and weighs little beside it. Not the class
    that runs only on idle cores: beside engines that keep every core busy it would restore nothing.
    """
    os.nice(NICENESS)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> None:
    """Serve one holder over the two inherited descriptors."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    stand_back()
    os.umask(0o077)
    try:
        Child(channel, int(sys.argv[2])).run()
    except ConnectionError:
        os._exit(0)
    os._exit(0)  # threads may be in the middle of a read or write: what is half written is swept up at the next start


def command(channel_fd: int, arena_fd: int) -> list[str]:
    """How a holder starts its child; the descriptors must be inherited."""
    return [sys.executable, "-P", "-m", f"{__package__}.child", str(channel_fd), str(arena_fd)]


if __name__ == "__main__":
    main()
