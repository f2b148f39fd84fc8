"""The supervisor and the processes it runs: who is up, who may grant, what is in force."""

from __future__ import annotations

from dataclasses import dataclass

from ..wire import added, record


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
    supervisor: int = added(2, 0)
    """The incarnation of the supervisor that says so: an earlier one's word counts for nothing."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a holder has to do: what it counted over its life, and what is so now.

    ``clients``: sessions connected over its Unix socket; ``refused``: acquires that found no room;
    ``evicted_tokens``: lost to eviction; ``waiting``: restores in line; ``used_bytes``: of state in memory.
    """

    clients: int
    refused: int
    evicted_tokens: int
    waiting: int
    used_bytes: int


@record(53)
@dataclass(frozen=True, slots=True)
class GrantSeen:
    """The reply to GrantUntil: the process's monotonic clock now, and the weights, mode and shard map it knows of.

    ``leaves_in_s``: its node goes in so many seconds, said by ``notice``.
    """

    incarnation: int
    clock_s: float
    weights_number: int = 0
    mode_number: int = 0
    map_epoch: int = 0
    leaves_in_s: float | None = added(2, None)
    notice: str = added(2, "")
    load: Load | None = added(2, None)  # noqa: RUF009 - None, and since when it is there


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
    """Draining: stop granting. Bypassed: answer recompute to every acquire. ``number`` only grows.

    ``suspect``: the group that causes name while bypassed; "": the first.
    """

    draining: bool
    bypassed: bool
    number: int = 0
    suspect: str = added(2, "")


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the fabric: its address, its life, where it listens, the newest schema it speaks."""

    address: str
    incarnation: int
    node: str
    host: str
    unix: str
    tcp: str
    shards: tuple[int, ...]
    schema: int = added(2, 1)


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
