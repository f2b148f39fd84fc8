"""Tensors to bytes and back, by element size alone: no dtype is ever converted.

numpy has no bfloat16 and no float8, so elements travel in integers of the same width. Views of a
leased arena are read-only: they are only ever the source of a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]

_CARRIERS: dict[int, tuple[torch.dtype, npt.DTypeLike]] = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.int16),
    4: (torch.int32, np.int32),
    8: (torch.int64, np.int64),
}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``: the name that layouts and digests use."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name that :func:`dtype_name` gave. Raises ValueError for another."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r} is not one of torch")
    return dtype


def carrier(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The elements of a CPU tensor as integers of the same width, sharing memory, any strides."""
    width = tensor.element_size()
    if width not in _CARRIERS:
        raise ValueError(f"elements of {width} bytes ({tensor.dtype}) have no integer carrier")
    elements: npt.NDArray[Any] = tensor.detach().view(_CARRIERS[width][0]).numpy()
    return elements


def rows_to_bytes(tensor: torch.Tensor, row_axis: int) -> Bytes:
    """Copy a tensor to bytes, one line a row: shape [rows, bytes a row], row-major inside a row."""
    rows = np.moveaxis(carrier(tensor.detach().cpu()), row_axis, 0)
    copied = np.array(rows, order="C", copy=True)
    return copied.reshape(rows.shape[0], -1).view(np.uint8) if copied.size else _no_bytes(rows.shape)


def _no_bytes(shape: tuple[int, ...]) -> Bytes:
    return np.zeros((shape[0], 0), dtype=np.uint8)


def in_host_memory(views: Mapping[int, Any]) -> dict[int, Bytes]:
    """Leased views as arrays: those of a holder's GPU (tensors) are copied, the others stay as they are."""
    return {i: view.cpu().numpy() if isinstance(view, torch.Tensor) else view for i, view in views.items()}


def bytes_to_rows(destination: torch.Tensor, row_axis: int, source: Bytes) -> None:
    """Copy bytes, shape [rows, bytes a row], into a CPU tensor with that many rows, in place."""
    if destination.numel() == 0:
        return
    elements = np.moveaxis(carrier(destination), row_axis, 0)
    np.copyto(elements, np.ascontiguousarray(source).view(elements.dtype).reshape(elements.shape))
