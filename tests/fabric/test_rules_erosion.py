"""Where a prompt could resume, over all positions: laws of the erosion."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.bitmaps import gather, leading, ones, runs
from kvfabric.fabric.evidence import GroupEvidence
from kvfabric.fabric.kinds import SpecError
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.presets import preset
from kvfabric.fabric.rules import choose_revisions, hash_tokens, needs_past, resolve, servable, usable_position

from .rules_by_hand import bits, held, history, in_revisions, indexer, model_of, recurrent, tail, window


def test_a_prompt_leaves_at_least_one_token_to_compute() -> None:
    model = model_of(history())
    evidence = [held(range(4))]
    assert usable_position(model, evidence, 65) == 64
    assert usable_position(model, evidence, 64) == 48
    assert usable_position(model, evidence, 1) == 0


def test_an_object_that_ends_behind_the_prompt_does_not_count() -> None:
    model = model_of(history(endpoint_tokens=4))
    evidence = [held(range(4))]
    # The block [48, 64) matches only by the digest of 64 tokens.
    assert usable_position(model, evidence, 63) == 48
    assert hash_tokens(model, evidence, 63) == 48
    assert usable_position(model, evidence, 64) == 60


def test_position_zero_is_always_servable_and_every_group_must_agree_on_the_others() -> None:
    model = model_of(history(), window(window_tokens=17), recurrent(grid_tokens=16))
    assert servable(model, [held(()), held(()), held(())], 100) == 1
    evidence = [held(range(5)), held([0, 2, 3]), held([0, 1, 3])]
    # History up to 80; the window's block before 16, 48, 64; snapshots at 16, 32, 64.
    assert servable(model, evidence, 100) == bits([0, 1, 4])


def test_a_window_may_be_mixed_from_revisions_and_a_family_may_not() -> None:
    mixed = in_revisions(r0=[0, 1], r1=[2, 3])
    assert usable_position(model_of(window(window_tokens=64)), [mixed], 65) == 64
    assert usable_position(model_of(history()), [mixed], 65) == 32


def test_of_all_revisions_the_longest_serves_and_the_higher_one_on_a_tie() -> None:
    model = model_of(history(), indexer())
    evidence = [in_revisions(r0=range(8), r1=range(4)), in_revisions(r0=range(8), r1=range(4))]
    assert usable_position(model, evidence, 200) == 128
    assert choose_revisions(model, evidence, 128) == (0, 0)
    assert choose_revisions(model, evidence, 64) == (1, 1)


def test_each_family_chooses_for_itself_and_windows_have_no_revision() -> None:
    model = model_of(history("a"), history("b"), window())
    evidence = [in_revisions(r0=range(4), r2=range(4)), in_revisions(r1=range(4)), in_revisions(r7=range(4))]
    assert choose_revisions(model, evidence, 64) == (2, 1, None)
    assert choose_revisions(model, evidence, 0) == (None, None, None)


def test_a_member_that_owes_nothing_at_the_position_has_no_revision() -> None:
    model = model_of(history(ratio=4), tail())
    assert choose_revisions(model, [in_revisions(r3=range(4)), held(())], 64) == (3, None)


def test_hashes_promise_the_last_grid_position_in_any_matching_object() -> None:
    model = model_of(history(block_tokens=16), window(block_tokens=24))
    assert model.grid_tokens == 48
    # [32, 48) ends at 48; [48, 64) begins there and does not hold it.
    assert hash_tokens(model, [held([2]), held(())], 100) == 48
    assert hash_tokens(model, [held([3]), held(())], 100) == 0
    assert hash_tokens(model, [held([5]), held(())], 97) == 96
    assert hash_tokens(model, [held([5]), held(())], 96) == 0


def test_hashes_promise_by_the_best_group_whatever_the_others_hold() -> None:
    model = model_of(history(), recurrent())
    assert hash_tokens(model, [held(range(6)), held([4])], 200) == 160
    assert hash_tokens(model, [GroupEvidence({}, bits(range(8))), held(())], 200) == 128


def test_no_hit_passes_what_the_hashes_promise() -> None:
    model = model_of(history(lag_tokens=64))
    # With a lag of 64 nothing compressed is needed up to 64, but nothing promises 64 either.
    assert usable_position(model, [held(range(2))], 200) == 32
    assert usable_position(model, [held(())], 200) == 0


def test_many_matches_off_the_grid_do_not_hide_one_that_is_on_it() -> None:
    model = model_of(history(block_tokens=1, endpoint_tokens=64))
    off_grid = bits(i for i in range(6400) if (i + 1) % 64)
    assert hash_tokens(model, [GroupEvidence({}, off_grid)], 6401) == 0
    assert hash_tokens(model, [GroupEvidence({}, off_grid | 1 << 127)], 6401) == 128


def test_a_window_that_was_stored_at_the_end_of_a_turn_serves_there_and_nowhere_else() -> None:
    model = preset("deepseek_v4_flash")
    turn, tokens = 196_608, 262_144
    evidence = []
    for group in model.groups:
        end, count = turn // group.unit_tokens, tokens // group.unit_tokens
        evidence.append(held(range(count)) if group.ratio > 1 or group.kind == "indexer" else held(range(end - 8, end)))
    assert usable_position(model, evidence, tokens + 1) == turn
    assert servable(model, evidence, tokens + 1) == 1 | 1 << turn // model.grid_tokens


def test_rules_with_a_huge_window_or_grid_cost_no_memory() -> None:
    model = model_of(window(block_tokens=1, window_tokens=1 << 30))
    assert usable_position(model, [held(range(64))], 65) == 64
    primes = (1048573, 1048571, 1048559, 1048549)
    odd = model_of(*(history(f"g{p}", p) for p in primes), drop_last_blocks=1 << 16)
    assert servable(odd, [held(range(3))] * 4, 4_000_000) == 1
    assert hash_tokens(odd, [held(range(3))] * 4, 4_000_000) == 0
    assert resolve(odd, [held(range(3))] * 4, 4_000_000).tokens_lost_to_alignment == 0


def test_spec_caches_do_not_confuse_one_model_with_another() -> None:
    evidence = [held(range(8))]
    answers = {usable_position(model_of(history(), drop_last_blocks=d), evidence, 200) for d in (0, 1, 2) * 50}
    assert answers == {128, 112, 96}


@given(st.integers(0, (1 << 200) - 1), st.integers(1, 9), st.integers(1, 40))
def test_bit_helpers_do_what_they_say(some: int, stride: int, width: int) -> None:
    picked = gather(some, stride, 200) & ones(200)
    assert picked == bits(i for i in range(200) if some >> i * stride & 1)
    assert runs(some, width) == bits(i for i in range(200) if some >> i & ones(width) == ones(width))
    assert leading(some) == next(i for i in range(201) if not some >> i & 1)


FIELDS = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


@st.composite
def groups(draw: st.DrawFn) -> list[dict[str, Any]]:
    unit, ratio = draw(FIELDS), draw(st.sampled_from([1, 2, 4]))
    made = [history("kv", unit * ratio, ratio=ratio, lag_tokens=draw(st.sampled_from([0, 0, 5, 16])))]
    made += draw(st.sampled_from([[], [indexer("idx", block_tokens=draw(FIELDS))]]))
    made += draw(st.sampled_from([[], [recurrent("ssm", draw(FIELDS))]]))
    if draw(st.booleans()):
        of = draw(st.sampled_from([g["name"] for g in made if "block_tokens" in g]))
        made.append(tail("tail", of, draw(FIELDS), overlap_tokens=draw(st.sampled_from([0, 1, 4]))))
    if draw(st.booleans()):
        width, sinks = draw(st.sampled_from([1, 3, 9, 50])), draw(st.sampled_from([0, 0, 3]))
        made.append(window("swa", draw(FIELDS), width, sink_tokens=sinks))
    for group in made:
        if "block_tokens" in group and draw(st.booleans()):
            group["endpoint_tokens"] = draw(FIELDS)
    return made


@settings(max_examples=300)
@given(groups(), st.integers(0, 2), st.integers(1, 300), st.randoms(use_true_random=False))
def test_the_erosion_is_the_needs_of_every_position_at_once(
    made: list[dict[str, Any]], drop: int, n: int, rng: Any
) -> None:
    model = model_of(*made, drop_last_blocks=drop)
    evidence = []
    for group in model.groups:
        count = n // group.unit_tokens + 2
        gaps = bits(rng.randrange(count) for _ in range(rng.choice([0, 1, 1, 3])))
        evidence.append(
            GroupEvidence({rng.choice([0, 1]): ones(count) & ~gaps, 2: ones(rng.randrange(count))}, ones(count))
        )
    served = servable(model, evidence, n)
    past = drop * model.grid_tokens
    for k in range(1, n // model.grid_tokens + 2):
        p = k * model.grid_tokens
        expected = p + past <= n - 1 and serves(model, evidence, p, n) and p <= hash_tokens(model, evidence, n)
        assert (served >> k & 1) == expected, p
    assert usable_position(model, evidence, n) == (served.bit_length() - 1) * model.grid_tokens


def serves(model: ModelSpec, evidence: list[GroupEvidence], p: int, n: int) -> bool:
    required = needs_past(model, p)

    def has(group: int, revisions: set[int]) -> bool:
        found = 0
        for revision in revisions:
            found |= evidence[group].usable.get(revision, 0)
        found &= ones(n // model.groups[group].unit_tokens)
        return all(found >> i & 1 for blocks in required[group] for i in blocks)

    windows = [i for i, group in enumerate(model.groups) if group.kind == "sliding_window"]
    return all(has(i, {0, 1, 2}) for i in windows) and all(
        any(all(has(i, {revision}) for i in family) for revision in (0, 1, 2)) for family in model.families
    )


def test_a_spec_that_is_not_valid_names_the_field() -> None:
    with pytest.raises(SpecError, match=r"model\.groups\.0\.blok_tokens: unknown field"):
        model_of(history(blok_tokens=3))
