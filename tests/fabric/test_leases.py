"""The lease book: fences, deadlines, grace, renewal, release, and leases over several holders."""

from __future__ import annotations

from typing import Any

import pytest

from kvfabric.fabric.effects import Received
from kvfabric.fabric.identity import weights_digest16
from kvfabric.fabric.invariants import accounting, check
from kvfabric.fabric.kinds import Reason, Status
from kvfabric.fabric.leases import grace_s, read_refusal
from kvfabric.fabric.messages import (
    Answer,
    HolderGone,
    LeaseGrant,
    MateColumns,
    PartGrant,
    PartGranted,
    PartOpen,
    PartRelease,
    PartRenew,
    PartRenewed,
    PartReply,
    PinEnd,
    PinEnded,
    PinReply,
    PinRequest,
    Release,
    Renew,
    SetMode,
    SetWeights,
)
from kvfabric.fabric.model import ModelSpec

from .many_holders import Holders

GROUPS = [
    {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 64},
    {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 6, "block_bytes": 64},
]
MODEL = ModelSpec.load({"groups": GROUPS})
TWO_RANKS = ModelSpec.load({"groups": GROUPS, "shards": 2})
RANKS = ("n0", "n1")
P, Q = range(33), range(500, 533)


@pytest.fixture
def world() -> Holders:
    world = Holders(MODEL, {"n0": (0,)}, slots=12)
    assert world.store("n0", P).refused is None
    return world


@pytest.fixture
def ranks() -> Holders:
    world = Holders(TWO_RANKS, {"n0": (0,), "n1": (1,)}, slots=12)
    for rank in RANKS:
        assert world.store(rank, P).refused is None
    return world


def refusal(world: Holders, grant: LeaseGrant, deadline_s: float | None = None) -> Reason | None:
    return read_refusal(grant, grant.deadline_s if deadline_s is None else deadline_s, world.parts(grant), world.now)


def renew(world: Holders, grant: LeaseGrant, lease_s: float) -> Any:
    return world.ask("n0", Renew(world.name(), grant.lease, lease_s))


# --- one holder ------------------------------------------------------------------------------------


def test_fences_only_grow_and_never_come_again_in_a_later_life(world: Holders) -> None:
    fences = [world.granted("n0", P).parts[0].fence for _ in range(4)]
    assert fences == sorted(set(fences))
    world.start("n0")
    assert world.store("n0", P).refused is None
    later = world.granted("n0", P).parts[0].fence
    assert later > max(fences)


def test_a_release_from_an_earlier_life_ends_nothing(world: Holders) -> None:
    old = world.granted("n0", P)
    world.start("n0")
    assert world.store("n0", P).refused is None
    new = world.granted("n0", P)
    world.ask("n0", Release("r", old.lease, None))
    assert set(world.cores["n0"].ctx.leases.live) == {new.lease}
    assert refusal(world, new) is None
    assert renew(world, old, 5.0).refused is Reason.HOLDER_LOST


def test_a_lease_has_expired_at_its_deadline_itself(world: Holders) -> None:
    grant = world.granted("n0", P, lease_s=10.0)
    assert grant.deadline_s == world.now + 10.0
    world.pass_time(10.0 - 1e-6)
    assert refusal(world, grant) is None
    world.pass_time(1e-6)
    assert refusal(world, grant) is Reason.LEASE_EXPIRED
    assert renew(world, grant, 10.0).refused is Reason.LEASE_EXPIRED


@pytest.mark.parametrize(("lease_s", "expected_s"), [(0.5, 1.0), (10.0, 1.0), (60.0, 6.0)])
def test_pins_outlive_what_the_reader_believes_by_the_grace(world: Holders, lease_s: float, expected_s: float) -> None:
    assert grace_s(lease_s) == expected_s
    grant = world.granted("n0", P, lease_s=lease_s)
    world.pass_time(lease_s + expected_s - 0.01)
    assert accounting(world.cores["n0"]).pins
    assert grant.lease in world.cores["n0"].ctx.leases.live
    world.pass_time(0.02)
    world.at_rest()


def test_renewal_counts_from_now_and_never_shortens(world: Holders) -> None:
    grant = world.granted("n0", P, lease_s=10.0)
    world.pass_time(4.0)
    assert renew(world, grant, 20.0).deadline_s == world.now + 20.0
    late = renew(world, grant, 1.0)
    assert (late.refused, late.deadline_s) == (None, world.now + 20.0)
    world.pass_time(15.0)
    assert refusal(world, grant, late.deadline_s) is None
    assert check(world.cores["n0"]) == []


def test_a_renewed_lease_keeps_its_pins_to_its_new_end(world: Holders) -> None:
    grant = world.granted("n0", P, lease_s=2.0)
    world.pass_time(1.0)
    end = renew(world, grant, 30.0).deadline_s
    world.pass_time(end - world.now)
    assert accounting(world.cores["n0"]).pins
    world.pass_time(grace_s(30.0) + 0.1)
    world.at_rest()


def test_a_release_gives_pins_back_and_is_idempotent(world: Holders) -> None:
    first, second = world.granted("n0", P), world.granted("n0", P)
    for _ in range(2):
        assert world.ask("n0", Release(world.name(), first.lease, None)).refused is None
    assert accounting(world.cores["n0"]).pins
    assert refusal(world, second) is None
    world.ask("n0", Release(world.name(), second.lease, None))
    world.at_rest()
    assert renew(world, second, 5.0).refused is Reason.LEASE_EXPIRED


def test_what_was_released_may_make_room_and_the_reader_sees_it(world: Holders) -> None:
    grant = world.granted("n0", P)
    assert world.store("n0", Q).refused is Reason.ADMISSION_LIMIT
    world.ask("n0", Release(world.name(), grant.lease, None))
    assert world.store("n0", Q).refused is None
    assert refusal(world, grant) is Reason.VERSION_CHANGED


def test_a_repeated_acquire_is_one_lease(world: Holders) -> None:
    first = world.granted("n0", P, request="same")
    assert world.granted("n0", P, request="same") == first
    assert len(world.cores["n0"].ctx.leases.live) == 1


def test_a_lease_bears_its_prompts_weights_and_ends_with_them(world: Holders) -> None:
    grant = world.granted("n0", P)
    old, new = weights_digest16("v1"), weights_digest16("v2")
    assert grant.weights == old
    world.ask("n0", SetWeights(new, (old,), 1), "supervisor")
    assert refusal(world, grant) is Reason.WEIGHTS_MISMATCH
    assert renew(world, grant, 5.0).refused is Reason.WEIGHTS_MISMATCH
    answer = world.acquire("n0", P)
    assert answer is not None
    assert answer.status is Status.MISS


def test_reads_are_refused_in_the_order_of_the_format(world: Holders) -> None:
    grant = world.granted("n0", P, lease_s=10.0)
    arena = world.arenas["n0"]
    slot = int.from_bytes(grant.parts[0].slots[0].slots[:4], "little")
    arena.vacate(slot)
    assert refusal(world, grant) is Reason.VERSION_CHANGED
    arena.set_weights(weights_digest16("v2"))
    assert refusal(world, grant) is Reason.WEIGHTS_MISMATCH
    arena.set_grants_until(int((world.now - 1) * 1e9))
    assert refusal(world, grant) is Reason.HOLDER_LOST
    world.now += 10.0
    assert refusal(world, grant) is Reason.LEASE_EXPIRED


def test_a_fresh_lifes_memory_is_not_that_of_the_leased_one(world: Holders) -> None:
    grant = world.granted("n0", P)
    assert refusal(world, grant) is None
    world.start("n0")
    assert refusal(world, grant) is Reason.HOLDER_LOST
    assert read_refusal(grant, grant.deadline_s, [(grant.parts[0], None)], world.now) is Reason.HOLDER_LOST


def test_a_draining_holder_neither_grants_nor_renews(world: Holders) -> None:
    grant = world.granted("n0", P)
    world.ask("n0", SetMode(True, False, 1), "supervisor")
    answer = world.acquire("n0", P)
    assert answer is not None
    assert answer.cause is not None
    assert answer.cause.reason is Reason.DRAINING
    assert renew(world, grant, 5.0).refused is Reason.DRAINING
    assert refusal(world, grant) is None, "what was promised stands"


# --- several ranks ---------------------------------------------------------------------------------


def test_a_lease_over_two_ranks_bears_one_fence_each(ranks: Holders) -> None:
    grant = ranks.granted("n0", P, readers=RANKS)
    assert [part.holder for part in grant.parts] == ["n0", "n1"]
    assert {run.shard for part in grant.parts for run in part.slots} == {0, 1}
    assert refusal(ranks, grant) is None
    ranks.ask("n0", Release("r", grant.lease, None))
    ranks.at_rest()


def test_one_rank_that_lacks_a_block_shortens_all(ranks: Holders) -> None:
    last = (ranks.objects(ranks.keys(P), 0, 1, [7]),)
    from kvfabric.fabric.messages import Drop

    assert ranks.ask("n1", Drop("d", last)).refused is None
    grant = ranks.granted("n0", P, readers=RANKS)
    assert grant.tokens == 28
    assert {len(part.slots[0].indices) for part in grant.parts} == {7}


@pytest.mark.parametrize("lost", [PartOpen, PartReply, PartGrant, PartGranted])
def test_a_rank_that_goes_silent_leaves_no_lease_anywhere(ranks: Holders, lost: type) -> None:
    ranks.hold_back = lambda _, __, record: isinstance(record, lost)
    answer = ranks.acquire("n0", P, readers=RANKS, patient=True)
    assert answer is None
    ranks.pass_time(100.0)
    answer = ranks.replies[-1]
    assert answer.grant is None
    assert answer.cause.reason is Reason.HOLDER_LOST
    assert not ranks.cores["n0"].ctx.leases.live
    ranks.hold_back = lambda *_: False
    ranks.pass_time(40.0)
    ranks.at_rest()
    assert ranks.granted("n0", P, readers=RANKS).tokens == 32


def test_a_repeated_reply_of_a_rank_does_not_end_its_share(ranks: Holders) -> None:
    grant = ranks.granted("n0", P, readers=RANKS)
    repeated = [record for sender, to, record in ranks.sent if (sender, to) == ("n1", "n0")]
    assert {type(r) for r in repeated} >= {PartReply, PartGranted}
    for record in repeated:
        ranks.feed("n0", Received("n1", record))
    assert all(len(ranks.cores[rank].ctx.leases.live) == 1 for rank in RANKS)
    assert refusal(ranks, grant) is None
    assert check(ranks.cores["n1"]) == []


def test_all_ranks_renew_or_the_lease_stays_as_it_was(ranks: Holders) -> None:
    grant = ranks.granted("n0", P, readers=RANKS, lease_s=10.0)
    assert renew(ranks, grant, 20.0).deadline_s == ranks.now + 20.0
    ranks.hold_back = lambda _, __, record: isinstance(record, (PartRenew, PartRenewed))
    assert renew(ranks, grant, 50.0) is None
    ranks.pass_time(5.0)
    assert ranks.replies[-1].refused is Reason.HOLDER_LOST
    assert all(len(ranks.cores[rank].ctx.leases.live) == 1 for rank in RANKS)
    assert refusal(ranks, grant, grant.deadline_s + 10.0) is None


def test_a_rank_that_has_the_lease_no_more_ends_it_on_all(ranks: Holders) -> None:
    grant = ranks.granted("n0", P, readers=RANKS)
    (theirs,) = ranks.cores["n1"].ctx.leases.live
    ranks.feed("n1", Received("n0", PartRelease(theirs)))
    assert renew(ranks, grant, 20.0).refused is Reason.LEASE_EXPIRED
    ranks.at_rest()


def test_a_rank_that_died_ends_the_lease_on_the_others(ranks: Holders) -> None:
    grant = ranks.granted("n0", P, readers=RANKS)
    ranks.feed("n0", Received("supervisor", HolderGone("n1", 1)))
    assert not ranks.cores["n0"].ctx.leases.live
    assert renew(ranks, grant, 5.0).refused is Reason.LEASE_EXPIRED


def test_a_leader_that_died_ends_its_leases_on_the_ranks(ranks: Holders) -> None:
    ranks.granted("n0", P, readers=RANKS)
    assert ranks.cores["n1"].ctx.leases.live
    ranks.feed("n1", Received("supervisor", HolderGone("n0", 1)))
    assert not ranks.cores["n1"].ctx.leases.live


def test_what_a_dead_leader_reserved_at_a_rank_is_let_go(ranks: Holders) -> None:
    ranks.hold_back = lambda _, __, record: isinstance(record, PartGrant)
    assert ranks.acquire("n0", P, readers=RANKS, patient=True) is None
    assert accounting(ranks.cores["n1"]).pins
    ranks.feed("n1", Received("supervisor", HolderGone("n2", 1)))
    assert accounting(ranks.cores["n1"]).pins, "another holder's death is none of its business"
    ranks.feed("n1", Received("supervisor", HolderGone("n0", 1)))
    assert accounting(ranks.cores["n1"]).pins == 0
    assert check(ranks.cores["n1"]) == []


@pytest.mark.parametrize("silent", [MateColumns, PartReply, PartGranted])
def test_who_waits_for_a_rank_that_died_waits_no_longer(ranks: Holders, silent: type) -> None:
    ranks.hold_back = lambda sender, _, record: sender == "n1" and isinstance(record, silent)
    assert ranks.acquire("n0", P, readers=RANKS, patient=True) is None
    began_s = ranks.now
    ranks.feed("n0", Received("supervisor", HolderGone("n2", 1)))
    assert not any(isinstance(reply, Answer) for reply in ranks.replies), "n2 takes no part"
    ranks.feed("n0", Received("supervisor", HolderGone("n1", 1)))
    (answer,) = [reply for reply in ranks.replies if isinstance(reply, Answer)]
    assert (answer.tokens, answer.grant, ranks.now) == (0, None, began_s)
    assert answer.cause is not None
    assert answer.cause.reason is Reason.HOLDER_LOST
    assert accounting(ranks.cores["n0"]).pins == 0
    assert check(ranks.cores["n0"]) == []


def test_what_a_source_pinned_for_a_dead_reader_is_let_go() -> None:
    world = Holders(MODEL, {"n0": (0,), "n1": (0,)}, slots=12)
    assert world.store("n0", P).refused is None
    world.hold_back = lambda _, __, record: isinstance(record, PinReply | PinEnd)
    assert world.acquire("n1", P, patient=True) is None
    assert accounting(world.cores["n0"]).pins
    world.feed("n0", Received("supervisor", HolderGone("n1", 1)))
    assert accounting(world.cores["n0"]).pins == 0
    # A reader that is taken for dead and reads on is promised nothing by the end of its pins.
    world.hold_back = lambda *_: False
    (asked,) = [record for sender, _, record in world.sent if sender == "n1" and isinstance(record, PinRequest)]
    world.feed("n0", Received("n1", PinEnd(asked.op, ())))
    first = next(record for _, _, record in world.sent if isinstance(record, PinEnded))
    assert (first.op, first.versions) == (asked.op, ())
    assert check(world.cores["n0"]) == []


@pytest.mark.parametrize("timeout_s", [1.0, 10.0, 90.0])
def test_pins_at_a_source_outlast_every_try_of_a_transfer(timeout_s: float) -> None:
    world = Holders(MODEL, {"n0": (0,), "n1": (0,)}, slots=12, transfer_timeout_s=timeout_s)
    assert world.store("n0", P).refused is None
    world.hold_back = lambda _, __, record: isinstance(record, PinEnd)
    assert world.acquire("n1", P, patient=True) is None
    tries = 1 + world.cores["n0"].ctx.config.transfer_retries
    world.pass_time(tries * timeout_s + 1.0)
    assert accounting(world.cores["n0"]).pins
    world.pass_time(4.0)
    assert accounting(world.cores["n0"]).pins == 0


def test_a_frozen_share_whose_release_was_lost_asks_its_leader_and_ends(ranks: Holders) -> None:
    grant = ranks.granted("n0", P, readers=RANKS, graph=True, lease_s=2.0)
    ranks.hold_back = lambda _, __, record: isinstance(record, PartRelease)
    ranks.ask("n0", Release("r", grant.lease, None))
    ranks.pass_time(60.0)
    assert accounting(ranks.cores["n1"]).pins, "an expired graph share does not end by itself"
    ranks.hold_back = lambda *_: False
    ranks.pass_time(ranks.cores["n1"].ctx.config.graph_check_s + 1)
    ranks.at_rest()


def test_a_frozen_share_that_is_still_leased_stays(ranks: Holders) -> None:
    grant = ranks.granted("n0", P, readers=RANKS, graph=True, lease_s=2.0)
    ranks.pass_time(60.0)
    assert accounting(ranks.cores["n1"]).pins
    assert all(check(core) == [] for core in ranks.cores.values())
    ranks.ask("n0", Release("r", grant.lease, None))
    ranks.at_rest()
