"""Leases: the record a holder keeps, and what a reader can check without asking anyone.

A lease record is built from a :class:`~kvfabric.fabric.validation.Proof` and nothing else. The
holder keeps its pins for a grace past the deadline (max(1 s, lease / 10)), so that a reader that
believes in its lease is never wrong about the bytes.

    granted --renew--> granted --release--> ended
            --deadline--> expired (readers refused) --grace--> ended (pins gone)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arena import STAMP_FIELDS, Arena, SlotState
from .books import Books
from .kinds import ObjectKind, Reason
from .messages import LeaseGrant, LeasePart
from .series import Histogram
from .validation import Proof
from .wakes import Wake

LEASE_S_MAX = 3600.0

_SEALED = int(SlotState.SEALED)


def grace_s(lease_s: float) -> float:
    """Seconds a holder keeps pins past the deadline its reader believes in."""
    return max(1.0, lease_s / 10)


@dataclass(slots=True)
class LeaseRecord:
    """One holder's share of a granted lease.

    ``leader``: who decides over it; ``mates``, at the leader: (holder, lease) of the other shares.
    """

    lease: int
    fence: int
    proof: Proof
    client: str
    deadline_s: float
    lease_s: float
    weights: bytes
    tenant: str
    graph: bool = False
    graph_number: int = 0
    leader: str = ""
    granted_s: float = 0.0
    mates: tuple[tuple[str, int], ...] = ()
    watch: Wake | None = None
    """Looks whether its grace is over; whoever ends the lease before cancels it."""


class LeaseBook:
    """All live leases of one holder's life. Fences only grow within an incarnation."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.live: dict[int, LeaseRecord] = {}
        self.fence = 0
        self.life = Histogram()
        """How long leases that ended had lived."""
        self.life_by_kind: defaultdict[ObjectKind, Histogram] = defaultdict(Histogram)
        """The same of the leases that covered state of each kind."""

    def grant(
        self,
        proof: Proof,
        *,
        leader: str,
        client: str,
        now: float,
        lease_s: float,
        weights: bytes,
        tenant: str,
        graph: bool = False,
        graph_number: int = 0,
    ) -> LeaseRecord:
        """The only way a lease comes to be. Takes its own pins on the proof's objects."""
        self.fence += 1
        self._books.pin_slots(proof.claim)
        if graph:
            self._books.freeze(proof.claim.slots, 1)
        record = LeaseRecord(
            lease=self.fence,
            fence=self.fence,
            proof=proof,
            client=client,
            deadline_s=now + lease_s,
            lease_s=lease_s,
            weights=weights,
            tenant=tenant,
            graph=graph,
            graph_number=graph_number,
            leader=leader,
            granted_s=now,
        )
        self.live[record.lease] = record
        self._books.admission.leased(tenant, 1)
        return record

    def renew(
        self, lease: int, now: float, lease_s: float, weights: bytes, since_s: float | None = None
    ) -> Reason | float:
        """The new deadline, ``lease_s`` from now (or from ``since_s``), or why there is none.

        Never an earlier one: a renewal that arrives late must not end what a later one promised.
        """
        record = self.live.get(lease)
        if record is None or now >= record.deadline_s:
            return Reason.LEASE_EXPIRED
        if record.weights != weights:
            return Reason.WEIGHTS_MISMATCH
        record.lease_s = max(record.lease_s, lease_s)
        record.deadline_s = max(record.deadline_s, (now if since_s is None else since_s) + lease_s)
        return record.deadline_s

    def end(self, lease: int, now: float) -> LeaseRecord | None:
        """Give the pins back; None if the lease ended before."""
        record = self.live.pop(lease, None)
        if record is not None:
            age_s, groups = now - record.granted_s, self._books.model.groups
            self.life.add(age_s)
            for kind in {groups[run.group].kind for run in record.proof.runs}:
                self.life_by_kind[kind].add(age_s)
            self._books.admission.leased(record.tenant, -1)
            if record.watch is not None:
                record.watch.cancel()
            claim = record.proof.claim
            if record.graph:
                self._books.freeze(claim.slots, -1)
            self._books.unpin_slots(claim)
        return record


def part_of(record: LeaseRecord, holder: str, incarnation: int) -> LeasePart:
    """What a reader needs to find and check its slots."""
    return LeasePart(holder, incarnation, record.fence, record.proof.parts)


def read_refusal(
    grant: LeaseGrant,
    deadline_s: float,
    parts: Iterable[tuple[LeasePart, Arena | None]],
    now: float,
    unchanged: Callable[[LeasePart, Arena], bool] | None = None,
) -> Reason | None:
    """Why a reader may not trust its lease now; None if it may. No call, only shared memory.

    ``deadline_s`` is the grant's or that of the last renewal. ``parts``: each part with its holder's
    arena, None where the holder is known to be dead. In order: lease_expired, holder_lost,
    weights_mismatch, version_changed; who verifies always digests the bytes afterwards.
    ``unchanged`` does what :func:`slots_unchanged` does, for who checks one lease many times.
    """
    if now >= deadline_s:
        return Reason.LEASE_EXPIRED
    checked = list(parts)
    now_ns = int(now * 1e9)
    retired = False
    for part, arena in checked:
        if arena is None:
            return Reason.HOLDER_LOST
        incarnation, grants_until_ns, weights = arena.life()
        if incarnation != part.incarnation or now_ns > grants_until_ns:
            return Reason.HOLDER_LOST
        retired = retired or weights != grant.weights
    if retired:
        return Reason.WEIGHTS_MISMATCH
    for part, arena in checked:
        if arena is not None and not (unchanged or slots_unchanged)(part, arena):
            return Reason.VERSION_CHANGED
    return None


def slots_unchanged(part: LeasePart, arena: Arena) -> bool:
    """Whether every leased slot still bears the leased version, sealed."""
    return LeasedSlots(part).unchanged(arena)


class LeasedSlots:
    """A part's slots and what their headers must say, laid out once for many checks."""

    __slots__ = ("_slots", "_stamps")

    def __init__(self, part: LeasePart) -> None:
        self._slots = np.frombuffer(b"".join(run.slots for run in part.slots), dtype="<u4").astype(np.intp)
        self._stamps = stamps_of(b"".join(run.versions for run in part.slots))

    def unchanged(self, arena: Arena) -> bool:
        """Whether every slot still bears its version, sealed. About 1 us for 320 slots."""
        return _stand(self._slots, self._stamps, arena)


def slots_stand(slots: npt.NDArray[np.integer[Any]], versions: bytes, arena: Arena) -> bool:
    """Whether these slots bear these versions (uint64 each), sealed."""
    return _stand(slots, stamps_of(versions), arena)


def stamps_of(versions: bytes) -> bytes:
    """What the headers of sealed slots of these versions (uint64 each) begin with."""
    stamps = np.empty(len(versions) // 8, STAMP_FIELDS)
    stamps["version"] = np.frombuffer(versions, dtype="<u8")
    stamps["state"] = _SEALED
    return stamps.tobytes()


def _stand(slots: npt.NDArray[np.integer[Any]], stamps: bytes, arena: Arena) -> bool:
    return bool(arena.stamps[slots].tobytes() == stamps)
