"""The control socket's server: requests and replies as opaque bytes, over a Unix socket or TCP.

It runs inside the holder's and directory's event loop, because a Ray call costs 9 to 31 times as much.
One request handler serves both kinds; what the bytes mean is the caller's (msgpack with a schema number).

* Unix: the kernel says whose process connects; another user's is refused. Replies may carry file
  descriptors. A connection that closes is the kernel's word that the client ended or let go: ``closed``
  is called with the same ``ConnectionInfo`` its requests bore.
* TCP: the client must prove that it knows the cluster's secret before a request is read.

Everything is bounded: frames, what is held of unfinished ones, requests in flight a connection, connections, unproven connections, the
time a client may leave its replies unread. A stranger's bytes cost one refused connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from ..fabric.kinds import ProtocolError, WireError
from .challenge import ANSWER_BYTES, HANDSHAKE_TIMEOUT_S, ChallengeFailed, ServerChallenge, check_secret
from .endpoints import BACKLOG, Endpoint, listen_unix, peer_credentials, tune_tcp
from .frames import DESCRIPTORS_MAX, FRAME_BYTES_MAX, Frame, FrameDecoder, FrameStatus, encode
from .loop_share import LoopShare
from .vigil import LoopVigil

logger = logging.getLogger(__name__)

IN_FLIGHT_MAX = 256
CONNECTIONS_MAX = 4096
UNPROVEN_MAX = 64
KEPT_BYTES_MAX = 256 << 20
UNREAD_TIMEOUT_S = 30.0
SLICE_S = 0.00025
"""How long a connection that has more requests is served before the loop turns to the others."""
_WRITE_BUFFER_BYTES = 1 << 20
_SEND_RETRY_S = 0.002
_READ_BYTES = 256 * 1024

_connection_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """Who asks. ``connection_id`` is unique in this process; ``pid`` and ``uid`` are None over TCP."""

    connection_id: int
    peer: str
    pid: int | None
    uid: int | None


Reply: TypeAlias = bytes | tuple[bytes, Sequence[int]]
"""A reply's bytes, and descriptors to pass with it; they remain the handler's (the server duplicates)."""

Asks: TypeAlias = Callable[[ConnectionInfo], bool]
"""Whether requests of a connection are asked by somebody who waits: what can wait then pauses for them."""

Handler: TypeAlias = Callable[[ConnectionInfo, bytes], Reply | Awaitable[Reply]]
"""Serves one request. One that needs not wait may be a plain function: it is answered without a task."""


@dataclass(slots=True)
class ServerCounters:
    """What a server saw since it started."""

    accepted: int = 0
    refused: int = 0
    requests: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Outgoing:
    data: bytes
    descriptors: list[int]


class ControlServer:
    """A running server; made by :func:`serve_unix` and :func:`serve_tcp`."""

    def __init__(
        self,
        handler: Handler,
        *,
        secret: bytes | None,
        closed: Callable[[ConnectionInfo], None] | None,
        frame_bytes_max: int,
        share: LoopShare | None,
        asks: Asks,
        vigil: LoopVigil | None = None,
    ) -> None:
        self.handler = handler
        self.asks = asks
        self.secret = secret
        self.closed = closed
        self.frame_bytes_max = frame_bytes_max
        self.share = share or LoopShare()
        self.vigil = vigil
        self.counters = ServerCounters()
        self.live: set[_Connection] = set()
        self.kept_bytes = 0
        """Of frames that are not whole yet, over all connections."""
        self.buffer = memoryview(bytearray(_READ_BYTES))
        """What any connection reads into: it is taken out of it before the next one reads."""
        self._endpoint = Endpoint()
        self._server: asyncio.Server | None = None
        self._inode: tuple[int, int] | None = None

    @property
    def endpoint(self) -> str:
        """What clients connect to: ``unix:...`` or ``tcp:host:port`` with the port really bound."""
        return str(self._endpoint)

    @property
    def connections(self) -> int:
        return len(self.live)

    async def start(self, sock: socket.socket, endpoint: Endpoint) -> None:
        """Serve on a listening socket, which the server now owns."""
        loop = asyncio.get_running_loop()
        if endpoint.is_unix:
            self._server = await loop.create_unix_server(self._protocol, sock=sock, backlog=BACKLOG)
            if not endpoint.path.startswith("@"):
                self._inode = _inode(endpoint.path)
        else:
            self._server = await loop.create_server(self._protocol, sock=sock, backlog=BACKLOG)
            endpoint = Endpoint(host=endpoint.host, port=sock.getsockname()[1])
        self._endpoint = endpoint

    def _protocol(self) -> _Connection:
        return _Connection(self)

    @property
    def closed_down(self) -> bool:
        """Whether the server was started and has ended."""
        return self._server is None

    async def close(self) -> None:
        """Stop listening and end every connection; ``closed`` is called for each. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        # What was accepted a moment ago has no transport yet, and asyncio would never close it: let it get one.
        await asyncio.sleep(0)
        server.close()
        endings = [connection.ended for connection in self.live]
        for connection in list(self.live):
            connection.abort()
        if endings:
            await asyncio.wait(endings)
        if self._inode is not None:
            _unlink(self._endpoint.path, self._inode)


def _inode(path: str) -> tuple[int, int] | None:
    try:
        found = Path(path).lstat()
    except FileNotFoundError:
        return None
    return (found.st_dev, found.st_ino)


def _unlink(path: str, inode: tuple[int, int]) -> None:
    """Remove the socket file, unless a successor already put its own there."""
    if _inode(path) == inode:
        Path(path).unlink(missing_ok=True)


async def serve_unix(
    path: str,
    handler: Handler,
    *,
    closed: Callable[[ConnectionInfo], None] | None = None,
    frame_bytes_max: int = FRAME_BYTES_MAX,
    share: LoopShare | None = None,
    vigil: LoopVigil | None = None,
    asks: Asks = lambda _: True,
) -> ControlServer:
    """Serve ``handler`` at a path in a private directory, or at ``@name`` in the abstract namespace.

    ``share``: the loop's, where other work has a part of it; ``asks``: whose requests that work pauses for.
    Raises SpecError for a path too long or a directory not private, OSError if somebody serves there.
    """
    server = ControlServer(
        handler, secret=None, closed=closed, frame_bytes_max=frame_bytes_max, share=share, asks=asks, vigil=vigil
    )
    await server.start(listen_unix(path), Endpoint(path=path))
    return server


async def serve_tcp(
    host: str,
    port: int,
    secret: bytes,
    handler: Handler,
    *,
    closed: Callable[[ConnectionInfo], None] | None = None,
    frame_bytes_max: int = FRAME_BYTES_MAX,
    share: LoopShare | None = None,
    asks: Asks = lambda _: True,
) -> ControlServer:
    """Serve ``handler`` over TCP to whoever proves knowledge of ``secret``; port 0 takes a free one.

    Raises SpecError for a secret too short, OSError if the address cannot be bound.
    """
    server = ControlServer(
        handler, secret=check_secret(secret), closed=closed, frame_bytes_max=frame_bytes_max, share=share, asks=asks
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    await server.start(sock, Endpoint(host=host, port=port))
    return server


class _Connection(asyncio.BufferedProtocol):
    """One client, from accept to the call of ``closed``."""

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._decoder = FrameDecoder(server.frame_bytes_max)
        self._kept_bytes = 0
        self._challenge = ServerChallenge(server.secret) if server.secret is not None else None
        self._answer = bytearray()
        self._waiting: deque[Frame] = deque()
        self._outgoing: deque[_Outgoing] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._congested = False
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._in_line = False
        """What waits is served when its turn comes."""
        self._socket: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._info: ConnectionInfo | None = None

    # -- life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an assertion: the transports of uvloop, which Ray takes where it is installed, are no subclass.
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        server = self._server
        server.live.add(self)
        if server.closed_down:  # accepted just before the end
            return self.abort()
        raw = transport.get_extra_info("socket")
        if server.connections > CONNECTIONS_MAX:
            return self._refuse("too many connections")
        if self._challenge is None:
            pid, uid = peer_credentials(raw)
            if uid != os.geteuid():
                return self._refuse(f"process {pid} belongs to another user")
            return self._accept(f"pid {pid}", pid, uid)
        tune_tcp(raw)
        if sum(1 for connection in server.live if connection.unproven) > UNPROVEN_MAX:
            return self._refuse("too many connections that proved nothing")
        self._timer = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._refuse, "no proof within the time-out")
        transport.write(self._challenge.greeting)
        return None

    @property
    def unproven(self) -> bool:
        return self._challenge is not None

    def _accept(self, peer: str, pid: int | None, uid: int | None) -> None:
        self._info = ConnectionInfo(next(_connection_ids), peer, pid, uid)
        self._server.counters.accepted += 1

    def _refuse(self, why: str) -> None:
        self._server.counters.refused += 1
        logger.info("%s: connection refused: %s", self._server.endpoint, why)
        self.abort()

    def abort(self) -> None:
        """End the connection now; what was not sent is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # whatever the cause, the client is gone
        self._stop_timer()
        self._transport = None
        self._waiting.clear()
        for item in self._outgoing:
            _close_all(item.descriptors)
        self._outgoing.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._server.live.discard(self)
        self._server.kept_bytes -= self._kept_bytes
        self._kept_bytes = 0
        if not self.ended.done():
            self.ended.set_result(None)
        if self._info is not None and self._server.closed is not None:
            self._server.closed(self._info)

    # -- requests

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data: bytes | memoryview = self._server.buffer[:nbytes]
        if self._challenge is not None:
            data = self._prove(bytes(data))
            if not data:
                return
        try:
            frames = self._decoder.feed(data)
            for frame in frames:
                if frame.descriptors or not frame.status.asks:
                    raise WireError("frame: not a request")
        except WireError as error:
            self._refuse(str(error))
            return
        if self._decoder.kept_bytes != self._kept_bytes and not self._may_keep():
            return
        self._waiting.extend(frames)
        if not self._in_line and self._info is not None:
            if self._server.asks(self._info):
                self._server.share.live(self)
            self._serve_waiting()
        if self._server.vigil is not None:
            self._server.vigil.served()

    def _may_keep(self) -> bool:
        """Count what is held of this client's unfinished frame; one that brings all of them over their bound is refused."""
        server = self._server
        server.kept_bytes += self._decoder.kept_bytes - self._kept_bytes
        self._kept_bytes = self._decoder.kept_bytes
        if server.kept_bytes > KEPT_BYTES_MAX:
            self._refuse(f"more than {KEPT_BYTES_MAX} bytes of unfinished frames")
        return server.kept_bytes <= KEPT_BYTES_MAX

    def _prove(self, data: bytes) -> bytes:
        """Take the client's answer to the challenge; returns what followed it."""
        assert self._challenge is not None
        self._answer += data
        if len(self._answer) < ANSWER_BYTES:
            return b""
        try:
            proof = self._challenge.check(bytes(self._answer[:ANSWER_BYTES]))
        except ChallengeFailed as error:
            self._refuse(str(error))
            return b""
        rest = bytes(self._answer[ANSWER_BYTES:])
        self._answer.clear()
        self._challenge = None
        self._stop_timer()
        assert self._transport is not None
        host, port = self._transport.get_extra_info("peername")[:2]
        self._accept(f"{host}:{port}", None, None)
        self._transport.write(proof)
        return rest

    def _serve_waiting(self) -> None:
        """Serve what was read, until replies pile up; reading stops while anything waits."""
        if self._in_line:
            return
        began = self._loop.time()
        while self._waiting and not self._congested and len(self._tasks) < IN_FLIGHT_MAX:
            self._serve(self._waiting.popleft())
            if self._waiting and self._loop.time() - began >= SLICE_S:
                self._in_line = True
                self._server.share.used(self._loop.time() - began)
                self._server.share.stand(self._next_turn, self)
                break
        full = bool(self._waiting) or self._congested
        if full is not self._paused and self._transport is not None:
            self._paused = full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _next_turn(self) -> None:
        self._in_line = False
        self._serve_waiting()

    def _serve(self, frame: Frame) -> None:
        assert self._info is not None
        self._server.counters.requests += 1
        try:
            reply = self._server.handler(self._info, frame.payload)
            if isinstance(reply, (bytes, tuple)):
                self._reply(frame, reply)
                return
        except Exception as error:  # noqa: BLE001 - a handler's bug must not end the connection's other requests
            self._handler_failed(frame, error)
            return
        task = self._loop.create_task(self._await(frame, reply))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def _await(self, frame: Frame, reply: Awaitable[Reply]) -> None:
        try:
            self._reply(frame, await reply)
        except Exception as error:  # noqa: BLE001 - as in _serve
            self._handler_failed(frame, error)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._waiting:
            self._serve_waiting()

    def _handler_failed(self, frame: Frame, error: Exception) -> None:
        self._server.counters.failed += 1
        logger.error("%s: a request failed", self._server.endpoint, exc_info=error)
        if frame.status is not FrameStatus.TOLD:
            failed = b"the request failed; the server's log says why"
            self._send(encode(frame.request_id, FrameStatus.FAILED, failed), [])

    def _reply(self, frame: Frame, reply: Reply) -> None:
        if frame.status is FrameStatus.TOLD:
            return
        payload, descriptors = (reply, ()) if isinstance(reply, bytes) else reply
        if len(payload) > self._server.frame_bytes_max or len(descriptors) > DESCRIPTORS_MAX:
            raise ProtocolError(
                f"reply: {len(payload)} bytes or {len(descriptors)} descriptors are more than a frame takes"
            )
        if descriptors and self._info is not None and self._info.pid is None:
            raise ProtocolError("reply: descriptors travel over Unix sockets only")
        if self._transport is None:
            return
        if not descriptors and not self._outgoing:
            self._transport.write(encode(frame.request_id, FrameStatus.REPLY, payload))
            return
        copies = [os.dup(descriptor) for descriptor in descriptors]
        self._send(encode(frame.request_id, FrameStatus.REPLY, payload, len(copies)), copies)

    # -- replies

    def _send(self, data: bytes, descriptors: list[int]) -> None:
        """Send now or queue; takes the descriptors over."""
        if self._transport is None:
            _close_all(descriptors)
        elif not descriptors and not self._outgoing:
            self._transport.write(data)
        else:
            self._outgoing.append(_Outgoing(data, descriptors))
            if len(self._outgoing) == 1:
                self._drain(self._loop.time() + UNREAD_TIMEOUT_S)

    def _drain(self, deadline: float) -> None:
        """Descriptors bypass the transport, so they go only while it holds nothing that must precede them."""
        while self._outgoing and self._transport is not None:
            item = self._outgoing[0]
            if item.descriptors:
                if self._transport.get_write_buffer_size() or not self._send_descriptors(item):
                    if self._loop.time() > deadline:
                        return self._refuse("its replies stay unread")
                    self._loop.call_later(_SEND_RETRY_S, self._drain, deadline)
                    return None
            else:
                self._transport.write(item.data)
            self._outgoing.popleft()
        return None

    def _send_descriptors(self, item: _Outgoing) -> bool:
        assert self._transport is not None
        if self._socket is None:
            self._socket = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
        try:
            sent = socket.send_fds(self._socket, [item.data], item.descriptors)
        except BlockingIOError:
            return False
        except OSError as error:
            logger.info("%s: a reply was not sent: %s", self._server.endpoint, error)
            self.abort()
            sent = len(item.data)
        _close_all(item.descriptors)
        if sent < len(item.data) and self._transport is not None:
            self._transport.write(item.data[sent:])
        return True

    def pause_writing(self) -> None:
        self._congested = True
        self._timer = self._loop.call_later(UNREAD_TIMEOUT_S, self._refuse, "its replies stay unread")

    def resume_writing(self) -> None:
        self._congested = False
        self._stop_timer()
        self._serve_waiting()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    descriptors.clear()
