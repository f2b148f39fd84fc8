"""What every link offers: bytes of a peer's slots into ours, digests of what landed, and proof of quiet.

A holder describes its arena to peers by a ``Region`` for each link that can reach it. The reading side
connects to a region and fetches slot by slot, one-sided: the peer's Python runs no code for it
(the plain TCP link excepted).

::

    regions of the peer --> preferred() --> link.connect(region) --> link.fetch(region, pairs)
                                                                     link.headers(region, slots)

A link moves bytes and says what arrived; it judges nothing. Whether the bytes are the pinned version
is the caller's proof: ``headers`` after ``fetch``, and each result's checksum against the record.

Failures are values (``LinkFailure``). After some of them foreign bytes may still arrive in the destination
slots; those results carry a ``QuietToken``, and the slot must stay quarantined until ``quiet(token)``.
Calls block: they run in threads, never on an event loop; every method may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NewType, Protocol

import numpy as np
import numpy.typing as npt

from ..fabric.arena import ArenaLayout
from ..fabric.kinds import WireError

PART_BYTES = 4 * 1024 * 1024
"""Payload asked for at a time: while one part is digested the next ones are in flight."""

QuietToken = NewType("QuietToken", int)
"""Names a transfer that may still write. Tokens of one link are never reused."""

Headers = npt.NDArray[np.void]
"""Rows of ``SLOT_HEADER``, shape (slots,), a private copy."""


class LinkKind(StrEnum):
    """How bytes travel; reported by ``status`` and in transfer figures."""

    SHARED_MEMORY = "shared_memory"
    NIXL = "nixl"
    TCP = "tcp"
    LOOPBACK = "loopback"


PREFERENCE = (LinkKind.LOOPBACK, LinkKind.SHARED_MEMORY, LinkKind.NIXL, LinkKind.TCP)
"""Best first, where both sides have it."""


class LinkFailure(StrEnum):
    """Why bytes did not arrive."""

    PEER_LOST = "peer_lost"
    """The peer's process or the way to it is gone."""
    TIMED_OUT = "timed_out"
    """The deadline passed; the transfer may still be under way."""
    REFUSED = "refused"
    """The peer lives but is another incarnation, or does not know us or the slot."""
    TOO_LONG = "too_long"
    """A pair's length does not fit one of its slots, or a slot lies outside its arena."""
    UNAVAILABLE = "unavailable"
    """This link cannot start, or is closed."""
    BROKEN = "broken"
    """The transport reported an error of its own."""


@dataclass(frozen=True, slots=True)
class LinkError:
    """A failure and one line of detail for logs."""

    failure: LinkFailure
    detail: str


@dataclass(frozen=True, slots=True)
class Region:
    """How peers reach one arena over one kind of link. Plain values: it travels in wire records.

    ``host`` names the kernel and network namespace the arena lives in; ``address`` is the link's own
    (bytes, integers and strings under string keys).
    """

    holder: str
    incarnation: int
    kind: LinkKind
    host: str
    layout: ArenaLayout = field(compare=False)
    address: Mapping[str, Any] = field(compare=False)

    @property
    def peer(self) -> tuple[str, int]:
        """The holder and its life: what a connection is to."""
        return (self.holder, self.incarnation)

    def to_plain(self) -> dict[str, Any]:
        """Plain values for a wire record; :meth:`from_plain` is the inverse."""
        return {
            "holder": self.holder,
            "incarnation": self.incarnation,
            "kind": str(self.kind),
            "host": self.host,
            "layout": self.layout.to_plain(),
            "address": dict(self.address),
        }

    @classmethod
    def from_plain(cls, plain: Any) -> Region:
        """Raises WireError for anything :meth:`to_plain` does not make."""
        try:
            address = plain["address"]
            if not isinstance(address, dict):
                raise TypeError("address is no map")
            return cls(
                holder=str(plain["holder"]),
                incarnation=int(plain["incarnation"]),
                kind=LinkKind(plain["kind"]),
                host=str(plain["host"]),
                layout=ArenaLayout.from_plain(plain["layout"]),
                address=address,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"region: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Pair:
    """``length_bytes`` from the start of the peer's slot to the start of ours."""

    src_slot: int
    dst_slot: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class PairResult:
    """What became of one pair: the xxh3-128 of the bytes that landed, or why they did not.

    A ``token`` says that foreign bytes may still arrive in ``dst_slot``: quarantine it until quiet.
    """

    dst_slot: int
    outcome: bytes | LinkFailure
    detail: str = ""
    token: QuietToken | None = None

    @property
    def checksum(self) -> bytes | None:
        return self.outcome if isinstance(self.outcome, bytes) else None

    @property
    def failure(self) -> LinkFailure | None:
        return None if isinstance(self.outcome, bytes) else self.outcome


class Link(Protocol):
    """One way of moving bytes between arenas. See the module's text for the order of calls."""

    @property
    def kind(self) -> LinkKind:
        """Which way this is."""

    def region(self) -> Region:
        """How peers reach our arena over this link. It changes when ``fence`` was called."""

    def connect(self, region: Region, deadline_s: float) -> LinkError | None:
        """Make ready to read from a peer and pay the cost of the first transfer; None when ready.

        A connection to an earlier incarnation of the same holder is dropped first. ``fetch`` and
        ``headers`` connect by themselves where this was not called.
        """

    def disconnect(self, region: Region) -> None:
        """Drop what is kept about a peer that ended, restarted or was drained. Unknown peers are no error."""

    def fetch(self, region: Region, pairs: Sequence[Pair], deadline_s: float) -> list[PairResult]:
        """Copy the peer's slots into ours within ``deadline_s`` seconds; one result a pair, in order."""

    def headers(self, region: Region, slots: Sequence[int], deadline_s: float) -> Headers | LinkError:
        """The peer's slot headers as they are after everything fetched before this call."""

    def quiet(self, token: QuietToken) -> bool:
        """Whether no foreign byte can arrive any more from the transfer named; unknown tokens are quiet."""

    def fence(self) -> LinkError | None:
        """Make every token quiet at once by force; fetches under way in other threads fail as UNAVAILABLE.

        Peers must be told the new ``region`` afterwards. An error says that the link could not start again (a network
        device that is down, for one): everything is quiet all the same, and calling ``fence`` again tries again.
        """

    def close(self) -> None:
        """Give everything back. Transfers under way are fenced."""


def preferred(links: Mapping[LinkKind, Link], offers: Iterable[Region]) -> list[tuple[Link, Region]]:
    """The ways to a peer that both sides have, best first; the next one is tried when one fails to connect.

    Shared memory and loopback count only where the peer's region is of our own host.
    """
    here = host_identity()
    by_kind = {region.kind: region for region in offers}
    ways: list[tuple[Link, Region]] = []
    for kind in PREFERENCE:
        region = by_kind.get(kind)
        link = links.get(kind)
        if region is None or link is None:
            continue
        if kind in {LinkKind.SHARED_MEMORY, LinkKind.LOOPBACK} and region.host != here:
            continue
        ways.append((link, region))
    return ways


def host_identity() -> str:
    """Equal in two processes exactly if they share a kernel and a network namespace.

    The namespace is part of it because hosts simulated on one kernel differ in nothing else.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = Path("/proc/self/ns/net").stat()
    return f"{boot}/{namespace.st_ino:x}"


def other_kind(region: Region, kind: LinkKind) -> LinkError | None:
    """The refusal of a region that another kind of link serves, else None."""
    if region.kind is kind:
        return None
    return LinkError(LinkFailure.REFUSED, f"{region.holder}: its region is for {region.kind}, this link is {kind}")


def unfit(pair: Pair, source: ArenaLayout, target: ArenaLayout) -> PairResult | None:
    """The refusal of a pair that does not fit both arenas, else None. Every link asks this first."""
    for layout, slot, side in ((source, pair.src_slot, "source"), (target, pair.dst_slot, "destination")):
        try:
            room = layout.pools[layout.pool_of(slot)].slot_bytes
        except IndexError:
            return PairResult(pair.dst_slot, LinkFailure.TOO_LONG, f"{side} slot {slot} lies outside the arena")
        if not 0 <= pair.length_bytes <= room:
            detail = f"{pair.length_bytes} bytes do not fit {side} slot {slot} of {room}"
            return PairResult(pair.dst_slot, LinkFailure.TOO_LONG, detail)
    return None


def parts_of(pairs: Sequence[Pair], part_bytes: int = PART_BYTES) -> list[list[int]]:
    """Indices of ``pairs``, in order, cut so that a part holds about ``part_bytes`` (at least one pair)."""
    parts: list[list[int]] = []
    room = 0
    for index, pair in enumerate(pairs):
        if room <= 0:
            parts.append([])
            room = part_bytes
        parts[-1].append(index)
        room -= pair.length_bytes
    return parts
