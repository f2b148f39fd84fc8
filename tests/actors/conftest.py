"""One embedded cluster of two nodes for all tests here, with real holders, links and clients on both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric, Session

from . import stories

MAIN = "default"


class Away:
    """A process on the other node: runs functions there, keeps what they keep in ``self.kept``."""

    def __init__(self, handle: Any, ray: Any) -> None:
        self._handle = handle
        self._ray = ray

    def do(self, work: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> Any:
        """``work(kept, *args)`` over there; what it raises is raised here."""
        return self._ray.get(self._handle.do.remote(work, *args), timeout=timeout_s)

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """The reference of a ``do`` that is not waited for."""
        return self._handle.do.remote(work, *args)


@pytest.fixture(scope="session")
def fabric() -> Iterator[Fabric]:
    """The fabric that most tests share."""
    with kvfabric.launch(stories.spec(), name=MAIN, nodes=2) as running:
        yield running


@pytest.fixture(scope="session")
def cluster(fabric: Fabric) -> Any:
    """The embedded cluster."""
    assert fabric._embedded is not None
    return fabric._embedded


@pytest.fixture(scope="session")
def side(fabric: Fabric) -> Iterator[Fabric]:
    """A second fabric on the same cluster: pools for one prompt only, NIXL made unable to start."""
    slots = {"csa": 5, "tail": 20, "idx": 5, "swa": 20}
    transport = {"links": ["nixl", "tcp"], "nixl_backend": "NO_SUCH_BACKEND"}
    nodes = ("kvfabric_node_0", "kvfabric_node_1")  # not those that a test adds
    with kvfabric.launch(stories.spec(slots=slots, transport=transport, node_resource=nodes), name="side") as running:
        yield running


@pytest.fixture(scope="session")
def ray(fabric: Fabric) -> Any:
    import ray

    ray.cloudpickle.register_pickle_by_value(stories)
    return ray


@pytest.fixture(scope="session")
def away(ray: Any) -> Iterator[Away]:
    """A process on the node where the tests are not."""

    class Process:
        def __init__(self) -> None:
            self.kept: dict[str, Any] = {}

        def do(self, work: Callable[..., Any], *args: Any) -> Any:
            return work(self.kept, *args)

    options = {"num_cpus": 0, "resources": {"kvfabric_node_1": 0.01}, "max_concurrency": 4}
    handle = ray.remote(Process).options(**options).remote()
    yield Away(handle, ray)
    ray.kill(handle)


@pytest.fixture(autouse=True, scope="module")
def _functions_travel_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """The nodes' processes cannot import the tests."""
    from ray import cloudpickle

    module = sys.modules[request.module.__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def session(fabric: Fabric) -> Iterator[Session]:
    """A session of this process, on the cluster's first node."""
    with kvfabric.connect(MAIN) as connected:
        yield connected


def holders(running: Fabric) -> list[dict[str, Any]]:
    """The status of each holder, that of this process's node first."""
    here = running.info().node
    return sorted(running.status()["holders"], key=lambda h: h.get("node") != here)


def successor(running: Fabric, before: dict[str, Any]) -> dict[str, Any]:
    """The status of the holder that takes a dead one's place, once all holders are up."""

    def is_up(found: list[dict[str, Any]]) -> bool:
        after = {h["address"]: h.get("incarnation", 0) for h in found}
        return len(found) == 2 and all(after.values()) and after.get(before["address"], 0) > before["incarnation"]

    found = stories.eventually(lambda: holders(running), is_up)
    return next(h for h in found if h["address"] == before["address"])
