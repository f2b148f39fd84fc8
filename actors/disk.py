"""A holder's disk tier, as its spec says: where its extents lie and what bounds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..fabric.effects import Event
from ..fabric.restores import RestoreLimit
from ..transport.disk.driver import DiskSettings, DiskTier
from ..transport.disk.protocol import RemoteSetup
from ..transport.loop_share import LoopShare
from ..transport.memfd import ArenaMemory
from .addresses import checked_name
from .spec import FabricSpec
from .spec_sections import DiskSpec, RemoteSpec

FIRST_GUESS_BYTES_PER_S = 1e9
"""A disk's speed until the first restores have measured it."""
OPEN_WAIT_S = 10.0
"""How long a holder's start waits for what its disk holds; a slower disk is taken in when it answers."""


def restore_settings(disk: DiskSpec | None) -> dict[str, Any]:
    """What a spec's disk says to the core: fields of HolderConfig."""
    if disk is None:
        return {}
    limits = (RestoreLimit(limit.bytes_max, limit.extents_max, kind) for kind, limit in disk.restore_limits.items())
    return {
        "disk_bytes_max": disk.bytes_max,
        "remote": disk.remote is not None,
        "restore_bytes_max": disk.restore_bytes_max,
        "restore_share": disk.restore_share,
        "restore_limits": tuple(limits),
        "restore_bytes_per_s": disk.bytes_per_s or FIRST_GUESS_BYTES_PER_S,
    }


def disk_tier(
    spec: FabricSpec,
    memory: ArenaMemory,
    tell: Callable[[Event], None],
    share: LoopShare,
    *,
    fabric: str,
    address: str,
    node: str,
) -> DiskTier | None:
    """The tier of one holder, not started yet; None where the spec names no disk.

    Holders of one node have a folder each under the fabric's: a node's name may change when its
    raylet is restarted, so the folder bears the holder's place and remembers the node.
    """
    disk = spec.disk
    if disk is None:
        return None
    settings = DiskSettings(
        root=str(Path(disk.path) / checked_name(fabric)),
        place=address.rsplit(":", 1)[-1],
        owner=node,
        bytes_max=disk.bytes_max,
        free_floor_bytes=disk.free_floor_bytes,
        codec=disk.codec,
        bytes_per_s=disk.bytes_per_s,
        passports=tuple(dict.fromkeys(spec.passport(group) for group in spec.model.groups)),
        remote=None if disk.remote is None else _remote_setup(disk.remote),
    )
    return DiskTier(settings, memory, tell, share)


def _remote_setup(remote: RemoteSpec) -> RemoteSetup:
    return RemoteSetup(
        remote.url,
        tuple(sorted(remote.options.items())),
        remote.allow_http,
        remote.bytes_max,
        remote.timeout_s,
        remote.check_s,
    )
