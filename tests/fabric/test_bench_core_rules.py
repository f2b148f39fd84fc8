"""The rule engine's benchmark measures answers that are cut, and prints figures in one form."""

from __future__ import annotations

from collections import Counter

import pytest

from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.presets import preset
from kvfabric.fabric.rules import resolve
from kvfabric.ops.bench.core_rules import WORLDS, eight_groups, figures, worn


@pytest.mark.parametrize("model", [eight_groups(), preset("deepseek_v4_flash")], ids=lambda m: m.name)
def test_what_is_measured_grants_something_and_is_cut_by_several_groups(model: ModelSpec) -> None:
    tokens = 512 * model.grid_tokens
    causes: Counter[str] = Counter()
    for seed in range(WORLDS):
        found = resolve(model, worn(model, tokens, seed), tokens + 1)
        assert 0 < found.tokens < found.hash_tokens == tokens
        assert found.cause is not None
        causes[found.cause.group] += 1
    assert len(causes) > 1


def test_every_figure_names_its_unit_and_target() -> None:
    measured = figures()
    assert len({figure["name"] for figure in measured}) == len(measured) == 5
    for figure in measured:
        assert set(figure) == {"name", "value", "unit", "target", "holds"}
        assert figure["unit"] == "us"
        assert figure["value"] > 0
        assert figure["holds"] == (figure["value"] < figure["target"])
