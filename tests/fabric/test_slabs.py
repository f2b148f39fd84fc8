"""Slabs change hands only empty, whole and re-headered, and only where somebody gains by it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kvfabric.fabric.arena import ArenaLayout, PoolLayout, SlotState
from kvfabric.fabric.budget import in_slabs, slots_for
from kvfabric.fabric.holdings import Holdings
from kvfabric.fabric.invariants import check
from kvfabric.fabric.kinds import ProtocolError, SpecError, Tier, WireError
from kvfabric.fabric.leases import slots_stand
from kvfabric.fabric.losses import Losses
from kvfabric.fabric.messages import GraphRegister, Release
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.presets import preset
from kvfabric.fabric.slab_balance import REST_S, Stake, choose
from kvfabric.policies.eviction import eviction_policy

from .one_holder import OneHolder

KV, SWA = (0, 0), (1, 0)
MODEL = ModelSpec.load(
    {
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 4096},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 6, "block_bytes": 8192},
        ]
    }
)
P, Q = range(17), range(100, 117)


def holder(slots: int = 16, slabs: int = 8) -> OneHolder:
    return OneHolder(MODEL, slots, slabs=slabs)


def books(one: OneHolder) -> Holdings:
    return one.core.ctx.books


def lose(one: OneHolder, group: int, tokens: int = 1000) -> None:
    """Let a group have lost that much, and the desk look."""
    books(one).losses.short(group, tokens)
    one.pass_time(20.0)


def test_what_leaves_in_company_is_no_loss_of_its_own_pool() -> None:
    pair = [
        {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 8192},
        {"name": "idx", "kind": "indexer", "of": "kv", "block_tokens": 8, "block_bytes": 4096},
    ]
    one = OneHolder(ModelSpec.load({"groups": pair}), 16, slabs=8, eviction=eviction_policy("default"))
    for first in (0, 100, 200, 300, 400):
        one.store(range(first, first + 17))
    one.store(range(17))  # comes again: it made room too early
    lost = books(one).losses.taken()
    assert lost[0] > 0
    assert lost[1] == 0


def test_what_made_room_before_a_slab_came_is_no_loss_after_it() -> None:
    losses = Losses(MODEL, (True, False))
    losses.follow(16)
    for digest in (b"a", b"b"):
        losses.left(0, digest)
    losses.came(0, [b"a"])
    assert losses.taken() == {0: 4}
    losses.relieved(0)
    losses.came(0, [b"b"])
    assert not losses.taken()


# --- where slots lie -----------------------------------------------------------------------------------


def test_slots_of_one_slab_lie_within_it_and_no_two_of_a_pool_overlap() -> None:
    pools = [PoolLayout(0, 0, 60, 4096), PoolLayout(1, 0, 20, 10_000), PoolLayout(0, 0, 4, 4096, Tier.G3)]
    layout, shares = in_slabs(ArenaLayout(pools), 7)
    assert layout.slabs == sum(shares) >= 7
    for index, pool in enumerate(layout.pools[:2]):
        starts = [layout.offset_of(layout.first_slot[index] + i) - layout.headers_bytes for i in range(pool.slots)]
        assert all(a + pool.stride_bytes <= b for a, b in pairwise(starts))
        size = layout.slots_a_slab(pool)
        for i, start in enumerate(starts):
            slab = i // size
            assert slab * layout.slab_bytes <= start <= start + pool.stride_bytes <= (slab + 1) * layout.slab_bytes
    assert layout.offset_of(layout.first_slot[2]) == layout.headers_bytes + layout.slabs * layout.slab_bytes
    assert layout.size_bytes <= layout.headers_bytes + sum(p.slots * p.stride_bytes for p in pools)


def test_a_layout_in_slabs_comes_back_from_the_wire() -> None:
    layout, _ = in_slabs(ArenaLayout([PoolLayout(0, 0, 64, 4096), PoolLayout(1, 0, 64, 8192)]), 8)
    again = ArenaLayout.from_plain(layout.to_plain())
    assert (again.pools, again.slab_bytes, again.slabs) == (layout.pools, layout.slab_bytes, layout.slabs)
    of_plain = ArenaLayout.of_plain(layout.pools_plain(), layout.places_plain(), layout.slab_bytes)
    assert [of_plain.offset_of(s) for s in range(layout.slots)] == [layout.offset_of(s) for s in range(layout.slots)]
    with pytest.raises(WireError, match="slab_bytes"):
        ArenaLayout.of_plain(layout.pools_plain(), (), 100)


@pytest.mark.parametrize("name", ["deepseek_v4_flash", "gpt_oss_120b", "qwen3_next_80b"])
def test_whole_slabs_leave_every_pool_nearly_what_it_had(name: str) -> None:
    model = preset(name)
    slots = slots_for(model, 40 << 30, 1, checkpoint="ends", prompt_tokens=12_000)
    pools = [PoolLayout(g, 0, n, spec.block_bytes) for (g, spec), n in zip(enumerate(model.groups), slots, strict=True)]
    layout, shares = in_slabs(ArenaLayout(pools))
    kept = [n * layout.slots_a_slab(pool) for n, pool in zip(shares, layout.pools, strict=True)]
    assert min(now / before for now, before in zip(kept, slots, strict=True)) > 0.95
    assert 64 <= layout.slabs <= 512


def test_memory_for_less_than_a_slab_a_pool_and_one_to_move_is_refused() -> None:
    with pytest.raises(SpecError, match="too few"):
        in_slabs(ArenaLayout([PoolLayout(0, 0, 1, 4096), PoolLayout(1, 0, 1, 4096)]))


# --- changing hands --------------------------------------------------------------------------------------


def test_a_slab_goes_to_who_loses_and_every_header_of_it_is_new() -> None:
    one = holder()
    slabs, arena = books(one).slabs, one.arena
    before, versions = len(slabs.of(SWA)), arena.versions.copy()
    lose(one, 1)
    assert len(slabs.of(SWA)) == before + 1
    assert one.core.ctx.counters["slabs_moved"] == 1
    (moved,) = [
        s for s in range(len(slabs)) if slabs.owner[s] == SWA and (arena.versions[slabs.slots(SWA, s)] > 0).all()
    ]
    for key, state in ((KV, SlotState.ELSEWHERE), (SWA, SlotState.FREE)):
        slots = np.array(slabs.slots(key, moved))
        assert (arena.states[slots] == state).all()
        assert (arena.versions[slots] > versions[slots]).all()
    assert books(one).pools[SWA].room == books(one).pools[SWA].capacity
    assert check(one.core) == []


def test_nothing_moves_where_nothing_was_lost() -> None:
    one = holder()
    assert one.store(P).refused is None
    one.pass_time(300.0)
    assert one.core.ctx.counters["slabs_moved"] == 0


def test_what_lies_in_the_slab_moves_within_its_pool_and_serves_on() -> None:
    one = holder()
    for start in (0, 100, 200):
        assert one.store(range(start, start + 17), seed=start).refused is None
    victims = books(one).victims
    lose(one, 1)
    assert one.core.ctx.counters["slabs_moved"] == 1
    assert books(one).victims == victims
    for start in (0, 100, 200):
        tokens = range(start, start + 17)
        grant = one.acquire(tokens).grant
        assert grant is not None
        for part in grant.parts:
            for run in part.slots:
                for index, slot in zip(run.indices, np.frombuffer(run.slots, "<u4").tolist(), strict=True):
                    assert (one.arena.payload(slot) == (start * 31 + run.group * 7 + index) % 256).all()
    assert check(one.core) == []


@pytest.mark.parametrize("held", [True, False])
def test_a_leased_slot_never_moves_and_of_one_that_did_the_versions_are_refused(held: bool) -> None:
    one = holder()
    for tokens in (P, Q, range(200, 217)):
        assert one.store(tokens).refused is None
    grant = one.acquire(P, lease_s=3600.0).grant
    assert grant is not None
    runs = one.core.ctx.leases.live[grant.lease].proof.runs
    if not held:
        one.ask(Release("end", grant.lease, None))
    before = len(books(one).slabs.of(KV))
    for _ in range(20):
        lose(one, 1)
    assert len(books(one).slabs.of(KV)) < before
    assert all(slots_stand(run.slots, run.versions, one.arena) for run in runs) is held
    assert check(one.core) == []


def test_a_slab_with_a_captured_slot_stays() -> None:
    one = holder(slots=8, slabs=4)
    assert one.store(P).refused is None
    grant = one.acquire(P).grant
    assert grant is not None
    (part,) = grant.parts
    one.ask(GraphRegister("g", part.slots))
    one.ask(Release("end", grant.lease, None))
    captured = {slot for run in part.slots if run.group == 0 for slot in np.frombuffer(run.slots, "<u4").tolist()}
    for _ in range(20):
        lose(one, 1)
    assert all(books(one).slabs.has(KV, slot) for slot in captured)
    assert check(one.core) == []


def test_a_store_that_needs_the_slots_has_them_and_the_slab_stays() -> None:
    one = holder()
    pool, slabs = books(one).pools[KV], books(one).slabs
    pool.close(slabs.slots(KV, slabs.of(KV)[0]))
    assert len(pool.free) < pool.capacity == pool.room
    free = len(pool.free)
    stored = 0
    while pool.closing:
        start = 1000 * stored
        assert one.store(range(start, start + 17)).refused is None
        grant = one.acquire(range(start, start + 17), lease_s=300.0).grant
        assert grant is not None
        stored += 1
        assert stored < 64
    assert 4 * stored > free
    assert not pool.closed
    assert check(one.core) == []


def test_a_slab_that_is_not_empty_is_not_handed_over() -> None:
    one = holder()
    assert one.store(P).refused is None
    slabs, pool = books(one).slabs, books(one).pools[KV]
    slab = next(s for s in slabs.of(KV) if any(books(one).owner[slot] for slot in slabs.slots(KV, s)))
    with pytest.raises(ProtocolError, match="not empty"):
        slabs.hand_over(slab, SWA)
    pool.close(slabs.slots(KV, slab))
    with pytest.raises(ProtocolError, match="not empty"):
        slabs.hand_over(slab, SWA)


def test_no_pool_gives_its_last_slabs() -> None:
    one = holder()
    floor = one.core.slabs.stakes[KV].floor
    for _ in range(200):
        lose(one, 1)
    assert len(books(one).slabs.of(KV)) == floor >= 1
    assert one.store(P).refused is None
    assert check(one.core) == []


# --- who gives, who gets ---------------------------------------------------------------------------------


def stakes(*lost: float) -> list[Stake]:
    return [Stake((g, 0), 10, 2, tokens) for g, tokens in enumerate(lost)]


def test_who_lost_most_takes_from_who_lost_least_where_the_difference_is_clear() -> None:
    found = choose(stakes(100.0, 900.0, 10.0), 1000.0, 0.0)
    assert found is not None
    assert [stake.key[0] for stake in found] == [2, 1]
    assert choose(stakes(600.0, 900.0), 1000.0, 0.0) is None
    assert choose(stakes(0.0, 9.0), 1000.0, 0.0) is None
    assert choose(stakes(0.0, 0.0), 0.0, 0.0) is None


def test_back_and_forth_dies_out() -> None:
    one, two = stakes(0.0, 0.0)
    now, moves = 0.0, []
    while now < 20 * REST_S:
        one.lost_tokens, two.lost_tokens = (0.0, 9.0) if two.turned < 1 else (9.0, 0.0)
        found = choose([one, two], 0.0, now)
        if found is not None:
            found[0].moves(-1, now)
            found[1].moves(1, now)
            moves.append(now)
        now += 1.0
    gaps = [b - a for a, b in pairwise(moves)]
    assert len(moves) < 8
    assert all(b >= 1.9 * a for a, b in pairwise(gaps))
