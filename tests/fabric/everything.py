"""Holders that between them met every kind and reason there is: what they count is read from cores, and from a scrape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvfabric.fabric.effects import Received
from kvfabric.fabric.holder import HolderCore
from kvfabric.fabric.kinds import Reason
from kvfabric.fabric.messages import Audited, HolderGone, Park, Purge, Release, SetMode
from kvfabric.fabric.metrics import Point, collect
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.series import Histogram
from kvfabric.fabric.tally import AuditOutcome
from kvfabric.ops.scenario import pure
from kvfabric.ops.scenario.run import run_files
from kvfabric.policies.second_touch import SecondTouch

from .many_holders import Holders
from .one_holder import OneHolder

CASES = sorted((Path(__file__).resolve().parents[1] / "cases").glob("*.yaml"))
MODEL = ModelSpec.model_validate(
    {"groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 64}]}
)
PAIR = ModelSpec.model_validate({**MODEL.model_dump(), "shards": 2})
PROMPT = range(70)


@functools.cache
def cores_of_the_cases() -> Sequence[HolderCore]:
    """Every scenario case of this repository, run on the pure core: its holders."""
    cores: list[HolderCore] = []

    class Watched(HolderCore):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            cores.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pure, "HolderCore", Watched)
        assert run_files(CASES).status == 0
    return cores


def holder(**config: Any) -> OneHolder:
    """A holder with a prompt."""
    one = OneHolder(MODEL, **config)
    assert one.store(PROMPT).refused is None
    return one


def mode(one: OneHolder, *, draining: bool = False, bypassed: bool = False) -> None:
    one.handle(Received("supervisor", SetMode(draining, bypassed, 1)))


def bar(one: OneHolder) -> None:
    work, purged = one.core.purges.purge(Purge("p", "", b"", (), True)), None
    while purged is None:
        purged, _ = one.core.go_on_purging(work, one.now)


BY_HAND: dict[Reason, Callable[[OneHolder], None]] = {
    Reason.DRAINING: lambda one: mode(one, draining=True),
    Reason.BYPASSED: lambda one: mode(one, bypassed=True),
    Reason.NOT_GRANTING: lambda one: setattr(one.core.ctx, "grants_until_s", 0.0),
    Reason.QUARANTINED: bar,
}
"""What a holder refuses to everyone, or of what it holds: no scenario brings it about."""
BOUNDS: dict[Reason, dict[str, int]] = {
    Reason.QUOTA: {"acquires_max": 0},
    Reason.DEADLINE_EXCEEDED: {"rounds_max": 0},
}


def cores_by_hand() -> list[HolderCore]:
    """A holder for each reason that no scenario brings about, each asked once in vain."""
    cores = []
    for make in BY_HAND.values():
        one = holder()
        make(one)
        assert one.acquire(PROMPT).grant is None
        cores.append(one.core)
    for config in BOUNDS.values():
        one = holder(**config)
        assert one.acquire(PROMPT, graph=True).grant is None
        cores.append(one.core)
    return cores


def cores_of_readers() -> list[HolderCore]:
    """Leases that end in every way there is, audits with every outcome, writes that second touch keeps off the disk."""
    world = Holders(PAIR, {"n0": (0,), "n1": (1,)}, slots=40, writing=SecondTouch)
    for name in ("n0", "n1"):
        assert world.store(name, PROMPT).refused is None

    def lease(**how: Any) -> int:
        return world.granted("n0", PROMPT, readers=("n0", "n1"), **how).lease

    world.ask("n0", Release(world.name(), lease(), 64))
    world.ask("n0", Release(world.name(), lease(), None))
    world.ask("n0", Release(world.name(), lease(), None, Reason.VERSION_CHANGED))
    world.ask("n0", Park(world.name(), lease()))
    lease(lease_s=1.0)
    world.pass_time(5.0)
    assert world.store("n0", range(1000, 1070)).refused is None
    world.swap_out("n0", range(1000, 1070))
    lease()
    for outcome, leased in [(outcome, lease()) for outcome in AuditOutcome]:
        assert world.ask("n0", Audited(world.name(), leased, outcome)).refused is None
    world.feed("n0", Received("supervisor", HolderGone("n1", 1)))
    return [world.cores["n0"]]


def summed(cores: Sequence[HolderCore]) -> list[Point]:
    """The points of all these holders as one holder would count them."""
    found: dict[tuple[str, tuple[str, ...]], float | Histogram] = {}
    for core in cores:
        for point in collect(core):
            key = (point.name, point.labels)
            before, value = found.get(key), point.value
            if isinstance(value, Histogram):
                together = Histogram(value.bounds)
                for one in (before, value):
                    if isinstance(one, Histogram):
                        together.counts = [a + b for a, b in zip(together.counts, one.counts, strict=True)]
                        together.total += one.total
                found[key] = together
            else:
                assert before is None or not isinstance(before, Histogram)
                found[key] = value + (before or 0)
    return [Point(name, labels, value) for (name, labels), value in found.items()]
