"""The records with which a rehearsal holds the clock of a running fabric and breaks it on purpose.

Processes take them only of a fabric launched with ``testing: true``; any other refuses each with a
Misuse. They come from clients, over the control socket or the actor handle, and from the supervisor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .wire import record


@record(900)
@dataclass(frozen=True, slots=True)
class RestRequest:
    """Ask whether a process has work in flight, and what it waits for."""

    request: str


@record(901)
@dataclass(frozen=True, slots=True)
class Rest:
    """A process at one moment. ``steps``: records and events its core has taken, ever.

    ``busy``: messages not yet taken by their receivers, copies, digests, disk work. ``waiting``: the
    clients' requests that its core has not answered. ``due_s``: when its core wants to be woken.
    ``told``: by a holder, its last event to each directory shard (address, seq; -1 where some wait to be sent);
    ``seen``: of a directory shard, the last event it applied of each holder (address, incarnation, seq).
    """

    request: str
    incarnation: int
    steps: int
    busy: bool
    waiting: tuple[str, ...]
    due_s: float | None
    told: tuple[tuple[str, int], ...]
    seen: tuple[tuple[str, int, int], ...]


@record(902)
@dataclass(frozen=True, slots=True)
class AdvanceClock:
    """Move the process's clock forward; nothing that falls due runs yet."""

    request: str
    to_s: float


@record(903)
@dataclass(frozen=True, slots=True)
class RunDue:
    """Wake the core for what is due on its clock."""

    request: str


@record(904)
@dataclass(frozen=True, slots=True)
class InjectFault:
    """The next ``times`` operations of a holder meet a fault, by its name in the scenario format; 0 clears it.

    ``load``: (group, index) of the objects that ``load_fail`` means, of whatever prompt.
    """

    request: str
    fault: str
    times: int
    load: tuple[int, int] | None


@record(905)
@dataclass(frozen=True, slots=True)
class Corrupt:
    """Damage every copy of an object in a holder's memory, behind its books' back. ``how``: flip, truncate or torn."""

    request: str
    group: int
    digest: bytes
    how: str


@record(906)
@dataclass(frozen=True, slots=True)
class Partition:
    """The addresses that a process cannot reach, and hears nothing from, until told otherwise."""

    request: str
    unreachable: tuple[str, ...]


@record(907)
@dataclass(frozen=True, slots=True)
class TellAll:
    """Have a holder tell its directory everything, as one whose events were lost is asked to."""

    request: str


DOORS = (RestRequest, AdvanceClock, RunDue, InjectFault, Corrupt, Partition, TellAll)


def is_door(record: Any) -> bool:
    """Whether a record is one that only a fabric under test takes."""
    return isinstance(record, DOORS)
