"""The link between holders of one host: the peer's arena is mapped read-only, and its slots are copied once.

The descriptor of the peer's memfd comes over the peer's control socket: a region names the endpoint and the
request that is answered with it, so that this module knows nothing of what the requests mean.

No foreign byte ever arrives here, the copying thread being our own: every token is quiet. A peer that died stays
readable, and its memory taken, until ``disconnect``; whether its bytes still count is the caller's judgement.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from ..fabric.arena import Arena
from ..fabric.kinds import FabricError
from .control_client import BlockingClient, ConnectionLost, RequestTimedOut
from .digest import copy_and_checksum
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
    unfit,
)
from .memfd import map_read_only


class SharedMemoryLink:
    """A :class:`~kvfabric.transport.link.Link` by mapping the peer's arena.

    ``endpoint`` is our control socket (``unix:...``), ``request`` the frame it answers with ``read_only_fd``.
    """

    kind = LinkKind.SHARED_MEMORY

    def __init__(self, arena: Arena, *, holder: str, incarnation: int, endpoint: str, request: bytes) -> None:
        self._arena = arena
        self._region = Region(
            holder=holder,
            incarnation=incarnation,
            kind=self.kind,
            host=host_identity(),
            layout=arena.layout,
            address={"endpoint": endpoint, "request": request},
        )
        self._lock = threading.Lock()
        self._peers: dict[str, tuple[int, Arena]] = {}
        self._closed = False

    def region(self) -> Region:
        return self._region

    def connect(self, region: Region, deadline_s: float) -> LinkError | None:
        found = self._peer(region, deadline_s)
        return found if isinstance(found, LinkError) else None

    def _peer(self, region: Region, deadline_s: float) -> Arena | LinkError:
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
        peer = self._peer(region, deadline_s)
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
        return PairResult(pair.dst_slot, copy_and_checksum(target, source))

    def headers(self, region: Region, slots: Sequence[int], deadline_s: float) -> Headers | LinkError:
        peer = self._peer(region, deadline_s)
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


def _map_arena(region: Region, deadline_s: float) -> Arena | LinkError:
    """Ask the peer for its arena and map it; the incarnation in its header must be the region's."""
    try:
        endpoint, request = str(region.address["endpoint"]), bytes(region.address["request"])
    except (KeyError, TypeError):
        return LinkError(LinkFailure.REFUSED, f"{region.holder}: its region names no control socket")
    descriptors: tuple[int, ...] = ()
    try:
        with BlockingClient.connect(endpoint, timeout_s=deadline_s) as client:
            descriptors = client.request(request, deadline_s).descriptors
        if len(descriptors) != 1:
            return LinkError(LinkFailure.REFUSED, f"{region.holder}: answered with {len(descriptors)} descriptors")
        fd, descriptors = descriptors[0], ()
        arena = map_read_only(fd, region.layout)
    except RequestTimedOut as error:
        return LinkError(LinkFailure.TIMED_OUT, f"{region.holder}: {error}")
    except ConnectionLost as error:
        return LinkError(LinkFailure.PEER_LOST, f"{region.holder}: {error}")
    except (FabricError, OSError) as error:
        return LinkError(LinkFailure.REFUSED, f"{region.holder}: {error}")
    finally:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    if arena.incarnation != region.incarnation:
        detail = f"{region.holder}: incarnation {arena.incarnation} found, {region.incarnation} expected"
        return LinkError(LinkFailure.REFUSED, detail)
    return arena
