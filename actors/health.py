"""What a holder tells an engineer on call: its leases, and the facts that ``kvfabric doctor`` judges."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ..fabric.history import chain_of, history_of
from ..fabric.holder import HolderCore
from ..fabric.invariants import Violation
from ..transport.memfd import memory_available_bytes

PACKAGES = ("kvfabric", "ray", "nixl", "nixl-cu12", "torch", "numpy", "msgpack", "pydantic")
VIOLATIONS_TOLD_MAX = 20


def leases_of(core: HolderCore) -> list[dict[str, Any]]:
    """Every live lease that this holder leads."""
    now = core.ctx.now
    return [
        {
            "lease": record.lease,
            "tokens": record.proof.tokens,
            "tenant": record.tenant,
            "client": record.client,
            "graph": record.graph,
            "age_s": round(now - record.granted_s, 3),
            "left_s": round(record.deadline_s - now, 3),
            "slots": len(record.proof.claim.slots),
            "ranks": 1 + len(record.mates),
        }
        for record in core.ctx.leases.live.values()
        if record.leader == core.ctx.config.holder
    ]


def health_of(
    core: HolderCore, found: Sequence[Violation], link_problems: dict[str, str], disk: dict[str, Any] | None
) -> dict[str, Any]:
    """Facts about a holder's process, its node and its books; ``found``: what of the invariants does not hold."""
    return {
        "incarnation": core.ctx.incarnation,
        "violations": [f"{v.invariant}: {v.detail}" for v in found[:VIOLATIONS_TOLD_MAX]],
        "violations_count": len(found),
        "grants_left_s": round(core.ctx.grants_until_s - core.ctx.now, 3) if core.ctx.grants_until_s < 2**62 else None,
        "draining": core.ctx.draining,
        "bypassed": core.ctx.bypassed,
        "staleness_s": core.events.staleness_s,
        "quarantined_bytes": sum(core.ctx.books.quarantined_bytes.values()),
        "link_problems": link_problems,
        "disk": disk,
        "audits": {str(outcome): n for outcome, n in core.ctx.tally.audits.items()},
        **process_facts(),
    }


def chain_told(core: HolderCore, what: str) -> dict[str, str] | None:
    """The digests, by unit, of the chain of a lease (its number) or of a digest (hex), as the journal knows it."""
    prompt = chain_of(core.ctx, lease=int(what)) if len(what) < 64 else chain_of(core.ctx, digest=bytes.fromhex(what))
    return None if prompt is None else {str(unit): blob.hex() for unit, blob in prompt.keys}


def history_told(core: HolderCore, keys: str) -> list[dict[str, Any]]:
    """What the journal says of a chain, given as :func:`chain_told` gives it, as JSON."""
    return history_of(core.ctx, {int(unit): bytes.fromhex(blob) for unit, blob in json.loads(keys).items()})


def process_facts() -> dict[str, Any]:
    """What this process sees of its node and of itself."""
    shm = os.statvfs("/dev/shm")  # noqa: S108 - it is asked how full it is
    return {
        "wall_s": time.time(),
        "niceness": os.nice(0),
        "memory_available_bytes": memory_available_bytes(),
        "shm_free_bytes": shm.f_bavail * shm.f_frsize,
        "shm_bytes": shm.f_blocks * shm.f_frsize,
        "infiniband": _has_infiniband(),
        "environment": {k: v for k, v in os.environ.items() if k in {"UCX_MODULES", "UCX_TLS", "NIXL_LOG_LEVEL"}},
        "versions": versions(),
    }


def _has_infiniband() -> bool:
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def versions() -> dict[str, str]:
    """Of this interpreter and the packages that must agree between nodes."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
