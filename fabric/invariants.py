"""The invariants, as code: named functions over one holder's books, each a list of violations.

They run after every simulated step, in tests, and on demand in production (``kvfabric doctor``).
An empty list is the good news. Nothing here changes anything or raises for what it finds.

    admission_limits_hold       no limit is exceeded, and what is charged is what is owned
    kinds_stay_separate         each slot serves the one group and shard of its pool
    validated_is_what_is_used   every live lease's slots still bear the leased versions
    graph_topology_is_static    nothing under a graph lease has moved
    granted_after_proof         every live lease stands on four passed verdicts over its very slots
    nothing_is_lost             free + reserved + sealed + pinned + quarantined = pool, and every
                                slot and every pin is owed to somebody
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .books import Obj
from .holder import HolderCore
from .kinds import Layer
from .leases import slots_stand
from .lifecycle import State
from .validation import Proof

LAYERS_PROVEN = (Layer.WHOLE_BLOCK, Layer.ABI, Layer.INTERSECTION, Layer.ALIGNMENT)

IN_HAND = frozenset({State.RESERVED, State.FILLING, State.RESTORING})
"""Slots in these states are reserved for bytes on their way."""

STAYING = frozenset({State.SEALED, State.DEMOTING, State.EVICTING})
"""In these states an object's bytes lie where they lay: being written to disk or outdated moves nothing."""

ON_DISK_ONLY = frozenset({State.ON_TIER})


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that should never be: which invariant, and what was found."""

    invariant: str
    detail: str


@dataclass(frozen=True, slots=True)
class Accounting:
    """One holder's slots by what they are doing; ``lost`` is what no other column explains."""

    pool_slots: int
    free: int
    reserved: int
    sealed: int
    pinned: int
    quarantined: int
    on_tier: int
    pins: int

    @property
    def lost(self) -> int:
        """Slots of the pools that nothing accounts for."""
        return self.pool_slots - self.free - self.reserved - self.sealed - self.pinned - self.quarantined


def accounting(core: HolderCore) -> Accounting:
    """Count every slot once. ``pins`` counts slots with at least one pin, in whatever state."""
    books = core.ctx.books
    counts: Counter[str] = Counter()
    pins = 0
    for obj in books.owner:
        if obj is None:
            continue
        pins += obj.pins > 0
        if obj.state is State.QUARANTINED:
            counts["quarantined"] += 1
        elif obj.state in IN_HAND:
            counts["reserved"] += 1
        elif obj.pins:
            counts["pinned"] += 1
        elif obj.state is State.SEALED:
            counts["sealed"] += 1
    on_tier = sum(obj.state in ON_DISK_ONLY for table in books.table.values() for obj in table.values())
    return Accounting(
        pool_slots=sum(pool.slots for pool in books.pools.values()),
        free=sum(len(pool.free) for pool in books.pools.values()),
        reserved=counts["reserved"],
        sealed=counts["sealed"],
        pinned=counts["pinned"],
        quarantined=counts["quarantined"],
        on_tier=on_tier,
        pins=pins,
    )


# --- the six -----------------------------------------------------------------------------------


def admission_limits_hold(core: HolderCore) -> list[Violation]:
    """Byte limits, restore caps and the bounds of every queue."""
    ctx = core.ctx
    found = [Violation("admission_limits_hold", detail) for detail in ctx.books.admission.excess(ctx.books.owner)]
    bounds = (
        ("restores at a time", core.disk.restoring, ctx.config.restores_max),
        ("open write attempts", len(core.stores.attempts), ctx.config.attempts_max),
        ("acquires in progress", len(core.leader.by_request), ctx.config.acquires_max),
        ("unacknowledged event batches", core.events.unacknowledged, ctx.config.event_batches_kept),
    )
    for name, count, most in bounds:
        if count > most:
            found.append(Violation("admission_limits_hold", f"{count} {name}, the limit is {most}"))
    return found


def kinds_stay_separate(core: HolderCore) -> list[Violation]:
    """Each slot serves the one group and shard of its pool, and so its kind; no slot is in two pools."""
    books = core.ctx.books
    found: list[Violation] = []
    for (group, shard), pool in books.pools.items():
        last = pool.first + pool.slots
        kind = books.model.groups[group].kind
        details = [
            f"slot {slot} is free in the pool of {group}/{shard}" for slot in pool.free if not pool.first <= slot < last
        ]
        details += [
            f"slot {obj.slot} of pool {group}/{shard} holds a {obj.kind} of {obj.group}/{obj.shard}"
            for obj in books.owner[pool.first : last]
            if obj is not None and (obj.kind is not kind or obj.group != group or obj.shard != shard)
        ]
        found += [Violation("kinds_stay_separate", detail) for detail in details]
    return found


def validated_is_what_is_used(core: HolderCore) -> list[Violation]:
    """Every live lease's slots still bear, sealed, the versions that were proven."""
    arena = core.ctx.arena
    return [
        Violation("validated_is_what_is_used", f"lease {record.lease}: a leased slot bears another version")
        for record in core.ctx.leases.live.values()
        if not all(slots_stand(run.slots, run.versions, arena) for run in record.proof.runs)
    ]


def graph_topology_is_static(core: HolderCore) -> list[Violation]:
    """What a graph lease froze lies where it lay, sealed; what none froze is not frozen."""
    books = core.ctx.books
    frozen: Counter[int] = Counter()
    found = []
    for record in core.ctx.leases.live.values():
        if not record.graph:
            continue
        for run in record.proof.runs:
            for slot in run.slots.tolist():
                frozen[slot] += 1
                obj = books.owner[slot]
                if obj is None or obj.slot != slot or obj.state not in STAYING:
                    state = "free" if obj is None else f"{obj.state} at slot {obj.slot}"
                    found.append(
                        Violation("graph_topology_is_static", f"graph lease {record.lease}: slot {slot} is {state}")
                    )
    found += [
        Violation("graph_topology_is_static", f"slot {slot} is frozen {int(books.frozen[slot])} times")
        for slot in np.flatnonzero(books.frozen).tolist()
        if books.frozen[slot] != frozen.get(slot, 0)
    ]
    return found


def granted_after_proof(core: HolderCore) -> list[Violation]:
    """Every live lease stands on a proof: four layers, all passed, over its very objects."""
    found = []
    for record in core.ctx.leases.live.values():
        proof = record.proof
        if not isinstance(proof, Proof):
            found.append(Violation("granted_after_proof", f"lease {record.lease} has no proof"))
            continue
        if tuple(v.layer for v in proof.verdicts) != LAYERS_PROVEN or not all(v.passed for v in proof.verdicts):
            found.append(Violation("granted_after_proof", f"lease {record.lease}: not all four layers passed"))
        if proof.tokens <= 0 or any(len(run.indices) != len(run.slots) for run in proof.runs):
            found.append(Violation("granted_after_proof", f"lease {record.lease}: not what was proven"))
        if record.fence != record.lease or record.fence > core.ctx.leases.fence:
            found.append(Violation("granted_after_proof", f"lease {record.lease}: its fence is {record.fence}"))
    return found


def nothing_is_lost(core: HolderCore) -> list[Violation]:
    """Every slot is free or owned, once; every owned slot and every pin is owed to somebody."""
    books = core.ctx.books
    found: list[Violation] = []

    def report(detail: str) -> None:
        found.append(Violation("nothing_is_lost", detail))

    claims, pins = _claims(core)
    counted = books.pins.tolist()
    for (group, shard), pool in books.pools.items():
        owned = evictable = 0
        for slot in range(pool.first, pool.first + pool.slots):
            obj = books.owner[slot]
            if obj is None:
                continue
            owned += 1
            if obj.visible and obj.state is State.SEALED and not counted[slot]:
                evictable += 1
            if obj.slot != slot:
                report(f"slot {slot} is owned by an object at slot {obj.slot}")
            if counted[slot] != pins.get(slot, 0):
                report(f"slot {slot} ({obj.state}): {counted[slot]} pins, {pins.get(slot, 0)} are owed")
            if not _owed(books.table[group, shard], claims, obj, pinned=counted[slot] > 0):
                report(f"slot {slot} is {obj.state} and nobody's")
        free = set(pool.free)
        if len(free) != len(pool.free):
            report(f"pool {group}/{shard}: a slot is free twice")
        if any(books.owner[slot] is not None for slot in free):
            report(f"pool {group}/{shard}: an owned slot is free")
        if len(free) + owned != pool.slots:
            report(f"pool {group}/{shard}: {len(free)} free and {owned} owned of {pool.slots} slots")
        if evictable != pool.evictable:
            report(f"pool {group}/{shard}: {evictable} slots can be evicted, {pool.evictable} are counted")
    return found


def _owed(table: dict[bytes, Obj], claims: set[int], obj: Obj, *, pinned: bool) -> bool:
    """Whether somebody will one day free or use this object's slot."""
    match obj.state:
        case State.SEALED | State.DEMOTING:
            return table.get(obj.digest) is obj
        case State.EVICTING:
            return pinned
        case _:
            return id(obj) in claims


def _claims(core: HolderCore) -> tuple[set[int], Counter[int]]:
    """Objects in some desk's hands, and how many pins each desk holds on which object."""
    hands: set[int] = set()
    pins: Counter[int] = Counter()
    for desk in (core.stores, core.parts, core.disk):
        hands.update(id(obj) for obj in desk.in_hand())
    for pinned in (core.pins.pinned(), core.disk.pinned()):
        pins.update(obj.slot for obj in pinned)
    pins.update(core.parts.pinned())
    for record in core.ctx.leases.live.values():
        for run in record.proof.runs:
            pins.update(run.slots.tolist())
    return hands, pins


Invariant = Callable[[HolderCore], list[Violation]]

INVARIANTS: tuple[Invariant, ...] = (
    admission_limits_hold,
    kinds_stay_separate,
    validated_is_what_is_used,
    graph_topology_is_static,
    granted_after_proof,
    nothing_is_lost,
)


def check(core: HolderCore) -> list[Violation]:
    """All invariants over one holder."""
    found = []
    for invariant in INVARIANTS:
        found += invariant(core)
    return found
