"""Draining a node: what the supervisor asks, what holders offer one another, what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..effects import ExtentEntry
from ..wire import Bits, record
from .directory import EventRun


@dataclass(frozen=True, slots=True)
class DrainTarget:
    """A holder of another node that may take state of these shards."""

    holder: str
    node: str
    shards: tuple[int, ...]


@record(54, since=2)
@dataclass(frozen=True, slots=True)
class Drain:
    """Move what is worth most to ``targets`` within ``within_s`` seconds, then end every lease.

    ``leaving``: holders that go as well, so that a copy there counts for nothing. ``number`` only grows;
    the same one again is answered with the report, if there is one.
    """

    number: int
    within_s: float
    targets: tuple[DrainTarget, ...]
    leaving: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DrainTally:
    """Objects, their bytes, and what the policy says they are worth: its worth of each, times its bytes."""

    objects: int = 0
    size_bytes: int = 0
    value: float = 0.0


@record(55, since=2)
@dataclass(frozen=True, slots=True)
class Drained:
    """What became of a holder's state: moved, already elsewhere, dropped; and how many leases were cut."""

    number: int
    incarnation: int
    moved: DrainTally
    elsewhere: DrainTally
    dropped: DrainTally
    leases_cut: int
    spent_s: float


@record(59, since=2)
@dataclass(frozen=True, slots=True)
class CopiesLookup:
    """Which of these objects has another holder too, none of ``but``? ``ask`` numbers the questions of one drain."""

    op: str
    ask: int
    but: tuple[str, ...]
    runs: tuple[EventRun, ...]


@record(56, since=2)
@dataclass(frozen=True, slots=True)
class CopiesFound:
    """For each run asked for, bit i: its object i has a good copy elsewhere."""

    op: str
    ask: int
    copies: tuple[Bits, ...]


@dataclass(frozen=True, slots=True)
class Offered:
    """One object on offer, and what the policy says it is worth.

    ``base``, ``home``: digests of the object before it in its chain and of the history block it ends in.
    """

    entry: ExtentEntry
    worth: float
    base: bytes
    home: bytes


@record(57, since=2)
@dataclass(frozen=True, slots=True)
class Offer:
    """Objects of a holder that drains, to be fetched from it within ``within_s`` seconds by whoever has room.

    All objects of one group are of one ABI.
    """

    op: str
    incarnation: int
    within_s: float
    objects: tuple[Offered, ...]


@record(58, since=2)
@dataclass(frozen=True, slots=True)
class Taken:
    """What became of an offer, bit i for its object i: ``landed`` here, ``had`` already, no ``room``; else it failed."""

    op: str
    landed: Bits
    had: Bits
    no_room: Bits


@record(49, since=2)
@dataclass(frozen=True, slots=True)
class Warm:
    """``holder``, of these shards, has just joined: offer it what is worth most, so many bytes within so many seconds."""

    holder: str
    shards: tuple[int, ...]
    bytes_max: int
    within_s: float
