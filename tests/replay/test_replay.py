"""Replays: the trace judges the real core, and the replay is judged by what the trace itself says."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from kvfabric.fabric.kinds import SpecError
from kvfabric.ops.cli import main
from kvfabric.ops.replay.bound import belady_hits
from kvfabric.ops.replay.machine import Setup, SimulatedFabric
from kvfabric.ops.replay.models import layout_of, replay_model
from kvfabric.ops.replay.play import WEIGHTS, Replay, Result
from kvfabric.ops.replay.trace import (
    BLOCK_TOKENS,
    Request,
    Trace,
    generate,
    infinite_cache_hits,
    load,
    working_set_blocks,
)
from kvfabric.policies.costs import CostGuess
from kvfabric.policies.eviction import NAMES, eviction_policy

GIB = 1 << 30
KEYS = {
    "requests", "tokens", "infinite_cache_hit_tokens", "hash_hit_tokens", "usable_hit_tokens", "effective_hit_tokens",
    "by_cause", "by_kind", "bytes_moved", "restores", "evictions", "wrong_reads", "wall_s",
}  # fmt: skip


def play(
    model: str = "full_attention",
    *,
    capacity_gib: float,
    requests: int = 150,
    trace: Trace | None = None,
    nodes: int = 1,
    disk_gib: float | None = None,
    eviction: str = "default",
    checkpoint: str = "branches",
    plan: str | None = None,
    costs: CostGuess | None = None,
) -> Result:
    trace, spec = trace or generate(requests, seed=3), replay_model(model, plan)
    layout = layout_of(spec, int(capacity_gib * GIB), checkpoint, 8192, working_set_blocks(trace) + 1)
    disk = None if disk_gib is None else int(disk_gib * GIB)
    setup = Setup(spec, nodes, layout, WEIGHTS, eviction_policy(eviction), disk, costs=costs)
    return Replay(trace, setup, checkpoint).run()


def turns(sessions: int = 6, each: int = 3, *, parting: int = 0) -> Trace:
    """Conversations in turn, prompts of 9, 13 and 17 blocks; each parts from the last so many blocks before its end."""
    requests = []
    prompts: dict[int, list[int]] = {session: [] for session in range(sessions)}
    for turn in range(each):
        for session in range(sessions):
            kept = prompts[session][: len(prompts[session]) - parting]
            first = 1000 * (session + 1) + 100 * turn
            prompts[session] = [*kept, *range(first, first + 9 + 4 * turn - len(kept))]
            tokens = len(prompts[session]) * BLOCK_TOKENS + 1
            requests.append(Request(10.0 * turn + session, tokens, 1, prompts[session]))
    return Trace("turns", requests)


@pytest.mark.parametrize("nodes", [1, 3])
def test_with_room_for_all_full_attention_reaches_the_traces_own_hits(nodes: int) -> None:
    result = play(capacity_gib=1e6, nodes=nodes)
    assert result.effective_hit_tokens == result.infinite_cache_hit_tokens > 0
    assert (result.wrong_reads, result.evictions, result.by_cause) == (0, 0, {})
    assert (result.bytes_moved > 0) is (nodes > 1)


@pytest.mark.parametrize("eviction", NAMES)
def test_what_does_not_fit_is_lost_to_eviction_and_accounted(eviction: str) -> None:
    result = play(capacity_gib=40, eviction=eviction)
    assert 0 < result.effective_hit_tokens < result.infinite_cache_hit_tokens
    assert result.evictions > 0
    assert result.wrong_reads == 0
    assert sum(result.by_cause.values()) == result.infinite_cache_hit_tokens - result.effective_hit_tokens
    assert result.by_cause["evicted"] > 0


def test_a_disk_gives_back_what_memory_could_not_keep() -> None:
    without, with_disk = play(capacity_gib=40), play(capacity_gib=40, disk_gib=1000)
    assert with_disk.restores > 0 == without.restores
    assert with_disk.effective_hit_tokens > without.effective_hit_tokens
    assert with_disk.wrong_reads == 0


def test_a_hybrid_model_loses_to_windows_what_its_hashes_promise() -> None:
    result = play("deepseek_v4_flash", capacity_gib=1e4, requests=40)
    assert result.hash_hit_tokens == result.infinite_cache_hit_tokens
    assert result.effective_hit_tokens < result.hash_hit_tokens
    assert result.by_kind["sliding_window"]["lost_tokens"] > 0
    assert result.wrong_reads == 0


def test_a_hybrid_models_losses_and_restores_are_accounted_by_kind() -> None:
    whole = play("deepseek_v4_flash", trace=turns(), capacity_gib=1e4, checkpoint="ends")
    result = play("deepseek_v4_flash", trace=turns(), capacity_gib=0.05, checkpoint="ends")
    with_disk = play("deepseek_v4_flash", trace=turns(), capacity_gib=0.05, checkpoint="ends", disk_gib=1000)
    kinds = {"compressed_history", "indexer", "sliding_window", "uncompressed_tail"}
    for one in (whole, result, with_disk):
        lost = one.infinite_cache_hit_tokens - one.effective_hit_tokens
        assert sum(one.by_cause.values()) == sum(told["lost_tokens"] for told in one.by_kind.values()) == lost
        assert one.by_kind.keys() >= kinds
        assert all(one.by_kind[kind]["held_bytes"] > 0 for kind in kinds)
        assert one.wrong_reads == 0
    assert whole.effective_hit_tokens == whole.infinite_cache_hit_tokens == 2 * 6 * 11 * BLOCK_TOKENS
    assert result.by_cause["evicted"] > 0 == result.restores
    assert with_disk.restores > 0
    assert with_disk.effective_hit_tokens > result.effective_hit_tokens


def test_what_checkpoints_leave_out_is_not_held_and_not_hit() -> None:
    names = ("all", "every:4096", "branches", "ends")
    trace = turns(parting=1)
    played = {name: play("deepseek_v4_flash", trace=trace, capacity_gib=1e4, checkpoint=name) for name in names}
    hits = {name: one.effective_hit_tokens for name, one in played.items()}
    assert hits["all"] == played["all"].infinite_cache_hit_tokens == 6 * (4096 + 6144)
    assert hits["every:4096"] == 6 * (4096 + 4096)
    assert hits["every:4096"] > hits["branches"] >= hits["ends"] == 0
    assert played["ends"].by_cause == {"window_incomplete": 6 * (4096 + 6144)}
    windows = {name: one.by_kind["sliding_window"]["held_bytes"] for name, one in played.items()}
    assert windows["all"] > windows["every:4096"] > windows["ends"] > 0
    assert len({one.by_kind["compressed_history"]["held_bytes"] for one in played.values()}) == 1


def test_a_costed_plan_restores_only_what_is_quicker_than_a_prefill() -> None:
    quick, slow = (
        play(capacity_gib=40, disk_gib=1000, plan="cost", costs=CostGuess(restore_bytes_per_s=speed))
        for speed in (1e10, 1e6)
    )
    assert quick.restores > 0
    assert slow.restores < quick.restores
    assert slow.effective_hit_tokens < quick.effective_hit_tokens
    assert slow.by_cause["deadline_exceeded"] > 0
    assert "deadline_exceeded" not in quick.by_cause


def test_a_leased_slot_that_bears_another_object_is_a_wrong_read(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SimulatedFabric.wrong_in

    def spoilt(self: SimulatedFabric, grant: object, prompt: object) -> int:
        arena = self.nodes["n0"].core.ctx.arena
        arena.table["object"][:] = b"x" * 16
        return right(self, grant, prompt)  # type: ignore[arg-type]

    monkeypatch.setattr(SimulatedFabric, "wrong_in", spoilt)
    assert play(capacity_gib=1e6, requests=60).wrong_reads > 0


def test_the_bound_is_no_less_than_any_policy_and_no_more_than_an_infinite_cache() -> None:
    trace = generate(200, seed=3)
    most = sum(infinite_cache_hits(trace))
    blocks = working_set_blocks(trace)
    assert belady_hits(trace, blocks) == most
    slots = blocks // 5
    bound = belady_hits(trace, slots)
    assert bound <= most
    block_gib = replay_model("full_attention").groups[0].block_bytes / GIB
    for eviction in NAMES:
        got = play(capacity_gib=slots * block_gib * 1.001, requests=200, eviction=eviction)
        assert got.effective_hit_tokens <= bound * BLOCK_TOKENS


def test_the_generated_trace_is_the_same_each_time_and_has_the_public_ones_traits() -> None:
    one, other = generate(300, seed=5), generate(300, seed=5)
    assert one.requests == other.requests
    assert one.requests != generate(300, seed=6).requests
    share = sum(infinite_cache_hits(one)) / sum(len(request.blocks) for request in one.requests)
    assert 0.1 < share < 0.8
    assert all(a.at_s <= b.at_s for a, b in zip(one.requests, one.requests[1:], strict=False))


GOOD = {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not one JSON object"),
        ("[]", "not a JSON object"),
        (json.dumps({**GOOD, "input_length": -1}), "input_length: -1"),
        (json.dumps({**GOOD, "hash_ids": [1, "2", 3]}), "hash_ids: not a list of whole numbers"),
        (json.dumps({**GOOD, "hash_ids": [1]}), "hash_ids: 1 ids for 1100 tokens"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "timestamp"}), "timestamp: None"),
    ],
)
def test_a_bad_line_is_named_by_number_and_skipped_only_on_demand(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join((json.dumps(GOOD), line, json.dumps(GOOD))) + "\n")
    with pytest.raises(SpecError, match=r"trace\.jsonl:2: ") as error:
        load(file)
    assert said in str(error.value)
    trace = load(file, lenient=True)
    assert (len(trace.requests), trace.bad) == (2, 1)
    assert list(trace.requests[0].blocks) == [1, 2]  # the third is not whole


def test_the_command_prints_one_json_object_with_the_named_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series = tmp_path / "series.json"
    arguments = ["replay", "--requests", "40", "--capacity-gib", "100", "--json", "--series", str(series)]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    plain = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert plain.keys() >= KEYS
    assert plain["requests"] == 40
    assert json.loads(series.read_text())["samples"][-1]["requests"] == 40


def test_the_command_takes_a_plan_and_a_disk(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", "--requests", "60", "--capacity-gib", "20", "--disk-gib", "500", "--json", "--plan", "cost"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--restore-gib-s", "0.001"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["by_cause"]["deadline_exceeded"] > 0


def test_bad_lines_are_told_counted_and_skipped_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join((json.dumps(GOOD), *["{"] * 25, json.dumps(GOOD))) + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--trace", str(file), "--json"])
    assert ended.value.code == 2
    assert "trace.jsonl:2: not one JSON object" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--trace", str(file), "--json", "--lenient"])
    told = capsys.readouterr()
    plain = json.loads(told.out)
    assert (ended.value.code, plain["requests"], plain["skipped_lines"]) == (0, 2, 25)
    assert "trace.jsonl:21" in told.err
    assert "skipped 5 more lines" in told.err


def test_a_trace_that_is_not_there_is_a_users_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--trace", "/nowhere/trace.jsonl"])
    assert ended.value.code == 2
    assert "/nowhere/trace.jsonl: cannot be read" in capsys.readouterr().err


def test_a_replay_is_the_same_each_time() -> None:
    one, other = (asdict(play(capacity_gib=40, nodes=2)) for _ in range(2))
    assert {**one, "wall_s": 0} == {**other, "wall_s": 0}
