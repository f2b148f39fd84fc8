"""A graph lease under a real captured CUDA graph: it reads the addresses it captured, asks nobody, and is right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvfabric
from kvfabric import Fabric, Lease, Reason
from kvfabric.fabric.messages import Drop, SwapIn, SwapOut

from ..actors.stories import NEEDED_AT_64, content, eventually, prompt, spec
from .conftest import NODES
from .scene import Scene
from .test_graph_leases import BESIDE_S, SLOTS, captured, store, tell
from .test_torn import beside

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda sees none here"),
]

Sums = dict[tuple[str, int], int]
WARM_UPS = 3


@pytest.fixture(scope="module")
def swapping(fabric: Fabric, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    """A fabric of one node whose readers' memory is a GPU's, with host memory and a disk below."""
    disk = {"path": str(tmp_path_factory.mktemp("cuda_graphs")), "free_floor_bytes": 0}
    below = {"host_memory_bytes": 16 << 20, "disk": disk}
    with kvfabric.launch(spec(slots=SLOTS, device="cuda", node_resource=NODES[0], **below), name="cuda") as running:
        yield running


@pytest.fixture
def graphs(swapping: Fabric) -> Iterator[Scene]:
    with Scene(swapping) as scene:
        scene.whole()
        eventually(lambda: scene.holder(0)["disk"]["state"], lambda state: state == "ok")
        yield scene
        scene.balanced()


class Captured:
    """A CUDA graph over a lease's G1 views: it copies every object to an output of its own, and nothing else."""

    def __init__(self, lease: Lease) -> None:
        views = {(group, index): view for group in lease.views for index, view in lease.views[group].items()}
        assert views
        assert all(view.is_cuda for view in views.values())
        self.addresses = {at: (view.data_ptr(), tuple(view.shape), view.stride()) for at, view in views.items()}
        self.outputs = {at: torch.empty_like(view) for at, view in views.items()}

        def step() -> None:
            for at, view in views.items():
                # Computed by a kernel, and not a copy alone: twice inverted, the bytes are what they were.
                self.outputs[at].copy_(torch.bitwise_not(torch.bitwise_not(view)))

        stream: Any = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            step()

    def replay(self) -> None:
        """Run it, and wait for it. What it wrote before is wiped: an output left over would look right."""
        for output in self.outputs.values():
            output.zero_()
        self._graph.replay()
        torch.cuda.synchronize()

    def wrong(self, tokens: list[int]) -> list[tuple[str, int]]:
        """Which outputs of a replay are not a prompt's."""
        self.replay()
        return [
            at
            for at, output in self.outputs.items()
            if output.cpu().numpy().tobytes() != content(tokens, *at, output.numel()).tobytes()
        ]


def addresses(lease: Lease) -> dict[tuple[str, int], Any]:
    """Address, shape and strides of every view."""
    return {
        (group, index): (view.data_ptr(), tuple(view.shape), view.stride())
        for group in lease.views
        for index, view in lease.views[group].items()
    }


def test_a_captured_graph_replays_right_while_stores_evictions_and_swaps_run_beside_it(graphs: Scene) -> None:
    session, other = graphs.session(0), graphs.session(0)
    first, second = prompt("captured on a GPU"), prompt("replayed on a GPU")
    graph, replayed = captured(session, first, Captured)
    assert replayed.wrong(first) == []
    assert store(session, second).ok
    assert replayed.wrong(second) != [], "the control: it does not read the other prompt's slots"
    lease = session.acquire(second, graph=graph, lease_s=60.0).lease
    assert lease is not None
    assert addresses(lease) == replayed.addresses
    assert replayed.wrong(second) == []
    told: dict[str, int] = {}
    number = 0

    def disturb() -> None:
        nonlocal number
        number += 1
        tokens = prompt(f"disturbs the GPU {number}")
        told["stored"] = told.get("stored", 0) + store(other, tokens).ok
        told["replaced"] = told.get("replaced", 0) + store(other, second, number).ok
        for verb in (SwapOut, SwapIn):
            told[verb.__name__] = told.get(verb.__name__, 0) + (tell(other, verb, tokens) is None)

    until, replays = time.monotonic() + BESIDE_S, 0
    with beside(disturb):
        while time.monotonic() < until or replays < 20:
            replays += 1
            assert replayed.wrong(second) == []
            assert addresses(lease) == replayed.addresses
    assert all(told[what] > 3 for what in ("stored", "SwapOut", "SwapIn")), told
    for verb in (SwapOut, Drop):
        assert tell(other, verb, second) in {Reason.GRAPH_FROZEN, None}  # None: of a later copy, elsewhere
    assert replayed.wrong(second) == []
    assert lease.check() is None
    lease.release()
    graph.close()


def test_an_expired_lease_under_a_captured_graph_stays_quarantined_until_the_graph_is_idle(graphs: Scene) -> None:
    session, other = graphs.session(0), graphs.session(0)
    tokens = prompt("expired on a GPU")
    graph, replayed = captured(session, tokens, Captured)
    lease = session.acquire(tokens, graph=graph, lease_s=0.3).lease
    assert lease is not None
    eventually(lease.check, lambda reason: reason is Reason.LEASE_EXPIRED, within_s=5.0)
    time.sleep(2.0)  # the grace is over, in which every lease keeps its pins
    assert graphs.holder(0)["pinned_slots"] == sum(map(len, NEEDED_AT_64.values()))
    for number in range(12):
        store(other, prompt(f"wants the GPU's room {number}"))
    assert replayed.wrong(tokens) == []
    graph.idle()
    eventually(lambda: graphs.holder(0)["pinned_slots"], lambda count: count == 0, within_s=5.0)
    for number in range(12):
        assert store(other, prompt(f"gets the GPU's room {number}")).ok
    assert replayed.wrong(tokens) != [], "the control: it does read those slots"
    graph.close()
