"""When an object is used again, learned from what happened: the hazard of reuse by class and age.

For every class of visits, how often one of a certain age is followed by its next per second that one of that age was
waited for (Kaplan and Meier's estimator, so that what is still awaited or lost from sight counts for the
time it was followed).

A class is what is known of a visit when it is over: whether it continued another, and for which time, and how many
objects it stored. Classes share what they have in common: the shape over age is that of all visits of that turn, a class
only raises or lowers it, and the less a class has shown the nearer it stays to the others.

An object's worth is the most uses per second that any stay from now on can be expected to bring (the
index of Gittins, "Bandit processes and dynamic allocation indices", 1979): what will be used soon or
never is worth keeping for that while, and no longer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TURNS = 4
"""Classes of turn: who continues nothing, the first who continues that, the second, and all later ones."""
PER_OCTAVE = 3
RUNS = 1 + 9 * PER_OCTAVE
"""Classes of how many objects a visit stored: none, and three an octave, up to 512."""
CLASSES = TURNS * RUNS
EDGES_S: Floats = np.concatenate([[0.0], np.geomspace(4.0, 2048.0, 12)])
"""Ages at which the classes of age begin."""
_WIDTHS_S: Floats = np.diff(np.append(EDGES_S, 2 * EDGES_S[-1]))
_MIDDLE_S: Floats = EDGES_S + _WIDTHS_S / 2

FIRST_GUESS: Floats = np.array([0.15, 0.6, 0.8, 1.2])
"""Before anything was seen: uses per second of age, by turn."""
GUESS_AGE_S = 300.0
GUESS_FALL = 3.0
"""Unseen ages are taken to fall from the last one seen as this power of (age + GUESS_AGE_S)."""
OWED_USES = 3.0
"""A guess of the shape weighs as much as this many uses seen."""
OWED_CLASS_USES = 10.0
"""What classes share weighs as much as this many uses seen of one."""
FADE = 0.9999
"""What is left of what was seen after each visit: old habits are forgotten."""


def class_of(turn: int, run: int) -> int:
    """The class of a visit of this turn that stored so many objects."""
    return turn * RUNS + (min(RUNS - 1, 1 + int(PER_OCTAVE * math.log2(run))) if run else 0)


class Seen(NamedTuple):
    """What was seen by class and class of age: uses, and seconds in which there could have been one."""

    uses: Floats
    exposed_s: Floats

    @classmethod
    def nothing(cls) -> Seen:
        return cls(np.zeros((CLASSES, len(EDGES_S))), np.zeros((CLASSES, len(EDGES_S))))

    def and_spans(self, classes: Ints, ages_s: Floats, *, used: bool) -> Seen:
        """With objects of these classes that were there up to these ages, and were then used or lost from sight."""
        bins = len(EDGES_S)
        at = np.searchsorted(EDGES_S, ages_s, side="right") - 1
        flat = classes * bins + at
        ends = np.bincount(flat, minlength=CLASSES * bins).reshape(CLASSES, bins).astype(np.float64)
        inside = np.bincount(flat, weights=ages_s - EDGES_S[at], minlength=CLASSES * bins).reshape(CLASSES, bins)
        beyond = np.cumsum(ends[:, ::-1], axis=1)[:, ::-1] - ends
        exposed_s = self.exposed_s + inside + beyond * _WIDTHS_S
        return Seen(self.uses + ends if used else self.uses, exposed_s)

    def faded(self, visits: int) -> Seen:
        """What is left of it after so many visits more."""
        return Seen(self.uses * FADE**visits, self.exposed_s * FADE**visits)


def hazards(seen: Seen) -> Floats:
    """Uses per second by class and class of age, of shape (CLASSES, len(EDGES_S))."""
    uses = seen.uses.reshape(TURNS, RUNS, -1)
    exposed_s = seen.exposed_s.reshape(TURNS, RUNS, -1)
    shape = _shapes(uses.sum(axis=1), exposed_s.sum(axis=1))
    expected = (exposed_s * shape[:, None, :]).sum(axis=2)
    own = (smoothed(uses.sum(axis=2)) + OWED_CLASS_USES) / (smoothed(expected) + OWED_CLASS_USES)
    rates: Floats = shape[:, None, :] * own[..., None]
    return rates.reshape(CLASSES, -1)


def _shapes(uses: Floats, exposed_s: Floats) -> Floats:
    """The hazard over age by turn; an age not seen follows the one before it."""
    shape = np.zeros_like(uses)
    guess = FIRST_GUESS / (_MIDDLE_S[0] + GUESS_AGE_S)
    for age in range(uses.shape[1]):
        if age:
            fall = ((_MIDDLE_S[age - 1] + GUESS_AGE_S) / (_MIDDLE_S[age] + GUESS_AGE_S)) ** GUESS_FALL
            guess = shape[:, age - 1] * fall
        shape[:, age] = (uses[:, age] + OWED_USES) / (exposed_s[:, age] + OWED_USES / guess)
    return shape


def smoothed(by_run: Floats) -> Floats:
    """With half of each neighbouring class of run: runs of nearly the same length behave alike."""
    out = by_run.copy()
    out[:, 1:] += by_run[:, :-1] / 2
    out[:, :-1] += by_run[:, 1:] / 2
    return out


def expected_uses(rates: Floats, classes: Ints, ages_s: Floats) -> Floats:
    """How many uses are expected of each visit of these classes up to these ages."""
    before = np.cumsum(rates * _WIDTHS_S, axis=1) - rates * _WIDTHS_S
    at = np.searchsorted(EDGES_S, ages_s, side="right") - 1
    found: Floats = before[classes, at] + rates[classes, at] * (ages_s - EDGES_S[at])
    return found


def indices(rates: Floats) -> Floats:
    """The most uses per second that a stay from each age on can bring, of the shape of ``rates``."""
    used = 1 - np.exp(-rates * _WIDTHS_S)
    stay_s = _WIDTHS_S * (1 - used / 2)
    best = np.zeros_like(rates)
    for age in range(rates.shape[1]):
        unused = np.cumprod(1 - used[:, age:], axis=1)
        reach = np.concatenate([np.ones((len(rates), 1)), unused[:, :-1]], axis=1)
        gained = np.cumsum(reach * used[:, age:], axis=1)
        spent_s = np.cumsum(reach * stay_s[:, age:], axis=1)
        best[:, age] = (gained / spent_s).max(axis=1)
    return best


def at_age(table: Floats, classes: Ints, ages_s: Floats) -> Floats:
    """The table's values at these ages, between its classes of age in a line."""
    low = np.minimum(np.searchsorted(EDGES_S, ages_s, side="right") - 1, len(EDGES_S) - 2)
    part = np.minimum((ages_s - EDGES_S[low]) / _WIDTHS_S[low], 1.0)
    found: Floats = table[classes, low] * (1 - part) + table[classes, low + 1] * part
    return found
