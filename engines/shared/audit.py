"""Audits: leased blocks are withheld from an engine, which computes them anew, and the two are compared.

An engine that loads blocks never sees what it would have computed. So of a lease that is due (the fabric's
``audit_fraction``) the blocks are reported as absent; what the engine then stores under the same names is judged:

    equal     the same bytes
    close     floating-point numbers whose difference is small against them (another chunk schedule rounds otherwise)
    mismatch  anything else: the fabric bars these blocks until they are stored anew

The audit ends with its last block, when too little came in ``AUDIT_S``, or with the session; what was compared counts,
and where nothing was, the audit counts as ``late``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...actors.lease import Lease
from ...actors.session import Session
from ...fabric.identity import PromptKeys
from ...fabric.kinds import FabricError
from ...fabric.tally import AuditOutcome

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Rows = Sequence[Bytes] | Bytes

AUDIT_S = 60.0
AUDITS_MAX = 4
AUDIT_BYTES_MAX = 64 << 20
CLOSE = 0.05
"""Largest norm of the difference, in parts of the norm of what is compared, that counts as close.

Rounding of bfloat16 is 0.004 a step; a block of other tokens or weights differs by more than 1.
"""
_WORST_FIRST = (AuditOutcome.MISMATCH, AuditOutcome.CLOSE, AuditOutcome.EQUAL)


def numbers_of(dtype: str) -> Callable[[Bytes], npt.NDArray[np.float32]] | None:
    """How to read bytes as numbers, by the name of their type; None for one that cannot be judged."""
    if dtype == "bfloat16":
        return lambda raw: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in {"float16", "float32"}:
        return lambda raw: raw.view(dtype).astype(np.float32)
    return None


def judge(leased: Bytes, computed: Bytes, dtype: str) -> AuditOutcome:
    """What two blocks of the same name are to each other. Numbers that are none on both sides are equal."""
    if np.array_equal(leased, computed):
        return AuditOutcome.EQUAL
    read = numbers_of(dtype)
    if read is None or leased.nbytes != computed.nbytes:
        return AuditOutcome.MISMATCH
    # In double precision: a norm that overflows is infinite on both sides, and anything would be close to anything.
    one, other = (np.nan_to_num(read(block)).astype(np.float64) for block in (leased, computed))
    near = float(np.linalg.norm(one - other)) <= CLOSE * float(np.linalg.norm(one))
    return AuditOutcome.CLOSE if near else AuditOutcome.MISMATCH


@dataclass(slots=True)
class Audit:
    """One lease whose blocks are computed anew: copies of what was leased, by name."""

    keys: PromptKeys
    lease: Lease
    held: dict[bytes, Bytes]
    found: set[AuditOutcome] = field(default_factory=set)
    until_s: float = 0.0

    @property
    def outcome(self) -> AuditOutcome:
        """The worst of what was compared; late where nothing was."""
        return next((outcome for outcome in _WORST_FIRST if outcome in self.found), AuditOutcome.LATE)


class Audits:
    """The audits under way of one session. Thread-safe; at most a few, of bounded bytes.

    ``dtype``: the name of the type of all blocks' numbers, or says it of a block's name; what cannot be read as numbers is
    not audited.
    """

    def __init__(self, session: Session, dtype: str | Callable[[bytes], str]) -> None:
        self._session = session
        self._dtype_of: Callable[[bytes], str] = (lambda _: dtype) if isinstance(dtype, str) else dtype
        self._lock = threading.Lock()
        self._open: list[Audit] = []

    def open(self, audit: Audit) -> bool:
        """Begin one; False where there is no room for it, or its numbers cannot be judged."""
        self._end_late()
        size = sum(array.nbytes for array in audit.held.values())
        with self._lock:
            held = sum(array.nbytes for other in self._open for array in other.held.values())
            full = len(self._open) >= AUDITS_MAX or held + size > AUDIT_BYTES_MAX
            if full or not all(numbers_of(self._dtype_of(name)) for name in audit.held):
                return False
            if audit.lease.renew(AUDIT_S) is not None:
                return False
            audit.until_s = time.monotonic() + AUDIT_S
            self._open.append(audit)
            return True

    def recomputed(self, names: Sequence[bytes], rows: Rows) -> None:
        """Compare what an engine computed with what was leased under the same names."""
        if not self._open:
            return
        ended = []
        with self._lock:
            for audit in list(self._open):
                for name, row in zip(names, rows, strict=True):
                    leased = audit.held.pop(name, None)
                    if leased is not None:
                        audit.found.add(judge(leased, row, self._dtype_of(name)))
                if not audit.held:
                    self._open.remove(audit)
                    ended.append(audit)
        for audit in ended:
            self._end(audit)
        self._end_late()

    def _end_late(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [audit for audit in self._open if now >= audit.until_s]
            self._open = [audit for audit in self._open if now < audit.until_s]
        for audit in late:
            self._end(audit)

    def _end(self, audit: Audit) -> None:
        outcome = audit.outcome
        try:
            self._session.audited(audit.keys, audit.lease, outcome)
        except FabricError as error:
            logger.warning("an audit that found %s could not be told: %s", outcome, error)
        finally:
            audit.lease.release(reused_tokens=0)

    def close(self) -> None:
        """End all of them as they stand."""
        with self._lock:
            ended, self._open = self._open, []
        for audit in ended:
            self._end(audit)
