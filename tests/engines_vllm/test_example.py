"""The examples with vLLM run as a user would run them."""

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


def test_serve_llm_sends_requests_where_their_state_is_and_a_burst_shares_it(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "serve_llm" / "app.py")]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    told = re.findall(
        r"^(by state|by queues|burst): (.*)\n +(\d+) blocks moved, (\d+) tokens .*; (\d+) of (\d+) .* right$",
        ran.stdout,
        re.MULTILINE,
    )
    assert [name for name, *_ in told] == ["by state", "by queues", "burst"], ran.stdout
    assert all(right == asked for *_, right, asked in told), ran.stdout
    (_, stayed, moved, reused, _, _), by_queues, burst = told
    assert stayed.startswith("12 of 12 turns and 4 of 4 chats "), ran.stdout
    assert (int(moved), int(reused)) == (0, 0), "all of it lies in the engines' own memory"
    assert int(by_queues[1].split()[0]) < 12, "without a ranking, turns leave their node,"
    assert int(by_queues[2]) > 0, "and what they need is moved,"
    assert int(by_queues[3]) == 32 * int(by_queues[2]), "and reused"
    assert burst[1].startswith("2 nodes "), ran.stdout
    assert (int(burst[2]), int(burst[3])) == (8, 256), "the system prompt, to the node that had not computed it"
