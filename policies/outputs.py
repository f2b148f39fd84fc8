"""What the length of a request's output tells of its prompt: how much likelier it comes back than others of its class.

Engines may say how long an output became (``Session.generated``). Questions about a document that get a word for
an answer are followed by more of them; who was told a long story asks about something else next. Which way it is, and
how much, is learned: of the visits that were told, by turn and length of output, the uses that were seen over those that
:mod:`reuse` expects of their classes and ages. The less was seen of a length, the nearer it stays to 1.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .reuse import OWED_USES, RUNS, TURNS, Floats, Ints, smoothed

PER_OCTAVE = 2
BANDS = 16 * PER_OCTAVE
"""Classes of length: two an octave, up to 65,536 tokens."""
UNTOLD = -1


def band_of(output_tokens: int) -> int:
    """The class of an output of this length."""
    return min(BANDS - 1, int(PER_OCTAVE * math.log2(max(output_tokens, 1))))


class Outputs:
    """By visit, in a ring of ``size``: the class of its output's length, and what its worth is multiplied by."""

    def __init__(self, size: int) -> None:
        self.bands: Ints = np.full(size, UNTOLD, dtype=np.int64)
        self.factors: Floats = np.ones(size)
        self.any_told = False
        self._learned: Floats = np.ones((TURNS, BANDS))

    def forget(self, place: int) -> None:
        """Another visit has this place from here on."""
        self.bands[place], self.factors[place] = UNTOLD, 1.0

    def tell(self, place: int, kind: int, output_tokens: int) -> None:
        """The output of the visit at this place, of this class, became so long."""
        self.any_told = True
        self.bands[place] = band = band_of(output_tokens)
        self.factors[place] = self._learned[kind // RUNS, band]

    def learn(self, places: Ints, kinds: Ints, used: npt.NDArray[np.bool_], expected: Floats) -> None:
        """From these visits, all told: whether each was used, and how many uses were expected by its class and age."""
        turns = kinds // RUNS
        flat = turns * BANDS + self.bands[places]
        seen: Floats = np.bincount(flat[used], minlength=TURNS * BANDS).astype(np.float64).reshape(TURNS, BANDS)
        due: Floats = np.bincount(flat, weights=expected, minlength=TURNS * BANDS).astype(np.float64)
        due = due.reshape(TURNS, BANDS)
        level = (seen.sum(axis=1) + OWED_USES) / (due.sum(axis=1) + OWED_USES)
        self._learned = (smoothed(seen) + OWED_USES) / (smoothed(due) * level[:, None] + OWED_USES)
        self.factors[places] = self._learned[turns, self.bands[places]]
