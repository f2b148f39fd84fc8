"""The written cases: all pass, each expectation can fail, and every reason that verbs can cause is among them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvfabric.fabric.kinds import Reason
from kvfabric.ops.scenario.checks import load_story
from kvfabric.ops.scenario.run import json_line
from kvfabric.ops.scenario.runner import run_story
from kvfabric.ops.scenario.story import Fault

from .stage import Watched

CASES = sorted((Path(__file__).parents[1] / "cases").glob("*.yaml"))

NOT_BY_VERBS = {
    Reason.VERSION_CHANGED: "pins forbid that a leased slot changes before its lease has expired",
    Reason.QUOTA: "no tenant limits in a scenario",
    Reason.DRAINING: "no drain",
    Reason.NOT_GRANTING: "the supervisor lives and is reached by all",
    Reason.BYPASSED: "no bypass",
    Reason.QUARANTINED: "a quarantined slot is seen as room that is not there",
}


def expectations(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Every expect of a file, also inside parallel, in the file's own data."""
    found = []
    for step in data["steps"]:
        found += [inner["expect"] for inner in step.get("parallel", [step]) if "expect" in inner]
    return found


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_a_case_passes_and_no_invariant_breaks_on_the_way(path: Path) -> None:
    result = run_story(load_story(path), Watched)
    failed = [(s.line, s.verb, s.expected, s.got) for s in result.steps if not s.passed]
    assert not failed
    assert result.passed


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_a_case_gives_the_same_answers_each_time(path: Path) -> None:
    story = load_story(path)
    assert json_line(run_story(story)) == json_line(run_story(story))


WRONG: dict[str, Any] = {
    "status": lambda s: "MISS" if s != "MISS" else "FULL_HIT",
    "tokens": lambda n: n + 1,
    "hash_tokens": lambda n: n + 1,
    "cause": lambda c: {"reason": "quota"},
    "also": lambda names: [*names, "another"],
    "ok": lambda ok: not ok,
    "refused": lambda r: "quota",
    "replay_from": lambda start: None if start is not None else 0,
}


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_no_expectation_of_a_case_holds_by_itself(path: Path, tmp_path: Path) -> None:
    """Every expected field, made wrong, fails its step."""
    data = yaml.safe_load(path.read_text())
    groups = [g["name"] for g in data["model"]["groups"]]
    for expect in expectations(data):
        for name, value in expect.items():
            expect[name] = groups if name == "also" and value != groups else WRONG[name](value)
    wrong = tmp_path / path.name
    wrong.write_text(yaml.safe_dump(data))
    result = run_story(load_story(wrong))
    expecting = [s for s in result.steps if s.expected is not None and s.verb != "check"]
    assert expecting
    assert not any(s.passed for s in expecting), [(s.step, s.expected, s.got) for s in expecting if s.passed]


def test_every_reason_that_verbs_can_cause_is_in_a_case() -> None:
    told = set()
    for path in CASES:
        for expect in expectations(yaml.safe_load(path.read_text())):
            told |= {expect.get("refused"), (expect.get("cause") or {}).get("reason")}
    assert {r for r in Reason if r not in NOT_BY_VERBS} <= told
    assert not told & set(NOT_BY_VERBS)


def test_every_fault_and_status_is_in_a_case() -> None:
    faults, statuses, hows, verbs = set(), set(), set(), set()
    for path in CASES:
        data = yaml.safe_load(path.read_text())
        for step in [inner for s in data["steps"] for inner in s.get("parallel", [s])]:
            verbs |= set(step)
            faults |= {step.get("inject", {}).get("fault")}
            statuses |= {step.get("expect", {}).get("status")}
            hows |= {(c["how"], c.get("where")) for c in [step.get("corrupt")] if c}
    assert set(Fault) <= faults
    assert {"FULL_HIT", "PARTIAL_HIT", "PENDING", "INVALID", "MISS"} <= statuses
    assert {"flip", "torn", "truncate"} <= {how for how, _ in hows}
    assert {"memory", "disk"} <= {where for _, where in hows}
    assert {"store", "extend", "begin", "commit", "abort", "quiesce", "drop", "swap_out", "swap_in"} <= verbs
    assert {"corrupt", "update_weights", "set_abi", "acquire", "read", "renew", "release", "probe"} <= verbs
    assert {"advance", "kill", "restart", "partition", "heal", "inject", "check"} <= verbs


def test_a_wrong_expectation_inside_parallel_fails_the_step(tmp_path: Path) -> None:
    path = next(p for p in CASES if p.stem.startswith("a11"))
    data = yaml.safe_load(path.read_text())
    good = copy.deepcopy(data)
    data["steps"][2]["parallel"][1]["expect"]["tokens"] = 48
    for name, plain, passes in (("good", good, True), ("bad", data, False)):
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(plain))
        result = run_story(load_story(file))
        assert result.steps[2].passed is passes
        assert result.passed is passes
