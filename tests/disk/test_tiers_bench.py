"""The disk tier's bench measures what it says, on real processes and a real disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfabric.ops.bench.tiers import RESTORES, figures


@pytest.mark.long
def test_every_figure_has_one_form_and_every_restore_of_the_burst_ends(tmp_path: Path) -> None:
    measured = {figure["name"]: figure for figure in figures(tmp_path, rounds=1)}
    assert len(measured) == 11
    for figure in measured.values():
        assert set(figure) == {"name", "value", "unit", "target", "holds"}
        assert figure["value"] > 0
    assert measured["restores_that_ended"]["value"] == RESTORES
    assert not list(tmp_path.iterdir())
