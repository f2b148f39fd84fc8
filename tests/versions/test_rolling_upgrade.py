"""Two versions of the package on the nodes of one Ray cluster, while a fabric serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfabric.fabric import wire

from . import copies

STORY = Path(__file__).parent / "upgrade_story.py"


@pytest.mark.long
def test_nodes_are_upgraded_one_by_one_while_both_versions_serve_each_others_state(tmp_path: Path) -> None:
    later = copies.copied(tmp_path)
    copies.speaking(later, wire.SCHEMA + 1)
    copies.with_later_settings(later)
    env = os.environ | {"PYTHONPATH": str(copies.ROOT.parent)}
    command = [sys.executable, str(STORY), str(tmp_path)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["stored"]
    assert told["drained"] == 0, "what the node held before it was upgraded moved to the one that stays"
    assert told["schemas"] == told["clients"] == [wire.SCHEMA, wire.SCHEMA + 1]
    assert told["resumed_by_the_next"] == ["FULL_HIT", 64, [0, 1, 2, 3]]
    assert told["stored_by_the_next"]
    assert told["resumed_by_this"] == ["FULL_HIT", 64, [100, 101, 102, 103]]
    of_the_next = told["next"]
    assert (of_the_next["novel"], of_the_next["passed_over"]) == (7, [[], ["novel"]])
    assert of_the_next["beside_a_holder_of_the_version_before"] == ["FULL_HIT", 64]
    assert of_the_next["leases_left"] == 0, "a release too is said in the words of the older version"
    assert "vital: of spec schema 2, which nobody may pass over" in of_the_next["refused"]
