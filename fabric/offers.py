"""Offers: every position a prompt can be resumed at, with what that would take.

The planner's arrays, one entry a position: nothing is chosen here. A policy (:class:`Planning`) says
which is worth it, and learns from what things really took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
InHost = Callable[[int, int], int]
"""Of a group and shard, the objects of a prompt that lie in this holder's host memory, as bits."""


@dataclass(frozen=True, slots=True)
class Offers:
    """All servable positions of a prompt of ``n`` tokens, ascending, the first to recompute everything.

    ``replayed``: how many tokens are replayed for it (0: none); ``moved``: bytes to fetch, by source;
    ``restored``: bytes to read from disks, this holder's or another's; ``copied``: bytes to copy out of this
    holder's host memory; ``queued_bytes``: what is to be read before, in bytes of the disk.
    """

    n: int
    tokens: Counts
    replayed: Counts
    moved: Mapping[str, Counts]
    restored: Counts
    copied: Counts
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

    def known(self) -> Mapping[str, Mapping[str, float]]:
        """What was learned, by the name of what it is about: for people."""
        ...


def offers_of(
    view: View, *, tiers: bool, replayed: int = 0, queued_bytes: float = 0, in_host: InHost | None = None
) -> Offers:
    """Everything that can be served from what the view knows; without ``tiers`` only out of memory.

    Each position also by a replay of so many tokens (0: of none), unless that began at the start.
    ``in_host``: which objects of a group and shard this holder has in host memory.
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
    tolls = [_tolls(over, positions, tiers, in_host or (lambda *_: 0)) for over, positions, _ in parts]
    tokens = np.concatenate([positions for _, positions, _ in parts])
    order = np.argsort(tokens, kind="stable")
    nothing = [np.zeros_like(positions) for _, positions, _ in parts]

    def joined(columns: Sequence[Counts]) -> Counts:
        return np.concatenate(columns)[order]

    sources = sorted({source for toll in tolls for source in toll.moved})
    return Offers(
        n,
        tokens[order],
        joined([length for _, _, length in parts]),
        {s: joined([t.moved.get(s, zeros) for t, zeros in zip(tolls, nothing, strict=True)]) for s in sources},
        joined([toll.restored for toll in tolls]),
        joined([toll.copied for toll in tolls]),
        queued_bytes,
    )


def _positions(bits: int, grid: int) -> Counts:
    """The token positions of a bitmap over the grid, 0 included."""
    return np.flatnonzero(unpacked(octets_of(bits, bits.bit_length()))).astype(np.int64) * grid


@dataclass(slots=True)
class _Toll:
    """Bytes that each of some positions takes."""

    moved: dict[str, Counts]
    restored: Counts
    copied: Counts


@dataclass(frozen=True, slots=True)
class _Needed:
    """The objects of one group that each of some positions needs: [0, head) and [first, end), ``size`` bytes each."""

    head: Counts
    first: Counts
    end: Counts
    none: NDArray[np.bool_]
    objects: int
    size: int

    def bytes_of(self, bits: int) -> Counts:
        """How many bytes of these objects each position needs."""
        held = np.zeros(self.objects + 1, np.int32)
        np.cumsum(unpacked(octets_of(bits, self.objects))[: self.objects], dtype=np.int32, out=held[1:])
        count = held[self.head] + held[self.end] - held[self.first]
        return np.where(self.none, 0, count * np.int64(self.size))


def _tolls(view: View, positions: Counts, tiers: bool, in_host: InHost) -> _Toll:
    """Bytes to fetch by source, to read from disks and to copy out of host memory, that each position takes."""
    toll = _Toll({}, np.zeros_like(positions), np.zeros_like(positions))
    grid = rules_of(view.model).grid
    for group, rule in enumerate(rules_of(view.model).groups):
        objects = view.prompt.n // rule.unit
        if not objects or not len(positions):
            continue
        spans = rule.spans(np.maximum(positions, grid))
        head, first, end = spans
        if not head.any() and (first >= end).all():
            continue  # a replay needs nothing of what it rebuilds
        needed = _Needed(*spans, positions == 0, objects, view.model.groups[group].block_bytes)
        for shard in range(view.model.shards):
            for source, from_tier, bits in view.copies(group, shard, tiers=tiers):
                host = in_host(group, shard) & bits if from_tier and not source else 0
                if host:
                    toll.copied += needed.bytes_of(host)
                if from_tier:
                    toll.restored += needed.bytes_of(bits & ~host)
                if source:
                    toll.moved[source] = toll.moved.get(source, np.zeros_like(positions)) + needed.bytes_of(bits)
    return toll
