"""kill -9 of whoever takes part: the answer is right, nothing is lost, and the same request succeeds afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric, Reason, Status
from kvfabric.actors import ray_api
from kvfabric.actors.embedded import EmbeddedCluster

from ..actors.stories import eventually, objects, prompt, spec
from .conftest import NODES
from .scene import RESUME, Scene, arena_of, big_prompt, cut, in_mid_transfer, kill, read

pytestmark = pytest.mark.faults

TRIES = 6
"""A busy machine may strike too late: then the transfer was over, and the next one is struck."""


def struck(scene: Scene, name: str, victim: int, others: int, *, least: int = 1) -> Iterator[tuple[list[int], Any]]:
    """Transfers from node 0 to node 1, with a holder killed in the middle of each; those that it cut."""
    hits = 0
    for number in range(TRIES):
        tokens = big_prompt(f"{name} {number}")
        source, reader = scene.session(0), scene.session(1)
        scene.publish(source, tokens)
        scene.known(reader, tokens)
        before = scene.holder(victim)
        answer = in_mid_transfer(reader, tokens, kill(before), arena_of(reader))
        if cut(partial(read, answer, reader, tokens)):
            hits += 1
            yield tokens, answer
        scene.whole()
        assert scene.holder(victim)["incarnation"] > before["incarnation"]
        assert scene.holder(others)["slots_lost"] == 0
        if hits == least:
            return
    pytest.fail(f"none of {TRIES} strikes hit a transfer")


def resumed_whole(scene: Scene, tokens: list[int]) -> None:
    """The same from the beginning, without a fault: all of it arrives."""
    source, reader = scene.session(0), scene.session(1)
    scene.publish(source, tokens)
    scene.known(reader, tokens)
    answer = eventually(lambda: reader.acquire(tokens), lambda answer: answer.lease is not None)
    assert answer.status is Status.FULL_HIT
    assert read(answer, reader, tokens) == RESUME


def of_a_killed_source(scene: Scene, least: int) -> None:
    tokens = big_prompt("source again")
    for _, answer in struck(scene, "source", victim=0, others=1, least=least):
        # What had arrived and was proven may be used; the rest is not there, and the cause says why.
        assert answer.status in {Status.MISS, Status.PARTIAL_HIT}
        assert answer.cause is not None
        assert answer.cause.reason in {Reason.HOLDER_LOST, Reason.TRANSFER_FAILED}
        scene.balanced()
    scene.whole()
    resumed_whole(scene, tokens)


def of_a_killed_reader(scene: Scene, least: int) -> None:
    again = big_prompt("reader again")
    for tokens, answer in struck(scene, "reader", victim=1, others=0, least=least):
        assert (answer.tokens, answer.lease) == (0, None)
        assert answer.cause is not None
        assert answer.cause.reason is Reason.HOLDER_LOST
        scene.balanced()  # the source let go of what it had pinned
        assert read(scene.session(0).acquire(tokens), scene.session(0), tokens) == RESUME
    scene.whole()
    resumed_whole(scene, again)


def test_a_source_killed_in_mid_transfer_costs_a_shorter_prefix_and_nothing_else(scene: Scene) -> None:
    of_a_killed_source(scene, 1)


def test_a_reader_killed_in_mid_transfer_leaves_no_pin_at_its_source(scene: Scene) -> None:
    of_a_killed_reader(scene, 1)


@pytest.mark.long
def test_many_sources_and_readers_killed_in_mid_transfer(scene: Scene) -> None:
    of_a_killed_source(scene, 5)
    of_a_killed_reader(scene, 5)


WORKER = """
import sys, time
from kvfabric import Session
from kvfabric.actors.info import FabricInfo
info = FabricInfo.decode(bytes.fromhex(sys.stdin.readline()), sys.stdin.readline().strip())
session = Session(lambda: info, name=info.name)
tokens = eval(sys.stdin.readline())
plain = [session.acquire(tokens, lease_s=1.0).lease for _ in range(3)]
frozen = session.acquire(tokens, lease_s=1.0, graph=True).lease
print(*(lease.check() for lease in (*plain, frozen)), flush=True)
time.sleep(600)
"""


def test_a_killed_workers_leases_end_with_their_grace_and_its_graphs_with_its_death(scene: Scene) -> None:
    session, tokens = scene.session(0), big_prompt("worker")
    scene.publish(session, tokens)
    told = f"{scene.fabric.info().encode().hex()}\n{scene.nodes[0]}\n{tokens}\n"
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(told)
        worker.stdin.flush()
        assert worker.stdout.readline() == "None None None None\n"
        assert scene.holder(0)["leases"] == 4
        time.sleep(2.5)  # the plain ones are over with their grace, and a graph may still replay
        assert scene.holder(0)["leases"] == 1
        assert scene.holder(0)["pinned_slots"] > 0
        worker.kill()
        worker.wait()
        eventually(lambda: scene.holder(0)["leases"], lambda count: count == 0, within_s=5.0)
    scene.balanced(5.0)
    assert read(session.acquire(tokens), session, tokens) == RESUME


def test_acquires_are_right_while_the_directory_is_killed_again_and_again(scene: Scene) -> None:
    """What it still knows, has forgotten or hears anew only decides how far a resume goes, never with which bytes."""
    source, reader = scene.session(0), scene.session(1)
    granted = []
    for number in range(9):
        before = eventually(lambda: directory(scene), bool)
        tokens = big_prompt(f"directory {number}")
        scene.publish(source, tokens)
        if number % 3 == 1:
            kill(before)()
        elif number % 3 == 2:
            scene.known(reader, tokens)  # told again by the holders
        granted.append(read(reader.acquire(tokens), reader, tokens))
    assert set(granted) <= {0, RESUME}
    assert granted[2::3] == [RESUME] * 3
    assert directory(scene)["epoch"] >= 4


def directory(scene: Scene) -> dict[str, Any]:
    """The status of the directory; nothing while it is away."""
    return next((d for d in scene.fabric.status()["directory"] if "pid" in d), {})


def test_a_killed_supervisor_comes_back_to_the_same_holders_and_nothing_wrong_is_granted_meanwhile(
    fabric: Fabric,
) -> None:
    brief = spec(node_resource=NODES, memory_bytes=1 << 20, grant_s=2.0)
    with kvfabric.launch(brief, name="orphans") as running, Scene(running) as scene:
        scene.whole()
        here, there, tokens = scene.session(0), scene.session(1), prompt("orphans")
        assert here.publish(tokens, objects(here.model, tokens)).ok
        eventually(lambda: there.probe(tokens).tokens, lambda found: found == 64)
        before = {h["address"]: (h["pid"], h["incarnation"]) for place in (0, 1) for h in scene.holders(place)}
        first = int(running.status()["pid"])
        os.kill(first, signal.SIGKILL)
        met: set[Reason | None] = set()

        def successor() -> int:
            for session in (here, there):
                answer = session.acquire(tokens)
                if read(answer, session, tokens) < 64:
                    met.add(None if answer.cause is None else answer.cause.reason)
            try:
                return int(running.status()["pid"])
            except ray_api.Unavailable:
                return first

        eventually(successor, lambda pid: pid != first, within_s=60.0)
        assert met <= {Reason.NOT_GRANTING, Reason.HOLDER_LOST, Reason.DIRECTORY_UNAVAILABLE}
        scene.whole()
        assert {h["address"]: (h["pid"], h["incarnation"]) for place in (0, 1) for h in scene.holders(place)} == before
        for session in (scene.session(0), scene.session(1)):
            answer = eventually(partial(session.acquire, tokens), lambda answer: answer.lease is not None)
            assert read(answer, session, tokens) == 64
        scene.balanced()


def test_a_killed_raylet_takes_its_node_along_and_what_others_copied_stays(fabric: Fabric) -> None:
    cluster = fabric._embedded or EmbeddedCluster.current
    assert cluster is not None
    node = cluster.add_node("doomed")
    brief = spec(node_resource=(NODES[0], "doomed"), memory_bytes=1 << 20)
    with kvfabric.launch(brief, name="doomed") as running, Scene(running) as scene:
        scene.whole()
        assert scene.nodes[1] == node
        here, there = scene.session(0), scene.session(1)
        copied, lost = prompt("doomed, copied"), prompt("doomed, lost")
        for tokens in (copied, lost):
            assert there.publish(tokens, objects(there.model, tokens)).ok
        eventually(lambda: here.probe(copied).tokens, lambda found: found == 64)
        answer = here.acquire(copied)
        assert read(answer, here, copied) == 64
        leased = there.acquire(copied).lease
        assert leased is not None
        assert leased.check() is None
        cut_off = scene.holder(1)
        os.kill(raylet_of(cluster, node), signal.SIGKILL)
        eventually(lambda: len(scene.fabric.status()["holders"]), lambda count: count == 1, within_s=60.0)
        # Its processes end when they miss their raylet; until then their bytes are what was leased.
        eventually(lambda: Path(f"/proc/{cut_off['pid']}").exists(), lambda there: not there)
        assert leased.check() is Reason.HOLDER_LOST
        assert read(here.acquire(copied), here, copied) == 64
        gone = eventually(lambda: here.acquire(lost), lambda answer: answer.cause is None)
        assert (gone.status, gone.tokens, gone.lease) == (Status.MISS, 0, None)
        assert here.publish(lost, objects(here.model, lost)).ok
        assert read(here.acquire(lost), here, lost) == 64
        scene.balanced()
    cluster.remove_node(node)


def raylet_of(cluster: EmbeddedCluster, node: str) -> int:
    found = next(n for n in cluster._cluster.worker_nodes if n.node_id == node)
    return int(found.all_processes["raylet"][0].process.pid)
