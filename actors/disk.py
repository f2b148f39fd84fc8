"""A holder's disk tier, as its spec says: where its extents lie and what bounds them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ..fabric.effects import Event
from ..transport.disk.driver import DiskSettings, DiskTier
from ..transport.memfd import ArenaMemory
from .spec import FabricSpec

OPEN_WAIT_S = 10.0
"""How long a holder's start waits for what its disk holds; a slower disk is taken in when it answers."""


def disk_tier(
    spec: FabricSpec, memory: ArenaMemory, tell: Callable[[Event], None], *, fabric: str, address: str, node: str
) -> DiskTier | None:
    """The tier of one holder, not started yet; None where the spec names no disk.

    Holders of one node have a folder each under the fabric's: a node's name may change when its
    raylet is restarted, so the folder bears the holder's place and remembers the node.
    """
    disk = spec.disk
    if disk is None:
        return None
    folder = re.sub(r"[^A-Za-z0-9._-]", "_", fabric).lstrip(".") or "_"
    settings = DiskSettings(
        root=str(Path(disk.path) / folder),
        place=address.rsplit(":", 1)[-1],
        owner=node,
        bytes_max=disk.bytes_max,
        free_floor_bytes=disk.free_floor_bytes,
        codec=disk.codec,
        bytes_per_s=disk.bytes_per_s,
        passports=tuple(dict.fromkeys(spec.passport(group) for group in spec.model.groups)),
    )
    return DiskTier(settings, memory, tell)
