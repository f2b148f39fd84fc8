"""Windows that were not kept, computed again from history that was: a replay lease made usable.

The lease covers the history of tokens [0, Q) and no window. The model runs over [start, Q) on a
cache whose full-attention layers answer from the leased rows, not from what the run computes: so a
layer's error reaches no further than its own window, and after the sum of all windows none is left
(``fabric.replay`` has the rule, and chooses ``start``). The run's own history is thrown away. Windows
start as rows of zeros, so that every step has the shapes of a run that had them.

Models of ordinary history and windows replay. A compressor (DeepSeek-V4) would have to be fed
half-projected rows that no lease holds, and an indexer's layer another class: such a lease is
answered by a recompute.

Imports transformers: load it when there is something to replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

from .geometry import Field, Geometry
from .layer_classes import adapter_of
from .layers import read
from .library import feed, fresh_cache, quiet
from .restore import State

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


class _Leased(DynamicLayer):  # type: ignore[no-untyped-call]  # the library's hook has no types
    """Full attention over leased rows: what a step computes is counted, and dropped."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys, values)
        self._leased = keys, values
        self._show(start)

    def _show(self, tokens: int) -> None:
        self.keys, self.values = (tensor[:, :, :tokens] for tensor in self._leased)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The leased rows of every token before the step and of the step itself."""
        self._show(self.get_seq_length() + key_states.shape[-2])
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values


def replay(model: PreTrainedModel, geometry: Geometry, tokens: Sequence[int], start: int, state: State) -> State:
    """``state`` at ``len(tokens)``, completed by the windows that computing ``tokens[start:]`` leaves.

    ``state`` has the history of all tokens, copied from a lease; it is not changed. The geometry is one
    that ``replayable_groups`` accepts.
    """
    cache = _at(model, geometry, start, state)
    with quiet(), torch.no_grad():
        feed(model, cache, torch.tensor([list(tokens[start:])], device=model.device), logits_to_keep=1)
    completed = {layer: dict(tensors) for layer, tensors in state.items()}
    for field in _window_fields(geometry):
        tensor = read(cache.layers[field.layer], field.name)
        assert tensor is not None
        completed.setdefault(field.layer, {})[field.name] = tensor
    return completed


def _at(model: PreTrainedModel, geometry: Geometry, start: int, state: State) -> Cache:
    """A cache that stands at ``start``: leased history, and windows of zeros."""
    cache = fresh_cache(model.config)
    windows: dict[int, dict[str, torch.Tensor]] = {}
    for field in _window_fields(geometry):
        held = state[field.layer][field.name]
        shape = list(held.shape)
        shape[field.row_axis] = field.rows.at(start, field.unit)
        windows.setdefault(field.layer, {})[field.name] = held.new_zeros(shape)
    for index, layer in enumerate(cache.layers):
        if index in windows:
            adapter_of(index, layer).install(layer, windows[index], start)
        elif index in state:
            cache.layers[index] = _Leased(state[index]["keys"], state[index]["values"], start)
    return cache


def _window_fields(geometry: Geometry) -> list[Field]:
    return [field for group in geometry.groups if group.spec.window_tokens is not None for field in group.fields]
