"""What cannot make its deadline is answered at once, wherever the bytes would come from."""

from __future__ import annotations

import pytest

from kvfabric.fabric.effects import DiskLost, RemoteState
from kvfabric.fabric.far_tiers import FAR_FORGET_S, FAR_MAX, FarTiers
from kvfabric.fabric.kinds import Reason, Status
from kvfabric.fabric.messages import Answer
from kvfabric.fabric.restores import Rate

from ..fabric.many_holders import Holders
from .one_disk import MODEL, Disk

A, B = range(65), range(1000, 1065)


def far_away() -> Holders:
    """Prompts that lie on the disk of a holder that another asks, and whose reads take 5 s."""
    world = Holders(MODEL, {"n0": (0,), "n1": (0,)})
    for tokens in (A, B):
        world.store("n1", tokens)
        assert world.swap_out("n1", tokens).refused is None
    world.read_s = 5.0
    return world


def asked(world: Holders, tokens: range, deadline_s: float | None) -> Answer:
    answer = world.acquire("n0", tokens, deadline_s=deadline_s)
    assert answer is not None
    return answer


def test_another_holders_disk_that_was_slow_lately_is_not_waited_for_beyond_the_deadline() -> None:
    world = far_away()
    assert asked(world, A, None).status is Status.FULL_HIT  # teaches how long it takes
    began = world.now
    answer = asked(world, B, 1.0)
    assert (answer.tokens, answer.hash_tokens, world.now) == (0, 64, began)
    assert answer.cause is not None
    assert answer.cause.reason is Reason.DEADLINE_EXCEEDED
    assert world.cores["n0"].ctx.counters["restores_given_up"] == 1


def test_a_deadline_that_it_can_make_is_waited_for() -> None:
    """The control."""
    world = far_away()
    assert asked(world, A, None).status is Status.FULL_HIT
    assert asked(world, B, 60.0).status is Status.FULL_HIT


def test_a_holder_that_was_not_asked_for_a_while_is_tried_again() -> None:
    world = far_away()
    assert asked(world, A, None).status is Status.FULL_HIT
    world.pass_time(FAR_FORGET_S + 1.0)
    world.read_s = 0.0
    assert asked(world, B, 1.0).status is Status.FULL_HIT


def test_a_probe_expects_what_another_holders_disk_took_lately() -> None:
    world = far_away()
    assert asked(world, A, None).status is Status.FULL_HIT
    probed = world.acquire("n0", B, probe=True)
    assert probed is not None
    assert probed.status is Status.PENDING
    assert probed.expected_s == pytest.approx(5.0, rel=0.5)


def test_the_store_has_a_rate_of_its_own() -> None:
    d = Disk(remote=True)
    d.handle(RemoteState(None))
    d.on_disk(1, 2, 3)
    first, second, _ = d.extents
    d.handle(DiskLost((first, second)))
    request = d.acquire(1)
    assert all(read.remote for read in d.reads)
    d.now += 10.0
    d.finish_all()
    assert d.answer(request) is not None
    late, soon = d.acquire(2, deadline_s=5.0), d.acquire(3, deadline_s=5.0)
    answer = d.answer(late)
    assert answer is not None
    assert (answer.tokens, answer.cause and answer.cause.reason) == (0, Reason.DEADLINE_EXCEEDED)
    assert [read.remote for read in d.reads] == [False]  # what lies on the disk is not blamed for the store
    d.finish_all()
    assert (a := d.answer(soon)) is not None
    assert a.status is Status.FULL_HIT
    patient = d.acquire(2, deadline_s=30.0)
    d.finish_all()
    assert (a := d.answer(patient)) is not None
    assert a.status is Status.FULL_HIT
    d.sound()


def test_only_so_many_holders_are_remembered() -> None:
    far, guess = FarTiers(), Rate(1000.0)
    for number in range(FAR_MAX + 5):
        far.done(f"n{number}", 100, 0.0, 1.0)
    assert far.seconds("n0", 1000, 1.0, guess) == 1.0  # the guess
    assert far.seconds(f"n{FAR_MAX}", 1000, 1.0, guess) == pytest.approx(10.0)
