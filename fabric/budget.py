"""One budget of memory, split over a model's groups: by their geometry and by what prompts are expected to leave.

History and indexer grow with every token. Of windows, tails and snapshots a prompt leaves what its
checkpoints need, so under ``ends`` they take a small part of what they would take if all were kept.
The split holds the same prompts in every group: none runs full long before the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from .arena import PAGE_BYTES, ArenaLayout, PoolLayout
from .kinds import Form, ObjectKind, SpecError
from .model import ModelSpec
from .needs import needs, rules_of

PROMPT_TOKENS = 8192
"""How long a prompt is expected to be, where nobody says."""
CHECKPOINTS = {"ends": 2, "branches": 3}
"""How many positions of a prompt are kept, by checkpoint policy."""
EVERY = "every:"
SLOTS_MAX = 1 << 24


def objects_per_token(model: ModelSpec, *, checkpoint: str, prompt_tokens: int = PROMPT_TOKENS) -> tuple[Fraction, ...]:
    """Per group, how many objects of one shard a stored token leaves on average."""
    rules = rules_of(model)
    every = _checkpoint_tokens(checkpoint, prompt_tokens)
    typical = max(prompt_tokens, 2 * rules.grid) // rules.grid * rules.grid
    needed = needs(model, typical)
    found = []
    for spec, ranges in zip(model.groups, needed, strict=True):
        everything = Fraction(1, max(spec.unit_tokens, rules.grid) if spec.form is Form.STATE else spec.unit_tokens)
        grows = spec.form is Form.BLOCKS and spec.kind in (ObjectKind.COMPRESSED_HISTORY, ObjectKind.INDEXER)
        if grows or every is None:
            found.append(everything)
        else:
            found.append(min(everything, Fraction(max(1, sum(len(r) for r in ranges)), every)))
    return tuple(found)


def _checkpoint_tokens(checkpoint: str, prompt_tokens: int) -> int | None:
    """Tokens from one checkpoint to the next; None where every position is kept."""
    if checkpoint.startswith(EVERY):
        return int(checkpoint.removeprefix(EVERY))
    count = CHECKPOINTS.get(checkpoint)
    return None if count is None else max(1, prompt_tokens // count)


def bytes_per_token(model: ModelSpec, *, checkpoint: str, prompt_tokens: int = PROMPT_TOKENS) -> Fraction:
    """Bytes of slots, whole pages each, that a stored token takes of one shard on average."""
    rates = objects_per_token(model, checkpoint=checkpoint, prompt_tokens=prompt_tokens)
    strides = [-(-group.block_bytes // PAGE_BYTES) * PAGE_BYTES for group in model.groups]
    return sum((rate * stride for rate, stride in zip(rates, strides, strict=True)), Fraction())


def slots_for(
    model: ModelSpec, memory_bytes: int, shards: int, *, checkpoint: str = "all", prompt_tokens: int = PROMPT_TOKENS
) -> tuple[int, ...]:
    """Per group, slots a shard of a holder that owns so many shards; at least one each."""
    rates = objects_per_token(model, checkpoint=checkpoint, prompt_tokens=prompt_tokens)
    per_token = bytes_per_token(model, checkpoint=checkpoint, prompt_tokens=prompt_tokens)
    tokens = memory_bytes / (per_token * max(shards, 1))
    return tuple(min(SLOTS_MAX, max(1, int(tokens * rate))) for rate in rates)


def tokens_held(model: ModelSpec, slots: tuple[int, ...], *, checkpoint: str, prompt_tokens: int) -> tuple[int, ...]:
    """Per group, how many tokens of expected prompts its slots hold."""
    rates = objects_per_token(model, checkpoint=checkpoint, prompt_tokens=prompt_tokens)
    return tuple(int(count / rate) for count, rate in zip(slots, rates, strict=True))


def sizes(model: ModelSpec, memory_bytes: int, shards: int, *, checkpoint: str, prompt_tokens: int) -> dict[str, Any]:
    """The split as plain data: by group its slots a shard, their bytes, and the tokens of prompts that they hold."""
    slots = slots_for(model, memory_bytes, shards, checkpoint=checkpoint, prompt_tokens=prompt_tokens)
    held = tokens_held(model, slots, checkpoint=checkpoint, prompt_tokens=prompt_tokens)
    return {
        "name": model.name,
        "memory_bytes": memory_bytes,
        "checkpoint": checkpoint,
        "prompt_tokens": prompt_tokens,
        "groups": [
            {
                "name": group.name,
                "slots": count,
                "slot_bytes": -(-group.block_bytes // PAGE_BYTES) * PAGE_BYTES,
                "tokens": tokens,
            }
            for group, count, tokens in zip(model.groups, slots, held, strict=True)
        ],
    }


SLABS_MIN, SLABS_MAX = 64, 512
"""Into how many slabs a tier is cut where nobody says."""
SIZES_TRIED = 128


def in_slabs(layout: ArenaLayout, slabs_min: int | None = None) -> tuple[ArenaLayout, tuple[int, ...]]:
    """The same memory, the readers' part of it shared slab by slab; and how many slabs each of its pools has at first.

    A slab holds at least one slot of any pool; what a last slot leaves over is lost, and pools have whole slabs: of
    all sizes the one is taken under which the pool that fares worst keeps most of its slots. ``slabs_min``: as large
    as so many slabs allow instead. Raises SpecError where there is too little for a slab each and one to move.
    """
    pools = [pool for pool in layout.pools if pool.tier is layout.readers_tier]
    memory_bytes = sum(pool.slots * pool.stride_bytes for pool in pools)
    largest = max(pool.stride_bytes for pool in pools)
    most = memory_bytes // (len(pools) + 1)
    if most < largest:
        raise SpecError(f"slabs: {memory_bytes} bytes are too few for {len(pools)} pools with slots of {largest}")
    if slabs_min is None:
        sizes = _sizes(max(largest, memory_bytes // SLABS_MAX), max(largest, min(most, memory_bytes // SLABS_MIN)))
        slab_bytes = max(sizes, key=lambda size: (_kept(pools, size, memory_bytes), size))
    else:
        slab_bytes = max(1, memory_bytes // max(slabs_min, len(pools) + 1) // largest) * largest
    shares = _shares(pools, slab_bytes, memory_bytes)
    sharing = [replace(pool, slots=sum(shares) * (slab_bytes // pool.stride_bytes)) for pool in pools]
    below = [pool for pool in layout.pools if pool.tier is not layout.readers_tier]
    return ArenaLayout([*sharing, *below], layout.checksum, slab_bytes), tuple(shares)


def _sizes(least: int, most: int) -> set[int]:
    """Some sizes of slabs, in whole pages."""
    steps = (least + (most - least) * i // SIZES_TRIED for i in range(SIZES_TRIED + 1))
    return {max(-(-least // PAGE_BYTES), size // PAGE_BYTES) * PAGE_BYTES for size in steps}


def _shares(pools: Sequence[PoolLayout], slab_bytes: int, memory_bytes: int) -> list[int]:
    """Slabs of that size for each pool, as near to its slots as whole slabs come."""
    slabs = memory_bytes // slab_bytes
    due = [Fraction(pool.slots, slab_bytes // pool.stride_bytes) for pool in pools]
    whole = sum(due, Fraction())
    due = [part * slabs / whole for part in due]
    shares = [max(1, int(part)) for part in due]
    while sum(shares) != slabs:
        step = 1 if sum(shares) < slabs else -1
        may = [i for i, count in enumerate(shares) if count + step >= 1]
        shares[max(may, key=lambda i: (due[i] - shares[i]) * step)] += step
    return shares


def _kept(pools: Sequence[PoolLayout], slab_bytes: int, memory_bytes: int) -> Fraction:
    """How much of its slots the pool keeps that fares worst: a prompt is worth no more than its scarcest group."""
    shares = _shares(pools, slab_bytes, memory_bytes)
    return min(
        Fraction(count * (slab_bytes // pool.stride_bytes), pool.slots)
        for pool, count in zip(pools, shares, strict=True)
    )
