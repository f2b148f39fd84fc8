"""With Ray's own autoscaler: a node on demand, its holder within seconds, and the node back once no engine needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STORY = Path(__file__).parent / "story.py"


@pytest.mark.parametrize("version", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_node_comes_on_demand_serves_and_is_given_back_with_its_state_moved(version: int) -> None:
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
