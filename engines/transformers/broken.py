"""Edits of a set of objects, each wrong in one way. None touches the arrays of the set it starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .capture import Objects
from .geometry import Field, GroupLayout
from .layers import Rows
from .rotary import Pairs, rotations
from .tensors import Bytes

if TYPE_CHECKING:
    from .library import PreTrainedConfig

Elements = npt.NDArray[Any]
Edit = Callable[[Field, Elements], Elements | None]
"""Elements of one field in one object, shape [rows, the other axes]: edited, or None to leave it."""


def without(objects: Objects, names: Iterable[str]) -> Objects:
    """No object of those groups."""
    return {**objects, **{name: {} for name in names}}


def without_last(objects: Objects, names: Iterable[str], count: int) -> Objects:
    """Without the last ``count`` objects of each of those groups."""
    return {**objects, **{name: _sliced(objects[name], slice(None, -count)) for name in names}}


def without_first(objects: Objects, names: Iterable[str]) -> Objects:
    """Without the first object of each of those groups."""
    return {**objects, **{name: _sliced(objects[name], slice(1, None)) for name in names}}


def replaced(objects: Objects, others: Objects, names: Iterable[str]) -> Objects:
    """Those groups from another set."""
    return {**objects, **{name: others[name] for name in names}}


def shifted(objects: Objects, names: Iterable[str]) -> Objects:
    """Each block holds the rows of the block before it; the oldest, whose are gone, is absent."""
    moved = {}
    for name in names:
        held = objects[name]
        moved[name] = {index: held[index - 1] for index in held if index - 1 in held}
    return {**objects, **moved}


def overlap_zeroed(objects: Objects, groups: Iterable[GroupLayout]) -> Objects:
    """The overlap's fields of those groups read as zeros."""
    return edited(objects, groups, lambda field, held: np.zeros_like(held) if field.rows is Rows.OVERLAP else None)


def layers_swapped(objects: Objects, groups: Iterable[GroupLayout]) -> Objects:
    """The fields of each group's first two layers exchanged."""
    swapped = dict(objects)
    for group in groups:
        one, other = ([f for f in group.fields if f.layer == layer] for layer in group.spec.layers[:2])
        spans = [(_span(a), _span(b)) for a, b in zip(one, other, strict=True)]
        swapped[group.spec.name] = {index: _exchanged(held, spans) for index, held in objects[group.spec.name].items()}
    return swapped


def edited(objects: Objects, groups: Iterable[GroupLayout], edit: Edit) -> Objects:
    """Every field of those groups as ``edit`` makes it."""
    changed = dict(objects)
    for group in groups:
        changed[group.spec.name] = {
            index: _edited_object(held, group.fields, edit) for index, held in objects[group.spec.name].items()
        }
    return changed


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


def transposed_state(field: Field, elements: Elements) -> Elements | None:
    """Exchange the key and value axes of a square recurrent state."""
    if not field.name.startswith("recurrent_states.") or elements.shape[-1] != elements.shape[-2]:
        return None
    return elements.swapaxes(-1, -2)


def _sliced(group: dict[int, Bytes], part: slice) -> dict[int, Bytes]:
    return {index: group[index] for index in sorted(group)[part]}


def _span(field: Field) -> slice:
    return slice(field.offset_bytes, field.offset_bytes + field.nbytes)


def _exchanged(held: Bytes, spans: list[tuple[slice, slice]]) -> Bytes:
    copied = held.copy()
    for one, other in spans:
        copied[one], copied[other] = held[other], held[one]
    return copied


def _edited_object(held: Bytes, fields: Iterable[Field], edit: Edit) -> Bytes:
    copied = held.copy()
    for field in fields:
        others = [size for axis, size in enumerate(field.shape) if axis != field.row_axis]
        width = field.row_bytes // int(np.prod(others))
        elements = np.ascontiguousarray(held[_span(field)]).view(f"V{width}").reshape(field.object_rows, *others)
        changed = edit(field, elements)
        if changed is not None:
            copied[_span(field)] = np.ascontiguousarray(changed).reshape(-1).view(np.uint8)
    return copied
