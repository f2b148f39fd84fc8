"""What a trace is replayed on: presets with blocks of a trace's size, prompts' digests, capacities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...fabric.arena import ArenaLayout, PoolLayout
from ...fabric.budget import slots_for
from ...fabric.messages import Prompt
from ...fabric.model import ModelSpec
from ...fabric.objects import split
from ...fabric.specs import known_model
from .trace import BLOCK_TOKENS

FULL_ATTENTION = "full_attention"
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_CUTS = BLOCK_TOKENS + 1


def replay_model(name: str, plan: str | None = None) -> ModelSpec:
    """A preset or spec file as it is replayed: blocks of ``full_attention`` are a trace's. Raises SpecError.

    ``plan``: ``longest`` or ``cost``, in place of the model's own.
    """
    model = known_model(name)
    if plan is not None:
        model = ModelSpec.load(model.model_dump(mode="json", exclude_defaults=True) | {"plan": plan})
    if name != FULL_ATTENTION:
        return model
    plain = model.model_dump(mode="json", exclude_defaults=True)
    (group,) = plain["groups"]
    scale = BLOCK_TOKENS // group["block_tokens"]
    group["block_tokens"] = BLOCK_TOKENS
    for size in ("layer_bytes", "block_bytes", "page_bytes", "padding_bytes"):
        if size in group:
            group[size] *= scale
    return ModelSpec.load(plain)


def layout_of(model: ModelSpec, memory_bytes: int, checkpoint: str, prompt_tokens: int, slots_max: int) -> ArenaLayout:
    """One holder's pools. A capacity is a number: no pool has more slots than ``slots_max`` can ever be used."""
    shards = tuple(range(model.shards))
    counts = slots_for(model, memory_bytes, len(shards), checkpoint=checkpoint, prompt_tokens=prompt_tokens)
    return ArenaLayout(
        [
            PoolLayout(group, shard, min(count, slots_max * -(-BLOCK_TOKENS // model.groups[group].unit_tokens)), size)
            for group, (count, size) in enumerate(zip(counts, (g.block_bytes for g in model.groups), strict=True))
            for shard in shards
        ]
    )


class Digests:
    """Prompts as the fabric sees them: digests made of a trace's block ids, which bear their prefix already.

    ``known_max``: blocks whose own digest is remembered.
    """

    def __init__(self, model: ModelSpec, weights: bytes, known_max: int = 1 << 20) -> None:
        self._units = tuple(sorted({group.unit_tokens for group in model.groups} | {model.grid_tokens}))
        self._weights = weights
        self._namespace = bytes(32)
        self._known: dict[int, bytes] = {}
        self._known_max = known_max

    def prompt(self, blocks: Sequence[int], tokens: int) -> Prompt:
        """The prompt of these whole blocks, ``tokens`` long."""
        keys = tuple(
            (unit, self._of_blocks(blocks) if unit == BLOCK_TOKENS else self._cut(blocks, unit)) for unit in self._units
        )
        return Prompt(self._namespace, self._weights, "", tokens, keys)

    def _cut(self, blocks: Sequence[int], unit: int) -> bytes:
        """32 bytes for each cut at a multiple of ``unit`` tokens."""
        ids = np.array(blocks, dtype=np.int64)
        ends = np.arange(unit, len(ids) * BLOCK_TOKENS + 1, unit, dtype=np.int64)
        at = (ends - 1) // BLOCK_TOKENS
        names = ids[at].astype(np.uint64) * np.uint64(_CUTS) + (ends - at * BLOCK_TOKENS).astype(np.uint64)
        return _spread(names).tobytes()

    def prepare(self, blocks: Iterable[int]) -> None:
        """Compute the digests of blocks that soon follow, many at a time."""
        known = self._known
        if BLOCK_TOKENS not in self._units:
            return
        fresh = list({block for block in blocks if block not in known})
        if len(known) + len(fresh) > self._known_max:
            known.clear()
        elif fresh:
            known.update(zip(fresh, split(self._cut(fresh, BLOCK_TOKENS)), strict=True))

    def _of_blocks(self, blocks: Sequence[int]) -> bytes:
        """:meth:`_cut` at each block's end; what came before is not computed again."""
        digests = list(map(self._known.get, blocks))
        if None in digests:
            known = dict(zip(blocks, split(self._cut(blocks, BLOCK_TOKENS)), strict=True))
            if len(self._known) + len(known) > self._known_max:
                self._known.clear()
            self._known.update(known)
            digests = [known[block] for block in blocks]
        return b"".join(digests)  # type: ignore[arg-type] # mypy does not see that no None is left


def _spread(names: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """32 bytes for each name, of shape (len(names), 4): splitmix64 of the name and of three more after it."""
    out = np.empty((len(names), 4), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in range(4):
            mixed = names + np.uint64((word + 1) * _MIX[0] & (1 << 64) - 1)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX[1])
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX[2])
            out[:, word] = mixed ^ (mixed >> np.uint64(31))
    return out
