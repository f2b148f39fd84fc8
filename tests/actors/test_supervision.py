"""Who runs where: holders and directories come back, nodes come and go, fabrics stay apart."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric, FabricError, Reason, Session, SpecError, Status
from kvfabric.actors import ray_api
from kvfabric.fabric import wire
from kvfabric.fabric.messages import StatusReply, StatusRequest

from .conftest import Away, holders, successor
from .stories import eventually, objects, prompt, spec, wrong_bytes


def resumed(kept: dict[str, Any], tokens: list[int], name: str = "default") -> tuple[Status, int, list[str]]:
    """Over there, in a session of its own: status, tokens, wrong bytes."""
    with kvfabric.connect(name) as session:
        answer = session.acquire(tokens)
        if answer.lease is None:
            return answer.status, answer.tokens, []
        with answer.lease as lease:
            return answer.status, answer.tokens, wrong_bytes(lease, session.model, tokens)


def directory(fabric: Fabric) -> dict[str, Any]:
    found = fabric.status()["directory"]
    return dict(found[0]) if found and "epoch" in found[0] else {}


@pytest.mark.faults
def test_a_directory_that_was_killed_comes_back_in_a_new_epoch_and_refills(
    fabric: Fabric, session: Session, away: Away
) -> None:
    tokens = prompt("directory")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    before = eventually(lambda: directory(fabric), lambda d: d.get("segments", 0) >= 2)
    os.kill(before["pid"], signal.SIGKILL)
    local = session.acquire(tokens)  # a full hit at home asks no directory
    assert local.status is Status.FULL_HIT
    local.cancel()
    after = eventually(lambda: directory(fabric), lambda d: d.get("epoch", 0) > before["epoch"])
    refilled = eventually(lambda: directory(fabric), lambda d: d.get("segments", 0) >= before["segments"])
    assert refilled["epoch"] == after["epoch"]
    assert away.do(resumed, tokens) == (Status.FULL_HIT, 64, [])


@pytest.mark.faults
def test_what_a_dead_holder_held_is_gone_and_what_others_copied_is_not(
    fabric: Fabric, session: Session, away: Away
) -> None:
    copied, lost = prompt("copied"), prompt("lost")
    for tokens in (copied, lost):
        assert session.publish(tokens, objects(session.model, tokens)).ok
    eventually(lambda: away.do(resumed, copied), lambda told: told == (Status.FULL_HIT, 64, []))
    before = holders(fabric)[0]
    os.kill(before["pid"], signal.SIGKILL)
    successor(fabric, before)

    with kvfabric.connect() as fresh:
        gone = eventually(lambda: fresh.acquire(lost), lambda answer: answer.cause is None)
        assert (gone.status, gone.tokens) == (Status.MISS, 0)
        answer = eventually(lambda: fresh.acquire(copied), lambda answer: answer.lease is not None)
        assert answer.status is Status.FULL_HIT
        assert answer.sources == (holders(fabric)[1]["address"],)
        assert answer.lease is not None
        with answer.lease as lease:
            assert wrong_bytes(lease, fresh.model, copied) == []


@pytest.mark.faults
def test_a_stopped_holder_is_lost_once_its_right_to_grant_ran_out_and_ended_when_it_wakes(fabric: Fabric) -> None:
    brief = spec(grant_s=2.0, node_resource="kvfabric_node_0", memory_bytes=1 << 20)
    with kvfabric.launch(brief, name="brief") as running, kvfabric.connect("brief") as session:
        tokens = prompt("zombie")
        assert session.publish(tokens, objects(session.model, tokens)).ok
        lease = session.acquire(tokens).lease
        assert lease is not None
        before = running.status()["holders"][0]
        os.kill(before["pid"], signal.SIGSTOP)
        try:
            stopped_s = time.monotonic()
            eventually(lease.check, lambda reason: reason is Reason.HOLDER_LOST, within_s=4.0)
            answer = session.acquire(tokens)
            assert (answer.tokens, answer.lease) == (0, None)
            assert time.monotonic() - stopped_s < 12.0
            eventually(
                lambda: running.status()["holders"],
                lambda found: any(h.get("incarnation", 0) > before["incarnation"] and h["grants"] for h in found),
            )
        finally:
            os.kill(before["pid"], signal.SIGCONT)
        assert lease.check() is Reason.HOLDER_LOST
        eventually(lambda: Path(f"/proc/{before['pid']}").exists(), lambda there: not there)
        assert session.publish(tokens, objects(session.model, tokens)).ok


def test_a_node_that_joins_gets_a_holder_and_one_that_leaves_is_forgotten(fabric: Fabric, cluster: Any) -> None:
    node = cluster.add_node("third")
    third = eventually(lambda: holders(fabric), lambda found: len(found) == 3 and all(h.get("grants") for h in found))
    joined = next(h for h in third if h["node"] == node)
    cluster.remove_node(node)
    eventually(lambda: {h["address"] for h in holders(fabric)}, lambda found: joined["address"] not in found)
    assert len(holders(fabric)) == 2


def test_two_fabrics_on_one_cluster_share_nothing(fabric: Fabric, side: Fabric, session: Session) -> None:
    tokens = prompt("only in one")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    with kvfabric.connect("side") as other:
        assert other.acquire(tokens).status is Status.MISS
    addresses = [{m.address: m.unix for m in running.info().members} for running in (fabric, side)]
    assert addresses[0].keys() == addresses[1].keys()
    assert not set(addresses[0].values()) & set(addresses[1].values())


def test_launching_a_fabric_that_runs_attaches_to_it_but_not_with_another_model(fabric: Fabric) -> None:
    again = kvfabric.launch(spec())
    assert {h["pid"] for h in holders(again)} == {h["pid"] for h in holders(fabric)}
    other = spec()
    other["model"] = {"name": "another", "groups": other["model"]["groups"][:1]}
    with pytest.raises(FabricError, match="runs already with the model 'hybrid'"):
        kvfabric.launch(other)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65])
def test_a_name_that_cannot_be_a_fabrics_is_refused(fabric: Fabric, name: str) -> None:
    with pytest.raises(SpecError, match="name: "):
        kvfabric.launch(spec(), name=name)


def test_where_nixl_does_not_start_the_fallback_moves_the_bytes_and_status_says_why(side: Fabric, away: Away) -> None:
    found = holders(side)
    for holder in found:
        assert holder["links"] == ["tcp"]
        assert list(holder["link_problems"]) == ["nixl"]
        assert "NO_SUCH_BACKEND" in holder["link_problems"]["nixl"]
    tokens = prompt("fallback")
    with kvfabric.connect("side") as session:
        assert session.publish(tokens, objects(session.model, tokens)).ok
        told = eventually(lambda: away.do(resumed, tokens, "side"), lambda told: told[0] is not Status.MISS)
        assert told == (Status.FULL_HIT, 64, [])
    assert holders(side)[1]["link_of"] == {found[0]["address"]: "tcp"}


def test_processes_answer_through_their_ray_handles(fabric: Fabric) -> None:
    for handle in (fabric.directory, fabric.holder(), fabric.holder(holders(fabric)[1]["node"][:12])):
        reply = wire.decode(ray_api.call(handle.request.remote(wire.encode(StatusRequest("s")))))
        assert isinstance(reply, StatusReply)
    with pytest.raises(FabricError, match="has 1 holders, there is no number 1"):
        fabric.holder(gpu=1)
    with pytest.raises(FabricError, match="has 0 holders"):
        fabric.holder("ffff")


@pytest.mark.faults
def test_a_fabric_whose_supervisor_died_stops_granting_and_can_be_shut_down(fabric: Fabric) -> None:
    brief = spec(node_resource="kvfabric_node_0", memory_bytes=1 << 20, grant_s=1.5)
    running = kvfabric.launch(brief, name="orphaned")
    session = kvfabric.connect("orphaned")
    tokens = prompt("orphaned")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    pids = [p["pid"] for part in ("holders", "directory") for p in running.status()[part]]
    ray_api.kill(running._supervisor)
    answer = eventually(lambda: session.acquire(tokens), lambda answer: answer.lease is None)
    assert answer.cause is not None
    assert answer.cause.reason is Reason.NOT_GRANTING
    running.shutdown()
    eventually(lambda: [pid for pid in pids if Path(f"/proc/{pid}").exists()], lambda left: not left)
    answer = session.acquire(tokens)
    assert (answer.tokens, answer.lease) == (0, None)
    session.close()
