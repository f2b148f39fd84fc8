"""What a holder and its disk child say to each other: wire records in frames on a socket pair."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ...fabric.arena import PlainPlace, PlainPool
from ...fabric.effects import ExtentEntry
from ...fabric.kinds import Reason
from ...fabric.passport import AbiPassport
from ...fabric.wire import record


class Health(StrEnum):
    """The state of the tier as a whole."""

    STARTING = "starting"
    OK = "ok"
    FULL = "full"
    READ_ONLY = "read_only"
    SLOW = "slow"
    LYING = "lying"
    VANISHED = "vanished"
    UNAVAILABLE = "unavailable"


# --- to the child ------------------------------------------------------------------------------


@record(206)
@dataclass(frozen=True, slots=True)
class RemoteSetup:
    """The store that all nodes share. ``options``: as obstore names them; credentials come from the environment."""

    url: str
    options: tuple[tuple[str, str], ...]
    allow_http: bool
    bytes_max: int
    timeout_s: float
    check_s: float


@record(200)
@dataclass(frozen=True, slots=True)
class Setup:
    """The first record: where the extents lie, whose they are, and what bounds them."""

    root: str
    place: str
    owner: str
    bytes_max: int
    free_floor_bytes: int
    codec: int
    bytes_per_s: float | None
    pools: tuple[PlainPool, ...]
    places: tuple[PlainPlace, ...]
    passports: tuple[AbiPassport, ...]
    remote: RemoteSetup | None = None
    slab_bytes: int = 0


@record(201)
@dataclass(frozen=True, slots=True)
class Write:
    """Write slots as one extent; answered by Wrote."""

    token: int
    uid: bytes
    entries: tuple[ExtentEntry, ...]
    slots: tuple[int, ...]


@record(202)
@dataclass(frozen=True, slots=True)
class Read:
    """Read blocks (uid, number, slot) into slots; answered by ReadDone."""

    token: int
    blocks: tuple[tuple[bytes, int, int], ...]
    remote: bool = False
    """From the store."""


@record(203)
@dataclass(frozen=True, slots=True)
class Delete:
    """Remove an extent from the disk. Done before any record that follows is looked at.

    ``remote``: from the store as well, whenever it lets it.
    """

    uid: bytes
    remote: bool = False


@record(207)
@dataclass(frozen=True, slots=True)
class Upload:
    """Copy an extent to the store; answered by Uploaded."""

    uid: bytes


@record(208)
@dataclass(frozen=True, slots=True)
class Scrub:
    """Read blocks of an extent of this disk again, into no slot; answered by Scrubbed."""

    token: int
    uid: bytes
    numbers: tuple[int, ...]


@record(204)
@dataclass(frozen=True, slots=True)
class Cancel:
    """Call a job off: it is answered at once if it waits, between two reads or writes if it runs."""

    token: int


@record(205)
@dataclass(frozen=True, slots=True)
class Inject:
    """Let the next ``times`` operations meet a fault (:class:`~.faults.DiskFault`)."""

    fault: str
    times: int


# --- from the child ----------------------------------------------------------------------------


@record(210)
@dataclass(frozen=True, slots=True)
class Wrote:
    """An extent stands, or why there is none."""

    token: int
    refused: Reason | None
    detail: str
    file_bytes: int


@record(211)
@dataclass(frozen=True, slots=True)
class ReadDone:
    """Block by block: slot, checksum of what lies there, or the reason nothing does."""

    token: int
    blocks: tuple[tuple[int, bytes | None, Reason | None], ...]
    detail: str


@record(212)
@dataclass(frozen=True, slots=True)
class Extent:
    """An extent that was found when the folder was opened, or in the store."""

    uid: bytes
    entries: tuple[ExtentEntry, ...]
    file_bytes: int
    remote: bool = False


@record(213)
@dataclass(frozen=True, slots=True)
class Opened:
    """The folder is open, and these are all extents in it. ``removed``: what did not verify, in words."""

    uids: tuple[bytes, ...]
    removed: tuple[str, ...]
    adopted: int
    temporary: int


@record(214)
@dataclass(frozen=True, slots=True)
class Gone:
    """Extents that went behind the tier's back, from the disk or from the store."""

    uids: tuple[bytes, ...]
    remote: bool = False


@record(217)
@dataclass(frozen=True, slots=True)
class Uploaded:
    """An extent of this disk is in the store, or why it is not."""

    uid: bytes
    refused: Reason | None
    detail: str


@record(218)
@dataclass(frozen=True, slots=True)
class Listed:
    """What the first look at the store in this child's life found: nothing else of earlier lives is there."""

    uids: tuple[bytes, ...]


@record(219)
@dataclass(frozen=True, slots=True)
class RemoteCondition:
    """How the store is. ``used_bytes``: of all extents in it, whoever wrote them."""

    health: Health
    refused: Reason | None
    detail: str
    used_bytes: int
    extents: int
    wrong_blocks: int


@record(215)
@dataclass(frozen=True, slots=True)
class Condition:
    """How the tier is. ``refused``: nothing works; ``writes_refused``: only writing does not."""

    health: Health
    refused: Reason | None
    writes_refused: Reason | None
    detail: str
    used_bytes: int
    free_bytes: int
    extents: int
    wrong_blocks: int


@record(220)
@dataclass(frozen=True, slots=True)
class Scrubbed:
    """The checksums of what lies there, None for what could not be read; none at all where the disk cannot be read."""

    token: int
    checksums: tuple[bytes | None, ...]


@record(216)
@dataclass(frozen=True, slots=True)
class Settled:
    """Where faults are injected: a job is over with all that it set off (token 0: an Inject is in force).

    ``left``: (fault, operations that will still meet it).
    """

    token: int
    left: tuple[tuple[str, int], ...]
