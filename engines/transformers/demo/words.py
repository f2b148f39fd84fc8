"""Causes in words: one sentence a reason of the closed vocabulary."""

from __future__ import annotations

from ....fabric.kinds import Cause, Form, Reason, Status
from ....fabric.model import ModelSpec

_WORDS: dict[Reason, str] = {
    Reason.NOT_STORED: "a block of it was never stored",
    Reason.EVICTED: "a block of it was evicted",
    Reason.BLOCK_INCOMPLETE: "some shards of a block are missing",
    Reason.OFF_GRID: "what matches ends between two positions that every group can resume at",
    Reason.WINDOW_INCOMPLETE: "rows of the window are missing",
    Reason.SNAPSHOT_ABSENT: "no state of exactly this position",
    Reason.TAIL_GAP: "the raw tokens behind the last compressed entry are missing or not joined to it",
    Reason.INDEX_ABSENT: "no index keys for blocks that the history has",
    Reason.INDEX_STALE: "index keys bear another revision than the blocks they index",
    Reason.RESTORE_PENDING: "it lies on disk and is not restored yet",
    Reason.RESTORE_FAILED: "it could not be restored from disk",
    Reason.DISK_UNAVAILABLE: "there is no disk tier",
    Reason.DISK_FULL: "the disk is full",
    Reason.ABI_MISMATCH: "written in another layout than the reader's",
    Reason.MISALIGNED: "written under a weaker alignment than the reader needs",
    Reason.CHECKSUM_MISMATCH: "its bytes are not those that were stored",
    Reason.WEIGHTS_MISMATCH: "it was made by other weights",
    Reason.VERSION_CHANGED: "its slot changed while it was read",
    Reason.ATTEMPT_SUPERSEDED: "a later write took its place",
    Reason.LEASE_EXPIRED: "the lease ran out",
    Reason.HOLDER_LOST: "the process that holds it cannot be reached",
    Reason.TRANSFER_FAILED: "its transfer failed",
    Reason.DIRECTORY_UNAVAILABLE: "the directory cannot be reached",
    Reason.ADMISSION_LIMIT: "there is no room for it",
    Reason.QUOTA: "its tenant's quota is used up",
    Reason.DEADLINE_EXCEEDED: "it would come too late",
    Reason.DRAINING: "its holder is draining",
    Reason.NOT_GRANTING: "its holder may not grant now",
    Reason.BYPASSED: "the fabric is bypassed",
    Reason.PINNED: "it is pinned",
    Reason.GRAPH_FROZEN: "a graph lease holds its slots",
    Reason.QUARANTINED: "its slots are quarantined",
}

_SNAPSHOT_ABSENT: dict[str, str] = {
    "uncompressed_tail": "no tail of exactly this position",
    "compressed_history": "no recurrent state of exactly this position",
    "sliding_window": "no window of exactly this position",
}


def in_words(model: ModelSpec, status: Status, cause: Cause | None) -> str:
    """Why a hit is not longer, for a person: group, reason, sentence. Empty for a full hit."""
    if cause is None:
        return "nothing of this prompt is stored under these weights" if status is Status.MISS else ""
    words = _WORDS[cause.reason]
    if cause.reason is Reason.SNAPSHOT_ABSENT and model.group(cause.group).form is Form.STATE:
        words = _SNAPSHOT_ABSENT.get(cause.kind, words)
    return f"{cause.group}: {cause.reason}, {words}"
