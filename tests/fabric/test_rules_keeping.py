"""What a store leaves behind, and specs from which nobody could ever resume."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.keeping import kept, never_hits
from kvfabric.fabric.kinds import SpecError
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.rules import usable_position

from .rules_by_hand import held, history, indexer, model_of, recurrent, tail, window


def some_prompt_hits(model: ModelSpec, tokens_max: int) -> bool:
    """Store prompts of every length up to a bound and ask with a longer one."""
    past = model.drop_last_blocks * model.grid_tokens
    return any(
        usable_position(
            model, [held(objects) for objects in kept(model, tokens)], tokens + past + model.grid_tokens + 1
        )
        for tokens in range(1, tokens_max)
    )


def test_a_store_leaves_whole_blocks_and_snapshots_on_the_grid() -> None:
    model = model_of(history(), window(block_tokens=8), recurrent(grid_tokens=8))
    assert kept(model, 41) == (range(2), range(5), range(1, 5, 2))
    assert kept(model, 7) == (range(0), range(0), range(0))


def test_a_store_that_keeps_less_keeps_what_lies_wholly_behind_its_end() -> None:
    model = model_of(history(), window(keep_tokens=40), recurrent(grid_tokens=16, keep_tokens=17))
    # Of 100 tokens: windows within [60, 100), snapshots after a token of [83, 100).
    assert kept(model, 100) == (range(6), range(4, 6), range(5, 6))
    assert kept(model, 96) == (range(6), range(4, 6), range(4, 6))
    assert kept(model, 30) == (range(1), range(1), range(1))


def test_a_window_shorter_than_its_rule_still_hits_while_prompts_are_short() -> None:
    # At 16 a window of 1,024 is one block, and 16 tokens are kept.
    assert never_hits(model_of(history(), window(window_tokens=1024, keep_tokens=16))) is None


@pytest.mark.parametrize(
    "groups",
    [
        [history(keep_tokens=15)],
        [history(), window(keep_tokens=0)],
        # The first grid position is 64, where the window reaches back to 33.
        [history(block_tokens=64), window(keep_tokens=31)],
        [history(block_tokens=64), tail(overlap_tokens=4, keep_tokens=3)],
        [history(block_tokens=64), tail(overlap_tokens=8, keep_tokens=7)],
        [recurrent(keep_tokens=0)],
        # The sinks lie at the start, which is not kept where the window's end is.
        [recurrent(grid_tokens=64), window(block_tokens=16, window_tokens=17, sink_tokens=1, keep_tokens=48)],
        [history(block_tokens=64), indexer(block_tokens=16, keep_tokens=48)],
    ],
)
def test_a_writer_that_keeps_too_little_is_refused_with_the_field(groups: list[dict[str, Any]]) -> None:
    name = next(group["name"] for group in groups if "keep_tokens" in group)
    with pytest.raises(SpecError, match=rf"^model\.groups\.{name}\.keep_tokens: \d+ tokens behind the end of a store"):
        model_of(*groups)


@pytest.mark.parametrize(
    "groups",
    [
        [history(keep_tokens=16)],
        [history(block_tokens=64), window(keep_tokens=32)],
        [history(block_tokens=64), tail(overlap_tokens=4, keep_tokens=4)],
        [history(block_tokens=64), tail(keep_tokens=0)],
        [recurrent(keep_tokens=1)],
        [recurrent(grid_tokens=64), window(block_tokens=16, window_tokens=17, sink_tokens=1, keep_tokens=64)],
        [history(block_tokens=64), indexer(block_tokens=16, keep_tokens=64)],
        [window(window_tokens=1, keep_tokens=16)],
    ],
)
def test_a_writer_that_keeps_just_enough_is_not_refused(groups: list[dict[str, Any]]) -> None:
    assert some_prompt_hits(model_of(*groups), 400)


def test_groups_that_each_keep_enough_may_not_keep_it_at_the_same_time() -> None:
    # The block [0, 48) is left only by a store of 48 tokens, a snapshot only by one that ends at it.
    early = history("a", block_tokens=48, endpoint_tokens=32, keep_tokens=48)
    late = recurrent("b", grid_tokens=32, keep_tokens=1)
    assert never_hits(model_of(early)) is None
    assert never_hits(model_of(late)) is None
    with pytest.raises(SpecError, match=r"groups\.a\.keep_tokens, groups\.b\.keep_tokens: 48, 1 tokens"):
        model_of(early, late)


def test_a_speculative_reader_needs_more_to_be_kept() -> None:
    groups = [history(block_tokens=64, keep_tokens=64)]
    assert never_hits(model_of(*groups)) is None
    with pytest.raises(SpecError, match=r"groups\.kv\.keep_tokens: 64 tokens"):
        model_of(*groups, drop_last_blocks=1)


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])
KEEPS = st.none() | st.integers(0, 40)


@st.composite
def keepers(draw: st.DrawFn) -> dict[str, Any]:
    ratio = draw(st.sampled_from([1, 2, 4]))
    groups = [history("kv", draw(SIZES) * ratio, ratio=ratio, lag_tokens=draw(st.sampled_from([0, 0, 5])))]
    if draw(st.booleans()):
        groups.append(window("swa", draw(SIZES), draw(st.sampled_from([1, 3, 9, 20])), sink_tokens=draw(SIZES) // 3))
    if draw(st.booleans()):
        groups.append(tail("tail", "kv", draw(SIZES), overlap_tokens=draw(st.sampled_from([0, 1, 4]))))
    if draw(st.booleans()):
        groups.append(recurrent("ssm", draw(SIZES)))
    for group in groups:
        group["keep_tokens"] = draw(KEEPS)
        if "block_tokens" in group and draw(st.booleans()):
            group["endpoint_tokens"] = draw(SIZES)
    return {"groups": groups, "drop_last_blocks": draw(st.sampled_from([0, 0, 1]))}


@settings(max_examples=250)
@given(keepers())
def test_a_spec_is_refused_exactly_if_no_stored_prompt_of_any_length_hits(data: dict[str, Any]) -> None:
    model = ModelSpec.model_validate(data)
    # Needs repeat with the grid once windows and overlaps reach back to no start: two of them, and what lies behind p.
    enough_tokens = (2 + model.drop_last_blocks) * model.grid_tokens + 80
    assert (never_hits(model) is None) == some_prompt_hits(model, enough_tokens)
