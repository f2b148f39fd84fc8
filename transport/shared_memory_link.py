"""The link between holders of one host: the peer's arena is mapped read-only, and its slots are copied once.

The descriptor of the peer's memfd comes from a small server that each link keeps: a Unix socket in the abstract
namespace (no file to leave behind), served by a thread of its own so that a busy event loop delays nobody.

No foreign byte ever arrives here, the copying thread being our own: every token is quiet. A peer that died stays
readable, and its memory taken, until ``disconnect``; whether its bytes still count is the caller's judgement.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np

from ..fabric.arena import Arena
from ..fabric.kinds import FabricError, WireError
from .control_client import BlockingClient, ConnectionLost, RequestTimedOut
from .digest import digester
from .endpoints import Endpoint, listen_unix, peer_credentials
from .frames import HEADER, Frame, FrameDecoder, FrameStatus, encode
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
    unfit,
)
from .memfd import ArenaMemory, map_read_only

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 1.0
_ACCEPT_RETRY_S = 0.1


class SharedMemoryLink:
    """A :class:`~kvfabric.transport.link.Link` by mapping the peer's arena; made by :meth:`start`."""

    kind = LinkKind.SHARED_MEMORY

    def __init__(self, arena: Arena, region: Region, server: _ArenaServer) -> None:
        self._arena = arena
        self._digester = digester(arena.layout.checksum)
        self._region = region
        self._server = server
        self._lock = threading.Lock()
        self._peers: dict[str, tuple[int, Arena]] = {}
        self._closed = False

    @classmethod
    def start(cls, memory: ArenaMemory, *, holder: str, incarnation: int) -> SharedMemoryLink | LinkError:
        """Serve ``memory`` to peers of this host; it must stay open until the link is closed."""
        try:
            server = _ArenaServer(memory)
        except OSError as error:
            return LinkError(LinkFailure.UNAVAILABLE, f"no socket to hand the arena out: {error}")
        address = {"endpoint": server.endpoint}
        region = Region(holder, incarnation, cls.kind, host_identity(), memory.layout, address)
        return cls(memory.arena, region, server)

    def region(self) -> Region:
        return self._region

    def connect(self, region: Region, deadline_s: float) -> LinkError | None:
        found = self.mapped(region, deadline_s)
        return found if isinstance(found, LinkError) else None

    def mapped(self, region: Region, deadline_s: float) -> Arena | LinkError:
        """The peer's arena, mapped read-only; mapped now if it is not yet."""
        refusal = other_kind(region, self.kind)
        if refusal is not None:
            return refusal
        with self._lock:
            if self._closed:
                return LinkError(LinkFailure.UNAVAILABLE, "the link is closed")
            known = self._peers.get(region.holder)
        if known is not None and known[0] == region.incarnation:
            return known[1]
        arena = _map_arena(region, deadline_s)
        if isinstance(arena, Arena):
            with self._lock:
                self._peers[region.holder] = (region.incarnation, arena)
        return arena

    def disconnect(self, region: Region) -> None:
        with self._lock:
            known = self._peers.get(region.holder)
            if known is not None and known[0] == region.incarnation:
                del self._peers[region.holder]

    def fetch(self, region: Region, pairs: Sequence[Pair], deadline_s: float) -> list[PairResult]:
        deadline = time.monotonic() + deadline_s
        peer = self.mapped(region, deadline_s)
        if isinstance(peer, LinkError):
            return [PairResult(pair.dst_slot, peer.failure, peer.detail) for pair in pairs]
        return [self._copy(peer, pair, deadline) for pair in pairs]

    def _copy(self, peer: Arena, pair: Pair, deadline: float) -> PairResult:
        refusal = unfit(pair, peer.layout, self._arena.layout)
        if refusal is not None:
            return refusal
        if time.monotonic() > deadline:
            return PairResult(pair.dst_slot, LinkFailure.TIMED_OUT, "not copied before the deadline")
        target = self._arena.payload(pair.dst_slot)[: pair.length_bytes]
        source = peer.payload(pair.src_slot)[: pair.length_bytes]
        return PairResult(pair.dst_slot, self._digester.copy(target, source))

    def headers(self, region: Region, slots: Sequence[int], deadline_s: float) -> Headers | LinkError:
        peer = self.mapped(region, deadline_s)
        if isinstance(peer, LinkError):
            return peer
        wanted = np.asarray(slots, dtype=np.int64)
        if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < peer.layout.slots:
            return LinkError(LinkFailure.TOO_LONG, f"{region.holder}: a slot lies outside the arena")
        rows: Headers = peer.table[wanted]
        return rows

    def quiet(self, token: QuietToken) -> bool:
        del token
        return True

    def fence(self) -> LinkError | None:
        return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._peers.clear()
        self._server.close()


class _ArenaServer:
    """Hands a read-only descriptor of the arena to each process of this user that asks, one at a time."""

    def __init__(self, memory: ArenaMemory) -> None:
        self._memory = memory
        self._closing = False
        endpoint = Endpoint(path=f"@kvfabric-arena-{secrets.token_hex(8)}")
        self._listener = listen_unix(endpoint.path)
        self.endpoint = str(endpoint)
        self._thread = threading.Thread(target=self._serve, name="kvfabric-arena-server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                # Out of descriptors, for one: peers time out meanwhile, and are served again afterwards.
                logger.warning("%s: no connection accepted: %s", threading.current_thread().name, error)
                time.sleep(_ACCEPT_RETRY_S)
                continue
            with sock:
                if self._closing:
                    return
                try:
                    self._answer(sock)
                except (OSError, FabricError) as error:
                    logger.info("%s: a request for the arena was not answered: %s", self.endpoint, error)

    def _answer(self, sock: socket.socket) -> None:
        """One request of one client, which has a second for it."""
        _, uid = peer_credentials(sock)
        if uid != os.geteuid():
            raise PermissionError("it came from another user")
        sock.settimeout(_ANSWER_TIMEOUT_S)
        decoder = FrameDecoder(0)
        frames: list[Frame] = []
        while not frames:
            data = sock.recv(HEADER.size)
            if not data:
                return
            frames = decoder.feed(data)
        fd = self._memory.read_only_fd()
        try:
            socket.send_fds(sock, [encode(frames[0].request_id, FrameStatus.REPLY, b"", 1)], [fd])
        finally:
            os.close(fd)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        # Closing a socket does not wake its accept; shutting it down does.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


def _map_arena(region: Region, deadline_s: float) -> Arena | LinkError:
    """Ask the peer for its arena and map it; the incarnation in its header must be the region's."""
    endpoint = region.address.get("endpoint")
    if not isinstance(endpoint, str):
        return LinkError(LinkFailure.REFUSED, f"{region.holder}: its region names no socket")
    try:
        arena = map_read_only(_ask_for_arena(endpoint, deadline_s), region.layout)
    except RequestTimedOut as error:
        return LinkError(LinkFailure.TIMED_OUT, f"{region.holder}: {error}")
    except ConnectionLost as error:
        return LinkError(LinkFailure.PEER_LOST, f"{region.holder}: {error}")
    except (FabricError, OSError) as error:
        return LinkError(LinkFailure.REFUSED, f"{region.holder}: {error}")
    if arena.incarnation != region.incarnation:
        detail = f"{region.holder}: incarnation {arena.incarnation} found, {region.incarnation} expected"
        return LinkError(LinkFailure.REFUSED, detail)
    return arena


def _ask_for_arena(endpoint: str, deadline_s: float) -> int:
    """The arena's descriptor. Raises FabricError, OSError."""
    with BlockingClient.connect(endpoint, timeout_s=deadline_s) as client:
        descriptors = client.request(b"", deadline_s).descriptors
    if len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise WireError(f"{endpoint} answered with {len(descriptors)} descriptors")
    return descriptors[0]
