"""Cached state that is wrong in exactly one way, and what comes of reusing it without a check.

A cache keyed by tokens alone finds every object below under an equal prefix. :func:`faults` makes
the broken sets, :func:`reuse_blindly` really resumes from one: slots that nobody filled read as
zeros, everything else is taken as it lies. Of 82 such faults one raised an exception; the others
ran on and changed the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from ...fabric.kinds import ObjectKind
from ...fabric.passport import AbiPassport
from .broken import (
    edited,
    layers_swapped,
    other_rotary_layout,
    overlap_zeroed,
    replaced,
    shifted,
    transposed_state,
    without,
    without_first,
    without_last,
)
from .capture import Objects, capture, write_position
from .errors import EngineError
from .generate import generate
from .geometry import Geometry, GroupLayout
from .layers import Role, Rows
from .restore import ObjectViews, assemble
from .rotary import rotations
from .tiny_models import fine_tuned

if TYPE_CHECKING:
    from .library import Cache, PreTrainedModel


class Meets(StrEnum):
    """How a fabric meets the fault: what it could know if it looked."""

    ABSENT = "absent"  # the objects were never published
    OTHER_POSITION = "other_position"  # they were published, at the position they are of
    OTHER_WEIGHTS = "other_weights"  # they were published under the revision that made them
    OTHER_LAYOUT = "other_layout"  # they were published with the passport of that layout


@dataclass(frozen=True)
class Fault:
    """One broken set. ``objects`` is whole but for what ``words`` say of ``groups``."""

    name: str
    kind: ObjectKind
    groups: tuple[str, ...]
    meets: Meets
    words: str
    objects: Objects


def reuse_blindly(model: PreTrainedModel, geometry: Geometry, position: int, objects: ObjectViews) -> Cache:
    """A cache at ``position`` from whatever ``objects`` hold, as a token-keyed cache would make it."""
    return assemble(model, geometry, position, objects)


def foreign_passport(passport: AbiPassport, fault: Fault) -> AbiPassport:
    """The passport of a writer whose layout differs as the fault says."""
    return replace(passport, layout=f"{passport.layout}; {fault.words}")


class Scene:
    """One prompt at one position: the exact objects, and those that faults are made of.

    ``cuts``: chunk boundaries before the position. The exact set comes from a run of ``model``;
    the others (a token earlier, a 1 % fine-tune) are run when a fault first asks for them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        geometry: Geometry,
        tokens: Sequence[int],
        position: int,
        *,
        cuts: Iterable[int] = (),
        seed: int = 0,
    ) -> None:
        self.model, self.geometry, self.position = model, geometry, position
        self._tokens, self._cuts, self._seed = tuple(tokens), tuple(cuts), seed

    @cached_property
    def exact(self) -> Objects:
        """What the model's own cache holds at the position."""
        return self._captured(self.model, self.position)

    @cached_property
    def earlier(self) -> Objects:
        """What it held one grid step earlier. Raises EngineError if there is no earlier position."""
        if self.position <= self.geometry.grid_tokens:
            raise EngineError(f"position {self.position}: there is none before it on the grid")
        return self._captured(self.model, self.position - self.geometry.grid_tokens)

    @cached_property
    def other_weights(self) -> Objects:
        """What a 1 % fine-tune's cache holds for the same tokens."""
        return self._captured(self.other_model, self.position)

    @cached_property
    def other_model(self) -> PreTrainedModel:
        """The fine-tune itself."""
        return fine_tuned(self.model, seed=self._seed)

    def _captured(self, model: PreTrainedModel, position: int) -> Objects:
        run = generate(model, self._tokens[:position], cuts=self._cuts, decode_tokens=1)
        return capture(run.cache, self.geometry, position)

    def groups(self, kind: ObjectKind) -> list[GroupLayout]:
        """The model's groups of that kind, in model order."""
        return [group for group in self.geometry.groups if group.spec.kind is kind]

    def published(self, fault: Fault) -> Objects:
        """What the writer at fault gives to a fabric.

        Objects of another position lie at their own; those of other weights come all together,
        to be published under :attr:`other_model`'s revision; those of another layout are as
        broken, to be published with :func:`foreign_passport`.
        """
        match fault.meets:
            case Meets.OTHER_WEIGHTS:
                return self.other_weights
            case Meets.OTHER_POSITION:
                return replaced(self.exact, self.earlier, fault.groups)
            case Meets.ABSENT | Meets.OTHER_LAYOUT:
                return fault.objects


def faults(scene: Scene) -> list[Fault]:
    """Every fault that this model can have at this position, history first."""
    return [fault for make in (_history, _tail, _window, _indexer, _recurrent) for fault in make(scene)]


def _history(scene: Scene) -> Iterator[Fault]:
    groups = [group for group in scene.groups(ObjectKind.COMPRESSED_HISTORY) if not group.is_snapshot]
    held = [group for group in groups if scene.exact[group.spec.name]]
    if not held:
        return
    kind, names = ObjectKind.COMPRESSED_HISTORY, tuple(group.spec.name for group in held)
    yield Fault(
        "history_last_block_absent",
        kind,
        names,
        Meets.ABSENT,
        "the last history block was not stored",
        without_last(scene.exact, names, 1),
    )
    yield Fault(
        "history_of_other_weights",
        kind,
        names,
        Meets.OTHER_WEIGHTS,
        "history of a 1 % fine-tune under the same name",
        replaced(scene.exact, scene.other_weights, names),
    )
    if _rotated(scene, held):
        yield Fault(
            "history_rope_layout",
            kind,
            names,
            Meets.OTHER_LAYOUT,
            "rotated channels laid out in the other way: halves for pairs",
            edited(scene.exact, held, other_rotary_layout(scene.model.config)),
        )
    layered = [group for group in held if len(group.spec.layers) > 1]
    if layered:
        yield Fault(
            "history_layers_swapped",
            kind,
            tuple(group.spec.name for group in layered),
            Meets.OTHER_LAYOUT,
            "two layers of the history in each other's place",
            layers_swapped(scene.exact, layered),
        )


def _tail(scene: Scene) -> Iterator[Fault]:
    groups = scene.groups(ObjectKind.UNCOMPRESSED_TAIL)
    names = tuple(group.spec.name for group in groups)
    buffered = any(_rows_of(group, Rows.BUFFER, scene.position) for group in groups)
    overlapped = [group for group in groups if _rows_of(group, Rows.OVERLAP, scene.position)]
    overlap_names = tuple(group.spec.name for group in overlapped)
    kind = ObjectKind.UNCOMPRESSED_TAIL
    if buffered:
        yield Fault(
            "tail_missing",
            kind,
            names,
            Meets.ABSENT,
            "raw tokens since the last compressed entry were not stored",
            without(scene.exact, names),
        )
        yield Fault(
            "tail_one_token_short",
            kind,
            names,
            Meets.OTHER_POSITION,
            "the tail of one position earlier",
            _at_position(scene, names),
        )
    if overlapped and buffered:
        yield Fault(
            "overlap_missing",
            kind,
            overlap_names,
            Meets.OTHER_LAYOUT,
            "a tail without the half window that the next entry overlaps",
            overlap_zeroed(scene.exact, overlapped),
        )
    if overlapped and not buffered:
        yield Fault(
            "overlap_missing_aligned",
            kind,
            overlap_names,
            Meets.ABSENT,
            "no tail stored at a position that every ratio divides: its overlap is needed there too",
            without(scene.exact, overlap_names),
        )


def _window(scene: Scene) -> Iterator[Fault]:
    kind = ObjectKind.SLIDING_WINDOW
    groups = scene.groups(kind)
    names = tuple(group.spec.name for group in groups)
    if not groups:
        return
    yield Fault("window_missing", kind, names, Meets.ABSENT, "no window row was stored", without(scene.exact, names))
    blocks = tuple(group.spec.name for group in groups if not group.is_snapshot)
    if blocks:
        yield Fault(
            "window_one_row_short",
            kind,
            blocks,
            Meets.ABSENT,
            "the oldest row of the window was not stored",
            without_first(scene.exact, blocks),
        )
        yield Fault(
            "window_one_token_off",
            kind,
            blocks,
            Meets.OTHER_POSITION,
            "a whole window, of one position earlier",
            shifted(scene.exact, blocks),
        )


def _indexer(scene: Scene) -> Iterator[Fault]:
    kind = ObjectKind.INDEXER
    groups = [group for group in scene.groups(kind) if scene.exact[group.spec.name]]
    names = tuple(group.spec.name for group in groups)
    if not groups:
        return
    yield Fault(
        "indexer_one_block_short",
        kind,
        names,
        Meets.ABSENT,
        "indexer keys end one block before the history they index",
        without_last(scene.exact, names, 1),
    )
    stale = max(1, 16 // groups[0].spec.unit_tokens)
    yield Fault(
        "indexer_stale",
        kind,
        names,
        Meets.ABSENT,
        "indexer keys end 16 tokens before the history they index",
        without_last(scene.exact, names, stale),
    )
    yield Fault(
        "indexer_of_other_weights",
        kind,
        names,
        Meets.OTHER_WEIGHTS,
        "indexer keys of a 1 % fine-tune under the same name",
        replaced(scene.exact, scene.other_weights, names),
    )
    if _rotated(scene, groups):
        yield Fault(
            "indexer_other_rotation",
            kind,
            names,
            Meets.OTHER_LAYOUT,
            "indexer keys in another rotary convention, of equal shape and dtype",
            edited(scene.exact, groups, other_rotary_layout(scene.model.config)),
        )


def _recurrent(scene: Scene) -> Iterator[Fault]:
    groups = [group for group in scene.groups(ObjectKind.COMPRESSED_HISTORY) if group.role is Role.RECURRENT]
    if not groups:
        return
    kind, names = ObjectKind.COMPRESSED_HISTORY, tuple(group.spec.name for group in groups)
    yield Fault(
        "state_missing", kind, names, Meets.ABSENT, "no recurrent state was stored", without(scene.exact, names)
    )
    if scene.position > scene.geometry.grid_tokens:
        yield Fault(
            "state_of_previous_position",
            kind,
            names,
            Meets.OTHER_POSITION,
            "the recurrent state of one position earlier",
            _at_position(scene, names),
        )
    fields = [field for group in groups for field in group.fields if field.name.startswith("recurrent_states.")]
    if any(field.shape[-1] == field.shape[-2] for field in fields):
        yield Fault(
            "state_transposed",
            kind,
            names,
            Meets.OTHER_LAYOUT,
            "recurrent states stored [value, key] and read [key, value]: square, so no shape differs",
            edited(scene.exact, groups, transposed_state),
        )


def _at_position(scene: Scene, names: Iterable[str]) -> Objects:
    """Snapshots of one grid step earlier, claiming to be of the scene's position."""
    step = scene.geometry.grid_tokens
    broken = dict(scene.exact)
    for name in names:
        unit = scene.geometry.group(name).spec.unit_tokens
        snapshot = scene.earlier[name][(scene.position - step) // unit - 1].copy()
        write_position(snapshot, scene.position)
        broken[name] = {scene.position // unit - 1: snapshot}
    return broken


def _rows_of(group: GroupLayout, rows: Rows, position: int) -> int:
    return max((rows.at(position, field.unit) for field in group.fields if field.rows is rows), default=0)


def _rotated(scene: Scene, groups: Iterable[GroupLayout]) -> bool:
    known = rotations(scene.model.config)
    return any(field.name in known for group in groups for field in group.fields)
