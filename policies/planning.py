"""Policies by the names that a spec gives them, fresh for one holder's life."""

from __future__ import annotations

from ..fabric.model import ModelSpec
from ..fabric.offers import Planning
from ..fabric.writing import DiskAdmission
from .costs import CostGuess, LeastTime
from .second_touch import SecondTouch


def planning_of(model: ModelSpec, guess: CostGuess | None = None) -> Planning | None:
    """The policy that a model's ``plan`` names, fresh for one holder's life; None for the longest."""
    return LeastTime(guess) if model.plan == "cost" else None


def disk_admission_of(name: str) -> DiskAdmission | None:
    """What may be written to disk: ``all`` (None), or by ``second_touch``."""
    return SecondTouch() if name == "second_touch" else None
