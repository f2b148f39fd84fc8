"""Offers: every position a prompt can be resumed at, with what that would take.

The planner's arrays, one entry a position: nothing is chosen here. A policy (:class:`Planning`) says
which is worth it, and learns from what things really took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from .bitmaps import octets_of, unpacked
from .expected import Expected, Measured
from .needs import rules_of
from .rules import servable

if TYPE_CHECKING:
    from .planner import View

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Offers:
    """All servable positions of a prompt of ``n`` tokens, ascending, the first to recompute everything.

    ``replayed``: how many tokens are replayed for it (0: none); ``moved``: bytes to fetch, by source;
    ``restored``: bytes to read from this holder's tier or another's; ``queued_bytes``: what is to be read before.
    """

    n: int
    tokens: Counts
    replayed: Counts
    moved: Mapping[str, Counts]
    restored: Counts
    queued_bytes: float = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prefilled(self) -> Counts:
        """Tokens to compute behind the position."""
        return self.n - self.tokens

    def replay_from(self, at: int) -> int | None:
        """Where the replay of an offer begins; None without one."""
        replayed = int(self.replayed[at])
        return int(self.tokens[at]) - replayed if replayed else None


class Planning(Protocol):
    """Which offer to take. May keep what it learned; reads no clock."""

    def seconds(self, offers: Offers) -> NDArray[np.float64]:
        """What each offer is expected to take in all, in seconds."""
        ...

    def expected(self, offers: Offers, at: int) -> Expected:
        """What one offer is expected to take, by what takes it."""
        ...

    def learn(self, measured: Measured) -> None:
        """What some work really took."""
        ...


def offers_of(view: View, *, tiers: bool, replayed: int = 0, queued_bytes: float = 0) -> Offers:
    """Everything that can be served from what the view knows; without ``tiers`` only out of memory.

    Each position also by a replay of so many tokens (0: of none), unless that began at the start.
    """
    model, n = view.model, view.prompt.n
    grid = model.grid_tokens
    direct = _positions(servable(model, view.evidence(tiers=tiers), n), grid)
    parts = [(view, direct, np.zeros_like(direct))]
    if replayed:
        over = view.replaying()
        far = _positions(servable(over.model, over.evidence(tiers=tiers), n), grid)
        far = far[far > replayed]  # else the replay is a prefill of everything
        parts.insert(0, (over, far, np.full_like(far, replayed)))  # on a tie, rather without
    rows = [(*_bytes(over, positions, tiers), positions, length) for over, positions, length in parts]
    tokens = np.concatenate([row[2] for row in rows])
    order = np.argsort(tokens, kind="stable")
    sources = sorted({source for row in rows for source in row[0]})
    moved = {
        source: np.concatenate([row[0].get(source, np.zeros_like(row[2])) for row in rows])[order] for source in sources
    }
    return Offers(
        n,
        tokens[order],
        np.concatenate([row[3] for row in rows])[order],
        moved,
        np.concatenate([row[1] for row in rows])[order],
        queued_bytes,
    )


def _positions(bits: int, grid: int) -> Counts:
    """The token positions of a bitmap over the grid, 0 included."""
    return np.flatnonzero(unpacked(octets_of(bits, bits.bit_length()))).astype(np.int64) * grid


def _bytes(view: View, positions: Counts, tiers: bool) -> tuple[dict[str, Counts], Counts]:
    """Bytes to fetch by source, and to read from tiers, that each position takes."""
    moved: dict[str, Counts] = {}
    restored = np.zeros_like(positions)
    for group, rule in enumerate(rules_of(view.model).groups):
        objects = view.prompt.n // rule.unit
        if not objects or not len(positions):
            continue
        head, first, end = rule.spans(np.maximum(positions, rules_of(view.model).grid))
        size = view.model.groups[group].block_bytes
        for shard in range(view.model.shards):
            for source, from_tier, bits in view.copies(group, shard, tiers=tiers):
                held = np.zeros(objects + 1, np.int64)
                np.cumsum(unpacked(octets_of(bits, objects))[:objects], out=held[1:])
                taken = (held[head] + held[end] - held[first]) * size
                taken[positions == 0] = 0
                if from_tier:
                    restored += taken
                if source:
                    moved[source] = moved.get(source, np.zeros_like(positions)) + taken
    return moved, restored
