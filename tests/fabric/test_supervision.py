"""The supervisor's rules: who is started, replaced, backed off from, and since when a right to grant counts."""

from __future__ import annotations

import pytest

from kvfabric.fabric.arena import ArenaLayout, PoolLayout, heap_arena
from kvfabric.fabric.context import HolderConfig
from kvfabric.fabric.effects import Received, Send
from kvfabric.fabric.holder import HolderCore
from kvfabric.fabric.messages import GrantSeen, GrantUntil, HolderGone, Member, ShardMap
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.supervisor import (
    Answered,
    Exited,
    Life,
    Observed,
    Start,
    Started,
    StartFailed,
    Stop,
    SupervisorConfig,
    SupervisorCore,
    SupervisorEffect,
    Tick,
    Wanted,
)

HOLDER = Wanted("holder:a:0", "a", (0,))
SEEN = Observed((HOLDER,), frozenset({"a"}))


def member(incarnation: int) -> Member:
    return Member(HOLDER.address, incarnation, "a", "host", "unix:@a", "tcp:a:1", (0,))


def supervisor(*, inherited: bool = False) -> SupervisorCore:
    return SupervisorCore(SupervisorConfig(), 0.0, inherited=inherited)


def with_one_up(incarnation: int = 1, clock_s: float = 500.0) -> SupervisorCore:
    core = supervisor()
    assert Start(HOLDER) in core.handle(SEEN, 0.0)
    core.handle(Started(member(incarnation), clock_s), 1.0)
    return core


def kinds(effects: list[SupervisorEffect]) -> list[type]:
    return [type(e.message) if isinstance(e, Send) else type(e) for e in effects]


def test_an_exit_proven_by_a_live_node_is_replaced_at_once() -> None:
    core = with_one_up()
    assert kinds(core.handle(Exited(HOLDER.address, 1, proven=True), 20.0)) == [Stop]
    assert core.handle(SEEN, 20.0) == [Start(HOLDER)]


def test_an_exit_of_an_earlier_life_changes_nothing() -> None:
    core = with_one_up(incarnation=2)
    assert core.handle(Exited(HOLDER.address, 1, proven=True), 20.0) == []
    assert core.processes[HOLDER.address].life is Life.UP


def test_a_silent_holder_is_replaced_only_after_its_right_to_grant_ran_out_and_ended_first() -> None:
    core = with_one_up()
    core.handle(Tick(), 20.0)
    core.handle(Exited(HOLDER.address, 1, proven=False), 21.0)
    assert core.processes[HOLDER.address].life is Life.SILENT
    assert core.members().members == ()
    core.handle(Tick(), 25.0)  # a silent one is granted no more
    assert core.handle(SEEN, 29.9) == []
    effects = core.handle(SEEN, 30.0)
    assert [e for e in effects if not isinstance(e, Send)] == [Stop(HOLDER.address, 1), Start(HOLDER)]


def test_a_silent_holder_that_answers_in_time_goes_on_as_it_was() -> None:
    core = with_one_up()
    core.handle(Exited(HOLDER.address, 1, proven=False), 5.0)
    assert core.handle(Answered(HOLDER.address, 2), 6.0) == []  # not this life
    assert GrantUntil in kinds(core.handle(Answered(HOLDER.address, 1), 6.0))
    assert [m.incarnation for m in core.members().members] == [1]
    assert core.handle(SEEN, 100.0) == []


def test_a_silent_holder_whose_exit_is_proven_later_is_replaced_then() -> None:
    core = with_one_up()
    core.handle(Tick(), 20.0)
    core.handle(Exited(HOLDER.address, 1, proven=False), 21.0)
    core.handle(Exited(HOLDER.address, 1, proven=True), 22.0)
    assert core.handle(SEEN, 22.0) == [Start(HOLDER)]


def test_a_supervisor_that_took_over_waits_one_grant_lease_before_it_starts_anyone() -> None:
    core = supervisor(inherited=True)
    assert core.handle(SEEN, 9.9) == []
    assert core.handle(SEEN, 10.0) == [Start(HOLDER)]


def test_starts_that_fail_back_off_and_one_that_lasts_forgives_them() -> None:
    core = supervisor()
    now, waits = 0.0, []
    for _ in range(7):
        began = now
        while core.handle(SEEN, now) != [Start(HOLDER)]:
            now += 0.5
        waits.append(now - began)
        core.handle(StartFailed(HOLDER.address, "no memory"), now)
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert core.failures[HOLDER.address] == "no memory"

    now += 30.0
    assert core.handle(SEEN, now) == [Start(HOLDER)]
    core.handle(Started(member(8), 0.0), now)
    assert core.failures == {}
    now += 60.0
    core.handle(Exited(HOLDER.address, 8, proven=True), now)
    assert core.handle(SEEN, now) == [Start(HOLDER)]


def test_a_holder_that_dies_again_and_again_is_restarted_ever_later() -> None:
    core = supervisor()
    now, waits = 0.0, []
    for incarnation in range(1, 5):
        began = now
        while core.handle(SEEN, now) != [Start(HOLDER)]:
            now += 0.5
        waits.append(now - began)
        core.handle(Started(member(incarnation), 0.0), now)
        core.handle(Exited(HOLDER.address, incarnation, proven=True), now)
    assert waits == [0.0, 0.0, 2.0, 4.0]


def test_a_holder_of_a_node_that_left_is_ended_and_all_are_told() -> None:
    core = with_one_up()
    other = Wanted("holder:b:0", "b", (0,))
    both = Observed((HOLDER, other), frozenset({"a", "b"}))
    core.handle(both, 2.0)
    core.handle(Started(Member("holder:b:0", 1, "b", "host", "unix:@b", "tcp:b:1", (0,)), 0.0), 2.0)
    effects = core.handle(Observed((other,), frozenset({"b"})), 3.0)
    assert Stop(HOLDER.address, 1) in effects
    assert Send("holder:b:0", HolderGone(HOLDER.address, 1)) in effects


def granted_since(core: SupervisorCore, now: float) -> float | None:
    grants = [e.message for e in core.handle(Tick(), now) if isinstance(e, Send) and isinstance(e.message, GrantUntil)]
    return grants[0].since_s


def test_a_right_to_grant_counts_from_the_holders_last_word_on_its_own_clock() -> None:
    core = with_one_up(clock_s=500.0)
    assert granted_since(core, 10.0) == 500.0
    core.handle(Received(HOLDER.address, GrantSeen(1, 509.5)), 10.1)
    assert granted_since(core, 11.0) == 509.5
    core.handle(Received(HOLDER.address, GrantSeen(2, 900.0)), 11.1)  # of another life
    core.handle(Received(HOLDER.address, GrantSeen(1, 400.0)), 11.2)  # held up
    assert granted_since(core, 12.0) == 509.5


MODEL = ModelSpec.model_validate({"groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 4}]})


@pytest.mark.parametrize(
    ("received_s", "grant", "may_at"),
    [
        (100.0, GrantUntil(3, 10.0), {109.9: True, 110.0: False}),
        (100.0, GrantUntil(3, 10.0, 99.0), {108.9: True, 109.0: False}),
        (160.0, GrantUntil(3, 10.0, 99.0), {160.0: False}),  # held up on its way for a minute
        (100.0, GrantUntil(3, 10.0, 500.0), {109.9: True, 110.0: False}),  # a clock ahead of ours gains nothing
        (100.0, GrantUntil(2, 10.0), {100.0: False}),  # for an earlier life
    ],
)
def test_a_holder_grants_only_within_the_right_it_was_given(
    received_s: float, grant: GrantUntil, may_at: dict[float, bool]
) -> None:
    arena = heap_arena(ArenaLayout([PoolLayout(0, 0, 2, 4096)]), 3)
    core = HolderCore(HolderConfig("holder:a:0", "a"), MODEL, arena, 3, bytes(16))
    core.start(0.0)
    assert not core.ctx.may_grant
    core.handle(Received("supervisor", grant), received_s)
    for at, may in may_at.items():
        core.ctx.now = at
        assert core.ctx.may_grant is may
        assert (arena.grants_until_ns > at * 1e9) is may


def test_who_does_not_know_the_shard_map_in_force_is_told_it_again() -> None:
    core = with_one_up()
    told = ShardMap(7, ("directory:0", "directory:1"))
    assert core.set_shards(told) == [Send(HOLDER.address, told)]

    def answered(map_epoch: int) -> list[SupervisorEffect]:
        return core.handle(Received(HOLDER.address, GrantSeen(1, 600.0, map_epoch=map_epoch)), 20.0)

    assert answered(6) == [Send(HOLDER.address, told)]
    assert answered(7) == []
    core.handle(Exited(HOLDER.address, 1, proven=True), 21.0)
    assert ShardMap in kinds(core.handle(Started(member(2), 700.0), 40.0)), "and whoever starts later"
