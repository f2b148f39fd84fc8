"""A model's process on one node: loads a model, says what it is, connects to the fabric."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .records import Loaded
from .story import CUTS, FAULT_RAGGED, RAGGED, warm_up_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ....actors.session import Session
    from ..geometry import Geometry

THREADS = 1
"""How many threads share a matrix product may decide how it rounds, so every worker has one."""


class Worker:
    """Ray actor. Weights are drawn from a seed, so that two of them run the same model bit for bit."""

    model: PreTrainedModel
    config: PreTrainedConfig
    geometry: Geometry
    weights: str

    def __init__(self, family: str) -> None:
        self.family = family
        self._session: Session | None = None

    def load(self) -> Loaded:
        """Build the model and run it once: what comes later is timed. Raises MissingExtra without transformers.

        Not in the constructor: Ray wraps what is raised there in a page of its own.
        """
        import torch

        from ..generate import generate
        from ..geometry import geometry_of
        from ..tiny_models import build
        from ..weights import weights_revision

        torch.set_num_threads(THREADS)
        self.model, self.config = build(self.family)
        self.geometry = geometry_of(self.model)
        self.weights = weights_revision(self.model)
        generate(self.model, warm_up_prompt(), cuts=CUTS, decode_tokens=2)
        spec = self.geometry.model_spec(weights=self.weights)
        kinds = {group.name: str(group.kind) for group in spec.groups}
        return Loaded(spec.model_dump(mode="json"), self.weights, kinds)

    def slots(self, faults: int) -> dict[str, int]:
        """Slots a group: for the long prompt, and for each fault's, broken, beneath it, and repaired."""
        long, short = self.geometry.required(RAGGED), self.geometry.required(FAULT_RAGGED)
        return {name: 2 * len(long[name]) + faults * (3 * len(short[name]) + 4) for name in long}

    def passports(self) -> dict[str, dict[str, object]]:
        """The passport of each group as plain data."""
        from ..passport import passports

        return {name: dataclasses.asdict(p) for name, p in passports(self.config, self.geometry).items()}

    @property
    def session(self) -> Session:
        """This worker's session, opened when first used."""
        from ..adapter import connect

        if self._session is None:
            self._session = connect(self.model, self.geometry, weights=self.weights)
        return self._session

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()
            self._session = None
