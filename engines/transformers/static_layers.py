"""Static cache layers: the state of their dynamic twins inside tensors of a fixed size.

A static tensor holds its rows from the front and zeros behind them. A static window holds W rows,
one more than its dynamic twin: once it is full, its oldest row is dropped before it is read again.
A window that was made for fewer tokens than W is cut to those, and has no room for more.
"""

from __future__ import annotations

from typing import Any

import torch

from .layers import Part, Rowed, Scalars, read


class StaticAttention:
    """``StaticLayer``: keys and values of every token, shape [1, heads, room, head size]."""

    def parts(self, layer: Any, shared: bool) -> tuple[Part, ...]:
        raise TypeError(f"{type(layer).__name__}: the geometry is read off its dynamic twin")

    def held(self, layer: Any, part: Rowed, position: int) -> torch.Tensor | None:
        tensor = read(layer, part.name)
        return None if tensor is None else tensor.narrow(part.row_axis, 0, min(position, tensor.shape[part.row_axis]))

    def room_tokens(self, layer: Any) -> int | None:
        return int(layer.max_cache_len)

    def scalars(self, layer: Any) -> Scalars:
        return {"cumulative_length": int(layer.cumulative_length)}

    def scalars_at(self, layer: Any, position: int) -> Scalars:
        return {"cumulative_length": position}

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        keys, values = tensors["keys"], tensors.get("values", tensors["keys"])
        layer.lazy_initialization(keys, values)
        layer.keys[:, :, :position].copy_(keys)
        layer.values[:, :, :position].copy_(values)
        layer.cumulative_length.fill_(position)


class StaticIndexedAttention(StaticAttention):
    """``StaticIndexedLayer``: and indexer keys [1, room, index head size], counted on their own."""

    def scalars(self, layer: Any) -> Scalars:
        length = layer.indexer_cumulative_length
        return {
            **super().scalars(layer),
            "indexer_cumulative_length": None if length is None else int(length),
            "indexer_position_ids": None if layer.indexer_position_ids is None else True,
        }

    def scalars_at(self, layer: Any, position: int) -> Scalars:
        implied: Scalars = {"indexer_cumulative_length": position, "indexer_position_ids": None}
        return {**super().scalars_at(layer, position), **implied}

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        super().install(layer, tensors, position)
        layer.lazy_initialization_indexer(tensors["indexer_keys"])
        layer.indexer_keys[:, :position].copy_(tensors["indexer_keys"])
        layer.indexer_cumulative_length.fill_(position)


class StaticBlockIndexedAttention(StaticAttention):
    """``MiniMaxM3VLSparseStaticCacheLayer``: and indexer keys [1, heads, room, index head size]."""

    def scalars(self, layer: Any) -> Scalars:
        return {**super().scalars(layer), "idx_cumulative_length": int(layer.idx_cumulative_length)}

    def scalars_at(self, layer: Any, position: int) -> Scalars:
        return {**super().scalars_at(layer, position), "idx_cumulative_length": position}

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        super().install(layer, tensors, position)
        layer.update_index(tensors["idx_keys"])


class StaticWindow(StaticAttention):
    """``StaticSlidingWindowLayer``: keys and values of the last W tokens, of which W - 1 are state."""

    def held(self, layer: Any, part: Rowed, position: int) -> torch.Tensor | None:
        tensor = read(layer, part.name)
        if tensor is None:
            return None
        filled = min(position, tensor.shape[part.row_axis])
        rows = min(part.rows.at(position, part.unit), filled)
        return tensor.narrow(part.row_axis, filled - rows, rows)

    def room_tokens(self, layer: Any) -> int | None:
        # Whether it was made for no more tokens than its window; the public property is another's in hybrid layers.
        return int(layer.max_cache_len) if layer._is_croppable else None  # noqa: SLF001

    def scalars(self, layer: Any) -> Scalars:
        return {"cumulative_length_int": layer.cumulative_length_int}

    def scalars_at(self, layer: Any, position: int) -> Scalars:
        return {"cumulative_length_int": position}

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        keys, values = tensors["keys"], tensors.get("values", tensors["keys"])
        layer.lazy_initialization(keys, values)
        end = min(position, layer.max_cache_len)
        begin = end - keys.shape[2]
        layer.keys[:, :, begin:end].copy_(keys)
        layer.values[:, :, begin:end].copy_(values)
        layer.cumulative_length.fill_(end)
        layer.cumulative_length_int = position
