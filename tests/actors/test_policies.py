"""Plans, replay, quotas and placement on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvfabric
from kvfabric import Fabric, FabricError, Reason, Session, Status
from kvfabric.fabric.kinds import Layer

from .conftest import Away, holders
from .stories import content, eventually, objects, prompt

GROUPS: list[dict[str, Any]] = [
    {"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 8192, "layers": [0, 1, 2]},
    {
        "name": "swa",
        "kind": "sliding_window",
        "block_tokens": 16,
        "window_tokens": 20,
        "block_bytes": 2048,
        "layers": [1, 2],
    },
]


@pytest.fixture(scope="module")
def planned(fabric: Fabric) -> Iterator[Fabric]:
    """A fabric that plans by cost, replays, limits tenants and places copies."""
    spec = {
        "model": {"name": "planned", "groups": GROUPS, "plan": "cost", "replay": True},
        "memory_bytes": 32 << 20,
        "transport": {"links": ["tcp"]},
        "node_resource": ["kvfabric_node_0", "kvfabric_node_1"],
        "limits": {"tenants": {"small": {"leases_max": 1, "bytes_max": 200_000}}},
        "placement": {"hot_per_s": 0.5, "half_life_s": 4.0, "keep_s": 2.0},
    }
    with kvfabric.launch(spec, name="planned") as running:
        yield running


@pytest.fixture(scope="module")
def here(planned: Fabric) -> Iterator[Session]:
    with kvfabric.connect("planned") as session:
        yield session


def store(session: Session, tokens: list[int], *groups: str, **key: Any) -> None:
    everything = objects(session.model, tokens)
    assert session.publish(tokens, {g: everything[g] for g in groups or everything}, **key).ok


def test_a_replay_is_granted_with_the_history_alone_and_says_where_to_begin(here: Session) -> None:
    tokens = prompt("replayed", 130)
    store(here, tokens, "kv")
    answer = here.acquire(tokens)
    assert (answer.status, answer.tokens, answer.replay_from) == (Status.FULL_HIT, 128, 128 - 2 * 20)
    assert answer.lease is not None
    with answer.lease as lease:
        assert lease.replay_from == 88
        assert set(lease.views) == {"kv"}
        with lease.read("kv") as views:
            assert all(np.array_equal(view, content(tokens, "kv", i, 8192)) for i, view in views.items())
        opened = kvfabric.Lease.open(lease.token())
        assert opened.replay_from == 88
        opened.close()
    store(here, tokens, "swa")
    answer = here.acquire(tokens)
    assert (answer.tokens, answer.replay_from) == (128, None)
    answer.cancel()


def test_an_approximate_replay_is_labelled_and_stays_out_of_the_exact_namespace(here: Session) -> None:
    tokens = prompt("approximate", 130)
    store(here, tokens, "kv")
    near = here.acquire(tokens, approximate=True)
    assert (near.tokens, near.replay_from, near.approximate) == (128, 108, True)
    near.cancel()
    everything = objects(here.model, tokens)
    with pytest.raises(FabricError, match=r"^tokens: this prompt was resumed at 128 from an approximate replay"):
        here.publish(tokens, {"swa": everything["swa"]})
    assert here.publish(tokens, everything, approximate=True).ok
    again = here.acquire(tokens, approximate=True)
    assert (again.tokens, again.replay_from, again.approximate) == (128, None, True)
    again.cancel()
    exact = here.acquire(tokens)
    assert (exact.tokens, exact.replay_from, exact.approximate) == (128, 88, False)
    exact.cancel()
    assert here.publish(tokens, {"swa": everything["swa"]}).ok, "what follows an exact answer is exact"
    both = here.acquire(tokens, approximate=True)
    assert (both.tokens, both.approximate) == (128, False), "exact state is preferred where it serves as far"
    both.cancel()


def test_a_tenant_at_its_quota_is_told_so_and_others_are_not(here: Session) -> None:
    tokens = prompt("quota", 66)
    for tenant in ("small", "large"):
        store(here, tokens, tenant=tenant)
    first = here.acquire(tokens, tenant="small")
    assert first.lease is not None
    second = here.acquire(tokens, tenant="small")
    assert (second.tokens, second.lease) == (0, None)
    assert second.cause is not None
    assert (second.cause.reason, second.cause.layer) == (Reason.QUOTA, Layer.ADMISSION)
    other = here.acquire(tokens, tenant="large")
    assert other.tokens == 64
    first.cancel()
    other.cancel()
    third = here.acquire(tokens, tenant="small")
    assert third.tokens == 64
    third.cancel()
    long = prompt("quota of bytes", 600)
    everything = objects(here.model, long)
    stored = here.publish(long, everything, tenant="small")
    assert (stored.refused, stored.ok) == (Reason.QUOTA, False)
    assert here.publish(long, everything, tenant="large").ok


def test_a_plan_weighs_a_transfer_against_what_engines_report(here: Session, away: Away) -> None:
    tokens = prompt("weighed", 130)
    assert away.do(published, tokens, objects(here.model, tokens))
    # Engines that compute a thousand tokens in a millisecond need no transfer.
    for _ in range(40):
        here.computed(1000, 0.001)
    found = eventually(lambda: here.explain(tokens), lambda e: e.hash_tokens == 128)
    assert (found.tokens, found.usable_tokens) == (0, 128)
    assert found.plan[0].tokens == 0
    assert found.plan[1].tokens == 128
    assert found.plan[1].transfer_s > found.plan[0].prefill_s
    answer = here.acquire(tokens)
    assert answer.tokens == 0
    assert answer.cause is not None
    assert answer.cause.reason is Reason.DEADLINE_EXCEEDED
    for _ in range(60):
        here.computed(1000, 2.0)
    answer = here.acquire(tokens)
    assert (answer.status, answer.tokens) == (Status.FULL_HIT, 128)
    assert answer.moved_bytes
    answer.cancel()
    after = here.explain(prompt("nothing", 130))
    assert after.plan[0].prefill_s > 0.2


def published(kept: dict[str, Any], tokens: list[int], everything: Any) -> bool:
    session = kept.setdefault("planned", None) or kvfabric.connect("planned")
    kept["planned"] = session
    return bool(session.publish(tokens, everything).ok)


def resumed_from(kept: dict[str, Any], tokens: list[int]) -> tuple[int, dict[str, int]]:
    session = kept.setdefault("planned", None) or kvfabric.connect("planned")
    kept["planned"] = session
    answer = session.acquire(tokens)
    answer.cancel()
    return answer.tokens, dict(answer.moved_bytes or {})


def copies(planned: Fabric, name: str) -> int:
    return sum(h["counters"].get(name, 0) for h in holders(planned))


def test_a_hot_prefix_is_on_the_other_node_before_it_is_asked_for_and_leaves_when_cold(
    planned: Fabric, here: Session, away: Away
) -> None:
    tokens = prompt("hot", 130)
    store(here, tokens)
    for _ in range(6):
        here.acquire(tokens).cancel()
    eventually(lambda: copies(planned, "copies_placed"), lambda n: n == 1)
    assert away.do(resumed_from, tokens) == (128, {}), "nothing had to be moved for it"
    cold = prompt("hot for a while", 130)
    store(here, cold)
    for _ in range(6):
        here.acquire(cold).cancel()
    eventually(lambda: copies(planned, "copies_placed"), lambda n: n == 2)
    eventually(lambda: copies(planned, "copies_dropped"), lambda n: n >= 1, within_s=40.0)
