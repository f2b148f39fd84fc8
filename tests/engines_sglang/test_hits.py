"""HiCache's hit policies solved by the fabric's rules say what they say page by page."""

from __future__ import annotations

import random

import pytest

from kvfabric.engines.sglang_hicache.hits import HitPolicy, Hits, PoolRule, hits
from kvfabric.fabric.kinds import FabricError, Form, ObjectKind

ALL, TRAILING, GROUPS = HitPolicy.ALL_PAGES, HitPolicy.TRAILING_PAGES, HitPolicy.BLOCK_GROUPS


def by_hand(pages: int, kv: int, pools: list[tuple[PoolRule, int]]) -> Hits:
    """Page by page, as the policies are described."""

    def has(bits: int, first: int, end: int) -> bool:
        return all(bits >> i & 1 for i in range(max(0, first), end))

    reach = next((i for i in range(pages) if not kv >> i & 1), pages)
    positions = set(range(1, reach + 1))
    alone = {"kv": reach}
    for rule, bits in pools:
        if rule.policy is GROUPS:
            whole = next(g for g in range(pages + 1) if not bits >> g & 1)
            alone[rule.name] = min(whole, pages // rule.block_pages) * rule.block_pages
            continue
        need = rule.trailing_pages if rule.policy is TRAILING else pages
        served = {p for p in range(1, reach + 1) if has(bits, p - need, p)}
        alone[rule.name] = max(served, default=0)
        positions &= served
    return Hits(tuple(sorted(positions)), {name: found for name, found in alone.items() if found})


def bits_of(rng: random.Random, count: int) -> int:
    return sum(1 << i for i in range(count) if rng.random() < 0.85)


@pytest.mark.parametrize("seed", range(40))
def test_the_rule_engine_and_the_policies_agree(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        pages = rng.randrange(1, 24)
        pools = [
            (PoolRule("indexer", ALL), bits_of(rng, pages)),
            (PoolRule("swa", TRAILING, trailing_pages=rng.randrange(1, 6)), bits_of(rng, pages)),
            (PoolRule("mamba", TRAILING), bits_of(rng, pages)),
            (PoolRule("c4", GROUPS, block_pages=rng.randrange(1, 4)), bits_of(rng, pages)),
        ]
        some = rng.sample(pools, rng.randrange(len(pools) + 1))
        kv = bits_of(rng, pages)
        assert hits(pages, kv, some) == by_hand(pages, kv, some), (pages, bin(kv), some)


def test_five_pages_may_be_restorable_where_four_and_three_are_not() -> None:
    found = hits(6, 0b111111, [(PoolRule("mamba", TRAILING), 0b010000)])
    assert (found.pages, found.positions) == (5, (5,))


def test_each_policy_is_a_kind() -> None:
    kinds = {
        PoolRule("indexer", ALL): (ObjectKind.INDEXER, Form.BLOCKS),
        PoolRule("swa", TRAILING, trailing_pages=3): (ObjectKind.SLIDING_WINDOW, Form.BLOCKS),
        PoolRule("mamba", TRAILING): (ObjectKind.COMPRESSED_HISTORY, Form.STATE),
        PoolRule("c4", GROUPS, block_pages=2): (ObjectKind.COMPRESSED_HISTORY, Form.BLOCKS),
    }
    assert {rule: (rule.group().kind, rule.group().form) for rule in kinds} == kinds
    assert PoolRule("swa", TRAILING, trailing_pages=3).group().window_tokens == 4


def test_a_rule_without_pages_is_refused() -> None:
    with pytest.raises(FabricError, match=r"pool c4: .* names no pages"):
        hits(4, 0b1111, [(PoolRule("c4", GROUPS, block_pages=0), 1)])
