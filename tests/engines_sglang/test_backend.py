"""SGLang's host pools and HiCache controller above a fabric: pages of one rank serve another, or nobody."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import kvfabric
from kvfabric.actors.fabric import attach
from kvfabric.engines.shared.named_blocks import blocks_model

from ..actors.stories import eventually
from ..engines_shared.processes import Running
from .conftest import Site
from .rank import PAGE, PAGE_BYTES

pytestmark = [pytest.mark.engines]

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def prompt(seed: int, pages: int = 6) -> list[int]:
    return [(seed * 7919 + 31 * i) % 1000 for i in range(pages * PAGE)]


def exists(rank: Running, keys: list[str], pages: int) -> None:
    """The directory tells other nodes within a moment."""
    assert eventually(lambda: rank.exists(keys), lambda found: found == pages) == pages


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_one_process_are_loaded_by_another_node(site: Site, layout: str) -> None:
    writer, reader = site.rank(0, layout=layout), site.rank(1, layout=layout)
    keys = writer.keys(prompt(LAYOUTS.index(layout)))
    assert reader.exists(keys) == 0
    assert writer.store(keys[:4]) == [True] * 4
    exists(reader, keys, 4)
    before = site.reused_tokens()
    assert reader.load(keys) == ([True] * 4 + [False] * 2, [True] * 4 + [False] * 2)
    eventually(site.reused_tokens, lambda now: now == before + 4 * PAGE)
    assert reader.exists(keys[1:4]) == 3, "a batch that begins inside the chain"
    assert reader.load(keys[1:4])[1] == [True] * 3


def test_another_layout_weights_revision_or_model_is_no_hit(site: Site) -> None:
    writer = site.rank(0)
    keys = writer.keys(prompt(20))
    assert all(writer.store(keys))
    others = {
        "layout": site.rank(1, layout="layer_first"),
        "weights": site.rank(1, weights="w2"),
        "model": site.rank(1, model_name="other"),
        "size": site.rank(1, parallel={"tp_size": 2}),
        "salt": site.rank(1, namespace="experiment"),
    }
    exists(site.rank(1), keys, 6)  # the control: the same in everything
    assert {name: other.exists(keys) for name, other in others.items()} == dict.fromkeys(others, 0)
    assert {name: sum(other.load(keys)[0]) for name, other in others.items()} == dict.fromkeys(others, 0)


def test_a_page_is_there_only_if_every_rank_has_its_part(site: Site) -> None:
    ranks = [site.rank(node, parallel={"tp_size": 2, "tp_rank": node}) for node in (0, 1)]
    keys = ranks[0].keys(prompt(30))
    assert all(ranks[0].store(keys, 1))
    assert all(ranks[1].store(keys[:3], 2))
    for rank, seed in zip(ranks, (1, 2), strict=True):
        exists(rank, keys, 3)
        assert rank.load(keys[:3], seed)[1] == [True] * 3, "each rank its own bytes"
    assert all(ranks[1].store(keys[3:], 2))
    for rank in ranks:
        exists(rank, keys, 6)


def test_the_controllers_own_threads_back_up_and_prefetch(site: Site) -> None:
    writer, reader = site.rank(0), site.rank(1)
    tokens = prompt(40)
    assert reader.prefetch(tokens) == (0, 0, [])
    assert writer.back_up(tokens) == 6 * PAGE
    longer = [*tokens, *prompt(41, 2)]
    exists(reader, reader.keys(longer), 6)
    assert reader.prefetch(longer) == (6 * PAGE, 6 * PAGE, [True] * 6)


def test_hybrid_pools_resume_only_where_all_of_them_can(site: Site) -> None:
    """Mamba states at pages 2 and 4, an index up to page 5, window pages 1 to 4: page 4, and nothing else."""
    writer, reader = site.rank(0, namespace="hybrid"), site.rank(1, namespace="hybrid")
    for rank in (writer, reader):
        for pool, kind in (("mamba", "mamba"), ("indexer", "mha"), ("swa", "mha")):
            rank.add_pool(pool, kind)
    keys = writer.keys(prompt(50))
    assert all(writer.store(keys))
    for pool, held in (("mamba", [keys[1], keys[3]]), ("indexer", keys[:5]), ("swa", keys[:4])):
        assert writer.store_v2(pool, held) == [True] * len(held)
    asked: list[tuple[str, str, list[str], dict[str, int]]] = [
        ("mamba", "trailing_pages", keys[-1:], {}),
        ("indexer", "all_pages", keys, {}),
        ("swa", "trailing_pages", keys[-2:], {}),
    ]
    found = eventually(lambda: reader.exists_v2(keys, asked), lambda found: found[0] == 4)
    assert found == (4, {"kv": 6, "mamba": 4, "indexer": 5, "swa": 4}, [2, 4])
    assert reader.exists_v2(keys, asked[1:]) == (4, {"kv": 6, "indexer": 5, "swa": 4}, [1, 2, 3, 4])
    assert reader.load_v2("mamba", [keys[3]], "trailing_pages") == ([True], [True])
    assert reader.load_v2("mamba", [keys[4]], "trailing_pages") == ([False], [False])
    assert reader.load_v2("indexer", keys[:5]) == ([True] * 5, [True] * 5)
    assert reader.load_v2("swa", keys[2:4], "trailing_pages") == ([True] * 2, [True] * 2)


def test_block_groups_have_a_verdict_of_their_own_and_gate_nothing(site: Site) -> None:
    writer = site.rank(0, namespace="hybrid")
    writer.add_pool("deepseek_v4_c4")
    keys = writer.keys(prompt(60))
    assert all(writer.store(keys))
    groups = [f"{key}-{half}" for key in keys[1::2] for half in "ab"]  # a block of two pages is two compressed ones
    assert writer.store_v2("deepseek_v4_c4", groups[:5]) == [True] * 5
    asked = [("deepseek_v4_c4", "block_groups", groups, {"block_pages": 2, "group_pages": 2})]
    assert writer.exists_v2(keys, asked) == (6, {"kv": 6, "deepseek_v4_c4": 4}, [1, 2, 3, 4, 5, 6])


def test_states_with_side_tables_travel_as_flat_copies(site: Site) -> None:
    writer, reader = site.rank(0, namespace="hybrid"), site.rank(1, namespace="hybrid")
    for rank in (writer, reader):
        rank.add_pool("mamba", "mamba_with_side_state")
    keys = writer.keys(prompt(70))
    assert writer.store_v2("mamba", keys[:1]) == [True]
    assert eventually(lambda: reader.load_v2("mamba", keys[:1]), lambda got: got == ([True], [True]))


def test_whole_page_calls_keep_pages_of_their_own(site: Site) -> None:
    """Their bytes lie in another order than those of the zero-copy calls."""
    rank = site.rank(0, layout="layer_first", interface_v1=0)
    zero_copy = site.rank(0, layout="layer_first")
    keys = rank.keys(prompt(80))
    assert rank.flat(keys) == (True, [True] * 6)
    assert (rank.exists(keys), zero_copy.exists(keys)) == (6, 0)
    assert zero_copy.store(keys) == [True] * 6
    assert zero_copy.load(keys)[1] == [True] * 6


def test_delays_and_failures_of_calls_lose_pages_and_never_change_one(site: Site) -> None:
    env = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3"}
    faulty, whole = site.rank(0, env=env), site.rank(1)
    backed_up = hit = arrived = 0
    for seed in range(100, 130):
        tokens = prompt(seed)
        backed_up += faulty.back_up(tokens)
        found, came, right = faulty.prefetch(tokens)
        hit, arrived = hit + found, arrived + came
        assert all(right), seed
        assert len(right) == came // PAGE
    assert 0 < arrived < hit < backed_up < 30 * 6 * PAGE, (arrived, hit, backed_up)
    for seed in range(100, 103):  # the control: what did get there is whole for everybody else
        keys = whole.keys(prompt(seed))
        done, right = whole.load(keys)
        assert done == right


def test_a_holder_killed_in_mid_run_costs_pages_and_no_bytes(site: Site) -> None:
    writer, reader = site.rank(0), site.rank(1)
    keys = writer.keys(prompt(90))
    assert all(writer.store(keys))
    exists(reader, keys, 6)
    holders = site.fabric.status()["holders"]
    for holder in holders:  # both: the reader's own node may hold copies
        os.kill(holder["pid"], signal.SIGKILL)
    done, right = reader.load(keys)
    assert done in ([False] * 6, right)
    assert reader.exists(keys) in range(7)
    # It goes on with the holders that take their place.
    again = eventually(lambda: writer.store(keys), all, 60.0)
    assert again == [True] * 6
    exists(reader, keys, 6)
    assert reader.load(keys) == ([True] * 6, [True] * 6)


def test_the_first_rank_launches_a_fabric_that_its_pages_fit(site: Site) -> None:
    options: dict[str, Any] = {"fabric": "started", "launch": {"memory_bytes": 8 << 20}}
    writer, reader = site.rank(0, layout="layer_first", **options), site.rank(1, layout="layer_first", **options)
    try:
        keys = writer.keys(prompt(97))
        assert all(writer.store(keys))
        exists(reader, keys, 6)
        assert reader.load(keys)[1] == [True] * 6
    finally:
        attach("started").shutdown()


@pytest.mark.parametrize(("seed", "outcome"), [(0, "equal"), (1, "mismatch")])
def test_audited_pages_are_withheld_computed_anew_and_judged(site: Site, seed: int, outcome: str) -> None:
    """Pages of another seed are what a wrong fabric would have given: the audit is what finds it."""
    options: dict[str, Any] = {"launch": {"memory_bytes": 8 << 20, "audit_fraction": 1.0}, "fabric": f"audited-{seed}"}
    writer, reader = site.rank(0, **options), site.rank(1, **options)
    try:
        keys = writer.keys(prompt(110 + seed))
        assert all(writer.store(keys))
        exists(reader, keys, 6)
        reader.note_audits()
        assert reader.load(keys)[0] == [False] * 6, "withheld: SGLang computes them"
        assert all(reader.store(keys, seed))
        assert reader.audits() == [outcome]
    finally:
        attach(options["fabric"]).shutdown()


def test_a_page_larger_than_a_block_is_several(site: Site) -> None:
    model = blocks_model(block_bytes=PAGE_BYTES // 5 + 1, block_tokens=PAGE)
    with kvfabric.launch({"model": model, "memory_bytes": 8 << 20}, name="small") as small:
        writer, reader = site.rank(0, fabric="small"), site.rank(1, fabric="small")
        keys = writer.keys(prompt(98))
        assert all(writer.store(keys))
        exists(reader, keys, 6)
        assert reader.load(keys) == ([True] * 6, [True] * 6)
        counters = eventually(
            lambda: [
                holder.get("counters", {}).get("reused_hit_tokens_total", 0) for holder in small.status()["holders"]
            ],
            lambda found: sum(found) == 6 * PAGE,
        )
        assert sum(counters) == 6 * PAGE, "a page counts once, however many blocks it has"


def test_clear_takes_out_what_is_this_models_and_nothing_else(site: Site) -> None:
    rank, other = site.rank(0), site.rank(0, weights="w9")
    keys = rank.keys(prompt(95))
    assert all(rank.store(keys))
    assert all(other.store(keys))
    assert rank.clear()
    assert (rank.exists(keys), other.exists(keys)) == (0, 6)
