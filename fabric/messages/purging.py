"""Taking state out everywhere: what the supervisor tells holders, what readers find by audit."""

from __future__ import annotations

from dataclasses import dataclass

from ..wire import record


@record(80, since=2)
@dataclass(frozen=True, slots=True)
class Purge:
    """Take out what matches everything that is named: a tenant, a namespace, the objects along a chain (``keys``).

    ``keys``: digests by the unit they are cut at, as a prompt has them; empty: of any chain. ``quarantine``:
    keep the record, and never serve it again.
    """

    request: str
    tenant: str | None
    namespace: bytes
    keys: tuple[tuple[int, bytes], ...]
    quarantine: bool = False


@record(81, since=2)
@dataclass(frozen=True, slots=True)
class Purged:
    """What went in this pass, and what matches and is still here (``left``: held by a graph, or on its way)."""

    request: str
    holder: str
    objects: int
    object_bytes: int
    extents: int
    leases: int
    left: int


@record(82, since=2)
@dataclass(frozen=True, slots=True)
class Audited:
    """A reader recomputed what a lease covers and compared: ``outcome`` is a word of ``AuditOutcome``."""

    request: str
    lease: int
    outcome: str
