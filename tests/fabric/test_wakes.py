"""Wake-ups: in order, once, and gone when cancelled."""

from __future__ import annotations

import weakref

from kvfabric.fabric.wakes import CANCELLED_MIN, Wakes


def test_wake_ups_run_once_in_order_of_time_and_then_of_number() -> None:
    wakes, ran = Wakes(), []
    for at, number in ((2.0, 1), (1.0, 3), (1.0, 2), (3.0, 4)):
        wakes.at(at, number, lambda number=number: ran.append(number))  # type: ignore[misc]
    assert wakes.next_s == 1.0
    wakes.run_due(2.0)
    assert ran == [2, 3, 1]
    wakes.run_due(2.0)
    assert ran == [2, 3, 1]
    assert wakes.next_s == 3.0


def test_what_is_made_due_by_one_that_runs_runs_as_well() -> None:
    wakes, ran = Wakes(), []

    def first() -> None:
        wakes.at(1.5, 2, lambda: ran.append("second"))

    wakes.at(1.0, 1, first)
    wakes.run_due(2.0)
    assert ran == ["second"]


def test_a_cancelled_one_never_runs_and_lets_go_at_once() -> None:
    class Held:
        def call(self) -> None:
            raise AssertionError

    wakes, held = Wakes(), Held()
    gone = weakref.ref(held)
    wake = wakes.at(1.0, 1, held.call)
    wakes.at(2.0, 2, lambda: None)
    wake.cancel()
    wake.cancel()
    del held
    assert gone() is None
    assert wakes.next_s == 2.0
    wakes.run_due(5.0)
    wake.cancel()
    assert wakes.next_s is None


def test_cancelled_ones_do_not_pile_up() -> None:
    wakes = Wakes()
    kept = [wakes.at(1e6, -number, lambda: None) for number in range(10)]
    for number in range(10_000):
        wakes.at(100.0 + number, number, lambda: None).cancel()
    assert len(wakes) <= 2 * (len(kept) + CANCELLED_MIN) + 2
    assert wakes.next_s == 1e6
