"""What a holder says of itself in a fabric's status."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ..fabric.arena import SlotState
from ..fabric.books import Books
from ..fabric.invariants import slots_lost
from ..fabric.lifecycle import State

if TYPE_CHECKING:
    from .holder import Holder


def holder_status(holder: Holder) -> dict[str, Any]:
    """A holder's process, pools, leases, tiers and links."""
    ctx = holder.core.ctx
    names = [g.name for g in holder.spec.model.groups]
    pools = [
        {
            "group": names[p.group],
            "kind": str(holder.spec.model.groups[p.group].kind),
            "shard": p.shard,
            "slots": p.capacity,
            "free": p.unused,
            "evictable": p.evictable,
            "slabs": len(ctx.books.slabs.of((p.group, p.shard))),
            "slot_bytes": holder.spec.model.groups[p.group].block_bytes,
        }
        for p in ctx.books.pools.values()
    ]
    return {
        "address": holder.address,
        "pid": os.getpid(),
        "node": holder.node,
        "incarnation": holder.incarnation,
        "arena_bytes": holder.memory.layout.size_bytes,
        "grants": ctx.may_grant,
        "draining": ctx.draining,
        "drain": {"stage": str(holder.core.drain.stage), **holder.core.drain.counts},
        "bypassed": ctx.bypassed,
        "pools": pools,
        "leases": len(ctx.leases.live),
        "pinned_slots": int(np.count_nonzero(ctx.books.pins)),
        "faults": holder.faults_waiting(),
        "slots_lost": slots_lost(ctx.books) + holder.core.disk.host.pools.lost(),
        "quarantined_slots": _quarantined(ctx.books),
        "attempts": len(holder.core.stores.attempts),
        "requests_refused": holder.requests_refused,
        "host_memory": _host_status(holder),
        "disk": _disk_status(holder),
        "links": [str(kind) for kind in holder.transfers.links],
        "link_problems": holder.transfers.problems,
        "moved_bytes": dict(holder.transfers.moved),
        "link_of": holder.transfers.last_link,
        "counters": dict(ctx.counters),
        "lost_tokens": _lost(holder),
        "costs": None if ctx.planning is None else ctx.planning.known(),
        "placed_copies": {"prefixes": len(holder.core.copies.copies), "bytes": holder.core.copies.placed_bytes},
    }


def _lost(holder: Holder) -> list[dict[str, Any]]:
    """Tokens promised by hashes and not granted, by cause, the most first."""
    tally = holder.core.ctx.tally
    return [
        {"kind": kind, "reason": reason, "tokens": tokens, "requests": tally.cut_requests[kind, reason]}
        for (kind, reason), tokens in tally.cut_tokens.most_common()
        if tokens
    ]


def _quarantined(books: Books) -> int:
    """Slots of objects in quarantine: found among those whose headers say so, as those of barred objects do too."""
    slots = np.flatnonzero(books.arena.states[: len(books.owner)] == SlotState.QUARANTINED).tolist()
    return sum((obj := books.owner[slot]) is not None and obj.state is State.QUARANTINED for slot in slots)


def _disk_status(holder: Holder) -> dict[str, Any] | None:
    if holder.disk is None:
        return None
    desk = holder.core.disk
    return holder.disk.status() | {
        "used_bytes": desk.extents.used_bytes,
        "restoring": desk.restoring,
        "restores_waiting": desk.waiting,
        "restores_in_line": len(desk.line),
        "moves_waiting": len(holder.core.flow),
        "restore_bytes_per_s": round(desk.rate.bytes_per_s),
        "scrub": asdict(holder.core.disk_scrubber.found),
    }


def _host_status(holder: Holder) -> dict[str, Any] | None:
    """The tier of host memory below what readers map; None where there is none."""
    host = holder.core.disk.host
    if not host.pools.pools:
        return None
    names = [g.name for g in holder.spec.model.groups]
    pools = [
        {
            "group": names[group],
            "shard": shard,
            "slots": pool.slots,
            "free": len(pool.free),
            "slot_bytes": holder.spec.model.groups[group].block_bytes,
        }
        for (group, shard), pool in host.pools.pools.items()
    ]
    return {
        "pools": pools,
        "objects": sum(len(pool.standing) for pool in host.pools.pools.values()),
        "moving": host.at_work,
        "bytes_per_s": round(holder.core.disk.host_rate.bytes_per_s),
    }
