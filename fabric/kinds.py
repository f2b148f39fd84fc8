"""The words every other module uses: kinds, tiers, statuses, layers, reasons, ids.

Ground file: frozen value types only, no behaviour beyond naming. The reasons are a closed
vocabulary: results, metric labels, logs and ``explain`` use the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

HolderId = NewType("HolderId", str)
"""Name of a holder, stable over its lives; a life is (HolderId, incarnation)."""

Digest = NewType("Digest", bytes)
"""32 bytes: the keyed BLAKE3 digest of a token chain at one cut."""

INDEX_DIGEST_BYTES = 16
"""The directory indexes by this prefix of a digest; holders compare all 32 bytes at grant."""


class ObjectKind(StrEnum):
    """The five kinds of state; each lives, moves and dies by its own rules."""

    COMPRESSED_HISTORY = "compressed_history"
    UNCOMPRESSED_TAIL = "uncompressed_tail"
    SLIDING_WINDOW = "sliding_window"
    INDEXER = "indexer"
    DISK_PREFIX = "disk_prefix"


class Form(StrEnum):
    """How a group's state is cut: per-token data, or a state at one position."""

    BLOCKS = "blocks"
    STATE = "state"


class Tier(StrEnum):
    """Where bytes lie: GPU memory, host memory, local disk, remote store."""

    G1 = "G1"
    G2 = "G2"
    G3 = "G3"
    G4 = "G4"


class Status(StrEnum):
    """What an acquire or probe answers."""

    FULL_HIT = "FULL_HIT"
    PARTIAL_HIT = "PARTIAL_HIT"
    PENDING = "PENDING"
    INVALID = "INVALID"
    MISS = "MISS"


class Layer(StrEnum):
    """Which layer of checks (or which step after them) cut a hit."""

    WHOLE_BLOCK = "whole_block"
    ABI = "abi"
    INTERSECTION = "intersection"
    ALIGNMENT = "alignment"
    LEASE = "lease"
    TRANSPORT = "transport"
    ADMISSION = "admission"


class Reason(StrEnum):
    """Why a hit is shorter than the hashes promise, or why a call is refused."""

    NOT_STORED = "not_stored"
    EVICTED = "evicted"
    BLOCK_INCOMPLETE = "block_incomplete"
    OFF_GRID = "off_grid"
    WINDOW_INCOMPLETE = "window_incomplete"
    SNAPSHOT_ABSENT = "snapshot_absent"
    TAIL_GAP = "tail_gap"
    INDEX_ABSENT = "index_absent"
    INDEX_STALE = "index_stale"
    RESTORE_PENDING = "restore_pending"
    RESTORE_FAILED = "restore_failed"
    DISK_UNAVAILABLE = "disk_unavailable"
    DISK_FULL = "disk_full"
    ABI_MISMATCH = "abi_mismatch"
    MISALIGNED = "misaligned"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    WEIGHTS_MISMATCH = "weights_mismatch"
    VERSION_CHANGED = "version_changed"
    ATTEMPT_SUPERSEDED = "attempt_superseded"
    LEASE_EXPIRED = "lease_expired"
    HOLDER_LOST = "holder_lost"
    TRANSFER_FAILED = "transfer_failed"
    DIRECTORY_UNAVAILABLE = "directory_unavailable"
    ADMISSION_LIMIT = "admission_limit"
    QUOTA = "quota"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    DRAINING = "draining"
    NOT_GRANTING = "not_granting"
    BYPASSED = "bypassed"
    PINNED = "pinned"
    GRAPH_FROZEN = "graph_frozen"
    QUARANTINED = "quarantined"


LAYER_OF: dict[Reason, Layer] = {
    Reason.NOT_STORED: Layer.INTERSECTION,
    Reason.EVICTED: Layer.INTERSECTION,
    Reason.BLOCK_INCOMPLETE: Layer.INTERSECTION,
    Reason.OFF_GRID: Layer.WHOLE_BLOCK,
    Reason.WINDOW_INCOMPLETE: Layer.INTERSECTION,
    Reason.SNAPSHOT_ABSENT: Layer.INTERSECTION,
    Reason.TAIL_GAP: Layer.INTERSECTION,
    Reason.INDEX_ABSENT: Layer.INTERSECTION,
    Reason.INDEX_STALE: Layer.INTERSECTION,
    Reason.RESTORE_PENDING: Layer.TRANSPORT,
    Reason.RESTORE_FAILED: Layer.TRANSPORT,
    Reason.DISK_UNAVAILABLE: Layer.TRANSPORT,
    Reason.DISK_FULL: Layer.TRANSPORT,
    Reason.ABI_MISMATCH: Layer.ABI,
    Reason.MISALIGNED: Layer.ALIGNMENT,
    Reason.CHECKSUM_MISMATCH: Layer.ALIGNMENT,
    Reason.WEIGHTS_MISMATCH: Layer.LEASE,
    Reason.VERSION_CHANGED: Layer.LEASE,
    Reason.ATTEMPT_SUPERSEDED: Layer.LEASE,
    Reason.LEASE_EXPIRED: Layer.LEASE,
    Reason.HOLDER_LOST: Layer.TRANSPORT,
    Reason.TRANSFER_FAILED: Layer.TRANSPORT,
    Reason.DIRECTORY_UNAVAILABLE: Layer.TRANSPORT,
    Reason.ADMISSION_LIMIT: Layer.ADMISSION,
    Reason.QUOTA: Layer.ADMISSION,
    Reason.DEADLINE_EXCEEDED: Layer.ADMISSION,
    Reason.DRAINING: Layer.ADMISSION,
    Reason.NOT_GRANTING: Layer.ADMISSION,
    Reason.BYPASSED: Layer.ADMISSION,
    Reason.PINNED: Layer.ADMISSION,
    Reason.GRAPH_FROZEN: Layer.ADMISSION,
    Reason.QUARANTINED: Layer.ADMISSION,
}
"""The layer a reason belongs to when it cuts an acquire (a lease's own read reports ``lease``)."""

DISK_REASONS = frozenset({Reason.RESTORE_PENDING, Reason.RESTORE_FAILED, Reason.DISK_UNAVAILABLE, Reason.DISK_FULL})
"""Reasons that only a disk prefix can have: the cause's kind is then ``disk_prefix``."""

INVALIDATING_REASONS = frozenset({Reason.ABI_MISMATCH, Reason.MISALIGNED, Reason.CHECKSUM_MISMATCH})
"""Bytes or layout that must not be used: with nothing shorter, the answer is ``INVALID``."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The one check that cut a hit."""

    group: str
    kind: ObjectKind
    layer: Layer
    reason: Reason


def cause_of(group: str, kind: ObjectKind, reason: Reason, *, from_tier: bool = False) -> Cause:
    """Build a cause; a cut that came from a tier is the disk prefix's, whatever the group's kind."""
    if from_tier or reason in DISK_REASONS:
        kind = ObjectKind.DISK_PREFIX
    return Cause(group, kind, LAYER_OF[reason], reason)


class FabricError(Exception):
    """Base of every error raised by kvfabric. Expected outcomes are values, not errors."""


class SpecError(FabricError, ValueError):
    """A model, scenario or configuration is not valid: one line naming the field and the reason."""


class WireError(FabricError, ValueError):
    """Bytes from a peer or a disk are not a record of a known schema."""


class ProtocolError(FabricError, RuntimeError):
    """A bug: an operation that the lifecycle or protocol tables do not allow."""
