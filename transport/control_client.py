"""The control socket's clients: :class:`BlockingClient` for synchronous sessions, :class:`AsyncClient` for asyncio.

Both reach ``unix:...`` and ``tcp:...`` endpoints alike. Over Unix they refuse a server of another user; over
TCP both sides prove that they know the cluster's secret. A client is of one server's life: after ConnectionLost
make a new one. A request that timed out leaves the connection usable; its late reply is dropped.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import math
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self, TypeVar

from ..fabric.kinds import FabricError, SpecError, WireError
from .challenge import GREETING_BYTES, PROOF_BYTES, ChallengeFailed, ClientChallenge
from .endpoints import Endpoint, peer_credentials, tune_tcp
from .frames import DESCRIPTORS_MAX, FRAME_BYTES_MAX, Frame, FrameDecoder, FrameStatus, encode
from .vigil import Vigil

_READ_BYTES = 64 * 1024
_INT = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * _INT)
PENDING_MAX = 1024
_CROWDED_RETRY_S = 0.005

P = TypeVar("P")
R = TypeVar("R")


class ConnectionLost(FabricError, ConnectionError):
    """The server is gone or cannot be reached."""


class RequestTimedOut(FabricError, TimeoutError):
    """No reply within the time-out; the request may have been served all the same."""


class RequestFailed(FabricError, RuntimeError):
    """The server's handler failed; its log says why."""


class Answer(NamedTuple):
    """A reply; the descriptors are the caller's to close."""

    payload: bytes
    descriptors: tuple[int, ...]


class _Channel:
    """What both clients share: ids, the decoder, and descriptors matched to their frames."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint, frame_bytes_max: int) -> None:
        self.sock = sock
        self.endpoint = endpoint
        self.frame_bytes_max = frame_bytes_max
        self.ids = itertools.count(1)
        self._decoder = FrameDecoder(frame_bytes_max)
        self._descriptors: deque[int] = deque()
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def encode(self, payload: bytes, status: FrameStatus = FrameStatus.REQUEST) -> tuple[int, bytes]:
        if len(payload) > self.frame_bytes_max:
            raise SpecError(f"request: {len(payload)} bytes, a frame takes {self.frame_bytes_max}")
        request_id = next(self.ids)
        return request_id, encode(request_id, status, payload)

    def receive(self) -> list[tuple[Frame, tuple[int, ...]]]:
        """Read once; the replies completed. Raises ConnectionLost, BlockingIOError, TimeoutError."""
        if self.endpoint.is_unix:
            count, ancillary, flags, _ = self.sock.recvmsg_into(
                [self._buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self._descriptors.extend(array.array("i", data[: len(data) - len(data) % _INT]))
            if flags & socket.MSG_CTRUNC:
                raise ConnectionLost(
                    f"{self.endpoint}: descriptors were lost (is the process at its limit of open files?)"
                )
        else:
            count = self.sock.recv_into(self._buffer)
        if count == 0:
            raise ConnectionLost(f"{self.endpoint}: the server closed the connection")
        try:
            frames = self._decoder.feed(self._buffer[:count])
        except WireError as error:
            raise ConnectionLost(f"{self.endpoint}: {error}") from None
        announced = 0
        for frame in frames:
            announced += frame.descriptors
            if frame.status.asks or announced > len(self._descriptors):
                raise ConnectionLost(f"{self.endpoint}: the server sent what is no reply")
        return [(frame, self._take(frame.descriptors) if frame.descriptors else ()) for frame in frames]

    def _take(self, count: int) -> tuple[int, ...]:
        return tuple(self._descriptors.popleft() for _ in range(count))

    def close(self) -> None:
        self.sock.close()
        _close_descriptors(self._descriptors)
        self._descriptors.clear()


def _close_descriptors(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _answer_of(frame: Frame, descriptors: tuple[int, ...]) -> Answer:
    if frame.status is FrameStatus.FAILED:
        raise RequestFailed(frame.payload.decode("utf-8", "replace"))
    return Answer(frame.payload, descriptors)


def _new_socket(endpoint: Endpoint) -> socket.socket:
    if endpoint.is_unix:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)


def _check_server(sock: socket.socket, endpoint: Endpoint) -> None:
    """After connecting: the same user's process (Unix), or options for a network (TCP)."""
    if not endpoint.is_unix:
        tune_tcp(sock)
        return
    pid, uid = peer_credentials(sock)
    if uid != os.geteuid():
        raise ConnectionLost(f"{endpoint}: served by process {pid} of another user")


def _challenge_for(endpoint: Endpoint, secret: bytes | None) -> ClientChallenge | None:
    if endpoint.is_unix:
        return None
    if secret is None:
        raise SpecError(f"secret: needed to connect to {endpoint}")
    return ClientChallenge(secret)


def _poll(sock: socket.socket, events: int) -> select.poll:
    poll = select.poll()
    poll.register(sock.fileno(), events)
    return poll


def _wait(poll: select.poll, deadline: float) -> None:
    """Until a socket is ready or its connection ended. Raises TimeoutError."""
    while not poll.poll(max(math.ceil(1e3 * (deadline - time.monotonic())), 0)):
        if time.monotonic() >= deadline:
            raise TimeoutError


_clients: weakref.WeakSet[BlockingClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client.inherited()


os.register_at_fork(after_in_child=_after_fork)


class BlockingClient:
    """One connection with blocking calls, for any thread (one request at a time). Lowest latency.

    It is of the process that made it: two that read one connection would take each other's replies. In a child that
    was forked it is closed, and nothing changes for the parent.
    """

    def __init__(self, channel: _Channel, vigil: Vigil | None = None) -> None:
        # It waits by itself: a socket's own time-out is set and looked at by system calls around every other one.
        channel.sock.setblocking(False)
        self._channel = channel
        self._vigil = vigil or Vigil(0.0)
        self._lock = threading.Lock()
        self._closed = False
        self._looking = threading.Lock()
        """A poll object serves one thread at a time: another's look at it raises RuntimeError."""
        self._hang_up = _poll(channel.sock, select.POLLRDHUP)
        self._readable = _poll(channel.sock, select.POLLIN)
        self._has_come = partial(self._readable.poll, 0)
        _clients.add(self)

    @classmethod
    def connect(
        cls,
        endpoint: str,
        *,
        secret: bytes | None = None,
        timeout_s: float = 5.0,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        vigil: Vigil | None = None,
    ) -> BlockingClient:
        """``vigil``: whether to wait awake for replies; without one it sleeps.

        Raises ConnectionLost if nobody answers, ChallengeFailed if the other side does not know the secret.
        """
        where = Endpoint.parse(endpoint)
        sock = connect_blocking(where, secret, timeout_s)
        return cls(_Channel(sock, where, frame_bytes_max), vigil)

    def request(self, payload: bytes, timeout_s: float) -> Answer:
        """Send one request and wait for its reply.

        Raises RequestTimedOut, ConnectionLost, RequestFailed, SpecError for a payload too long.
        """
        return self._asked(self._exchange_one, payload, timeout_s)

    def request_many(self, payloads: Sequence[bytes], timeout_s: float) -> list[Answer]:
        """Send all requests at once and wait for all replies, in the requests' order. Raises as ``request``."""
        return self._asked(self._exchange, payloads, timeout_s)

    def _asked(self, exchange: Callable[[P, float], R], payload: P, timeout_s: float) -> R:
        """One exchange at a time, its failures by their names."""
        with self._lock:
            if self._closed:
                raise ConnectionLost(f"{self._channel.endpoint}: this client is closed")
            try:
                return exchange(payload, timeout_s)
            except TimeoutError:
                raise RequestTimedOut(f"{self._channel.endpoint}: no reply within {timeout_s} s") from None
            except OSError as error:
                self._shut()
                if isinstance(error, ConnectionLost):
                    raise
                raise ConnectionLost(f"{self._channel.endpoint}: {error}") from None

    def tell(self, payload: bytes, timeout_s: float) -> None:
        """Send one request that gets no reply; the server takes it in the order of its arrival.

        Raises RequestTimedOut where the server reads nothing for so long, ConnectionLost, SpecError.
        """
        with self._lock:
            if self._closed:
                raise ConnectionLost(f"{self._channel.endpoint}: this client is closed")
            try:
                self._send(self._channel.encode(payload, FrameStatus.TOLD)[1], time.monotonic() + timeout_s)
            except TimeoutError:
                raise RequestTimedOut(f"{self._channel.endpoint}: no room to send within {timeout_s} s") from None
            except OSError as error:
                self._shut()
                raise ConnectionLost(f"{self._channel.endpoint}: {error}") from None

    def _exchange_one(self, payload: bytes, timeout_s: float) -> Answer:
        """As :meth:`_exchange`, of one."""
        channel, deadline = self._channel, time.monotonic() + timeout_s
        request_id, data = channel.encode(payload)
        self._send(data, deadline)
        while True:
            got = None
            self._wait_for_replies(deadline)
            for reply in channel.receive():
                if reply[0].request_id == request_id:
                    got = reply
                else:
                    _close_descriptors(reply[1])  # the late reply of a request that timed out
            if got is not None:
                try:
                    return _answer_of(*got)
                except RequestFailed:
                    _close_descriptors(got[1])
                    raise

    def _exchange(self, payloads: Sequence[bytes], timeout_s: float) -> list[Answer]:
        channel, deadline = self._channel, time.monotonic() + timeout_s
        wanted: dict[int, int] = {}
        data = []
        for index, payload in enumerate(payloads):
            request_id, encoded = channel.encode(payload)
            wanted[request_id] = index
            data.append(encoded)
        got: dict[int, tuple[Frame, tuple[int, ...]]] = {}
        self._send(data[0] if len(data) == 1 else b"".join(data), deadline)
        try:
            while True:
                self._wait_for_replies(deadline)
                for reply in channel.receive():
                    position = wanted.get(reply[0].request_id)
                    if position is None:
                        _close_descriptors(reply[1])  # the late reply of a request that timed out
                    else:
                        got[position] = reply
                if len(got) == len(payloads):
                    return [_answer_of(*got[index]) for index in range(len(payloads))]
        except BaseException:
            for _, descriptors in got.values():
                _close_descriptors(descriptors)
            raise

    def _send(self, data: bytes, deadline: float) -> None:
        """A request sent in part would garble what follows, so a time-out within one ends the connection."""
        sock, sent = self._channel.sock, 0
        while True:
            with contextlib.suppress(BlockingIOError):
                sent += sock.send(memoryview(data)[sent:] if sent else data)
            if sent == len(data):
                return
            try:
                _wait(_poll(sock, select.POLLOUT), deadline)
            except TimeoutError:
                if sent:
                    self._shut()
                raise

    def _wait_for_replies(self, deadline: float) -> None:
        """Until something can be read. Raises TimeoutError."""
        if not self._vigil.wait(self._has_come):
            _wait(self._readable, deadline)

    def _shut(self) -> None:
        self._closed = True
        self._channel.close()

    def inherited(self) -> None:
        """Called in a child that was just forked: whatever the parent's threads held then, they are not here."""
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._shut()

    @property
    def alive(self) -> bool:
        """Whether the server still holds its end, as the kernel knows it; about a microsecond, no request."""
        with self._looking:
            return not self._closed and not self._hang_up.poll(0)

    def close(self) -> None:
        """End the connection; the server sees it, behind what was told. Idempotent."""
        with self._lock:
            if not self._closed:
                self._shut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect_blocking(endpoint: Endpoint, secret: bytes | None, timeout_s: float) -> socket.socket:
    """A connected, proven socket with a time-out set. Raises ConnectionLost, ChallengeFailed, SpecError."""
    challenge = _challenge_for(endpoint, secret)
    sock = _new_socket(endpoint)
    try:
        sock.settimeout(timeout_s)
        _dial(sock, endpoint, time.monotonic() + timeout_s)
        _check_server(sock, endpoint)
        if challenge is not None:
            sock.sendall(challenge.answer(_receive_exactly(sock, GREETING_BYTES)))
            challenge.check(_receive_exactly(sock, PROOF_BYTES))
    except (ConnectionLost, ChallengeFailed):
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise ConnectionLost(f"{endpoint}: {error}") from None
    return sock


def _dial(sock: socket.socket, endpoint: Endpoint, deadline: float) -> None:
    """Connect. A Unix socket whose server has not accepted those before says so at once, whatever the time-out."""
    while True:
        try:
            return sock.connect(endpoint.sockaddr)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_CROWDED_RETRY_S)


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
        data = sock.recv(count - len(got))
        if not data:
            raise ChallengeFailed("the server closed the connection during the challenge (another secret?)")
        got += data
    return bytes(got)


class AsyncClient:
    """One connection on the running event loop; requests are pipelined. Not for other threads."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._room = asyncio.Semaphore(PENDING_MAX)
        self._unsent = bytearray()
        self._lost: ConnectionLost | None = None
        channel.sock.setblocking(False)
        self._loop.add_reader(channel.sock.fileno(), self._readable)

    @classmethod
    async def connect(
        cls,
        endpoint: str,
        *,
        secret: bytes | None = None,
        timeout_s: float = 5.0,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> AsyncClient:
        """Raises ConnectionLost if nobody answers, ChallengeFailed if the other side does not know the secret."""
        where = Endpoint.parse(endpoint)
        sock = await asyncio.to_thread(connect_blocking, where, secret, timeout_s)
        return cls(_Channel(sock, where, frame_bytes_max))

    async def request(self, payload: bytes, timeout_s: float) -> Answer:
        """Send one request and wait for its reply; others may be under way.

        Raises RequestTimedOut, ConnectionLost, RequestFailed, SpecError for a payload too long.
        """
        async with self._room:
            if self._lost is not None:
                raise self._lost
            request_id, data = self._channel.encode(payload)
            future: asyncio.Future[Answer] = self._loop.create_future()
            self._pending[request_id] = future
            timer = self._loop.call_later(timeout_s, self._expire, future, timeout_s)
            try:
                self._send(data)
                return await future
            finally:
                timer.cancel()
                self._pending.pop(request_id, None)

    def _expire(self, future: asyncio.Future[Answer], timeout_s: float) -> None:
        if not future.done():
            future.set_exception(RequestTimedOut(f"{self._channel.endpoint}: no reply within {timeout_s} s"))

    def _send(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._channel.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose(ConnectionLost(f"{self._channel.endpoint}: {error}"))
            return
        if sent < len(data):
            self._unsent += data[sent:]
            self._loop.add_writer(self._channel.sock.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            sent = self._channel.sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(ConnectionLost(f"{self._channel.endpoint}: {error}"))
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._channel.sock.fileno())

    def _readable(self) -> None:
        try:
            for frame, descriptors in self._channel.receive():
                self._settle(frame, descriptors)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(
                error if isinstance(error, ConnectionLost) else ConnectionLost(f"{self._channel.endpoint}: {error}")
            )

    def _settle(self, frame: Frame, descriptors: tuple[int, ...]) -> None:
        future = self._pending.get(frame.request_id)
        if future is None or future.done():
            _close_descriptors(descriptors)
            return
        try:
            future.set_result(_answer_of(frame, descriptors))
        except RequestFailed as error:
            _close_descriptors(descriptors)
            future.set_exception(error)

    def _lose(self, error: ConnectionLost) -> None:
        if self._lost is not None:
            return
        self._lost = error
        fileno = self._channel.sock.fileno()
        self._loop.remove_reader(fileno)
        self._loop.remove_writer(fileno)
        self._channel.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(error)

    @property
    def connected(self) -> bool:
        return self._lost is None

    async def close(self) -> None:
        """End the connection; requests under way raise ConnectionLost. Idempotent."""
        self._lose(ConnectionLost(f"{self._channel.endpoint}: this client is closed"))
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
