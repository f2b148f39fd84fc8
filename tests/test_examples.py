"""The examples run as a user would run them: they end well, and say nothing on the error stream."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SERVE = "serve_router.py"
SERVE_LLM = "serve_llm/app.py"

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


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # ray.serve.config
def test_a_serve_router_without_a_fabric_offers_every_replica() -> None:
    spec = importlib.util.spec_from_file_location("serve_router", EXAMPLES / SERVE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    router = object.__new__(example.StateRouter)
    router.initialize_state(fabric="there-is-none")
    request = SimpleNamespace(args=[[1, 2, 3]], routing_context=SimpleNamespace(should_backoff=False))
    replicas = [SimpleNamespace(node_id="a"), SimpleNamespace(node_id="b")]
    assert asyncio.run(router.choose_replicas(replicas, request)) == [replicas]
    assert request.routing_context.should_backoff


@pytest.mark.long
def test_two_replicas_of_a_language_model_share_a_fabric_and_answer_as_without_one(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / SERVE_LLM)], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stderr
    conversations = re.search(
        r"conversations: 4 of 4 turns stayed on their node; 6 of 6 answers right, (\d+) tokens resumed, 0 bytes moved\n",
        ran.stdout,
    )
    assert conversations is not None, ran.stdout
    assert int(conversations[1]) == 512, "each turn resumes at the last whole chunk of the one before"
    burst = re.search(
        r"burst: 2 nodes served one system prompt; 7 of 7 answers right, (\d+) tokens resumed, (\d+) bytes moved\n",
        ran.stdout,
    )
    assert burst is not None, ran.stdout
    assert (int(burst[1]), int(burst[2]) > 0) == (6 * 256, True), "the other node resumes from what is fetched"
    assert ran.stdout.endswith("shut down\n")


def test_every_example_is_tested() -> None:
    found = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py") if "__pycache__" not in path.parts}
    assert found == {*TOLD, SERVE, SERVE_LLM, "vllm_two_nodes.py"}  # the last: tests/engines_vllm
