"""The report page: self-contained, well formed, and it says what the series says."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kvfabric.fabric.kinds import ObjectKind, Reason, Tier
from kvfabric.fabric.series import BOUNDS_S, Sample
from kvfabric.ops.cli import main
from kvfabric.ops.report.charts import ticks
from kvfabric.ops.report.page import page
from kvfabric.ops.report.series import Series

BUCKETS = len(BOUNDS_S) + 1


def histogram(**at: int) -> tuple[int, ...]:
    return tuple(at.get(f"b{i}", 0) for i in range(BUCKETS))


def series(title: str = "a <day> & a night") -> Series:
    samples = [
        Sample(
            at_s=10.0 * i,
            requests=100 * i,
            tokens=100_000 * i,
            hash_hit_tokens=60_000 * i,
            usable_hit_tokens=50_000 * i,
            effective_hit_tokens=40_000 * i,
            lost_tokens={Reason.EVICTED: 15_000 * i, Reason.TAIL_GAP: 5_000 * i},
            occupancy_bytes={
                ObjectKind.COMPRESSED_HISTORY: {Tier.G2: i << 20, Tier.G3: i << 22},
                ObjectKind.INDEXER: {Tier.G2: i << 18},
            },
            recovery=histogram(b3=i, b5=i),
            lease_life=histogram(b12=10 * i),
        )
        for i in range(20)
    ]
    facts: dict[str, str | int | float] = {"trace": "<script>alert(1)</script>.jsonl", "nodes": 3}
    return Series(source="replay", clock="simulated", title=title, facts=facts, samples=samples)


class Seen(HTMLParser):
    """Every tag and attribute of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    text = page(series())
    seen = Seen(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "image", "use", "foreignobject"} & set(seen.tags)
    assert not {"src", "href", "xlink:href", "srcset", "action"} & {name for name, _ in seen.attributes}
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?://", text)
    assert "Content-Security-Policy" in text
    assert Seen('<img src="http://x">').attributes == [("src", "http://x")]  # the test would see one


def test_every_chart_is_well_formed_and_names_stay_text() -> None:
    text = page(series())
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) >= 8
    for chart in charts:
        root = ET.fromstring(chart)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for mark in root.iter():
            for pair in mark.attrib.get("points", "").split():
                x, y = map(float, pair.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height
    assert "a <day> & a night" in Seen(text).words
    assert "<script>alert(1)</script>.jsonl" in Seen(text).words


def test_the_page_says_what_the_series_says() -> None:
    words = Seen(page(series())).words
    for said in ("1.9 k", "60.0 %", "50.0 %", "40.0 %", "evicted", "285 k", "tail_gap", "95 k", "simulated time"):
        assert said in words
    for said in ("host memory (G2)", "local disk (G3)", "compressed_history", "indexer"):
        assert said in words
    assert "38 in all; half within 4 ms, 99 % within 16 ms." in words
    assert "190 in all; half within 2.05 s" in words


@pytest.mark.parametrize("samples", [[], [Sample(at_s=0)], [Sample(at_s=0), Sample(at_s=5)]])
def test_a_series_of_nothing_is_a_page_too(samples: list[Sample]) -> None:
    assert "<h1>t</h1>" in page(Series(source="fabric", title="t", samples=samples))


@pytest.mark.parametrize(("last", "base"), [(7.0, 10), (100.0, 10), (0.003, 10), (10 << 20, 1024), (3e12, 1024)])
def test_ticks_are_a_handful_of_round_numbers(last: float, base: int) -> None:
    found = ticks(0.0, last, base=base)
    assert found[0] == 0
    assert 2 <= len(found) <= 7
    assert found[-1] <= last * (1 + 1e-9)


def test_the_command_writes_the_page_and_names_a_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "series.json", tmp_path / "page.html"
    series().save(path)
    with pytest.raises(SystemExit) as done:
        main(["report", str(path), "--out", str(out)])
    assert done.value.code == 0
    assert out.read_text(encoding="utf-8") == page(series())
    path.write_text(json.dumps({"schema": 1, "source": "replay", "title": "t", "samples": [{"at_s": "soon"}]}))
    with pytest.raises(SystemExit) as refused:
        main(["report", str(path), "--out", str(out)])
    assert refused.value.code == 2
    assert "samples.0.at_s" in capsys.readouterr().err
