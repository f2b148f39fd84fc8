"""When a node's holder goes, and when one more node is asked for."""

from __future__ import annotations

import pytest

from kvfabric.fabric.messages import Load
from kvfabric.fabric.scaling import NodeUse, ScaleDown, ScaleDownConfig, ScaleUp, ScaleUpConfig

MIB = 1 << 20


def uses(engines: str, *nodes: str, stays: str = "") -> list[NodeUse]:
    return [NodeUse(node, node in engines, MIB, node in stays) for node in nodes or ("a", "b", "c")]


def test_a_node_goes_once_no_engine_has_run_on_it_for_idle_s_without_a_break() -> None:
    down = ScaleDown(ScaleDownConfig(idle_s=10.0, min_nodes=0))
    assert down.look(uses("bc"), 0.0) == []
    assert down.look(uses("bc"), 9.9) == []
    assert down.look(uses("abc"), 9.95) == []  # an engine ran for a moment
    assert down.look(uses("bc"), 10.0) == []
    assert down.idle_s("a", 15.0) == 5.0
    assert down.look(uses("bc"), 19.9) == []
    assert down.look(uses("bc"), 20.0) == ["a"]


@pytest.mark.parametrize(
    ("config", "going"),
    [
        (ScaleDownConfig(10.0, min_nodes=0), ["a", "b", "c"]),
        (ScaleDownConfig(10.0), ["a", "b"]),
        (ScaleDownConfig(10.0, min_nodes=3), []),
        (ScaleDownConfig(10.0, min_nodes=0, min_bytes=2 * MIB), ["a"]),
        (ScaleDownConfig(10.0, min_nodes=0, min_bytes=3 * MIB), []),
    ],
)
def test_no_more_go_than_the_floors_allow(config: ScaleDownConfig, going: list[str]) -> None:
    down = ScaleDown(config)
    down.look(uses(""), 0.0)
    assert down.look(uses(""), 10.0) == going


def test_what_cannot_go_counts_for_the_floors_and_never_goes() -> None:
    down = ScaleDown(ScaleDownConfig(10.0, min_nodes=2))
    down.look(uses("", stays="a"), 0.0)
    assert down.look(uses("", stays="a"), 10.0) == ["b"]


def test_what_was_asked_for_under_pressure_does_not_go_for_being_idle_until_it_is_withdrawn() -> None:
    down = ScaleDown(ScaleDownConfig(10.0))
    down.look(uses(""), 0.0)
    assert down.look(uses(""), 10.0, wanted=3) == []
    assert down.look(uses(""), 11.0, wanted=2) == ["a"]
    assert down.look(uses(""), 12.0) == ["a", "b"]


def load(refused: int = 0, evicted: int = 0, waiting: int = 0) -> Load:
    return Load(0, refused, evicted, waiting, 0)


def test_pressure_that_lasts_asks_for_one_more_node_at_a_time_up_to_the_cap() -> None:
    up = ScaleUp(ScaleUpConfig(refused_per_s=1.0, step_s=10.0, calm_s=30.0, nodes_max=4))
    asked = [up.look({("h", 1): load(refused=2 * t)}, 2 if t < 25 else 3, float(t)) for t in range(60)]
    assert up.pressure.value == pytest.approx(2.0)
    assert asked[:11] == [0] * 11, "a burst asks for nothing"
    assert asked[12] == 3
    assert asked[40] == 4
    assert max(asked) == 4


def test_calm_that_lasts_withdraws_and_what_lies_between_changes_nothing() -> None:
    up = ScaleUp(ScaleUpConfig(waiting=10.0, low=0.25, step_s=5.0, calm_s=20.0))

    def at(t: float, waiting: int) -> int:
        return up.look({("h", 1): load(waiting=waiting)}, 2, t)

    for t in range(8):
        at(float(t), 20)
    assert at(8.0, 20) == 3
    for t in range(9, 60):
        assert at(float(t), 5) == 3, "neither pressure nor calm"
    for t in range(60, 80):
        assert at(float(t), 1) == 3
    assert at(80.0, 1) == 0


def test_a_new_lifes_counters_count_from_when_it_was_first_seen() -> None:
    up = ScaleUp(ScaleUpConfig(evicted_tokens_per_s=100.0))
    up.look({("h", 1): load(evicted=10**9)}, 1, 0.0)
    assert up.pressure.value == 0.0
    up.look({("h", 1): load(evicted=10**9 + 300), ("h", 2): load(evicted=10**6)}, 1, 1.0)
    assert up.pressure.value == pytest.approx(3.0)
    assert up.pressure.evicted == up.pressure.value
