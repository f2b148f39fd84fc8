"""Holders among each other: the shares of a lease, and pins for a transfer."""

from __future__ import annotations

from dataclasses import dataclass

from ..kinds import Reason
from ..passport import Abi
from ..wire import added, record
from .leases import LeasePart
from .objects import Cap, Column, Objects, Prompt, Room, SlotRun


@record(20)
@dataclass(frozen=True, slots=True)
class MateLookup:
    """The leader asks a rank's holder what it has of a prompt."""

    op: str
    prompt: Prompt


@record(21)
@dataclass(frozen=True, slots=True)
class MateColumns:
    """What a rank's holder has of the prompt, and its room."""

    op: str
    columns: tuple[Column, ...]
    room: tuple[Room, ...]
    caps: tuple[Cap, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Objects to bring from ``source`` (its incarnation told) with the versions expected there."""

    source: str
    incarnation: int
    objects: Objects
    versions: bytes


@record(22)
@dataclass(frozen=True, slots=True)
class PartOpen:
    """Prepare one holder's share: pin what is there, reserve, restore, fetch, prove; all or nothing."""

    op: str
    prompt: Prompt
    abis: tuple[Abi, ...]
    tokens: int
    revisions: tuple[int | None, ...]
    shards: tuple[int, ...]
    local: tuple[Objects, ...]
    fetches: tuple[Fetch, ...]
    ttl_s: float
    graph_number: int = 0
    patience_s: float = 60.0
    """How soon restores for it should be over, from now; a higher priority makes it less, and it may be negative."""
    replays: bool = added(2, False)
    """Its reader computes windows and tails again: nothing is needed of them but sinks."""


@dataclass(frozen=True, slots=True)
class BadCopy:
    """A copy that cannot be used for this request: where it lies, which object, why."""

    holder: str
    group: int
    shard: int
    index: int
    reason: Reason
    from_tier: bool


@record(23)
@dataclass(frozen=True, slots=True)
class PartReply:
    """Ready (``refused`` None) or not, with the truth: fresh columns, room and bad copies."""

    op: str
    refused: Reason | None
    group: int
    bad: tuple[BadCopy, ...]
    lost: tuple[str, ...]
    stale: tuple[Column, ...]
    room: tuple[Room, ...]
    moved_bytes: tuple[tuple[int, int], ...]
    caps: tuple[Cap, ...] = ()


@record(24)
@dataclass(frozen=True, slots=True)
class PartGrant:
    """Turn a ready share into a lease record. ``graph``: its slots freeze until released.

    ``client``: who will read under it; when its process is gone, a graph lease of its is over.
    """

    op: str
    lease_s: float
    graph: bool
    client: str = ""


@record(25)
@dataclass(frozen=True, slots=True)
class PartGranted:
    """A share's lease, or why there is none."""

    op: str
    refused: Reason | None
    deadline_s: float
    lease: int
    part: LeasePart | None


@record(26)
@dataclass(frozen=True, slots=True)
class PartAbort:
    """Let a share go; what was fetched stays as an ordinary copy.

    ``cancel``: nobody wants it any more, so what only it waits for is not restored either.
    """

    op: str
    cancel: bool = False


@record(27)
@dataclass(frozen=True, slots=True)
class PartRenew:
    """Extend a share with its lease."""

    op: str
    lease: int
    lease_s: float


@record(28)
@dataclass(frozen=True, slots=True)
class PartRenewed:
    """A share's new deadline, or why there is none."""

    op: str
    refused: Reason | None
    deadline_s: float


@record(29)
@dataclass(frozen=True, slots=True)
class PartRelease:
    """End a share."""

    lease: int


@record(36, since=2)
@dataclass(frozen=True, slots=True)
class Replicate:
    """A prefix of ``tokens`` tokens is hot: bring a copy to these readers, if there is room for one."""

    op: str
    prompt: Prompt
    abis: tuple[Abi, ...]
    readers: tuple[str, ...]
    tokens: int


@record(34)
@dataclass(frozen=True, slots=True)
class PartCheck:
    """Is this expired graph share still leased? If not, its leader answers with a release."""

    lease: int


@record(30)
@dataclass(frozen=True, slots=True)
class PinRequest:
    """Pin objects at their source for a transfer, or with ``dry`` only ask for the truth.

    What lies on the source's tier is restored first (``restore``) or refused as pending.
    """

    op: str
    incarnation: int
    prompt: Prompt
    objects: tuple[Objects, ...]
    revisions: tuple[int | None, ...]
    abis: tuple[Abi, ...]
    dry: bool
    restore: bool
    ttl_s: float


@dataclass(frozen=True, slots=True)
class SourceRun:
    """Pinned slots at the source: where, which versions, how long, which checksums, which layout."""

    slots: SlotRun
    lengths: tuple[int, ...]
    checksums: bytes
    revisions: tuple[int, ...]
    abis: tuple[Abi, ...]
    positions: tuple[int, ...]


@record(31)
@dataclass(frozen=True, slots=True)
class PinReply:
    """Pinned runs, or a refusal that carries the true columns of the prompt."""

    op: str
    holder: str
    incarnation: int
    refused: Reason | None
    runs: tuple[SourceRun, ...]
    truth: tuple[Column, ...]
    bad: tuple[BadCopy, ...]


@record(32)
@dataclass(frozen=True, slots=True)
class PinEnd:
    """Re-read the pinned slots' headers and end the pins. ``suspect``: digest these once more."""

    op: str
    suspect: tuple[Objects, ...]


@record(33)
@dataclass(frozen=True, slots=True)
class PinEnded:
    """``versions``: each pinned slot's version now, in the order of the runs; empty if unknown, zero for bytes
    that proved wrong beside a copy on disk: ``truth`` then tells what this holder has.
    """

    op: str
    holder: str
    versions: tuple[bytes, ...]
    bad: tuple[BadCopy, ...]
    truth: tuple[Column, ...] = ()
