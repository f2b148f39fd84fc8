"""The examples run as a user would run them: they end well, and say nothing on the error stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

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


@pytest.mark.parametrize("name", TOLD)
def test_an_example_does_what_it_says(name: str, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, EXAMPLES / name], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    told = ran.stdout
    for words in TOLD[name]:
        assert words in told
        told = told[told.index(words) :]
    assert "False" not in ran.stdout


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(TOLD)
