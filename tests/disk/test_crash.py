"""Kill -9 at random points of writing: no wrong byte, no lost byte, nothing that stood is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run_trials(folder: Path, trials: int, seed: int, timeout_s: float) -> dict[str, int]:
    script = Path(__file__).with_name("crash_trials.py")
    run = subprocess.run(
        [sys.executable, script, folder, str(trials), str(seed)], capture_output=True, text=True, timeout=timeout_s
    )
    assert run.returncode == 0, run.stderr
    counts: dict[str, int] = json.loads(run.stdout)
    return counts


def judge(counts: dict[str, int], trials: int) -> None:
    assert counts["killed"] == counts["trials"] == trials
    wrong = ("wrong_blocks", "lost_bytes", "uncounted_bytes", "stood_and_lost", "deleted_and_back", "refused_headers")
    assert {name: counts[name] for name in wrong} == dict.fromkeys(wrong, 0)
    # The trials were worth something: most cut into an act, and there was something to sweep and something to read.
    assert counts["cut_in_an_act"] > trials // 4
    assert counts["swept"] > trials // 20
    assert counts["blocks"] > 10 * trials


@pytest.mark.faults
def test_a_hundred_kills_at_random_points_leave_whole_extents_or_nothing(tmp_path: Path) -> None:
    judge(run_trials(tmp_path, 100, 1, 240.0), 100)


@pytest.mark.long
@pytest.mark.faults
def test_a_thousand_kills_at_random_points_leave_whole_extents_or_nothing(tmp_path: Path) -> None:
    judge(run_trials(tmp_path, 1000, 2, 3000.0), 1000)
