"""Waiting awake: it pays, or it is given up."""

from __future__ import annotations

import asyncio

from kvfabric.transport.vigil import ASLEEP_MAX, TAKEN_S, LoopVigil, Vigil


class Hand:
    """A clock that moves by a little with each look at it."""

    def __init__(self, step_s: float = TAKEN_S / 4) -> None:
        self.s = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.s += self.step_s
        return self.s


def awake_of(vigil: Vigil, waits: int, *, comes: bool) -> int:
    """How many of so many waits polled at all."""
    polled = 0
    for _ in range(waits):
        looks: list[bool] = []

        def ready(looks: list[bool] = looks) -> bool:
            looks.append(True)
            return comes

        assert vigil.wait(ready) is bool(looks and comes)
        polled += bool(looks)
    return polled


def test_waits_that_pay_all_stay_awake_and_waits_in_vain_soon_sleep() -> None:
    assert awake_of(Vigil(0.001, Hand()), 100, comes=True) == 100
    vain = Vigil(0.001, Hand())
    assert awake_of(vain, 1000, comes=False) <= 6 + 1000 // (ASLEEP_MAX + 1)
    assert awake_of(vain, 1000, comes=True) >= 1000 - ASLEEP_MAX, "it is learned again that waiting pays"


def test_a_wait_in_vain_ends_in_time_and_none_is_begun_where_it_may_take_no_time() -> None:
    clock = Hand()
    assert not Vigil(0.001, clock).wait(lambda: False)
    assert clock.s <= 0.0011
    assert awake_of(Vigil(0.0, clock), 5, comes=True) == 0


def test_waits_whose_core_is_taken_meanwhile_soon_sleep_whatever_comes() -> None:
    assert awake_of(Vigil(0.001, Hand(2 * TAKEN_S)), 1000, comes=True) <= 6 + 1000 // (ASLEEP_MAX + 1)


def iterations(busy: bool) -> int:
    """How often a loop turned by itself within the time it stays awake for a request, and a little more."""
    turns = 0

    async def run() -> None:
        nonlocal turns
        loop = asyncio.get_running_loop()
        select = loop._selector.select  # type: ignore[attr-defined] # the only place where a loop sleeps

        def counted(timeout: float | None) -> object:
            nonlocal turns
            turns += timeout == 0
            return select(timeout)

        LoopVigil(Vigil(0.02), lambda: busy).served()
        loop._selector.select = counted  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)

    asyncio.run(run())
    return turns


def test_a_loop_does_not_sleep_after_a_request_unless_threads_need_the_process() -> None:
    assert iterations(busy=False) > 100
    assert iterations(busy=True) < 20
