"""A command's way to a running fabric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...actors.fabric import Fabric


@contextmanager
def attached(fabric: str, address: str) -> Iterator[Fabric]:
    """The fabric of that name; this process leaves the cluster afterwards, if it was not on one before.

    Raises ray_api.Unavailable, with a remedy, where there is no cluster or no such fabric.
    """
    from ...actors import ray_api
    from ...actors.fabric import attach

    was_connected = ray_api.is_initialized()
    on_cluster(address)
    try:
        yield attach(fabric)
    finally:
        if not was_connected:
            ray_api.leave()


def on_cluster(address: str) -> None:
    """Be connected to that cluster ("": the one at hand)."""
    from ...actors.fabric import connect_ray

    connect_ray(address)
