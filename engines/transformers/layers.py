"""What each cache layer class of transformers holds, and how a layer is filled again.

A layer's state is some tensors with an axis of rows (tokens, compressed entries) and some scalars.
Each tensor is a :class:`Part`: its rows at position p follow one :class:`Rows` rule. Each scalar
is a function of p. An adapter names both, so that capture can verify that the cache really stands
at p and restore can set what no tensor carries.

Adapters are looked up by the exact class: a subclass may hold more state than its base, and state
that nobody names would be lost without a sound. A class without an adapter is refused, and so is a
cache class that holds more than its layers.

A static layer holds what its dynamic twin holds, inside tensors of a fixed size: both read and
write the same objects (``static_layers``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch


class Rows(StrEnum):
    """How many rows a tensor has at position p, in terms of the part's ``unit``."""

    TOKENS = "tokens"  # p: one row a token
    ENTRIES = "entries"  # floor(p / unit): one row a compressed entry
    WINDOW = "window"  # min(p, unit): the last W - 1 rows, unit = W - 1
    BUFFER = "buffer"  # p mod unit: tokens since the last whole entry
    OVERLAP = "overlap"  # unit once p >= unit: the half window the next entry still reads
    WHOLE = "whole"  # 1: a state without rows, valid at exactly p

    def at(self, position: int, unit: int) -> int:
        """Rows held at ``position`` (tokens)."""
        match self:
            case Rows.TOKENS:
                return position
            case Rows.ENTRIES:
                return position // unit
            case Rows.WINDOW:
                return min(position, unit)
            case Rows.BUFFER:
                return position % unit
            case Rows.OVERLAP:
                return unit if position >= unit else 0
            case Rows.WHOLE:
                return 1

    def most(self, unit: int) -> int:
        """The most rows a snapshot of this tensor can have. Tokens and entries have no bound."""
        match self:
            case Rows.BUFFER:
                return unit - 1
            case Rows.WINDOW | Rows.OVERLAP:
                return unit
            case Rows.WHOLE:
                return 1
            case Rows.TOKENS | Rows.ENTRIES:
                raise ValueError(f"{self}: grows with the position")


class Role(StrEnum):
    """Which cache group a part belongs to."""

    KV = "kv"
    INDEX = "index"
    RECURRENT = "recurrent"
    CSA = "csa"
    CSA_INDEX = "csa_index"
    CSA_TAIL = "csa_tail"
    CSA_INDEX_TAIL = "csa_index_tail"
    HCA = "hca"
    HCA_TAIL = "hca_tail"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a cache layer. ``name`` is its attribute, after a dot its key in that dict."""

    role: Role
    name: str
    row_axis: int
    rows: Rows
    unit: int = 1


Scalars = dict[str, int | bool | None]


class Rowed(Protocol):
    """A tensor of a layer and the rule its rows follow: a part, or the field that was cut from one."""

    @property
    def name(self) -> str:
        """Its attribute, after a dot its key in that dict."""

    @property
    def row_axis(self) -> int:
        """The axis its rows lie on."""

    @property
    def rows(self) -> Rows:
        """How many rows there are."""

    @property
    def unit(self) -> int:
        """In which unit."""


class LayerAdapter(Protocol):
    """What one cache layer class holds. ``shared`` says that keys and values are one tensor."""

    def held(self, layer: Any, part: Rowed, position: int) -> torch.Tensor | None:
        """What the layer, standing at ``position``, holds of that tensor: its rows and no padding."""

    def room_tokens(self, layer: Any) -> int | None:
        """How many tokens the layer has room for; None without a bound."""

    def parts(self, layer: Any, shared: bool) -> tuple[Part, ...]:
        """The layer's tensors."""

    def scalars(self, layer: Any) -> Scalars:
        """The layer's scalars as they stand."""

    def scalars_at(self, layer: Any, position: int) -> Scalars:
        """The scalars of a layer that stands at ``position``."""

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        """Fill an empty layer with tensors by part name, and set its scalars for ``position``."""


def read(layer: Any, name: str) -> torch.Tensor | None:
    """The tensor of that part name; None while the layer has not made it."""
    attribute, _, key = name.partition(".")
    held = getattr(layer, attribute)
    value: torch.Tensor | None = held[int(key) if key.isdigit() else key] if key else held
    return value


def _write(layer: Any, name: str, tensor: torch.Tensor | None) -> None:
    attribute, _, key = name.partition(".")
    if key:
        getattr(layer, attribute)[int(key) if key.isdigit() else key] = tensor
    else:
        setattr(layer, attribute, tensor)


def _values_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors.get("values", tensors["keys"])


def _key_and_value_parts(role: Role, rows: Rows, unit: int, shared: bool) -> tuple[Part, ...]:
    names = ("keys",) if shared else ("keys", "values")
    return tuple(Part(role, name, 2, rows, unit) for name in names)


class Growing:
    """A layer whose tensors have as many rows as they hold."""

    def held(self, layer: Any, part: Rowed, position: int) -> torch.Tensor | None:
        return read(layer, part.name)

    def room_tokens(self, layer: Any) -> int | None:
        return None


class FullAttention(Growing):
    """``DynamicLayer``: keys and values of every token, shape [1, heads, tokens, head size]."""

    def parts(self, layer: Any, shared: bool) -> tuple[Part, ...]:
        return _key_and_value_parts(Role.KV, Rows.TOKENS, 1, shared)

    def scalars(self, layer: Any) -> Scalars:
        return {}

    def scalars_at(self, layer: Any, position: int) -> Scalars:
        return {}

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        layer.lazy_initialization(tensors["keys"], _values_of(tensors))
        layer.keys, layer.values = tensors["keys"], _values_of(tensors)


class IndexedAttention(FullAttention):
    """``DynamicIndexedLayer``: keys and values, and indexer keys [1, tokens, index head size]."""

    def parts(self, layer: Any, shared: bool) -> tuple[Part, ...]:
        return (*super().parts(layer, shared), Part(Role.INDEX, "indexer_keys", 1, Rows.TOKENS))

    def scalars(self, layer: Any) -> Scalars:
        return {"indexer_position_ids": None if layer.indexer_position_ids is None else True}

    def scalars_at(self, layer: Any, position: int) -> Scalars:
        return {"indexer_position_ids": None}

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        super().install(layer, tensors, position)
        layer.lazy_initialization_indexer(tensors["indexer_keys"])
        layer.indexer_keys = tensors["indexer_keys"]


class BlockIndexedAttention(FullAttention):
    """``MiniMaxM3VLSparseCacheLayer``: keys and values, and indexer keys [1, heads, tokens, index head size]."""

    def parts(self, layer: Any, shared: bool) -> tuple[Part, ...]:
        return (*super().parts(layer, shared), Part(Role.INDEX, "idx_keys", 2, Rows.TOKENS))

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        super().install(layer, tensors, position)
        layer.idx_keys = tensors["idx_keys"]


class WindowAttention(Growing):
    """``DynamicSlidingWindowLayer``: keys and values of the last W - 1 tokens, and the position."""

    def parts(self, layer: Any, shared: bool) -> tuple[Part, ...]:
        return _key_and_value_parts(Role.WINDOW, Rows.WINDOW, layer.sliding_window - 1, shared)

    def scalars(self, layer: Any) -> Scalars:
        return {"cumulative_length": layer.cumulative_length}

    def scalars_at(self, layer: Any, position: int) -> Scalars:
        return {"cumulative_length": position}

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        layer.lazy_initialization(tensors["keys"], _values_of(tensors))
        layer.keys, layer.values = tensors["keys"], _values_of(tensors)
        layer.cumulative_length = position


class Recurrent(Growing):
    """``LinearAttentionLayer``: convolution and recurrent states, overwritten in place each step.

    A state without a convolution has no flag: the library sets it with the convolution's.
    """

    def parts(self, layer: Any, shared: bool) -> tuple[Part, ...]:
        names = (
            f"{kind}.{state}"
            for state in range(layer.number_of_states)
            for kind in ("conv_states", "recurrent_states")
            if read(layer, f"{kind}.{state}") is not None
        )
        return tuple(Part(Role.RECURRENT, name, 0, Rows.WHOLE) for name in names)

    def scalars(self, layer: Any) -> Scalars:
        return {f"has_previous_state.{i}": layer.has_previous_state[i] for i in range(layer.number_of_states)}

    def scalars_at(self, layer: Any, position: int) -> Scalars:
        return {
            f"has_previous_state.{i}": position > 0 and layer.conv_states[i] is not None
            for i in range(layer.number_of_states)
        }

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        for name, tensor in tensors.items():
            attribute, _, state = name.partition(".")
            layer.lazy_initialization(**{attribute: tensor}, state_idx=int(state))
            held = read(layer, name)
            assert held is not None
            held.copy_(tensor)
            if attribute == "conv_states":
                layer.has_previous_state[int(state)] = True


class RecurrentAnd(Growing):
    """A layer that has a recurrent state beside attention, or has no attention after all (some of Zamba's)."""

    def __init__(self, attention: LayerAdapter) -> None:
        self._attention = attention
        self._recurrent = Recurrent()

    def held(self, layer: Any, part: Rowed, position: int) -> torch.Tensor | None:
        adapter = self._recurrent if part.rows is Rows.WHOLE else self._attention
        return adapter.held(layer, part, position)

    def room_tokens(self, layer: Any) -> int | None:
        return self._attention.room_tokens(layer)

    def parts(self, layer: Any, shared: bool) -> tuple[Part, ...]:
        attention = self._attention.parts(layer, shared) if layer.keys is not None else ()
        return (*self._recurrent.parts(layer, shared), *attention)

    def scalars(self, layer: Any) -> Scalars:
        attention = self._attention.scalars(layer) if layer.keys is not None else {}
        return {**self._recurrent.scalars(layer), **attention}

    def scalars_at(self, layer: Any, position: int) -> Scalars:
        attention = self._attention.scalars_at(layer, position) if layer.keys is not None else {}
        return {**self._recurrent.scalars_at(layer, position), **attention}

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        attention = {name: tensor for name, tensor in tensors.items() if "." not in name}
        states = {name: tensor for name, tensor in tensors.items() if "." in name}
        self._recurrent.install(layer, states, position)
        if attention:
            self._attention.install(layer, attention, position)


class HeavilyCompressedAttention(WindowAttention):
    """``DeepseekV4HCACache``: window rows, compressed entries, and the tokens since the last entry.

    Entry w summarises tokens [m' w, m' (w + 1)); the buffers hold the raw projections of the last
    p mod m' tokens (DeepSeek-V4 report, section 2.3.2).
    """

    history, tail = Role.HCA, Role.HCA_TAIL

    def parts(self, layer: Any, shared: bool) -> tuple[Part, ...]:
        window = super().parts(layer, shared=True)
        return (*window, *self._compressor_parts("compressor", self.history, self.tail, layer.compress_rate))

    @staticmethod
    def _compressor_parts(name: str, history: Role, tail: Role, rate: int) -> tuple[Part, ...]:
        return (
            Part(history, f"compressed_kv.{name}", 1, Rows.ENTRIES, rate),
            Part(tail, f"buffer_kv.{name}", 1, Rows.BUFFER, rate),
            Part(tail, f"buffer_gate.{name}", 1, Rows.BUFFER, rate),
        )

    def scalars(self, layer: Any) -> Scalars:
        counts = {f"entry_count.{name}": count for name, count in layer.entry_count.items()}
        return {**super().scalars(layer), **counts}

    def scalars_at(self, layer: Any, position: int) -> Scalars:
        entries = position // layer.compress_rate
        return {**super().scalars_at(layer, position), **{f"entry_count.{n}": entries for n in layer.entry_count}}

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        super().install(layer, tensors, position)
        for name, tensor in tensors.items():
            if name != "keys":
                _write(layer, name, tensor)
        for name in layer.entry_count:
            layer.entry_count[name] = position // layer.compress_rate


class CompressedSparseAttention(HeavilyCompressedAttention):
    """``DeepseekV4CSACache``: two compressors, main and indexer, whose windows overlap by half.

    Entry w reads tokens [m (w - 1), m (w + 1)): the last whole window's first series is still
    needed at every p >= m, aligned or not (DeepSeek-V4 report, section 2.3.1).
    """

    history, tail = Role.CSA, Role.CSA_TAIL

    def parts(self, layer: Any, shared: bool) -> tuple[Part, ...]:
        rate = layer.compress_rate
        return (
            *super().parts(layer, shared),
            *self._overlap_parts("compressor", self.tail, rate),
            *self._compressor_parts("indexer", Role.CSA_INDEX, Role.CSA_INDEX_TAIL, rate),
            *self._overlap_parts("indexer", Role.CSA_INDEX_TAIL, rate),
        )

    @staticmethod
    def _overlap_parts(name: str, tail: Role, rate: int) -> tuple[Part, ...]:
        names = (f"overlap_kv.{name}", f"overlap_gate.{name}")
        return tuple(Part(tail, part, 1, Rows.OVERLAP, rate) for part in names)

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        super().install(layer, tensors, position)
        if position < layer.compress_rate:  # no whole window yet: the layer tells this by None
            for part in (p for p in self.parts(layer, True) if p.rows is Rows.OVERLAP):
                _write(layer, part.name, None)


class Stateless(Growing):
    """``DummyLayer``: a layer that reads another's cache, or has no attention."""

    def parts(self, layer: Any, shared: bool) -> tuple[Part, ...]:
        return ()

    def scalars(self, layer: Any) -> Scalars:
        return {}

    def scalars_at(self, layer: Any, position: int) -> Scalars:
        return {}

    def install(self, layer: Any, tensors: dict[str, torch.Tensor], position: int) -> None:
        """Nothing to fill."""
