"""What a resume at one position needs of each kind of group, judged by reading the rules."""

from __future__ import annotations

import pytest

from kvfabric.fabric.rules import needs, needs_past

from .rules_by_hand import history, indexer, model_of, recurrent, tail, window


def objects(ranges: tuple[range, ...]) -> list[int]:
    return [i for blocks in ranges for i in blocks]


def test_ordinary_history_needs_every_block_from_the_start() -> None:
    assert needs(model_of(history()), 64) == ((range(4),),)


def test_nothing_is_needed_to_compute_from_the_start() -> None:
    groups = history(), recurrent(), window(), indexer(), tail(overlap_tokens=4)
    assert needs(model_of(*groups), 0) == ((),) * 5


def test_a_position_off_the_grid_is_no_question_to_ask() -> None:
    model = model_of(history(), recurrent())
    assert needs(model, 32)
    for p in (-32, 16, 33):
        with pytest.raises(ValueError, match="not on the resume grid of 32 tokens"):
            needs(model, p)


def test_history_inside_a_block_needs_that_whole_block() -> None:
    assert needs(model_of(history(endpoint_tokens=4)), 36) == ((range(3),),)


def test_compressed_history_needs_whole_entries_only() -> None:
    model = model_of(history(block_tokens=16, ratio=8, endpoint_tokens=4))
    # At 20 two entries, [0, 16), are complete; at 4 none is.
    assert needs(model, 20) == ((range(1),),)
    assert needs(model, 4) == ((),)
    assert needs(model, 24) == ((range(2),),)


def test_a_lag_leaves_the_recent_tokens_to_the_tail() -> None:
    model = model_of(history(ratio=4, lag_tokens=10), tail(block_tokens=2))
    # c = floor(22 / 4) * 4 = 20: two blocks meet [0, 20), and [20, 32) is raw.
    assert needs(model, 32) == ((range(2),), (range(10, 16),))
    assert needs(model_of(history(lag_tokens=40)), 32) == ((),)


def test_an_overlapping_tail_is_needed_at_aligned_positions_too() -> None:
    overlapping = model_of(history(ratio=4), tail(overlap_tokens=4))
    assert needs(overlapping, 16)[1] == (range(3, 4),)
    assert needs(model_of(history(ratio=4), tail()), 16)[1] == ()


def test_a_tail_off_the_ratio_reaches_from_the_overlap_to_the_position() -> None:
    model = model_of(history(ratio=8, endpoint_tokens=2), tail(block_tokens=2, overlap_tokens=8))
    # At 22: c = 16, so [8, 22); at 6, below the ratio, there is no overlap: [0, 6).
    assert objects(needs(model, 22)[1]) == list(range(4, 11))
    assert objects(needs(model, 6)[1]) == [0, 1, 2]


def test_a_tail_of_an_indexer_follows_the_indexed_history() -> None:
    model = model_of(
        history(ratio=8, endpoint_tokens=4),
        indexer(endpoint_tokens=4),
        tail("idx_tail", of="idx", overlap_tokens=4),
    )
    # At 20: c = 16, so the raw tokens are [12, 20).
    assert needs(model, 20) == ((range(1),), (range(1),), (range(3, 5),))


def test_a_window_needs_its_last_tokens_and_its_sinks() -> None:
    model = model_of(window(block_tokens=4, window_tokens=9, sink_tokens=5))
    # At 40: [32, 40) and the sinks [0, 5).
    assert needs(model, 40) == ((range(2), range(8, 10)),)
    assert needs(model, 12) == ((range(3),),)
    assert needs(model, 4) == ((range(1),),)


def test_a_window_of_one_token_needs_nothing_but_its_sinks() -> None:
    assert needs(model_of(window(window_tokens=1)), 64) == ((),)
    assert needs(model_of(window(window_tokens=1, sink_tokens=1)), 64) == ((range(1),),)


def test_snapshots_of_every_kind_are_needed_at_exactly_the_position() -> None:
    state = {"form": "state", "grid_tokens": 16}
    model = model_of(
        history(ratio=4),
        recurrent(grid_tokens=16),
        {"name": "tail", "kind": "uncompressed_tail", "of": "kv", **state},
        {"name": "swa", "kind": "sliding_window", **state},
        {"name": "idx", "kind": "indexer", "of": "kv", **state},
    )
    assert needs(model, 48) == ((range(3),), *((range(2, 3),),) * 4)


def test_a_speculative_reader_needs_the_blocks_behind_the_position_too() -> None:
    model = model_of(history(), window(), recurrent(grid_tokens=16), drop_last_blocks=2)
    assert needs(model, 64) == ((range(4),), (range(2, 4),), (range(3, 4),))
    assert needs_past(model, 64) == ((range(6),), (range(2, 6),), (range(3, 4),))
    assert needs_past(model, 0) == ((),) * 3


def test_blocks_behind_the_position_need_not_join_those_before_it() -> None:
    model = model_of(history(lag_tokens=32), drop_last_blocks=1)
    # [0, 32) is compressed, [32, 64) is not needed, [64, 80) is.
    assert needs_past(model, 64) == ((range(2), range(4, 5)),)


def test_blocks_of_unequal_groups_are_counted_in_their_own_units() -> None:
    model = model_of(history(block_tokens=24, endpoint_tokens=8), window(block_tokens=12, endpoint_tokens=8))
    assert model.grid_tokens == 8
    # Window [9, 40): blocks [0, 12) to [36, 48).
    assert needs(model, 40) == ((range(2),), (range(4),))
