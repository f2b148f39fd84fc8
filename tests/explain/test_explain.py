"""``kvfabric explain``: what it says of a story is what lengthens the hit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvfabric.fabric.kinds import FabricError
from kvfabric.ops.cli import main
from kvfabric.ops.explain.sources import tokens_from

STORY = """\
scenario: an indexer ends early
model:
  weights: v1
  groups:
    - {name: kv, kind: compressed_history, block_tokens: 16}
    - {name: idx, kind: indexer, of: kv, block_tokens: 16}
nodes: {n0: {}, n1: {}}
steps:
  - store: {at: n0, prompt: P, tokens: 64, groups: {kv: {tokens: [0, 64]}, idx: {tokens: [0, 32]}}}
  - acquire: {at: n1, prompt: P, tokens: 70}
  - store: {at: n0, prompt: P, tokens: 64, groups: {idx: {tokens: [32, 64]}}}
  - probe: {at: n1, prompt: P, tokens: 70}
"""


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.yaml"
    path.write_text(STORY)
    return path


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *arguments, "--json"])
    assert ended.value.code == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_each_group_is_told_up_to_where_it_could_serve(story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, str(story), "--step", "2")
    assert [(limit["group"], limit["serves_tokens"]) for limit in found["limits"]] == [("kv", 64), ("idx", 32)]
    assert found["tokens"] == 32
    assert found["cause"]["reason"] == "index_absent"


PLANNED = """\
scenario: a plan by cost
model:
  weights: v1
  plan: cost
  replay: true
  groups:
    - {name: kv, kind: compressed_history, block_tokens: 16}
    - {name: swa, kind: sliding_window, block_tokens: 16, window_tokens: 20}
nodes: {n0: {}}
steps:
  - store: {at: n0, prompt: P, tokens: 64}
  - drop: {at: n0, prompt: P, group: swa}
  - acquire: {at: n0, prompt: P, tokens: 70}
"""


def test_a_plan_by_cost_tells_what_it_weighed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "planned.yaml"
    path.write_text(PLANNED)
    found = explained(capsys, str(path))
    assert (found["tokens"], found["replay_from"]) == (64, 44)
    taken, nothing = found["plan"][0], next(way for way in found["plan"] if way["tokens"] == 0)
    assert (taken["tokens"], taken["replay_from"]) == (64, 44)
    assert taken["replay_s"] == pytest.approx(20 / 5000)
    assert nothing["prefill_s"] == pytest.approx(70 / 5000)
    with pytest.raises(SystemExit):
        main(["explain", str(path)])
    told = capsys.readouterr().out
    assert "windows and tails are replayed from 44" in told
    assert "taken" in told


def test_making_usable_what_it_names_lengthens_the_hit_to_where_it_says(
    story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = explained(capsys, str(story), "--step", "2")
    assert before["lengthen_groups"] == ["idx"]
    after = explained(capsys, str(story))
    assert after["tokens"] == before["lengthen_to_tokens"] == 64
    assert after["lengthen_groups"] == []


def test_ranges_tell_form_tier_holder_version_and_revision(story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, str(story), "--step", "2", "--by-range")
    rows = [(s["group"], s["from_token"], s["to_token"], s["form"], s["tier"]) for s in found["stretches"]]
    assert rows == [
        ("kv", 0, 64, "compressed", "memory"),
        ("idx", 0, 32, "indexed", "memory"),
        ("idx", 32, 64, "absent", ""),
    ]
    there = found["stretches"][0]
    assert (there["holder"], there["incarnation"], there["revision"]) == ("n0", 1, 0)
    assert there["versions"] is not None


def test_a_step_that_asks_for_nothing_is_refused_with_those_that_do(
    story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(story), "--step", "1"])
    assert ended.value.code == 2
    assert "these do: 2, 4" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1,2,3", "1 2 3", "[1, 2, 3]"])
def test_tokens_come_from_the_line_or_a_file(text: str, tmp_path: Path) -> None:
    assert tokens_from(text) == [1, 2, 3]
    path = tmp_path / "tokens"
    path.write_text(text + "\n")
    assert tokens_from(str(path)) == [1, 2, 3]


def test_a_line_of_ids_may_be_longer_than_a_name_of_a_file() -> None:
    assert tokens_from(",".join(map(str, range(5000)))) == list(range(5000))


@pytest.mark.parametrize(
    "text", ["1,x", "", "[1, null]", "[1e999]", "[1.5]", "[true]", "[" * 100_000, "1," * 5000 + "x"]
)
def test_what_is_no_token_ids_is_refused_in_a_short_line(text: str) -> None:
    with pytest.raises(FabricError, match="token ids") as refused:
        tokens_from(text)
    assert len(str(refused.value)) < 200


def test_a_file_that_is_no_text_is_no_file_of_ids(tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(b"\xff\xfe")
    with pytest.raises(FabricError, match="token ids"):
        tokens_from(str(tmp_path / "ids"))
