"""A purge takes state out of every tier and says what is left; a quarantine bars it; an audit may bring one about."""

from __future__ import annotations

import pytest

from kvfabric.fabric.invariants import check
from kvfabric.fabric.kinds import Reason, Status
from kvfabric.fabric.leases import read_refusal
from kvfabric.fabric.messages import Audited, Purge, Purged, SwapOut
from kvfabric.fabric.metrics import collect
from kvfabric.fabric.model import ModelSpec

from .many_holders import Holders
from .one_holder import OneHolder

MODEL = ModelSpec.model_validate(
    {
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 64},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 16, "window_tokens": 16, "block_bytes": 64},
        ]
    }
)
PROMPT, OTHER = list(range(70)), list(range(1000, 1070))


def holders() -> Holders:
    return Holders(MODEL, {"n0": (0,), "n1": (0,)})


def purge(cluster: Holders, name: str, **what: object) -> Purged:
    fields: dict[str, object] = {"tenant": None, "namespace": b"", "keys": (), "quarantine": False, **what}
    work, purged = cluster.cores[name].purges.purge(Purge("p", **fields)), None  # type: ignore[arg-type]
    while purged is None:
        purged, effects = cluster.cores[name].go_on_purging(work, cluster.now)
        cluster._carry_out(name, effects)
    cluster.run()
    return purged


def chain(cluster: Holders, tokens: list[int], tenant: str = "") -> dict[str, object]:
    keys = cluster.keys(tokens, tenant)
    return {"namespace": keys.namespace.digest(), "keys": tuple((u, keys.keys(u)) for u in MODEL.units_tokens)}


def test_a_purged_chain_is_gone_from_memory_of_every_holder_and_its_bytes_are_overwritten() -> None:
    cluster = holders()
    cluster.store("n0", range(70))
    cluster.store("n0", range(1000, 1070))
    grant = cluster.granted("n1", PROMPT)  # a copy at n1
    assert grant.tokens == 64
    cluster.granted("n0", OTHER)
    went = [purge(cluster, name, **chain(cluster, PROMPT)) for name in ("n0", "n1")]
    assert [(p.left, p.leases) for p in went] == [(0, 0), (0, 1)]
    assert sum(p.objects for p in went) > 8
    assert read_refusal(grant, grant.deadline_s, cluster.parts(grant), cluster.now) is Reason.VERSION_CHANGED
    for name in ("n0", "n1"):
        assert check(cluster.cores[name]) == []
        books, arena = cluster.cores[name].ctx.books, cluster.arenas[name]
        for pool in books.pools.values():
            assert not any(arena.payload(slot).any() for slot in pool.free)
    answer = cluster.acquire("n1", PROMPT)
    assert answer is not None
    assert answer.tokens == 0
    assert cluster.granted("n0", OTHER).tokens == 64  # nothing else was touched


def test_requests_are_served_between_the_slices_of_a_purge_and_nothing_granted_then_outlasts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvfabric.fabric.purge.SLICE_OBJECTS", 1)
    one = OneHolder(MODEL)
    one.store(range(70))
    one.store(range(1000, 1064), seed=1)
    keys = one.keys(range(70))
    chains = tuple((unit, keys.keys(unit)) for unit in MODEL.units_tokens)
    work = one.core.purges.purge(Purge("p", None, keys.namespace.digest(), chains, False))
    purged, slices, granted = None, 0, []
    while purged is None:
        answer = one.acquire(range(70))
        granted += [answer.grant] if answer.grant is not None else []
        assert one.acquire(range(1000, 1065)).grant is not None
        purged, effects = one.core.go_on_purging(work, one.now)
        one._carry_out(effects)
        slices += 1
    assert slices > 8
    assert granted, "before the first slice it was all there"
    assert (purged.left, purged.leases) == (0, len(granted))
    assert one.core.ctx.leases.live.keys().isdisjoint({grant.lease for grant in granted})
    assert check(one.core) == []


def test_a_purge_by_tenant_leaves_other_tenants_alone_and_deletes_every_extent_that_bore_its_bytes() -> None:
    cluster = holders()
    cluster.store("n0", range(70), tenant="a")
    cluster.store("n0", range(70), tenant="b")
    for tenant in ("a", "b"):
        cluster.ask("n0", SwapOut(cluster.name(), cluster.everything(cluster.keys(PROMPT, tenant), "n0")))
    assert len(cluster.disks["n0"]) == 2
    cluster.store("n0", range(70), tenant="a", replace=True)  # on disk its bytes are served no more
    purged = purge(cluster, "n0", tenant="a")
    assert (purged.left, purged.objects > 0) == (0, True)
    tenants = {entry.tenant for extent in cluster.disks["n0"].values() for entry, _ in extent}
    assert tenants == {"b"}
    assert purge(cluster, "n0", tenant="a").objects == 0
    assert purge(cluster, "n0", tenant="b").objects > 0
    assert cluster.disks["n0"] == {}


def test_what_an_open_attempt_writes_is_left_until_it_ends_and_never_becomes_visible() -> None:
    cluster = holders()
    keys = cluster.keys(PROMPT)
    begun = cluster.begin("n0", keys)
    assert purge(cluster, "n0", **chain(cluster, PROMPT)).left > 0
    done = cluster.commit("n0", begun)
    assert done.refused is Reason.ATTEMPT_SUPERSEDED
    assert purge(cluster, "n0", **chain(cluster, PROMPT)).left == 0


def test_what_a_graph_froze_is_left_until_it_lets_go() -> None:
    cluster = holders()
    cluster.store("n0", range(70))
    cluster.granted("n0", PROMPT, graph=True)
    assert purge(cluster, "n0", **chain(cluster, PROMPT)).left > 0
    assert check(cluster.cores["n0"]) == []


def test_a_quarantined_chain_is_refused_by_name_until_it_is_stored_anew() -> None:
    cluster = holders()
    cluster.store("n0", range(70))
    grant = cluster.granted("n0", PROMPT)
    purged = purge(cluster, "n0", quarantine=True, **chain(cluster, PROMPT))
    assert (purged.objects > 0, purged.leases) == (True, 1)
    assert read_refusal(grant, grant.deadline_s, cluster.parts(grant), cluster.now) is Reason.VERSION_CHANGED
    answer = cluster.acquire("n1", PROMPT)
    assert answer is not None
    assert answer.cause is not None
    assert (answer.tokens, answer.cause.reason) == (0, Reason.QUARANTINED)
    counted = {p.labels: p.value for p in collect(cluster.cores["n1"]) if p.name == "kvfabric_cut_requests_total"}
    assert ("admission", str(answer.cause.kind), "quarantined") in counted
    assert check(cluster.cores["n0"]) == []
    cluster.store("n0", range(70))
    assert cluster.granted("n0", PROMPT).tokens == 64


@pytest.mark.parametrize("outcome", ["equal", "close", "mismatch"])
def test_an_audit_is_counted_and_only_a_mismatch_bars_what_was_leased(outcome: str) -> None:
    one = OneHolder(MODEL)
    one.store(range(70))
    grant = one.granted(range(70))
    assert one.ask(Audited(one.name(), grant.lease, outcome)).refused is None
    counted = {p.labels: p.value for p in collect(one.core) if p.name == "kvfabric_audits_total"}
    assert counted == {(outcome,): 1}
    again = one.acquire(range(70))
    assert (again.status is Status.FULL_HIT) == (outcome != "mismatch")
    assert one.ask(Audited(one.name(), 12345, outcome)).refused is Reason.LEASE_EXPIRED


@pytest.mark.parametrize(("told", "counted"), [("equal", "late"), ("late", "late"), ("mismatch", "mismatch")])
def test_an_audit_that_outlasts_its_lease_counts_as_late_unless_it_found_a_mismatch(told: str, counted: str) -> None:
    one = OneHolder(MODEL)
    one.store(range(70))
    grant = one.granted(range(70), lease_s=1.0)
    one.pass_time(5.0)
    assert not one.core.ctx.leases.live
    assert one.ask(Audited(one.name(), grant.lease, told)).refused is None
    assert {p.labels: p.value for p in collect(one.core) if p.name == "kvfabric_audits_total"} == {(counted,): 1}
    assert one.acquire(range(70)).status is Status.FULL_HIT, "what its slots hold by then is the supervisor's to bar"
