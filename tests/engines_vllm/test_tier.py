"""The tier by itself, over rows of its own: nothing is lost, nothing is asked for ever, everything is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfabric
from kvfabric.engines.shared.description import digest
from kvfabric.engines.shared.named_blocks import NamedBlocks

from ..actors.stories import eventually
from .conftest import Site, prompt

# vLLM, imported in this process, warns of what it uses itself.
pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

ROW_BYTES = 8192
ROWS = 64


@pytest.fixture
def both(site: Site, tmp_path: Path) -> Iterator[Any]:
    """A fabric's tier over 64 rows of random bytes."""
    from kvfabric.engines.vllm_tier import bench

    site.fabric(f"bench-{ROW_BYTES}", ROW_BYTES)
    with bench.tiers(ROW_BYTES, ROWS, tmp_path) as tiers:
        yield tiers


def job(number: int, keys: list[bytes], rows: range, *, load: bool) -> Any:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    return TransferJob(number, [OffloadKey(key) for key in keys], np.array(rows), load, ReqContext(f"r{number}"))


def named(count: int) -> list[bytes]:
    from kvfabric.engines.vllm_tier.bench import _names

    return _names(count)


def looked_up(tier: Any, keys: list[bytes], name: str = "look") -> list[str]:
    """What the tier says once it no longer says RETRY."""
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext

    def look() -> list[str]:
        told = [tier.lookup(OffloadKey(key), ReqContext(name)).name for key in keys]
        tier.on_schedule_end(ScheduleEndContext((), ()))
        return told

    first = look()
    assert set(first) <= {"RETRY", "HIT", "MISS"}
    return eventually(look, lambda told: "RETRY" not in told)


def test_a_shutdown_lets_every_store_end(both: Any) -> None:
    keys = named(40 * 8)
    for number in range(40):
        both.fabric.submit_store(job(number, keys[number * 8 : number * 8 + 8], range(8), load=False))
    session = kvfabric.connect(f"bench-{ROW_BYTES}")
    told = both.fabric.blocks
    both.fabric.shutdown()
    with session:
        other = NamedBlocks(session, scheme=told._scheme, salt=told._key["salt"], block_bytes=ROW_BYTES)
        assert all(other.present(keys))


def test_a_drain_leaves_no_job_under_way_and_every_result_to_be_told(both: Any) -> None:
    keys = named(20 * 4)
    for number in range(20):
        both.fabric.submit_store(job(number, keys[number * 4 : number * 4 + 4], range(4), load=False))
    both.fabric.drain_jobs()
    assert both.fabric.has_pending_work()
    results = {result.job_id: result.success for result in both.fabric.get_finished_jobs()}
    assert results == dict.fromkeys(range(20), True)
    assert not both.fabric.has_pending_work()


def test_what_failed_is_absent_for_who_asked_and_what_came_is_kept(both: Any) -> None:
    keys = named(6)
    both.move(both.fabric, keys, load=False)
    assert looked_up(both.fabric, keys) == ["HIT"] * 6
    rows, before = both.rows, both.rows[:6].copy()
    both.fabric.submit_load(job(99, [*keys[:3], *named(1), *keys[3:]], range(10, 17), load=True))
    both.fabric.drain_jobs()
    (result,) = both.fabric.get_finished_jobs()
    assert not result.success
    assert list(result.successful_keys) == keys
    assert np.array_equal(rows[[10, 11, 12, 14, 15, 16]], before)
    lost = named(2)
    assert looked_up(both.fabric, [lost[0], keys[0]]) == ["MISS", "HIT"]


def test_stores_and_loads_are_told_to_vllms_metrics(both: Any) -> None:
    keys = named(5)
    both.move(both.fabric, keys, load=False)
    both.move(both.fabric, keys, load=True)
    told = both.fabric.get_stats().reduce()
    by_name = {name.partition(":(")[0].rpartition("kvfabric_")[2]: value for name, value in told.items()}
    assert by_name == {"stored_blocks": 5, "loaded_blocks": 5, "reused_tokens": 5 * 32}
    assert both.fabric.get_stats() is None


def test_blocks_that_are_stored_are_told_as_kv_events_once_and_no_others(both: Any) -> None:
    from dataclasses import replace

    from kvfabric.engines.vllm_tier.host import HostTieringSpec
    from kvfabric.engines.vllm_tier.tier import KvFabricTier

    spec = HostTieringSpec(replace(both.fabric._offloading_spec.config, enable_kv_cache_events=True))
    tier = KvFabricTier(
        spec,
        memoryview(both.rows),
        "kvfabric",
        fabric=f"bench-{ROW_BYTES}",
        weights="bench",
        enable_kv_events=True,
        locality="LOCAL",
    )
    try:
        keys = named(5)
        tier.submit_store(job(1, keys, range(5), load=False))
        tier.drain_jobs()
        tier.submit_load(job(2, keys, range(5), load=True))
        tier.submit_store(job(3, named(2), range(1000, 1002), load=False))  # rows there are none of
        tier.drain_jobs()
        assert {result.job_id: result.success for result in tier.get_finished_jobs()}[3] is False
        (event,) = tier.take_events()
        assert (event.keys, event.removed, event.medium) == (keys, False, tier.medium)
        assert event.locality.name == "LOCAL"
        assert list(tier.take_events()) == []
        both.move(both.fabric, named(3), load=False)
        assert list(both.fabric.take_events()) == [], "vLLM's own events are off there"
    finally:
        tier.shutdown()


def test_every_part_of_what_vllm_leaves_out_is_another_namespace(both: Any) -> None:
    from dataclasses import replace

    from kvfabric.engines.vllm_tier.described import described

    config = both.fabric._offloading_spec.config

    def salt(weights: str = "w", namespace: str = "", **changed: Any) -> bytes:
        return digest(described(replace(config, **changed), ROW_BYTES, weights=weights, namespace=namespace))

    group = config.groups[0]
    changes: list[dict[str, Any]] = [
        {"weights": "other"},
        {"namespace": "rope scaled"},
        {"model": replace(config.model, dtype="float16")},
        {"kv_cache_layout": "HND"},
        {"canonical_layout": True},
        {"groups": (replace(group, tokens_per_block=64),)},
        {"groups": (replace(group, layer_names=("layer", "another")),)},
        {"groups": (group, replace(group, group_id=1))},
        {"cache": replace(config.cache, blocks_per_chunk=2)},
        {"worker_kv_bytes_per_block": 1},
        {"parallel": replace(config.parallel, tp_size=2, world_size=2)},
        {"parallel": replace(config.parallel, pp_size=2, world_size=2)},
        {"parallel": replace(config.parallel, rank=1)},
    ]
    salts = {salt(), *(salt(**change) for change in changes)}
    assert len(salts) == 1 + len(changes)
    assert salt() == salt(engine_id="another engine"), "who asks is no part of it"


@pytest.mark.long
def test_audited_blocks_are_computed_anew_found_right_and_not_counted_as_reused(site: Site) -> None:
    site.fabric("audited", audit_fraction=1.0)
    prompts = [prompt(f"audited {i}") for i in range(2)]
    expected = site.alone("llama", prompts)
    first = site.engine("llama", 0, "audited")
    assert first.generate(prompts) == expected
    first.settle()
    second = site.engine("llama", 1, "audited")
    second.note_audits()
    assert second.generate(prompts) == expected
    assert site.reused_tokens("audited") == 0
    told = eventually(second.audits, lambda found: len(found) == 2)
    assert set(told) <= {"equal", "close"}
    site.end(first)
    site.end(second)
