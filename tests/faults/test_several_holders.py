"""A reader whose ranks lie with several holders: all of them are granted or none, and one that is lost ends it for all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import kvfabric
from kvfabric import Fabric, Reason, Session, Status
from kvfabric.actors.answer import Answer

from ..actors.stories import GROUPS, content, eventually, spec
from .conftest import NODES
from .scene import NEEDED, RESUME, Scene, arena_of, big_prompt, cut, in_mid_transfer, kill

pytestmark = pytest.mark.faults

BLOCK_BYTES = 512 << 10
TRIES = 6


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, fabric: Fabric) -> Iterator[Fabric]:
    """A fabric with so many holders on each node, one a rank."""
    groups = [g | {"block_bytes": BLOCK_BYTES} if g["name"] == "csa" else g for g in GROUPS]
    brief = spec(
        model={"name": "ranks", "groups": groups, "shards": request.param},
        slots={"csa": 72, "tail": 72, "idx": 72, "swa": 72},
        holders_per_node=request.param,
        node_resource=NODES,
        transport={"links": ["nixl"], "nixl_transports": "tcp", "network_devices": "lo", "transfer_timeout_s": 4.0},
    )
    with kvfabric.launch(brief, name=f"ranks{request.param}") as running:
        yield running


@pytest.fixture
def several(ranks: Fabric) -> Iterator[Scene]:
    with Scene(ranks) as scene:
        scene.whole()
        yield scene
        scene.balanced()


def right(session: Session, tokens: list[int], group: str, shard: int, index: int) -> Any:
    return content(tokens, f"{group}/{shard}", index, session.model.group(group).block_bytes)


def publish(session: Session, tokens: list[int]) -> None:
    for shard in range(session.model.shards):
        objects = {g: {i: right(session, tokens, g, shard, i) for i in at} for g, at in NEEDED.items()}
        assert session.publish(tokens, objects, shard=shard).ok


def read(answer: Answer, session: Session, tokens: list[int]) -> int:
    """Check every rank's bytes and release; how many tokens were covered. A lease covers every rank."""
    if answer.lease is None:
        return 0
    with answer.lease as lease:
        assert len(lease.fences) == session.model.shards
        for group, indices in NEEDED.items():
            for shard in range(session.model.shards):
                with lease.read(group, shard) as views:
                    if lease.tokens == RESUME:
                        assert sorted(views) == list(indices)
                    for index in views:
                        assert np.array_equal(views[index], right(session, tokens, group, shard, index))
        return lease.tokens


def whole(scene: Scene, session: Session, tokens: list[int]) -> None:
    scene.known(session, tokens)
    answer = eventually(lambda: session.acquire(tokens), lambda answer: answer.lease is not None)
    assert answer.status is Status.FULL_HIT
    assert read(answer, session, tokens) == RESUME


def killed_before_the_grant(scene: Scene, rank: int) -> None:
    """One rank's holder dies once its slots are reserved and being filled: nobody gets a lease."""
    for number in range(TRIES):
        tokens = big_prompt(f"rank {rank} {number}")
        source, reader = scene.session(0), scene.session(1)
        publish(source, tokens)
        scene.known(reader, tokens)
        victim = scene.holders(1)[rank]
        answer = in_mid_transfer(reader, tokens, kill(victim), arena_of(reader, rank))
        struck = cut(partial(read, answer, reader, tokens))
        if struck:
            assert answer.lease is None
            assert answer.cause is not None
            assert answer.cause.reason is Reason.HOLDER_LOST
        scene.whole()
        scene.balanced()
        whole(scene, scene.session(1), tokens)
        if struck:
            return
    pytest.fail(f"none of {TRIES} strikes came before the grant")


def test_a_rank_killed_between_reserve_and_grant_leaves_no_lease_and_no_pin_on_any(several: Scene) -> None:
    killed_before_the_grant(several, several.fabric.spec.model.shards - 1)


def test_a_leader_killed_between_reserve_and_grant_leaves_no_lease_and_no_pin_on_any(several: Scene) -> None:
    killed_before_the_grant(several, 0)


def test_a_rank_killed_under_a_lease_ends_it_on_all(several: Scene) -> None:
    tokens = big_prompt("under a lease")
    source = several.session(0)
    publish(source, tokens)
    lease = source.acquire(tokens, lease_s=60.0).lease
    assert lease is not None
    assert lease.check() is None
    assert all(h["leases"] == 1 for h in several.holders(0))
    kill(several.holders(0)[-1])()
    eventually(lease.check, lambda reason: reason is Reason.HOLDER_LOST, within_s=2.0)
    assert lease.renew() in {Reason.HOLDER_LOST, Reason.LEASE_EXPIRED}
    several.whole()
    several.balanced()  # on the ranks that live, long before the lease's own end
    fresh = several.session(0)
    publish(fresh, tokens)
    assert read(fresh.acquire(tokens), fresh, tokens) == RESUME


@pytest.mark.long
def test_every_rank_killed_between_reserve_and_grant_again_and_again(several: Scene) -> None:
    for _ in range(3):
        for rank in range(several.fabric.spec.model.shards):
            killed_before_the_grant(several, rank)
