"""Every record that crosses a process: what sessions, holders, directory and supervisor say.

Digests travel concatenated (32 bytes each to holders, which compare all of them), slot numbers as
little-endian uint32, versions as uint64, checksums as 16 bytes each: one bytes object a column.
"""

from __future__ import annotations

from dataclasses import dataclass

from .kinds import INDEX_DIGEST_BYTES, Cause, Reason, Status
from .passport import Abi
from .wire import Bits, record

Ranges = tuple[tuple[int, int], ...]
"""Half-open index ranges, ascending."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the fabric sees it: its namespace and its digests, never its tokens.

    ``keys`` holds, for each object unit in tokens, the 32-byte digests at unit, 2 * unit, ... up to
    ``n`` tokens, concatenated. ``weights`` is the 16-byte digest of the namespace's weights revision.
    """

    namespace: bytes
    weights: bytes
    tenant: str
    n: int
    keys: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects of one group and shard by index, with their digests (32 bytes each).

    ``revision``: the one they are meant in, where the request's own revision of the group leaves it open.
    """

    group: int
    shard: int
    indices: tuple[int, ...]
    digests: bytes
    revision: int | None = None


@dataclass(frozen=True, slots=True)
class StoreItem:
    """Objects to store: ``length`` bytes each, under one revision and ABI."""

    objects: Objects
    revision: int
    length: int
    abi: Abi


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Slots of one group and shard: slot numbers (uint32) and versions (uint64), by index."""

    group: int
    shard: int
    indices: tuple[int, ...]
    slots: bytes
    versions: bytes


@dataclass(frozen=True, slots=True)
class Column:
    """What one holder has of one group and shard along one prompt.

    ``memory``: sealed in memory; ``tier``: only on a tier, restorable; ``bad``: there but never
    usable as it is, with the reason and whether a tier is to blame. ``revisions`` and ``abis``
    partition all three. ``versions``: a uint64 for each bit of memory, ascending.
    """

    holder: str
    incarnation: int
    group: int
    shard: int
    memory: Bits
    tier: Bits
    revisions: dict[int, Bits]
    abis: tuple[tuple[Abi, Bits], ...]
    bad: tuple[tuple[Reason, bool, Bits], ...] = ()
    versions: bytes = b""


@dataclass(frozen=True, slots=True)
class Room:
    """Slots of one group and shard a holder could free for one request.

    ``slots``: free or evictable; ``pool_slots``: the whole pool; ``pinned``: objects of the prompt
    that are pinned already and so need no room.
    """

    group: int
    shard: int
    slots: int
    pool_slots: int
    pinned: Bits


@dataclass(frozen=True, slots=True)
class Cap:
    """What a byte limit of a holder leaves one tenant in some groups together.

    ``room_bytes``: not in use or evictable; ``bytes_max``: the whole limit; ``reason``: what a
    refusal by it is called.
    """

    groups: tuple[int, ...]
    room_bytes: int
    bytes_max: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a holder's own count of changes: a lookup that bears it sees everything up to there."""

    holder: str
    incarnation: int
    mark: int


# --- sessions to holders -----------------------------------------------------------------------


@record(1)
@dataclass(frozen=True, slots=True)
class StoreBegin:
    """Reserve slots for a write attempt, all or nothing. ``retire``: what the commit replaces.

    With ``replace`` false, objects that are there already in this revision and ABI are left alone
    and get no slot.
    """

    request: str
    prompt: Prompt
    items: tuple[StoreItem, ...]
    retire: tuple[Objects, ...]
    replace: bool


@record(2)
@dataclass(frozen=True, slots=True)
class StoreBegun:
    """The attempt's id and its own slots, open for writing; or why there are none."""

    request: str
    attempt: int
    slots: tuple[SlotRun, ...]
    refused: Reason | None
    group: str


@record(3)
@dataclass(frozen=True, slots=True)
class StoreCommit:
    """Make the attempt visible. ``checksums``: xxh3-128 of each slot's bytes, in the order begun."""

    request: str
    attempt: int
    checksums: bytes


@record(4)
@dataclass(frozen=True, slots=True)
class StoreAbort:
    """Give the attempt up; its slots are quarantined until :class:`StoreQuiet`."""

    request: str
    attempt: int


@record(5)
@dataclass(frozen=True, slots=True)
class StoreQuiet:
    """Nothing can write to this attempt's slots any more."""

    request: str
    attempt: int


@record(6)
@dataclass(frozen=True, slots=True)
class Done:
    """The plain reply: ``refused`` is None where all went well.

    ``mark``: the holder's count of changes once this is done; a lookup that bears it sees them.
    """

    request: str
    refused: Reason | None
    detail: str
    mark: int = 0


@record(7)
@dataclass(frozen=True, slots=True)
class Drop:
    """Evict these objects from memory; what is not there is ok, what is pinned refuses all."""

    request: str
    objects: tuple[Objects, ...]


@record(8)
@dataclass(frozen=True, slots=True)
class SwapOut:
    """Write these objects to disk as one extent and free their slots."""

    request: str
    objects: tuple[Objects, ...]


@record(9)
@dataclass(frozen=True, slots=True)
class SwapIn:
    """Bring these objects back from disk."""

    request: str
    objects: tuple[Objects, ...]


@record(10)
@dataclass(frozen=True, slots=True)
class Acquire:
    """Ask the leader for a lease (or, with ``probe``, only for the answer).

    ``abis`` has one entry a group; ``readers`` names the holder of each rank (shard), the leader
    being the first. ``wait_s`` None: recovery is awaited, room is not; 0: nothing is awaited.
    """

    request: str
    prompt: Prompt
    abis: tuple[Abi, ...]
    readers: tuple[str, ...]
    lease_s: float
    wait_s: float | None
    min_tokens: int
    probe: bool
    graph: bool = False
    priority: int = 0
    deadline_s: float | None = None
    explain: bool = False
    graphs: tuple[tuple[str, int], ...] = ()
    """A registered graph's number at each holder: the slots the lease must lie in. Empty: it freezes
    slots where they lie."""
    prefetch: bool = False
    """With ``probe``: what is found is brought into memory all the same."""
    age_s: float = 0.0
    """How long the request waited before it was parked: its place in every line is that much earlier."""
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class LeasePart:
    """One holder's share of a lease: the fence and the exact slots and versions."""

    holder: str
    incarnation: int
    fence: int
    slots: tuple[SlotRun, ...]


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A granted lease. ``lease`` is its number at ``leader``; ``deadline_s`` on the granter's monotonic clock."""

    leader: str
    lease: int
    tokens: int
    deadline_s: float
    weights: bytes
    parts: tuple[LeasePart, ...]


@record(11)
@dataclass(frozen=True, slots=True)
class Answer:
    """What an acquire or probe found: expected outcomes are values."""

    request: str
    status: Status
    tokens: int
    hash_tokens: int
    usable_tokens: int
    cause: Cause | None
    also: tuple[str, ...]
    replay_from: int | None
    expected_s: float | None
    grant: LeaseGrant | None
    tokens_lost_to_alignment: int = 0
    moved_bytes: tuple[tuple[str, int], ...] = ()
    sources: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    evicted: tuple[tuple[int, Bits], ...] = ()
    unreachable: tuple[str, ...] = ()


@record(12)
@dataclass(frozen=True, slots=True)
class Renew:
    """Extend a lease by ``lease_s`` from now."""

    request: str
    lease: int
    lease_s: float


@record(13)
@dataclass(frozen=True, slots=True)
class Renewed:
    """The new deadline, or why there is none."""

    request: str
    refused: Reason | None
    deadline_s: float


@record(14)
@dataclass(frozen=True, slots=True)
class Release:
    """End a lease. ``reused_tokens``: what the reader really used after a clean check."""

    request: str
    lease: int
    reused_tokens: int | None


@record(15)
@dataclass(frozen=True, slots=True)
class GraphRegister:
    """Register the slots a captured graph has baked in. What is not resident there refuses all."""

    request: str
    slots: tuple[SlotRun, ...]


@record(16)
@dataclass(frozen=True, slots=True)
class GraphRegistered:
    """The graph's number at this holder; or why capture is not allowed, and in which group."""

    request: str
    graph: int
    refused: Reason | None
    group: str


@record(17)
@dataclass(frozen=True, slots=True)
class GraphIdle:
    """The graph does not run now: its expired leases' slots are quiet. ``drop``: and never will again."""

    request: str
    graph: int
    drop: bool


@record(18)
@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits any more for the answer to request ``of``, or for what it started."""

    request: str
    of: str


@record(19)
@dataclass(frozen=True, slots=True)
class Park:
    """End a lease whose reader was preempted, and put what only it held on disk, from where it resumes."""

    request: str
    lease: int


# --- holders among each other ------------------------------------------------------------------


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
    """``versions``: each pinned slot's version now, in the order of the runs; empty if unknown."""

    op: str
    holder: str
    versions: tuple[bytes, ...]
    bad: tuple[BadCopy, ...]


# --- directory ---------------------------------------------------------------------------------


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
    that another shard answers for, by the newer ``map``. ``ask`` is the question's.
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


@record(45)
@dataclass(frozen=True, slots=True)
class HolderGone:
    """A life of a holder ended (proven by its node or by its grant lease running out)."""

    holder: str
    incarnation: int


# --- supervisor --------------------------------------------------------------------------------


@record(50)
@dataclass(frozen=True, slots=True)
class GrantUntil:
    """The right to grant leases for ``seconds``, for one incarnation only.

    They count from ``since_s`` on the holder's own clock, as its last reply told it: so a record that was
    held up on its way grants nothing. Without it, from receipt.
    """

    incarnation: int
    seconds: float
    since_s: float | None = None


@record(53)
@dataclass(frozen=True, slots=True)
class GrantSeen:
    """The reply to GrantUntil: the process's monotonic clock now, and the weights, mode and shard map it knows of."""

    incarnation: int
    clock_s: float
    weights_number: int = 0
    mode_number: int = 0
    map_epoch: int = 0


@record(51)
@dataclass(frozen=True, slots=True)
class SetWeights:
    """A weights revision is in force (16-byte digest); every other known one is retired.

    ``number`` only grows: an earlier one that arrives late changes nothing.
    """

    weights: bytes
    retired: tuple[bytes, ...]
    number: int = 0


@record(52)
@dataclass(frozen=True, slots=True)
class SetMode:
    """Draining: stop granting. Bypassed: answer recompute to every acquire. ``number`` only grows."""

    draining: bool
    bypassed: bool
    number: int = 0


# --- clients and drivers: what the processes around the cores say --------------------------------


@record(60)
@dataclass(frozen=True, slots=True)
class PeerHello:
    """The first record on a connection of the mesh: who sends all that follows, and proof of it.

    ``proof``: a keyed digest over both sides' addresses under the fabric's secret, which no client has.
    """

    sender: str
    proof: bytes


@record(61)
@dataclass(frozen=True, slots=True)
class ArenaRequest:
    """Ask a holder for its arena, to map it read-only. The reply bears a descriptor on a Unix socket."""

    request: str


@record(62)
@dataclass(frozen=True, slots=True)
class ArenaReply:
    """Whose arena it is and how its pools lie: (group, shard, slots, slot_bytes, tier) each."""

    request: str
    holder: str
    incarnation: int
    weights: bytes
    pools: tuple[tuple[int, int, int, int, str], ...]


@record(63)
@dataclass(frozen=True, slots=True)
class SlotsRequest:
    """Ask to write an open attempt's own slots. The reply (Done) bears a descriptor."""

    request: str
    attempt: int


@record(64)
@dataclass(frozen=True, slots=True)
class RegionsRequest:
    """Ask a holder how its arena can be read from elsewhere."""

    request: str


@record(65)
@dataclass(frozen=True, slots=True)
class Regions:
    """One msgpack map a link, as the transport describes it."""

    request: str
    holder: str
    incarnation: int
    regions: tuple[bytes, ...]


@record(66)
@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Ask a process for its status."""

    request: str


@record(67)
@dataclass(frozen=True, slots=True)
class StatusReply:
    """The status as one JSON object."""

    request: str
    status: str


@record(68)
@dataclass(frozen=True, slots=True)
class WriteSlots:
    """Bytes for an open attempt's slots (slot, bytes), for clients that map no memory."""

    request: str
    attempt: int
    writes: tuple[tuple[int, bytes], ...]


@record(69)
@dataclass(frozen=True, slots=True)
class ReadSlots:
    """Ask for the bytes of leased slots of this holder, for clients that map no memory."""

    request: str
    lease: int
    group: int
    shard: int
    indices: tuple[int, ...]


@record(70)
@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes of leased slots, in the order asked for; or why there are none."""

    request: str
    refused: Reason | None
    payload: tuple[bytes, ...]


@record(71)
@dataclass(frozen=True, slots=True)
class Misuse:
    """The request makes no sense; one line that says what to change."""

    request: str
    text: str


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the fabric: its address, its life, where it listens."""

    address: str
    incarnation: int
    node: str
    host: str
    unix: str
    tcp: str
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Birth:
    """What a process says when it is up: where it listens, its monotonic clock, and what it computes
    for the model's join vector.
    """

    member: Member
    clock_s: float
    vector: bytes


@record(72)
@dataclass(frozen=True, slots=True)
class Members:
    """Everyone who is up, as the supervisor knows it; later ``number`` replaces earlier."""

    number: int
    members: tuple[Member, ...]
