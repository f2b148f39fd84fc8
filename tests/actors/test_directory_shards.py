"""A directory of several processes on a real cluster: it grows, loses one, shrinks, and answers stay right."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric, FabricError, Session, Status
from kvfabric.actors import ray_api
from kvfabric.actors.shards import is_directory

from .conftest import Away
from .stories import eventually, objects, prompt, spec
from .test_supervision import resumed


def shards_of(fabric: Fabric) -> list[dict[str, Any]]:
    return [shard for shard in fabric.status()["directory"] if "epoch" in shard]


def nodes_of(fabric: Fabric, shards: bool) -> set[str]:
    """Where its directory shards run, or its holders."""
    told = fabric.status()["processes"]
    return {process["node"] for address, process in told.items() if is_directory(address) is shards}


def head(ray: Any) -> str:
    (found,) = (n["NodeID"] for n in ray.nodes() if n["Alive"] and ray_api.HEAD in n["Resources"])
    return str(found)


def test_shards_stay_off_the_head_where_there_is_a_choice(fabric: Fabric, side: Fabric, ray: Any) -> None:
    assert head(ray) in nodes_of(fabric, shards=False)  # it takes holders
    side.reshard(3)
    eventually(lambda: shards_of(side), lambda found: len(found) == 3)
    assert nodes_of(side, shards=True) == nodes_of(side, shards=False) - {head(ray)}
    side.reshard(1)


def test_a_shard_runs_on_the_head_where_there_is_no_other_node(fabric: Fabric, ray: Any) -> None:
    with kvfabric.launch(spec(node_resource=("kvfabric_node_0",)), name="alone") as alone:
        assert nodes_of(alone, shards=True) == nodes_of(alone, shards=False) == {head(ray)}


def test_a_directory_grows_loses_a_shard_and_shrinks_and_prompts_stay_resumable(
    fabric: Fabric, session: Session, away: Away
) -> None:
    kept = [prompt(f"sharded{i}") for i in range(8)]
    for tokens in kept:
        assert session.publish(tokens, objects(session.model, tokens)).ok
    one = eventually(lambda: shards_of(fabric), lambda found: len(found) == 1 and found[0]["segments"] >= 16)
    everything = one[0]["segments"]

    fabric.reshard(3)
    three = eventually(
        lambda: shards_of(fabric),
        lambda found: len(found) == 3 and sum(shard["segments"] for shard in found) == everything,
    )
    assert all(shard["segments"] for shard in three)
    assert {tuple(shard["shards"]) for shard in three} == {("directory:0", "directory:1", "directory:2")}
    assert all(away.do(resumed, tokens) == (Status.FULL_HIT, 64, []) for tokens in kept)

    again = prompt("sharded again")
    assert session.publish(again, objects(session.model, again)).ok
    victim = three[1]
    os.kill(victim["pid"], signal.SIGKILL)
    eventually(
        lambda: shards_of(fabric),
        lambda found: (
            len(found) == 3
            and any(s["address"] == victim["address"] and s["epoch"] > victim["epoch"] for s in found)
            and sum(shard["segments"] for shard in found) > everything
        ),
    )
    assert away.do(resumed, again) == (Status.FULL_HIT, 64, [])

    fabric.reshard(1)
    eventually(lambda: shards_of(fabric), lambda found: len(found) == 1 and found[0]["segments"] > everything)
    last = prompt("sharded last")
    assert session.publish(last, objects(session.model, last)).ok
    eventually(lambda: away.do(resumed, last), lambda told: told == (Status.FULL_HIT, 64, []))


def test_a_number_of_shards_that_makes_no_sense_is_refused(fabric: Fabric) -> None:
    for count in (0, 65):
        with pytest.raises(FabricError, match="directory_shards"):
            fabric.reshard(count)
