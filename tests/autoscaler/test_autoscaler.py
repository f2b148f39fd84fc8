"""With Ray's own autoscaler: a node on demand and under pressure, and none taken with what is worth keeping on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STORY = Path(__file__).parent / "story.py"


@pytest.mark.parametrize("version", [1, pytest.param(2, marks=pytest.mark.long)])
def test_nodes_come_on_demand_and_under_pressure_and_go_idle_or_preempted_with_their_state_moved(version: int) -> None:
    ended = subprocess.run(
        [sys.executable, str(STORY), str(version)],
        capture_output=True,
        text=True,
        timeout=240.0,
        check=False,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["on_the_new_node"]
    assert told["served"][1:] == ["FULL_HIT", 64]
    assert (told["drain"]["why"], told["drain"]["moved_objects"], told["drain"]["dropped_objects"]) == ("idle", 4, 0)
    assert told["kept"] == ["FULL_HIT", 64]
    assert told["bytes"] == [1, 2, 3, 4]
    assert told["holders_left"] == 1
    assert (told["refused"], told["requested_nodes"], told["served_there"]) == ("admission_limit", 2, True)
    drained = told["preempted"]
    assert (drained["why"], drained["moved_objects"], drained["dropped_objects"]) == ("ray", 4, 0)
    assert told["kept_of_preempted"] == ["FULL_HIT", 64, {}], "it lies on the node that stays"
