"""What was stored together is proven by how it was found then, as if it were looked at object by object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.kinds import Reason
from kvfabric.fabric.messages import Acquire, Drop, Objects
from kvfabric.fabric.passport import AbiPassport
from kvfabric.fabric.standing import StandingProofs
from kvfabric.fabric.stored_runs import StoredRuns
from kvfabric.fabric.validation import Proof

from .one_holder import ABI, OneHolder
from .test_standing import MODEL, MODELS, STEPS, _do

TOKENS = range(33)


@pytest.fixture
def holder() -> OneHolder:
    one = OneHolder(MODEL, slots=32)
    assert one.store(TOKENS).refused is None
    return one


def proof_of(holder: OneHolder, tokens: range = TOKENS, *, stored: bool = True, abi: Any = ABI) -> Proof | None:
    """The proof of a prompt, by what was stored together or object by object; only the former where ``stored``."""
    leader, ctx = holder.core.leader, holder.core.ctx
    request = Acquire(holder.name(), holder.prompt(holder.keys(tokens)), (abi, abi), ("n0",), 30.0, None, 0, False)
    kept, locate_all = ctx.stored_runs, ctx.books.locate_all
    try:
        if stored:
            ctx.books.locate_all = lambda *_: None  # type: ignore[method-assign]
        else:
            ctx.stored_runs = StoredRuns()
        return leader.at_hand._proof(request)
    finally:
        ctx.stored_runs = kept
        ctx.books.locate_all = locate_all  # type: ignore[method-assign]


def test_the_proof_is_the_one_that_looks_at_every_object(holder: OneHolder) -> None:
    by_runs, by_objects = proof_of(holder), proof_of(holder, stored=False)
    assert by_runs is not None
    assert by_objects is not None
    assert by_runs.parts == by_objects.parts
    assert (by_runs.tokens, by_runs.shards, by_runs.verdicts) == (32, by_objects.shards, by_objects.verdicts)
    assert np.array_equal(by_runs.claim.slots, by_objects.claim.slots)
    assert by_runs.claim.pools == by_objects.claim.pools
    assert by_runs._headers == by_objects._headers


def test_a_prompt_that_was_stored_in_parts_lies_in_several_runs(holder: OneHolder) -> None:
    ctx, whole = holder.core.ctx, proof_of(holder)
    ctx.stored_runs = StoredRuns()
    tables = [list(table.values()) for table in ctx.books.table.values()]
    ctx.stored_runs.stored(ctx.books, [obj for table in tables for obj in table[4:]])
    assert proof_of(holder) is None, "how it begins is not known"
    ctx.stored_runs.stored(ctx.books, [obj for table in tables for obj in table[:4]])
    parts = proof_of(holder)
    assert whole is not None
    assert parts is not None
    assert parts.parts == whole.parts
    assert proof_of(holder, range(100, 133)) is None, "it was never stored"


def test_a_prompt_that_ends_within_a_run_is_looked_up_by_its_objects(holder: OneHolder) -> None:
    assert proof_of(holder, range(17)) is None
    assert proof_of(holder, range(17), stored=False) is not None


def slot_of(holder: OneHolder, group: int, index: int) -> int:
    obj = holder.core.ctx.books.find(group, 0, holder.keys(TOKENS).keys(4)[index * 32 : index * 32 + 32])
    assert obj is not None
    return obj.slot


def _corrupt_header(holder: OneHolder) -> None:
    holder.core.ctx.arena.table["checksum"][slot_of(holder, 0, 2)] = np.void(bytes(16))


def _mark_bad(holder: OneHolder) -> None:
    obj = holder.core.ctx.books.owner[slot_of(holder, 0, 2)]
    assert obj is not None
    holder.core.ctx.books.mark_bad(obj, Reason.CHECKSUM_MISMATCH)


def _evict(holder: OneHolder) -> None:
    key = holder.keys(TOKENS).keys(4)[64:96]
    assert holder.ask(Drop(holder.name(), (Objects(0, 0, (2,), key),))).refused is None


@pytest.mark.parametrize("change", [_corrupt_header, _mark_bad, _evict], ids=lambda f: f.__name__)
def test_nothing_is_proven_of_a_run_whose_slots_changed(holder: OneHolder, change: Callable[[OneHolder], None]) -> None:
    assert proof_of(holder) is not None
    change(holder)
    assert proof_of(holder) is None


def test_nothing_is_proven_to_a_reader_of_another_layout(holder: OneHolder) -> None:
    assert proof_of(holder, abi=AbiPassport(kernel="another").abi()) is None


def test_runs_are_bounded_and_the_oldest_goes_first(holder: OneHolder) -> None:
    ctx = holder.core.ctx
    ctx.stored_runs = few = StoredRuns(slots_max=20)
    objects = [obj for table in ctx.books.table.values() for obj in table.values()]
    few.stored(ctx.books, objects)
    assert len(few) == 2, "eight blocks of each group"
    for at in range(100, 1000, 100):
        holder.store(range(at, at + 17))
        assert sum(len(run.slots) for run in few._kept.values()) <= 20
    assert (0, 0, objects[7].digest) not in few._kept
    none = StoredRuns(slots_max=3)
    none.stored(ctx.books, objects)
    assert len(none) == 0


@given(st.sampled_from(sorted(MODELS)), STEPS)
@settings(max_examples=150, deadline=None)
def test_answers_are_those_of_a_holder_that_looks_at_every_object(
    name: str, steps: list[tuple[str, int, bool]]
) -> None:
    quick, slow = OneHolder(MODELS[name], slots=8), OneHolder(MODELS[name], slots=8)
    quick.core.ctx.stored_runs = StoredRuns(run_min=1)
    slow.core.ctx.stored_runs = StoredRuns(slots_max=0)
    for step in steps:
        for one in (quick, slow):
            one.core.leader.at_hand.standing = StandingProofs(proofs_max=0)
        assert _do(quick, step) == _do(slow, step)
    assert np.array_equal(quick.core.ctx.books.pins, slow.core.ctx.books.pins)
