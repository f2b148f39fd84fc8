"""What a driver feeds a protocol core, and what the core asks of its driver.

A core is ``handle(event, now) -> effects``: no clock, no sockets, no threads. Actors, the scenario
runner and the simulator are drivers; none of them decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .kinds import Reason

# --- events ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Received:
    """A record arrived from an address ("client:...", a holder, "directory:0", "supervisor").

    Not frozen, and so is :class:`Send`: one is made of every record, in a third of the time.
    """

    sender: str
    message: Any


@dataclass(frozen=True, slots=True)
class Undeliverable:
    """The driver could not deliver what the core sent: the peer cannot be reached now."""

    to: str
    message: Any


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """A client's connection ended: its process exited or let go, so it writes no more."""

    peer: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; due when the core's ``next_deadline_s`` is reached."""


class TransferFault(StrEnum):
    """Why one pair of a transfer brought no bytes."""

    FAILED = "failed"
    TIMED_OUT = "timed_out"
    PEER_LOST = "peer_lost"


@dataclass(frozen=True, slots=True)
class Moved:
    """One destination slot of a transfer: the checksum of the bytes that landed, or the fault.

    ``quiet`` False: foreign bytes may still arrive there; a :class:`TransferQuiet` will follow.
    """

    slot: int
    checksum: bytes | None
    fault: TransferFault | None = None
    quiet: bool = True


@dataclass(frozen=True, slots=True)
class TransferDone:
    """A transfer ended, pair by pair."""

    token: int
    moved: tuple[Moved, ...]


@dataclass(frozen=True, slots=True)
class TransferQuiet:
    """Proven: no byte of this transfer can still arrive."""

    token: int


@dataclass(frozen=True, slots=True)
class Digested:
    """Checksums (16 bytes each) of the slots asked for, in order."""

    token: int
    checksums: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class DiskWritten:
    """An extent stands on disk, or the reason it does not. ``file_bytes``: what it takes there, 0 if not told."""

    token: int
    refused: Reason | None
    file_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Restored:
    """One slot read from an extent: the checksum of what was read, or the reason nothing was."""

    slot: int
    checksum: bytes | None
    refused: Reason | None = None


@dataclass(frozen=True, slots=True)
class DiskRead:
    """Reads ended, slot by slot."""

    token: int
    restored: tuple[Restored, ...]


@dataclass(frozen=True, slots=True)
class DiskState:
    """The tier as a whole became unusable (with the reason) or usable again (None).

    ``writes_refused``: what is there can be read, but nothing written.
    """

    refused: Reason | None
    writes_refused: Reason | None = None


@dataclass(frozen=True, slots=True)
class DiskFound:
    """One extent that the driver verified: (extent, entry number, entry) of all it holds.

    Of an earlier life on the local disk; or, ``remote``, in the store that all nodes share, whoever wrote it.
    """

    entries: tuple[tuple[int, int, ExtentEntry], ...]
    file_bytes: int = 0
    remote: bool = False


@dataclass(frozen=True, slots=True)
class DiskLost:
    """Extents that are on the disk no more; ``remote``: in the store no more."""

    extents: tuple[int, ...]
    remote: bool = False


@dataclass(frozen=True, slots=True)
class ExtentUploaded:
    """An extent of this disk is in the store as well, or the reason it is not."""

    extent: int
    refused: Reason | None = None


@dataclass(frozen=True, slots=True)
class RemoteState:
    """The store as a whole became unusable (with the reason) or usable again (None).

    What it holds of this disk's extents is told before that.
    """

    refused: Reason | None


@dataclass(frozen=True, slots=True)
class ExtentScrubbed:
    """What lies on the disk, entry by entry as asked: its checksum, None where it could not be read.

    Empty where nothing could be read at all.
    """

    token: int
    checksums: tuple[bytes | None, ...]


# --- effects -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Send:
    """Deliver a record, once, best effort; say :class:`Undeliverable` if it is known to be lost."""

    to: str
    message: Any


@dataclass(frozen=True, slots=True)
class Pair:
    """One slot to copy: the source's slot number, the local one, the bytes."""

    source_slot: int
    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """READ from a peer's arena into local slots and digest what landed; answer TransferDone."""

    token: int
    source: str
    incarnation: int
    pairs: tuple[Pair, ...]
    deadline_s: float
    wanted_s: float | None = None
    """By when a request wants the bytes; None: nobody waits for them."""


@dataclass(frozen=True, slots=True)
class DigestSlots:
    """Compute xxh3-128 over the sealed length of each slot; answer Digested."""

    token: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExtentEntry:
    """One object of an extent: everything needed to find and prove it after a restart."""

    group: int
    shard: int
    digest: bytes
    position: int
    revision: int
    length: int
    checksum: bytes
    fingerprint: bytes
    alignment_bytes: int
    namespace: bytes
    weights: bytes
    tenant: str
    anchor: bytes = b""
    parent: bytes = b""
    """Its place in its chain: 16 bytes each; b"" where there is none."""


@dataclass(frozen=True, slots=True)
class WriteExtent:
    """Write these slots' bytes as one extent: whole or not at all; answer DiskWritten."""

    token: int
    extent: int
    entries: tuple[ExtentEntry, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadExtent:
    """Read entries (extent, entry number) into slots and digest them; answer DiskRead."""

    token: int
    reads: tuple[tuple[int, int, int], ...]
    """(extent, entry, slot)"""
    remote: bool = False
    """From the store, not from the local disk."""
    wanted_s: float | None = None
    """By when a request wants the bytes; None: nobody waits for them."""


@dataclass(frozen=True, slots=True)
class DeleteExtent:
    """Remove an extent nobody refers to; from the store as well, where this holder wrote it."""

    extent: int


@dataclass(frozen=True, slots=True)
class UploadExtent:
    """Copy an extent's file to the store, under its own name, if none of that name is there; answer ExtentUploaded."""

    extent: int


@dataclass(frozen=True, slots=True)
class DropLocal:
    """Remove an extent's file from the local disk; the copy in the store stays."""

    extent: int


@dataclass(frozen=True, slots=True)
class ScrubExtent:
    """Read entries of an extent on the local disk again and digest them, after all else; answer ExtentScrubbed."""

    token: int
    extent: int
    entries: tuple[int, ...]
    nbytes: int


DiskEvent = DiskWritten | DiskRead | DiskState | DiskFound | DiskLost | ExtentUploaded | RemoteState | ExtentScrubbed
"""What the driver of the disk tells."""

Event = Received | Undeliverable | PeerClosed | Tick | TransferDone | TransferQuiet | Digested | DiskEvent
Effect = (
    Send
    | StartTransfer
    | DigestSlots
    | WriteExtent
    | ReadExtent
    | DeleteExtent
    | UploadExtent
    | DropLocal
    | ScrubExtent
)
