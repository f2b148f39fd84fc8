"""The byte budget of a holder: never more than it, live requests first, and nothing waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvfabric.fabric.arena import ArenaLayout, PoolLayout
from kvfabric.fabric.effects import (
    DeleteExtent,
    Effect,
    ExtentEntry,
    Pair,
    ReadExtent,
    ScrubExtent,
    Send,
    StartTransfer,
    UploadExtent,
    WriteExtent,
)
from kvfabric.fabric.flow import BURST_S, Flow
from kvfabric.fabric.kinds import Tier
from kvfabric.fabric.restores import BACKGROUND_S, PATIENCE_S

BLOCK = 1000
LAYOUT = ArenaLayout([PoolLayout(0, 0, 8, BLOCK, Tier.G1), PoolLayout(0, 0, 8, BLOCK, Tier.G2)])
ENTRY = ExtentEntry(0, 0, bytes(32), 1, 0, BLOCK, bytes(16), bytes(16), 1, bytes(32), bytes(16), "")


def flow(bytes_per_s: float | None) -> Flow:
    return Flow(bytes_per_s, LAYOUT, lambda _: BLOCK)


def read(token: int, came_s: float = 0.0) -> ReadExtent:
    """A read that a request waits for, which came then."""
    return ReadExtent(token, ((1, 0, 0),), wanted_s=came_s + PATIENCE_S)


def ahead(token: int, came_s: float = 0.0) -> ReadExtent:
    """A read that nobody waits for yet: a prefetch."""
    return ReadExtent(token, ((1, 0, 0),), wanted_s=came_s + PATIENCE_S + BACKGROUND_S)


def write(token: int) -> WriteExtent:
    return WriteExtent(token, token, (ENTRY,), (0,))


def transfer(token: int, source: str, slot: int, wanted_s: float | None = None) -> StartTransfer:
    return StartTransfer(token, source, 1, (Pair(0, slot, BLOCK),), 10.0, wanted_s)


def drained(budget: Flow, start_s: float) -> list[tuple[float, Effect]]:
    """When each waiting effect passes."""
    passed, now = [], start_s
    while budget.due_s is not None:
        now = max(now, budget.due_s)
        passed += [(now, effect) for effect in budget.through([], now)]
    return passed


def test_without_a_budget_everything_passes_at_once() -> None:
    effects: list[Effect] = [read(1), write(2), UploadExtent(3)]
    assert flow(None).through(effects, 0.0) == effects


def test_what_moves_no_bytes_never_waits() -> None:
    budget = flow(10.0)
    budget.through([read(1), read(2)], 0.0)
    nothing: list[Effect] = [Send("n1", "hello"), DeleteExtent(4)]
    assert budget.through(nothing, 0.0) == nothing
    assert len(budget) == 1


@given(st.lists(st.sampled_from([read, write]), min_size=2, max_size=40), st.integers(100, 100_000))
def test_never_more_than_the_budget_is_moved(makes: list[type], bytes_per_s: int) -> None:
    budget = flow(bytes_per_s)
    passed = [(5.0, e) for e in budget.through([make(i) for i, make in enumerate(makes)], 5.0)]
    passed += drained(budget, 5.0)
    assert len(passed) == len(makes)
    first_s = passed[0][0]
    for count, (at_s, _) in enumerate(passed):
        # What passed before this one was paid for, but for the burst after a pause.
        assert count * BLOCK <= (at_s - first_s + BURST_S) * bytes_per_s * (1 + 1e-9)


def test_live_requests_go_before_what_nobody_waits_for() -> None:
    budget = flow(BLOCK)
    wanted_s = 0.1 + PATIENCE_S
    down, up, fetch = transfer(3, "n0", 8), transfer(4, "n0", 0, wanted_s), transfer(5, "n1", 0, wanted_s)
    offered = transfer(7, "n1", 1)
    budget.through([read(0)], 0.0)
    again = ScrubExtent(8, 1, (0,), BLOCK)
    budget.through([again, write(1), UploadExtent(2), down, offered], 0.0)
    budget.through([up, fetch, read(6, 0.1)], 0.1)
    order = [effect for _, effect in drained(budget, 0.1)]
    live, rest = order[:3], order[3:]
    assert [getattr(e, "token", None) for e in live] == [4, 5, 6]
    assert rest[:3] == [again, write(1), UploadExtent(2)]
    assert [getattr(e, "token", None) for e in rest[3:]] == [3, 7]


def test_what_is_read_ahead_goes_after_live_requests_and_in_its_own_time() -> None:
    budget = flow(BLOCK)
    budget.through([read(0)], 0.0)
    budget.through([ahead(1), read(2, 0.1)], 0.1)
    budget.through([read(3, 0.2), read(4, BACKGROUND_S + 1)], 0.2)
    assert [getattr(e, "token", None) for _, e in drained(budget, 0.2)] == [2, 3, 1, 4]


def test_what_was_read_ahead_goes_sooner_once_a_request_waits_for_it() -> None:
    budget = flow(BLOCK)
    budget.through([read(0)], 0.0)
    budget.through([ahead(1), ahead(2), read(3)], 0.1)
    budget.through([], 0.2, {2: 0.2 + PATIENCE_S})
    assert [getattr(e, "token", None) for _, e in drained(budget, 0.2)] == [3, 2, 1]


def test_a_request_in_a_hurry_goes_before_one_that_came_earlier() -> None:
    budget = flow(BLOCK)
    budget.through([read(0)], 0.0)
    hurry = ReadExtent(2, ((1, 0, 0),), wanted_s=0.1 + 1.0)
    budget.through([read(1), hurry], 0.1)
    assert [getattr(e, "token", None) for _, e in drained(budget, 0.1)] == [2, 1]


def test_what_nobody_waits_for_gets_its_turn_under_a_stream_of_live_requests() -> None:
    budget, now, came = flow(BLOCK), 0.0, None
    budget.through([read(0), write(1)], now)
    for token in range(2, 400):
        now += 0.5  # twice what the budget takes
        if write(1) in budget.through([read(token, now)], now):
            came = now
            break
    assert came is not None
    assert BACKGROUND_S <= came <= 2.5 * BACKGROUND_S


def test_a_transfers_own_time_begins_with_its_turn() -> None:
    budget = flow(BLOCK)
    budget.through([read(0), transfer(1, "n1", 0, PATIENCE_S)], 0.0)
    ((at_s, passed),) = drained(budget, 0.0)
    assert isinstance(passed, StartTransfer)
    assert passed.deadline_s == 10.0 + at_s
    assert at_s > 0.5
