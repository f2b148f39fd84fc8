"""What a running fabric says of its past, and the page made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfabric import Fabric, Session
from kvfabric.fabric.kinds import FabricError
from kvfabric.fabric.series import Sample
from kvfabric.ops.report.page import page
from kvfabric.ops.report.series import Series, of_fabric

from .stories import eventually, objects, prompt


def ended(series: Series, before: Sample) -> int:
    """Leases that ended since."""
    return sum(series.samples[-1].lease_life) - sum(before.lease_life)


def newest(told: dict[str, list[Sample]]) -> float:
    return max(samples[-1].at_s for samples in told.values())


def test_each_holder_tells_its_series_and_the_report_adds_them_up(
    fabric: Fabric, session: Session, tmp_path: Path
) -> None:
    before = of_fabric(fabric.name).samples[-1]
    tokens = prompt("reported")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    for _ in range(3):
        answer = session.acquire(tokens)
        assert answer.lease is not None
        answer.lease.release()
    told = fabric.series()
    assert len(told) == 2
    assert all(samples for samples in told.values())
    series = eventually(lambda: of_fabric(fabric.name), lambda series: ended(series, before) == 3)
    after = series.samples[-1]
    assert after.requests - before.requests == 3
    assert after.effective_hit_tokens - before.effective_hit_tokens == 3 * 64
    assert sum(size for tiers in after.occupancy_bytes.values() for size in tiers.values()) > 0
    assert newest(told) <= after.at_s <= newest(fabric.series())
    series.save(tmp_path / "series.json")
    assert Series.load(tmp_path / "series.json") == series
    assert "Fabric default" in page(series)


def test_a_fabric_that_is_not_there_has_no_report(fabric: Fabric) -> None:
    with pytest.raises(FabricError, match="no fabric 'nowhere' runs"):
        of_fabric("nowhere")
