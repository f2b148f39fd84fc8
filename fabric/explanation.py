"""Why a hit ends where it ends, and what would lengthen it: the answer behind ``explain``."""

from __future__ import annotations

from dataclasses import dataclass

from .expected import Expected
from .kinds import Cause, Form, ObjectKind, Reason, Status
from .messages import Acquire, Answer, Column
from .model import GroupSpec, ModelSpec
from .planner import View
from .rules import serve_limits, what_would_lengthen

_FORM_NAMES = {
    ObjectKind.COMPRESSED_HISTORY: "compressed",
    ObjectKind.UNCOMPRESSED_TAIL: "tail",
    ObjectKind.SLIDING_WINDOW: "window",
    ObjectKind.INDEXER: "indexed",
}


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """Up to where one group alone would let a request resume."""

    group: str
    kind: ObjectKind
    serves_tokens: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring objects of one group and shard, at one holder, that are alike.

    ``form``: compressed, tail, window, indexed or absent; a snapshot's stretch is the one token it
    stands at. ``tier``: ``memory``, ``disk`` or "" where absent. ``reason``: why it is no use.
    """

    group: str
    shard: int
    from_token: int
    to_token: int
    form: str
    tier: str
    holder: str
    incarnation: int
    revision: int | None
    versions: tuple[int, int] | None
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One prompt's answer taken apart.

    ``plan``: what was weighed where positions are chosen by cost, the chosen first; ``usable_tokens``
    what the rules allow; ``replay_from`` where computing begins if windows and tails are replayed.
    """

    status: Status
    tokens: int
    hash_tokens: int
    cause: Cause | None
    also: tuple[str, ...]
    limits: tuple[GroupLimit, ...]
    lengthen_to_tokens: int
    lengthen_groups: tuple[str, ...]
    stretches: tuple[Stretch, ...]
    usable_tokens: int = 0
    replay_from: int | None = None
    plan: tuple[Expected, ...] = ()

    @classmethod
    def of_answer(cls, model: ModelSpec, asked: Acquire, answer: Answer) -> Explanation:
        """From an answer to a question that bore ``explain``."""
        view = View(model, asked.prompt, asked.abis, asked.readers)
        for column in answer.columns:
            view.columns[column.holder, column.group, column.shard] = column
        view.evicted = dict(answer.evicted)
        view.unreachable = set(answer.unreachable)
        return cls.of(view, answer)

    @classmethod
    def of(cls, view: View, answer: Answer) -> Explanation:
        """From what the leader knew when it answered."""
        evidence = view.evidence()
        cut = what_would_lengthen(view.model, evidence, view.prompt.n)
        limits = tuple(
            GroupLimit(group.name, group.kind, limit)
            for group, limit in zip(view.model.groups, serve_limits(view.model, evidence, view.prompt.n), strict=True)
        )
        return cls(
            answer.status,
            answer.tokens,
            answer.hash_tokens,
            answer.cause,
            answer.also,
            limits,
            0 if cut is None else cut.target_tokens,
            () if cut is None else cut.groups,
            tuple(_stretches(view)),
            answer.usable_tokens,
            answer.replay_from,
            answer.plan,
        )


def _stretches(view: View) -> list[Stretch]:
    rows: list[Stretch] = []
    for index, group in enumerate(view.model.groups):
        count = view.prompt.n // group.unit_tokens
        for shard in range(view.model.shards):
            columns = [c for (_, g, s), c in view.columns.items() if (g, s) == (index, shard)]
            somewhere = 0
            for column in sorted(columns, key=lambda c: c.holder):
                somewhere |= column.memory | column.tier
                for _, _, bits in column.bad:
                    somewhere |= bits
                rows.extend(_of_column(group, shard, column, count, lost=column.holder in view.unreachable))
            absent = ((1 << count) - 1) & ~somewhere
            rows.extend(
                Stretch(group.name, shard, *_span(group, first, last), "absent", "", "", 0, None, None, None)
                for first, last in _runs_of(absent)
            )
    return rows


def _of_column(group: GroupSpec, shard: int, column: Column, count: int, *, lost: bool) -> list[Stretch]:
    inside = (1 << count) - 1
    rows = []
    kinds: list[tuple[int, str, Reason | None]] = [
        (column.memory, "memory", Reason.HOLDER_LOST if lost else None),
        (column.tier, "disk", Reason.HOLDER_LOST if lost else Reason.RESTORE_PENDING),
    ]
    kinds += [(bits, "disk" if from_tier else "memory", reason) for reason, from_tier, bits in column.bad]
    versions = [int.from_bytes(column.versions[i : i + 8], "little") for i in range(0, len(column.versions), 8)]
    for bits, tier, reason in kinds:
        for revision, of_revision in column.revisions.items():
            for first, last in _runs_of(bits & of_revision & inside):
                seen = None
                if tier == "memory" and reason is not Reason.CHECKSUM_MISMATCH and versions:
                    at = (column.memory & ((1 << first) - 1)).bit_count()
                    run = versions[at : at + last - first + 1]
                    seen = (min(run), max(run)) if run else None
                rows.append(
                    Stretch(
                        group.name,
                        shard,
                        *_span(group, first, last),
                        _FORM_NAMES[group.kind],
                        tier,
                        column.holder,
                        column.incarnation,
                        revision,
                        seen,
                        reason,
                    )
                )
    rows.sort(key=lambda row: row.from_token)
    return rows


def _span(group: GroupSpec, first: int, last: int) -> tuple[int, int]:
    """The tokens objects first..last cover; a snapshot stands at its position alone."""
    unit = group.unit_tokens
    if group.form is Form.STATE:
        return (first + 1) * unit - 1, (last + 1) * unit
    return first * unit, (last + 1) * unit


def _runs_of(bits: int) -> list[tuple[int, int]]:
    """Runs of set bits as (first, last)."""
    runs = []
    at = 0
    while bits:
        skip = (bits & -bits).bit_length() - 1
        at += skip
        bits >>= skip
        length = (~bits & (bits + 1)).bit_length() - 1
        runs.append((at, at + length - 1))
        at += length
        bits >>= length
    return runs
