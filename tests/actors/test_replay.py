"""A replay on real actors: it reads every leased byte, and tells the right ones from others."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

import kvfabric
from kvfabric import Fabric
from kvfabric.fabric.kinds import SpecError
from kvfabric.ops.replay.cluster import BLOCK_BYTES, ClusterReplay, fabric_spec, scaled
from kvfabric.ops.replay.cluster_player import Asked, Player, tokens_of
from kvfabric.ops.replay.models import layout_of, replay_model
from kvfabric.ops.replay.trace import BLOCK_TOKENS, Request, Trace

GROUPS: list[dict[str, Any]] = [
    {"name": "kv", "kind": "compressed_history", "block_tokens": 512, "block_bytes": 4096},
    {"name": "swa", "kind": "sliding_window", "block_tokens": 64, "window_tokens": 128, "block_bytes": 512},
]


@pytest.fixture(scope="module")
def replayed(fabric: Fabric, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    """A fabric of its own on the shared cluster, with a disk."""
    spec = {
        "model": {"name": "replayed", "groups": GROUPS},
        "memory_bytes": 4 << 20,
        "transport": {"links": ["tcp"]},
        "node_resource": ["kvfabric_node_0", "kvfabric_node_1"],
        "disk": {"path": str(tmp_path_factory.mktemp("disk")), "free_floor_bytes": 0},
    }
    del fabric  # it keeps the cluster
    with kvfabric.launch(spec, name="replayed") as running:
        yield running


def request(at_s: float, *blocks: int) -> Request:
    return Request(at_s, len(blocks) * BLOCK_TOKENS + 9, 10, array("q", blocks))


def test_with_room_for_all_real_actors_reach_the_traces_own_hits_with_every_byte_right(replayed: Fabric) -> None:
    requests = [request(0, 7), request(1, 7, 8), request(2, 7, 8, 9), request(3, 7, 8, 9), request(4, 7, 8, 5)]
    told: list[int] = []
    result = ClusterReplay(Trace("by hand", requests), replayed).run(told.append)
    assert result.infinite_cache_hit_tokens == (0 + 1 + 2 + 3 + 2) * BLOCK_TOKENS
    assert result.effective_hit_tokens == result.usable_hit_tokens == result.infinite_cache_hit_tokens
    assert (result.wrong_reads, result.by_cause, result.requests, result.stores_refused) == (0, {}, 5, 0)
    assert result.bytes_moved > 0  # two nodes took turns
    assert told == [1, 2, 3, 4, 5]


def test_a_wrong_byte_under_the_right_digest_is_counted(replayed: Fabric) -> None:
    asked = Asked(0, (900, 901), 2 * BLOCK_TOKENS + 5)
    with kvfabric.connect("replayed") as session:
        player = Player(session)
        assert player.play(asked).tokens == 0
        again = player.play(asked)
        assert (again.tokens, again.wrong_reads) == (2 * BLOCK_TOKENS, 0)
        other = Asked(1, (902, 903), 2 * BLOCK_TOKENS + 5)
        keys = session.keys(tokens_of(other))
        assert player._store(other, keys, BLOCK_TOKENS) == 0  # the second block as it must be
        assert session.publish(keys, {"kv": {0: np.zeros(4096, dtype=np.uint8)}}).ok
        spoilt = player.play(other)
        assert (spoilt.tokens, spoilt.wrong_reads) == (2 * BLOCK_TOKENS, 1)


def test_what_is_put_on_disk_between_requests_is_no_request(replayed: Fabric) -> None:
    asked = Asked(5, (910, 911), 2 * BLOCK_TOKENS + 5)
    replay = ClusterReplay(Trace("by hand", []), replayed, disk=True)
    with replay._players() as players:
        before = replay._total()
        ray.get([player.play.remote(asked) for player in players[:1]])
        spilled = ray.get(players[0].spill.remote(1))
        after = replay._total()
        again = ray.get(players[0].play.remote(asked))
    assert spilled == 1
    assert after.written_bytes > before.written_bytes
    assert after.requests - before.requests == 1, "the one that was played"
    assert (again.tokens, again.wrong_reads) == (2 * BLOCK_TOKENS, 0)
    assert replay._total().restores > before.restores


def test_prompts_are_their_blocks_and_differ_behind_them() -> None:
    one, two = tokens_of(Asked(3, (4, 5), 1030)), tokens_of(Asked(4, (4, 5), 1030))
    assert len(one) == len(two) == 1030
    assert np.array_equal(one[:1024], two[:1024])
    assert not np.any(one[1024:] == two[1024:])
    assert len(set(one.tolist())) == 1030


@pytest.mark.parametrize("name", ["full_attention", "deepseek_v4_flash"])
def test_blocks_are_scaled_down_and_nothing_else(name: str) -> None:
    model = replay_model(name)
    small, factor = scaled(model)
    assert BLOCK_BYTES <= max(group.block_bytes for group in small.groups) < 1.2 * BLOCK_BYTES  # whole alignments
    assert 0 < factor < 0.1
    assert [g.unit_tokens for g in small.groups] == [g.unit_tokens for g in model.groups]
    assert [g.kind for g in small.groups] == [g.kind for g in model.groups]
    layout = layout_of(model, 64 << 30, "branches", 8192, 100)
    spec, _ = fabric_spec(model, layout)
    assert spec["slots"] == {model.groups[pool.group].name: pool.slots for pool in layout.pools}


def test_a_plan_too_large_for_real_bytes_is_refused_with_the_remedy() -> None:
    model = replay_model("full_attention")
    with pytest.raises(SpecError, match="lower it, or play fewer --requests"):
        fabric_spec(model, layout_of(model, 1 << 60, "branches", 8192, 1 << 20))
