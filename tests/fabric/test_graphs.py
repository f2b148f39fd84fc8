"""Graph leases: what a captured graph has baked in stays where it is, with the bytes it was promised."""

from __future__ import annotations

import numpy as np
import pytest

from kvfabric.fabric.admission import ByteLimit
from kvfabric.fabric.effects import PeerClosed
from kvfabric.fabric.invariants import accounting, check
from kvfabric.fabric.kinds import Reason
from kvfabric.fabric.messages import Drop, GraphIdle, GraphRegister, LeaseGrant, Objects, Release
from kvfabric.fabric.model import ModelSpec

from .one_holder import OneHolder

MODEL = ModelSpec.load(
    {
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 64},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 8, "block_bytes": 64},
        ]
    }
)
P, Q, R = range(17), range(100, 117), range(200, 217)


def slots_of(grant: LeaseGrant) -> dict[tuple[int, int], int]:
    """(group, index) -> slot of a lease."""
    return {
        (run.group, index): slot
        for part in grant.parts
        for run in part.slots
        for index, slot in zip(run.indices, np.frombuffer(run.slots, "<u4").tolist(), strict=True)
    }


def contents(world: OneHolder, grant: LeaseGrant) -> dict[tuple[int, int], bytes]:
    return {key: world.arena.content(slot).tobytes() for key, slot in slots_of(grant).items()}


def captured(world: OneHolder) -> tuple[int, LeaseGrant]:
    """A graph captured over P's slots, and the lease it was captured under, released again."""
    grant = world.granted(P)
    registered = world.ask(GraphRegister(world.name(), grant.parts[0].slots))
    assert registered.refused is None
    world.ask(Release(world.name(), grant.lease, None))
    return registered.graph, grant


@pytest.fixture
def world() -> OneHolder:
    world = OneHolder(MODEL, slots=12)
    world.store(P, seed=1)
    world.store(Q, seed=2)
    return world


def test_another_prompt_is_brought_to_the_very_slots_of_the_graph(world: OneHolder) -> None:
    graph, capture = captured(world)
    elsewhere = world.granted(Q)
    expected = contents(world, elsewhere)
    assert slots_of(elsewhere) != slots_of(capture), "the control: without the graph Q lies elsewhere"
    world.ask(Release(world.name(), elsewhere.lease, None))
    grant = world.granted(Q, graph=True, graphs=(("n0", graph),))
    assert slots_of(grant) == slots_of(capture)
    assert contents(world, grant) == expected
    assert check(world.core) == []


def stored_again(world: OneHolder, tokens: range, seed: int) -> None:
    """Drop a prompt and store it anew: it takes the same slots in another order."""
    objects = tuple(Objects(group, 0, tuple(range(4)), world.keys(tokens).keys(4)[:128]) for group in (0, 1))
    assert world.ask(Drop(world.name(), objects)).refused is None
    world.store(tokens, seed=seed)


def test_objects_that_lie_in_one_anothers_slots_are_brought_to_those_of_the_graph(world: OneHolder) -> None:
    graph, capture = captured(world)
    stored_again(world, P, seed=1)
    now = world.granted(P)
    expected = contents(world, now)
    assert slots_of(now) != slots_of(capture)
    blocks = [{slot for (group, _), slot in slots_of(grant).items() if group == 0} for grant in (now, capture)]
    assert blocks[0] == blocks[1], "the control: a permutation"
    # A slot that another lease holds too cannot be vacated, however many rounds there were.
    answer = world.acquire(P, graph=True, graphs=(("n0", graph),))
    assert answer.grant is None
    assert answer.cause is not None
    assert answer.cause.reason is Reason.PINNED
    world.ask(Release(world.name(), now.lease, None))
    grant = world.granted(P, graph=True, graphs=(("n0", graph),))
    assert slots_of(grant) == slots_of(capture)
    assert contents(world, grant) == expected
    assert check(world.core) == []
    world.ask(Release(world.name(), grant.lease, None))
    assert accounting(world.core).pins == 0


def test_without_a_spare_slot_objects_that_lie_in_one_anothers_are_refused(world: OneHolder) -> None:
    graph, _ = captured(world)
    world.store(R, seed=3)
    others = [world.granted(Q), world.granted(R)]
    stored_again(world, P, seed=1)
    answer = world.acquire(P, graph=True, graphs=(("n0", graph),))
    assert answer.grant is None
    assert answer.cause is not None
    assert answer.cause.reason is Reason.ADMISSION_LIMIT
    assert check(world.core) == []
    for other in others:
        world.ask(Release(world.name(), other.lease, None))
    assert world.acquire(P, graph=True, graphs=(("n0", graph),)).grant is not None
    assert check(world.core) == []


def test_addresses_and_contents_stand_while_stores_and_evictions_run_beside(world: OneHolder) -> None:
    graph, _ = captured(world)
    grant = world.granted(P, graph=True, graphs=(("n0", graph),))
    before = contents(world, grant)
    for seed in range(3, 20):
        world.store(range(1000 * seed, 1000 * seed + 17), seed=seed)
    assert contents(world, grant) == before
    assert world.acquire(Q).tokens == 0, "the control: what no graph froze made room"
    assert check(world.core) == []


def test_what_would_free_a_frozen_slot_is_refused(world: OneHolder) -> None:
    graph, _ = captured(world)
    grant = world.granted(P, graph=True, graphs=(("n0", graph),))
    drop = Drop(world.name(), (Objects(0, 0, (0,), world.keys(P).keys(4)[:32]),))
    assert world.ask(drop).refused is Reason.GRAPH_FROZEN
    world.ask(Release(world.name(), grant.lease, None))
    drop = Drop(world.name(), drop.objects)
    assert world.ask(drop).refused is None, "the control: a released graph lease freezes nothing"


def test_a_graph_lease_is_refused_while_another_lease_holds_a_slot_it_needs(world: OneHolder) -> None:
    graph, _ = captured(world)
    other = world.granted(P)
    answer = world.acquire(Q, graph=True, graphs=(("n0", graph),))
    assert answer.grant is None
    assert answer.cause is not None
    assert answer.cause.reason is Reason.PINNED
    world.ask(Release(world.name(), other.lease, None))
    assert world.acquire(Q, graph=True, graphs=(("n0", graph),)).grant is not None


def test_registration_refuses_a_slot_that_is_no_longer_resident(world: OneHolder) -> None:
    grant = world.granted(P)
    world.ask(Release(world.name(), grant.lease, None))
    keys = world.keys(P)
    world.ask(Drop(world.name(), (Objects(0, 0, (2,), keys.keys(4)[64:96]),)))
    registered = world.ask(GraphRegister(world.name(), grant.parts[0].slots))
    assert registered.refused is Reason.VERSION_CHANGED
    assert registered.group == "kv"


@pytest.mark.parametrize("proof", ["idle", "dead"])
def test_an_expired_graph_lease_keeps_its_slots_until_its_process_is_idle_or_dead(world: OneHolder, proof: str) -> None:
    graph, _ = captured(world)
    world.granted(P, graph=True, graphs=(("n0", graph),), lease_s=5.0)
    world.granted(Q, lease_s=5.0)
    world.pass_time(60.0)
    assert accounting(world.core).pins == 6, "only the graph's four blocks and two window blocks"
    if proof == "idle":
        world.ask(GraphIdle(world.name(), graph, drop=False))
    else:
        world.handle(PeerClosed("client:1"))
    assert accounting(world.core).pins == 0
    assert check(world.core) == []


def test_a_living_graph_lease_survives_the_word_idle(world: OneHolder) -> None:
    graph, _ = captured(world)
    world.granted(P, graph=True, graphs=(("n0", graph),))
    world.ask(GraphIdle(world.name(), graph, drop=False))
    assert accounting(world.core).pins == 6


def test_a_graph_that_is_not_registered_gets_no_lease(world: OneHolder) -> None:
    answer = world.acquire(P, graph=True, graphs=(("n0", 99),))
    assert answer.grant is None
    assert answer.cause is not None
    assert answer.cause.reason is Reason.GRAPH_FROZEN
    assert world.acquire(P, graph=True).grant is not None


def test_a_move_that_the_tenants_limit_cannot_take_is_refused_and_breaks_nothing() -> None:
    world = OneHolder(MODEL, slots=12, limits=(ByteLimit(64 * 14, each_tenant=True),))
    world.store(P, seed=1)
    graph, _ = captured(world)
    world.store(Q, seed=2)
    held = world.granted(P)
    answer = world.acquire(Q, graph=True, graphs=(("n0", graph),))
    assert answer.grant is None, "P's slots are leased, and copies of Q beside Q are over the limit"
    assert check(world.core) == []
    world.ask(Release(world.name(), held.lease, None))
    assert world.acquire(P, graph=True, graphs=(("n0", graph),)).grant is not None
