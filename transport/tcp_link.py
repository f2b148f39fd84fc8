"""The plain TCP link, where NIXL is not installed or cannot start: slower, and needs nothing but the network.

Both sides prove that they know the cluster's secret before a request is read. What arrives is written by our own
thread, from the socket straight into the destination slots: once a call returns, no foreign byte can arrive.
On a deadline the connection is dropped, because what it still carries belongs to nobody.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from ..fabric.arena import SLOT_HEADER, Arena
from .block_server import HELLO, ITEM, ITEMS_MAX, REQUEST, Answer, BlockServer, Verb, receive_into
from .challenge import ChallengeFailed, check_secret
from .control_client import ConnectionLost, connect_blocking
from .digest import digester
from .endpoints import Endpoint
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
    other_kind,
    parts_of,
    unfit,
)

PARTS_AHEAD = 4
"""Parts asked for before the first one has arrived."""
IDLE_CONNECTIONS_MAX = 4
"""Connections kept a peer; more are made, and dropped after use, where many threads fetch at once."""


class TcpLink:
    """A :class:`~kvfabric.transport.link.Link` over plain sockets; made by :meth:`start`."""

    kind = LinkKind.TCP

    def __init__(self, arena: Arena, region: Region, server: BlockServer, secret: bytes) -> None:
        self._arena = arena
        self._digester = digester(arena.layout.checksum)
        self._region = region
        self._server = server
        self._secret = secret
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], deque[_Wire]] = {}
        self._closed = False

    @classmethod
    def start(
        cls,
        arena: Arena,
        *,
        holder: str,
        incarnation: int,
        host: str,
        secret: bytes,
        port: int = 0,
        bytes_per_s: float | None = None,
    ) -> TcpLink | LinkError:
        """Serve the arena on ``host`` (the address peers reach us by) and a free port. Raises SpecError for the secret.

        ``bytes_per_s``: what is sent to all peers together; None: no limit.
        """
        check_secret(secret)
        try:
            server = BlockServer(arena, incarnation, host, port, secret, bytes_per_s=bytes_per_s)
        except OSError as error:
            return LinkError(LinkFailure.UNAVAILABLE, f"no block server on {host}:{port}: {error}")
        address = {"host": host, "port": server.port}
        region = Region(holder, incarnation, cls.kind, host_identity(), arena.layout, address)
        return cls(arena, region, server, secret)

    def region(self) -> Region:
        return self._region

    # -- connections

    def connect(self, region: Region, deadline_s: float) -> LinkError | None:
        wire = self._take(region, time.monotonic() + deadline_s)
        if isinstance(wire, LinkError):
            return wire
        self._give_back(region, wire)
        return None

    def disconnect(self, region: Region) -> None:
        with self._lock:
            wires = self._idle.pop(region.peer, ())
        for wire in wires:
            wire.close()

    def _take(self, region: Region, deadline: float) -> _Wire | LinkError:
        """A connection for this thread alone."""
        refusal = other_kind(region, self.kind)
        if refusal is not None:
            return refusal
        with self._lock:
            if self._closed:
                return LinkError(LinkFailure.UNAVAILABLE, "the link is closed")
            idle = self._idle.get(region.peer)
            while idle:
                wire = idle.pop()
                if wire.alive():
                    return wire
                wire.close()
        return _Wire.open(region, self._secret, deadline)

    def _give_back(self, region: Region, wire: _Wire) -> None:
        with self._lock:
            idle = self._idle.setdefault(region.peer, deque())
            if not self._closed and len(idle) < IDLE_CONNECTIONS_MAX:
                idle.append(wire)
                return
        wire.close()

    # -- transfers

    def fetch(self, region: Region, pairs: Sequence[Pair], deadline_s: float) -> list[PairResult]:
        deadline = time.monotonic() + deadline_s
        results: dict[int, PairResult] = {}
        for index, pair in enumerate(pairs):
            refusal = unfit(pair, region.layout, self._arena.layout)
            if refusal is not None:
                results[index] = refusal
        wanted = [index for index in range(len(pairs)) if index not in results]
        if wanted:
            error = self._fetch_parts(region, pairs, wanted, deadline, results)
            if error is not None:
                missing = (index for index in wanted if index not in results)
                results |= {index: PairResult(pairs[index].dst_slot, error.failure, error.detail) for index in missing}
        return [results[index] for index in range(len(pairs))]

    def _fetch_parts(
        self, region: Region, pairs: Sequence[Pair], wanted: list[int], deadline: float, results: dict[int, PairResult]
    ) -> LinkError | None:
        """Ask some parts ahead, take what arrives; None when every pair has its result."""
        wire = self._take(region, deadline)
        if isinstance(wire, LinkError):
            return wire
        parts = deque(_bounded([[wanted[i] for i in part] for part in parts_of([pairs[index] for index in wanted])]))
        asked: deque[list[int]] = deque()
        try:
            while parts or asked:
                while parts and len(asked) < PARTS_AHEAD:
                    asked.append(parts.popleft())
                    items = [(pairs[index].src_slot, pairs[index].length_bytes) for index in asked[-1]]
                    wire.ask(Verb.SLOTS, items, deadline)
                wire.expect_answer(deadline)
                for index in asked.popleft():
                    pair = pairs[index]
                    target = self._arena.payload(pair.dst_slot)[: pair.length_bytes]
                    wire.receive(target.data, deadline)
                    results[index] = PairResult(pair.dst_slot, self._digester.checksum(target))
        except _WireFailedError as failed:
            wire.close()
            return failed.error
        self._give_back(region, wire)
        return None

    def headers(self, region: Region, slots: Sequence[int], deadline_s: float) -> Headers | LinkError:
        deadline = time.monotonic() + deadline_s
        wanted = np.asarray(slots, dtype=np.int64)
        if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < region.layout.slots:
            return LinkError(LinkFailure.TOO_LONG, f"{region.holder}: a slot lies outside the arena")
        wire = self._take(region, deadline)
        if isinstance(wire, LinkError):
            return wire
        rows: Headers = np.zeros(len(wanted), dtype=SLOT_HEADER)
        raw = rows.view(np.uint8).data
        try:
            for start in range(0, len(wanted), ITEMS_MAX):
                some = wanted[start : start + ITEMS_MAX]
                wire.ask(Verb.HEADERS, [(int(slot), 0) for slot in some], deadline)
                wire.expect_answer(deadline)
                size = SLOT_HEADER.itemsize
                wire.receive(raw[start * size : (start + len(some)) * size], deadline)
        except _WireFailedError as failed:
            wire.close()
            return failed.error
        self._give_back(region, wire)
        return rows

    def quiet(self, token: QuietToken) -> bool:
        del token
        return True

    def fence(self) -> LinkError | None:
        return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            wires = [wire for idle in self._idle.values() for wire in idle]
            self._idle.clear()
        for wire in wires:
            wire.close()
        self._server.close()


def _bounded(parts: list[list[int]]) -> list[list[int]]:
    """Parts cut to the number of items a request takes (many small blocks make one part)."""
    return [part[start : start + ITEMS_MAX] for part in parts for start in range(0, len(part), ITEMS_MAX)]


class _WireFailedError(Exception):
    """Carries the error of a lost wire to the call that turns it into results."""

    def __init__(self, failure: LinkFailure, detail: str) -> None:
        super().__init__(detail)
        self.error = LinkError(failure, detail)


class _Wire:
    """One proven connection to a peer's block server, used by one thread at a time."""

    def __init__(self, holder: str, sock: socket.socket) -> None:
        self._holder = holder
        self._sock = sock

    @classmethod
    def open(cls, region: Region, secret: bytes, deadline: float) -> _Wire | LinkError:
        """Connect, prove, and check that the server is the life of the holder that the region names."""
        holder = region.holder
        host, port = region.address.get("host"), region.address.get("port")
        if not isinstance(host, str) or not isinstance(port, int):
            return LinkError(LinkFailure.REFUSED, f"{holder}: its region names no block server")
        left = deadline - time.monotonic()
        if left <= 0:
            return LinkError(LinkFailure.TIMED_OUT, f"{holder}: not connected before the deadline")
        try:
            sock = connect_blocking(Endpoint(host=host, port=port), secret, left)
        except ChallengeFailed as error:
            return LinkError(LinkFailure.REFUSED, f"{holder}: {error}")
        except ConnectionLost as error:
            late = time.monotonic() >= deadline
            return LinkError(LinkFailure.TIMED_OUT if late else LinkFailure.PEER_LOST, f"{holder}: {error}")
        wire = cls(holder, sock)
        hello = bytearray(HELLO.size)
        try:
            wire.receive(memoryview(hello), deadline)
        except _WireFailedError as failed:
            wire.close()
            return failed.error
        incarnation, slots = HELLO.unpack(hello)
        if incarnation != region.incarnation or slots != region.layout.slots:
            wire.close()
            detail = f"{holder}: incarnation {incarnation} with {slots} slots found, {region.incarnation} expected"
            return LinkError(LinkFailure.REFUSED, detail)
        return wire

    def alive(self) -> bool:
        """Whether an idle connection is still open and silent, as the server leaves it."""
        self._sock.setblocking(False)
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def ask(self, verb: Verb, items: Sequence[tuple[int, int]], deadline: float) -> None:
        """Send one request. Raises _WireFailedError."""
        body = np.array(items, dtype=ITEM).tobytes()
        with self._translated(deadline):
            self._sock.sendall(REQUEST.pack(verb, len(items)) + body)

    def expect_answer(self, deadline: float) -> None:
        """Receive the next reply's first byte. Raises _WireFailedError unless the request was granted."""
        answer = bytearray(1)
        self.receive(memoryview(answer), deadline)
        if answer[0] != Answer.GRANTED:
            raise _WireFailedError(LinkFailure.REFUSED, f"{self._holder}: refused the request")

    def receive(self, view: memoryview, deadline: float) -> None:
        """Fill ``view`` from the socket. Raises _WireFailedError."""
        with self._translated(deadline):
            if not receive_into(self._sock, view, deadline):
                raise ConnectionResetError("closed by the peer")

    @contextlib.contextmanager
    def _translated(self, deadline: float) -> Iterator[None]:
        try:
            self._sock.settimeout(max(1e-3, deadline - time.monotonic()))
            yield
        except TimeoutError as error:
            # The kernel reports a peer that acknowledges nothing by a time-out of its own.
            kernel = error.errno == errno.ETIMEDOUT
            failure = LinkFailure.PEER_LOST if kernel else LinkFailure.TIMED_OUT
            raise _WireFailedError(failure, f"{self._holder}: {error}") from None
        except OSError as error:
            raise _WireFailedError(LinkFailure.PEER_LOST, f"{self._holder}: {error}") from None

    def close(self) -> None:
        self._sock.close()
