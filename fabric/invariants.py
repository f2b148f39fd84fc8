"""The invariants, as code: named functions over one holder's books, each a list of violations.

They run after every simulated step, in tests, and on demand in production (``kvfabric doctor``).
An empty list is the good news. Nothing here changes anything or raises for what it finds.

    admission_limits_hold       no limit is exceeded, and what is charged is what is owned
    kinds_stay_separate         each slot serves the one group and shard of its pool
    slabs_have_one_owner        each slab serves one pool, and the others' headers there say so
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
import numpy.typing as npt

from .arena import SlotState
from .books import Books
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

# An attribute of an enumeration is looked up by a call: these stand in a loop over every slot.
_SEALED, _DEMOTING, _EVICTING = State.SEALED, State.DEMOTING, State.EVICTING

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
        pool_slots=sum(pool.capacity for pool in books.pools.values()),
        free=sum(pool.unused for pool in books.pools.values()),
        reserved=counts["reserved"],
        sealed=counts["sealed"],
        pinned=counts["pinned"],
        quarantined=counts["quarantined"],
        on_tier=on_tier,
        pins=pins,
    )


# --- the seven ----------------------------------------------------------------------------------


def admission_limits_hold(core: HolderCore) -> list[Violation]:
    """Byte limits, restore caps and the bounds of every queue."""
    ctx = core.ctx
    admission = ctx.books.admission
    details = [*admission.excess(ctx.books.owner), *admission.over_quota()]
    tenants = Counter(record.tenant for record in ctx.leases.live.values())
    if tenants != admission.leases:
        details.append(f"{dict(tenants)} leases live, {dict(admission.leases)} are charged")
    found = [Violation("admission_limits_hold", detail) for detail in details]
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
    details: list[str] = []
    for (group, shard), pool in books.pools.items():
        first, last = pool.first, pool.first + pool.slots
        kind = books.model.groups[group].kind
        free = [*pool.free, *pool.closed]
        if free and not first <= min(free) <= max(free) < last:
            details.append(f"a slot of another pool is free in the pool of {group}/{shard}")
        details += [
            f"slot {obj.slot} of pool {group}/{shard} holds a {obj.kind} of {obj.group}/{obj.shard}"
            for obj in books.owner[first:last]
            if obj is not None and (obj.group != group or obj.shard != shard or obj.kind is not kind)
        ]
    return [Violation("kinds_stay_separate", detail) for detail in details]


def slabs_have_one_owner(core: HolderCore) -> list[Violation]:
    """Each slab serves one pool: nobody else has a free or owned slot there, and every header of theirs says so."""
    books, states = core.ctx.books, core.ctx.arena.states
    slabs = books.slabs
    details: list[str] = []
    for key, pool in books.pools.items() if len(slabs) else ():
        mine = np.zeros(pool.slots, dtype=np.bool_)
        for slab in slabs.of(key):
            part = slabs.slots(key, slab)
            mine[part.start - pool.first : part.stop - pool.first] = True
        elsewhere = states[pool.first : pool.first + pool.slots] == SlotState.ELSEWHERE
        used = np.array([obj is not None for obj in books.owner[pool.first : pool.first + pool.slots]], dtype=np.bool_)
        used[[slot - pool.first for slot in (*pool.free, *pool.closed)]] = True
        name = f"pool {key[0]}/{key[1]}"
        details += [
            f"{name}: slot {pool.first + i} is used in another pool's slab" for i in np.flatnonzero(used & ~mine)
        ]
        details += [f"{name}: the header of slot {pool.first + i} lies" for i in np.flatnonzero(elsewhere == mine)]
        if int(mine.sum()) != pool.capacity:
            details.append(f"{name}: {int(mine.sum())} slots lie in its slabs, {pool.capacity} are counted")
    return [Violation("slabs_have_one_owner", detail) for detail in details]


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
    owed: list[int] = []
    details: list[str] = []
    for record in core.ctx.leases.live.values():
        if record.graph:
            for run in record.proof.runs:
                owed += run.slots.tolist()
    for slot in set(owed):
        obj = books.owner[slot]
        if obj is None or obj.slot != slot or obj.state not in STAYING:
            state = "free" if obj is None else f"{obj.state} at slot {obj.slot}"
            details.append(f"frozen slot {slot} is {state}")
    details += [
        f"slot {slot} is frozen {have} times, {due} are owed" for slot, have, due in _unlike(books.frozen, owed)
    ]
    return [Violation("graph_topology_is_static", detail) for detail in details]


def _unlike(counted: npt.NDArray[np.int32], owed: list[int]) -> list[tuple[int, int, int]]:
    """Slots whose count is not how often they are owed: (slot, counted, owed)."""
    due = np.bincount(owed, minlength=len(counted)) if owed else np.zeros_like(counted)
    odd = np.flatnonzero(counted != due)
    return [(slot, int(counted[slot]), int(due[slot])) for slot in odd.tolist()]


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


def slots_lost(books: Books) -> int:
    """Slots of all pools that are neither free nor owned by the object that lies there: 0 unless there is a bug."""
    lost = 0
    for pool in books.pools.values():
        owned = (
            s for s in range(pool.first, pool.first + pool.slots) if (o := books.owner[s]) is not None and o.slot == s
        )
        lost += pool.capacity - len({*pool.free, *pool.closed, *owned})
    return lost


def nothing_is_lost(core: HolderCore) -> list[Violation]:
    """Every slot is free or owned, once; every owned slot and every pin is owed to somebody; host slots likewise."""
    books = core.ctx.books
    details = [f"slot {slot}: {have} pins, {due} are owed" for slot, have, due in _unlike(books.pins, _pins(core))]
    hands = {
        id(obj) for desk in (core.stores, core.parts, core.intake, core.disk, core.slabs) for obj in desk.in_hand()
    }
    counted = books.pins.tolist()
    owner = books.owner
    for key, pool in books.pools.items():
        table = books.table[key]
        owned = evictable = 0
        for slot in range(pool.first, pool.first + pool.slots):
            obj = owner[slot]
            if obj is None:
                continue
            owned += 1
            state = obj.state
            if state is _SEALED or state is _DEMOTING:
                owed = table.get(obj.digest) is obj
                evictable += state is _SEALED and obj.visible and not counted[slot]
            elif state is _EVICTING:
                owed = counted[slot] > 0
            else:
                owed = id(obj) in hands
            if not owed:
                details.append(f"slot {slot} is {state} and nobody's")
            if obj.slot != slot:
                details.append(f"slot {slot} is owned by an object at slot {obj.slot}")
        details += _miscounted(core, key, owned, evictable)
    details += core.disk.host.pools.faults()
    copies = core.disk.host.pools.copies()
    for table in books.table.values():
        details += [
            f"an object's host slot {obj.below} is not its copy"
            for obj in table.values()
            if obj.below >= 0 and copies.get(obj.below) is not obj
        ]
    return [Violation("nothing_is_lost", detail) for detail in details]


def _miscounted(core: HolderCore, key: tuple[int, int], owned: int, evictable: int) -> list[str]:
    """What one pool says of itself and is not so."""
    books = core.ctx.books
    pool = books.pools[key]
    unused = [*pool.free, *pool.closed]
    free = set(unused)
    name = f"pool {key[0]}/{key[1]}"
    found = []
    if len(free) != len(unused):
        found.append(f"{name}: a slot is free twice")
    if len(free) + owned != pool.capacity or any(books.owner[slot] is not None for slot in free):
        found.append(f"{name}: {len(free)} free and {owned} owned of {pool.capacity} slots")
    if evictable != pool.evictable:
        found.append(f"{name}: {evictable} slots can be evicted, {pool.evictable} are counted")
    return found


def _pins(core: HolderCore) -> list[int]:
    """Every slot that some desk has pinned, once a pin."""
    slots = [obj.slot for desk in (core.pins, core.disk, core.slabs) for obj in desk.pinned()]
    slots += core.parts.pinned()
    for record in core.ctx.leases.live.values():
        for run in record.proof.runs:
            slots += run.slots.tolist()
    return slots


Invariant = Callable[[HolderCore], list[Violation]]

INVARIANTS: tuple[Invariant, ...] = (
    admission_limits_hold,
    kinds_stay_separate,
    slabs_have_one_owner,
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
