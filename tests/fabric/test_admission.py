"""Admission books: limits are charged where slots change hands, and whoever waits is not forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.fabric.admission import PRIORITY_MAX, ByteLimit, WaitingLine
from kvfabric.fabric.invariants import accounting, check
from kvfabric.fabric.kinds import ObjectKind, Reason, Status
from kvfabric.fabric.messages import Release
from kvfabric.fabric.model import ModelSpec

from .many_holders import Holders

MODEL = ModelSpec.load(
    {
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 64},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 6, "block_bytes": 64},
        ]
    }
)
P, Q, R = range(17), range(100, 117), range(200, 217)
OF_P = 4 * 64
"""Bytes of one group of one of these prompts."""


def fabric(*limits: ByteLimit, slots: int = 16, **config: Any) -> Holders:
    return Holders(MODEL, {"n0": (0,), "n1": (0,), "n2": (0,)}, slots=slots, limits=limits, **config)


def used(world: Holders, holder: str = "n0") -> list[int]:
    core = world.cores[holder]
    return [cap.bytes_max - cap.room_bytes for cap in core.ctx.books.admission.caps("acme")]


# --- limits ----------------------------------------------------------------------------------------


def test_without_limits_nothing_is_counted() -> None:
    world = fabric()
    assert world.store("n0", P).refused is None
    assert world.cores["n0"].ctx.books.admission.caps("") == ()


def test_a_kinds_limit_binds_that_kind_alone() -> None:
    world = fabric(ByteLimit(OF_P - 64, kind=ObjectKind.SLIDING_WINDOW))
    begun = world.begin("n0", world.keys(P))
    assert (begun.refused, begun.group) == (Reason.ADMISSION_LIMIT, "swa")
    only_history = [world.objects(world.keys(P), 0, 0)]
    assert world.begin("n0", world.keys(P), items=only_history).refused is None


def test_a_tenants_limit_is_a_quota_and_binds_that_tenant_alone() -> None:
    world = fabric(ByteLimit(2 * OF_P - 64, tenant="acme"))
    assert world.store("n0", P, tenant="bolt").refused is None
    refused = world.begin("n0", world.keys(P, "acme"))
    assert (refused.refused, refused.group) == (Reason.QUOTA, "swa")


def test_a_limit_of_each_tenant_counts_them_apart() -> None:
    world = fabric(ByteLimit(2 * OF_P, each_tenant=True))
    for tenant in ("acme", "bolt"):
        assert world.store("n0", P, tenant=tenant).refused is None
        grant = world.granted("n0", P, tenant=tenant)
        assert world.begin("n0", world.keys(Q, tenant)).refused is Reason.QUOTA
        world.ask("n0", Release(world.name(), grant.lease, None))
        assert world.store("n0", Q, tenant=tenant).refused is None, "what is unpinned makes room for its own tenant"
    assert check(world.cores["n0"]) == []


def test_a_tenant_over_its_quota_pushes_out_its_own_and_nobody_elses() -> None:
    world = fabric(ByteLimit(2 * OF_P, tenant="acme"))
    assert world.store("n0", P, tenant="bolt").refused is None
    assert world.store("n0", P, tenant="acme").refused is None
    assert world.store("n0", Q, tenant="acme").refused is None
    answer = {tenant: world.acquire("n0", P, tenant=tenant, probe=True) for tenant in ("acme", "bolt")}
    assert answer["acme"] is not None
    assert answer["acme"].tokens == 0
    assert answer["bolt"] is not None
    assert answer["bolt"].tokens == 16


@pytest.mark.parametrize("path", ["store", "fetch", "restore"])
def test_every_path_to_a_slot_is_charged(path: str) -> None:
    world = fabric(ByteLimit(10 * OF_P, tenant="acme"))
    how = {"tenant": "acme"}
    assert world.store("n0", P, **how).refused is None
    assert used(world) == [2 * OF_P] or used(world) == [0], "evictable bytes count as room"
    if path == "store":
        grant = world.granted("n0", P, **how)
        assert used(world) == [2 * OF_P - 2 * 64], "the window at 16 needs two of its four blocks"
        world.ask("n0", Release(world.name(), grant.lease, None))
    elif path == "fetch":
        grant = world.granted("n1", P, **how)
        assert used(world, "n1") == [OF_P + 2 * 64]
        world.ask("n1", Release(world.name(), grant.lease, None))
    else:
        from kvfabric.fabric.messages import SwapOut

        keys = world.keys(P, "acme")
        assert world.ask("n0", SwapOut("s", world.everything(keys, "n0"))).refused is None
        assert accounting(world.cores["n0"]).on_tier == 8
        assert used(world) == [0]
        grant = world.granted("n0", P, **how)
        assert used(world) == [OF_P + 2 * 64]
        world.ask("n0", Release(world.name(), grant.lease, None))
    world.at_rest()


def test_a_need_is_admitted_whole_or_not_at_all() -> None:
    world = fabric(ByteLimit(OF_P + 64, tenant="acme"))
    before = accounting(world.cores["n0"])
    assert world.begin("n0", world.keys(P, "acme")).refused is Reason.QUOTA
    assert accounting(world.cores["n0"]) == before
    assert used(world) == [0]


def test_a_fetch_takes_the_largest_position_its_limit_allows_and_names_it() -> None:
    world = fabric(ByteLimit(4 * 64, tenant="acme"), slots=16)
    world.cores["n0"].ctx.books.admission.limits = ()
    assert world.store("n0", P, tenant="acme").refused is None
    answer = world.acquire("n1", P, tenant="acme")
    assert answer is not None
    assert answer.status is Status.PARTIAL_HIT
    assert answer.tokens == 8, "two blocks of history and two of the window"
    assert answer.cause is not None
    assert answer.cause.reason is Reason.QUOTA
    assert check(world.cores["n1"]) == []


# --- waiting ---------------------------------------------------------------------------------------


def crowded() -> tuple[Holders, int]:
    """Everything at n1 is pinned; P is at n0 only. The lease that pins."""
    world = fabric(slots=4)
    assert world.store("n0", P).refused is None
    assert world.store("n1", Q).refused is None
    return world, world.granted("n1", Q).lease


def test_who_waits_gets_the_room_that_is_set_free() -> None:
    world, lease = crowded()
    assert world.acquire("n1", P, wait_s=20.0, patient=True) is None
    assert len(world.cores["n1"].leader.waiting) == 1
    world.ask("n1", Release("r", lease, None))
    answer = next(r for r in reversed(world.replies) if getattr(r, "grant", None) is not None)
    assert answer.tokens == 16
    assert not world.cores["n1"].leader.waiting


def test_who_does_not_wait_is_answered_at_once() -> None:
    world, _ = crowded()
    answer = world.acquire("n1", P)
    assert answer is not None
    assert (answer.tokens, answer.grant) == (0, None)
    assert answer.cause is not None
    assert answer.cause.reason is Reason.ADMISSION_LIMIT


def test_a_wait_ends_with_its_time() -> None:
    world, _ = crowded()
    assert world.acquire("n1", P, wait_s=5.0, patient=True) is None
    world.pass_time(5.1)
    answer = world.replies[-1]
    assert answer.cause.reason is Reason.ADMISSION_LIMIT
    assert not world.cores["n1"].leader.waiting


def test_a_need_larger_than_the_pool_never_waits() -> None:
    world = Holders(MODEL, {"n0": (0,), "n1": (0,)}, slots=16)
    world.slots = 4
    world.start("n1")
    assert world.store("n0", range(33)).refused is None
    answer = world.acquire("n1", range(33), wait_s=30.0)
    assert answer is not None
    assert (answer.tokens, world.cores["n1"].leader.waiting.__len__()) == (16, 0)
    assert answer.cause is not None
    assert answer.cause.reason is Reason.ADMISSION_LIMIT


def test_a_need_larger_than_a_limit_never_waits() -> None:
    world = fabric(ByteLimit(4 * 64, tenant="acme"))
    world.cores["n0"].ctx.books.admission.limits = ()
    assert world.store("n0", P, tenant="acme").refused is None
    answer = world.acquire("n1", P, tenant="acme", wait_s=30.0)
    assert answer is not None
    assert answer.tokens == 8


def test_the_first_in_line_is_served_first_and_nobody_slips_in_behind() -> None:
    world, lease = crowded()
    assert world.store("n2", R).refused is None
    for name, prompt in (("first", P), ("second", R)):
        assert world.acquire("n1", prompt, wait_s=50.0, patient=True, request=name) is None
    world.ask("n1", Release("r", lease, None))
    served = [r.request for r in world.replies if getattr(r, "grant", None) is not None]
    assert "first" in served
    assert "second" not in served
    assert len(world.cores["n1"].leader.waiting) == 1


def test_a_higher_priority_overtakes_and_ageing_bounds_by_how_much() -> None:
    line: WaitingLine[str] = WaitingLine(ageing_s=5.0)
    line.join("old and low", since_s=0.0, priority=-1)
    line.join("young and high", since_s=8.0, priority=1)
    line.join("younger and high", since_s=11.0, priority=1)
    assert list(line) == ["young and high", "old and low", "younger and high"]


def test_a_place_in_line_is_kept_and_left_once() -> None:
    line: WaitingLine[str] = WaitingLine(ageing_s=5.0)
    who = "who"
    line.join(who, since_s=3.0, priority=0)
    line.join("other", since_s=4.0, priority=0)
    line.join(who, since_s=9.0, priority=0)
    assert list(line) == [who, "other"]
    line.leave(who)
    line.leave(who)
    assert (list(line), who in line, len(line)) == (["other"], False, 1)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(-50, 50)), min_size=1, max_size=30))
def test_nobody_is_overtaken_for_longer_than_the_ages_of_all_priorities(comers: list[tuple[float, int]]) -> None:
    line: WaitingLine[tuple[int, float]] = WaitingLine(ageing_s=2.0)
    for number, (since_s, priority) in enumerate(comers):
        line.join((number, since_s), since_s=since_s, priority=priority)
    order = [since_s for _, since_s in line]
    assert len(order) == len(comers)
    for place, since_s in enumerate(order):
        assert all(since_s - later <= 2.0 * 2 * PRIORITY_MAX for later in order[place + 1 :])


# --- books agree -----------------------------------------------------------------------------------


def test_a_charge_that_is_not_what_is_owned_is_noticed() -> None:
    world = fabric(ByteLimit(10 * OF_P, tenant="acme"))
    assert world.store("n0", P, tenant="acme").refused is None
    core = world.cores["n0"]
    assert check(core) == []
    scope = next(core.ctx.books.admission.scopes(ObjectKind.SLIDING_WINDOW, "acme"))
    scope.used[ObjectKind.SLIDING_WINDOW] += 64
    assert [v.invariant for v in check(core)] == ["admission_limits_hold"]
    scope.used[ObjectKind.SLIDING_WINDOW] += 100 * OF_P
    assert check(core)
