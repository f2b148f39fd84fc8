"""What is counted is told apart by kind and reason, exported under documented names, and bounded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfabric.fabric.effects import Received
from kvfabric.fabric.kinds import LAYER_OF, Layer, ObjectKind, Reason, Status
from kvfabric.fabric.messages import (
    EventsSeen,
    Objects,
    Park,
    Release,
    Renew,
    StoreAbort,
    StoreBegin,
    StoreItem,
    StoreQuiet,
)
from kvfabric.fabric.metrics import COMMON_LABELS, FAMILIES, FAMILY_OF, STAGES, Point, Type, buckets, collect
from kvfabric.fabric.series import Histogram

from .everything import BOUNDS, BY_HAND, MODEL, PROMPT, cores_of_the_cases, holder, summed
from .one_holder import ABI, OneHolder

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted((ROOT / "tests" / "cases").glob("*.yaml"))

Found = dict[str, Counter[tuple[str, ...]]]


@pytest.fixture(scope="module")
def counted() -> Found:
    """What the holders of every scenario case count, by family and labels."""
    found: Found = {family.name: Counter() for family in FAMILIES}
    for point in summed(cores_of_the_cases()):
        value = sum(point.value.counts) if isinstance(point.value, Histogram) else point.value
        found[point.name][point.labels] += int(value)
    return found


OF_A_LEASE_OR_A_STORE = {
    Reason.LEASE_EXPIRED,
    Reason.VERSION_CHANGED,
    Reason.WEIGHTS_MISMATCH,
    Reason.ATTEMPT_SUPERSEDED,
    Reason.PINNED,
    Reason.GRAPH_FROZEN,
    Reason.DISK_FULL,
}
"""What is refused to a read, a renewal, a commit, a drop or a swap, and never cuts an acquire of a scenario."""

OF_A_HOLDERS_STATE = {
    Reason.QUOTA,
    Reason.DEADLINE_EXCEEDED,
    Reason.DRAINING,
    Reason.NOT_GRANTING,
    Reason.BYPASSED,
    Reason.QUARANTINED,
}
"""What no scenario can bring about: see below."""


def test_the_cases_cause_every_reason_that_can_cut_an_acquire_and_each_is_counted(counted: Found) -> None:
    reasons = {reason for _, _, reason in counted["kvfabric_cut_requests_total"]}
    missing = {str(r) for r in Reason} - {str(r) for r in OF_A_LEASE_OR_A_STORE | OF_A_HOLDERS_STATE} - reasons
    assert not missing


def test_every_kind_is_cut_at_least_once(counted: Found) -> None:
    assert {kind for _, kind, _ in counted["kvfabric_cut_requests_total"]} == {str(kind) for kind in ObjectKind}


def test_only_the_four_layers_of_validation_count_as_its_failures(counted: Found) -> None:
    layers = {layer for layer, _, _ in counted["kvfabric_validation_failures_total"]}
    assert layers == {str(x) for x in (Layer.WHOLE_BLOCK, Layer.ABI, Layer.INTERSECTION, Layer.ALIGNMENT)}
    for labels, n in counted["kvfabric_cut_requests_total"].items():
        assert counted["kvfabric_validation_failures_total"][labels] == (n if labels[0] in layers else 0)


def test_no_stage_of_the_funnel_is_wider_than_the_one_before_in_tokens(counted: Found) -> None:
    tokens = [counted["kvfabric_tokens_total"][stage,] for stage in STAGES]
    assert tokens[0] >= tokens[1] >= tokens[2] >= tokens[3] >= tokens[4]
    assert tokens[3] > 0


def test_every_answer_has_a_status_and_every_lease_an_end(counted: Found) -> None:
    assert sum(counted["kvfabric_answers_total"].values()) == counted["kvfabric_requests_total"]["asked",]
    assert {status for (status,) in counted["kvfabric_answers_total"]} == {str(status) for status in Status}
    outcomes = {outcome for outcome, _ in counted["kvfabric_unreused_requests_total"]}
    assert {"unread", "expired"} <= outcomes


def test_what_is_attempted_to_recover_succeeds_or_fails(counted: Found) -> None:
    recoveries = counted["kvfabric_recoveries_total"]
    for way in ("fetch", "restore"):
        by_outcome: Counter[str] = Counter()
        for (found, _, outcome, reason), n in recoveries.items():
            if found == way:
                by_outcome[outcome] += n
                assert (outcome == "failed") == bool(reason)
        assert by_outcome["succeeded"] > 0
        assert by_outcome["failed"] > 0
        # What a killed holder had begun has no end.
        assert by_outcome["attempted"] >= by_outcome["succeeded"] + by_outcome["failed"]


def test_requests_of_clients_that_are_refused_are_counted(counted: Found) -> None:
    reasons = {reason for _, reason in counted["kvfabric_refusals_total"]}
    assert {"attempt_superseded", "weights_mismatch", "pinned", "graph_frozen", "disk_full"} <= reasons
    assert counted["kvfabric_admission_refusals_total"]["acquire", "admission_limit"] > 0


# --- what no scenario brings about ----------------------------------------------------------------


def of(one: OneHolder, name: str) -> dict[tuple[str, ...], float | Histogram]:
    return {point.labels: point.value for point in collect(one.core) if point.name == name}


def cut(reason: Reason) -> tuple[str, str, str]:
    return str(LAYER_OF[reason]), "compressed_history", str(reason)


@pytest.mark.parametrize(("reason", "make"), BY_HAND.items(), ids=str)
def test_what_a_holder_refuses_to_everyone_is_counted(reason: Reason, make: Callable[[OneHolder], None]) -> None:
    one = holder()
    one.acquire(PROMPT)
    assert of(one, "kvfabric_cut_requests_total") == {}
    make(one)
    assert one.acquire(PROMPT).grant is None
    assert of(one, "kvfabric_cut_requests_total") == {cut(reason): 1}
    assert of(one, "kvfabric_cut_tokens_total") == {cut(reason): 64}


@pytest.mark.parametrize(("reason", "config"), BOUNDS.items(), ids=str)
def test_what_a_bound_refuses_is_counted(reason: Reason, config: dict[str, int]) -> None:
    one = holder(**config)
    answer = one.acquire(PROMPT, graph=True)  # what is at hand is granted without a plan, and so within any bound
    assert answer.grant is None
    assert of(one, "kvfabric_cut_requests_total") == {cut(reason): 1}


def ended(one: OneHolder) -> dict[tuple[str, ...], float | Histogram]:
    return of(one, "kvfabric_unreused_tokens_total")


def test_what_becomes_of_granted_tokens_is_told_apart() -> None:
    one = holder()
    granted = one.granted(PROMPT)
    one.ask(Release(one.name(), granted.lease, 64))
    assert ended(one) == {}
    assert of(one, "kvfabric_tokens_total")["reused",] == 64
    one.ask(Release(one.name(), granted.lease, 64))  # over: counted once
    assert of(one, "kvfabric_tokens_total")["reused",] == 64
    one.ask(Release(one.name(), one.granted(PROMPT).lease, 48))
    assert ended(one) == {("unread", ""): 16}
    one.ask(Release(one.name(), one.granted(PROMPT).lease, None, Reason.VERSION_CHANGED))
    one.granted(PROMPT, lease_s=5.0)
    one.pass_time(60.0)
    parked = one.granted(PROMPT)
    one.ask(Park(one.name(), parked.lease))
    assert ended(one) == {
        ("unread", ""): 16,
        ("refused", "version_changed"): 64,
        ("expired", "lease_expired"): 64,
        ("parked", ""): 64,
    }
    assert of(one, "kvfabric_tokens_total")["granted",] == 5 * 64
    renewed = one.ask(Renew(one.name(), parked.lease, 5.0))
    assert renewed.refused is Reason.LEASE_EXPIRED
    assert of(one, "kvfabric_refusals_total")["Renewed", "lease_expired"] == 1


def test_quarantined_bytes_rise_with_an_aborted_attempt_and_fall_once_it_is_quiet() -> None:
    one = OneHolder(MODEL)
    keys = one.keys(PROMPT)
    items = (StoreItem(Objects(0, 0, (0, 1), keys.keys(16)[:64]), 0, 64, ABI),)
    begun = one.ask(StoreBegin(one.name(), one.prompt(keys), items, (), replace=True))
    assert of(one, "kvfabric_quarantined_bytes") == {}
    one.ask(StoreAbort(one.name(), begun.attempt))
    assert of(one, "kvfabric_quarantined_bytes") == {("compressed_history",): 128}
    one.ask(StoreQuiet(one.name(), begun.attempt))
    assert of(one, "kvfabric_quarantined_bytes") == {("compressed_history",): 0}


def test_the_directory_is_stale_from_the_first_change_it_has_not_seen() -> None:
    one = holder()  # nobody answers for the directory here
    one.pass_time(7.0)
    assert of(one, "kvfabric_directory_staleness_seconds") == {(): 7.0}
    seq = one.core.events.seq
    one.handle(Received("directory:0", EventsSeen("directory:0", 1, 1, seq, False)))
    assert of(one, "kvfabric_directory_staleness_seconds") == {(): 0.0}


def test_histograms_by_kind_fill(counted: Found) -> None:
    assert counted["kvfabric_tail_length_tokens"]["uncompressed_tail",] > 0
    assert set(counted["kvfabric_lease_age_seconds"]) == {(str(kind),) for kind in ObjectKind} - {("disk_prefix",)}
    assert sum(counted["kvfabric_swap_in_seconds"].values()) > 0


def test_labels_are_of_closed_vocabularies(counted: Found) -> None:
    words = {str(word) for e in (ObjectKind, Reason, Layer, Status) for word in e} | set(STAGES) | {""}
    for name in ("kvfabric_cut_requests_total", "kvfabric_tokens_total", "kvfabric_answers_total"):
        assert {word for labels in counted[name] for word in labels} <= words
    for layer, _, reason in counted["kvfabric_cut_requests_total"]:
        assert layer == LAYER_OF[Reason(reason)]


def test_a_holder_in_each_mode_says_why_it_grants_nothing(counted: Found) -> None:
    assert {mode for (mode,) in counted["kvfabric_refuses_grants"]} == {"bypassed", "draining", "not_granting"}


def test_buckets_are_cumulative_and_end_with_all() -> None:
    histogram = Histogram((1.0, 4.0))
    for value in (0.5, 1.0, 3.0, 9.0):
        histogram.add(value)
    assert list(buckets(histogram)) == [("1", 2), ("4", 3), ("+Inf", 4)]
    assert histogram.total == 13.5


# --- names, and the table of the documentation ----------------------------------------------------


def test_names_and_units_follow_the_conventions() -> None:
    assert len(FAMILY_OF) == len(FAMILIES)
    for family in FAMILIES:
        assert re.fullmatch(r"kvfabric_[a-z_]+", family.name)
        assert family.name.endswith("_total") == (family.type is Type.COUNTER), family.name
        if family.type is Type.HISTOGRAM:
            assert family.name.endswith(("_seconds", "_tokens", "_bytes")), family.name
        assert not set(family.labels) & {*COMMON_LABELS, "le"}


def table() -> dict[str, tuple[str, tuple[str, ...]]]:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(kvfabric_\w+)` \| (\w+) \| (.*?) \| .+ \|$", text, re.MULTILINE)
    return {name: (type_, tuple(re.findall(r"`(\w+)`", labels))) for name, type_, labels in rows}


def test_the_documented_table_is_what_the_code_exports() -> None:
    assert table() == {f.name: (str(f.type), f.labels) for f in FAMILIES}


def test_a_point_of_no_family_is_refused() -> None:
    assert Point("kvfabric_nothing", (), 1).name not in FAMILY_OF
