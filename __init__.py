"""A KV-cache fabric for LLM inference on Ray clusters.

``launch`` starts a fabric, ``connect`` opens a session; everything else is reached from these.
Importing this package loads neither ray, torch nor nixl.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .actors.answer import Answer
    from .actors.async_session import AsyncSession
    from .actors.attempt import Attempt, Stored
    from .actors.fabric import Fabric, connect, connect_async, launch
    from .actors.graph import Graph
    from .actors.lease import Lease, LeaseRefused
    from .actors.session import Session
    from .actors.spec import FabricSpec
    from .engines.transformers.weights import weights_revision
    from .fabric.explanation import Explanation
    from .fabric.kinds import Cause, FabricError, ObjectKind, Reason, SpecError, Status
    from .fabric.model import GroupSpec, ModelSpec
    from .fabric.passport import AbiPassport

__version__ = "0.1.0"

_WHERE = {
    "AbiPassport": "fabric.passport",
    "Answer": "actors.answer",
    "AsyncSession": "actors.async_session",
    "Attempt": "actors.attempt",
    "Cause": "fabric.kinds",
    "Explanation": "fabric.explanation",
    "Fabric": "actors.fabric",
    "Graph": "actors.graph",
    "FabricError": "fabric.kinds",
    "FabricSpec": "actors.spec",
    "GroupSpec": "fabric.model",
    "Lease": "actors.lease",
    "LeaseRefused": "actors.lease",
    "ModelSpec": "fabric.model",
    "ObjectKind": "fabric.kinds",
    "Reason": "fabric.kinds",
    "Session": "actors.session",
    "SpecError": "fabric.kinds",
    "Status": "fabric.kinds",
    "Stored": "actors.attempt",
    "connect": "actors.fabric",
    "connect_async": "actors.fabric",
    "launch": "actors.fabric",
    "weights_revision": "engines.transformers.weights",
}

__all__ = [
    "AbiPassport",
    "Answer",
    "AsyncSession",
    "Attempt",
    "Cause",
    "Explanation",
    "Fabric",
    "FabricError",
    "FabricSpec",
    "Graph",
    "GroupSpec",
    "Lease",
    "LeaseRefused",
    "ModelSpec",
    "ObjectKind",
    "Reason",
    "Session",
    "SpecError",
    "Status",
    "Stored",
    "connect",
    "connect_async",
    "launch",
    "weights_revision",
]


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'kvfabric' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{where}", __name__), name)
    globals()[name] = value
    return value
