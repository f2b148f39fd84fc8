"""The invariants, as code: named functions over one holder's books, each a list of violations.

They run after every simulated step, in tests, and on demand in production (``kvfabric doctor``).
Nothing found is the good news. Nothing here changes anything or raises for what it finds.

Each is a generator: None ends a slice of bounded work, after which a holder lets requests in. So no rule compares
what was read before a slice's end with what is read after it: what concerns single slots is looked at slot by slot,
what concerns a whole pool by the columns of the books at once, and bytes charged by a recount that follows changes.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .arena import SlotState
from .books import Books
from .claims import Slots
from .holder import HolderCore
from .kinds import Layer
from .leases import LeaseRecord, slots_stand
from .lifecycle import State
from .pools import Pool
from .slices import sliced
from .validation import Proof

LAYERS_PROVEN = (Layer.WHOLE_BLOCK, Layer.ABI, Layer.INTERSECTION, Layer.ALIGNMENT)

IN_HAND = frozenset({State.RESERVED, State.FILLING, State.RESTORING})
"""Slots in these states are reserved for bytes on their way."""

STAYING = frozenset({State.SEALED, State.DEMOTING, State.EVICTING})
"""In these states an object's bytes lie where they lay: being written to disk or outdated moves nothing."""

# An attribute of an enumeration is looked up by a call: these stand in a loop over every slot.
_SEALED, _DEMOTING, _EVICTING = State.SEALED, State.DEMOTING, State.EVICTING

ON_DISK_ONLY = frozenset({State.ON_TIER})

SLICE_SLOTS = 512
SLICE_LEASES = 64


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that should never be: which invariant, and what was found."""

    invariant: str
    detail: str


Found = Iterator[Violation | None]


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


def admission_limits_hold(core: HolderCore) -> Found:
    """Byte limits, restore caps and the bounds of every queue."""
    name = "admission_limits_hold"
    ctx = core.ctx
    admission = ctx.books.admission
    tenants = Counter(record.tenant for record in ctx.leases.live.values())
    if tenants != admission.leases:
        yield Violation(name, f"{dict(tenants)} leases live, {dict(admission.leases)} are charged")
    bounds = (
        ("restores at a time", core.disk.restoring, ctx.config.restores_max),
        ("open write attempts", len(core.stores.attempts), ctx.config.attempts_max),
        ("acquires in progress", len(core.leader.by_request), ctx.config.acquires_max),
        ("unacknowledged event batches", core.events.unacknowledged, ctx.config.event_batches_kept),
    )
    for what, count, most in bounds:
        if count > most:
            yield Violation(name, f"{count} {what}, the limit is {most}")
    yield from (Violation(name, detail) for detail in admission.over_quota())
    yield None
    if admission.limits:
        with admission.recount() as recount:
            for part in _parts(len(ctx.books.owner)):
                recount.look(ctx.books.owner, part)
                yield None
            yield from (Violation(name, detail) for detail in admission.excess(recount.owned))


def kinds_stay_separate(core: HolderCore) -> Found:
    """Each slot serves the one group and shard of its pool, and so its kind; no slot is in two pools."""
    books = core.ctx.books
    for (group, shard), pool in books.pools.items():
        name, kind = f"pool {group}/{shard}", books.model.groups[group].kind
        free = _unused(pool)
        if len(free) and not (free.min() >= 0 and free.max() < pool.slots):
            yield Violation("kinds_stay_separate", f"a slot of another pool is free in the {name}")
        for part in _parts(pool.slots, pool.first):
            yield None
            for obj in books.owner[part.start : part.stop]:
                if obj is not None and (obj.group != group or obj.shard != shard or obj.kind is not kind):
                    detail = f"slot {obj.slot} of {name} holds a {obj.kind} of {obj.group}/{obj.shard}"
                    yield Violation("kinds_stay_separate", detail)


def slabs_have_one_owner(core: HolderCore) -> Found:
    """Each slab serves one pool: nobody else has a free or owned slot there, and every header of theirs says so."""
    books = core.ctx.books
    slabs = books.slabs
    for key, pool in books.pools.items() if len(slabs) else ():
        yield None
        mine = np.zeros(pool.slots, dtype=np.bool_)
        for slab in slabs.of(key):
            part = slabs.slots(key, slab)
            mine[part.start - pool.first : part.stop - pool.first] = True
        states = core.ctx.arena.states[pool.first : pool.first + pool.slots]
        elsewhere = states == SlotState.ELSEWHERE
        used = _used(states)
        used[_within(_unused(pool), pool.slots)] = True
        name = f"pool {key[0]}/{key[1]}"
        details = [
            f"{name}: slot {pool.first + i} is used in another pool's slab" for i in np.flatnonzero(used & ~mine)
        ]
        details += [f"{name}: the header of slot {pool.first + i} lies" for i in np.flatnonzero(elsewhere == mine)]
        if int(mine.sum()) != pool.capacity:
            details.append(f"{name}: {int(mine.sum())} slots lie in its slabs, {pool.capacity} are counted")
        yield from (Violation("slabs_have_one_owner", detail) for detail in details)


def validated_is_what_is_used(core: HolderCore) -> Found:
    """Every live lease's slots still bear, sealed, the versions that were proven."""
    arena = core.ctx.arena
    for record in _live(core):
        if record is None:
            yield None
        elif not all(slots_stand(run.slots, run.versions, arena) for run in record.proof.runs):
            detail = f"lease {record.lease}: a leased slot bears another version"
            yield Violation("validated_is_what_is_used", detail)


def graph_topology_is_static(core: HolderCore) -> Found:
    """What a graph lease froze lies where it lay, sealed; what none froze is not frozen."""
    name, books = "graph_topology_is_static", core.ctx.books
    owed = _leased(core, graphs_only=True)
    for slot, have, due in _unlike(books.frozen, owed):
        yield Violation(name, f"slot {slot} is frozen {have} times, {due} are owed")
    slots = np.flatnonzero(np.bincount(owed)).tolist()
    for part in _parts(len(slots)):
        yield None
        for slot in slots[part.start : part.stop]:
            obj = books.owner[slot]
            if (obj is None or obj.slot != slot or obj.state not in STAYING) and slot in _leased(
                core, graphs_only=True
            ):
                state = "free" if obj is None else f"{obj.state} at slot {obj.slot}"
                yield Violation(name, f"frozen slot {slot} is {state}")


def granted_after_proof(core: HolderCore) -> Found:
    """Every live lease stands on a proof: four layers, all passed, over its very objects."""
    name = "granted_after_proof"
    for record in _live(core):
        if record is None:
            yield None
            continue
        proof = record.proof
        if not isinstance(proof, Proof):
            yield Violation(name, f"lease {record.lease} has no proof")
            continue
        if tuple(v.layer for v in proof.verdicts) != LAYERS_PROVEN or not all(v.passed for v in proof.verdicts):
            yield Violation(name, f"lease {record.lease}: not all four layers passed")
        if proof.tokens <= 0 or any(len(run.indices) != len(run.slots) for run in proof.runs):
            yield Violation(name, f"lease {record.lease}: not what was proven")
        if record.fence != record.lease or record.fence > core.ctx.leases.fence:
            yield Violation(name, f"lease {record.lease}: its fence is {record.fence}")


def nothing_is_lost(core: HolderCore) -> Found:
    """Every slot is free or owned, once; every owned slot and every pin is owed to somebody; host slots likewise."""
    name, books = "nothing_is_lost", core.ctx.books
    for slot, have, due in _unlike(books.pins, _pins(core)):
        yield Violation(name, f"slot {slot}: {have} pins, {due} are owed")
    hands: set[int] = set()
    for key, pool in books.pools.items():
        yield None
        yield from (Violation(name, detail) for detail in _miscounted(core, pool))
        for part in _parts(pool.slots, pool.first):
            yield None
            yield from (Violation(name, detail) for detail in _astray(core, key, part, hands))
    for host in core.disk.host.pools.pools.values():
        yield None
        yield from (Violation(name, detail) for detail in host.miscounted())
    for (group, shard), host in core.disk.host.pools.pools.items():
        for part in _parts(host.slots, host.first):
            yield None
            yield from (Violation(name, detail) for detail in host.astray(group, shard, part))
    for table in books.table.values():
        for some in sliced(list(table.values()), SLICE_SLOTS):
            yield None
            for obj in some:
                if obj.below >= 0 and core.disk.host.pools.at(obj.below) is not obj:
                    yield Violation(name, f"an object's host slot {obj.below} is not its copy")


def _miscounted(core: HolderCore, pool: Pool) -> list[str]:
    """What one pool says of itself and is not so, by the columns of the books."""
    books = core.ctx.books
    part = slice(pool.first, pool.first + pool.slots)
    free = np.bincount(_within(_unused(pool), pool.slots), minlength=pool.slots)
    owned = _used(core.ctx.arena.states[part])
    evictable = int(np.count_nonzero(books.settled[part] & (books.pins[part] == 0)))
    name = f"pool {pool.group}/{pool.shard}"
    found = []
    if (free > 1).any():
        found.append(f"{name}: a slot is free twice")
    if pool.unused + int(owned.sum()) != pool.capacity or (owned & (free > 0)).any():
        found.append(f"{name}: {pool.unused} free and {int(owned.sum())} owned of {pool.capacity} slots")
    if evictable != pool.evictable:
        found.append(f"{name}: {evictable} slots can be evicted, {pool.evictable} are counted")
    return found


def _astray(core: HolderCore, key: tuple[int, int], part: range, hands: set[int]) -> list[str]:
    """Slots of a pool that are nobody's, or not what the books' columns and the arena's headers say of them.

    ``hands``: objects that desks answered for a while ago; who is not among them is asked about anew.
    """
    books, here = core.ctx.books, slice(part.start, part.stop)
    table, asked = books.table[key], False
    owners = books.owner[here]
    columns = (_used(core.ctx.arena.states[here]).tolist(), books.settled[here].tolist(), books.pins[here].tolist())
    details = []
    for slot, obj, owned, settled, pins in zip(part, owners, *columns, strict=True):
        if obj is None:
            if owned or settled:
                details.append(f"slot {slot} is used and nobody's")
            continue
        state = obj.state
        if state is _SEALED or state is _DEMOTING:
            owed = table.get(obj.digest) is obj
        elif state is _EVICTING:
            owed = pins > 0
        else:
            if id(obj) not in hands and not asked:
                asked = True
                hands.clear()
                hands |= _hands(core)
            owed = id(obj) in hands
        if not owed:
            details.append(f"slot {slot} is {state} and nobody's")
        if obj.slot != slot:
            details.append(f"slot {slot} is owned by an object at slot {obj.slot}")
        if not owned or settled != (state is _SEALED and obj.visible):
            details.append(f"slot {slot} is {state}: its header or its column says otherwise")
    return details


def _hands(core: HolderCore) -> set[int]:
    """Every object whose slot some desk answers for."""
    return {id(obj) for desk in (core.stores, core.parts, core.intake, core.disk, core.slabs) for obj in desk.in_hand()}


def _pins(core: HolderCore) -> Slots:
    """Every slot that some desk has pinned, once a pin."""
    slots = [obj.slot for desk in (core.pins, core.disk, core.slabs) for obj in desk.pinned()]
    slots += core.parts.pinned()
    return np.concatenate([np.array(slots, dtype=np.int64), _leased(core)])


def _leased(core: HolderCore, *, graphs_only: bool = False) -> Slots:
    """Every leased slot, once a lease."""
    live = core.ctx.leases.live.values()
    runs = [run.slots for record in live if record.graph or not graphs_only for run in record.proof.runs]
    return np.concatenate([np.empty(0, dtype=np.int64), *runs]).astype(np.int64, copy=False)


def _unlike(counted: npt.NDArray[np.int32], owed: Slots) -> list[tuple[int, int, int]]:
    """Slots whose count is not how often they are owed: (slot, counted, owed)."""
    due = np.bincount(owed, minlength=len(counted))
    odd = np.flatnonzero(counted != due)
    return [(slot, int(counted[slot]), int(due[slot])) for slot in odd.tolist()]


def _unused(pool: Pool) -> Slots:
    """The free slots as the pool lists them, counted from its first."""
    listed = [np.fromiter(slots, np.int64, len(slots)) for slots in (pool.free, pool.closed)]
    return np.concatenate(listed) - pool.first


def _within(slots: Slots, count: int) -> Slots:
    return slots[(slots >= 0) & (slots < count)]


def _used(states: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """By header: whether somebody owns the slot."""
    used: npt.NDArray[np.bool_] = (states != SlotState.FREE) & (states != SlotState.ELSEWHERE)
    return used


def _live(core: HolderCore) -> Iterator[LeaseRecord | None]:
    """Every lease that lives as this begins, and still does as its turn comes; None ends a slice."""
    live = core.ctx.leases.live
    for some in sliced(list(live.values()), SLICE_LEASES):
        yield from (record for record in some if record.lease in live)
        yield None


def _parts(count: int, first: int = 0) -> Iterator[range]:
    for begin in range(first, first + count, SLICE_SLOTS):
        yield range(begin, min(begin + SLICE_SLOTS, first + count))


def slots_lost(books: Books) -> int:
    """Slots of all pools that are neither free nor owned: 0 unless there is a bug."""
    owned = len(books.owner) - books.owner.count(None)
    free = [_within(_unused(pool), pool.slots) for pool in books.pools.values()]
    capacity = sum(pool.capacity for pool in books.pools.values())
    return capacity - owned - sum(int(np.count_nonzero(np.bincount(slots))) for slots in free)


Invariant = Callable[[HolderCore], Found]

INVARIANTS: tuple[Invariant, ...] = (
    admission_limits_hold,
    kinds_stay_separate,
    slabs_have_one_owner,
    validated_is_what_is_used,
    graph_topology_is_static,
    granted_after_proof,
    nothing_is_lost,
)


def check_in_slices(core: HolderCore) -> Found:
    """All invariants over one holder; None after each slice."""
    for invariant in INVARIANTS:
        yield from invariant(core)
        yield None


def check(core: HolderCore) -> list[Violation]:
    """All invariants over one holder, at once."""
    return [found for found in check_in_slices(core) if found is not None]
