"""Host memory below what readers map, on a real cluster: parked there, pending, restored where it lies, fetched, right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric, Status
from kvfabric.fabric.kinds import Reason

from . import stories
from .conftest import Away, holders

NAME = "tiers"


@pytest.fixture(scope="module")
def tiers(fabric: Fabric) -> Iterator[Fabric]:
    """A fabric on the same cluster whose holders have two tiers of memory and no disk."""
    nodes = ("kvfabric_node_0", "kvfabric_node_1")  # not those that a test adds
    spec = stories.spec(memory_bytes=4 << 20, host_memory_bytes=8 << 20, node_resource=nodes)
    with kvfabric.launch(spec, name=NAME) as running:
        yield running


def parked(kept: dict[str, Any], tokens: list[int]) -> tuple[Reason | None, Status]:
    """Publish here, lease, and put it below as a preempted request does; then what a probe says."""
    with kvfabric.connect(NAME) as session:
        assert session.publish(tokens, stories.objects(session.model, tokens)).ok
        answer = session.acquire(tokens)
        assert answer.lease is not None
        refused = session.park(answer.lease).refused
        return refused, session.probe(tokens).status


def test_what_another_node_parked_in_host_memory_is_restored_there_and_read_here(tiers: Fabric, away: Away) -> None:
    tokens = stories.prompt("parked in host memory")
    assert away.do(parked, tokens) == (None, Status.PENDING)
    there = holders(tiers)[1]
    assert there["host_memory"]["objects"] > 0
    assert there["disk"] is None
    with kvfabric.connect(NAME) as session:
        pending = session.probe(tokens)
        assert (pending.status, pending.tokens) == (Status.PENDING, 64)
        assert pending.cause is not None
        assert pending.cause.reason is Reason.RESTORE_PENDING
        answer = session.acquire(tokens)
        assert (answer.status, answer.tokens) == (Status.FULL_HIT, 64)
        assert answer.lease is not None
        assert stories.wrong_bytes(answer.lease, session.model, tokens) == []
        answer.lease.release()
    after = holders(tiers)
    assert after[1]["counters"]["restored_objects"] > 0
    assert [holder["slots_lost"] for holder in after] == [0, 0]
