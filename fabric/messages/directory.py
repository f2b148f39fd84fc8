"""Holders, leaders and directory shards: events, dumps, lookups and what they find."""

from __future__ import annotations

from dataclasses import dataclass

from ..kinds import INDEX_DIGEST_BYTES, Reason
from ..passport import Abi
from ..wire import Bits, added, record
from .objects import Mark


@dataclass(frozen=True, slots=True)
class Lane:
    """What objects alike share: group and shard, where they lie, how they may be read.

    ``state``: 0 gone, 1 in memory, 2 on a tier. ``bad``: there but never usable as it is.
    """

    group: int
    shard: int
    state: int
    revision: int
    abi: Abi
    bad: Reason | None = None
    bad_from_tier: bool = False

    def __hash__(self) -> int:
        # Looked up for every run of an event: what tells nearly all lanes apart suffices.
        return hash((self.group, self.shard, self.state, self.revision))


@dataclass(frozen=True, slots=True)
class EventRun:
    """Consecutive objects of one chain, group and shard whose state changed alike.

    ``first``: object index of the first; all lie in one segment, whose first object's digest is
    ``anchor``. ``parent``: digest of the object before the first, b"" at a segment's start.
    ``digests``: 16 bytes each. ``versions``: uint64 each, empty where they say nothing (gone, on a
    tier). ``evicted`` marks a deliberate removal (drop or room).
    """

    lane: Lane
    unit: int
    anchor: bytes
    parent: bytes
    first: int
    digests: bytes
    versions: bytes
    evicted: bool = False


@record(40)
@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one holder's life in order; ``seq`` numbers the batch.

    ``mark``: every change up to this number of the holder's own count has been told. ``map_epoch``:
    the shard map by which this shard was chosen.
    """

    holder: str
    incarnation: int
    seq: int
    mark: int
    runs: tuple[EventRun, ...]
    map_epoch: int = 0


@record(41)
@dataclass(frozen=True, slots=True)
class DumpPart:
    """One bounded part of all a holder has, begun at ``seq``; ``part`` counts from 0, ``last`` ends it."""

    holder: str
    incarnation: int
    seq: int
    mark: int
    part: int
    last: bool
    runs: tuple[EventRun, ...]
    map_epoch: int = 0


@record(42)
@dataclass(frozen=True, slots=True)
class EventsSeen:
    """The directory's place in a holder's stream; ``replay`` asks for a full dump.

    ``dump`` and ``part``: the dump (by its seq) that is being received, and its next part.
    """

    shard: str
    epoch: int
    incarnation: int
    seq: int
    replay: bool
    dump: int = 0
    part: int = 0


@record(46)
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A holder's place in its own stream, told even when nothing happens."""

    holder: str
    incarnation: int
    seq: int


@record(47)
@dataclass(frozen=True, slots=True)
class ShardMap:
    """The directory's shards by address; a later ``epoch`` replaces an earlier one."""

    epoch: int
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Strip:
    """Consecutive objects of a prompt, from index ``first`` (a segment's start): index digests, 16 bytes each."""

    unit: int
    first: int
    digests: bytes

    @property
    def count(self) -> int:
        return len(self.digests) // INDEX_DIGEST_BYTES

    @property
    def anchor(self) -> bytes:
        """The digest of the first object."""
        return self.digests[:INDEX_DIGEST_BYTES]

    def cut(self, at: int, count: int) -> Strip:
        """``count`` objects at most, from place ``at`` on."""
        size = INDEX_DIGEST_BYTES
        return Strip(self.unit, self.first + at, self.digests[at * size : (at + count) * size])


@record(43)
@dataclass(frozen=True, slots=True)
class Lookup:
    """Who has what of a prompt's segments?

    ``map_epoch``: the shard map by which this shard was chosen. ``ask`` numbers the questions of one
    exchange; the answer bears it.
    """

    op: str
    map_epoch: int
    strips: tuple[Strip, ...]
    marks: tuple[Mark, ...] = ()
    ask: int = 0


Piece = tuple[int, int, bytes]
"""Versions of a stripe's objects from index first to end, encoded (``fabric.versions``), a row a lane."""


Edition = tuple[int, int, bytes]
"""A shard's count of changes at each of consecutive segments of one object unit, from object ``first`` on:
(unit, first, uint64 each). The lowest bit tells whether anything is known of the segment at all."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """What one holder has alike in several groups along a prompt: bit i is object i of the prompt.

    All ``lanes`` have the same objects. ``pieces`` bear the versions, ascending and disjoint; none
    for what is not in memory.
    """

    holder: str
    incarnation: int
    lanes: tuple[Lane, ...]
    bits: Bits
    pieces: tuple[Piece, ...] = ()


@record(44)
@dataclass(frozen=True, slots=True)
class Found:
    """Presence along the prompt at the best known holders; ``evicted``: (group, bits) gone by choice.

    ``stale``: holders whose events have been missing for long: what is said of them is not trusted.
    ``behind``: a holder's mark was not reached in time. ``moved``: (unit, first index) of segments
    that another shard answers for, by the newer ``map``. ``ask`` is the question's. ``editions``: of the
    segments asked for that this shard answers for.
    """

    op: str
    epoch: int
    ask: int
    stripes: tuple[Stripe, ...]
    evicted: tuple[tuple[int, Bits], ...]
    stale: tuple[str, ...] = ()
    behind: bool = False
    moved: tuple[tuple[int, int], ...] = ()
    map: ShardMap | None = None
    editions: tuple[Edition, ...] = added(2, ())


@record(45)
@dataclass(frozen=True, slots=True)
class HolderGone:
    """A life of a holder ended (proven by its node or by its grant lease running out)."""

    holder: str
    incarnation: int
