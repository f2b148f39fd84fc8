"""A proof that still stands grants again, and only that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.kinds import Reason, Status
from kvfabric.fabric.messages import Acquire, Answer, Drop, Objects, Release, SetMode, SetWeights
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.passport import AbiPassport
from kvfabric.fabric.standing import StandingProofs

from .one_holder import ABI, OneHolder

MODEL = ModelSpec.model_validate(
    {
        "name": "m",
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 64},
            {"name": "window", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 8, "block_bytes": 64},
        ],
    }
)
MODELS = {
    "history and window": MODEL,
    "history alone": ModelSpec.model_validate(
        {
            "name": "h",
            "groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 64}],
        }
    ),
    "a family": ModelSpec.model_validate(
        {
            "name": "f",
            "groups": [
                {"name": "c", "kind": "compressed_history", "block_tokens": 8, "ratio": 4, "block_bytes": 64},
                {"name": "i", "kind": "indexer", "of": "c", "block_tokens": 8, "block_bytes": 64},
                {"name": "t", "kind": "uncompressed_tail", "of": "c", "block_tokens": 4, "block_bytes": 64},
            ],
        }
    ),
    "a state": ModelSpec.model_validate(
        {
            "name": "s",
            "groups": [
                {"name": "r", "kind": "compressed_history", "form": "state", "grid_tokens": 8, "block_bytes": 64},
                {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 64},
            ],
        }
    ),
}
TOKENS = range(17)


@pytest.fixture
def holder() -> OneHolder:
    one = OneHolder(MODEL, slots=16)
    assert one.store(TOKENS).refused is None
    first = one.acquire(TOKENS)
    assert first.status is Status.FULL_HIT
    assert first.tokens == 16
    return one


def stands(holder: OneHolder) -> bool:
    """Whether the proof that was made of the prompt stands."""
    return holder.core.leader.at_hand.standing.find(_request(holder), holder.core.ctx.books) is not None


def slot_of(holder: OneHolder, group: int, index: int) -> int:
    key = holder.keys(TOKENS).keys(4)[index * 32 : index * 32 + 32]
    obj = holder.core.ctx.books.find(group, 0, key)
    assert obj is not None
    return obj.slot


def test_a_prompt_that_was_granted_whole_is_granted_again_with_pins_of_its_own(holder: OneHolder) -> None:
    first, again = holder.acquire(TOKENS), holder.acquire(TOKENS)
    assert stands(holder)
    assert first.grant is not None
    assert again.grant is not None
    assert again.grant.lease != first.grant.lease
    assert replace(again, request="", grant=None) == replace(first, request="", grant=None)
    assert again.grant.parts[0].slots == first.grant.parts[0].slots
    slot = slot_of(holder, 0, 0)
    pins = holder.core.ctx.books.pins[slot]
    holder.ask(Release(holder.name(), again.grant.lease, None))
    assert holder.core.ctx.books.pins[slot] == pins - 1


def test_its_lease_ends_by_its_deadline_like_any_other(holder: OneHolder) -> None:
    assert stands(holder)
    holder.granted(TOKENS)
    holder.pass_time(40.0)
    assert not holder.core.ctx.leases.live
    assert not holder.core.ctx.books.pins.any()


def test_a_probe_is_answered_without_a_lease(holder: OneHolder) -> None:
    before = len(holder.core.ctx.leases.live)
    answer = holder.acquire(TOKENS, probe=True)
    assert answer.status is Status.FULL_HIT
    assert answer.tokens == 16
    assert answer.grant is None
    assert len(holder.core.ctx.leases.live) == before


def test_another_request_takes_the_whole_path(holder: OneHolder) -> None:
    standing = holder.core.leader.at_hand.standing
    books = holder.core.ctx.books
    request = _request(holder)
    assert standing.find(request, books) is not None
    other = AbiPassport(kernel="another").abi()
    assert standing.find(replace(request, abis=(other, ABI)), books) is None
    assert standing.find(replace(request, readers=("n1",)), books) is None
    assert standing.find(replace(request, prompt=replace(request.prompt, tenant="t")), books) is None
    assert standing.find(replace(request, prompt=replace(request.prompt, n=18)), books) is None


def _request(holder: OneHolder) -> Acquire:
    return Acquire(holder.name(), holder.prompt(holder.keys(TOKENS)), (ABI, ABI), ("n0",), 30.0, None, 0, False)


def _corrupt_header(holder: OneHolder) -> None:
    holder.core.ctx.arena.table["checksum"][slot_of(holder, 0, 2)] = np.void(bytes(16))


def _mark_bad(holder: OneHolder) -> None:
    books = holder.core.ctx.books
    obj = books.owner[slot_of(holder, 0, 2)]
    assert obj is not None
    books.mark_bad(obj, Reason.CHECKSUM_MISMATCH)


def _evict(holder: OneHolder) -> None:
    for lease in list(holder.core.ctx.leases.live):
        holder.ask(Release(holder.name(), lease, None))
    key = holder.keys(TOKENS).keys(4)[64:96]
    assert holder.ask(Drop(holder.name(), (Objects(0, 0, (2,), key),))).refused is None


def _store_anew(holder: OneHolder) -> None:
    assert holder.store(TOKENS, seed=1).refused is None


def _bypass(holder: OneHolder) -> None:
    holder.core._set_mode(SetMode(draining=False, bypassed=True))


def _drain(holder: OneHolder) -> None:
    holder.core._set_mode(SetMode(draining=True, bypassed=False))


def _new_weights(holder: OneHolder) -> None:
    holder.core._set_weights(SetWeights(bytes(16), (holder.prompt(holder.keys(TOKENS)).weights,)))


@pytest.mark.parametrize("change", [_corrupt_header, _mark_bad, _evict, _store_anew], ids=lambda f: f.__name__)
def test_no_proof_stands_whose_slots_changed(holder: OneHolder, change: Any) -> None:
    assert stands(holder)
    change(holder)
    assert not stands(holder)


@pytest.mark.parametrize("change", [_bypass, _drain, _new_weights], ids=lambda f: f.__name__)
def test_a_proof_alone_grants_nothing(holder: OneHolder, change: Any) -> None:
    assert holder.acquire(TOKENS).grant is not None
    change(holder)
    assert holder.acquire(TOKENS).grant is None


def test_what_was_stored_anew_is_what_is_granted(holder: OneHolder) -> None:
    _store_anew(holder)
    for _ in range(2):
        grant = holder.granted(TOKENS)
        slots = np.frombuffer(grant.parts[0].slots[0].slots, "<u4")
        assert slots.tolist() == [slot_of(holder, 0, index) for index in range(4)]
    assert stands(holder)


def test_kept_proofs_are_bounded_in_number_and_in_slots(holder: OneHolder) -> None:
    request, answer = _request(holder), holder.acquire(TOKENS)
    assert answer.grant is not None
    proof = holder.core.ctx.leases.live[answer.grant.lease].proof
    few = StandingProofs(proofs_max=2)
    for n in range(17, 27):
        few.put(replace(request, prompt=replace(request.prompt, n=n)), proof)
    assert len(few) == 2
    small = StandingProofs(slots_max=len(proof.claim.slots))
    small.put(request, proof)
    small.put(replace(request, prompt=replace(request.prompt, n=18)), proof)
    assert len(small) == 1
    none = StandingProofs(slots_max=1)
    none.put(request, proof)
    assert len(none) == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.integers(1, 6), st.booleans()),
        st.tuples(st.just("release"), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("store"), st.integers(1, 6), st.booleans()),
        st.tuples(st.just("probe"), st.integers(1, 6), st.booleans()),
        st.tuples(st.just("evict"), st.integers(0, 11), st.booleans()),
        st.tuples(st.just("bad"), st.integers(0, 11), st.booleans()),
        st.tuples(st.just("pass"), st.integers(1, 40), st.booleans()),
    ),
    max_size=30,
)


@given(st.sampled_from(sorted(MODELS)), STEPS)
@settings(max_examples=200, deadline=None)
def test_answers_are_those_of_a_holder_that_takes_the_whole_path(name: str, steps: list[tuple[str, int, bool]]) -> None:
    quick, whole = OneHolder(MODELS[name], slots=8), OneHolder(MODELS[name], slots=8)
    whole.core.leader.at_hand.answer = lambda *_: None  # type: ignore[method-assign]
    for step in steps:
        assert _do(quick, step) == _do(whole, step)
    assert np.array_equal(quick.core.ctx.books.pins, whole.core.ctx.books.pins)


def test_a_warm_prompt_is_granted_without_the_whole_path(holder: OneHolder) -> None:
    holder.core.leader.at_hand.standing = StandingProofs()
    with mock.patch.object(holder.core.leader, "_new_op", wraps=holder.core.leader._new_op) as whole_path:
        assert holder.acquire(TOKENS).grant is not None
        assert not whole_path.called
        assert holder.acquire(range(21)).tokens == 16
        assert whole_path.called


def _do(holder: OneHolder, step: tuple[str, int, bool]) -> Any:
    verb, number, other = step
    books = holder.core.ctx.books
    tokens = range(100 if other else 0, (100 if other else 0) + number * 4 + 1)
    match verb:
        case "acquire" | "probe":
            answer: Answer = holder.acquire(tokens, probe=verb == "probe")
            slots = [] if answer.grant is None else [(r.slots, r.versions) for p in answer.grant.parts for r in p.slots]
            return (
                answer.status,
                answer.tokens,
                answer.hash_tokens,
                answer.usable_tokens,
                answer.cause,
                answer.tokens_lost_to_alignment,
                slots,
            )
        case "release":
            live = sorted(holder.core.ctx.leases.live)
            if number < len(live):
                holder.ask(Release(holder.name(), live[number], None))
        case "store":
            return holder.store(tokens, seed=number).refused
        case "evict" | "bad":
            obj = books.owner[number % len(books.owner)]
            if obj is not None and obj.evictable:
                if verb == "evict":
                    books.evict(obj)
                else:
                    books.mark_bad(obj, Reason.CHECKSUM_MISMATCH)
        case _:
            holder.pass_time(float(number))
    return None
