"""Each sick set-up is found by its own check, and by no other; a healthy one by none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from kvfabric.actors.health import health_of, process_facts
from kvfabric.fabric.invariants import check
from kvfabric.fabric.model import ModelSpec
from kvfabric.ops.doctor.checks import CHECKS, Level, diagnose

from ..fabric.one_holder import OneHolder

MODEL = ModelSpec.model_validate(
    {"groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 64}]}
)
HOLDER, SHARD = "holder:a:0", "directory:0"


def healthy() -> dict[str, Any]:
    """The facts of a fabric of one holder, taken from a real core and a real process, all well."""
    one = OneHolder(MODEL)
    one.store(range(70))
    one.granted(range(70))
    disk = {"state": "ok", "reason": None, "detail": "", "path": "/nvme"}
    health = health_of(one.core, check(one.core), {}, disk) | {"niceness": 0, "grants_left_s": 9.5, "staleness_s": 0.0}
    health["environment"] = {"UCX_MODULES": "^ib"}
    roomy = {"memory_available_bytes": 8 << 30, "shm_free_bytes": 1 << 30, "shm_bytes": 2 << 30}
    status = {
        "bypassed": False,
        "processes": {a: {"life": "up", "node": "a", "failure": ""} for a in (HOLDER, SHARD)},
        "holders": [{"address": HOLDER, "pools": [{}]}],
        "directory": [{"address": SHARD}],
    }
    here = process_facts()
    return {"status": status, "health": {HOLDER: health | roomy}, "here": here, "asked_s": health["wall_s"]}


def test_a_healthy_fabric_is_well() -> None:
    found = diagnose(healthy())
    assert [f for f in found if f.level is not Level.OK] == []
    assert {f.check for f in found} == set(CHECKS)


def broken_books() -> dict[str, Any]:
    """A core whose books really lie: a slot is in the free list and owned."""
    one = OneHolder(MODEL)
    one.store(range(70))
    pool = next(iter(one.core.ctx.books.pools.values()))
    pool.free.append(next(slot for slot, obj in enumerate(one.core.ctx.books.owner) if obj is not None))
    facts = healthy()
    told = health_of(one.core, check(one.core), {}, None)
    facts["health"][HOLDER] |= {k: told[k] for k in ("violations", "violations_count")}
    return facts


def changed(change: Callable[[dict[str, Any]], None]) -> Callable[[], dict[str, Any]]:
    def made() -> dict[str, Any]:
        facts = copy.deepcopy(healthy())
        change(facts)
        return facts

    return made


def of_holder(**facts: Any) -> Callable[[], dict[str, Any]]:
    return changed(lambda told: told["health"][HOLDER].update(facts))


def down(facts: dict[str, Any]) -> None:
    facts["status"]["processes"][HOLDER] = {"life": "starting", "node": "a", "failure": "no memory"}


SICK: list[tuple[str, Level, Callable[[], dict[str, Any]]]] = [
    ("processes", Level.FAIL, changed(down)),
    ("processes", Level.FAIL, changed(lambda facts: facts["status"].update(holders=[]))),
    ("invariants", Level.FAIL, broken_books),
    ("grants", Level.WARN, changed(lambda facts: facts["status"].update(bypassed=True))),
    ("grants", Level.WARN, of_holder(draining=True)),
    ("grants", Level.FAIL, of_holder(grants_left_s=-3.0)),
    ("clocks", Level.WARN, changed(lambda facts: facts.update(asked_s=facts["asked_s"] - 60))),
    ("links", Level.WARN, of_holder(link_problems={"nixl": "no such backend"})),
    ("shared_memory", Level.WARN, of_holder(shm_free_bytes=1 << 20)),
    ("shared_memory", Level.FAIL, of_holder(memory_available_bytes=1 << 20)),
    (
        "disk",
        Level.FAIL,
        of_holder(disk={"state": "failed", "reason": "disk_unavailable", "detail": "read-only", "path": "/nvme"}),
    ),
    ("directory", Level.WARN, of_holder(staleness_s=30.0)),
    ("ray_settings", Level.WARN, of_holder(niceness=15)),
    ("ray_settings", Level.WARN, of_holder(environment={}, infiniband=False)),
    ("versions", Level.FAIL, changed(lambda facts: facts["health"][HOLDER]["versions"].update(ray="1.0"))),
    ("versions", Level.WARN, changed(lambda facts: facts["health"][HOLDER]["versions"].update(numpy="1.0"))),
]


@pytest.mark.parametrize(("check", "level", "sick"), SICK, ids=[f"{c}-{n}" for n, (c, _, _) in enumerate(SICK)])
def test_each_sickness_is_found_by_its_check_alone_with_a_remedy(
    check: str, level: Level, sick: Callable[[], dict[str, Any]]
) -> None:
    found = [f for f in diagnose(sick()) if f.level is not Level.OK]
    assert [(f.check, f.level) for f in found] == [(check, level)]
    assert all(f.detail and f.remedy for f in found)
