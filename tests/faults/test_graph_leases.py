"""A graph lease on a real holder: static buffers stand still while everything around them moves."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

import kvfabric
from kvfabric import Fabric, Graph, Lease, Reason, Session, Status
from kvfabric.actors.client import request_id
from kvfabric.fabric.messages import Done, Drop, Objects, SwapIn, SwapOut

from ..actors.stories import NEEDED_AT_64, content, eventually, objects, only, prompt, spec
from .conftest import NODES
from .scene import Scene
from .test_torn import beside

pytestmark = pytest.mark.faults

BESIDE_S = 2.0
SLOTS = {"csa": 16, "tail": 8, "idx": 16, "swa": 16}
"""Room for the graph's prompt and three others."""

C = TypeVar("C")
Buffers = dict[tuple[str, int], tuple[int, tuple[int, ...], tuple[int, ...]]]


@pytest.fixture(scope="module")
def swapping(fabric: Fabric, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    """A fabric of one node with a disk."""
    disk = {"path": str(tmp_path_factory.mktemp("graphs")), "free_floor_bytes": 0}
    with kvfabric.launch(spec(slots=SLOTS, node_resource=NODES[0], disk=disk), name="graphs") as running:
        yield running


@pytest.fixture
def graphs(swapping: Fabric) -> Iterator[Scene]:
    with Scene(swapping) as scene:
        scene.whole()
        eventually(lambda: scene.holder(0)["disk"]["state"], lambda state: state == "ok")
        yield scene
        scene.balanced()


def store(session: Session, tokens: list[int], revision: int = 0) -> Any:
    whole = only(objects(session.model, tokens), NEEDED_AT_64)
    return session.publish(tokens, whole, replace=bool(revision), revision=revision)


def buffers(lease: Lease) -> Buffers:
    """Address, shape and strides of every view, as a capture bakes them in."""
    return {
        (group, index): (view.ctypes.data, view.shape, view.strides)
        for group in lease.views
        for index, view in lease.views[group].items()
    }


def replay(captured: Buffers, tokens: list[int]) -> list[tuple[str, int]]:
    """Read what lies at the captured addresses, as a graph does that asks nobody; what is not the prompt's."""
    return [
        (group, index)
        for (group, index), (address, (nbytes,), _) in captured.items()
        if ctypes.string_at(address, nbytes) != content(tokens, group, index, nbytes).tobytes()
    ]


def named(session: Session, tokens: list[int]) -> tuple[Objects, ...]:
    keys = session.keys(tokens)
    found = []
    for number, group in enumerate(session.model.groups):
        blob = keys.keys(group.unit_tokens)
        at = tuple(NEEDED_AT_64[group.name])
        found.append(Objects(number, 0, at, b"".join(blob[32 * i : 32 * i + 32] for i in at)))
    return tuple(found)


def tell(session: Session, record: Callable[[str, tuple[Objects, ...]], Any], tokens: list[int]) -> Reason | None:
    client = session._holders.client(session._holders.of_shard(0))
    return client.call(record(request_id(), named(session, tokens)), Done).refused


def captured(session: Session, tokens: list[int], capture: Callable[[Lease], C]) -> tuple[Graph, C]:
    """Store a prompt, and capture a graph over the slots that bear it."""
    assert store(session, tokens).ok
    lease = session.acquire(tokens).lease
    assert lease is not None
    with lease:
        graph = session.register_graph(lease)
        assert isinstance(graph, Graph)
        return graph, capture(lease)


def test_a_graphs_buffers_stand_still_while_stores_evictions_and_swaps_run_beside_it(graphs: Scene) -> None:
    session, other = graphs.session(0), graphs.session(0)
    first, second = prompt("captured"), prompt("replayed")
    graph, static = captured(session, first, buffers)
    assert store(session, second).ok
    control = session.acquire(second).lease
    assert control is not None
    with control:
        assert buffers(control).keys() == static.keys()
        assert buffers(control) != static  # without the graph it lies elsewhere
    lease = session.acquire(second, graph=graph, lease_s=60.0).lease
    assert lease is not None
    assert replay(static, second) == []
    assert replay(static, first) != []
    told: dict[str, int] = {}
    number = 0

    def disturb() -> None:
        nonlocal number
        number += 1
        tokens = prompt(f"disturbs {number}")
        told["stored"] = told.get("stored", 0) + store(other, tokens).ok
        told["replaced"] = told.get("replaced", 0) + store(other, second, number).ok
        for verb in (SwapOut, SwapIn):
            told[verb.__name__] = told.get(verb.__name__, 0) + (tell(other, verb, tokens) is None)

    until = time.monotonic() + BESIDE_S
    looks = 0
    with beside(disturb):
        while time.monotonic() < until or looks < 20:
            looks += 1
            assert buffers(lease) == static
            assert replay(static, second) == []
    assert all(told[what] > 3 for what in ("stored", "SwapOut", "SwapIn")), told
    for verb in (SwapOut, Drop):
        assert tell(other, verb, second) in {Reason.GRAPH_FROZEN, None}  # None: of a later copy, elsewhere
    assert replay(static, second) == []
    assert lease.check() is None
    lease.release()
    again = session.acquire(first, graph=graph)
    if again.lease is not None:  # what the disturbance evicted is gone
        with again.lease:
            assert buffers(again.lease) == static
            assert replay(static, first) == []
    graph.close()


def test_what_would_free_a_frozen_slot_is_refused_until_the_release(graphs: Scene) -> None:
    session, tokens = graphs.session(0), prompt("frozen")
    graph, static = captured(session, tokens, buffers)
    lease = session.acquire(tokens, graph=graph).lease
    assert lease is not None
    for verb in (Drop, SwapOut):
        assert tell(session, verb, tokens) is Reason.GRAPH_FROZEN
    assert replay(static, tokens) == []
    lease.release()
    assert tell(session, SwapOut, tokens) is None
    assert tell(session, SwapIn, tokens) is None
    answer = session.acquire(tokens, graph=graph)
    assert answer.status is Status.FULL_HIT, answer.cause
    assert answer.lease is not None
    with answer.lease as lease:
        assert buffers(lease) == static
        assert replay(static, tokens) == []
    graph.close()


def test_an_expired_graph_lease_keeps_its_slots_from_others_until_its_process_says_idle(graphs: Scene) -> None:
    session, other = graphs.session(0), graphs.session(0)
    tokens = prompt("expired")
    graph, static = captured(session, tokens, buffers)
    pinned = sum(map(len, NEEDED_AT_64.values()))
    lease = session.acquire(tokens, graph=graph, lease_s=0.3).lease
    assert lease is not None
    plain = other.acquire(tokens, lease_s=0.3).lease
    assert plain is not None
    time.sleep(2.0)
    assert lease.check() is Reason.LEASE_EXPIRED
    assert plain.check() is Reason.LEASE_EXPIRED
    assert graphs.holder(0)["pinned_slots"] == pinned
    assert graphs.holder(0)["leases"] == 1  # the control: the plain one is over
    for number in range(12):
        store(other, prompt(f"wants the room {number}"))
    assert replay(static, tokens) == []
    graph.idle()
    eventually(lambda: graphs.holder(0)["pinned_slots"], lambda count: count == 0, within_s=2.0)
    for number in range(12):
        assert store(other, prompt(f"gets the room {number}")).ok
    assert replay(static, tokens) != []
    graph.close()
