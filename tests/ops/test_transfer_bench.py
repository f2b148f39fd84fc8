"""Laws of the transfer figures: each names its target and says honestly whether it holds."""

from __future__ import annotations

import pytest

from kvfabric.ops.bench import transfer


@pytest.mark.long
def test_the_figures_are_measured_and_judged_by_their_targets() -> None:
    figures = {figure["name"]: figure for figure in transfer.figures(rounds=1)}
    assert {name: figure["target"] for name, figure in figures.items() if figure["target"]} == {
        "same_host_digests_of_memcpy": 0.55,
        "same_host_versions_of_memcpy": 0.8,
        "nixl_tcp_of_bare_nixl_read": 0.85,
        "isolated_nixl_tcp_of_bare_nixl_read": 0.85,
        "isolated_nixl_tcp_over_ray_get": 1.5,
    }
    for figure in figures.values():
        assert figure["value"] > 0
        assert figure["holds"] is (figure["target"] is None or figure["value"] >= figure["target"])
