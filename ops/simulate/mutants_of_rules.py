"""Mistakes in what a resume needs and in which copies may serve it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...fabric import choosing, needs, planner, replay, validation
from ...fabric.evidence import GroupEvidence
from ...fabric.kinds import Layer, ObjectKind, Reason
from ...fabric.model import GroupSpec, ModelSpec
from ...fabric.needs import GroupRule
from ...fabric.passport import abi_refusal
from ...fabric.rules import resolve
from .patches import Patches

NEVER_TOKENS = 1 << 29
"""A lag no prompt outgrows: nothing is compressed, nothing of the history is needed."""


def passport(patches: Patches) -> None:
    """Every layout fits."""

    def fits(*_: Any) -> None:
        return None

    patches.everywhere(abi_refusal, fits)


def alignment(patches: Patches) -> None:
    """The last layer passes everything."""

    def passed(*_: Any, **__: Any) -> validation.Verdict:
        return validation.Verdict(Layer.ALIGNMENT)

    patches.put(validation, "alignment", passed)


# --- what a position needs -----------------------------------------------------------------------


def _rule(patches: Patches, change: Callable[[ModelSpec, GroupSpec, GroupRule], GroupRule]) -> None:
    """Change the rule of each group where it is made, once for planner, erosion and prover."""
    original = needs.group_rule

    def changed(model: ModelSpec, group: GroupSpec) -> GroupRule:
        return change(model, group, original(model, group))

    patches.everywhere(original, changed)


def replay_short(patches: Patches) -> None:
    """A replay begins one token late."""
    honest = vars(replay)["_exact"]
    patches.put(replay, "_exact", lambda model: honest(model) - 1)


def replay_sinks(patches: Patches) -> None:
    """A replay needs no sinks."""
    honest = vars(replay)["_needing_nothing"]
    patches.put(replay, "_needing_nothing", lambda group: honest(group).model_copy(update={"sink_tokens": 0}))


def replay_for_graphs(patches: Patches) -> None:
    """A graph that replays kernels replays windows too."""
    honest = choosing.choose

    def choose(view: Any, found: Any, planning: Any, terms: choosing.Terms) -> Any:
        return honest(view, found, planning, replace(terms, replays=True))

    patches.everywhere(honest, choose)


def overlap_optional(patches: Patches) -> None:
    """A tail is what lies behind the last compressed entry."""
    _rule(patches, lambda _, __, rule: replace(rule, overlap=0))


def half_block(patches: Patches) -> None:
    """A history is compressed block by block: its last, half-needed block is not asked for."""

    def change(_: ModelSpec, __: GroupSpec, rule: GroupRule) -> GroupRule:
        return replace(rule, ratio=rule.unit) if rule.prefix else rule

    _rule(patches, change)


def any_group(patches: Patches) -> None:
    """The first group decides; the others need nothing."""

    def change(model: ModelSpec, group: GroupSpec, rule: GroupRule) -> GroupRule:
        if group.name == model.groups[0].name:
            return rule
        if rule.kind in (ObjectKind.COMPRESSED_HISTORY, ObjectKind.INDEXER):
            return replace(rule, state=False, lag=NEVER_TOKENS)
        return replace(rule, state=False, lag=0, ratio=1, overlap=0, window=1, sink=0)

    _rule(patches, change)


# --- which copies serve ----------------------------------------------------------------------------


def _evidence(patches: Patches, change: Callable[[ModelSpec, list[GroupEvidence]], list[GroupEvidence]]) -> None:
    original = planner.View.evidence

    def changed(view: planner.View, *, tiers: bool = True, transport: bool = True) -> list[GroupEvidence]:
        return change(view.model, original(view, tiers=tiers, transport=transport))

    patches.put(planner.View, "evidence", changed)


def _of_any_revision(patches: Patches, kind: ObjectKind) -> None:
    """Objects of this kind count in every revision, and none is asked of them."""

    def change(model: ModelSpec, evidence: list[GroupEvidence]) -> list[GroupEvidence]:
        revisions = {r for held in evidence for r in held.usable}
        changed = []
        for spec, held in zip(model.groups, evidence, strict=True):
            bits = 0
            for usable in held.usable.values():
                bits |= usable
            free = spec.kind is kind and bits
            changed.append(replace(held, usable=dict.fromkeys(revisions, bits)) if free else held)
        return changed

    _evidence(patches, change)
    original = resolve

    def changed_resolve(model: ModelSpec, evidence: Sequence[GroupEvidence], n: int, **limits: Any) -> Any:
        found = original(model, evidence, n, **limits)
        revisions = [None if spec.kind is kind else r for spec, r in zip(model.groups, found.revisions, strict=True)]
        return replace(found, revisions=tuple(revisions))

    patches.everywhere(original, changed_resolve)


def index_revision(patches: Patches) -> None:
    """The indexer need not be that of the history."""
    _of_any_revision(patches, ObjectKind.INDEXER)


def tail_revision(patches: Patches) -> None:
    """The tail need not be joined to the history."""
    _of_any_revision(patches, ObjectKind.UNCOMPRESSED_TAIL)


def window_by_length(patches: Patches) -> None:
    """Window blocks somewhat before the position count as those at the position."""

    def change(model: ModelSpec, evidence: list[GroupEvidence]) -> list[GroupEvidence]:
        def near(spec: GroupSpec, held: GroupEvidence) -> GroupEvidence:
            if spec.kind is not ObjectKind.SLIDING_WINDOW:
                return held
            return replace(held, usable={r: b | b << 1 | b << 2 | b << 3 for r, b in held.usable.items()})

        return [near(spec, held) for spec, held in zip(model.groups, evidence, strict=True)]

    _evidence(patches, change)
    original = validation.intersection

    def intersection(*args: Any, **named: Any) -> validation.Verdict:
        verdict = original(*args, **named)
        window = verdict.reason in (Reason.WINDOW_INCOMPLETE, Reason.SNAPSHOT_ABSENT)
        return validation.Verdict(Layer.INTERSECTION) if window else verdict

    patches.put(validation, "intersection", intersection)
