"""``kvfabric bench lease``: every figure is there, from real acquires, with its target."""

from __future__ import annotations

import pytest

from kvfabric.ops.bench import lease


@pytest.mark.usefixtures("fabric")  # on whose cluster it runs
def test_every_figure_is_measured_and_judged_by_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in {"PROMPTS": 2, "LONG_PROMPTS": 1, "LONG_BLOCKS": 128, "CHECKS": 50}.items():
        monkeypatch.setattr(lease, name, small)
    figures = {figure["name"]: figure for figure in lease.run()["figures"]}
    assert set(figures) == set(lease.EXPECTED)
    assert {name: figure["target"] for name, figure in figures.items() if figure["target"] is not None} == {
        "local_hit_64x5_first_seen_of_a_ray_call": 0.25,
        "local_hit_64x5_repeated_of_a_ray_call": 0.25,
        "check_320_slots": 10.0,
    }
    for figure in figures.values():
        assert figure["value"] > 0
        assert figure["holds"] is (figure["target"] is None or figure["value"] <= figure["target"])
