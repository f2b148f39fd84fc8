"""Erosion: from which positions could a prompt resume, over all positions at once.

Every group's presence is one Python int (bit i = object i). Its rule turns that into a bitmap over
grid positions (bit k = position k * grid can be served): history by its leading ones, a window by
shift-and-AND in doubling steps, a snapshot by itself. The AND of all groups is exact, in one pass;
its top bit is the longest resume.

Groups whose blocks do not line up with the grid (endpoints finer than blocks, a tail whose need
changes from one grid position to the next) are eroded by a prefix sum over the missing blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from .bitmaps import gather, leading, octets_of, ones, packed, runs, unpacked
from .evidence import GroupEvidence
from .kinds import ObjectKind
from .model import ModelSpec
from .needs import GroupRule, PerModel, Rules, needs_past, rules_of

Reach = Callable[[int], int]
"""bits of one group -> the last token position that its leading objects allow (below 0: none)."""


@dataclass(frozen=True, slots=True)
class Run:
    """The objects around each position that a window, tail or snapshot needs.

    ``erode(bits, base, top)`` gives the bitmap over grid positions base..top (bit 0 is position
    ``base``; that of position 0, and bits behind the last, mean nothing), ``probe(bits, k)`` the one
    bit of position k > 0. Groups with equal ``shape`` need the same objects at every position.
    """

    shape: Hashable
    erode: Callable[[int, int, int], int]
    probe: Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class GroupErosion:
    """One group's rule, cut in two: what grows from the start, and what lies around the position."""

    reach: Reach | None
    run: Run | None

    def serve(self, bits: int, top: int, grid: int) -> int:
        """Bitmap over grid positions 0..top; bit 0 is always set."""
        if top <= 0:
            return 1
        if self.reach is not None:
            top = min(top, max(0, self.reach(bits) // grid))
        return ones(top + 1) if self.run is None else self.run.erode(bits, 0, top) & ones(top + 1) | 1


def group_erosion(rule: GroupRule, grid: int) -> GroupErosion:
    """The erosion of one group, chosen once from how its objects meet the grid."""
    if rule.state:
        return GroupErosion(None, _snapshots(rule, grid))
    # Whether the blocks behind p go on from where the compressed ones end.
    joined = rule.prefix and rule.lag == 0 and rule.unit % rule.ratio == 0
    reach: Reach | None = None
    if rule.prefix:
        reach = _reach_behind(rule) if joined and rule.past else _reach(rule)
    elif rule.sink:
        reach = _reach_of_sinks(rule)
    if rule.past == 0 and (rule.prefix or not _ever_runs(rule, grid)):
        return GroupErosion(reach, None)
    if joined:
        return GroupErosion(reach, None)
    changes = rule.kind is ObjectKind.UNCOMPRESSED_TAIL and grid % rule.ratio != 0
    return GroupErosion(reach, _ragged(rule, grid) if changes or grid % rule.unit else _aligned(rule, grid))


def _ever_runs(rule: GroupRule, grid: int) -> bool:
    """Whether a window or tail ever needs raw tokens at a grid position."""
    if rule.kind is ObjectKind.SLIDING_WINDOW:
        return rule.window > 1
    return bool(rule.overlap or rule.lag or grid % rule.ratio)


def _reach(rule: GroupRule) -> Reach:
    """The compressed count may not pass the first missing block.

    Positions up to ratio - 1 (and lag) past an entry's end have the same compressed count as it.
    """
    unit, ratio, slack = rule.unit, rule.ratio, rule.ratio - 1 + rule.lag

    def reach(bits: int) -> int:
        held = leading(bits) * unit
        return held - held % ratio + slack

    return reach


def _reach_behind(rule: GroupRule) -> Reach:
    """A speculative reader of history without lag: the blocks behind p go on from the compressed ones."""
    unit, past = rule.unit, rule.past
    return lambda bits: leading(bits) * unit - past


def _reach_of_sinks(rule: GroupRule) -> Reach:
    """Until all sinks are there, a position needs them up to itself."""
    unit, sink = rule.unit, rule.sink
    whole = ones(-(-sink // unit))

    def reach(bits: int) -> int:
        # Past any prompt: sinks that are there limit nothing.
        return 1 << 62 if bits & whole == whole else leading(bits) * unit

    return reach


def _snapshots(rule: GroupRule, grid: int) -> Run:
    stride = grid // rule.unit

    def erode(bits: int, base: int, top: int) -> int:
        return gather(bits >> (base * stride - 1) if base else bits << 1, stride, top - base + 1)

    return Run(("snapshot", rule.unit), erode, lambda bits, k: bool(bits >> (k * stride - 1) & 1))


def _aligned(rule: GroupRule, grid: int) -> Run:
    """A run of the same number of blocks at every grid position."""
    high = -(-rule.past // rule.unit)
    length = high - rule.run_start(0) // rule.unit
    stride = grid // rule.unit

    def erode(bits: int, base: int, top: int) -> int:
        last = top * stride + high
        if bits.bit_length() > 2 * last + 64:
            bits &= ones(last)
        width = min(length, last)
        first = base * stride + high - width
        if first >= 0:
            return gather(runs(bits >> first, width), stride, top - base + 1)
        # Objects before the first count as present: a window at the start of a prompt is short.
        return gather(runs(bits << -first | ones(-first), width), stride, top - base + 1)

    def probe(bits: int, k: int) -> bool:
        last = k * stride + high
        width = min(length, last)
        return not ones(width) & ~(bits >> (last - width))

    return Run(("blocks", rule.unit, high, length), erode, probe)


def _ragged(rule: GroupRule, grid: int) -> Run:
    """A run whose blocks differ from one grid position to the next."""
    unit = rule.unit

    def erode(bits: int, base: int, top: int) -> int:
        positions = np.arange(base, top + 1, dtype=np.int64) * grid
        first, end = rule.run_start(positions), positions + rule.past
        high = np.where(first < end, -(-end // unit), 0)
        low = np.minimum(np.maximum(first // unit, 0), high)
        origin, objects = int(low.min()), int(high.max())
        held = np.zeros(objects - origin + 1, np.int64)
        np.cumsum(unpacked(octets_of(bits >> origin, objects - origin))[: objects - origin], out=held[1:])
        return packed(held[high - origin] - held[low - origin] == high - low)

    def probe(bits: int, k: int) -> bool:
        first, end = rule.run_start(k * grid), k * grid + rule.past
        low = max(0, first // unit)
        return first >= end or not ones(-(-end // unit) - low) & ~(bits >> low)

    return Run(rule, erode, probe)


class Erosion:
    """A model's rules with the erosion of each group: what the questions below share.

    ``reaches`` and ``runs`` are the same conditions sorted for the case that every family is held
    in one revision: (group, reach), and a run with all the groups of its shape. ``anchors`` need at
    any grid position an object that it lies in; ``near`` are those of them without a reach, with
    their units.
    """

    def __init__(self, model: ModelSpec) -> None:
        rules = rules_of(model)
        self.rules: Rules = rules
        self.groups = tuple(group_erosion(rule, rules.grid) for rule in rules.groups)
        self.anchors = tuple(i for i, rule in enumerate(rules.groups) if _anchors(rule, rules.grid))
        self.anchored = bool(self.anchors)
        self.near = tuple((i, rules.groups[i].unit) for i in self.anchors if not rules.groups[i].prefix)
        self.reaches = tuple((i, group.reach) for i, group in enumerate(self.groups) if group.reach is not None)
        alike: dict[Hashable, tuple[Run, list[int]]] = {}
        for i, group in enumerate(self.groups):
            if group.run is not None:
                alike.setdefault(group.run.shape, (group.run, []))[1].append(i)
        self.runs = tuple((run, tuple(members)) for run, members in alike.values())
        self.units = tuple(rule.unit for rule in rules.groups)


def _anchors(rule: GroupRule, grid: int) -> bool:
    """Whether a resume at any grid position p > 0 needs an object of the group that p itself lies in.

    With one such group no hit can pass what the hashes promise.
    """
    if rule.state:
        return True
    if rule.prefix:
        return rule.lag == 0 and grid % rule.ratio == 0
    return rule.window > 1 or rule.overlap > 0


erosion_of = PerModel(Erosion)


def top_position(rules: Rules, n: int, promised: int | None) -> int:
    """Index of the last grid position any answer may have: p + past <= n - 1 and p <= `promised`."""
    room = (n - 1 - rules.past) // rules.grid
    return room if promised is None else min(room, promised // rules.grid)


def present(rule: GroupRule, bits: int, n: int) -> int:
    """The objects that end within the prompt's n tokens: only those can match its digests."""
    whole = n // rule.unit
    return bits if bits.bit_length() <= whole else bits & ones(whole)


def revisions_of(family: tuple[int, ...], evidence: Sequence[GroupEvidence]) -> list[int]:
    """The revisions any object of the family is usable in, highest first."""
    return sorted({r for i in family for r, bits in evidence[i].usable.items() if bits}, reverse=True)


def any_revision(held: GroupEvidence) -> int:
    """The objects usable in at least one revision."""
    bits = 0
    for more in held.usable.values():
        bits |= more
    return bits


def hash_tokens(model: ModelSpec, evidence: Sequence[GroupEvidence], n: int) -> int:
    """What the hashes alone promise for a prompt of n tokens.

    The largest grid position p <= n - 1 that lies in a block (its start excluded, its end
    included: the positions that the block's own match serves), or at a snapshot, of any group
    whose digest matches. 0 if there is none.
    """
    rules = rules_of(model)
    grid = rules.grid
    best = 0
    for rule, held in zip(rules.groups, evidence, strict=True):
        bits = present(rule, held.matched, n)
        if bits and min(bits.bit_length() * rule.unit, n - 1) > best:
            best = max(best, _promised(rule.unit, grid, bits, n))
    return best


def _promised(unit: int, grid: int, bits: int, n: int) -> int:
    """The largest grid position p <= n - 1 in one of the objects."""
    for _ in range(_TRIES):
        last = bits.bit_length()
        p = min(last * unit, n - 1) // grid * grid
        if p > (last - 1) * unit:
            return p
        # The last object holds no such position: go on with the one that the next lower position lies in.
        bits &= ones(-(-p // unit))
        if not bits:
            return 0
    positions = np.arange(1, (n - 1) // grid + 1, dtype=np.int64) * grid
    objects = -(-positions // unit) - 1
    matched = unpacked(octets_of(bits, int(objects[-1]) + 1))[objects].nonzero()[0]
    return int(positions[matched[-1]]) if matched.size else 0


_TRIES = 4
"""How often a next object is tried before all positions are looked at."""


def servable(model: ModelSpec, evidence: Sequence[GroupEvidence], n: int) -> int:
    """Bitmap over grid positions of a prompt of n tokens: bit k = position k * grid can be served.

    Bit 0 is always set: nothing is needed to compute from the start. Positions obey p <= n - 1
    (p + d * grid <= n - 1 with ``drop_last_blocks`` d) and never pass :func:`hash_tokens`.
    """
    erosion = erosion_of(model)
    rules = erosion.rules
    top = top_position(rules, n, None if erosion.anchored else hash_tokens(model, evidence, n))
    if top <= 0:
        return 1
    result = ones(top + 1)
    for i in rules.windows:
        result &= erosion.groups[i].serve(present(rules.groups[i], any_revision(evidence[i]), n), top, rules.grid)
    for family in rules.families:
        served = 0
        for revision in revisions_of(family, evidence) or (0,):
            under = result
            for i in family:
                under &= erosion.groups[i].serve(
                    present(rules.groups[i], evidence[i].usable.get(revision, 0), n), top, rules.grid
                )
            served |= under
        result = served
    return result


def usable_position(model: ModelSpec, evidence: Sequence[GroupEvidence], n: int) -> int:
    """The longest resume of a prompt of n tokens, in tokens; 0 if there is none.

    What :func:`servable` has on top, without the bitmaps of every group where one revision of each
    family is all there is.
    """
    erosion = erosion_of(model)
    grid = erosion.rules.grid
    held = _sole_revision(erosion, evidence, n)
    if held is None:
        return (servable(model, evidence, n).bit_length() - 1) * grid
    top = top_position(erosion.rules, n, None if erosion.anchored else hash_tokens(model, evidence, n))
    for i, reach in erosion.reaches:
        top = min(top, reach(held[i]) // grid)
    for i, unit in erosion.near:
        top = min(top, held[i].bit_length() * unit // grid)
    if top <= 0:
        return 0
    if all(run.probe(held[i], top) for run, members in erosion.runs for i in members):
        return top * grid
    # Most hits end near the last position that history allows: look there first.
    base = max(0, top - _NEAR)
    found = _runs_over(erosion, held, base, top)
    if found == 0 and base:
        base, found = 0, _runs_over(erosion, held, 0, base)
    return (base + max(0, found.bit_length() - 1)) * grid


_NEAR = 512
"""How many positions below the last possible one are eroded first."""


def _runs_over(erosion: Erosion, held: list[int], base: int, top: int) -> int:
    """The positions base..top that every run serves."""
    result = ones(top - base + 1)
    for run, members in erosion.runs:
        bits = held[members[0]]
        for i in members[1:]:
            bits &= held[i]
        result &= run.erode(bits, base, top)
        if not result:
            break
    return result


def _sole_revision(erosion: Erosion, evidence: Sequence[GroupEvidence], n: int) -> list[int] | None:
    """Each group's usable objects within the prompt; None where a family is held in several revisions."""
    held: list[int] = []
    sole: dict[int, int] = {}
    for unit, family, group in zip(erosion.units, erosion.rules.family_of, evidence, strict=True):
        usable = group.usable
        if len(usable) == 1:
            ((revision, bits),) = usable.items()
            if family is not None and sole.setdefault(family, revision) != revision:
                return None
        elif not usable:
            bits = 0
        elif family is None:
            bits = any_revision(group)
        else:
            return None
        whole = n // unit
        held.append(bits if bits.bit_length() <= whole else bits & ones(whole))
    return held


def holds(bits: int, ranges: tuple[range, ...]) -> bool:
    """Whether every object of the ranges has its bit."""
    return all(not ones(len(r)) & ~(bits >> r.start) for r in ranges)


def choose_revisions(model: ModelSpec, evidence: Sequence[GroupEvidence], p: int) -> tuple[int | None, ...]:
    """Per group, the revision to resume at p with: per family the highest that serves p.

    None for windows (nothing binds their revision), where p requires nothing of the group, and for
    a family that no revision serves. The evidence must hold only objects within the prompt.
    """
    rules = rules_of(model)
    required = needs_past(model, p)
    chosen: list[int | None] = [None] * len(required)
    for family in rules.families:
        if not any(required[i] for i in family):
            continue
        for revision in revisions_of(family, evidence):
            if all(holds(evidence[i].usable.get(revision, 0), required[i]) for i in family):
                for i in family:
                    chosen[i] = revision if required[i] else None
                break
    return tuple(chosen)
