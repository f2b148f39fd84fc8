"""Small builders for rule tests: models and evidence written the way the laws speak of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvfabric.fabric.evidence import Blocked, GroupEvidence
from kvfabric.fabric.model import ModelSpec


def model_of(*groups: dict[str, Any], **fields: Any) -> ModelSpec:
    return ModelSpec.load({"groups": list(groups), **fields})


def history(name: str = "kv", block_tokens: int = 16, **fields: Any) -> dict[str, Any]:
    return {"name": name, "kind": "compressed_history", "block_tokens": block_tokens, **fields}


def recurrent(name: str = "ssm", grid_tokens: int = 32, **fields: Any) -> dict[str, Any]:
    return {"name": name, "kind": "compressed_history", "form": "state", "grid_tokens": grid_tokens, **fields}


def tail(name: str = "tail", of: str = "kv", block_tokens: int = 4, **fields: Any) -> dict[str, Any]:
    return {"name": name, "kind": "uncompressed_tail", "of": of, "block_tokens": block_tokens, **fields}


def window(name: str = "swa", block_tokens: int = 16, window_tokens: int = 32, **fields: Any) -> dict[str, Any]:
    kind = {"kind": "sliding_window", "block_tokens": block_tokens, "window_tokens": window_tokens}
    return {"name": name, **kind, **fields}


def indexer(name: str = "idx", of: str = "kv", block_tokens: int = 16, **fields: Any) -> dict[str, Any]:
    return {"name": name, "kind": "indexer", "of": of, "block_tokens": block_tokens, **fields}


def bits(objects: Iterable[int]) -> int:
    """The bitmap of some object indices."""
    return sum(1 << i for i in set(objects))


def held(objects: Iterable[int], revision: int = 0, *, blocked: tuple[Blocked, ...] = ()) -> GroupEvidence:
    """A group whose objects are all usable in one revision; what is blocked matches too."""
    usable = bits(objects)
    matched = usable
    for entry in blocked:
        matched |= entry.bits
    return GroupEvidence({revision: usable} if usable else {}, matched, blocked)


def in_revisions(**objects: Iterable[int]) -> GroupEvidence:
    """A group held in several revisions: ``r0=range(4), r1=range(2)``."""
    usable = {int(name[1:]): bits(indices) for name, indices in objects.items()}
    matched = 0
    for some in usable.values():
        matched |= some
    return GroupEvidence(usable, matched)
