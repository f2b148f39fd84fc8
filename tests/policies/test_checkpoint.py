"""Checkpoint policies: what is kept can be resumed from, what is not was not asked for."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.fabric.checkpoints import BranchBook, CheckpointPolicy, published, trail_of
from kvfabric.fabric.evidence import GroupEvidence
from kvfabric.fabric.identity import Namespace, PromptKeys, as_tokens
from kvfabric.fabric.kinds import Form, ObjectKind, SpecError
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.rules import servable
from kvfabric.ops.simulate.models import random_model
from kvfabric.policies.checkpoint import KeepAll, KeepBranches, KeepEnds, KeepEvery, checkpoint_policy

RECURRENT = ModelSpec.load(
    {
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 16},
            {"name": "state", "kind": "compressed_history", "form": "state", "grid_tokens": 16},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 8},
        ]
    }
)


def positions(policy: CheckpointPolicy, tokens: int, prompt_tokens: int | None = None) -> list[int]:
    return sorted(policy.positions(trail_of(RECURRENT, tokens, prompt_tokens, branches=(32, 64))))


def test_each_policy_keeps_the_positions_it_is_named_for() -> None:
    assert positions(KeepAll(), 70) == [16, 32, 48, 64]
    assert positions(KeepEvery(40), 130) == [32, 80, 112]
    assert positions(KeepEvery(1), 40) == [16, 32]
    assert positions(KeepEnds(), 130, 100) == [96, 128]
    assert positions(KeepEnds(), 15) == []
    assert positions(KeepBranches(), 130, 100) == [32, 64, 96, 128]


def test_only_what_serves_one_position_is_left_out() -> None:
    kv, state, swa = published(RECURRENT, [64], 100)
    assert sorted(kv) == list(range(6))
    assert sorted(state) == [3]
    assert sorted(swa) == [14, 15, 23, 24]  # at the end it goes on from there


def test_a_name_is_read_and_any_other_refused_with_what_there_is() -> None:
    assert checkpoint_policy("every:512") == KeepEvery(512)
    assert checkpoint_policy("branches") == KeepBranches()
    for name in ("every:", "every:0", "every:-4", "some", ""):
        with pytest.raises(SpecError, match=r"^checkpoint: .* is none of all, every:N, ends, branches"):
            checkpoint_policy(name)


@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 200), data=st.data())
def test_exactly_the_kept_positions_can_be_resumed_from(seed: int, tokens: int, data: st.DataObject) -> None:
    """Every kept position is servable out of what is published; with state at stake, no other is."""
    model = random_model(random.Random(seed))
    trail = trail_of(model, tokens, data.draw(st.integers(0, tokens)))
    policies: list[CheckpointPolicy] = [KeepAll(), KeepEnds(), KeepEvery(data.draw(st.integers(1, 64)))]
    policy = data.draw(st.sampled_from(policies))
    possible = served(model, KeepAll().positions(trail), tokens)
    found = served(model, policy.positions(trail), tokens)
    assert found <= possible
    assert possible.intersection(policy.positions(trail)) <= found
    if any(group.form is Form.STATE for group in model.groups):
        assert found <= set(policy.positions(trail))


def served(model: ModelSpec, positions: Collection[int], tokens: int) -> set[int]:
    """Where a longer prompt could resume if these positions of its first tokens were kept."""
    presence = [sum(1 << i for i in indices) for indices in published(model, positions, tokens)]
    grid, n = model.grid_tokens, tokens + 1 + model.drop_last_blocks * model.grid_tokens
    bits = servable(model, [GroupEvidence({0: held}, held, ()) for held in presence], n)
    return {k * grid for k in range(1, bits.bit_length()) if bits >> k & 1}


def keys(tokens: list[int]) -> bytes:
    return PromptKeys(RECURRENT, Namespace("m", "v1"), as_tokens(tokens)).keys(RECURRENT.grid_tokens)


def test_a_branch_is_known_to_every_prompt_that_passes_it() -> None:
    book = BranchBook(RECURRENT.grid_tokens)
    first, second = list(range(100)), [*range(40), *range(500, 600)]
    book.asked(keys(second), 32)
    assert book.along(keys(first)) == (32,)
    assert book.along(keys(list(range(1, 101)))) == ()
    book.asked(keys(second), 0)
    assert len(book) == 1


def test_a_branch_book_is_bounded_and_forgets_the_oldest() -> None:
    book = BranchBook(RECURRENT.grid_tokens, size_max=3)
    prompts = [list(range(i, i + 40)) for i in range(5)]
    for prompt in prompts:
        book.asked(keys(prompt), 16)
    assert len(book) == 3
    assert [book.along(keys(p)) for p in prompts] == [(), (), (16,), (16,), (16,)]


def test_windows_and_tails_are_the_kinds_that_serve_one_position() -> None:
    """Control: with them gone from the model, no policy leaves anything out."""
    plain = ModelSpec.load({"groups": [{"name": "kv", "kind": ObjectKind.COMPRESSED_HISTORY, "block_tokens": 16}]})
    assert published(plain, [], 100) == (frozenset(range(6)),)
