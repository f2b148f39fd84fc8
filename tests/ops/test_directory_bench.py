"""The directory's figures measure what they say; their targets are for a machine at rest, so not judged here."""

from __future__ import annotations

from kvfabric.fabric.index import ChainIndex
from kvfabric.fabric.kinds import INDEX_DIGEST_BYTES as KEY
from kvfabric.fabric.messages import Strip
from kvfabric.ops.bench import directory, directory_core, directory_rebuild
from kvfabric.ops.bench.directory_load import UNIT_TOKENS, Load


def test_the_load_is_found_in_the_index_it_fills():
    load = Load(1)
    index = ChainIndex()
    lives = [index.begin_life() for _ in range(load.holders)]
    for number, life in enumerate(lives):
        index.show(life, f"h{number}", 1)
    for holder, events in load:
        index.apply(lives[holder], events)
        if load.positions > 60_000:
            break
    assert len(load.chains) > 5
    for chain in load.chains[:-1]:
        stripes, _ = index.lookup((Strip(UNIT_TOKENS, 0, chain),))
        union = 0
        for stripe in stripes:
            union |= stripe.bits
            assert {lane.group for lane in stripe.lanes} <= set(range(5))
        assert union == (1 << len(chain) // KEY) - 1


def test_memory_at_a_small_size_is_of_the_order_of_what_is_accounted():
    (point,) = directory.grown_apart((0.2,), 200)
    assert 0.5 < point["bytes_a_position"] / point["accounted_a_position"] < 3.0


def test_a_killed_shard_is_whole_again_and_never_lied():
    seen = directory_rebuild.rebuild(65_536)
    assert seen["positions"] == 65_536
    assert seen["wrong"] == 0
    assert seen["answers"] > 40
    assert 0 < seen["whole_s"] < 60


def test_figures_have_names_units_and_verdicts():
    for found in directory_core.lookups(20_000):
        assert {"name", "value", "unit", "target", "holds"} == set(found)
        assert found["value"] > 0
    assert all(name.startswith("directory_") for name in directory.EXPECTED)
