"""Fill a fresh cache from the fabric's objects: checked first, whole or not at all.

Objects may be read-only views of a leased arena; every byte is copied, so the lease can be
released (after its own check) as soon as :func:`restore` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from .capture import read_position
from .errors import GeometryMismatch
from .geometry import Field, Geometry, GroupLayout, model_identity
from .layer_classes import adapter_of, check_layers, check_room, class_name
from .library import fresh_cache
from .tensors import Bytes, bytes_to_rows, dtype_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

ObjectViews = Mapping[str, Mapping[int, npt.NDArray[np.uint8]]]
"""By group name and object index, 1-D uint8 views; see :data:`capture.Objects`."""


State = dict[int, dict[str, torch.Tensor]]
"""By layer and part name, the tensors of a cache at one position."""

NewCache = Callable[[], "Cache"]
"""Makes an empty cache of whatever class: ``lambda: StaticCache(config=model.config, max_cache_len=4096)``."""


def restore(
    model: PreTrainedModel,
    geometry: Geometry,
    position: int,
    objects: ObjectViews,
    *,
    new_cache: NewCache | None = None,
) -> Cache:
    """A fresh cache that stands at ``position`` tokens, filled from ``objects``.

    ``new_cache``: makes the cache to fill (default: the one the model itself would make). Objects that the position does not need are ignored. Raises GeometryMismatch, naming group and
    object, if one that it needs is absent, has the wrong length, or is a snapshot of another
    position, if the geometry is not this model's, or if the cache is of other layers or too small;
    nothing is restored then. UnsupportedCache for a cache class that cannot be filled.
    """
    return fill(model, geometry, position, copied(model, geometry, position, objects), new_cache=new_cache)


def copied(
    model: PreTrainedModel,
    geometry: Geometry,
    position: int,
    objects: ObjectViews,
    *,
    without: Collection[str] = (),
) -> State:
    """Every tensor as it stands at ``position``, checked and copied out of ``objects``.

    The groups ``without`` are not asked for and read as zeros. Raises GeometryMismatch as :func:`restore`.
    """
    check_model(model, geometry)
    check_objects(geometry, position, objects, without=without)
    return _state(model, geometry, position, objects)


def check_model(model: PreTrainedModel, geometry: Geometry) -> None:
    """Raise GeometryMismatch unless ``geometry`` was read from a model of this architecture and config."""
    identity = model_identity(model.config)
    if identity != geometry.model:
        raise GeometryMismatch(f"the geometry is of {geometry.model}, this model is {identity}")
    classes = tuple(class_name(layer) for layer in fresh_cache(model.config).layers)
    if classes != geometry.layer_classes:
        raise GeometryMismatch(f"the geometry has cache layers {geometry.layer_classes}, this model {classes}")


def check_objects(geometry: Geometry, position: int, objects: ObjectViews, *, without: Collection[str] = ()) -> None:
    """Raise GeometryMismatch unless every object that ``position`` needs is there and fits.

    Nothing is needed of the groups ``without``.
    """
    for name in objects:
        geometry.group(name)
    for name, indices in geometry.required(position).items():
        group, views = geometry.group(name), objects.get(name, {})
        for index in () if name in without else indices:
            view = views.get(index)
            if view is None:
                raise GeometryMismatch(
                    f"{name}: object {index} of {len(indices)} that position {position} needs is absent"
                )
            _check_view(group, index, view)
            if group.is_snapshot and read_position(view) != position:
                raise GeometryMismatch(f"{name}: the snapshot is of position {read_position(view)}, not {position}")


def _check_view(group: GroupLayout, index: int, view: npt.NDArray[Any]) -> None:
    where = f"{group.spec.name}: object {index}"
    if not isinstance(view, np.ndarray) or view.dtype != np.uint8 or view.ndim != 1:
        raise GeometryMismatch(f"{where} is not a 1-D array of uint8")
    if view.size != group.spec.block_bytes:
        raise GeometryMismatch(f"{where} has {view.size} bytes, this layout has {group.spec.block_bytes}")


def assemble(
    model: PreTrainedModel,
    geometry: Geometry,
    position: int,
    objects: ObjectViews,
    *,
    new_cache: NewCache | None = None,
) -> Cache:
    """Fill a fresh cache from whatever is there; what is absent reads as zeros.

    This asks nothing: :func:`restore` is what makes it safe.
    """
    return fill(model, geometry, position, _state(model, geometry, position, objects), new_cache=new_cache)


def fill(
    model: PreTrainedModel,
    geometry: Geometry,
    position: int,
    state: State,
    *,
    new_cache: NewCache | None = None,
) -> Cache:
    """A fresh cache that stands at ``position`` with that state. Raises what :func:`restore` does for a cache."""
    cache = fresh_cache(model.config) if new_cache is None else new_cache()
    check_layers(cache, geometry.layer_classes)
    check_room(cache, position)
    for index, layer in enumerate(cache.layers):
        adapter_of(index, layer).install(layer, state.get(index, {}), position)
    return cache


def _state(model: PreTrainedModel, geometry: Geometry, position: int, objects: ObjectViews) -> State:
    tensors: State = {}
    for name, indices in geometry.required(position).items():
        group = geometry.group(name)
        table = _table(group, indices, objects.get(name, {}))
        for field in group.fields:
            tensor = _tensor(group, field, position, indices.start, table)
            tensors.setdefault(field.layer, {})[field.name] = tensor.to(model.device)
    return tensors


def _table(group: GroupLayout, indices: range, views: Mapping[int, npt.NDArray[np.uint8]]) -> Bytes:
    """The objects below each other: one copy an object, so that the rest is one copy a tensor."""
    table: Bytes = np.zeros((len(indices), group.spec.block_bytes), dtype=np.uint8)
    for row, index in enumerate(indices):
        view = views.get(index)
        if view is not None:
            np.copyto(table[row], view)
    return table


def _tensor(group: GroupLayout, field: Field, position: int, first_index: int, table: Bytes) -> torch.Tensor:
    """One tensor of one layer with the rows it has at ``position``."""
    rows = field.rows.at(position, field.unit)
    shape = list(field.shape)
    shape[field.row_axis] = rows
    tensor = torch.zeros(shape, dtype=dtype_of(field.dtype))
    skipped = 0
    if group.spec.window_tokens is not None and not group.is_snapshot:
        skipped = position - rows - first_index * field.object_rows  # the oldest block may begin before the window
    run = table[:, field.offset_bytes : field.offset_bytes + field.nbytes].reshape(-1, field.row_bytes)
    bytes_to_rows(tensor, field.row_axis, run[skipped : skipped + rows])
    return tensor
