"""After many kill -9 of holders: what readers have mapped stays readable until they let go, and then it is given back."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvfabric
from kvfabric import Fabric, Session

from ..actors.stories import content, eventually, spec
from ..actors.test_leftovers import SHARED_MEMORY_TOLERANCE_KB, arenas, shared_memory_kb
from .conftest import NODES
from .scene import Scene, kill

pytestmark = pytest.mark.faults

RANKS = 4
BLOCKS = 4
BLOCK_BYTES = 1 << 20
WARM = 1000
"""Rounds that count for nothing."""


@pytest.fixture(scope="module")
def many(fabric: Fabric) -> Iterator[Fabric]:
    """Four holders a node."""
    groups = [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": BLOCK_BYTES}]
    brief = spec(
        model={"name": "many", "groups": groups, "shards": RANKS},
        slots={"kv": 2 * BLOCKS},
        holders_per_node=RANKS,
        node_resource=NODES,
        transport={"links": ["shared_memory"]},
    )
    with kvfabric.launch(brief, name="many") as running:
        yield running


def pids(scene: Scene) -> list[int]:
    return [h["pid"] for place in (0, 1) for h in scene.holders(place)]


def views(session: Session, round_number: int) -> list[tuple[Any, Any]]:
    """A prompt's blocks on every rank of a node, as its reader maps them, and what they must bear."""
    tokens = [round_number * 1000 + i for i in range(16 * BLOCKS + 1)]
    right = [[content(tokens, f"kv/{shard}", i, BLOCK_BYTES) for i in range(BLOCKS)] for shard in range(RANKS)]
    for shard in range(RANKS):
        assert session.publish(tokens, {"kv": dict(enumerate(right[shard]))}, shard=shard, replace=True).ok
    lease = session.acquire(tokens, lease_s=1.0).lease
    assert lease is not None
    return [(lease.views.of("kv", shard)[i], right[shard][i]) for shard in range(RANKS) for i in range(BLOCKS)]


def killed(running: Fabric, kills: int) -> None:
    alone = len(arenas()) == 2 * RANKS
    with Scene(running) as scene:
        scene.whole()
        strangers = arenas([os.getpid()]) - arenas(pids(scene))
        kept: list[tuple[Any, Any]] = []
        with Scene(running) as warm:
            for place in (0, 1):  # the pages of every arena are there at the beginning
                views(warm.session(place), WARM + place)
        gc.collect()
        before_kb = shared_memory_kb()
        done = 0
        while done < kills:
            place = done // RANKS % 2
            with Scene(running) as reader:
                kept += views(reader.session(place), done)
            victims = scene.holders(place)
            for victim in victims:
                kill(victim)()
            done += len(victims)
            assert all(np.array_equal(view, right) for view, right in kept[-RANKS * BLOCKS :])
            scene.whole()
        # Every life that was read from is still there, and not one more.
        lives = arenas([os.getpid(), *pids(scene)]) - strangers
        assert len(lives) == done + 2 * RANKS
        assert all(np.array_equal(view, right) for view, right in kept)
        kept.clear()
    gc.collect()
    with Scene(running) as scene:
        eventually(lambda: len(arenas([os.getpid(), *pids(scene)]) - strangers), lambda count: count == 2 * RANKS)
        for place in (0, 1):
            views(scene.session(place), WARM + place)
        if alone and len(arenas()) == 2 * RANKS:  # nobody else runs a fabric on this machine
            eventually(shared_memory_kb, lambda kb: kb <= before_kb + SHARED_MEMORY_TOLERANCE_KB)
        gc.collect()
        scene.balanced(60.0)


def test_mappings_of_killed_holders_stay_readable_until_let_go_and_then_nothing_is_left(many: Fabric) -> None:
    killed(many, 2 * RANKS)


@pytest.mark.long
def test_a_hundred_killed_holders_leave_nothing_once_their_readers_let_go(many: Fabric) -> None:
    killed(many, 100)
