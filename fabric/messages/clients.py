"""What the processes around the cores say: greetings, arenas, status, bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ..arena import PlainPlace, PlainPool
from ..kinds import Reason
from ..wire import added, record


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
    """Whose arena it is and how its pools lie; ``places``: in which memory, digested how, where not as by default."""

    request: str
    holder: str
    incarnation: int
    weights: bytes
    pools: tuple[PlainPool, ...]
    places: tuple[PlainPlace, ...] = added(2, ())
    slab_bytes: int = added(2, 0)


@record(75, since=2)
@dataclass(frozen=True, slots=True)
class GpuRequest:
    """Ask a holder for its arena's part on a GPU, to map it; on its Unix socket only. Replied with GpuReply."""

    request: str


@record(76, since=2)
@dataclass(frozen=True, slots=True)
class GpuReply:
    """What the GPU memory is opened by, once (``transport/gpu.py``)."""

    request: str
    export: bytes


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
    """Ask a process for its status, or for what ``of`` names (``leases``, ``health``)."""

    request: str
    of: str = added(2, "")


@record(67)
@dataclass(frozen=True, slots=True)
class StatusReply:
    """The status as one JSON object."""

    request: str
    status: str


@record(73)
@dataclass(frozen=True, slots=True)
class SeriesRequest:
    """Ask a holder for what it did over time."""

    request: str


@record(74)
@dataclass(frozen=True, slots=True)
class SeriesReply:
    """Samples (:mod:`~kvfabric.fabric.series`) as one JSON list, the last of this moment."""

    request: str
    samples: str


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
