"""What things cost, learned from what they took, and the plan of least expected time.

Each kind of work is a line, ``fixed_s + unit_s * amount``: what starting it takes, and each byte or
token more. A line begins at what the spec says and follows what is measured, recent work weighing
most. Transfers have a line a source.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..fabric.expected import Expected, Measured, Work
from ..fabric.offers import Offers

DECAY = 0.9
"""What a measurement weighs against the next one."""
OUTLIER = 8.0
"""A measurement counts at most for this many times what was expected: a stall is no new speed, a change is."""
PRIOR_WEIGHT = 0.5
SOURCES_MAX = 1024
SPREAD_MIN = 1e-4
"""Relative variance of the amounts below which they say nothing of what starting costs."""


@dataclass(slots=True)
class Line:
    """Seconds as a line over the amount, fitted by least squares over decaying measurements.

    Never negative in either part. ``prior_amount``: where the first guess is sure of itself.
    """

    fixed_s: float
    unit_s: float
    prior_amount: float = 1.0
    samples: int = 0
    _sums: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sums = [0.0] * 5
        for amount in (0.0, self.prior_amount):
            self._add(amount, self.fixed_s + self.unit_s * amount, PRIOR_WEIGHT)

    def seconds(self, amount: float) -> float:
        """Expected seconds; 0 for nothing to do."""
        return self.fixed_s + self.unit_s * amount if amount > 0 else 0.0

    def over(self, amounts: NDArray[np.int64]) -> NDArray[np.float64]:
        """:meth:`seconds` of many amounts."""
        return np.where(amounts > 0, self.fixed_s + self.unit_s * amounts, 0.0)

    def learn(self, amount: float, seconds: float) -> None:
        """So much took so long. Instants and nothing teach nothing."""
        if amount <= 0 or seconds <= 0:
            return
        self.samples += 1
        self._sums = [part * DECAY for part in self._sums]
        self._add(amount, min(seconds, OUTLIER * self.seconds(amount)) if self.seconds(amount) else seconds, 1.0)
        self._fit()

    def _add(self, amount: float, seconds: float, weight: float) -> None:
        terms = (1.0, amount, seconds, amount * amount, amount * seconds)
        self._sums = [part + weight * term for part, term in zip(self._sums, terms, strict=True)]

    def _fit(self) -> None:
        w, wx, wy, wxx, wxy = self._sums
        mean_x, mean_y = wx / w, wy / w
        variance = wxx / w - mean_x * mean_x
        if variance > SPREAD_MIN * mean_x * mean_x:
            unit_s = (wxy / w - mean_x * mean_y) / variance
            fixed_s = mean_y - unit_s * mean_x
            if unit_s < 0:
                unit_s, fixed_s = 0.0, mean_y
            elif fixed_s < 0:
                unit_s, fixed_s = wxy / wxx, 0.0
        else:
            fixed_s = min(self.fixed_s, mean_y)
            unit_s = (mean_y - fixed_s) / mean_x
        self.fixed_s, self.unit_s = fixed_s, unit_s

    def like(self) -> Line:
        """A fresh line that begins where this one is."""
        return Line(self.fixed_s, self.unit_s, self.prior_amount)


@dataclass(frozen=True)
class CostGuess:
    """What is believed before anything was measured. ``_s``: what starting takes."""

    prefill_tokens_per_s: float = 5000.0
    replay_tokens_per_s: float = 5000.0
    transfer_bytes_per_s: float = 2e9
    transfer_start_s: float = 0.001
    restore_bytes_per_s: float = 1e9
    restore_start_s: float = 0.002
    copy_bytes_per_s: float = 1e10
    copy_start_s: float = 0.0005


class LeastTime:
    """Implements ``Planning``: transfer + restore + replay + prefill of the rest, the least of it.

    Sources are fetched from one after another and restores wait behind what is queued: an upper bound
    where they overlap.
    """

    def __init__(self, guess: CostGuess | None = None) -> None:
        guess = guess or CostGuess()
        self.prefill = Line(0.0, 1 / guess.prefill_tokens_per_s, 1024)
        self.replay = Line(0.0, 1 / guess.replay_tokens_per_s, 1024)
        self.restore = Line(guess.restore_start_s, 1 / guess.restore_bytes_per_s, 8 << 20)
        self.copy = Line(guess.copy_start_s, 1 / guess.copy_bytes_per_s, 64 << 20)
        self.transfer = Line(guess.transfer_start_s, 1 / guess.transfer_bytes_per_s, 8 << 20)
        self.sources: OrderedDict[str, Line] = OrderedDict()

    def line_of(self, source: str) -> Line:
        """The line of transfers from a source; that of all, while nothing came from it."""
        return self.sources.get(source, self.transfer)

    def learn(self, measured: Measured) -> None:
        match measured.work:
            case Work.PREFILL:
                self.prefill.learn(measured.amount, measured.seconds)
            case Work.REPLAY:
                self.replay.learn(measured.amount, measured.seconds)
            case Work.RESTORE:
                self.restore.learn(measured.amount, measured.seconds)
            case Work.COPY:
                self.copy.learn(measured.amount, measured.seconds)
            case Work.TRANSFER:
                line = self.sources.setdefault(measured.source, self.transfer.like())
                self.sources.move_to_end(measured.source)
                line.learn(measured.amount, measured.seconds)
                self.transfer.learn(measured.amount, measured.seconds)
                while len(self.sources) > SOURCES_MAX:
                    self.sources.popitem(last=False)

    def seconds(self, offers: Offers) -> NDArray[np.float64]:
        total = self.prefill.over(offers.prefilled) + self.replay.over(offers.replayed)
        total += self._restores(offers.restored, offers.queued_bytes) + self.copy.over(offers.copied)
        for source, moved in offers.moved.items():
            total += self.line_of(source).over(moved)
        return total

    def _restores(self, restored: NDArray[np.int64], queued_bytes: float) -> NDArray[np.float64]:
        return self.restore.over(np.where(restored > 0, restored + queued_bytes, 0))

    def known(self) -> dict[str, dict[str, float]]:
        lines = {"prefill": self.prefill, "replay": self.replay, "restore": self.restore, "copy": self.copy}
        lines |= {"transfer": self.transfer, **{f"transfer from {s}": line for s, line in self.sources.items()}}
        return {
            name: {"start_s": line.fixed_s, "each_s": line.unit_s, "samples": line.samples}
            for name, line in lines.items()
        }

    def expected(self, offers: Offers, at: int) -> Expected:
        one = slice(at, at + 1)
        return Expected(
            int(offers.tokens[at]),
            offers.replay_from(at),
            sum(self.line_of(s).seconds(int(moved[at])) for s, moved in offers.moved.items()),
            float(self._restores(offers.restored[one], offers.queued_bytes)[0] + self.copy.over(offers.copied[one])[0]),
            self.replay.seconds(int(offers.replayed[at])),
            self.prefill.seconds(int(offers.prefilled[at])),
        )
