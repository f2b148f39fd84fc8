"""Why a hit is as long as it is: the answer to one prompt with the one check that cut it.

Knock out one group at a time: the group whose constraint, lifted alone, lengthens the hit most is
the cause. Where no single group does, the groups that fail together are named: at the next grid position that
what matches would serve if it were usable, else at the very next. Making usable what is named, in the revision of the :class:`Cut`, lengthens the hit.

What binds groups of one family together is their revision, and that bond is the constraint of the
tail or indexer ("bears the revision of the block it indexes"), not of the history. So:

* lifting a tail or indexer lifts its presence and its revision;
* lifting a history group lifts its presence, and that it be of one revision; but where its blocks
  are there under another revision, its tails and indexers still contradict them, so such blocks
  count as missing for as long as a tail or indexer is needed;
* a cut is judged in the revision of the answer where it can be (a single lifted group: if the others
  serve the position reached in it, else the highest in which they do). Where nothing can be resumed,
  the revision of the answer is the highest.

A history block whose copies exist only under other revisions than the one judged is
``not_stored`` (in that revision) unless the evidence says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .bitmaps import leading, ones
from .erosion import (
    Erosion,
    any_revision,
    erosion_of,
    hash_tokens,
    holds,
    present,
    revisions_of,
    top_position,
)
from .evidence import GroupEvidence
from .kinds import INVALIDATING_REASONS, Cause, ObjectKind, Reason, Status, cause_of
from .model import ModelSpec
from .needs import GroupRule, Rules, rules_of

_ABSENT: dict[ObjectKind, Reason] = {
    ObjectKind.COMPRESSED_HISTORY: Reason.NOT_STORED,
    ObjectKind.UNCOMPRESSED_TAIL: Reason.TAIL_GAP,
    ObjectKind.SLIDING_WINDOW: Reason.WINDOW_INCOMPLETE,
    ObjectKind.INDEXER: Reason.INDEX_ABSENT,
}
"""What a missing block is called; a missing snapshot is ``snapshot_absent`` whatever its kind."""

_OF_ANOTHER_REVISION: dict[ObjectKind, Reason] = {
    ObjectKind.UNCOMPRESSED_TAIL: Reason.TAIL_GAP,
    ObjectKind.INDEXER: Reason.INDEX_STALE,
}


def absent_reason(kind: ObjectKind, *, state: bool) -> Reason:
    """What a missing object of this kind is called; ``state``: it is a snapshot."""
    return Reason.SNAPSHOT_ABSENT if state else _ABSENT[kind]


def stale_reason(kind: ObjectKind, *, state: bool) -> Reason:
    """What an object is called that is there under another revision than its family's."""
    return _OF_ANOTHER_REVISION.get(kind) or absent_reason(kind, state=state)


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the rules allow for one prompt.

    ``tokens`` is the resume position p, ``hash_tokens`` what the hashes alone promised;
    ``revisions`` per group the revision chosen at p (None for windows and where nothing is
    needed). ``cause`` is None for FULL_HIT and MISS, and where only ``limit_tokens`` cut.
    ``tokens_lost_to_alignment`` counts the tokens between p and the longest resume below the next
    grid position that the rules would allow if only the grid did not forbid it.
    """

    tokens: int
    hash_tokens: int
    revisions: tuple[int | None, ...]
    status: Status
    cause: Cause | None = None
    also: tuple[str, ...] = ()
    tokens_lost_to_alignment: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """What stands between a prompt and a longer hit.

    Making usable, for each of ``groups``, what it needs at ``target_tokens`` in the revision of the
    same place in ``revisions`` (None: any) lengthens the hit to that position. ``cause`` speaks of
    the first group. With the reason ``off_grid`` nothing that can be stored lengthens it, and
    ``target_tokens`` is 0.
    """

    cause: Cause
    target_tokens: int
    groups: tuple[str, ...]
    revisions: tuple[int | None, ...]


class Table:
    """Every group's serve bitmap in every revision, for one prompt."""

    def __init__(self, erosion: Erosion, evidence: Sequence[GroupEvidence], n: int, top: int) -> None:
        self.erosion, self.rules, self.evidence, self.n, self.top = erosion, erosion.rules, evidence, n, top
        self.mask = ones(top + 1)
        self.revisions = [revisions_of(family, evidence) or [0] for family in self.rules.families]
        self.by_window = {i: self.serve(i, any_revision(evidence[i])) for i in self.rules.windows}
        self.by_member = [
            [{i: self.serve(i, evidence[i].usable.get(r, 0)) for i in family} for r in revisions]
            for family, revisions in zip(self.rules.families, self.revisions, strict=True)
        ]
        self.by_family = [_either([_both(list(row.values()), self.mask) for row in rows]) for rows in self.by_member]
        self.served = _both([*self.by_window.values(), *self.by_family], self.mask)
        self.chosen = self.chosen_at(self.served.bit_length() - 1)

    def chosen_at(self, k: int) -> list[int]:
        """Per family, the highest revision in which it serves grid position k."""
        return [
            next(r for r, row in zip(revisions, rows, strict=True) if all(served >> k & 1 for served in row.values()))
            for revisions, rows in zip(self.revisions, self.by_member, strict=True)
        ]

    def serve(self, group: int, bits: int) -> int:
        """The grid positions that a group serves with these of its objects."""
        bits = present(self.rules.groups[group], bits, self.n)
        return self.erosion.groups[group].serve(bits, self.top, self.rules.grid)

    def bits(self, group: int, revision: int | None) -> int:
        """The group's usable objects within the prompt, in a revision or (None) in any."""
        held = self.evidence[group]
        bits = any_revision(held) if revision is None else held.usable.get(revision, 0)
        return present(self.rules.groups[group], bits, self.n)

    def lifted(self, f: int, member: int) -> tuple[list[int], int]:
        """What family f serves with one member's constraint lifted: per revision, and regardless of it."""
        family, rows = self.rules.families[f], self.by_member[f]
        others = [_both([row[i] for i in family if i != member], self.mask) for row in rows]
        if member != self.rules.histories[f] or len(family) == 1 or len(rows) == 1:
            return others, 0
        elsewhere = self.bits(member, None)
        span = ones((self.top * self.rules.grid + self.rules.past) // self.rules.groups[member].unit + 1)
        uncontradicted = [
            served
            & self.erosion.groups[member].serve(span & ~elsewhere | self.bits(member, r), self.top, self.rules.grid)
            for served, r in zip(others, self.revisions[f], strict=True)
        ]
        idle = _both(
            [self.erosion.groups[i].serve(0, self.top, self.rules.grid) for i in family if i != member], self.mask
        )
        return uncontradicted, idle


def _both(maps: Sequence[int], mask: int) -> int:
    for more in maps:
        mask &= more
    return mask


def _either(maps: Sequence[int]) -> int:
    served = 0
    for more in maps:
        served |= more
    return served


def _knocked_out(table: Table) -> Cut | None:
    """The group whose constraint, lifted alone, lengthens the hit most; None if none does."""
    best = table.served.bit_length() - 1
    found: tuple[int, int | None] | None = None
    factors = [*table.by_window.values(), *table.by_family]
    for group, f, factor in _places(table.rules):
        rest = _both(factors[:factor] + factors[factor + 1 :], table.mask)
        by_revision, idle = ([rest], 0) if f is None else table.lifted(f, group)
        top = (rest & (_either(by_revision) | idle)).bit_length() - 1
        if top > best:
            best = top
            found = group, _revision_at(table, f, by_revision, idle, top)
    if found is None:
        return None
    return _cut(table, best, [found])


def _places(rules: Rules) -> list[tuple[int, int | None, int]]:
    """In model order: (group, its family or None for a window, its factor in the product)."""
    places: list[tuple[int, int | None, int]] = [(i, None, at) for at, i in enumerate(rules.windows)]
    for f, family in enumerate(rules.families):
        places += [(i, f, len(rules.windows) + f) for i in family]
    return sorted(places)


def _revision_at(table: Table, f: int | None, by_revision: list[int], idle: int, top: int) -> int | None:
    """The revision in which a lifted group lets its family serve grid position `top`."""
    if f is None:
        return None
    serving = [r for r, served in zip(table.revisions[f], by_revision, strict=True) if (served | idle) >> top & 1]
    answer = table.chosen[f]
    return answer if answer in serving else serving[0]


def _failing(table: Table, k: int) -> list[tuple[int, int | None]]:
    """The groups that cannot serve grid position k, in model order, with the revision judged."""
    failing: list[tuple[int, int | None]] = [(i, None) for i, served in table.by_window.items() if not served >> k & 1]
    for revision, revisions, rows in zip(table.chosen, table.revisions, table.by_member, strict=True):
        row = rows[revisions.index(revision)]
        failing += [(i, revision) for i, served in row.items() if not served >> k & 1]
    return sorted(failing, key=lambda pair: pair[0])


def _cut(table: Table, k: int, named: list[tuple[int, int | None]]) -> Cut:
    """The cut at grid position k that the named groups make; the first one's first gap gives the reason."""
    rules = table.rules
    group, revision = named[0]
    reason, from_tier = _reason(table, group, revision, k * rules.grid)
    return Cut(
        cause=cause_of(rules.names[group], rules.groups[group].kind, reason, from_tier=from_tier),
        target_tokens=k * rules.grid,
        groups=tuple(rules.names[i] for i, _ in named),
        revisions=tuple(r for _, r in named),
    )


def _reason(table: Table, group: int, revision: int | None, p: int) -> tuple[Reason, bool]:
    """Why the first object that the group needs at p, and lacks, is not usable."""
    rule, held = table.rules.groups[group], table.evidence[group]
    bits = table.bits(group, revision)
    for needed in rule.ranges(p, rule.past):
        missing = ones(len(needed)) & ~(bits >> needed.start)
        if not missing:
            continue
        lost = needed.start + leading(~missing & ones(len(needed) + 1))
        for blocked in held.blocked:
            if blocked.bits >> lost & 1:
                return blocked.reason, blocked.from_tier
        if any_revision(held) >> lost & 1:
            return stale_reason(rule.kind, state=rule.state), False
        break
    return absent_reason(rule.kind, state=rule.state), False


def _next_matched(table: Table, k: int) -> int:
    """The next grid position behind k that all that matches would serve, were it usable; k + 1 where there is none.

    Snapshots and windows are kept at few positions: where those are barred, that nothing was ever stored at the
    positions between says nothing.
    """
    served = _both([table.serve(i, held.matched) for i, held in enumerate(table.evidence)], table.mask) >> (k + 1)
    return k + (served & -served).bit_length() if served else k + 1


def _off_grid(rules: Rules, named: list[tuple[int, int | None]]) -> Cut:
    named = named or [(0, None)]
    group = named[0][0]
    return Cut(
        cause=cause_of(rules.names[group], rules.groups[group].kind, Reason.OFF_GRID),
        target_tokens=0,
        groups=tuple(rules.names[i] for i, _ in named),
        revisions=tuple(r for _, r in named),
    )


def cut_of(table: Table, promised: int) -> Cut | None:
    """What cut the hit; None for a full hit and where nothing matches at all."""
    rules, evidence, n = table.rules, table.evidence, table.n
    k = table.served.bit_length() - 1
    room = (n - 1 - rules.past) // rules.grid
    if promised == 0:
        within = [present(rule, held.matched, n - 1) for rule, held in zip(rules.groups, evidence, strict=True)]
        if not any(within):
            return None
        if room < 1:
            return _off_grid(rules, [])
        return _off_grid(rules, _failing(Table(table.erosion, evidence, n, 1), 1))
    if k * rules.grid == promised:
        return None
    if k >= room:
        return _off_grid(rules, [])
    alone = _knocked_out(table)
    if alone is not None:
        return alone
    at = _next_matched(table, k)
    return _cut(table, at, _failing(table, at))


def resolve(
    model: ModelSpec, evidence: Sequence[GroupEvidence], n: int, *, limit_tokens: int | None = None
) -> Resolution:
    """The longest resume of a prompt of n tokens, its status and the cause of the cut.

    ``limit_tokens`` caps the position after a limit from outside (room, a refused pin) without
    changing ``hash_tokens``; if it is what cuts, ``cause`` is None and for the caller to name.
    Statuses are FULL_HIT, PARTIAL_HIT, INVALID and MISS: whether a recovery is awaited is not
    known here.
    """
    rules = rules_of(model)
    table, promised = _resolved(model, evidence, n)
    served = table.served
    if limit_tokens is not None and limit_tokens < (served.bit_length() - 1) * rules.grid:
        k = (served & ones(max(0, limit_tokens) // rules.grid + 1)).bit_length() - 1
        return Resolution(k * rules.grid, promised, _chosen(table, k), Status.PARTIAL_HIT)
    k = served.bit_length() - 1
    tokens = k * rules.grid
    cut = cut_of(table, promised)
    lost = _lost_to_alignment(table, k)
    if cut is None:
        status = Status.FULL_HIT if tokens else Status.MISS
        return Resolution(tokens, promised, _chosen(table, k), status, tokens_lost_to_alignment=lost)
    invalid = tokens == 0 and cut.cause.reason in INVALIDATING_REASONS
    return Resolution(
        tokens,
        promised,
        _chosen(table, k),
        Status.INVALID if invalid else Status.PARTIAL_HIT,
        cut.cause,
        cut.groups[1:],
        lost,
    )


def _chosen(table: Table, k: int) -> tuple[int | None, ...]:
    """Per group, the revision to resume with at grid position k."""
    chosen: list[int | None] = [None] * len(table.rules.groups)
    if k:
        for family, revision in zip(table.rules.families, table.chosen_at(k), strict=True):
            for i in family:
                rule = table.rules.groups[i]
                if rule.ranges(k * table.rules.grid, rule.past):
                    chosen[i] = revision
    return tuple(chosen)


LOSSES_TRIED_MAX = 256
"""How many positions between two of the grid are tried, from the last that presence allows downwards."""


def _lost_to_alignment(table: Table, k: int) -> int:
    """Tokens from grid position k to the longest resume before the next one that only the grid forbids."""
    rules = table.rules
    start, step = k * rules.grid, rules.finest
    if step >= rules.grid:
        return 0
    matched = max(
        present(rule, held.matched, table.n).bit_length() * rule.unit
        for rule, held in zip(rules.groups, table.evidence, strict=True)
    )
    end = min(start + rules.grid - 1, table.n - 1 - rules.past, matched)
    for i, reach in table.erosion.reaches:
        family = rules.family_of[i]
        revisions: Sequence[int | None] = (None,) if family is None else table.revisions[family]
        end = min(end, max(reach(table.bits(i, revision)) for revision in revisions))
    for i, unit in table.erosion.near:
        end = min(end, (table.bits(i, None) & ones(-(-end // unit))).bit_length() * unit)
    choices = _choices(table)
    for p in range(end - end % step, start, -step)[:LOSSES_TRIED_MAX]:
        refused = next((at for at, choice in enumerate(choices) if not _any_serves(choice, p)), None)
        if refused is None:
            return p - start
        # What refuses one position mostly refuses the next one too.
        choices.insert(0, choices.pop(refused))
    return 0


_Held = list[tuple[GroupRule, int]]
"""Rules with the bits they are asked of, in one revision."""


def _choices(table: Table) -> list[list[_Held]]:
    """Per window and per family the revisions to choose from, the cheaper rules of a family first."""
    rules = table.rules
    choices = [[[(rules.groups[i], table.bits(i, None))]] for i in rules.windows]
    for family, revisions in zip(rules.families, table.revisions, strict=True):
        members = sorted(family, key=lambda i: rules.groups[i].prefix)
        choices.append([[(rules.groups[i], table.bits(i, r)) for i in members] for r in revisions])
    return choices


def _any_serves(choice: list[_Held], p: int) -> bool:
    return any(all(holds(bits, rule.ranges(p, rule.past)) for rule, bits in held) for held in choice)


def _resolved(model: ModelSpec, evidence: Sequence[GroupEvidence], n: int) -> tuple[Table, int]:
    """The table of a prompt, over the positions that any answer may have, and what hashes promise."""
    erosion = erosion_of(model)
    promised = hash_tokens(model, evidence, n)
    return Table(erosion, evidence, n, max(0, top_position(erosion.rules, n, promised))), promised


def what_would_lengthen(model: ModelSpec, evidence: Sequence[GroupEvidence], n: int) -> Cut | None:
    """What must be made usable for a longer hit; None for a full hit and where nothing matches."""
    table, promised = _resolved(model, evidence, n)
    return cut_of(table, promised)


def serve_limits(model: ModelSpec, evidence: Sequence[GroupEvidence], n: int) -> tuple[int, ...]:
    """Per group, the longest resume it alone would allow (all others lifted), in tokens.

    In the best of its revisions; at most the last grid position that leaves a token to compute.
    """
    erosion = erosion_of(model)
    rules = erosion.rules
    top = top_position(rules, n, None)
    if top <= 0:
        return (0,) * len(rules.groups)
    table = Table(erosion, evidence, n, top)
    limits = [0] * len(rules.groups)
    for i, served in table.by_window.items():
        limits[i] = served.bit_length() - 1
    for family, rows in zip(rules.families, table.by_member, strict=True):
        for i in family:
            limits[i] = max(row[i].bit_length() - 1 for row in rows)
    return tuple(k * rules.grid for k in limits)
