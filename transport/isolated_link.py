"""The NIXL link in a process of its own, so that what NIXL does to a process does not happen to the holder's.

What was seen, and what the second process makes of it:

* UCX ends its process by ``abort`` (``Fatal: unexpected error: Endpoint timeout``) where a reader vanishes while
  the owner of the memory is stopped or starved for a moment, in 10 of 15 trials over TCP: here the arena, its
  leases and the holder live on, and the link is started again;
* copies between processes of one host, polling and digests contend for the interpreter lock of the process they run
  in: here they are in nobody's way;
* a transfer past its deadline is only proven quiet when its agent is destroyed: ending a process is the surest way
  to do so, and the kernel vouches for it;
* a process with an agent may crash at its normal exit: this one has none but ``os._exit``;
* NIXL's environment must be set before its import: here it is set for the child alone.

The child maps the arena through an inherited descriptor, ends with the holder (its standard input closes), and
leaves no file. When it ends by itself it is started again after a pause; its region changes then, and peers that
still have the old one are refused or lost until they ask again.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgpack

from ..fabric.kinds import WireError
from .control_client import BlockingClient, ConnectionLost, RequestTimedOut
from .link import (
    Headers,
    LinkError,
    LinkFailure,
    LinkKind,
    Pair,
    PairResult,
    QuietToken,
    Region,
    host_identity,
)
from .link_wire import (
    Verb,
    pack_pairs,
    pack_request,
    unpack_headers,
    unpack_reply,
    unpack_results,
)
from .memfd import ArenaMemory
from .nixl_settings import NixlSettings, child_environment

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
ANSWER_GRACE_S = 5.0
"""What the child may take beyond a call's deadline; one that takes longer is ended."""
IDLE_CLIENTS_MAX = 8
RESTART_PAUSES_S = (0.5, 2.0, 8.0, 30.0)
"""Before each attempt to start an ended child again; the last one repeats."""

_TOKEN_BITS = 40
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(sys.argv[2])"


class _Child:
    """One life of the link process: its handle, its region, and connections not in use."""

    def __init__(self, process: subprocess.Popen[bytes], life: int, endpoint: str, region: Region) -> None:
        self.process = process
        self.life = life
        self.region = region
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._idle: deque[BlockingClient] = deque()

    def ask(self, request: bytes, timeout_s: float) -> bytes:
        """One request over a connection of the calling thread's own. Raises ConnectionLost, RequestTimedOut."""
        with self._lock:
            client = self._idle.pop() if self._idle else None
        if client is None:
            client = BlockingClient.connect(self._endpoint, timeout_s=timeout_s)
        try:
            answer = client.request(request, timeout_s).payload
        except BaseException:
            client.close()
            raise
        with self._lock:
            if len(self._idle) < IDLE_CLIENTS_MAX:
                self._idle.append(client)
                return answer
        client.close()
        return answer

    def end(self) -> None:
        """Kill and reap: all its threads, mappings and sockets are gone when this returns."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        with self._lock:
            for client in self._idle:
                client.close()
            self._idle.clear()


class IsolatedLink:
    """A :class:`~kvfabric.transport.link.Link` over NIXL in a child process; made by :meth:`start`."""

    kind = LinkKind.NIXL

    def __init__(self, memory: ArenaMemory, holder: str, incarnation: int, suffix: str, settings: NixlSettings) -> None:
        self._memory = memory
        self._holder = holder
        self._incarnation = incarnation
        self._suffix = suffix
        self._settings = settings
        self._host = host_identity()
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._child: _Child | None = None
        self._life = 0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._why_not = "the link is closed"
        self._closed = threading.Event()
        self.restarts = 0

    @classmethod
    def start(
        cls,
        memory: ArenaMemory,
        *,
        holder: str,
        incarnation: int,
        suffix: str,
        settings: NixlSettings | None = None,
    ) -> IsolatedLink | LinkError:
        """Start the child, which registers the arena; ``memory`` must stay open until the link is closed.

        ``suffix`` is random, the caller's. Returns an UNAVAILABLE error with the reason where NIXL cannot start.
        """
        link = cls(memory, holder, incarnation, suffix, settings or NixlSettings())
        error = link._start_child()
        if error is not None:
            link.close()
            return error
        return link

    def region(self) -> Region:
        with self._lock:
            if self._child is not None:
                return self._child.region
        return Region(self._holder, self._incarnation, self.kind, self._host, self._memory.layout, {})

    # -- the child's life

    def _start_child(self) -> LinkError | None:
        """Start a child where there is none. One thread at a time."""
        with self._starting:
            with self._lock:
                if self._closed.is_set():
                    return LinkError(LinkFailure.UNAVAILABLE, "the link is closed")
                if self._child is not None:
                    return None
                self._life += 1
            child = self._launch(self._life)
            if isinstance(child, LinkError):
                self._why_not = child.detail
                return child
            with self._lock:
                closed = self._closed.is_set()
                if not closed:
                    self._child = child
            if closed:
                child.end()
                return LinkError(LinkFailure.UNAVAILABLE, "the link is closed")
        threading.Thread(target=self._watch, args=(child,), name="kvfabric-link-watch", daemon=True).start()
        return None

    def _launch(self, life: int) -> _Child | LinkError:
        arena_fd = self._memory.read_write_fd()
        tell_read, tell_write = os.pipe()
        given = {
            "arena_fd": arena_fd,
            "tell_fd": tell_write,
            "layout": self._memory.layout.to_plain(),
            "holder": self._holder,
            "incarnation": self._incarnation,
            "suffix": f"{self._suffix}.{life}",
            "settings": dataclasses.asdict(self._settings),
        }
        code = _CODE.format(module=f"{__package__}.link_process")
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(sys.path), json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(arena_fd, tell_write),
                env=child_environment(self._settings, os.environ),
            )
        except OSError as error:
            os.close(tell_read)
            return LinkError(LinkFailure.UNAVAILABLE, f"no link process: {error}")
        finally:
            os.close(arena_fd)
            os.close(tell_write)
        told = _hear(tell_read, START_TIMEOUT_S)
        if "endpoint" in told:
            region = Region.from_plain(msgpack.unpackb(base64.b64decode(told["region"])))
            self._processes[life] = process
            return _Child(process, life, told["endpoint"], region)
        ending = _why_it_ended(process)
        return LinkError(LinkFailure.UNAVAILABLE, told.get("detail", ending))

    def _watch(self, child: _Child) -> None:
        """Wait for the child's end; unless it was ours, start another, after a pause that grows."""
        child.process.wait()
        with self._lock:
            if self._child is not child:
                return
            self._child = None
            self._why_not = f"the link process ended with status {child.process.returncode} and is started again"
        child.end()
        logger.warning("%s: NIXL's process ended with status %s", self._holder, child.process.returncode)
        attempt = 0
        while not self._closed.wait(RESTART_PAUSES_S[min(attempt, len(RESTART_PAUSES_S) - 1)]):
            attempt += 1
            if self._start_child() is None:
                self.restarts += 1
                return

    # -- calls

    def _call(self, verb: Verb, region: Region | None, argument: Any, deadline_s: float) -> tuple[int, Any] | LinkError:
        """The child's life and its answer. Failing to answer in time costs it its life."""
        with self._lock:
            child = self._child
            if child is None:
                return LinkError(LinkFailure.UNAVAILABLE, self._why_not)
        try:
            reply = child.ask(pack_request(verb, region, argument, deadline_s), deadline_s + ANSWER_GRACE_S)
            error, value = unpack_reply(reply)
        except RequestTimedOut:
            child.process.kill()  # the watcher starts another
            child.process.wait()
            return LinkError(LinkFailure.UNAVAILABLE, "the link process did not answer and was ended")
        except (ConnectionLost, WireError) as lost:
            child.process.kill()
            child.process.wait()
            return LinkError(LinkFailure.UNAVAILABLE, f"the link process ended: {lost}")
        return (child.life, value) if error is None else error

    def connect(self, region: Region, deadline_s: float) -> LinkError | None:
        got = self._call(Verb.CONNECT, region, None, deadline_s)
        return got if isinstance(got, LinkError) else None

    def disconnect(self, region: Region) -> None:
        self._call(Verb.DISCONNECT, region, None, 0.0)

    def fetch(self, region: Region, pairs: Sequence[Pair], deadline_s: float) -> list[PairResult]:
        got = self._call(Verb.FETCH, region, pack_pairs(pairs), deadline_s)
        if isinstance(got, LinkError):
            return [PairResult(pair.dst_slot, got.failure, got.detail) for pair in pairs]
        life, value = got
        results = unpack_results(value, pairs)
        return [
            result
            if result.token is None
            else dataclasses.replace(result, token=QuietToken(life << _TOKEN_BITS | result.token))
            for result in results
        ]

    def headers(self, region: Region, slots: Sequence[int], deadline_s: float) -> Headers | LinkError:
        got = self._call(Verb.HEADERS, region, [int(slot) for slot in slots], deadline_s)
        return got if isinstance(got, LinkError) else unpack_headers(got[1])

    def quiet(self, token: QuietToken) -> bool:
        life = token >> _TOKEN_BITS
        process = self._processes.get(life)
        if process is None or process.poll() is not None:
            self._processes.pop(life, None)
            return True  # the kernel took its threads, mappings and sockets
        with self._lock:
            current = self._child is not None and self._child.life == life
        if not current:
            return False  # it is being ended
        got = self._call(Verb.QUIET, None, token & ((1 << _TOKEN_BITS) - 1), ANSWER_GRACE_S)
        return True if isinstance(got, LinkError) else bool(got[1])

    # -- ends

    def fence(self) -> LinkError | None:
        self._end_child()
        return self._start_child()

    def close(self) -> None:
        self._closed.set()
        self._why_not = "the link is closed"
        self._end_child()

    def _end_child(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.end()


def _hear(fd: int, timeout_s: float) -> dict[str, str]:
    """What the child told before it closed the pipe; empty if it told nothing in time."""
    deadline = time.monotonic() + timeout_s
    text = b""
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = pipe.read(1 << 16)
            if not data:
                break
            text += data
    try:
        told: dict[str, str] = json.loads(text)
    except ValueError:
        return {}
    return told


def _why_it_ended(process: subprocess.Popen[bytes]) -> str:
    """Reap a child that did not start."""
    try:
        status = process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"the link process did not start within {START_TIMEOUT_S:g} s"
    finally:
        if process.stdin is not None:
            process.stdin.close()
    return f"the link process ended with status {status} at its start"
