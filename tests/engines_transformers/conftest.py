"""One run of each family, cut at every position under test and captured at each."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from transformers import PreTrainedModel

from kvfabric.engines.transformers.capture import Objects, capture
from kvfabric.engines.transformers.generate import Generation, generate
from kvfabric.engines.transformers.geometry import Geometry, geometry_of
from kvfabric.engines.transformers.tiny_models import FAMILIES, build, prompt

# Multiples of lcm(m, m') = 16: 16, 64, 80. Neither m = 4 nor m' = 16 divides 1, 3, 15, 17, 35, 70, 87.
POSITIONS = (1, 3, 4, 15, 16, 17, 35, 64, 68, 70, 80, 87)
PROMPT_TOKENS = 100


@dataclass
class Story:
    """A prompt that one model prefilled in chunks ending at POSITIONS, and what was captured there."""

    family: str
    model: PreTrainedModel
    geometry: Geometry
    tokens: list[int]
    captured: dict[int, Objects] = field(default_factory=dict)
    run: Generation = field(init=False)

    def __post_init__(self) -> None:
        self.run = generate(self.model, self.tokens, cuts=POSITIONS, after_chunk=self._capture)

    def _capture(self, position: int, cache: object) -> None:
        if position in POSITIONS:
            self.captured[position] = capture(cache, self.geometry, position)  # type: ignore[arg-type]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """How many threads share a matrix product may decide how it rounds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def stories(one_thread: None) -> dict[str, Story]:
    return {}


@pytest.fixture(params=FAMILIES)
def story(request: pytest.FixtureRequest, stories: dict[str, Story]) -> Story:
    return tell(stories, request.param)


def tell(stories: dict[str, Story], family: str) -> Story:
    if family not in stories:
        model, _ = build(family)
        stories[family] = Story(family, model, geometry_of(model), prompt(1, PROMPT_TOKENS))
    return stories[family]


def converted(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of a model in another dtype, but for what its family keeps in float32."""
    copied: torch.nn.Module = copy.deepcopy(model)
    copied.to(dtype)
    assert isinstance(copied, PreTrainedModel)
    return copied


def quiet_environment() -> dict[str, str]:
    """For child interpreters: another hash seed and thread count than this process has."""
    return {**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "2"}
