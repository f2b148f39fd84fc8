"""The one door to the transformers library: lazy, quiet, and clear when it is not there."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .errors import MissingExtra

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache

INSTALL = "pip install 'kvfabric[engines]'"


def require(module: str = "transformers") -> Any:
    """Import a library of the ``engines`` extra.

    Raises MissingExtra, one line with the command that installs it, if it is not there.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise MissingExtra(f"the transformers engine needs {missing}, which is not installed: {INSTALL}") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' advice about optional kernels, then restore the user's verbosity."""
    logging = require("transformers.utils.logging")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the text decoder, whose layers own the cache."""
    decoder: PreTrainedConfig = config.get_text_config(decoder=True)
    return decoder


def fresh_cache(config: PreTrainedConfig) -> Cache:
    """An empty cache with the layer classes that the model itself would make."""
    cache: Cache = require("transformers.cache_utils").DynamicCache(config=config)
    return cache


def cache_keyword(model: PreTrainedModel) -> str:
    """What the model's forward pass calls its cache: it has another name before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def feed(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, *, logits_to_keep: int = 0) -> torch.Tensor:
    """Run ``ids`` [1, tokens] through the model behind what ``cache`` holds: logits [1, kept, vocabulary].

    ``logits_to_keep`` 0 keeps all.
    """
    arguments: dict[str, Any] = {cache_keyword(model): cache, "use_cache": True, "logits_to_keep": logits_to_keep}
    logits: torch.Tensor = model(input_ids=ids, **arguments).logits
    return logits
