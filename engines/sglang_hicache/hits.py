"""HiCache's hit policies as the fabric's kinds: from which page of a prompt may a request go on?

    the KV pool       compressed history, one block a page
    ALL_PAGES         an indexer of it (DSA): owes what it owes
    TRAILING_PAGES    a sliding window of the last N pages; for a state pool (Mamba) the snapshot at the position
    BLOCK_GROUPS      compressed history of its own in coarser blocks; it has a verdict and gates nothing

A page is the unit: bit i of a bitmap is page i, and position p is the end of page p - 1. What can be
resumed is the rule engine's answer over all pools at once, which may be 5 pages and not 4 or 3.

    Source: ``HiCacheStorage.batch_exists_v2`` and ``PoolHitPolicy`` of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from ...fabric.bitmaps import leading
from ...fabric.evidence import GroupEvidence
from ...fabric.kinds import FabricError, Form, ObjectKind
from ...fabric.model import GroupSpec, ModelSpec
from ...fabric.rules import servable, usable_position

KV = "kv"
STATE_POOLS = frozenset({"mamba"})
"""Pools whose pages are states: what one holds is right at its own end only."""


class HitPolicy(StrEnum):
    """SGLang's ``PoolHitPolicy``, by value."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass(frozen=True, slots=True)
class PoolRule:
    """How one side pool counts. ``trailing_pages``: N of TRAILING_PAGES; ``block_pages``: KV pages of a BLOCK_GROUPS group."""

    name: str
    policy: HitPolicy
    trailing_pages: int = 1
    block_pages: int = 1

    @property
    def gates(self) -> bool:
        """Whether a request needs this pool to go on."""
        return self.policy is not HitPolicy.BLOCK_GROUPS

    def group(self) -> GroupSpec:
        """The pool as a cache group. Raises FabricError for a rule without pages."""
        if self.trailing_pages < 1 or self.block_pages < 1:
            raise FabricError(f"pool {self.name}: {self} names no pages")
        kind, more = ObjectKind.COMPRESSED_HISTORY, dict[str, Any](block_tokens=1)
        match self.policy:
            case HitPolicy.ALL_PAGES:
                kind, more = ObjectKind.INDEXER, {"block_tokens": 1, "of": KV}
            case HitPolicy.TRAILING_PAGES if self.name in STATE_POOLS and self.trailing_pages == 1:
                more = {"form": Form.STATE, "grid_tokens": 1}
            case HitPolicy.TRAILING_PAGES:  # a window of W tokens needs the W - 1 before the position
                kind, more = ObjectKind.SLIDING_WINDOW, {"block_tokens": 1, "window_tokens": self.trailing_pages + 1}
            case HitPolicy.BLOCK_GROUPS:
                more = {"block_tokens": self.block_pages}
        return GroupSpec(name=self.name, kind=kind, **more)


@dataclass(frozen=True, slots=True)
class Hits:
    """``positions``: every length in pages from which a request can go on; ``pool_pages``: how far each pool reaches alone."""

    positions: tuple[int, ...]
    pool_pages: dict[str, int]

    @property
    def pages(self) -> int:
        """The longest of them; 0 for none."""
        return self.positions[-1] if self.positions else 0


def hits(pages: int, kv: int, pools: Iterable[tuple[PoolRule, int]] = ()) -> Hits:
    """What a prompt of so many pages hits. ``kv``: bitmap of its KV pages; with each pool its own, of pages or of groups."""
    reach = leading(kv)
    rules = list(pools)
    gating = [(rule, bits) for rule, bits in rules if rule.gates]
    served = servable(
        _model(tuple(rule for rule, _ in gating)), [_evidence(kv), *(_evidence(bits) for _, bits in gating)], pages + 1
    )
    alone = {KV: reach}
    for rule, bits in rules:
        model = _model((rule,)) if rule.gates else _single(rule)
        evidence = [_evidence(kv), _evidence(bits)] if rule.gates else [_evidence(bits)]
        alone[rule.name] = usable_position(model, evidence, pages + 1)
    positions = tuple(page for page in range(1, min(pages, reach) + 1) if served >> page & 1)
    return Hits(positions, {name: found for name, found in alone.items() if found})


def _evidence(bits: int) -> GroupEvidence:
    return GroupEvidence(usable={0: bits}, matched=bits)


@lru_cache(64)
def _model(rules: tuple[PoolRule, ...]) -> ModelSpec:
    kv = GroupSpec(name=KV, kind=ObjectKind.COMPRESSED_HISTORY, block_tokens=1)
    return ModelSpec(name="hicache", groups=(kv, *(rule.group() for rule in rules)))


@lru_cache(64)
def _single(rule: PoolRule) -> ModelSpec:
    return ModelSpec(name="hicache", groups=(rule.group(),))
