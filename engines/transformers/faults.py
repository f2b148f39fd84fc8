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
from functools import cached_property, partial
from typing import TYPE_CHECKING

from ...fabric.kinds import ObjectKind
from ...fabric.passport import AbiPassport
from .broken import (
    edited,
    is_square_state,
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
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


STALE_TOKENS = 16
"""How far a stale indexer lags behind its history."""


class Meets(StrEnum):
    """How a fabric meets the fault: what it could know if it looked."""

    ABSENT = "absent"  # the objects were never published
    OTHER_POSITION = "other_position"  # they were published, at the position they are of
    OTHER_WEIGHTS = "other_weights"  # they were published under the revision that made them
    OTHER_LAYOUT = "other_layout"  # they were published with the passport of that layout


@dataclass(frozen=True)
class Fault:
    """One broken set. ``objects`` is whole but for what ``words`` say of ``group``."""

    name: str
    kind: ObjectKind
    group: str
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

    @property
    def has_earlier(self) -> bool:
        """Whether there is a position before it on the grid."""
        return self.position > self.geometry.grid_tokens

    @cached_property
    def earlier(self) -> Objects:
        """What it held one grid step earlier. Raises EngineError if there is no earlier position."""
        if not self.has_earlier:
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
                return replaced(self.exact, self.earlier, fault.group)
            case Meets.ABSENT | Meets.OTHER_LAYOUT:
                return fault.objects


def faults(scene: Scene) -> list[Fault]:
    """Every fault that this model can have at this position, one group each, history first."""
    return [fault for make in (_history, _tail, _window, _indexer, _recurrent) for fault in make(scene)]


def _history(scene: Scene) -> Iterator[Fault]:
    blocks = [group for group in scene.groups(ObjectKind.COMPRESSED_HISTORY) if not group.is_snapshot]
    group = next((group for group in blocks if scene.exact[group.spec.name]), None)
    if group is None:
        return
    fault = partial(_fault, group)
    name = group.spec.name
    yield fault(
        "history_last_block_absent",
        Meets.ABSENT,
        "the last block of the history was not stored",
        without_last(scene.exact, name, 1),
    )
    yield fault(
        "history_of_other_weights",
        Meets.OTHER_WEIGHTS,
        "history of a 1 % fine-tune under the same name",
        replaced(scene.exact, scene.other_weights, name),
    )
    if _is_rotated(scene, group):
        yield fault(
            "history_rope_layout",
            Meets.OTHER_LAYOUT,
            "history whose rotated channels lie in the other order: halves for pairs, or pairs for halves",
            edited(scene.exact, group, other_rotary_layout(scene.model.config)),
        )
    if len(group.spec.layers) > 1:
        yield fault(
            "history_layers_swapped",
            Meets.OTHER_LAYOUT,
            "two layers of the history in each other's place",
            layers_swapped(scene.exact, group),
        )


def _tail(scene: Scene) -> Iterator[Fault]:
    groups = scene.groups(ObjectKind.UNCOMPRESSED_TAIL)
    buffered = next((group for group in groups if _rows_of(group, Rows.BUFFER, scene.position)), None)
    overlapped = next((group for group in groups if _rows_of(group, Rows.OVERLAP, scene.position)), None)
    if buffered is not None:
        fault = partial(_fault, buffered)
        yield fault(
            "tail_missing",
            Meets.ABSENT,
            "the raw tokens since the last compressed entry were not stored",
            without(scene.exact, buffered.spec.name),
        )
        if scene.has_earlier:
            yield fault(
                "tail_one_token_short",
                Meets.OTHER_POSITION,
                "the tail of one position earlier",
                _of_earlier_position(scene, buffered),
            )
    if overlapped is not None and buffered is not None:
        yield _fault(
            overlapped,
            "overlap_missing",
            Meets.OTHER_LAYOUT,
            "a tail without the half window that the next entry overlaps",
            overlap_zeroed(scene.exact, overlapped),
        )
    if overlapped is not None and buffered is None:
        yield _fault(
            overlapped,
            "overlap_missing_aligned",
            Meets.ABSENT,
            "no tail stored at a position that every ratio divides: its overlap is needed there too",
            without(scene.exact, overlapped.spec.name),
        )


def _window(scene: Scene) -> Iterator[Fault]:
    group = next(iter(scene.groups(ObjectKind.SLIDING_WINDOW)), None)
    if group is None:
        return
    fault = partial(_fault, group)
    name = group.spec.name
    yield fault("window_missing", Meets.ABSENT, "no row of the window was stored", without(scene.exact, name))
    if group.is_snapshot:
        return
    yield fault(
        "window_one_row_short",
        Meets.ABSENT,
        "the oldest row of the window was not stored",
        without_first(scene.exact, name),
    )
    if scene.has_earlier:
        yield fault(
            "window_one_token_off",
            Meets.OTHER_POSITION,
            "a whole window, of one position earlier",
            shifted(scene.exact, name),
        )


def _indexer(scene: Scene) -> Iterator[Fault]:
    group = next((group for group in scene.groups(ObjectKind.INDEXER) if scene.exact[group.spec.name]), None)
    if group is None:
        return
    fault = partial(_fault, group)
    name = group.spec.name
    yield fault(
        "indexer_one_block_short",
        Meets.ABSENT,
        "indexer keys end one block before the history they index",
        without_last(scene.exact, name, 1),
    )
    yield fault(
        "indexer_stale",
        Meets.ABSENT,
        f"indexer keys end {STALE_TOKENS} tokens before the history they index",
        without_last(scene.exact, name, max(1, STALE_TOKENS // group.spec.unit_tokens)),
    )
    yield fault(
        "indexer_of_other_weights",
        Meets.OTHER_WEIGHTS,
        "indexer keys of a 1 % fine-tune under the same name",
        replaced(scene.exact, scene.other_weights, name),
    )
    if _is_rotated(scene, group):
        yield fault(
            "indexer_other_rotation",
            Meets.OTHER_LAYOUT,
            "indexer keys in another rotary convention, of equal shape and dtype",
            edited(scene.exact, group, other_rotary_layout(scene.model.config)),
        )


def _recurrent(scene: Scene) -> Iterator[Fault]:
    histories = scene.groups(ObjectKind.COMPRESSED_HISTORY)
    group = next((group for group in histories if group.role is Role.RECURRENT), None)
    if group is None:
        return
    fault = partial(_fault, group)
    yield fault(
        "state_missing",
        Meets.ABSENT,
        "no recurrent state was stored",
        without(scene.exact, group.spec.name),
    )
    if scene.has_earlier:
        yield fault(
            "state_of_previous_position",
            Meets.OTHER_POSITION,
            "the recurrent state of one position earlier",
            _of_earlier_position(scene, group),
        )
    if any(is_square_state(field) for field in group.fields):
        yield fault(
            "state_transposed",
            Meets.OTHER_LAYOUT,
            "recurrent states stored [value, key] and read [key, value]: square, so no shape differs",
            edited(scene.exact, group, transposed_state),
        )


def _fault(group: GroupLayout, name: str, meets: Meets, words: str, objects: Objects) -> Fault:
    return Fault(name, group.spec.kind, group.spec.name, meets, words, objects)


def _of_earlier_position(scene: Scene, group: GroupLayout) -> Objects:
    """That group's snapshot of one grid step earlier, claiming to be of the scene's position."""
    name, unit = group.spec.name, group.spec.unit_tokens
    (snapshot,) = scene.earlier[name].values()
    claimed = snapshot.copy()
    write_position(claimed, scene.position)
    return {**scene.exact, name: {scene.position // unit - 1: claimed}}


def _rows_of(group: GroupLayout, rows: Rows, position: int) -> int:
    return max((rows.at(position, field.unit) for field in group.fields if field.rows is rows), default=0)


def _is_rotated(scene: Scene, group: GroupLayout) -> bool:
    known = rotations(scene.model.config)
    return any(field.name in known for field in group.fields)
