"""What one scheduler step asks of the workers. Plain data: vLLM carries it to them in its own way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

BlockIds = tuple[tuple[int, ...], ...]
"""Device blocks by cache group, in the order of tokens; 0 where a window has left one out."""


@dataclass(frozen=True, slots=True)
class Load:
    """Fill a request's blocks of tokens [first, position)."""

    request: str
    tokens: tuple[int, ...]
    """The prompt up to ``position`` and one more: so no longer prefix can be the answer."""
    key: dict[str, Any]
    first: int
    position: int
    blocks: BlockIds


@dataclass(frozen=True, slots=True)
class Save:
    """Keep blocks that this step computes: (object index, device block) by cache group."""

    tokens: tuple[int, ...]
    key: dict[str, Any]
    blocks: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(slots=True)
class Step(KVConnectorMetadata):  # type: ignore[misc]
    """Everything one step moves."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
