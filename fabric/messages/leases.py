"""Sessions to holders: leases, graphs, and the answer to every acquire."""

from __future__ import annotations

from dataclasses import dataclass

from ..expected import Expected, Work
from ..kinds import Cause, Reason, Status
from ..passport import Abi
from ..wire import Bits, added, record
from .objects import Column, Mark, Prompt, SlotRun


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
    replay_tokens: int | None = added(2, None)
    """A replay of so many tokens will do, where exact ones would take more; None: exact ones only."""
    versions: bool = added(2, True)
    """With ``explain``: columns bear the versions expected."""


Told = tuple[str, int, int, int, bytes]
"""What a directory shard told of consecutive segments: its name, its epoch, and an edition's fields."""


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
    replay_from: int | None = added(2, None)
    """From where windows and tails must be computed again before anything resumes at ``tokens``."""
    approximate: bool = added(2, default=False)
    """What that leaves is near to what a prefill would have left, and is not it."""


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
    plan: tuple[Expected, ...] = added(2, ())
    """To an ``explain``: the ways to resume that were weighed, the chosen first."""
    approximate: bool = added(2, default=False)
    told: tuple[Told, ...] = added(2, ())


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
    """End a lease.

    ``reused_tokens``: what the reader really used after a clean check; ``refused``: why its last check failed.
    """

    request: str
    lease: int
    reused_tokens: int | None
    refused: Reason | None = added(2, None)  # noqa: RUF009 - a field, made anew for each record


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


@record(37, since=2)
@dataclass(frozen=True, slots=True)
class Retain:
    """Let what is here of a prompt be worth more for a while: it makes room later, and is never pinned by it.

    ``weight``: 1 moves it behind everything else at first; ``ttl_s``: over this time that fades to nothing.
    """

    request: str
    prompt: Prompt
    ttl_s: float
    weight: float


@record(83, since=2)
@dataclass(frozen=True, slots=True)
class Generated:
    """A prompt's output became so long: the holder's eviction policy may learn from it."""

    request: str
    prompt: Prompt
    output_tokens: int


@record(35, since=2)
@dataclass(frozen=True, slots=True)
class Computed:
    """How long an engine took to compute so many tokens (``work``: prefill or replay): plans learn from it."""

    request: str
    work: Work
    tokens: int
    seconds: float
