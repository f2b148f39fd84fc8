"""Blocks that an engine names one by one: each is found wherever a prompt lists it, and by its own name only."""

from __future__ import annotations

import random

import pytest

from kvfabric.fabric.identity import NamedKeys, Namespace, as_tokens, weights_digest16
from kvfabric.fabric.kinds import SpecError
from kvfabric.fabric.messages import Lookup, Prompt, ShardMap
from kvfabric.fabric.model import ModelSpec

from .directory_bed import BLOCK, Bed

GROUP = {"name": "kv", "kind": "compressed_history", "block_tokens": BLOCK, "block_bytes": 16}
SINGLY = ModelSpec.load({"groups": [GROUP], "chained": False})
SHARDS = tuple(f"directory:{i}" for i in range(4))


def listed(*names: int, salt: bytes = b"") -> Prompt:
    """A prompt that lists these blocks."""
    named = tuple(b"block %d" % name for name in names)
    keys = NamedKeys(SINGLY, Namespace("m", "v1", salt=salt), as_tokens(()), names=named)
    return Prompt(keys.namespace_digest, weights_digest16("v1"), "", len(keys), ((BLOCK, keys.keys(BLOCK)),))


def bed_of(shards: int = 1) -> Bed:
    bed = Bed(model=SINGLY, shard_map=ShardMap(1, SHARDS[:shards]))
    for name in SHARDS[:shards]:
        bed.directory(name, ShardMap(1, SHARDS[:shards]))
    for name in ("a", "b"):
        bed.holder(name)
    bed.pass_s(1.0)
    return bed


@pytest.mark.parametrize("shards", [1, 4])
def test_a_block_is_found_wherever_a_prompt_lists_it(shards):
    bed = bed_of(shards)
    bed.store("a", listed(*range(600)))
    for prompt, blocks in ((listed(*range(300, 320)), 20), (listed(7, 500, 3), 3), (listed(599), 1)):
        assert bed.probe("b", prompt).tokens == blocks * BLOCK
        assert bed.probe("a", prompt).tokens == blocks * BLOCK
        assert bed.right(prompt)


def test_what_is_absent_cuts_where_it_is_listed():
    bed = bed_of()
    bed.store("a", listed(1, 2, 3))
    prompt = listed(2, 9, 1)
    assert bed.probe("b", prompt).tokens == BLOCK
    assert bed.found(prompt) == {"a": {0, 2}}, "what follows is known all the same"


def test_a_name_under_another_salt_is_another_block():
    bed = bed_of()
    bed.store("a", listed(1, 2))
    assert bed.probe("b", listed(1, 2, salt=b"other weights")).tokens == 0
    assert bed.probe("b", listed(1, 2)).tokens == 2 * BLOCK


def test_each_shard_is_asked_once_for_many_blocks():
    bed = bed_of(4)
    bed.store("a", listed(*range(200)))
    bed.seen.clear()
    bed.probe("b", listed(*range(200)))
    asked = [to for _, to, message in bed.seen if isinstance(message, Lookup)]
    assert sorted(asked) == sorted(SHARDS)


def test_blocks_stored_and_dropped_in_any_order_are_told_as_they_are():
    rng = random.Random(1)
    bed = bed_of(2)
    there: set[int] = set()
    for _ in range(60):
        some = rng.sample(range(40), rng.randrange(1, 12))
        if rng.random() < 0.6:
            bed.store("a", listed(*(fresh := [s for s in some if s not in there] or some[:1])))
            there |= set(fresh)
        elif gone := [s for s in some if s in there]:
            bed.drop("a", listed(*gone), 0, len(gone))
            there -= set(gone)
        assert bed.right(listed(*rng.sample(range(40), 40)))
    assert there


def test_a_directory_that_lost_all_is_filled_anew():
    bed = bed_of()
    bed.store("a", listed(*range(50)))
    del bed.directories["directory:0"]
    bed.directory("directory:0", ShardMap(1, SHARDS[:1]))
    bed.pass_s(3.0)
    assert bed.right(listed(*reversed(range(50))))


def test_who_asks_by_an_old_map_is_told_where_blocks_moved():
    bed = bed_of(2)
    bed.store("a", listed(*range(100)))
    told = ShardMap(2, SHARDS)
    for name in SHARDS[2:]:
        bed.directory(name, told)
    for name in ("a", *bed.directories):
        bed.post("supervisor", name, told)
    bed.run()
    bed.pass_s(1.0)
    assert bed.holders["b"].ctx.router.map.epoch == 1
    assert bed.probe("b", listed(*range(100))).tokens == 100 * BLOCK
    assert bed.holders["b"].ctx.router.map == told


def test_only_one_plain_history_can_be_named_singly():
    window = {"name": "w", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 8}
    for groups in ([GROUP, window], [window], [{**GROUP, "ratio": 2}], [{**GROUP, "endpoint_tokens": 2}]):
        with pytest.raises(SpecError, match="chained"):
            ModelSpec.load({"groups": groups, "chained": False})
