"""A holder's books: its objects, its pools, and who owns each slot.

Every slot is free or owned by exactly one object; what an object is doing is its lifecycle state.
So nothing can be lost that is not visible here: free + owned = pool, always.

    visible objects     found by digest; SEALED in memory, or ON_TIER / DEMOTING / RESTORING
    hidden objects      RESERVED or FILLING for an attempt or a fetch, EVICTING while still pinned,
                        QUARANTINED until proven quiet

Kinds never share a free list: one pool a group and shard. Room comes from what is unpinned, in the
order of ``room``. Byte limits (``admission``) are charged where a slot gets its owner and discharged
where it loses it, here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .admission import Lack
from .kinds import Reason
from .lifecycle import Verb
from .lives import Lives
from .objects import Obj, advance_all, by_place, slots_of
from .pools import Pool


class Books(Lives):
    """Objects, pools and slots of one holder; keeps the arena's headers in step."""

    def lacking(self, objects: Sequence[Obj]) -> Lack | None:
        """The first pool or limit that cannot take all these objects at once; None if all can."""
        wants: dict[tuple[int, int], int] = {}
        for key, run in by_place(objects):
            wants[key] = wants.get(key, 0) + len(run)
        for key, count in wants.items():
            pool = self.pools.get(key)
            if pool is None or pool.room < count:
                return Lack(*key, Reason.ADMISSION_LIMIT)
        return self.admission.lacking(objects)

    def reserve(self, obj: Obj) -> None:
        """Give an ABSENT object a slot, evicting if need be. The caller asked :meth:`lacking`."""
        slot = self._make_room(obj)
        obj.advance(Verb.RESERVE)
        self._own(obj, slot)
        obj.advance(Verb.FILL)

    def reserve_all(self, objects: Sequence[Obj]) -> None:
        """:meth:`reserve` for all objects of an attempt; those of one group and shard best stand in a row."""
        if self.admission.limits:
            for obj in objects:
                self.reserve(obj)
            return
        for key, fresh in by_place(objects):
            pool, count = self.pools[key], len(fresh)
            self.make_free(pool, count)
            advance_all(fresh, Verb.RESERVE, Verb.FILL)
            taken = pool.free[: -count - 1 : -1]
            del pool.free[-count:]
            self._own_all(fresh, taken)

    def reserve_at(self, obj: Obj, slot: int) -> None:
        """Give an ABSENT object this very slot; an evictable occupant leaves.

        Raises ProtocolError where the slot can be neither taken nor vacated.
        """
        occupant = self.owner[slot]
        if occupant is not None:
            self.evict(occupant)
        self._keep_limits(obj)
        self.pools[obj.group, obj.shard].take(slot)
        obj.advance(Verb.RESERVE)
        self._own(obj, slot)
        obj.advance(Verb.FILL)

    def reserve_restores(self, objects: Sequence[Obj]) -> None:
        """Give ON_TIER objects slots to be restored into; those of one group and shard best stand in a row."""
        if self.admission.limits:
            for obj in objects:
                slot = self._make_room(obj)
                obj.advance(Verb.SWAP_IN)
                self._own(obj, slot)
            return
        for key, coming in by_place(objects):
            pool = self.pools[key]
            self.make_free(pool, len(coming))
            advance_all(coming, Verb.SWAP_IN)
            self._own_all(coming, [pool.free.pop() for _ in coming])

    def _make_room(self, obj: Obj) -> int:
        """A free slot for the object, its limits kept: whatever must leave for that leaves now."""
        pool = self.pools[obj.group, obj.shard]
        self._keep_limits(obj)
        self.make_free(pool)
        return pool.free.pop()

    def make_free(self, pool: Pool, count: int = 1) -> None:
        """Let who must make room until so many slots of the pool are free; where nobody may, no slab of it is given away."""
        while (missing := count - len(pool.free)) > 0:
            if pool.closed and not pool.evictable:
                pool.reopen()
            else:
                self._push_out(self.leaving.victims((pool,), None, _pool_named(pool), missing), (pool,))

    def worths(self, objects: Sequence[Obj]) -> list[float]:
        """What the policy says each of these objects, which have slots here, is worth."""
        slots = slots_of(objects)
        if not len(slots):
            return []
        values = self.leaving.policy.values(slots, len(slots), self.now_s)
        raised: list[float] = self.leaving.retained.raised(slots, values, self.now_s).tolist()
        return raised

    def room_for(self, obj: Obj, worth: float) -> bool:
        """Whether a slot is free for an object, or is made so by letting go what is worth less."""
        if self.lacking([obj]) is not None:
            return False
        pool = self.pools[obj.group, obj.shard]
        if not pool.free:
            if pool.closing:
                return False
            victim = self.leaving.victim((pool,), None, _pool_named(pool))
            if self.leaving.value[victim.slot] >= worth:
                return False
            self._push_out([*self.leaving.company(victim), victim], (pool,))
        return True

    def _keep_limits(self, obj: Obj) -> None:
        """Let what must leave before this object is charged."""
        while (scope := self.admission.over(obj)) is not None:
            limit, groups = scope.limit, self.model.groups
            pools = [
                pool
                for pool in self.pools.values()
                if limit.kind in (None, groups[pool.group].kind) and scope.makes_room(groups[pool.group].kind, obj.kind)
            ]
            tenant = obj.tenant if limit.tenant is not None or limit.each_tenant else None
            self._push_out(self.leaving.victims(pools, tenant, f"limit {limit}", 1), pools)

    def _push_out(self, victims: Sequence[Obj], short: Sequence[Pool]) -> None:
        """These make room now, in the pools that are short of it; what leaves elsewhere only keeps them company."""
        self.victims += len(victims)
        self.leaving.policy.left(slots_of(victims), [obj.digest for obj in victims], self.now_s)
        if self.losses.follows:
            lacking = {(pool.group, pool.shard) for pool in short}
            for obj in victims:
                if (obj.group, obj.shard) in lacking:
                    self.losses.left(obj.group, obj.digest)
        self.evict_all(victims)

    def _own(self, obj: Obj, slot: int) -> None:
        self.owner[slot] = obj
        self.uses[slot] = 0
        obj.slot, obj.books = slot, self
        self.admission.charge(obj)
        obj.version = self.arena.begin_write(slot)
        self.versions[slot] = obj.version
        self._keep_from_others(obj)

    def _own_all(self, objects: Sequence[Obj], slots: Sequence[int]) -> None:
        """:meth:`_own` for many; there are no limits to charge."""
        column = np.array(slots, dtype=np.int64)
        self.uses[column] = 0
        versions = self.arena.begin_write_all(column)
        self.versions[column] = versions
        owner = self.owner
        for obj, slot, version in zip(objects, slots, versions, strict=True):
            owner[slot] = obj
            obj.slot, obj.books, obj.version = slot, self, version
        if self.last_tenants is not None:
            for obj in objects:
                self._keep_from_others(obj)

    def _keep_from_others(self, obj: Obj) -> None:
        """Nothing of another tenant's is left in the object's slot, where tenants are kept apart that far."""
        if self.last_tenants is None:
            return
        if self.last_tenants.get(obj.slot, obj.tenant) != obj.tenant:
            self.arena.payload(obj.slot)[:] = 0
        self.last_tenants[obj.slot] = obj.tenant


def _pool_named(pool: Pool) -> str:
    return f"pool {pool.group}/{pool.shard}"
