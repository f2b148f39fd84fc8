"""A file that is not valid is refused with the file, the line and the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfabric.ops.scenario.checks import load_story
from kvfabric.ops.scenario.source import VALUES_MAX, InvalidFile

HEAD = """\
scenario: s
model:
  weights: v1
  shards: 2
  groups:
    - {name: kv, kind: compressed_history, block_tokens: 16}
    - {name: ssm, kind: compressed_history, form: state, grid_tokens: 32}
nodes: {n0: {}, n1: {capacity: {kv: 100}}}
steps:
  - store: {at: n0, prompt: P, tokens: 64}
"""
"""Ten valid lines; a step of a test stands on line 11."""

STEPS = {
    "stor: {at: n0, prompt: P, tokens: 5}": ("steps[1].stor", "unknown verb"),
    "store: {at: n0, prompt: P, tokenz: 5, tokens: 5}": ("steps[1].store.tokenz", "unknown field"),
    "store: {at: n0, prompt: P}": ("steps[1].store.tokens", "is missing"),
    "store: {at: n9, prompt: P, tokens: 5}": ("steps[1].store.at", "no node 'n9'"),
    "store: {at: n0, prompt: P, tokens: '5'}": ("steps[1].store.tokens", "integer"),
    "store: {at: n0, prompt: P, tokens: true}": ("steps[1].store.tokens", "integer"),
    "store: {at: n0, prompt: P, tokens: -1}": ("steps[1].store.tokens", "greater than or equal to 0"),
    "store: {at: n0, prompt: {like: P, share: 3}, tokens: 5}": ("steps[1].store.prompt.then", "is missing"),
    "store: {at: n0, prompt: P, tokens: 5, shards: [2]}": ("steps[1].store.shards[0]", "shards 0 to 1"),
    "store: {at: n0, prompt: P, tokens: 5, groups: {xx: {blocks: [1]}}}": ("steps[1].store.groups.xx", "no group"),
    "store: {at: n0, prompt: P, tokens: 5, groups: {kv: {blocks: [1], tokens: [0, 4]}}}": (
        "steps[1].store.groups.kv",
        "one of blocks, tokens and positions",
    ),
    "store: {at: n0, prompt: P, tokens: 5, groups: {kv: {positions: [16]}}}": (
        "steps[1].store.groups.kv.positions",
        "blocks or tokens",
    ),
    "store: {at: n0, prompt: P, tokens: 5, adapter: a}": ("steps[1].store.adapter", "mapping"),
    "store: {at: n0, at: n0, prompt: P, tokens: 5}": ("steps[1].store.at", "stands twice"),
    "drop: {at: n0, prompt: P, group: xx, blocks: [1]}": ("steps[1].drop.group", "no group 'xx'"),
    "drop: {at: n0, prompt: P, group: ssm, positions: [32, 33]}": ("steps[1].drop.positions[1]", "multiples of 32"),
    "drop: {at: n0, prompt: P, group: ssm, blocks: [1]}": ("steps[1].drop.blocks", "positions"),
    "extend: {at: n0, prompt: P, tokens: [64, 32]}": ("steps[1].extend.tokens", "behind"),
    "swap_out: {at: n0, prompt: P, groups: [xx]}": ("steps[1].swap_out.groups[0]", "no group"),
    "corrupt: {at: n0, prompt: P, group: kv, how: flip, where: disk}": ("steps[1].corrupt", "block or position"),
    "corrupt: {at: n0, prompt: P, group: kv, block: 1, how: bend, where: disk}": ("steps[1].corrupt.how", "'flip'"),
    "read: {lease: L1}": ("steps[1].read.lease", "no acquire before this one"),
    "commit: {as: s1}": ("steps[1].commit.as", "no begin before this one"),
    "acquire: {at: n0, prompt: P, tokens: 5, wait: false, wait_s: 3}": ("steps[1].acquire", "contradict"),
    "acquire: {at: n0, prompt: P, tokens: 5, lease_s: 0}": ("steps[1].acquire.lease_s", "greater than 0"),
    "advance: {seconds: -1}": ("steps[1].advance.seconds", "greater than or equal to 0"),
    "advance: {seconds: .inf}": ("steps[1].advance.seconds", "finite"),
    "kill: {node: n7}": ("steps[1].kill.node", "no node"),
    "partition: {between: [n0, n0]}": ("steps[1].partition.between", "two different"),
    "partition: {between: [n0]}": ("steps[1].partition.between", "at least 2"),
    "inject: {at: n0, fault: nope}": ("steps[1].inject.fault", "'transfer_fail'"),
    "inject: {at: n0, fault: load_fail}": ("steps[1].inject", "needs a group"),
    "inject: {at: n0, fault: disk_full, group: kv}": ("steps[1].inject", "belong to load_fail"),
    "set_abi: {at: n0, group: kv}": ("steps[1].set_abi", "one of layout"),
    "check: {metric: {hits: 1}}": ("steps[1].check.metric.hits", "unknown field"),
    "check: {}": ("steps[1].check", "one of pins"),
    "check:": ("steps[1].check", "a mapping is expected"),
    "parallel: {}": ("steps[1].parallel", "a list of steps"),
    "parallel: [{parallel: []}]": ("steps[1].parallel[0].parallel", "unknown verb"),
    "17": ("steps[1]", "one verb"),
}


def problems_of(path: Path) -> list[tuple[int, str, str]]:
    with pytest.raises(InvalidFile) as refused:
        load_story(path)
    assert all(problem.file == str(path) for problem in refused.value.problems)
    return [(problem.line, problem.field, problem.reason) for problem in refused.value.problems]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "story.yaml"
    path.write_text(text)
    return path


def test_the_head_alone_is_valid(tmp_path: Path) -> None:
    story = load_story(write(tmp_path, HEAD))
    assert [step.verb for step in story.steps] == ["store"]


@pytest.mark.parametrize("step", STEPS)
def test_a_bad_step_is_named(step: str, tmp_path: Path) -> None:
    field, reason = STEPS[step]
    found = problems_of(write(tmp_path, f"{HEAD}  - {step}\n"))
    assert any(line == 11 and where == field and reason in why for line, where, why in found), found


EXPECTS = {
    "acquire: {at: n0, prompt: P, tokens: 70}\n    expect: {state: FULL_HIT}": ("expect.state", "unknown field"),
    "acquire: {at: n0, prompt: P, tokens: 70}\n    expect: {status: HIT}": ("expect.status", "'FULL_HIT'"),
    "acquire: {at: n0, prompt: P, tokens: 70}\n    expect: {cause: {reason: lost}}": (
        "expect.cause.reason",
        "'evicted'",
    ),
    "acquire: {at: n0, prompt: P, tokens: 70}\n    expect: {cause: {group: xx}}": ("expect.cause.group", "no group"),
    "acquire: {at: n0, prompt: P, tokens: 70}\n    expect: {also: [xx]}": ("expect.also[0]", "no group"),
    "acquire: {at: n0, prompt: P, tokens: 70}\n    expect: {ok: true}": ("expect.ok", "unknown field"),
    "store: {at: n0, prompt: P, tokens: 70}\n    expect: {refused: lost}": ("expect.refused", "'evicted'"),
    "store: {at: n0, prompt: P, tokens: 70}\n    expect: {tokens: 64}": ("expect.tokens", "unknown field"),
    "store: {at: n0, prompt: P, tokens: 70}\n    expects: {ok: true}": ("", "one verb"),
}


@pytest.mark.parametrize("step", EXPECTS)
def test_a_bad_expectation_is_named(step: str, tmp_path: Path) -> None:
    field, reason = EXPECTS[step]
    found = problems_of(write(tmp_path, f"{HEAD}  - {step}\n"))
    where = f"steps[1].{field}".rstrip(".")
    line = 12 if field else 11
    assert any(at == line and name == where and reason in why for at, name, why in found), found


MODELS = {
    "- {name: kv, kind: compressed, block_tokens: 16}": ("model.groups[0].kind", "'compressed_history'"),
    "- {name: kv, kind: compressed_history}": ("model.groups[0].block_tokens", "needs it"),
    "- {name: kv, kind: compressed_history, block_tokens: 15, ratio: 4}": ("model.groups[0].ratio", "does not divide"),
    "- {name: kv, kind: compressed_history, block_tokens: 16, blocks: 1}": ("model.groups[0].blocks", "unknown field"),
    "- {name: i, kind: indexer, of: kv, block_tokens: 16}": ("model.groups[0].of", "there is no group"),
    "- {name: d, kind: disk_prefix, block_tokens: 16}": ("model.groups[0].kind", "never declared"),
    "- {name: w, kind: sliding_window, block_tokens: 16, window_tokens: 64, keep_tokens: 32}": (
        "model.groups[0].keep_tokens",
        "less than a resume at any position needs",
    ),
}


@pytest.mark.parametrize("group", MODELS)
def test_a_bad_model_is_named(group: str, tmp_path: Path) -> None:
    field, reason = MODELS[group]
    text = f"scenario: s\nmodel:\n  groups:\n    {group}\nnodes: {{n0: {{}}}}\nsteps: []\n"
    if "keep_tokens" in group:
        # Short prompts are hit all the same: only a spec that no prompt of any length could hit is refused.
        assert load_story(write(tmp_path, text)).model.groups[0].keep_tokens == 32
        text = text.replace("keep_tokens: 32", "keep_tokens: 15")
    found = problems_of(write(tmp_path, text))
    assert any(line == 4 and where == field and reason in why for line, where, why in found), found


def test_all_problems_of_a_file_are_told_in_its_order(tmp_path: Path) -> None:
    steps = "  - stor: {}\n  - read: {lease: L}\n  - store: {at: n0, prompt: P, tokens: x}\n"
    assert [line for line, _, _ in problems_of(write(tmp_path, HEAD + steps))] == [11, 12, 13]


def test_nodes_are_judged(tmp_path: Path) -> None:
    text = HEAD.replace("n1: {capacity: {kv: 100}}", "directory: {}, n1: {capacity: {xx: 1}}")
    fields = {field for _, field, _ in problems_of(write(tmp_path, text))}
    assert fields == {"nodes.directory", "nodes.n1.capacity.xx"}


def test_host_memory_is_of_all_groups_and_all_nodes(tmp_path: Path) -> None:
    for nodes, fields in (
        ("n0: {host_memory: {xx: 1}}", {"nodes.n0.host_memory.xx", "nodes.n0.host_memory", "nodes"}),
        ("n0: {host_memory: {kv: 4}}", {"nodes.n0.host_memory", "nodes"}),
    ):
        text = HEAD.replace("n0: {}", nodes)
        assert {field for _, field, _ in problems_of(write(tmp_path, text))} == fields


def test_slabs_are_of_all_nodes_and_need_more_than_a_slot_each(tmp_path: Path) -> None:
    for nodes, fields in (
        ("n0: {slabs: true}, n1: {}", {"nodes"}),
        ("n0: {slabs: 1}", {"nodes.n0.slabs"}),
        ("n0: {capacity: {kv: 1, ssm: 1}, slabs: true}", {"nodes.n0.capacity"}),
    ):
        text = HEAD.replace("n0: {}, n1: {capacity: {kv: 100}}", nodes)
        assert {field for _, field, _ in problems_of(write(tmp_path, text))} == fields
    enough = HEAD.replace("n0: {}, n1: {capacity: {kv: 100}}", "n0: {capacity: {kv: 2, ssm: 1}, slabs: true}")
    assert load_story(write(tmp_path, enough)).nodes["n0"].slabs


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "empty"),
        ("- 1\n", 1, "a mapping is expected"),
        ("scenario: s\nmodel: [\n", 3, "not valid YAML"),
        ("scenario: s\n---\nscenario: t\n", 2, "another document"),
        ("scenario: |\n  two\n  lines\nmodel: {}\nnodes: {}\nsteps: []\n", 1, "one line"),
        ("scenario: s\nscenario: t\n", 2, "stands twice"),
    ],
)
def test_what_is_no_scenario_at_all_is_refused(text: str, line: int, reason: str, tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, text))
    assert any(at == line and reason in why for at, _, why in found), found


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in problems_of(tmp_path / "nothing.yaml")[0][2]
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in problems_of(binary)[0][2]


def test_aliases_that_blow_up_are_refused(tmp_path: Path) -> None:
    layers = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    layers += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 8)]
    assert VALUES_MAX < 10**7
    assert "too large" in problems_of(write(tmp_path, "\n".join(layers)))[0][2]


def test_no_tag_makes_anything_but_plain_data(tmp_path: Path) -> None:
    mark = tmp_path / "made"
    text = HEAD + f"  - store: !!python/object/apply:pathlib.Path.touch [!!python/name:x {mark}]\n"
    problems_of(write(tmp_path, text))
    assert not mark.exists()
