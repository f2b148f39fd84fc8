"""What can go wrong between a model's cache and the fabric's objects.

FabricError
└── EngineError               base of this package
    ├── MissingExtra          a library of the ``engines`` extra is not installed
    ├── UnsupportedCache      a cache layer, or its content, falls under none of the kinds
    └── GeometryMismatch      objects, position or passport do not fit this model's cache
"""

from __future__ import annotations

from ...fabric.kinds import FabricError


class EngineError(FabricError):
    """Base of the errors of the transformers engine."""


class MissingExtra(EngineError):
    """A library that the engine needs is not installed. The message holds the command."""


class UnsupportedCache(EngineError, TypeError):
    """The cache holds state that none of the kinds describes, or not what its position implies."""


class GeometryMismatch(EngineError, ValueError):
    """Bytes, position or passport do not fit this model's cache: nothing was restored."""
