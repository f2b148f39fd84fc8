"""The examples run as a user would run them: they end well, and say nothing on the error stream."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SERVE = "serve_router.py"
ENGINES = {"vllm_two_nodes.py", "serve_llm/app.py"}
"""Those that tests/engines_vllm runs."""

TOLD = {
    "quickstart.py": [
        "launched: 2 holders",
        "node 0 has a prompt of 100 tokens: published",
        "node 1, first time: FULL_HIT, resumes at token 96 of 103",
        "moved 81920 bytes {'compressed': 49152, 'window': 32768}",
        "node 1, second time: FULL_HIT, resumes at token 96 of 103",
        "moved 0 bytes {}",
        "the right ones: True",
        "shut down",
    ],
    "handles.py": [
        "8 slots, refused None",
        "committed: refused None",
        "directory, epoch 1: group 0 at holder:",
        "FULL_HIT, 64 tokens, moved {'history': 16384, 'window': 2048}",
        "group 0: blocks [0, 1, 2, 3], the right bytes: True",
        "group 1: blocks [2, 3], the right bytes: True",
        "released: 0 leases, 0 pinned slots",
    ],
}

BY_STATE = "by state: 12 of 12 turns went where the one before was computed, 1536 tokens resumed, 0 bytes moved\n"
BY_QUEUES = re.compile(r"by queues: (\d+) of 12 turns .*, (\d+) tokens resumed, (\d+) bytes moved\n")


@pytest.mark.parametrize("name", TOLD)
def test_an_example_does_what_it_says(name: str, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, EXAMPLES / name], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    told = ran.stdout
    for words in TOLD[name]:
        assert words in told
        told = told[told.index(words) :]
    assert "False" not in ran.stdout


def test_a_serve_router_sends_each_turn_to_its_state_and_serves_own_router_does_not(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / SERVE)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr  # not checked otherwise: Serve and Ray speak there of their own ends
    assert BY_STATE in ran.stdout
    by_queues = BY_QUEUES.search(ran.stdout)
    assert by_queues is not None
    stayed, resumed, moved = map(int, by_queues.groups())
    assert stayed < 12
    assert (resumed, moved > 0) == (1536, True), "what is elsewhere is resumed from all the same, at a price"
    assert ran.stdout.endswith("shut down\n")


def test_every_example_is_tested() -> None:
    found = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py") if "__pycache__" not in path.parts}
    assert found == {*TOLD, SERVE, *ENGINES}
