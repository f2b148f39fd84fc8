"""Capacity planning: figures worked out by hand from the published geometry, and how they move."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvfabric.fabric.budget import bytes_per_token
from kvfabric.fabric.kinds import SpecError
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.presets import preset
from kvfabric.ops.cli import main
from kvfabric.ops.plan.capacity import GIB, Node, Plan, Workload, plan
from kvfabric.policies.checkpoint import checkpoint_policy

MIB = 1 << 20
HALF_OF_8192 = Workload(tokens=8192, qps=2.0)


def planned(name: str, workload: Workload = HALF_OF_8192, node: Node | None = None, checkpoint: str = "all") -> Plan:
    return plan(preset(name), workload, node or Node(), checkpoint_policy(checkpoint))


def kinds(found: Plan, what: str) -> dict[str, int]:
    of: dict[str, int] = found.plain()["kinds"][f"{what}_bytes"]
    return of


def test_full_attention_by_hand() -> None:
    # 16 tokens x 32 layers x 2 (keys, values) x 8 heads x 128 x 2 bytes: 2 MiB a block, 128 KiB a token.
    block = 16 * 32 * 2 * 8 * 128 * 2
    assert block == 2 * MIB
    found = planned("full_attention")
    assert found.resume_tokens == 4096
    assert kinds(found, "resume") == {"compressed_history": 256 * block}  # 512 MiB
    assert kinds(found, "stored") == {"compressed_history": 512 * block}
    assert kinds(found, "new") == {"compressed_history": 256 * block}
    assert found.stored_bytes_per_s == 1 * GIB  # 2 requests a second of 512 MiB each
    assert found.working_set_bytes == 600 * GIB
    assert found.prefill_tokens_per_s == 2 * 4096
    # 600 GiB on nodes of 64 need 10; then 9 of 10 requests find their 512 MiB elsewhere: 0.9 GiB/s, leased for 10 s.
    assert found.nodes == 10
    assert found.transfer_bytes_per_s == pytest.approx(0.9 * GIB)
    assert found.landing_bytes == pytest.approx(9 * GIB, abs=1)


def test_deepseek_v4_flash_by_hand() -> None:
    # Of 43 layers 21 are sparse (4 tokens an entry) and 20 heavy (128 an entry); rows of 584 bytes, indexer rows of 132.
    sparse, heavy, all_layers = 21, 20, 43
    history = 4096 // 4 * 584 * sparse + 4096 // 128 * 584 * heavy
    indexer = 4096 // 4 * 132 * sparse
    window = 128 * 584 * all_layers  # [4096 - 127, 4096) meets two blocks of 64
    # At a position that 4 divides the tails hold the overlap: 4 tokens of keys and gates in fp32, of two states each.
    tail = sparse * 4 * (512 + 128) * 2 * 2 * 4
    assert (history, indexer, window, tail) == (12_932_096, 2_838_528, 3_214_336, 860_160)
    found = planned("deepseek_v4_flash", checkpoint="ends")
    told = {"compressed_history": history, "indexer": indexer, "sliding_window": window, "uncompressed_tail": tail}
    assert kinds(found, "resume") == told
    # The whole prompt has twice the history; of window and tail it keeps its end alone.
    whole = told | {"compressed_history": 2 * history, "indexer": 2 * indexer}
    assert kinds(found, "stored") == whole
    assert kinds(found, "new") == told
    # If every position is kept (each 256 tokens), so are the window and the tail of each.
    every = kinds(planned("deepseek_v4_flash"), "stored")
    assert every == whole | {"sliding_window": 32 * window, "uncompressed_tail": 32 * tail}


def test_gpt_oss_by_hand() -> None:
    # 18 layers of each sort; 8 heads x 64 x keys and values x 2 bytes: 2,048 bytes a token and layer.
    token = 18 * 2 * 8 * 64 * 2
    found = planned("gpt_oss_120b", checkpoint="ends")
    # The window's [4096 - 127, 4096) meets 8 blocks of 16.
    assert kinds(found, "resume") == {"compressed_history": 4096 * token, "sliding_window": 8 * 16 * token}
    assert kinds(found, "stored") == {"compressed_history": 8192 * token, "sliding_window": 8 * 16 * token}
    assert found.resume_bytes == 4224 * token == 155_713_536
    assert found.working_set_bytes == 2 * 600 * 155_713_536  # blocks of 576 KiB are whole pages
    assert found.nodes_by()["memory"] == found.nodes == 3  # 174 GiB on nodes of 64


def test_a_recurrent_state_is_one_snapshot_whatever_the_length() -> None:
    found = planned("qwen3_next_80b", Workload(tokens=8192, qps=1.0), checkpoint="ends")
    snapshot = 36 * (49_152 + 2_097_152)
    assert kinds(found, "resume")["compressed_history"] == 12 * 2048 * 4096 + snapshot
    assert kinds(found, "stored")["compressed_history"] == 12 * 2048 * 8192 + snapshot


def test_output_is_stored_behind_the_prompt() -> None:
    without = planned("full_attention")
    with_output = planned("full_attention", Workload(tokens=8192, qps=2.0, output_tokens=160))
    assert with_output.new[0] - without.new[0] == 10


def test_shares_divide_what_is_resumed_between_node_link_and_disk() -> None:
    def of(**shares: Any) -> Plan:
        return planned("full_attention", Workload(tokens=8192, qps=2.0, **shares))

    assert of(routed_share=1.0).transfer_bytes_per_s == 0
    assert of(restore_share=1.0).transfer_bytes_per_s == 0
    assert of(restore_share=1.0).restore_bytes_per_s == 1 * GIB
    assert of(restore_share=0.25).restore_bytes_per_s == 0.25 * GIB


def test_whatever_is_scarcest_decides_how_many_nodes() -> None:
    work = Workload(tokens=8192, qps=2.0, reuse_s=1.0, restore_share=0.5, routed_share=1.0)
    assert planned("full_attention", work).nodes == 1
    slow_disk = planned("full_attention", work, Node(restore_bytes_per_s=100 * MIB))
    assert (slow_disk.nodes, slow_disk.nodes_by()["restore"]) == (6, 6)  # 512 MiB/s over 100
    assert slow_disk.plain()["a_node"]["restore_bytes_per_s"] == 512 * MIB / 6
    unrouted = Workload(tokens=8192, qps=2.0, reuse_s=100.0)
    slow_link = planned("full_attention", unrouted, Node(transfer_bytes_per_s=100 * MIB))
    # Memory alone wants 2. Of n nodes (n - 1) / n of 1 GiB/s is fetched: 10 nodes fetch 921.6 MiB/s, 9 would fetch 910.2 with 900.
    assert slow_link.nodes == 10


@pytest.mark.parametrize("name", ["full_attention", "gpt_oss_120b", "deepseek_v3_2"])
def test_the_working_set_is_what_a_fabric_sets_aside_for_it(name: str) -> None:
    found = planned(name, Workload(tokens=8192, qps=1.0, reuse_s=1.0, hit_share=0.0))
    assert found.working_set_bytes == 8192 * bytes_per_token(preset(name), checkpoint="all")


def test_memory_counts_whole_pages_of_slots() -> None:
    groups = [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 4097}]
    model = ModelSpec.load({"groups": groups, "shards": 2})
    found = plan(model, Workload(tokens=32, qps=1.0, reuse_s=1.0, hit_share=0.0), Node(), checkpoint_policy("all"))
    assert found.plain()["new_bytes"] == 2 * 2 * 4097
    assert found.working_set_bytes == 2 * 2 * 8192
    assert found.plain()["working_set_objects"] == 4
    assert (found.resume_bytes, found.landing_bytes, found.nodes) == (0, 0, 1)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tokens": 0}, "tokens: 0 is not from 1"),
        ({"hit_share": 1.5}, "hit_share: 1.5 is not from 0 to 1"),
        ({"qps": -1.0}, "qps: -1.0 is not from 0"),
        ({"reuse_s": float("nan")}, "reuse_s: nan"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        Workload(**{"tokens": 16, "qps": 1.0} | fields)


def test_a_node_without_memory_and_a_cluster_without_end_are_refused() -> None:
    with pytest.raises(SpecError, match="memory_bytes: 0 is not above 0"):
        Node(memory_bytes=0)
    with pytest.raises(SpecError, match="more than 1,000,000 nodes"):
        planned("full_attention", Workload(tokens=8192, qps=1e9))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def test_the_command_says_the_same_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--preset", "full_attention", "--tokens", "8192", "--qps", "2", "--restore-gib-s", "1"]
    status, out, err = run(capsys, *wanted, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == planned("full_attention", node=Node(restore_bytes_per_s=GIB)).plain()
    status, out, err = run(capsys, *wanted)
    assert (status, err) == (0, "")
    assert "each resumes at 4,096 (grid 16)" in out
    assert "nodes: 10 (by memory 10, transfer 0, restore 0); on each 60.9 GiB of memory" in out


def test_an_unknown_preset_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--preset", "gpt4")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "gpt4" in err
    assert "full_attention" in err
