"""What a cache that knows the future would hit: the bound that policies are measured against."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .trace import Trace

_NEVER = 1 << 60


def belady_hits(trace: Trace, slots: int) -> int:
    """Blocks hit by a cache of so many blocks that keeps what is used soonest (Belady, 1966), in prefixes.

    It may refuse what it is given, which a cache that stores what was just computed cannot: the bound is
    a strict one. A block is used no later than what follows it in its chain, so what it keeps are prefixes.
    """
    uses = _uses(trace)
    following = {block: iter(at) for block, at in uses.items()}
    for at in following.values():
        next(at)
    kept: set[int] = set()
    due: dict[int, int] = {}
    order: list[tuple[int, int, int]] = []
    hits = 0
    for request in trace.requests:
        for block in request.blocks[: request.reusable_blocks]:
            if block not in kept:
                break
            hits += 1
        for depth, block in enumerate(request.blocks):
            due[block] = at_next = next(following[block], _NEVER)
            if at_next == _NEVER:
                kept.discard(block)
            else:
                kept.add(block)
                heapq.heappush(order, (-at_next, -depth, block))
        while len(kept) > slots:
            at_last, _, block = heapq.heappop(order)
            if block in kept and due[block] == -at_last:
                kept.discard(block)
    return hits


def _uses(trace: Trace) -> dict[int, list[int]]:
    """By block, the requests that have it, ascending."""
    uses: dict[int, list[int]] = {}
    for number, block in _all(trace):
        uses.setdefault(block, []).append(number)
    return uses


def _all(trace: Trace) -> Iterator[tuple[int, int]]:
    for number, request in enumerate(trace.requests):
        for block in request.blocks:
            yield number, block
