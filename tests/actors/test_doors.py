"""The doors of a rehearsal: shut on a fabric that serves, open on one launched for tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric, FabricError, Reason, Session
from kvfabric.actors import ray_api
from kvfabric.actors.addresses import actor_name
from kvfabric.actors.clock import Clock
from kvfabric.fabric import wire
from kvfabric.fabric.doors import (
    DOORS,
    AdvanceClock,
    Corrupt,
    InjectFault,
    Partition,
    Rest,
    RestRequest,
    RunDue,
    TellAll,
)
from kvfabric.fabric.messages import Done, Misuse

from .conftest import MAIN
from .stories import content, objects, prompt, spec

RECORDS: dict[str, Any] = {
    "rest": RestRequest("r"),
    "clock": AdvanceClock("r", 0.0),
    "due": RunDue("r"),
    "fault": InjectFault("r", "transfer_fail", 0, None),
    "corrupt": Corrupt("r", 0, bytes(32), "flip"),
    "partition": Partition("r", ()),
    "tell": TellAll("r"),
}
METHODS: dict[str, tuple[Any, ...]] = {
    "advance_clock": (0.0,),
    "keep_away": ([],),
    "await_gone": ([],),
    "bring": ([],),
    "cut": ({},),
}


@pytest.fixture(scope="module")
def rehearsal(fabric: Fabric) -> Iterator[Fabric]:
    """A fabric under test, beside the one that serves."""
    with kvfabric.launch(spec(testing=True, transport={"links": ["shared_memory"]}), name="rehearsal") as running:
        yield running


def told(running: Fabric, record: Any) -> Any:
    """What a holder replies through its Ray handle."""
    return wire.decode(ray_api.call(running.holder().request.remote(wire.encode(record))))


def held_session(running: Fabric) -> tuple[Session, Clock]:
    """A session that counts on a clock of the test's."""
    clock = Clock(0.0)
    return Session(running.info, name=running.name, clock=clock), clock


def test_each_door_has_a_record_here() -> None:
    assert {type(record) for record in RECORDS.values()} == set(DOORS)


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_only_a_fabric_under_test_takes_a_rehearsals_record(fabric: Fabric, rehearsal: Fabric, record: Any) -> None:
    refused = told(fabric, record)
    assert isinstance(refused, Misuse)
    assert "testing: true" in refused.text
    assert isinstance(told(rehearsal, record), Done | Rest)


@pytest.mark.parametrize("method", METHODS)
def test_only_the_supervisor_of_a_fabric_under_test_takes_a_rehearsals_call(
    fabric: Fabric, rehearsal: Fabric, method: str
) -> None:
    supervisors = {name: ray_api.find_actor(actor_name(name, "supervisor")) for name in (MAIN, rehearsal.name)}
    with pytest.raises(FabricError, match="testing: true"):
        ray_api.call(getattr(supervisors[MAIN], method).remote(*METHODS[method]))
    assert ray_api.call(getattr(supervisors[rehearsal.name], method).remote(*METHODS[method])) is None


def test_under_a_held_clock_a_lease_ends_when_the_clock_says_so_and_not_before(rehearsal: Fabric) -> None:
    session, clock = held_session(rehearsal)
    tokens = prompt("held clock")
    with session:
        assert session.publish(tokens, objects(session.model, tokens)).ok
        lease = session.acquire(tokens, lease_s=0.2).lease
        assert lease is not None
        time.sleep(0.5)
        assert lease.check() is None
        clock.move(0.2)
        assert lease.check() is Reason.LEASE_EXPIRED


def test_a_corrupted_object_is_found_at_the_next_read_and_its_neighbour_is_not(rehearsal: Fabric) -> None:
    session, _ = held_session(rehearsal)
    tokens = prompt("corrupted")
    with session:
        assert session.publish(tokens, objects(session.model, tokens)).ok
        digest = session.keys(tokens).keys(16)[32:64]
        assert isinstance(told(rehearsal, Corrupt("r", 0, digest, "flip")), Done)
        lease = session.acquire(tokens).lease
        assert lease is not None
        with lease.read("csa") as view:
            right = [bool((view[i] == content(tokens, "csa", i, view[i].size)).all()) for i in range(4)]
        assert right == [True, False, True, True]


def test_a_clock_that_runs_cannot_be_moved_and_none_goes_back() -> None:
    with pytest.raises(ValueError, match="cannot be moved"):
        Clock().move(1.0)
    clock = Clock(2.0)
    clock.move(3.5)
    assert (clock.now(), clock.now_ns(), clock.left(4.0), clock.left(1.0)) == (3.5, 3_500_000_000, 0.5, 0.0)
    with pytest.raises(ValueError, match="cannot be moved"):
        clock.move(3.0)
