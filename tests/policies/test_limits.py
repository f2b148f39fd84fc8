"""Limits by kind and tenant: floors that hold, quotas that are never exceeded, disks that take what is asked for twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.actors.spec import FabricSpec
from kvfabric.fabric.admission import TenantQuota
from kvfabric.fabric.effects import ReadExtent
from kvfabric.fabric.invariants import check
from kvfabric.fabric.kinds import ObjectKind, Reason, SpecError, Status
from kvfabric.fabric.messages import Answer, Park, Release, SwapOut
from kvfabric.fabric.model import ModelSpec
from kvfabric.policies.limits import KindLimit, TenantLimit, byte_limits, quotas
from kvfabric.policies.second_touch import SecondTouch

from ..fabric.many_holders import Holders

MODEL = ModelSpec.load(
    {
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 64},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 6, "block_bytes": 64},
        ]
    }
)
HISTORY, WINDOW = ObjectKind.COMPRESSED_HISTORY, ObjectKind.SLIDING_WINDOW
P, Q = range(17), range(100, 117)


def fabric(tenants: dict[str, TenantLimit] | None = None, **how: Any) -> Holders:
    kinds = how.pop("kinds", {})
    limits = byte_limits(MODEL, how.pop("bytes_max", None), kinds, tenants or {})
    config = {"limits": limits, "quotas": quotas(tenants or {}), **how}
    return Holders(MODEL, {"n0": (0,), "n1": (0,)}, slots=40, **config)


# --- floors ------------------------------------------------------------------------------------------


def test_one_kind_cannot_take_the_floor_of_another() -> None:
    world = fabric({"*": TenantLimit(bytes_max=1000)}, kinds={WINDOW: KindLimit(floor_share=0.4)})
    only_history = [world.objects(world.keys(range(400)), 0, 0, range(11))]
    begun = world.begin("n0", world.keys(range(400)), items=only_history)
    assert (begun.refused, begun.group) == (Reason.QUOTA, "kv"), "704 bytes leave no 400 for windows"
    begun = world.begin("n0", world.keys(range(400)), items=[world.objects(world.keys(range(400)), 0, 0, range(9))])
    assert begun.refused is None
    windows = world.begin("n0", world.keys(Q), items=[world.objects(world.keys(Q), 1, 0, range(4))])
    assert windows.refused is None, "the windows' floor is there, whatever history holds"
    assert check(world.cores["n0"]) == []


def test_what_lies_at_its_floor_is_not_pushed_out_by_another_kind() -> None:
    limit = {"*": TenantLimit(bytes_max=12 * 64)}
    world = fabric(limit, kinds={WINDOW: KindLimit(floor_share=0.34), HISTORY: KindLimit(floor_share=0)})
    assert world.store("n0", P).refused is None
    for start in range(1000, 5000, 100):
        keys = world.keys(range(start, start + 17))
        begun = world.begin("n0", keys, items=[world.objects(keys, 0, 0)])
        assert begun.refused is None
        assert world.commit("n0", begun).refused is None
    books = world.cores["n0"].ctx.books
    assert len(books.table[1, 0]) == 4, "all four windows of the first prompt, the least recently used of all"
    assert len(books.table[0, 0]) == 7, "of 12 slots' bytes, 0.34 are not quite 5"


@settings(max_examples=20)
@given(seed=st.integers(0, 100_000), share=st.floats(0, 0.9), most=st.integers(2, 12))
def test_floors_hold_for_any_sequence(seed: int, share: float, most: int) -> None:
    """Whatever is stored, leased and let go: books agree, and each kind can always come up to its floor."""
    rng = random.Random(seed)
    kinds = {HISTORY: KindLimit(floor_share=share / 2), WINDOW: KindLimit(floor_share=share / 2)}
    tenants = {"*": TenantLimit(bytes_max=most * 64, leases_max=2), "acme": TenantLimit(bytes_max=5 * 64, leases_max=1)}
    world = fabric(tenants, kinds=kinds, bytes_max=2 * most * 64)
    core, leases = world.cores["n0"], list[int]()
    for _ in range(25):
        tenant = rng.choice(("acme", "bolt", "cord"))
        start = rng.randrange(6) * 100
        keys = world.keys(range(start, start + rng.randrange(5, 30)), tenant)
        match rng.randrange(4):
            case 0 | 1:
                groups = rng.choice(((0,), (1,), (0, 1)))
                begun = world.begin("n0", keys, items=[world.objects(keys, g, 0) for g in groups])
                if begun.refused is None:
                    world.commit("n0", begun)
            case 2:
                answer = world.acquire("n0", range(start, start + 30), tenant=tenant)
                if answer is not None and answer.grant is not None:
                    leases.append(answer.grant.lease)
            case _ if leases:
                world.ask("n0", Release(world.name(), leases.pop(rng.randrange(len(leases))), None))
        assert check(core) == []
        for tenant in ("acme", "bolt"):
            for kind in (HISTORY, WINDOW):
                for scope in core.ctx.books.admission.scopes(kind, tenant):
                    to_floor = dict(scope.limit.floors)[kind] - scope.used[kind] + scope.evictable[kind]
                    if to_floor > 0:
                        assert scope.committed({kind: to_floor}, evicted=True) <= scope.limit.bytes_max


# --- tenants -------------------------------------------------------------------------------------------


def test_a_named_tenant_has_its_own_limit_and_not_that_of_every_tenant() -> None:
    world = fabric({"*": TenantLimit(bytes_max=64), "acme": TenantLimit(bytes_max=100 * 64)})
    assert world.store("n0", P, tenant="acme").refused is None
    assert world.begin("n0", world.keys(P, "bolt")).refused is Reason.QUOTA


def test_no_tenant_holds_more_leases_than_its_quota() -> None:
    world = fabric({"*": TenantLimit(leases_max=2)})
    for tenant in ("acme", "bolt"):
        world.store("n0", P, tenant=tenant)
    grants = [world.granted("n0", P, tenant="acme") for _ in range(2)]
    answer = world.acquire("n0", P, tenant="acme")
    assert answer is not None
    assert (answer.status, answer.tokens, answer.grant) == (Status.PARTIAL_HIT, 0, None)
    assert answer.cause is not None
    assert answer.cause.reason is Reason.QUOTA
    probed = world.acquire("n0", P, tenant="acme", probe=True)
    assert probed is not None
    assert probed.tokens == 16, "a probe takes no lease"
    world.ask("n0", Release(world.name(), world.granted("n0", P, tenant="bolt").lease, None))
    world.ask("n0", Release(world.name(), grants[0].lease, None))
    assert world.acquire("n0", P, tenant="acme") is not None
    assert check(world.cores["n0"]) == []


def test_a_lease_that_ran_out_gives_its_place_back() -> None:
    world = fabric({"*": TenantLimit(leases_max=1)})
    world.store("n0", P)
    world.granted("n0", P, lease_s=5.0)
    assert world.acquire("n0", P).grant is None  # type: ignore[union-attr]
    world.pass_time(7.0)
    assert world.granted("n0", P) is not None


@contextmanager
def reads_held(world: Holders) -> Iterator[list[Any]]:
    """The holder's reads from disk wait until the block ends."""
    held: list[Any] = []
    plain = world._carry_out

    def carry_out(name: str, effects: Any) -> None:
        reads = [e for e in effects if isinstance(e, ReadExtent)]
        held.extend((name, e) for e in reads)
        plain(name, [e for e in effects if not isinstance(e, ReadExtent)])

    world._carry_out = carry_out  # type: ignore[method-assign]
    yield held
    world._carry_out = plain  # type: ignore[method-assign]
    for name, effect in held:
        plain(name, [effect])
    world.run()
    world.pass_time(0.0)


def test_a_tenants_restores_wait_for_each_other_and_for_nobody_elses() -> None:
    world = fabric({"acme": TenantLimit(restores_max=1)}, restore_share=1.0)
    for tenant, prompt in (("acme", P), ("acme", Q), ("bolt", P)):
        world.store("n0", prompt, tenant=tenant)
        keys = world.keys(prompt, tenant)
        assert world.ask("n0", SwapOut(world.name(), world.everything(keys, "n0"))).refused is None
    admission = world.cores["n0"].ctx.books.admission
    with reads_held(world) as held:
        for tenant, prompt in (("acme", P), ("acme", Q), ("bolt", P)):
            assert world.acquire("n0", prompt, tenant=tenant, patient=True) is None
            world.pass_time(0.0)  # each that may start does so in a step of its own
            assert check(world.cores["n0"]) == []
        assert dict(admission.restores) == {"acme": 1, "bolt": 1}
        assert len(world.cores["n0"].disk.line) == 1
        asked = len(held)
        assert asked
    assert not admission.restores
    answers = [r for r in world.replies if isinstance(r, Answer)]
    assert [a.tokens for a in answers] == [16, 16, 16]


def test_who_waits_too_long_for_a_tenants_restores_is_told_that_it_is_the_quota() -> None:
    world = fabric({"acme": TenantLimit(restores_max=1)}, restore_share=1.0, recovery_wait_s=3.0)
    for prompt in (P, Q):
        world.store("n0", prompt, tenant="acme")
        world.ask("n0", SwapOut(world.name(), world.everything(world.keys(prompt, "acme"), "n0")))
    with reads_held(world):
        assert world.acquire("n0", P, tenant="acme", patient=True) is None
        assert world.acquire("n0", Q, tenant="acme", patient=True) is None
        world.pass_time(3.1)
        answer = world.replies[-1]
    assert (answer.tokens, answer.cause.reason, answer.cause.kind) == (0, Reason.QUOTA, ObjectKind.DISK_PREFIX)


def test_quotas_that_were_overrun_are_noticed() -> None:
    """Control of the invariant."""
    world = fabric({"*": TenantLimit(leases_max=1)})
    world.store("n0", P)
    world.granted("n0", P)
    assert check(world.cores["n0"]) == []
    world.cores["n0"].ctx.books.admission.quotas = {"*": TenantQuota(leases_max=0)}
    assert [v.invariant for v in check(world.cores["n0"])] == ["admission_limits_hold"]


# --- second touch --------------------------------------------------------------------------------------


def test_only_what_was_used_twice_is_written() -> None:
    world = Holders(MODEL, {"n0": (0,)}, slots=40, writing=SecondTouch)
    for prompt in (P, Q):
        world.store("n0", prompt)
    world.ask("n0", Release(world.name(), world.granted("n0", P).lease, None))
    for prompt in (P, Q):
        assert world.swap_out("n0", prompt).refused is None
    written = {entry.digest for entries in world.disks["n0"].values() for entry, _ in entries}
    # All of the history was leased; of the windows, what a resume at 16 reads.
    kv, swa = ({split32(world.keys(P).keys(4))[i] for i in used} for used in (range(4), (2, 3)))
    assert written == kv | swa
    assert world.cores["n0"].ctx.counters["writes_not_worth"] == 10


def test_without_the_option_all_is_written() -> None:
    """Control."""
    world = Holders(MODEL, {"n0": (0,)}, slots=40)
    world.store("n0", Q)
    assert world.swap_out("n0", Q).refused is None
    assert sum(len(entries) for entries in world.disks["n0"].values()) == 8


def test_what_left_after_one_use_is_at_its_second_when_it_comes_back() -> None:
    world = Holders(MODEL, {"n0": (0,)}, slots=40, writing=SecondTouch)
    world.store("n0", P)
    world.drop("n0", P)
    world.store("n0", P)
    assert world.swap_out("n0", P).refused is None
    assert sum(len(entries) for entries in world.disks["n0"].values()) == 8


def test_the_state_of_a_parked_request_is_written_all_the_same() -> None:
    world = Holders(MODEL, {"n0": (0,)}, slots=40, writing=SecondTouch)
    world.store("n0", P)
    grant = world.granted("n0", P)
    world.cores["n0"].ctx.books.uses[:] = 0
    assert world.ask("n0", Park(world.name(), grant.lease)).refused is None
    assert sum(len(entries) for entries in world.disks["n0"].values()) == 6


def test_a_second_touch_memory_is_bounded() -> None:
    policy = SecondTouch(size_max=3)
    for i in range(5):
        policy.left(bytes([i]))
    assert len(policy) == 3
    assert [policy.admits(bytes([i]), 1) for i in range(5)] == [False, False, True, True, True]
    assert not policy.admits(bytes([4]), 0)


def split32(blob: bytes) -> list[bytes]:
    return [blob[i : i + 32] for i in range(0, len(blob), 32)]


# --- specs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"kinds": {"indexer": {"floor": 0.1}}}, r"limits\.kinds\.indexer: no group of the model is of this kind"),
        (
            {"kinds": {"compressed_history": {"floor": 0.99}}},
            r"the floors are more than the whole \(compressed_history 0\.99, sliding_window 0\.05\)",
        ),
        ({"tenants": {"acme": {"leases_max": 0}}}, r"spec\.limits\.tenants\.acme\.leases_max: "),
        ({"tenants": {"acme": {"lease_max": 1}}}, r"spec\.limits\.tenants\.acme\.lease_max: unknown field"),
    ],
)
def test_a_spec_that_limits_nothing_sensible_is_refused_by_field(limits: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        FabricSpec.load({"model": MODEL.model_dump(mode="json"), "limits": limits})


def test_every_kind_has_a_floor_unless_the_spec_says_otherwise() -> None:
    (limit,) = byte_limits(MODEL, 1000, {WINDOW: KindLimit(floor_share=0)}, {})
    assert dict(limit.floors) == {HISTORY: 50, WINDOW: 0}
