"""Edits of a set of objects, each wrong in one way. None touches the arrays of the set it starts from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .capture import Objects
from .geometry import Field, GroupLayout
from .layers import Rows
from .rotary import Pairs, rotations
from .tensors import Bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Elements = npt.NDArray[Any]
Edit = Callable[[Field, Elements], Elements | None]
"""Elements of one field in one object, shape [rows, the other axes]: edited, or None to leave it."""


def without(objects: Objects, name: str) -> Objects:
    """No object of that group."""
    return {**objects, name: {}}


def without_last(objects: Objects, name: str, count: int) -> Objects:
    """Without the last ``count`` objects of that group."""
    held = objects[name]
    return {**objects, name: {index: held[index] for index in sorted(held)[:-count]}}


def without_first(objects: Objects, name: str) -> Objects:
    """Without the first object of that group."""
    held = objects[name]
    return {**objects, name: {index: held[index] for index in sorted(held)[1:]}}


def replaced(objects: Objects, others: Objects, name: str) -> Objects:
    """That group from another set."""
    return {**objects, name: others[name]}


def shifted(objects: Objects, name: str) -> Objects:
    """Each block holds the rows of the block before it; the oldest, whose are gone, is absent."""
    held = objects[name]
    return {**objects, name: {index: held[index - 1] for index in held if index - 1 in held}}


def overlap_zeroed(objects: Objects, group: GroupLayout) -> Objects:
    """The overlap's fields read as zeros."""
    return edited(objects, group, lambda field, held: np.zeros_like(held) if field.rows is Rows.OVERLAP else None)


def layers_swapped(objects: Objects, group: GroupLayout) -> Objects:
    """The fields of the group's first two layers exchanged."""
    one, other = ([f for f in group.fields if f.layer == layer] for layer in group.spec.layers[:2])
    spans = [(_span(a), _span(b)) for a, b in zip(one, other, strict=True)]
    held = objects[group.spec.name]
    return {**objects, group.spec.name: {index: _exchanged(array, spans) for index, array in held.items()}}


def edited(objects: Objects, group: GroupLayout, edit: Edit) -> Objects:
    """Every field of the group as ``edit`` makes it."""
    held = objects[group.spec.name]
    return {**objects, group.spec.name: {index: _edited(array, group, edit) for index, array in held.items()}}


def other_rotary_layout(config: PreTrainedConfig) -> Edit:
    """Lay rotated channels out as the other convention does: halves for pairs, pairs for halves."""
    known = rotations(config)

    def edit(field: Field, elements: Elements) -> Elements | None:
        rotation = known.get(field.name)
        if rotation is None:
            return None
        channels = np.arange(rotation.start, rotation.stop)
        if rotation.pairs is Pairs.INTERLEAVED:
            channels = channels.reshape(-1, 2).T.reshape(-1)
        else:
            channels = channels.reshape(2, -1).T.reshape(-1)
        order = np.arange(elements.shape[-1])
        order[rotation.start : rotation.stop] = channels
        return elements[..., order]

    return edit


def is_square_state(field: Field) -> bool:
    """Whether the field is a recurrent state whose key and value axes are of one size."""
    return field.name.startswith("recurrent_states.") and field.shape[-1] == field.shape[-2]


def transposed_state(field: Field, elements: Elements) -> Elements | None:
    """Exchange the key and value axes of a square recurrent state."""
    return elements.swapaxes(-1, -2) if is_square_state(field) else None


def _span(field: Field) -> slice:
    return slice(field.offset_bytes, field.offset_bytes + field.nbytes)


def _exchanged(held: Bytes, spans: list[tuple[slice, slice]]) -> Bytes:
    copied = held.copy()
    for one, other in spans:
        copied[one], copied[other] = held[other], held[one]
    return copied


def _edited(held: Bytes, group: GroupLayout, edit: Edit) -> Bytes:
    copied = held.copy()
    for field in group.fields:
        others = [size for axis, size in enumerate(field.shape) if axis != field.row_axis]
        width = field.row_bytes // int(np.prod(others))
        elements = np.ascontiguousarray(held[_span(field)]).view(f"V{width}").reshape(field.object_rows, *others)
        changed = edit(field, elements)
        if changed is not None:
            copied[_span(field)] = np.ascontiguousarray(changed).reshape(-1).view(np.uint8)
    return copied
