"""The supervisor's rules: who is started, replaced, backed off from, and since when a right to grant counts."""

from __future__ import annotations

import pytest

from kvfabric.fabric.arena import ArenaLayout, PoolLayout, heap_arena
from kvfabric.fabric.context import HolderConfig
from kvfabric.fabric.effects import Received, Send
from kvfabric.fabric.holder import HolderCore
from kvfabric.fabric.messages import (
    Drain,
    Drained,
    DrainTally,
    DrainTarget,
    GrantSeen,
    GrantUntil,
    HolderGone,
    Load,
    Member,
    Members,
    SetMode,
    ShardMap,
    Warm,
)
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.supervisor import (
    Answered,
    Confirmed,
    DrainNode,
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


# --- drains ----------------------------------------------------------------------------------------

OTHER = Wanted("holder:b:0", "b", (0,))
BOTH = Observed((HOLDER, OTHER), frozenset({"a", "b"}))


def two_up() -> SupervisorCore:
    core = supervisor()
    core.incarnation = 7
    core.handle(BOTH, 0.0)
    for want in (HOLDER, OTHER):
        there = Member(want.address, 1, want.node, "host", "unix:@a", "tcp:a:1", want.shards)
        core.handle(Started(there, 0.0), 1.0)
    return core


def sent(effects: list[SupervisorEffect], kind: type) -> dict[str, object]:
    return {e.to: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)}


def drained(core: SupervisorCore, moved: int = 3) -> Drained:
    number = core.drains["a"].number
    return Drained(number, 1, DrainTally(moved, 30, 1.5), DrainTally(), DrainTally(2, 20, 0.5), 1, 4.0)


def test_a_node_that_drains_is_told_once_a_second_where_to_move_to_until_it_reports() -> None:
    core = two_up()
    begun = core.handle(DrainNode("a", 20.0, "asked"), 10.0)
    target = DrainTarget(OTHER.address, "b", (0,))
    number = core.drains["a"].number
    assert sent(begun, Drain) == {HOLDER.address: Drain(number, 20.0, (target,), (HOLDER.address,))}
    modes = sent(begun, SetMode)
    assert {a: m.draining for a, m in modes.items()} == {HOLDER.address: True, OTHER.address: False}  # type: ignore[attr-defined]
    again = sent(core.handle(Tick(), 15.0), Drain)
    assert again == {HOLDER.address: Drain(number, 15.0, (target,), (HOLDER.address,))}
    core.handle(Received(HOLDER.address, drained(core)), 16.0)
    assert core.drains["a"].over
    assert core.drain_sum("a") == {
        "moved": DrainTally(3, 30, 1.5),
        "elsewhere": DrainTally(),
        "dropped": DrainTally(2, 20, 0.5),
    }
    assert sent(core.handle(Tick(), 20.0), Drain) == {}


def test_an_earlier_deadline_counts_and_a_later_one_does_not() -> None:
    core = two_up()
    core.handle(DrainNode("a", 20.0, "asked"), 10.0)
    first = core.drains["a"].number
    assert core.handle(DrainNode("a", 60.0, "ray"), 11.0) == []
    assert (core.drains["a"].number, core.drains["a"].deadline_s) == (first, 30.0)
    sooner = sent(core.handle(DrainNode("a", 5.0, "spot"), 12.0), Drain)
    assert sooner[HOLDER.address].within_s == 5.0  # type: ignore[attr-defined]
    assert core.drains["a"].number > first


def test_a_holder_that_hears_of_its_nodes_end_has_the_whole_node_drained() -> None:
    core = two_up()
    core.handle(Received(HOLDER.address, GrantSeen(1, 5.0, leaves_in_s=25.0, notice="spot")), 10.0)
    assert (core.drains["a"].why, core.drains["a"].deadline_s) == ("spot", 35.0)


def test_a_node_to_be_retired_keeps_its_holder_until_it_reported_and_gets_none_until_an_engine_runs() -> None:
    core = two_up()
    core.handle(DrainNode("a", 20.0, "idle", retire=True), 10.0)
    assert Stop(HOLDER.address, 1) not in core.handle(BOTH, 11.0)
    assert core.engage("a") == [], "a drain that began is not taken back"
    core.handle(Received(HOLDER.address, drained(core)), 12.0)
    assert Stop(HOLDER.address, 1) in core.handle(BOTH, 13.0)
    assert core.wanted == {OTHER.address}
    assert not any(isinstance(e, Start) for e in core.handle(BOTH, 30.0))
    core.engage("a")
    assert Start(HOLDER) in core.handle(BOTH, 31.0)


def test_a_holder_that_dies_on_a_node_that_drains_is_not_started_again_and_the_drain_is_over() -> None:
    core = two_up()
    core.handle(DrainNode("a", 20.0, "ray"), 10.0)
    core.handle(Exited(HOLDER.address, 1, proven=True), 12.0)
    assert not any(isinstance(e, Start) for e in core.handle(BOTH, 30.0))
    core.handle(Tick(), 31.0)
    assert core.drains["a"].over
    core.handle(Observed((OTHER,), frozenset({"b"})), 40.0)
    assert core.drains == {}, "the node is gone; one of that name begins anew"


def test_a_directory_shard_whose_place_is_another_now_is_moved() -> None:
    shard, moved = Wanted("directory:0", "a"), Wanted("directory:0", "b")
    core = supervisor()
    core.handle(Observed((shard,), frozenset("ab")), 0.0)
    core.handle(Started(Member("directory:0", 4, "a", "host", "unix:@a", "tcp:a:1", ()), 0.0), 1.0)
    effects = core.handle(Observed((moved,), frozenset("ab")), 2.0)
    assert effects.index(Stop("directory:0", 4)) < effects.index(Start(moved))


# --- one supervisor after another ------------------------------------------------------------------


def test_a_right_ends_before_a_supervisor_that_is_not_known_here_could_replace_anyone() -> None:
    core = two_up()
    core.handle(Confirmed(100.0), 100.1)
    assert sent(core.handle(Tick(), 102.0), GrantUntil)[HOLDER.address].seconds == pytest.approx(8.0)  # type: ignore[attr-defined]
    assert sent(core.handle(Tick(), 109.0), GrantUntil)[HOLDER.address].seconds == pytest.approx(1.0)  # type: ignore[attr-defined]
    assert sent(core.handle(Tick(), 110.5), GrantUntil) == {}
    core.handle(Confirmed(110.6), 110.7)
    assert HOLDER.address in sent(core.handle(Tick(), 112.0), GrantUntil)


def test_what_a_later_supervisor_tells_is_numbered_above_all_that_an_earlier_one_told() -> None:
    earlier, later = two_up(), two_up()
    for t in range(100):
        earlier.handle(Exited(HOLDER.address, t, proven=True), 20.0)
    later.incarnation = earlier.incarnation + 1
    assert later.members().number > earlier.members().number
    assert isinstance(later.members(), Members)


def test_a_holder_takes_no_right_from_an_earlier_supervisor() -> None:
    arena = heap_arena(ArenaLayout([PoolLayout(0, 0, 2, 4096)]), 3)
    core = HolderCore(HolderConfig("holder:a:0", "a"), MODEL, arena, 3, bytes(16))
    core.start(0.0)
    core.handle(Received("supervisor", GrantUntil(3, 10.0, None, 2)), 100.0)
    core.handle(Received("supervisor", GrantUntil(3, 50.0, None, 1)), 101.0)
    core.ctx.now = 112.0
    assert not core.ctx.may_grant
    core.handle(Received("supervisor", GrantUntil(3, 10.0, None, 2)), 112.0)
    assert core.ctx.may_grant


def test_a_holder_that_joins_is_warmed_by_the_fullest_that_stays_and_only_where_it_is_asked_for() -> None:
    for warm_bytes, asked in ((0, []), (1 << 20, [OTHER.address])):
        core = two_up()
        core.config = SupervisorConfig(warm_bytes=warm_bytes, warm_s=9.0)
        for address, used in ((HOLDER.address, 10), (OTHER.address, 20)):
            core.handle(Received(address, GrantSeen(1, 1.0, load=Load(0, 0, 0, 0, used))), 2.0)
        third = Wanted("holder:c:0", "c", (0,))
        core.handle(Observed((HOLDER, OTHER, third), frozenset("abc")), 3.0)
        there = Member(third.address, 1, "c", "host", "unix:@c", "tcp:c:1", (0,))
        told = sent(core.handle(Started(there, 0.0), 4.0), Warm)
        assert list(told) == asked
        assert set(told.values()) <= {Warm(third.address, (0,), warm_bytes, 9.0)}
