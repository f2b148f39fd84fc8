"""A digest over a model's tensors, so that nobody has to be trusted to name its weights.

A fine-tune that moved every weight by 1 % and kept its name changed 70 of 128 greedy tokens when
its cache was reused; names prove nothing, bytes do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from blake3 import blake3

from .errors import EngineError
from .library import require
from .tensors import dtype_name

SCHEME = "b3"
"""Prefix of every revision: the digest's scheme."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class WeightsError(EngineError, ValueError):
    """The weights at this path, or in this module, cannot be digested. The message says what to do."""


def weights_revision(source: torch.nn.Module | str | Path) -> str:
    """``b3-`` and 32 hex digits over name, dtype, shape and bytes of every tensor of a model.

    ``source`` is a module (parameters and the buffers a checkpoint holds; a tensor that two names
    share counts once, under its first name), a safetensors file, or a directory of them: the
    shards that ``model.safetensors.index.json`` lists, else ``model.safetensors``, else every
    ``*.safetensors`` in it. Order, sharding and file metadata do not matter.

    A module and the files it was loaded from agree if loading renamed and fused nothing;
    transformers does so in many mixture-of-experts models. Use one of the two throughout a fabric.

    Raises WeightsError if there is no safetensors file (pickled checkpoints are never opened), if
    a file is damaged or two shards name one tensor, or if a tensor has no bytes (meta device).
    """
    digests: dict[str, bytes] = {}
    if isinstance(source, torch.nn.Module):
        for name, tensor in _module_tensors(source):
            digests[name] = _tensor_digest(name, tensor)
    else:
        for file in _files(Path(source)):
            _add_file(digests, file)
    if not digests:
        raise WeightsError(
            f"weights_revision: {source if isinstance(source, str | Path) else 'the module'} has no tensors"
        )
    whole = blake3(derive_key_context="kvfabric 2026 weights revision")
    for name in sorted(digests):
        whole.update(digests[name])
    return f"{SCHEME}-{whole.hexdigest(16)}"


def _module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor a checkpoint holds, shared ones once."""
    yield from module.named_parameters()
    saved = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in saved:
            yield name, buffer


def _tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """32 bytes over one tensor: a length-prefixed header, then the elements in row-major order."""
    if tensor.is_meta:
        raise WeightsError(f"weights_revision: {name} is on the meta device, load the weights first")
    header = json.dumps([name, dtype_name(tensor.dtype), list(tensor.shape)]).encode()
    digest = blake3(derive_key_context="kvfabric 2026 tensor")
    digest.update(len(header).to_bytes(8, "little") + header)
    elements = tensor.detach().cpu().contiguous().reshape(-1)
    if elements.numel():
        digest.update(elements.view(torch.uint8).numpy().data)
    return digest.digest()


def _files(path: Path) -> list[Path]:
    """The safetensors files that make up the weights at a path."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise WeightsError(
                f"{path}: only safetensors files are read (pickled checkpoints can run code when opened);"
                " save the model with save_pretrained() or safetensors.torch.save_file()"
            )
        return [path]
    if not path.is_dir():
        raise WeightsError(f"{path}: there is no such file or directory")
    index = path / _INDEX
    if index.is_file():
        return [path / name for name in _shards(index)]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{path}: there is no *.safetensors file in it (pickled checkpoints are never opened)")
    return files


def _shards(index: Path) -> list[str]:
    """Names of the shards an index lists: plain names of files beside it."""
    try:
        listed = json.loads(index.read_text())["weight_map"].values()
        names = sorted({str(name) for name in listed})
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index}: not an index of shards ({error})") from None
    for name in names:
        if Path(name).name != name:
            raise WeightsError(f"{index}: weight_map names {name!r}, which is not a file beside it")
    return names


def _add_file(digests: dict[str, bytes], file: Path) -> None:
    """Digest the tensors of one file, one in memory at a time."""
    safetensors = require("safetensors")
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if name in digests:
                    raise WeightsError(f"{file}: tensor {name} stands in another shard too")
                digests[name] = _tensor_digest(name, opened.get_tensor(name))
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{file}: cannot be read as safetensors ({error})") from None
