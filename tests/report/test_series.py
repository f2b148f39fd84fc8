"""Series: bounded, mergeable, and what a holder says of itself is what it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfabric.fabric.kinds import ObjectKind, Reason, SpecError, Tier
from kvfabric.fabric.series import BOUNDS_S, Histogram, Sample, Timeline, merged, quantile_s
from kvfabric.ops.report.series import Series


def test_a_timeline_never_holds_more_than_its_bound_and_keeps_both_ends() -> None:
    timeline = Timeline(every_s=1.0, samples_max=10)
    for second in range(1000):
        if second >= timeline.due_s:
            timeline.add(Sample(at_s=second, requests=second))
        assert len(timeline.samples) <= 10
    assert timeline.samples[0].at_s == 0
    assert timeline.samples[-1].at_s > 800
    distances = {b.at_s - a.at_s for a, b in zip(timeline.samples, timeline.samples[1:], strict=False)}
    assert max(distances) <= 2 * min(distances)


def test_a_quantile_is_the_upper_end_of_the_bucket_it_lies_in() -> None:
    histogram = Histogram()
    assert quantile_s(histogram.counts, 0.5) is None
    for seconds in (0.0004, 0.003, 0.003, 1e9):
        histogram.add(seconds)
    assert sum(histogram.counts) == 4
    assert quantile_s(histogram.counts, 0.25) == BOUNDS_S[0]
    assert quantile_s(histogram.counts, 0.5) == 0.004
    assert quantile_s(histogram.counts, 1.0) == BOUNDS_S[-1]


def test_merged_series_add_up_at_every_moment() -> None:
    kv = ObjectKind.COMPRESSED_HISTORY
    one = [
        Sample(at_s=0, requests=1, occupancy_bytes={kv: {Tier.G2: 10}}),
        Sample(at_s=2, requests=5, lost_tokens={Reason.EVICTED: 7}),
    ]
    two = [Sample(at_s=1, requests=10, occupancy_bytes={kv: {Tier.G2: 5}}, lost_tokens={Reason.EVICTED: 1})]
    both = merged([one, [], two])
    assert [(s.at_s, s.requests) for s in both] == [(0, 1), (1, 11), (2, 15)]
    assert both[1].occupancy_bytes == {kv: {Tier.G2: 15}}
    assert both[2].lost_tokens == {Reason.EVICTED: 8}


def test_holders_that_began_at_different_moments_are_merged_once_an_interval() -> None:
    """Else every other interval would be one holder's alone, and what another did would seem to stand still."""

    def holder(first_s: float) -> list[Sample]:
        return [Sample(at_s=first_s + 5.0 * n, requests=10 * n) for n in range(6)]

    both = merged([holder(0.0), holder(1.0)])
    assert [sample.at_s for sample in both] == [0.0, 6.0, 11.0, 16.0, 21.0, 26.0]
    assert [sample.requests for sample in both] == [0, 20, 40, 60, 80, 100]
    alone = merged([holder(0.0)])
    assert [sample.at_s for sample in alone] == [0.0, 5.0, 10.0, 15.0, 20.0, 25.0]
    apart = merged([holder(0.0), holder(2.5)])
    assert len(apart) == 12, "halfway between is no moment of either"


def test_a_series_file_comes_back_as_it_was_and_a_damaged_one_names_its_field(tmp_path: Path) -> None:
    path = tmp_path / "series.json"
    series = Series(
        source="replay",
        title="t",
        clock="simulated",
        facts={"nodes": 2},
        samples=[Sample(at_s=0), Sample(at_s=3, requests=2, lost_tokens={Reason.TAIL_GAP: 3})],
    )
    series.save(path)
    assert Series.load(path) == series
    for old, new, field in (
        ('"requests":2', '"requests":-2', "samples.1.requests"),
        ('"schema":1', '"schema":2', "schema"),
        ("tail_gap", "tail_gone", "samples.1.lost_tokens"),
        ('"at_s":3.0', '"at_s":-1', "samples.1.at_s"),
    ):
        text = path.read_text()
        assert old in text
        (tmp_path / "bad.json").write_text(text.replace(old, new))
        with pytest.raises(SpecError, match=field):
            Series.load(tmp_path / "bad.json")
    with pytest.raises(SpecError, match=r"nowhere\.json"):
        Series.load(tmp_path / "nowhere.json")
