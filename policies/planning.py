"""How a model's requests are planned: the longest position, or the one of least expected time."""

from __future__ import annotations

from ..fabric.model import ModelSpec
from ..fabric.offers import Planning
from .costs import CostGuess, LeastTime


def planning_of(model: ModelSpec, guess: CostGuess | None = None) -> Planning | None:
    """The policy that a model's ``plan`` names, fresh for one holder's life; None for the longest."""
    return LeastTime(guess) if model.plan == "cost" else None
