"""Which objects a verb is about: the rules of ``store``, ``extend`` and of every way to name objects.

Index i of a group of blocks is the block of tokens [i * unit, (i + 1) * unit); of a group of
snapshots, the snapshot at position (i + 1) * unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...fabric.growth import retired_by_growth
from ...fabric.keeping import kept
from ...fabric.kinds import Form, ObjectKind
from ...fabric.model import GroupSpec, ModelSpec
from .story import Selected, Selection

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Picked:
    """Objects of one group, ascending, under one revision."""

    group: int
    indices: Indices
    revision: int = 0


def within(group: GroupSpec, start: int, end: int) -> range:
    """Blocks that lie wholly inside [start, end); snapshots at a position in (start, end]."""
    unit = group.unit_tokens
    first = start // unit if group.form is Form.STATE else -(-start // unit)
    return range(first, max(first, end // unit))


def selected(group: GroupSpec, how: Selected, tokens: int) -> Indices:
    """What a step names of one group, up to ``tokens``; positions beyond are ignored."""
    unit = group.unit_tokens
    if how.blocks is not None:
        named: Iterable[int] = how.blocks
    elif how.positions is not None:
        named = (p // unit - 1 for p in how.positions)
    elif how.tokens is not None:
        named = within(group, how.tokens[0], min(how.tokens[1], tokens))
    else:
        named = within(group, 0, tokens)
    return tuple(sorted({i for i in named if i >= 0 and (i + 1) * unit <= tokens}))


def stored(model: ModelSpec, tokens: int, groups: dict[str, Selection] | None) -> list[Picked]:
    """What a ``store`` over the first ``tokens`` tokens publishes."""
    if groups is None:
        return [Picked(g, tuple(indices)) for g, indices in enumerate(kept(model, tokens)) if indices]
    picked = []
    for name, how in groups.items():
        g = model.index_of(name)
        everything = how.blocks is None and how.tokens is None and how.positions is None
        indices = tuple(kept(model, tokens)[g]) if everything else selected(model.groups[g], how, tokens)
        if indices:
            picked.append(Picked(g, indices, how.revision))
    return sorted(picked, key=lambda p: p.group)


@dataclass(frozen=True, slots=True)
class Growth:
    """What a growing request publishes and what its commit retires."""

    publish: list[Picked]
    retire: list[Picked]


def extended(model: ModelSpec, start: int, end: int, revision: int) -> Growth:
    """A request that holds [0, start) grows to ``end``.

    It publishes the blocks of history and indexers that became whole, the whole tail and window as
    of ``end``, and the snapshots it passed; window and tail blocks that a resume at ``end`` does not
    need are retired.
    """
    publish, retire = [], []
    keeps = kept(model, end)
    outdated = retired_by_growth(model, end)
    for g, group in enumerate(model.groups):
        whole = range(end // group.unit_tokens)
        grows = group.form is Form.STATE or group.kind in (ObjectKind.COMPRESSED_HISTORY, ObjectKind.INDEXER)
        held = start // group.unit_tokens if grows else 0
        leaving = set(outdated[g])
        publish.append(Picked(g, tuple(i for i in whole[held:] if i in keeps[g] and i not in leaving), revision))
        retire.append(Picked(g, outdated[g]))
    return Growth([p for p in publish if p.indices], [p for p in retire if p.indices])
