"""Scenarios on a real cluster: the answers are those of the pure run, and processes and bytes are real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvfabric.ops.scenario.checks import load_story
from kvfabric.ops.scenario.run import json_line
from kvfabric.ops.scenario.runner import run_story

CASES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "cases").glob("*.yaml"))}
SHORT = (
    "a02-indexer-ends-early",
    "a05-lease-outlives-its-time",
    "a07-holder-restarts-in-place",
    "a09-one-rank-lacks-a-block",
    "a11-two-loads-one-pool",
    "reason-attempt-superseded",
    "reason-directory-unavailable",
    "reason-disk-faults",
    "reason-holder-lost",
    "reason-transfer-failed",
    "verb-extend",
    "verb-restart-finds-the-disk-warm",
)
"""Each for what no other does to processes, clocks, links, disks or shards."""
AT_ONCE = 6
"""Cases of one run: they share its cluster, and no test waits for more."""


def run(*arguments: str | Path, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    """``kvfabric scenario run --cluster`` in a process of its own: a process has one connection to Ray."""
    command = [sys.executable, "-c", "from kvfabric.ops.cli import main; main()", "scenario", "run", "--cluster"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s)


@cache
def outcome(*files: Path) -> tuple[int, list[dict[str, Any]]]:
    """One run: its exit status, and the JSON line of each file."""
    ran = run("--json", *files)
    assert not ran.stderr
    return ran.returncode, [json.loads(line) for line in ran.stdout.splitlines()]


def on_the_cluster(names: Sequence[str], name: str) -> dict[str, Any]:
    """The JSON line of a case, which runs with its neighbours among ``names``."""
    first = names.index(name) // AT_ONCE * AT_ONCE
    together = names[first : first + AT_ONCE]
    status, lines = outcome(*(CASES[one] for one in together))
    assert len(lines) == len(together)
    assert (status == 0) is all(line["passed"] for line in lines)
    return dict(lines[together.index(name)])


def compare(name: str, line: dict[str, Any]) -> None:
    pure = json.loads(json_line(run_story(load_story(CASES[name]))))
    assert pure.pop("cluster") is None
    cluster = line.pop("cluster")
    for here, there in zip(pure["steps"], line["steps"], strict=True):
        assert there == here
    assert line == pure
    assert len(set(cluster["holder_pids"])) == len(cluster["holder_pids"]) >= 1


@pytest.mark.parametrize("name", SHORT)
def test_a_case_gives_the_pure_runs_answers_on_a_cluster(name: str) -> None:
    compare(name, on_the_cluster(SHORT, name))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_every_case_gives_the_pure_runs_answers_on_a_cluster(name: str) -> None:
    compare(name, on_the_cluster(list(CASES), name))


def test_the_line_names_the_processes_and_bytes_that_there_were() -> None:
    # Two lives of the node that was killed, one of the other; each block of the prefix moved once.
    restarted = on_the_cluster(SHORT, "a07-holder-restarts-in-place")["cluster"]
    assert len(restarted["holder_pids"]) == 3
    assert restarted["transfer_bytes"] > 0
    # Eight shards: four holders a node.
    sharded = on_the_cluster(SHORT, "a09-one-rank-lacks-a-block")["cluster"]
    assert len(sharded["holder_pids"]) == 8
    # One node alone moves nothing.
    alone = on_the_cluster(SHORT, "a05-lease-outlives-its-time")["cluster"]
    assert len(alone["holder_pids"]) == 1
    assert alone["transfer_bytes"] == 0


@pytest.mark.long
def test_an_expectation_that_fails_on_the_cluster_is_told_and_exits_with_1(tmp_path: Path) -> None:
    text = CASES["a05-lease-outlives-its-time"].read_text()
    assert "lease_expired" in text
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text.replace("lease_expired", "holder_lost"))
    status, (line,) = outcome(wrong)
    assert status == 1
    assert line["passed"] is False
    failed = [step for step in line["steps"] if not step["passed"]]
    assert failed
    assert all(step["got"]["refused"] == "lease_expired" for step in failed)


def test_a_file_that_is_not_valid_exits_with_2_and_starts_no_cluster(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("scenario: x\n")
    ran = run(bad, timeout_s=30)
    assert ran.returncode == 2
    assert "bad.yaml" in ran.stderr
