"""The example with vLLM runs as a user would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.engines, pytest.mark.long]


def test_two_nodes_answer_alike_and_the_second_reuses_what_the_first_computed(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "vllm_two_nodes.py")]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    computed, answered = re.findall(r"^node \d \w+: +(\[\[.*\]\])$", ran.stdout, re.MULTILINE)
    assert computed == answered
    reused = [int(count) for count in re.findall(r"'reused_hit_tokens_total': (\d+)", ran.stdout)]
    assert sorted(reused) == [0, 512], "sixteen whole blocks of 32 of 532 tokens"
