"""Ray's own metrics endpoint serves what the holders count."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvfabric import Fabric, Session
from kvfabric.actors.metrics import MetricsExport
from kvfabric.fabric.kinds import ObjectKind, Reason, Status
from kvfabric.fabric.metrics import FAMILIES, FAMILY_OF, Point, Type, buckets
from kvfabric.fabric.series import Histogram
from kvfabric.fabric.tally import AuditOutcome, Unreused

from ..fabric.everything import cores_by_hand, cores_of_readers, cores_of_the_cases, summed
from . import stories

SETTLED_S = 4.0
"""Longer than both a holder and Ray's agent take to hand on what was counted."""
WITHIN_S = 30.0


def scraped(ray: Any) -> dict[tuple[str, ...], float]:
    """Every series of the fabrics on all nodes: name, fabric, holder and further labels, to its value."""
    found: dict[tuple[str, ...], float] = {}
    ours = {"WorkerId", "NodeAddress", "SessionName", "Version", "Component"}
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=5) as reply:
            text = reply.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.startswith("ray_kvfabric_"):
                    continue
                labels = {k: v for k, v in sample.labels.items() if k not in ours and not k.startswith("otel_scope")}
                rest = (f"{k}={v}" for k, v in sorted(labels.items()) if k not in {"fabric", "holder"})
                key = (sample.name.removeprefix("ray_"), labels["fabric"], labels["holder"], *rest)
                found[key] = found.get(key, 0.0) + sample.value
    return found


def moved_there(kept: dict[str, Any], tokens: list[int]) -> int:
    """Resume from what lies on the other node only: over a link."""
    import kvfabric

    with kvfabric.connect("default") as session:
        answer = session.acquire(tokens)
        answer.cancel()
        return sum((answer.moved_bytes or {}).values())


def test_what_a_link_moves_is_scraped_in_bytes_and_seconds(
    fabric: Fabric, session: Session, away: Any, ray: Any
) -> None:
    mine = stories.prompt("scraped, moved")
    assert session.publish(mine, stories.objects(session.model, mine)).ok
    moved = stories.eventually(lambda: away.do(moved_there, mine), bool)
    there = next(h["address"] for h in fabric.status()["holders"] if h["node"] != fabric.info().node)

    def over_nixl(found: dict[tuple[str, ...], float], what: str) -> float:
        return found.get((f"kvfabric_transfer_{what}_total", "default", there, "link=nixl"), 0.0)

    seen = stories.eventually(lambda: scraped(ray), lambda found: over_nixl(found, "bytes") >= moved, WITHIN_S)
    assert over_nixl(seen, "seconds") > 0


def test_a_lease_is_counted_and_its_series_scraped(fabric: Fabric, session: Session, ray: Any) -> None:
    mine = stories.prompt("scraped")
    assert session.publish(mine, stories.objects(session.model, mine)).ok
    here = next(h["address"] for h in fabric.status()["holders"] if h["node"] == fabric.info().node)

    def tokens(stage: str) -> tuple[str, ...]:
        return ("kvfabric_tokens_total", "default", here, f"stage={stage}")

    # What other tests counted is exported now and then: once nothing comes any more, a difference speaks of this one.
    looks: list[dict[tuple[str, ...], float]] = []

    def settled() -> bool:
        looks.append(
            {series: value for series, value in scraped(ray).items() if series[2] == here and "tokens" in series[0]}
        )
        time.sleep(SETTLED_S)
        return len(looks) > 1 and looks[-1] == looks[-2]

    stories.eventually(settled, bool, WITHIN_S)
    before = looks[-1]
    lease = session.acquire(mine).lease
    assert lease is not None
    assert stories.wrong_bytes(lease, session.model, mine) == []
    assert lease.check() is None
    lease.release(reused_tokens=64)
    other = session.acquire(stories.prompt("nobody stored this"))
    assert other.lease is None

    def grew(seen: dict[tuple[str, ...], float], stage: str) -> float:
        return seen.get(tokens(stage), 0.0) - before.get(tokens(stage), 0.0)

    seen = stories.eventually(lambda: scraped(ray), lambda found: grew(found, "reused") >= 64, WITHIN_S)
    assert {stage: grew(seen, stage) for stage in ("hash", "usable", "granted", "reused")} == dict.fromkeys(
        ("hash", "usable", "granted", "reused"), 64.0
    )
    assert grew(seen, "asked") == 140.0
    window = "kind=sliding_window"
    assert seen["kvfabric_lease_age_seconds_bucket", "default", here, window, "le=+Inf"] >= 1
    assert seen["kvfabric_lease_age_seconds_count", "default", here, window] >= 1
    assert ("kvfabric_held_bytes", "default", here, "kind=sliding_window", "tier=G2") in seen


ELSEWHERE = {
    "kvfabric_copies_total",
    "kvfabric_restore_wait_seconds",
    "kvfabric_transfer_bytes_total",
    "kvfabric_transfer_seconds_total",
}
"""Of policies, of busy disks, and of links: cores by themselves cause none."""
IN_A_LABEL = ("kind", "reason", "layer", "status")
"""Labels whose words are closed vocabularies."""


def words_of(series: Iterable[tuple[str, ...]]) -> dict[str, set[str]]:
    """By such a label, the words that some series bears."""
    found: dict[str, set[str]] = {label: set() for label in IN_A_LABEL}
    for _, _, _, *labels in series:
        for label, _, word in (pair.partition("=") for pair in labels):
            if label in found:
                found[label].add(word)
    return found


def told(points: Iterable[Point]) -> dict[tuple[str, ...], float]:
    """The same points as a scrape shows them."""
    found: dict[tuple[str, ...], float] = {}
    for point in points:
        family = FAMILY_OF[point.name]
        pairs = [f"{name}={word}" for name, word in zip(family.labels, point.labels, strict=True)]
        if isinstance(point.value, Histogram):
            for le, count in buckets(point.value):
                found[(f"{point.name}_bucket", *sorted([*pairs, f"le={le}"]))] = count
            found[(f"{point.name}_count", *sorted(pairs))] = sum(point.value.counts)
        elif point.value or family.type is not Type.COUNTER:  # a counter is told of once it grew
            found[(point.name, *sorted(pairs))] = point.value
    return found


def test_every_kind_and_reason_that_there_is_is_read_from_the_scraped_endpoint(fabric: Fabric, ray: Any) -> None:
    """Caused once each by holders' cores, exported as a holder exports, served by Ray's agent."""
    points = summed([*cores_of_the_cases(), *cores_by_hand(), *cores_of_readers()])
    MetricsExport("everything", "cases").flush(points)
    expected = told(points)

    def mine() -> dict[tuple[str, ...], float]:
        found = scraped(ray)
        return {(s[0], *s[3:]): value for s, value in found.items() if s[1:3] == ("everything", "cases")}

    seen = stories.eventually(mine, lambda found: found.keys() >= expected.keys(), WITHIN_S)
    assert {series: seen[series] for series in expected} == pytest.approx(expected)
    words = words_of((name, "", "", *labels) for name, *labels in seen)
    assert words["reason"] - {""} == {str(reason) for reason in Reason}
    assert words["kind"] == {str(kind) for kind in ObjectKind}
    assert words["status"] == {str(status) for status in Status}
    for family, outcomes in (("audits", AuditOutcome), ("unreused_requests", Unreused), ("unreused_tokens", Unreused)):
        told_of = {label for name, *labels in seen for label in labels if name == f"kvfabric_{family}_total"}
        assert {f"outcome={outcome}" for outcome in outcomes} <= told_of, family
    exported = {name.removesuffix("_count") for name, *_ in seen}
    assert {family.name for family in FAMILIES} - exported == ELSEWHERE
    cut = {label for name, *labels in seen for label in labels if name == "kvfabric_cut_requests_total"}
    assert {f"kind={kind}" for kind in ObjectKind} <= cut
