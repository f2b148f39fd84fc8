"""How large an extent is: its header's room, its payload's pages.

One rule for the core, which plans what fits the disk, and the driver, which writes it. Packed
payload is never longer than plain, so the plain size is a bound for both.
"""

from __future__ import annotations

from collections.abc import Sequence

from .arena import PAGE_BYTES
from .effects import ExtentEntry

PROLOGUE_BYTES = 64
ROW_BYTES = 136
"""Room in the header for one block: its columns and their share of the framing."""
BASE_BYTES = 512
PASSPORT_BYTES_MAX = 2048
"""Room in the header for one ABI passport as data; a longer one is represented by its fingerprint."""


def pages(length: int) -> int:
    """Bytes of the whole pages that hold ``length`` bytes."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def header_bytes(entries: Sequence[ExtentEntry]) -> int:
    """Bytes of an extent before its payload: whole pages, fixed before anything is written."""
    owners = {(e.namespace, e.weights, e.tenant) for e in entries}
    abis = {(e.fingerprint, e.alignment_bytes) for e in entries}
    names = sum(len(tenant.encode()) + 96 for _, _, tenant in owners)
    rows = ROW_BYTES * len(entries)
    return pages(PROLOGUE_BYTES + BASE_BYTES + rows + names + (PASSPORT_BYTES_MAX + 64) * len(abis))


def extent_bytes(entries: Sequence[ExtentEntry]) -> int:
    """Bytes of the file an extent of these entries takes at most; exact where nothing is packed."""
    return header_bytes(entries) + sum(pages(e.length) for e in entries)
