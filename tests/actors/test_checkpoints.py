"""What a fabric's checkpoint policy leaves out, on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric, Session, SpecError, Status
from kvfabric.actors.spec import FabricSpec

from .stories import objects, prompt, wrong_bytes

GROUPS: list[dict[str, Any]] = [
    {"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 2048},
    {"name": "state", "kind": "compressed_history", "form": "state", "grid_tokens": 16, "block_bytes": 4096},
    {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 8, "block_bytes": 512},
]


@pytest.fixture(scope="module")
def sparse(fabric: Fabric) -> Iterator[Session]:
    """A session with a fabric that keeps ends and branches only."""
    spec = {
        "model": {"name": "recurrent", "groups": GROUPS},
        "memory_bytes": 8 << 20,
        "checkpoint": "branches",
        "node_resource": "kvfabric_node_0",
    }
    with kvfabric.launch(spec, name="sparse"), kvfabric.connect("sparse") as session:
        yield session


def resumed(session: Session, tokens: list[int]) -> int:
    answer = session.acquire(tokens)
    if answer.lease is not None:
        assert wrong_bytes(answer.lease, session.model, tokens) == []
        answer.lease.release()
    return answer.tokens


def test_ends_are_kept_and_an_observed_branch_from_then_on(sparse: Session) -> None:
    first = prompt("branches", 200)
    assert sparse.checkpoints(first, prompt_tokens=100) == (96, 192)
    assert sparse.publish(first, objects(sparse.model, first), prompt_tokens=100).ok
    assert resumed(sparse, first) == 192
    # Three prompts part at token 70: the hashes promise 64, no state was kept there.
    others = [first[:70] + prompt(f"branch {i}", 80) for i in range(3)]
    assert resumed(sparse, others[0]) == 0
    assert sparse.checkpoints(others[0]) == (64, 144)
    assert sparse.publish(others[0], objects(sparse.model, others[0])).ok
    for tokens in others[1:]:
        answer = sparse.acquire(tokens)
        assert (answer.status, answer.tokens) == (Status.FULL_HIT, 64)
        answer.cancel()


def test_growth_leaves_the_end_of_the_prompt_where_it_was_kept(sparse: Session) -> None:
    whole = prompt("grows", 120)
    asked = whole[:64]
    everything = objects(sparse.model, whole)
    assert sparse.publish(asked, objects(sparse.model, whole, 64)).ok
    grown = {
        g: {i: o for i, o in v.items() if i >= len(objects(sparse.model, whole, 64)[g])} for g, v in everything.items()
    }
    assert sparse.extend(whole, 64, grown, prompt_tokens=64).ok
    assert resumed(sparse, whole) == 112
    assert resumed(sparse, [*asked, *prompt("goes elsewhere", 40)]) == 64


def test_an_attempt_has_no_slot_for_what_is_not_kept(sparse: Session) -> None:
    tokens = prompt("attempt", 100)
    begun = sparse.begin(tokens, {"state": range(6), "kv": range(6)})
    assert isinstance(begun, kvfabric.Attempt)
    assert [i for i in range(6) if ("state", i) in begun] == [5]
    assert all(("kv", i) in begun for i in range(6))
    begun.abort()


def test_a_policy_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"^spec\.checkpoint: 'most' is none of all, every:N, ends, branches"):
        FabricSpec.load({"model": {"groups": GROUPS}, "checkpoint": "most"})
