"""What a session's verbs give back: expected outcomes are values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..fabric.kinds import Cause, Reason, Status
from .lease import Lease


@dataclass(slots=True)
class Answer:
    """What an acquire or probe found. Expected outcomes are values; ``lease`` is None without one.

    ``replay_from``: the lease has history up to ``tokens`` and no windows or tails: run the model over
    [replay_from, tokens), write only those, and go on at ``tokens``. What they are there is then exact.
    """

    status: Status
    tokens: int
    hash_tokens: int
    usable_tokens: int
    cause: Cause | None
    also: tuple[str, ...] = ()
    replay_from: int | None = None
    expected_s: float | None = None
    lease: Lease | None = None
    tokens_lost_to_alignment: int = 0
    moved_bytes: Mapping[str, int] | None = None
    sources: tuple[str, ...] = ()

    approximate: bool = False
    """What a reader has at ``tokens`` is near to what a prefill would have left, and is not it."""

    stop: Callable[[], None] | None = None
    """Stops what a PENDING answer started."""

    def cancel(self) -> None:
        """Give up what was granted, or what is pending. Idempotent."""
        if self.lease is not None:
            self.lease.release()
        if self.stop is not None:
            stop, self.stop = self.stop, None
            stop()


@dataclass(frozen=True, slots=True)
class Parked:
    """What :meth:`Session.park` left behind: when its request first came, and why nothing went to disk."""

    asked_s: float
    refused: Reason | None = None
