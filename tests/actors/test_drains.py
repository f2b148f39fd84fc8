"""Nodes that are emptied: by hand, by a signal; and a supervisor that dies takes nothing with it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric, FabricError, Reason, SpecError, Status
from kvfabric.actors import ray_api

from .conftest import Away, holders
from .stories import eventually, objects, prompt, spec
from .test_supervision import resumed

NODES = ("kvfabric_node_0", "kvfabric_node_1")


@pytest.fixture
def small(fabric: Fabric, tmp_path: Path) -> Iterator[Fabric]:
    """A fabric of its own on the cluster's two nodes, with a disk each."""
    del fabric
    disk = {"path": str(tmp_path / "disk"), "free_floor_bytes": 0}
    with kvfabric.launch(spec(memory_bytes=1 << 20, node_resource=NODES, disk=disk), name="small") as running:
        yield running


def test_a_drained_nodes_state_is_served_by_another_and_its_leases_are_cut_at_the_deadline(
    small: Fabric, away: Away
) -> None:
    here = small.info().node
    with kvfabric.connect("small") as session:
        tokens, parked = prompt("drained"), prompt("drained, on disk")
        for mine in (tokens, parked):
            assert session.publish(mine, objects(session.model, mine)).ok
        last = session.acquire(parked).lease
        assert last is not None
        session.park(last)
        eventually(lambda: session.probe(parked).status, lambda status: status is Status.PENDING)
        lease = session.acquire(tokens).lease
        assert lease is not None
        with pytest.raises(FabricError, match="0 nodes of the cluster"):
            small.drain("no such node")
        with pytest.raises(SpecError, match="deadline_s: -1"):
            small.drain(here, deadline_s=-1)
        told: dict[str, Any] = {}
        draining = threading.Thread(target=lambda: told.update(small.drain(here, deadline_s=6.0)))
        draining.start()
        eventually(lease.renew, lambda reason: reason is Reason.DRAINING)
        refused = session.acquire(tokens)
        assert refused.cause is not None
        assert refused.cause.reason is Reason.DRAINING
        assert session.publish(prompt("more"), objects(session.model, prompt("more"))).refused is Reason.DRAINING
        assert lease.check() is None, "it runs out, or until the deadline"
        draining.join()
        assert told["over"]
        assert (told["leases_cut"], told["dropped_objects"]) == (1, 0)
        assert told["moved_objects"] > 0
        assert lease.check() is Reason.HOLDER_LOST
    for holder in holders(small):
        if holder["node"] == here:
            os.kill(holder["pid"], signal.SIGKILL)
    assert away.do(resumed, tokens, "small") == (Status.FULL_HIT, 64, [])
    assert away.do(resumed, parked, "small") == (Status.FULL_HIT, 64, []), "what lay on its disk alone"
    eventually(small.status, lambda status: len(status["holders"]) == 1)


def test_a_supervisor_that_is_killed_comes_back_to_the_processes_that_run_and_to_what_it_was_told(
    small: Fabric,
) -> None:
    small.bypass(True)
    small.update_weights("second")
    small.bypass(False)
    with kvfabric.connect("small", weights_revision="second") as session:
        tokens = prompt("outlives its supervisor")
        assert session.publish(tokens, objects(session.model, tokens)).ok
        before = small.status()
        os.kill(before["supervisor"]["pid"], signal.SIGKILL)
        after = eventually(
            small.status, lambda s: s["supervisor"]["incarnation"] > before["supervisor"]["incarnation"], within_s=30.0
        )
        assert {p["pid"] for p in after["holders"]} == {p["pid"] for p in before["holders"]}
        assert {p["pid"] for p in after["directory"]} == {p["pid"] for p in before["directory"]}
        assert after["weights"] == "second"
        answer = session.acquire(tokens)
        assert answer.status is Status.FULL_HIT
        answer.cancel()
    killed = next(h for h in after["holders"])
    os.kill(killed["pid"], signal.SIGKILL)  # and it replaces who dies, once a grant lease is over
    eventually(
        lambda: {h["address"]: h.get("pid") for h in small.status()["holders"]},
        lambda pids: pids.get(killed["address"]) not in (None, killed["pid"]),
        within_s=40.0,
    )


def test_a_fabric_launched_anew_where_its_supervisor_was_ended_for_good_goes_on_with_its_state(small: Fabric) -> None:
    with kvfabric.connect("small") as session:
        tokens = prompt("taken over")
        assert session.publish(tokens, objects(session.model, tokens)).ok
        pids = {h["pid"] for h in holders(small)}
        ray_api.kill(small._supervisor)
        again = kvfabric.launch(spec(memory_bytes=1 << 20, node_resource=NODES), name="small")
        assert {h["pid"] for h in holders(again)} == pids
        answer = eventually(lambda: session.acquire(tokens), lambda answer: answer.lease is not None)
        assert answer.status is Status.FULL_HIT
        assert {h["pid"] for h in holders(small)} == pids, "and who had it before finds it again"


def test_a_holder_that_gets_sigterm_has_its_node_drained(small: Fabric) -> None:
    leaving = holders(small)[1]
    os.kill(leaving["pid"], signal.SIGTERM)
    drains = eventually(lambda: small.status()["drains"], lambda found: any(d["over"] for d in found))
    assert [(d["node"], d["why"]) for d in drains] == [(leaving["node"], "sigterm")]
    assert any(h["pid"] == leaving["pid"] and h["draining"] for h in holders(small))
