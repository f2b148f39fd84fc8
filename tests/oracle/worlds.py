"""Random models and worlds for the oracle's properties, valid by construction.

A world is made as real ones are: every group is stored up to some position, then a few objects are
lost, evicted, damaged or stored again under another revision. So most examples grant something, and
most are cut by one or two objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

from hypothesis import strategies as st

from .oracle import HISTORY, INDEXER, TAIL, WINDOW, Copy, Group, World

UNITS = ((1, 2, 3, 4, 6), (2, 4, 8, 16), (3, 4, 6, 12), (4, 5, 10), (2, 3, 8))
"""Units a model mixes: unequal, some not dividing each other, their common multiple at most 24."""

TROUBLES = (
    Copy(0, "checksum_mismatch"),
    Copy(0, "checksum_mismatch", on_disk=True),
    Copy(0, "abi_mismatch"),
    Copy(0, "abi_mismatch", on_disk=True),
    Copy(0, "misaligned"),
    Copy(0, "transfer_failed"),
    Copy(0, "holder_lost"),
    Copy(0, "directory_unavailable"),
    Copy(0, "restore_pending", on_disk=True),
    Copy(0, "restore_failed", on_disk=True),
    Copy(0, "disk_unavailable", on_disk=True),
    Copy(0, "disk_full", on_disk=True),
)


@dataclass(frozen=True)
class Edit:
    """What befalls some objects of one group after they were stored.

    An ``era`` stores a whole family again from some token on, ``alone`` only one group of it;
    a ``twin`` leaves what is there beside it.
    """

    does: str
    group: int
    first: int
    objects: int
    shards: int
    revision: int
    trouble: Copy


EDITS = st.builds(
    Edit,
    does=st.sampled_from(
        ("lose", "lose", "evict", "damage", "damage", "again", "beside", "spoilt_beside", "era", "alone", "twin")
    ),
    group=st.integers(0, 5),
    first=st.integers(-6, 8),
    objects=st.integers(1, 3),
    shards=st.integers(1, 7),
    revision=st.integers(0, 2),
    trouble=st.sampled_from(TROUBLES),
)


@dataclass(frozen=True)
class Case:
    """One model, one world, one prompt."""

    groups: tuple[Group, ...]
    shards: int
    drop_last: int
    prompt: tuple[int, ...]
    world: World

    def spec(self) -> dict[str, Any]:
        """The model as plain data, in the fields of a scenario file."""
        return {
            "shards": self.shards,
            "drop_last_blocks": self.drop_last,
            "groups": [group_fields(g) for g in self.groups],
        }


def group_fields(g: Group) -> dict[str, Any]:
    """One group in the fields of a scenario file."""
    fields: dict[str, Any] = {"name": g.name, "kind": g.kind}
    fields |= {"form": "state", "grid_tokens": g.unit} if g.state else {"block_tokens": g.unit}
    if g.kind == HISTORY:
        fields |= {"ratio": g.ratio, "lag_tokens": g.lag}
    if g.kind == WINDOW and not g.state:
        fields |= {"window_tokens": g.window, "sink_tokens": g.sink}
    if g.kind == TAIL:
        fields["overlap_tokens"] = g.overlap
    return fields | ({"of": g.of} if g.of else {}) | ({"endpoint_tokens": g.endpoint} if g.endpoint else {})


@st.composite
def a_group(draw: st.DrawFn, name: str, before: tuple[Group, ...], units: tuple[int, ...]) -> Group:
    """A group of any kind and form that the groups before it allow."""
    histories = [g for g in before if g.kind == HISTORY]
    indexable = [g for g in histories if not g.state]
    taillike = histories + [g for g in before if g.kind == INDEXER]
    kinds = [HISTORY, WINDOW] + [TAIL] * 2 * bool(taillike) + [INDEXER] * 2 * bool(indexable)
    kind = draw(st.sampled_from([HISTORY, HISTORY, WINDOW] if not before else kinds))
    of = draw(st.sampled_from({TAIL: taillike, INDEXER: indexable}[kind])) if kind in {TAIL, INDEXER} else None
    of_state = of is not None and of.kind == HISTORY and of.state
    state = of_state or draw(st.sampled_from((False, False, True)))
    unit = draw(st.sampled_from(units))
    endpoint = None if state else draw(st.sampled_from((None, None, None, *units)))
    ratio, lag = 1, 0
    if kind == HISTORY and not state:
        ratio = draw(st.sampled_from([m for m in range(1, unit + 1) if unit % m == 0]))
        lag = draw(st.sampled_from((0, 0, 0, 1, 3, 9, 20)))
    blocks_of_window = kind == WINDOW and not state
    return Group(
        name,
        kind,
        unit,
        state,
        endpoint,
        ratio,
        lag,
        of.name if of else None,
        overlap=draw(st.sampled_from((0, 1, 2, 4, 7))) if kind == TAIL else 0,
        # Windows whose oldest row stands alone in its block are the ones that a slip by one row shows in.
        window=unit * draw(st.sampled_from((1, 2, 0, 4))) + draw(st.sampled_from((2, 1, 5))) if blocks_of_window else 1,
        sink=draw(st.sampled_from((0, 0, 1, 4, 9))) if blocks_of_window else 0,
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[Group, ...]:
    """One to six groups; a group may stand before the one it is `of`."""
    units = draw(st.sampled_from(UNITS))
    groups: tuple[Group, ...] = ()
    for i in range(draw(st.sampled_from((3, 2, 4, 1, 5, 6)))):
        groups += (draw(a_group(f"g{i}", groups, units)),)
    return tuple(reversed(groups)) if draw(st.sampled_from((False, False, True))) else groups


def root_of(groups: tuple[Group, ...], g: Group) -> str:
    """Name of the history group that a group follows; its own for a window."""
    by_name = {other.name: other for other in groups}
    while g.of:
        g = by_name[g.of]
    return g.name


def apply(edit: Edit, case: Case, stored: tuple[int, ...]) -> None:
    """Let one edit befall the world; objects are counted from the prompt's start, or back from its end."""
    groups, world, n = case.groups, case.world, len(case.prompt)
    edited = groups[edit.group % len(groups)]
    first = edit.first if edit.first >= 0 else max(0, n // edited.unit + edit.first + 1)
    from_token = first * edited.unit
    if edit.does in {"era", "alone", "twin"}:
        family = [g for g in groups if root_of(groups, g) == root_of(groups, edited)]
        members = [edited] if edit.does == "alone" else family
        for (prefix, name, _), copies in world.copies.items():
            if copies and len(prefix) > from_token and any(g.name == name for g in members):
                if edit.does != "twin":
                    copies.clear()
                copies.add(Copy(edit.revision))
        return
    chosen = [s for s in range(case.shards) if edit.shards >> s & 1] or [0]
    for i in range(first, first + edit.objects):
        end = (i + 1) * edited.unit
        if end > len(stored):
            return
        prefix = stored[:end]
        if edit.does == "evict" and edited.kind == HISTORY and not edited.state:
            world.evicted.add((prefix, edited.name))
            chosen = list(range(case.shards))
        for s in chosen:
            befall(edit, world.copies.setdefault((prefix, edited.name, s), set()))
        if any(world.copies[key] for key in world.copies if key[:2] == (prefix, edited.name)):
            world.evicted.discard((prefix, edited.name))


def befall(edit: Edit, copies: set[Copy]) -> None:
    """What an edit does to the copies of one shard of one object."""
    spoilt = Copy(edit.revision, edit.trouble.trouble, edit.trouble.on_disk)
    if edit.does in {"lose", "evict"}:
        copies.clear()
    elif edit.does == "damage" and copies:
        copies.clear()
        copies.add(spoilt)
    elif edit.does == "again":
        copies.clear()
        copies.add(Copy(edit.revision))
    elif edit.does == "beside":
        copies.add(Copy(edit.revision))
    elif edit.does == "spoilt_beside":
        copies.add(spoilt)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A model, and a prompt of it stored up to some position with a few objects knocked out."""
    groups = draw(models())
    shards, drop_last = draw(st.sampled_from((1, 1, 2, 3))), draw(st.sampled_from((0, 0, 0, 0, 1, 2)))
    grid = lcm(*(g.endpoint or g.unit for g in groups))
    n = min(
        150,
        grid * draw(st.sampled_from((4, 5, 3, 6, 7, 2, 1, 0)))
        + draw(st.sampled_from((1, 0, grid - 1, draw(st.integers(0, grid))))),
    )
    prompt = tuple(range(n))
    stored = tuple(range(n + 24))
    common = draw(st.sampled_from((n, n + 24, draw(st.integers(n // 2, n)))))
    world = World()
    for g in groups:
        upto = draw(st.sampled_from((common, common, common, draw(st.integers(n // 3, n)))))
        every = draw(st.sampled_from((g.unit, lcm(g.unit, grid)))) if g.state else g.unit
        for end in range(every, upto + 1, every):
            for s in range(shards):
                world.copies[stored[:end], g.name, s] = {Copy(0)}
    case = Case(groups, shards, drop_last, prompt, world)
    for edit in draw(st.lists(EDITS, min_size=draw(st.sampled_from((1, 2, 0))), max_size=4)):
        apply(edit, case, stored)
    return case
