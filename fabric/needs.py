"""What a resume at one position requires of each group: the single statement of every rule.

The planner, the leases and the ``intersection`` layer ask :func:`needs`; the erosion over bitmaps
(``erosion.py``) is the same rules solved for all positions at once, from the same
:class:`GroupRule`. Rules: sliding windows, compressors with overlap and recurrent state as measured
on DeepSeek-V4, DeepSeek-V3.2, Gemma 3, GPT-OSS and Qwen3-Next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import lcm
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from .kinds import Form, ObjectKind
from .model import GroupSpec, ModelSpec

Ranges = tuple[range, ...]

ANSWERS_KEPT_MAX = 256
"""Positions whose needs a model's rules remember."""
T = TypeVar("T")
Tokens = TypeVar("Tokens", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class GroupRule:
    """One group's rule in plain numbers. All fields in tokens.

    ``prefix``: everything from the start up to the compressed count is needed (history, indexer).
    ``past``: how many tokens behind p a block group must hold as well (``drop_last_blocks``).
    """

    kind: ObjectKind
    state: bool
    unit: int
    ratio: int
    lag: int
    overlap: int
    window: int
    sink: int
    past: int

    @property
    def prefix(self) -> bool:
        """Whether the rule asks for a leading run of blocks that grows with p."""
        return not self.state and self.kind in (ObjectKind.COMPRESSED_HISTORY, ObjectKind.INDEXER)

    def compressed(self, p: int) -> int:
        """c: how many tokens the compressed entries cover at p."""
        reached = max(0, p - self.lag)
        return reached - reached % self.ratio

    def run_start(self, p: Tokens) -> Tokens:
        """Where the run of tokens begins whose blocks must all be there: up to p, and `past` behind it.

        The raw tokens of a window or tail; nothing before p for history and indexers, which have
        their prefix. Below 0 means from the start of the prompt, and is periodic in p all the same,
        which the erosion relies on. A tail's overlap at p < ratio, where the rule has none, lies
        wholly below 0: nothing is compressed there, so the run begins at the start either way.
        Plain arithmetic: the same over one position and over an array of them.
        """
        if self.prefix:
            return p
        if self.kind is ObjectKind.SLIDING_WINDOW:
            return p - self.window + 1
        reached = p - self.lag
        return reached - reached % self.ratio - self.overlap

    def ranges(self, p: int, past: int) -> Ranges:
        """Object indices required at p > 0, ascending and disjoint, with `past` tokens behind p."""
        if self.state:
            if p % self.unit:
                raise ValueError(f"position {p}: not a multiple of the snapshot grid {self.unit}")
            return (range(p // self.unit - 1, p // self.unit),)
        start = self.compressed(p) if self.prefix else min(self.sink, p)
        return _blocks(((0, start), (max(0, self.run_start(p)), p + past)), self.unit)

    def spans(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """What :meth:`ranges` needs at each of many positions p > 0: objects [0, head) and [first, end), disjoint."""
        if self.state:
            end = positions // self.unit
            return np.zeros_like(end), end - 1, end
        reached = np.maximum(positions - self.lag, 0)
        start = reached - reached % self.ratio if self.prefix else np.minimum(self.sink, positions)
        head = -(-start // self.unit)
        first = np.maximum(self.run_start(positions), 0)
        end = np.where(first < positions, -(-positions // self.unit), 0)
        return head, np.minimum(np.maximum(first // self.unit, head), np.maximum(end, head)), np.maximum(end, head)


def _blocks(spans: Iterable[tuple[int, int]], unit: int) -> Ranges:
    """Blocks that meet any of the token spans (ascending starts), merged."""
    merged: list[range] = []
    for first, end in spans:
        if first >= end:
            continue
        blocks = range(first // unit, -(-end // unit))
        if merged and blocks.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, blocks.stop))
        else:
            merged.append(blocks)
    return tuple(merged)


def group_rule(model: ModelSpec, group: GroupSpec) -> GroupRule:
    """The rule of one group; tails and indexers take ratio and lag of their history group."""
    window = group.kind is ObjectKind.SLIDING_WINDOW
    history = group if window else model.history_of(group)
    state = group.form is Form.STATE
    return GroupRule(
        kind=group.kind,
        state=state,
        unit=group.unit_tokens,
        ratio=history.ratio,
        lag=history.lag_tokens,
        overlap=group.overlap_tokens,
        window=group.window_tokens or 1,
        sink=group.sink_tokens,
        past=0 if state else model.drop_last_blocks * model.grid_tokens,
    )


class Rules:
    """One model's rules, computed once: what every question about a prompt starts from.

    ``finest``: tokens between positions at which the groups could resume if it were not for the
    common grid: the finest cut, or what their snapshots allow.
    """

    def __init__(self, model: ModelSpec) -> None:
        self.grid = model.grid_tokens
        self.finest = lcm(*(g.unit_tokens for g in model.groups if g.form is Form.STATE), model.cut_tokens)
        self.past = model.drop_last_blocks * model.grid_tokens
        self.names = tuple(group.name for group in model.groups)
        self.groups = tuple(group_rule(model, group) for group in model.groups)
        self.families = model.families
        self.family_of: tuple[int | None, ...] = tuple(
            next((f for f, family in enumerate(model.families) if i in family), None) for i in range(len(self.groups))
        )
        self.windows = tuple(i for i, rule in enumerate(self.groups) if rule.kind is ObjectKind.SLIDING_WINDOW)
        self.histories = tuple(
            next(i for i in family if self.groups[i].kind is ObjectKind.COMPRESSED_HISTORY) for family in self.families
        )
        self.asked: dict[tuple[int, bool], tuple[Ranges, ...]] = {}
        """What was needed at the positions last asked about: planner, prover and leases ask the same one."""


class PerModel(Generic[T]):
    """Something computed once a model and kept as long as the model lives.

    Keyed by identity: hashing a spec costs more than most questions about it.
    """

    def __init__(self, build: Callable[[ModelSpec], T]) -> None:
        self._build = build
        self._built: dict[int, tuple[weakref.ref[ModelSpec], T]] = {}

    def __call__(self, model: ModelSpec) -> T:
        key = id(model)
        found = self._built.get(key)
        if found is not None and found[0]() is model:
            return found[1]
        built = self._build(model)
        self._built[key] = (weakref.ref(model, lambda _: self._built.pop(key, None)), built)
        return built


rules_of = PerModel(Rules)


def needs(model: ModelSpec, p: int) -> tuple[Ranges, ...]:
    """Per group, in model order, the object indices that a resume at p requires.

    Empty where nothing is required (always at p = 0). Raises ValueError for a position that is
    negative or not on the grid.
    """
    return _needs(model, p, past=False)


def needs_past(model: ModelSpec, p: int) -> tuple[Ranges, ...]:
    """Like :func:`needs`, with what a speculative reader wants past p.

    With ``drop_last_blocks`` d every block group also holds the blocks of [p, p + d * grid).
    """
    return _needs(model, p, past=True)


def _needs(model: ModelSpec, p: int, *, past: bool) -> tuple[Ranges, ...]:
    rules = rules_of(model)
    known = rules.asked.get((p, past))
    if known is not None:
        return known
    if p < 0 or p % rules.grid:
        raise ValueError(f"position {p}: not on the resume grid of {rules.grid} tokens")
    if p == 0:
        return ((),) * len(rules.groups)
    needed = tuple(rule.ranges(p, rule.past if past else 0) for rule in rules.groups)
    if len(rules.asked) >= ANSWERS_KEPT_MAX:
        rules.asked.clear()
    rules.asked[p, past] = needed
    return needed
