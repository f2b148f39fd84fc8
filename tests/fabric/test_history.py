"""What happened to a chain is remembered, told without tokens, and replays with the same answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from kvfabric.fabric.history import chain_of, history_of
from kvfabric.fabric.messages import Release
from kvfabric.fabric.model import ModelSpec
from kvfabric.ops.record.story import dumped, scenario
from kvfabric.ops.scenario.run import run_files

from .many_holders import Holders

MODEL = ModelSpec.model_validate(
    {
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 64},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 16, "window_tokens": 16, "block_bytes": 64},
        ]
    }
)


def lived() -> tuple[Holders, int]:
    """Two holders; a chain is stored, fetched, branched from, swapped out, restored and partly dropped."""
    cluster = Holders(MODEL, {"n0": (0,), "n1": (0,)})
    cluster.store("n0", range(70))
    cluster.store("n0", range(5000, 5070))  # another chain
    lease = cluster.granted("n1", range(70)).lease
    cluster.pass_time(1.5)
    cluster.ask("n1", Release(cluster.name(), lease, 64))
    cluster.pass_time(0.01)
    branch = cluster.granted("n1", [*range(40), *range(900, 930)]).lease
    cluster.ask("n1", Release(cluster.name(), branch, None))
    cluster.pass_time(0.01)
    cluster.swap_out("n0", range(70))
    cluster.pass_time(0.01)
    cluster.drop("n1", range(70))
    cluster.pass_time(0.01)
    cluster.granted("n0", range(70))
    return cluster, lease


def told(cluster: Holders, lease: int) -> dict[str, list[dict[str, Any]]]:
    prompt = chain_of(cluster.cores["n1"].ctx, lease=lease)
    assert prompt is not None
    for core in cluster.cores.values():
        core.ctx.now = cluster.now
    return {name: history_of(core.ctx, dict(prompt.keys)) for name, core in cluster.cores.items()}


def test_a_recorded_chain_replays_with_the_answers_that_were_given(tmp_path: Path) -> None:
    cluster, lease = lived()
    text = dumped(scenario(MODEL, told(cluster, lease), "recorded"))
    file = tmp_path / "recorded.yaml"
    file.write_text(text)
    verbs = [next(iter(step)) for step in yaml.safe_load(text)["steps"]]
    assert verbs == [
        *("store", "acquire", "advance", "release", "acquire", "release", "swap_out", "drop", "drop", "acquire")
    ]
    outcome = run_files([file])
    assert outcome.problems == []
    assert [step.got for result in outcome.results for step in result.steps if not step.passed] == []
    wrong = text.replace("tokens: 64, hash_tokens", "tokens: 48, hash_tokens")
    assert wrong != text
    file.write_text(wrong)
    assert run_files([file]).status == 1


def test_a_chain_is_found_by_a_digest_too_and_others_stay_out() -> None:
    cluster, lease = lived()
    prompt = chain_of(cluster.cores["n1"].ctx, lease=lease)
    assert prompt is not None
    digest = prompt.keys[0][1][32:64]
    found = chain_of(cluster.cores["n0"].ctx, digest=digest)
    assert found is not None
    assert found.keys == prompt.keys
    assert chain_of(cluster.cores["n0"].ctx, digest=bytes(32)) is None
    assert chain_of(cluster.cores["n0"].ctx, lease=12345) is None
    stored = [event for event in told(cluster, lease)["n0"] if event["what"] == "stored"]
    assert [event["objects"] for event in stored] == [[[0, 0, 0, [0, 1, 2, 3]], [1, 0, 0, [0, 1, 2, 3]]]]


def test_what_is_told_bears_neither_tokens_nor_digests() -> None:
    cluster, lease = lived()
    text = json.dumps(told(cluster, lease))
    assert "stored" in text
    prompt = chain_of(cluster.cores["n1"].ctx, lease=lease)
    assert prompt is not None
    for blob in (prompt.keys[0][1], prompt.namespace):
        assert blob[:8].hex() not in text
