"""Erosion: from which positions could a prompt resume, over all positions at once.

Every group's presence is one Python int (bit i = object i). Its rule turns that into a bitmap over
grid positions (bit k = position k * grid can be served): history by its leading ones, a window by
shift-and-AND in doubling steps, a snapshot by itself. The AND of all groups is exact, in one pass;
its top bit is the longest resume.

Groups whose blocks do not line up with the grid (endpoints finer than blocks, a tail whose need
changes from one grid position to the next) are eroded by a prefix sum over the missing blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .evidence import GroupEvidence
from .kinds import ObjectKind
from .model import ModelSpec
from .needs import GroupRule, PerModel, Rules, needs_past, rules_of

Serve = Callable[[int, int], int]
"""(bits of one group, top) -> bitmap over grid positions 0..top; bit 0 is always set."""


def ones(count: int) -> int:
    """The `count` lowest bits set; 0 for a count below 1."""
    return (1 << count) - 1 if count > 0 else 0


def leading(bits: int) -> int:
    """How many objects are present from the start without a gap."""
    return (bits ^ (bits + 1)).bit_length() - 1


def gather(bits: int, stride: int, count: int) -> int:
    """Every stride-th bit, from bit 0, `count` of them."""
    if stride == 1:
        return bits & ones(count)
    length = -(-stride * count // 8)
    whole = bits & ones(8 * length)
    octets = np.frombuffer(whole.to_bytes(length, "little"), np.uint8)
    picked = octets[:: stride // 8] & 1 if stride % 8 == 0 else np.unpackbits(octets, bitorder="little")[::stride]
    return int.from_bytes(np.packbits(picked[:count], bitorder="little").tobytes(), "little")


def runs(bits: int, width: int) -> int:
    """Bit i of the answer: the `width` objects that end just before object i are all present.

    Objects before the first count as present: a window at the start of a prompt is short.
    """
    run = bits << width | ones(width)
    have = 1
    while have < width:
        step = min(have, width - have)
        run &= run >> step
        have += step
    return run


def serve_of(rule: GroupRule, grid: int) -> Serve:
    """The erosion of one group under its rule, chosen once from how its objects meet the grid."""
    if rule.state:
        return _snapshots(rule, grid)
    parts: list[Serve] = []
    # Whether the blocks behind p go on from where the compressed ones end.
    contiguous = rule.prefix and rule.lag == 0 and (rule.unit % rule.ratio == 0 or grid % rule.ratio == 0)
    if rule.prefix:
        parts.append(_prefix(rule, grid, contiguous))
    elif rule.sink:
        parts.append(_sinks(rule, grid))
    if not contiguous and (rule.past or (not rule.prefix and _ever_runs(rule, grid))):
        period = grid if rule.kind is not ObjectKind.UNCOMPRESSED_TAIL else _lcm_of(grid, rule.ratio)
        aligned = grid % rule.unit == 0 and period == grid
        parts.append(_aligned_run(rule, grid) if aligned else _ragged_run(rule, grid))
    if not parts:
        return lambda _bits, top: ones(top + 1)
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    return lambda bits, top: first(bits, top) & second(bits, top)


def _lcm_of(a: int, b: int) -> int:
    return int(np.lcm(a, b)) if a < 1 << 31 and b < 1 << 31 else a * b


def _ever_runs(rule: GroupRule, grid: int) -> bool:
    """Whether a window or tail ever needs raw tokens at a grid position."""
    if rule.kind is ObjectKind.SLIDING_WINDOW:
        return rule.window > 1
    return bool(rule.overlap or rule.lag or grid % rule.ratio)


def _snapshots(rule: GroupRule, grid: int) -> Serve:
    stride = grid // rule.unit

    def serve(bits: int, top: int) -> int:
        return gather(bits << 1 | 1, stride, top + 1)

    return serve


def _prefix(rule: GroupRule, grid: int, contiguous: bool) -> Serve:
    """History and indexer: the compressed count may not pass the first missing block.

    Positions up to ratio - 1 (and lag) past the last block have the same compressed count as its
    end. A speculative reader of a history without lag wants the blocks behind p too: they go on
    from where the compressed ones end.
    """
    unit, ratio, past = rule.unit, rule.ratio, rule.past
    slack = ratio - 1 + rule.lag

    def serve(bits: int, top: int) -> int:
        held = leading(bits) * unit
        reached = held - past if contiguous and past else held - held % ratio + slack
        return ones(min(reached // grid, top) + 1) | 1

    return serve


def _sinks(rule: GroupRule, grid: int) -> Serve:
    unit, sink = rule.unit, rule.sink

    def serve(bits: int, top: int) -> int:
        held = leading(bits) * unit
        return ones((top if held >= sink else min(top, held // grid)) + 1)

    return serve


def _run_bounds(rule: GroupRule, p: int) -> tuple[int, int]:
    """Tokens [first, end) that must lie in present blocks at p, beside prefix and sinks.

    `first` may be below 0 and is then periodic in p, which the erosion relies on.
    """
    if rule.prefix:
        return p, p + rule.past
    if rule.kind is ObjectKind.SLIDING_WINDOW:
        return p - rule.window + 1, p + rule.past
    reached = p - rule.lag
    return reached - reached % rule.ratio - rule.overlap, p + rule.past


def _aligned_run(rule: GroupRule, grid: int) -> Serve:
    """A run of the same number of blocks at every grid position."""
    first, end = _run_bounds(rule, 0)
    low, high = first // rule.unit, -(-end // rule.unit)
    stride = grid // rule.unit

    def serve(bits: int, top: int) -> int:
        width = min(high - low, top * stride + high)
        return gather(runs(bits, width) >> high, stride, top + 1) | 1

    return serve


def _ragged_run(rule: GroupRule, grid: int) -> Serve:
    """A run whose blocks differ from one grid position to the next."""
    unit = rule.unit

    def serve(bits: int, top: int) -> int:
        p = np.arange(top + 1, dtype=np.int64) * grid
        first, end = _run_bounds_of(rule, p)
        high = np.where(first < end, -(-end // unit), 0)
        low = np.minimum(np.maximum(first // unit, 0), high)
        objects = int(high[-1] if top == 0 else high.max())
        length = -(-objects // 8) or 1
        octets = np.frombuffer((bits & ones(8 * length)).to_bytes(length, "little"), np.uint8)
        held = np.zeros(objects + 1, np.int64)
        np.cumsum(np.unpackbits(octets, bitorder="little")[:objects], out=held[1:])
        served = held[high] - held[low] == high - low
        return int.from_bytes(np.packbits(served, bitorder="little").tobytes(), "little") | 1

    return serve


def _run_bounds_of(rule: GroupRule, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """:func:`_run_bounds` over an array of positions: plain arithmetic, so it is the same code."""
    first, end = _run_bounds(rule, p)  # type: ignore[arg-type]
    return np.asarray(first), np.asarray(end)


class Erosion:
    """A model's rules with the erosion of each group: what the questions below share."""

    def __init__(self, model: ModelSpec) -> None:
        rules = rules_of(model)
        self.rules: Rules = rules
        self.serve: tuple[Serve, ...] = tuple(serve_of(rule, rules.grid) for rule in rules.groups)
        self.anchored = any(_anchored(rule, rules.grid) for rule in rules.groups)


def _anchored(rule: GroupRule, grid: int) -> bool:
    """Whether a resume at any p > 0 needs an object that p itself lies in: no hit can pass the hashes."""
    if rule.state:
        return True
    if rule.prefix:
        return rule.lag == 0 and grid % rule.ratio == 0
    return _ever_runs(rule, grid) and (rule.kind is ObjectKind.SLIDING_WINDOW or rule.overlap > 0)


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
        while bits:
            last = bits.bit_length()
            promised = min(last * rule.unit, n - 1) // grid * grid
            if promised <= best:
                break
            if promised > (last - 1) * rule.unit:
                best = promised
                break
            bits &= ones(-(-promised // rule.unit))
    return best


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
        result &= erosion.serve[i](present(rules.groups[i], any_revision(evidence[i]), n), top)
    for family in rules.families:
        served = 0
        for revision in revisions_of(family, evidence) or (0,):
            under = result
            for i in family:
                under &= erosion.serve[i](present(rules.groups[i], evidence[i].usable.get(revision, 0), n), top)
            served |= under
        result = served
    return result


def usable_position(model: ModelSpec, evidence: Sequence[GroupEvidence], n: int) -> int:
    """The longest resume of a prompt of n tokens, in tokens; 0 if there is none."""
    return (servable(model, evidence, n).bit_length() - 1) * rules_of(model).grid


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
