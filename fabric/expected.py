"""What work takes: as measured, and as expected of one way to resume a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Work(StrEnum):
    """What takes time on the way to a resumed prompt."""

    TRANSFER = "transfer"
    RESTORE = "restore"
    COPY = "copy"
    """Out of host memory, to where readers map it."""
    REPLAY = "replay"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Measured:
    """What some work really took. ``amount``: bytes, or tokens of replay and prefill; ``source``: of a transfer."""

    work: Work
    amount: int
    seconds: float
    source: str = ""


@dataclass(frozen=True, slots=True)
class Expected:
    """One way to resume, with the seconds it is expected to take, by what takes them.

    ``restore_s``: from the tiers, disk and host memory together.
    """

    tokens: int
    replay_from: int | None
    transfer_s: float
    restore_s: float
    replay_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        return self.transfer_s + self.restore_s + self.replay_s + self.prefill_s
