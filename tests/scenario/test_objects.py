"""Which objects a verb is about, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvfabric.fabric.model import GroupSpec, ModelSpec
from kvfabric.ops.scenario.content import content_of, tokens_of
from kvfabric.ops.scenario.objects import extended, selected, stored, within
from kvfabric.ops.scenario.story import Branch, Selected, Selection, Story
from kvfabric.ops.scenario.world import seats_of, slots_needed

BLOCKS = GroupSpec.model_validate({"name": "b", "kind": "compressed_history", "block_tokens": 16})
STATE = GroupSpec.model_validate({"name": "s", "kind": "compressed_history", "form": "state", "grid_tokens": 32})


@pytest.mark.parametrize(
    ("start", "end", "blocks", "snapshots"),
    [
        (0, 64, [0, 1, 2, 3], [0, 1]),
        (1, 64, [1, 2, 3], [0, 1]),
        (16, 47, [1], [0]),
        (17, 31, [], []),
        (32, 64, [2, 3], [1]),
        (40, 40, [], []),
        (0, 15, [], []),
    ],
)
def test_a_block_counts_only_if_it_lies_wholly_inside(
    start: int, end: int, blocks: list[int], snapshots: list[int]
) -> None:
    """A snapshot stands for the tokens before its position: (from, to]."""
    assert list(within(BLOCKS, start, end)) == blocks
    assert list(within(STATE, start, end)) == snapshots


def test_positions_beyond_the_tokens_are_ignored() -> None:
    assert selected(STATE, Selected(positions=[32, 64, 96]), 70) == (0, 1)
    assert selected(BLOCKS, Selected(blocks=[0, 3, 4, 9]), 79) == (0, 3)
    assert selected(BLOCKS, Selected(tokens=[0, 1000]), 40) == (0, 1)
    assert selected(BLOCKS, Selected(), 40) == (0, 1)


def model(*groups: dict[str, object], **fields: object) -> ModelSpec:
    return ModelSpec.load({"groups": list(groups), **fields})


def test_a_store_publishes_whole_blocks_and_a_snapshot_at_each_grid_position() -> None:
    spec = model(
        {"name": "kv", "kind": "compressed_history", "block_tokens": 16},
        {"name": "ssm", "kind": "compressed_history", "form": "state", "grid_tokens": 24},
    )
    assert spec.grid_tokens == 48
    picked = stored(spec, 100, None)
    assert [(p.group, p.indices) for p in picked] == [(0, (0, 1, 2, 3, 4, 5)), (1, (1, 3))]
    named = stored(spec, 100, {"ssm": Selection(positions=[24, 96], revision=3), "kv": Selection(blocks=[5, 6])})
    assert [(p.group, p.indices, p.revision) for p in named] == [(0, (5,), 0), (1, (0, 3), 3)]


def test_a_store_keeps_what_keep_tokens_leaves_but_all_that_is_named() -> None:
    spec = model(
        {"name": "kv", "kind": "compressed_history", "block_tokens": 16},
        {"name": "w", "kind": "sliding_window", "block_tokens": 16, "window_tokens": 17, "keep_tokens": 40},
        {"name": "s", "kind": "sliding_window", "form": "state", "grid_tokens": 32, "keep_tokens": 32},
    )
    # 128 - 40 = 88 lies inside block 5; a snapshot's last token must lie within [96, 128)
    assert [(p.group, p.indices) for p in stored(spec, 128, None)] == [(0, tuple(range(8))), (1, (6, 7)), (2, (3,))]
    assert stored(spec, 128, {"w": Selection(tokens=[0, 64])})[0].indices == (0, 1, 2, 3)


def test_growth_publishes_the_new_and_retires_what_its_end_does_not_need() -> None:
    spec = model(
        {"name": "kv", "kind": "compressed_history", "block_tokens": 16, "ratio": 4},
        {"name": "idx", "kind": "indexer", "of": "kv", "block_tokens": 16},
        {"name": "tail", "kind": "uncompressed_tail", "of": "kv", "block_tokens": 4, "overlap_tokens": 4},
        {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 16, "sink_tokens": 5},
        {"name": "ssm", "kind": "compressed_history", "form": "state", "grid_tokens": 16},
    )
    growth = extended(spec, 40, 70, 2)
    published = {spec.groups[p.group].name: p.indices for p in growth.publish}
    # c = 68: raw tokens 64 to 70; the window needs 55 to 70, and tokens 0 to 5 are sinks
    assert published == {
        "kv": (2, 3),
        "idx": (2, 3),
        "tail": (16,),
        "swa": (0, 1, 13, 14, 15, 16),
        "ssm": (2, 3),
    }
    assert {p.revision for p in growth.publish} == {2}
    retired = {spec.groups[p.group].name: p.indices for p in growth.retire}
    assert retired == {"tail": tuple(range(16)), "swa": tuple(range(2, 13))}


def test_tokens_are_a_function_of_the_name_and_branches_share_a_prefix() -> None:
    p, q = tokens_of("P", 200), tokens_of("Q", 200)
    assert (tokens_of("P", 64) == p[:64]).all()
    assert (p != q).mean() > 0.99
    branch = tokens_of(Branch(like="P", share=96, then="Q"), 200)
    assert (branch[:96] == p[:96]).all()
    assert (branch[96:] == q[96:]).all()
    assert (tokens_of(Branch(like="P", share=300, then="Q"), 200) == p).all()
    nested = tokens_of(Branch(like={"like": "P", "share": 10, "then": "R"}, share=96, then="Q"), 100)
    assert np.array_equal(nested[:10], p[:10])
    assert np.array_equal(nested[10:96], tokens_of("R", 96)[10:])


def test_bytes_differ_wherever_content_does() -> None:
    said = [
        content_of(digest, group, shard, (revision, fingerprint), length=64)
        for digest in (bytes(32), bytes(31) + b"\1")
        for group in (0, 1)
        for shard in (0, 1)
        for revision in (0, 1)
        for fingerprint in (b"a", b"b")
    ]
    assert len(set(said)) == len(said) == 32
    assert {len(content) for content in said} == {64}


@pytest.mark.parametrize(("shards", "holders"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 4), (8, 4), (13, 4)])
def test_every_shard_has_one_seat_and_a_node_at_most_four(shards: int, holders: int) -> None:
    spec = model({"name": "kv", "kind": "compressed_history", "block_tokens": 16}, shards=shards)
    seats = seats_of(spec, "n0")
    assert len(seats) == holders
    assert [s for seat in seats for s in seat.shards] == list(range(shards))
    assert len({seat.holder for seat in seats}) == holders


def test_a_capacity_holds_for_each_group_and_node_that_names_one() -> None:
    from kvfabric.ops.scenario.story import Node

    spec = model(
        {"name": "kv", "kind": "compressed_history", "block_tokens": 16},
        {"name": "w", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 8},
    )
    story = Story("f", "s", None, spec, {"n0": Node(), "n1": Node(capacity={"kv": 3})}, ())
    slots = slots_needed(story)
    assert slots["n1", "kv"] == 3
    assert slots["n0", "kv"] == slots["n0", "w"] == slots["n1", "w"] > 0
