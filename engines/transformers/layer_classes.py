"""Which classes of transformers can be captured: caches, and their layers with an adapter each.

All by exact class. What is not here is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import GeometryMismatch, UnsupportedCache
from .layers import (
    BlockIndexedAttention,
    CompressedSparseAttention,
    FullAttention,
    HeavilyCompressedAttention,
    IndexedAttention,
    LayerAdapter,
    Recurrent,
    RecurrentAnd,
    Stateless,
    WindowAttention,
)
from .static_layers import StaticAttention, StaticBlockIndexedAttention, StaticIndexedAttention, StaticWindow

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

_LIBRARY = "transformers.cache_utils."
_MINIMAX_M3 = "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl."
_DEEPSEEK_V4 = "transformers.models.deepseek_v4.modeling_deepseek_v4."

_ADAPTERS: dict[str, LayerAdapter] = {
    f"{_LIBRARY}DynamicLayer": FullAttention(),
    f"{_LIBRARY}DynamicIndexedLayer": IndexedAttention(),
    f"{_LIBRARY}DynamicSlidingWindowLayer": WindowAttention(),
    f"{_LIBRARY}LinearAttentionLayer": Recurrent(),
    f"{_LIBRARY}LinearAttentionAndFullAttentionLayer": RecurrentAnd(FullAttention()),
    f"{_LIBRARY}LinearAttentionAndSlidingWindowAttentionLayer": RecurrentAnd(WindowAttention()),
    f"{_LIBRARY}DummyLayer": Stateless(),
    f"{_LIBRARY}StaticLayer": StaticAttention(),
    f"{_LIBRARY}StaticIndexedLayer": StaticIndexedAttention(),
    f"{_LIBRARY}StaticSlidingWindowLayer": StaticWindow(),
    f"{_LIBRARY}LinearAttentionAndStaticFullAttentionLayer": RecurrentAnd(StaticAttention()),
    f"{_LIBRARY}LinearAttentionAndStaticSlidingWindowAttentionLayer": RecurrentAnd(StaticWindow()),
    f"{_MINIMAX_M3}MiniMaxM3VLSparseCacheLayer": BlockIndexedAttention(),
    f"{_MINIMAX_M3}MiniMaxM3VLSparseStaticCacheLayer": StaticBlockIndexedAttention(),
    f"{_DEEPSEEK_V4}DeepseekV4HCACache": HeavilyCompressedAttention(),
    f"{_DEEPSEEK_V4}DeepseekV4CSACache": CompressedSparseAttention(),
}

_DYNAMIC_TWINS: dict[str, str] = {
    f"{_LIBRARY}StaticLayer": f"{_LIBRARY}DynamicLayer",
    f"{_LIBRARY}StaticIndexedLayer": f"{_LIBRARY}DynamicIndexedLayer",
    f"{_LIBRARY}StaticSlidingWindowLayer": f"{_LIBRARY}DynamicSlidingWindowLayer",
    f"{_LIBRARY}LinearAttentionAndStaticFullAttentionLayer": f"{_LIBRARY}LinearAttentionAndFullAttentionLayer",
    f"{_LIBRARY}LinearAttentionAndStaticSlidingWindowAttentionLayer": (
        f"{_LIBRARY}LinearAttentionAndSlidingWindowAttentionLayer"
    ),
    f"{_MINIMAX_M3}MiniMaxM3VLSparseStaticCacheLayer": f"{_MINIMAX_M3}MiniMaxM3VLSparseCacheLayer",
}
"""Static layer class to the dynamic one that holds the same state."""

_CACHES = frozenset(f"{_LIBRARY}{name}" for name in ("Cache", "DynamicCache", "StaticCache", "QuantizedCache"))
"""Caches that hold nothing but their layers. Others hold more: an encoder's cache, states beside the layers."""


def class_name(held: Any) -> str:
    """The qualified name of the class of a cache or of one of its layers."""
    cls = type(held)
    return f"{cls.__module__}.{cls.__qualname__}"


def is_static(layer: Any) -> bool:
    """Whether the layer's tensors are of a fixed size."""
    return class_name(layer) in _DYNAMIC_TWINS


def state_class(layer: Any) -> str:
    """The class by which a geometry names a layer's state: that of its dynamic twin."""
    name = class_name(layer)
    return _DYNAMIC_TWINS.get(name, name)


def adapter_of(index: int, layer: Any) -> LayerAdapter:
    """The adapter of a cache layer, by its exact class.

    Raises UnsupportedCache, naming layer and class, for a class that no adapter describes.
    """
    adapter = _ADAPTERS.get(class_name(layer))
    if adapter is None:
        known = ", ".join(sorted(name.rpartition(".")[2] for name in _ADAPTERS))
        raise UnsupportedCache(
            f"cache layer {index} is a {class_name(layer)}: its state falls under none of the kinds"
            f" that can be captured (known: {known})"
        )
    return adapter


def check_cache_class(cache: Cache) -> None:
    """Raise UnsupportedCache, naming the class, for a cache that may hold more than its layers."""
    if class_name(cache) not in _CACHES:
        known = ", ".join(sorted(name.rpartition(".")[2] for name in _CACHES))
        raise UnsupportedCache(f"the cache is a {class_name(cache)}: it may hold more than its layers (known: {known})")


def check_layers(cache: Cache, classes: tuple[str, ...]) -> None:
    """Raise unless the cache's layers hold the state that ``classes`` name, in that order.

    UnsupportedCache for a class without an adapter, GeometryMismatch for a layer of another state.
    """
    check_cache_class(cache)
    for index, (layer, expected) in enumerate(zip(cache.layers, classes, strict=False)):
        adapter_of(index, layer)
        if state_class(layer) != expected:
            raise GeometryMismatch(f"cache layer {index} is a {class_name(layer)}, this geometry has a {expected}")
    if len(cache.layers) != len(classes):
        raise GeometryMismatch(f"the cache has {len(cache.layers)} layers, this geometry {len(classes)}")


def check_room(cache: Cache, position: int) -> None:
    """Raise GeometryMismatch, naming the layer, if ``position`` is more tokens than one has room for."""
    for index, layer in enumerate(cache.layers):
        room = adapter_of(index, layer).room_tokens(layer)
        if room is not None and room < position:
            raise GeometryMismatch(
                f"cache layer {index} ({class_name(layer)}) has room for {room} tokens, not for {position}:"
                " make the cache with a larger max_cache_len"
            )
