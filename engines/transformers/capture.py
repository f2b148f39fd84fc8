"""Copy a cache's state out as the fabric's objects, before the next step changes it in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from .errors import GeometryMismatch, UnsupportedCache
from .geometry import Field, Geometry, GroupLayout
from .layer_classes import adapter_of, check_layers, check_room
from .layers import read
from .tensors import Bytes, dtype_name, rows_to_bytes

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

Objects = dict[str, dict[int, Bytes]]
"""By group name and object index: index i is the block that ends at (i + 1) * block_tokens, or the
snapshot at (i + 1) * grid_tokens. Each object is one 1-D uint8 array of the group's block_bytes."""


def capture(cache: Cache, geometry: Geometry, position: int, *, from_token: int = 0) -> Objects:
    """Copy out every object that the cache, standing at ``position`` tokens, holds whole.

    With ``from_token`` only blocks that end behind it (what an extension from there adds); snapshots
    are always those of ``position``. The arrays share nothing with the cache.

    Raises GeometryMismatch if the position is not on the grid or the cache is another model's, and
    UnsupportedCache if a tensor or scalar is not what the position implies.
    """
    geometry.check_position(position)
    if not 0 <= from_token <= position:
        raise GeometryMismatch(f"from_token {from_token}: must lie between 0 and the position {position}")
    check_cache(cache, geometry, position)
    return {
        group.spec.name: (
            _snapshot(cache, group, position) if group.is_snapshot else _blocks(cache, group, position, from_token)
        )
        for group in geometry.groups
    }


def check_cache(cache: Cache, geometry: Geometry, position: int) -> None:
    """Raise unless every scalar and every tensor of the cache is what ``position`` implies."""
    check_layers(cache, geometry.layer_classes)
    check_room(cache, position)
    for index, layer in enumerate(cache.layers):
        adapter = adapter_of(index, layer)
        held, implied = adapter.scalars(layer), adapter.scalars_at(layer, position)
        for name, value in implied.items():
            if held[name] != value:
                raise UnsupportedCache(
                    f"cache layer {index}: {name} is {held[name]}, position {position} implies {value}"
                )
    for group in geometry.groups:
        for field in group.fields:
            _check_field(cache, field, position)
    if geometry.shared_key_value:
        for index, layer in enumerate(cache.layers):
            keys, values = read(layer, "keys"), read(layer, "values")
            if keys is None or values is None or not torch.equal(keys, values):
                raise UnsupportedCache(f"cache layer {index}: keys and values differ, this model shares them")


def _held(cache: Cache, field: Field, position: int) -> torch.Tensor | None:
    layer = cache.layers[field.layer]
    return adapter_of(field.layer, layer).held(layer, field, position)


def _check_field(cache: Cache, field: Field, position: int) -> None:
    rows = field.rows.at(position, field.unit)
    tensor = _held(cache, field, position)
    where = f"cache layer {field.layer}: {field.name}"
    if tensor is None:
        if rows:
            raise UnsupportedCache(f"{where} is empty, position {position} implies {rows} rows")
        return
    shape = list(field.shape)
    shape[field.row_axis] = rows
    if list(tensor.shape) != shape:
        raise UnsupportedCache(f"{where} has shape {list(tensor.shape)}, position {position} implies {shape}")
    if dtype_name(tensor.dtype) != field.dtype:
        raise GeometryMismatch(f"{where} is {dtype_name(tensor.dtype)}, this geometry has {field.dtype}")


def _rows(cache: Cache, field: Field, position: int, first: int, count: int) -> Bytes:
    """``count`` rows from row ``first`` of what the layer holds, as bytes: shape [count, row_bytes]."""
    tensor = _held(cache, field, position)
    if tensor is None or count == 0:
        return np.zeros((count, field.row_bytes), dtype=np.uint8)
    return rows_to_bytes(tensor.narrow(field.row_axis, first, count), field.row_axis)


def _blocks(cache: Cache, group: GroupLayout, position: int, from_token: int) -> dict[int, Bytes]:
    indices = group.held(position, from_token)
    table = np.zeros((len(indices), group.spec.block_bytes), dtype=np.uint8)
    if not indices:
        return {}
    for field in group.fields:
        first = indices.start * field.object_rows
        if group.spec.window_tokens is not None:  # the layer holds the last rows only
            first -= position - field.rows.at(position, field.unit)
        rows = _rows(cache, field, position, first, len(indices) * field.object_rows)
        table[:, field.offset_bytes : field.offset_bytes + field.nbytes] = rows.reshape(len(indices), -1)
    return dict(zip(indices, table, strict=True))


def _snapshot(cache: Cache, group: GroupLayout, position: int) -> dict[int, Bytes]:
    snapshot: Bytes = np.zeros(group.spec.block_bytes, dtype=np.uint8)
    write_position(snapshot, position)
    for field in group.fields:
        rows = _rows(cache, field, position, 0, field.rows.at(position, field.unit))
        snapshot[field.offset_bytes : field.offset_bytes + rows.size] = rows.reshape(-1)
    return {group.held(position, 0).start: snapshot}


_HEAD: npt.DTypeLike = np.dtype("<i8")


def write_position(snapshot: Bytes, position: int) -> None:
    """Write the position a snapshot is of at its head."""
    snapshot[:8] = np.array([position], dtype=_HEAD).view(np.uint8)


def read_position(snapshot: npt.NDArray[Any]) -> int:
    """The position a snapshot says it is of."""
    return int(np.ascontiguousarray(snapshot[:8]).view(_HEAD)[0])
