"""The link of the pure core: copies between arenas of one process, for scenarios, the simulator and tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..fabric.arena import Arena
from .digest import digester
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


class LoopbackNetwork:
    """The arenas that loopback links reach: whose they are, by holder and incarnation."""

    def __init__(self) -> None:
        self._arenas: dict[tuple[str, int], Arena] = {}

    def add(self, holder: str, incarnation: int, arena: Arena) -> None:
        self._arenas[(holder, incarnation)] = arena

    def remove(self, holder: str, incarnation: int) -> None:
        """As if the holder's process had ended. An unknown one is no error."""
        self._arenas.pop((holder, incarnation), None)

    def find(self, region: Region) -> Arena | LinkError:
        """The arena a region names; PEER_LOST if that life of the holder is over."""
        arena = self._arenas.get(region.peer)
        if arena is None:
            return LinkError(LinkFailure.PEER_LOST, f"{region.holder}: incarnation {region.incarnation} is gone")
        return arena


class LoopbackLink:
    """A :class:`~kvfabric.transport.link.Link` within one process; nothing is ever in flight."""

    kind = LinkKind.LOOPBACK

    def __init__(self, network: LoopbackNetwork, arena: Arena, *, holder: str, incarnation: int) -> None:
        self._network = network
        self._arena = arena
        self._digester = digester(arena.layout.checksum)
        self._closed = False
        self._region = Region(holder, incarnation, self.kind, host_identity(), arena.layout, {})
        network.add(holder, incarnation, arena)

    def region(self) -> Region:
        return self._region

    def _find(self, region: Region) -> Arena | LinkError:
        if self._closed:
            return LinkError(LinkFailure.UNAVAILABLE, "the link is closed")
        return self._network.find(region)

    def connect(self, region: Region, deadline_s: float) -> LinkError | None:
        del deadline_s  # nothing here takes time
        found = self._find(region)
        return found if isinstance(found, LinkError) else None

    def disconnect(self, region: Region) -> None:
        """Nothing is kept about peers."""

    def fetch(self, region: Region, pairs: Sequence[Pair], deadline_s: float) -> list[PairResult]:
        del deadline_s
        peer = self._find(region)
        if isinstance(peer, LinkError):
            return [PairResult(pair.dst_slot, peer.failure, peer.detail) for pair in pairs]
        return [self._copy(peer, pair) for pair in pairs]

    def _copy(self, peer: Arena, pair: Pair) -> PairResult:
        refusal = unfit(pair, peer.layout, self._arena.layout)
        if refusal is not None:
            return refusal
        target = self._arena.payload(pair.dst_slot)[: pair.length_bytes]
        return PairResult(pair.dst_slot, self._digester.copy(target, peer.payload(pair.src_slot)[: pair.length_bytes]))

    def headers(self, region: Region, slots: Sequence[int], deadline_s: float) -> Headers | LinkError:
        del deadline_s
        peer = self._find(region)
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
        """As if this holder's process had ended."""
        self._closed = True
        self._network.remove(*self._region.peer)
