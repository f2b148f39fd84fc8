"""What one holder's life counts with labels: integers on the way, read by a timer (:mod:`metrics`).

Label sets are bounded: kinds, reasons, ways and outcomes are closed vocabularies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from enum import StrEnum

from .kinds import LAYER_OF, Layer, ObjectKind, Reason, Status
from .messages import Answer
from .series import Histogram
from .validation import Proof

VALIDATION = frozenset({Layer.WHOLE_BLOCK, Layer.ABI, Layer.INTERSECTION, Layer.ALIGNMENT})
_FULL_HIT = Status.FULL_HIT
TAIL_BOUNDS_TOKENS: tuple[float, ...] = tuple(float(1 << i) for i in range(15))
"""Upper ends of the buckets of a tail's length, in tokens (1, doubling, to 16,384)."""


class Way(StrEnum):
    """How state comes back."""

    FETCH = "fetch"
    RESTORE = "restore"
    REPLAY = "replay"


class Outcome(StrEnum):
    """What became of one object's recovery."""

    ATTEMPTED = "attempted"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Unreused(StrEnum):
    """Why granted tokens were not reused, as far as the holder is told.

    ``unread``: released without a report of a clean check; ``refused``: the reader's last check refused;
    ``expired``: never released; ``parked``: preempted; ``lost``: another rank's holder died.
    """

    UNREAD = "unread"
    REFUSED = "refused"
    EXPIRED = "expired"
    PARKED = "parked"
    LOST = "lost"


class AuditOutcome(StrEnum):
    """What comparing leased state with recomputed state found."""

    EQUAL = "equal"
    CLOSE = "close"
    MISMATCH = "mismatch"
    LATE = "late"
    """Told after the lease had ended, or nothing was recomputed in time: nothing is known. A mismatch told late is one."""


class Tally:
    """The counts of one life. On the way of an acquire they are plain attributes: a ``Counter`` takes thrice as long."""

    def __init__(self, kinds: tuple[ObjectKind, ...], units: tuple[int, ...]) -> None:
        """``kinds`` and ``units`` (tokens of one object): by group."""
        self._counters: Counter[str] = Counter()
        self._acquires = self._asked = self._promised = self._promises = 0
        self._usable = self._usables = self._granted = self._grants = self._full = 0
        self.kinds = kinds
        self.units = units
        self.answers: Counter[Status] = Counter()
        self.cut_requests: Counter[tuple[ObjectKind, Reason]] = Counter()
        self.cut_tokens: Counter[tuple[ObjectKind, Reason]] = Counter()
        self.unreused_leases: Counter[tuple[Unreused, Reason | None]] = Counter()
        self.unreused_tokens: Counter[tuple[Unreused, Reason | None]] = Counter()
        self.recoveries: Counter[tuple[Way, ObjectKind, Outcome, Reason | None]] = Counter()
        self.refusals: Counter[tuple[str, Reason]] = Counter()
        """What clients' requests other than acquires were refused for, by the record that answered."""
        self.admission_refusals: Counter[tuple[str, Reason]] = Counter()
        self.audits: Counter[AuditOutcome] = Counter()
        self.tail_tokens: defaultdict[ObjectKind, Histogram] = defaultdict(lambda: Histogram(TAIL_BOUNDS_TOKENS))
        self.swap_in_s: defaultdict[ObjectKind, Histogram] = defaultdict(Histogram)
        self.restore_wait_s: defaultdict[ObjectKind, Histogram] = defaultdict(Histogram)
        self._tails = frozenset(g for g, kind in enumerate(kinds) if kind is ObjectKind.UNCOMPRESSED_TAIL)

    def answered(self, asked: int, answer: Answer, granted: int) -> None:
        """One acquire got its answer: ``asked`` tokens, of which ``granted`` are under a lease."""
        self._acquires += 1
        self._asked += asked
        promised, usable = answer.hash_tokens, answer.usable_tokens
        if promised:
            self._promises += 1
            self._promised += promised
        if usable:
            self._usables += 1
            self._usable += usable
        if granted:
            self._grants += 1
            self._granted += granted
        if answer.cause is None and answer.status is _FULL_HIT:
            self._full += 1
        else:
            self._fell_short(answer, promised - granted)
        if answer.tokens_lost_to_alignment:
            self._counters["tokens_lost_to_alignment_total"] += answer.tokens_lost_to_alignment
        if answer.replay_from is not None and granted:
            self._counters["replayed_tokens_total"] += granted - answer.replay_from
            self.recoveries[Way.REPLAY, ObjectKind.SLIDING_WINDOW, Outcome.ATTEMPTED, None] += 1

    def _fell_short(self, answer: Answer, lost: int) -> None:
        """Anything but a full hit: by its status and cause."""
        self.answers[answer.status] += 1
        cause = answer.cause
        if cause is not None:
            key = cause.kind, cause.reason
            self.cut_requests[key] += 1
            self.cut_tokens[key] += lost
            if cause.layer in VALIDATION:
                self._counters["validation_failures_total"] += 1

    @property
    def counters(self) -> Counter[str]:
        """The counts without labels, those of acquires included."""
        if self._acquires:
            self._counters.update(
                acquires_total=self._acquires,
                asked_tokens_total=self._asked,
                hash_hit_requests_total=self._promises,
                hash_hit_tokens_total=self._promised,
                usable_hit_requests_total=self._usables,
                usable_hit_tokens_total=self._usable,
                effective_hit_requests_total=self._grants,
                effective_hit_tokens_total=self._granted,
            )
            self.answers[_FULL_HIT] += self._full
            self._acquires = self._asked = self._promised = self._promises = 0
            self._usable = self._usables = self._granted = self._grants = self._full = 0
        return self._counters

    def count(self, name: str, by: int) -> None:
        """Add to one of the counts without labels that no acquire counts."""
        self._counters[name] += by

    def lease_released(self, proof: Proof, reused: int, refused: Reason | None) -> None:
        """A reader gave its lease back; ``reused``: tokens it reported after a clean check."""
        granted = proof.tokens
        reused = min(reused, granted)
        if reused:
            self.counters["reused_hit_requests_total"] += 1
            self.counters["reused_hit_tokens_total"] += reused
        if reused < granted:
            how = Unreused.UNREAD if refused is None else Unreused.REFUSED
            self.unreused(how, granted - reused, refused)
        if self._tails:
            self._tail(proof)

    def unreused(self, how: Unreused, tokens: int, reason: Reason | None = None) -> None:
        """A lease ended, and that many of its tokens were not reused."""
        self.unreused_leases[how, reason] += 1
        self.unreused_tokens[how, reason] += tokens

    def _tail(self, proof: Proof) -> None:
        """How long the tails were that the lease covered."""
        for run in proof.runs:
            if run.group in self._tails:
                self.tail_tokens[self.kinds[run.group]].add(float(len(run.indices) * self.units[run.group]))

    def recovery(self, way: Way, kind: ObjectKind, outcome: Outcome, reason: Reason | None = None) -> None:
        """One object's way back began or ended."""
        self.recoveries[way, kind, outcome, reason] += 1

    @property
    def lost_tokens(self) -> dict[Reason, int]:
        """Promised and not granted, by the reason of the answer's cause."""
        found: dict[Reason, int] = {}
        for (_, reason), tokens in self.cut_tokens.items():
            found[reason] = found.get(reason, 0) + tokens
        return found

    @property
    def lost_by_kind(self) -> dict[ObjectKind, int]:
        """Promised and not granted, by the cause's kind."""
        found: dict[ObjectKind, int] = {}
        for (kind, _), tokens in self.cut_tokens.items():
            found[kind] = found.get(kind, 0) + tokens
        return found


def is_validation(reason: Reason) -> bool:
    """Whether one of the four layers of validation refuses with this reason."""
    return LAYER_OF[reason] in VALIDATION
