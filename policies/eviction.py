"""Which eviction policy a spec names: one of these, or one that a package brings by entry point."""

from __future__ import annotations

from importlib import metadata

from ..fabric.eviction import EvictionFactory, LeastRecentlyUsed
from ..fabric.kinds import SpecError
from .s3fifo import S3Fifo
from .worth import Worth

GROUP = "kvfabric.eviction"
"""Entry points of other packages: each names a callable that makes an ``Eviction`` of a holder's pools."""

_OWN: dict[str, EvictionFactory] = {"default": Worth, "lru": LeastRecentlyUsed, "s3fifo": S3Fifo}
NAMES = tuple(_OWN)


def eviction_policy(name: str) -> EvictionFactory:
    """The policy that a spec names. Raises SpecError for a name that is none, or cannot be loaded."""
    if name in _OWN:
        return _OWN[name]
    entries = metadata.entry_points(group=GROUP, name=name)
    if not entries:
        known = ", ".join((*NAMES, *sorted(entry.name for entry in metadata.entry_points(group=GROUP))))
        raise SpecError(f"eviction: {name!r} is none of {known}")
    try:
        factory: EvictionFactory = next(iter(entries)).load()
    except (ImportError, AttributeError) as error:
        raise SpecError(f"eviction: {name}: cannot be loaded: {error}") from None
    if not callable(factory):
        raise SpecError(f"eviction: {name}: {factory!r} is nothing that makes a policy")
    return factory
