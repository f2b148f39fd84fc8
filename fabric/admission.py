"""Admission: what a holder may take in, and the line of those that wait for room.

A limit is checked and charged in the same step: an object is charged when it takes a slot and
discharged when the slot is free again, by whatever path (store, fetch, restore, eviction), because
:class:`~kvfabric.fabric.books.Books` is the one place where slots change hands. What is in use but
evictable counts as room, as it does for a pool: whoever needs it pushes it out, in the order of
:mod:`room`.

    whole need or nothing    a need is asked for all its pools and limits at once
    larger than the limit    never waits: no eviction can make that room
    a floor for a kind       so much of a limit on all kinds is kept free for one of them, or in use by it
    over a tenant's limit    refused as ``quota``; over any other, ``admission_limit``

A tenant's leases and restores are counted here too: a lease from grant to end, a restore for as long
as a request waits for a tier.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from .kinds import ObjectKind, Reason, SpecError
from .messages import Cap, CapShare
from .model import ModelSpec

if TYPE_CHECKING:
    from .objects import Obj

T = TypeVar("T")
K = TypeVar("K")

PRIORITY_MAX = 16
"""Priorities lie in -PRIORITY_MAX..PRIORITY_MAX, so that ageing overtakes any of them in bounded time."""


@dataclass(frozen=True, slots=True)
class ByteLimit:
    """At most ``bytes_max`` bytes of slots in one scope of one holder.

    ``kind`` None: all kinds together. ``tenant`` None: all tenants together, or with
    ``each_tenant`` every tenant by itself ``but`` those that have a limit of their own. ``floors``:
    bytes of a limit on all kinds that only this kind may take; together at most the limit.
    """

    bytes_max: int
    kind: ObjectKind | None = None
    tenant: str | None = None
    each_tenant: bool = False
    floors: tuple[tuple[ObjectKind, int], ...] = ()
    but: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.floors and self.kind is not None:
            raise SpecError("floors: a limit on one kind has none")
        if sum(floor for _, floor in self.floors) > self.bytes_max:
            raise SpecError(f"floors: together they are more than the limit of {self.bytes_max} bytes")

    @property
    def reason(self) -> Reason:
        """What a refusal by this limit is called."""
        return Reason.QUOTA if self.tenant is not None or self.each_tenant else Reason.ADMISSION_LIMIT

    def concerns(self, kind: ObjectKind, tenant: str) -> bool:
        return self.kind in (None, kind) and self.tenant in (None, tenant) and tenant not in self.but


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """How many leases one tenant may hold of a holder, and how many of its requests may restore there, at a time."""

    leases_max: int | None = None
    restores_max: int | None = None


UNLIMITED = TenantQuota()
EVERY_TENANT = "*"
"""Under which the quota stands of tenants that have none of their own."""


@dataclass(slots=True)
class Scope:
    """What one limit counts, for one tenant if it is a limit of each."""

    limit: ByteLimit
    used: Counter[ObjectKind] = field(default_factory=Counter)
    evictable: Counter[ObjectKind] = field(default_factory=Counter)

    @property
    def used_bytes(self) -> int:
        return self.used.total()

    def committed(self, more: Mapping[ObjectKind, int] | None = None, *, evicted: bool = False) -> int:
        """Bytes in use, ``more`` added, and what the floors keep free beyond it; ``evicted``: after all that may leave did."""
        floors, more = dict(self.limit.floors), more or {}
        return sum(
            max(floors.get(kind, 0), self.used[kind] - (self.evictable[kind] if evicted else 0) + more.get(kind, 0))
            for kind in {*self.used, *floors, *more}
        )

    @property
    def room_bytes(self) -> int:
        return self.limit.bytes_max - self.committed(evicted=True)

    def makes_room(self, leaving: ObjectKind, coming: ObjectKind) -> bool:
        """Whether it helps a newcomer that one of this kind leaves: another at its floor would leave for nothing."""
        return leaving is coming or self.used[leaving] > dict(self.limit.floors).get(leaving, 0)


@dataclass(frozen=True, slots=True)
class Lack:
    """The first pool or limit that cannot take a need: the group named, and why."""

    group: int
    shard: int
    reason: Reason


class AdmissionBook:
    """The limits of one holder and what is charged to them. Without limits it costs nothing."""

    def __init__(
        self, model: ModelSpec, limits: Sequence[ByteLimit] = (), quotas: Mapping[str, TenantQuota] | None = None
    ) -> None:
        self.model = model
        self.limits = tuple(limits)
        self.quotas = dict(quotas or {})
        self.leases: Counter[str] = Counter()
        """Live leases by tenant."""
        self.restores: Counter[str] = Counter()
        """Requests that wait for a tier, by tenant."""
        self._scopes: dict[tuple[int, str], Scope] = {}
        self._recounts: list[Recount] = []
        self._bytes = [spec.block_bytes for spec in model.groups]

    def scopes(self, kind: ObjectKind, tenant: str) -> Iterator[Scope]:
        """Every scope that an object of this kind and tenant is charged to."""
        for i, limit in enumerate(self.limits):
            if limit.concerns(kind, tenant):
                key = (i, tenant if limit.each_tenant else "")
                scope = self._scopes.get(key)
                if scope is None:
                    scope = self._scopes[key] = Scope(limit)
                yield scope

    # --- asking --------------------------------------------------------------------------------

    def lacking(self, objects: Iterable[Obj]) -> Lack | None:
        """The first limit that cannot take all these objects at once; None if all can."""
        if not self.limits:
            return None
        needs: dict[int, tuple[Scope, Counter[ObjectKind]]] = {}
        for obj in objects:
            for scope in self.scopes(obj.kind, obj.tenant):
                _, need = needs.setdefault(id(scope), (scope, Counter()))
                need[obj.kind] += self._bytes[obj.group]
                if not self._fits(scope, need, evicted=True):
                    return Lack(obj.group, obj.shard, scope.limit.reason)
        return None

    def caps(self, tenant: str) -> tuple[Cap, ...]:
        """What each limit leaves one tenant, for a planner elsewhere."""
        found = []
        for i, limit in enumerate(self.limits):
            kinds = [spec.kind if limit.concerns(spec.kind, tenant) else None for spec in self.model.groups]
            groups = tuple(g for g, kind in enumerate(kinds) if kind is not None)
            if groups:
                scope = self._scopes.get((i, tenant if limit.each_tenant else "")) or Scope(limit)
                floors = dict(limit.floors)
                shares = tuple(
                    CapShare(
                        tuple(g for g in groups if kinds[g] is kind),
                        scope.used[kind] - scope.evictable[kind],
                        floors.get(kind, 0),
                    )
                    for kind in sorted({*scope.used, *floors, *(k for k in kinds if k is not None)})
                )
                found.append(Cap(groups, max(scope.room_bytes, 0), limit.bytes_max, limit.reason, shares))
        return tuple(found)

    def over(self, obj: Obj) -> Scope | None:
        """A scope that must make room before this object is charged; None if none must."""
        size = self._bytes[obj.group]
        for scope in self.scopes(obj.kind, obj.tenant):
            if not self._fits(scope, Counter({obj.kind: size}), evicted=False):
                return scope
        return None

    def _fits(self, scope: Scope, need: Counter[ObjectKind], *, evicted: bool) -> bool:
        """Whether a scope can take these bytes as it is; ``evicted``: after all that may leave did."""
        return scope.committed(need, evicted=evicted) <= scope.limit.bytes_max

    # --- quotas --------------------------------------------------------------------------------

    def quota(self, tenant: str) -> TenantQuota:
        """A tenant's own quota, or that of every tenant."""
        return self.quotas.get(tenant) or self.quotas.get(EVERY_TENANT, UNLIMITED)

    def may_lease(self, tenant: str) -> bool:
        most = self.quota(tenant).leases_max if self.quotas else None
        return most is None or self.leases[tenant] < most

    def may_restore(self, tenant: str) -> bool:
        most = self.quota(tenant).restores_max if self.quotas else None
        return most is None or self.restores[tenant] < most

    def leased(self, tenant: str, change: int) -> None:
        """A lease of the tenant's began (+1) or ended (-1)."""
        _count(self.leases, tenant, change)

    def restoring(self, tenant: str, change: int) -> None:
        """A request of the tenant's began (+1) to wait for a tier, or ended to (-1)."""
        _count(self.restores, tenant, change)

    # --- charging ------------------------------------------------------------------------------

    def charge(self, obj: Obj) -> None:
        """The object took its slot."""
        if not self.limits:
            return
        for recount in self._recounts:
            recount.changed(obj, 1)
        for scope in self.scopes(obj.kind, obj.tenant):
            scope.used[obj.kind] += self._bytes[obj.group]

    def discharge(self, obj: Obj) -> None:
        """The object's slot is free."""
        if not self.limits:
            return
        for recount in self._recounts:
            recount.changed(obj, -1)
        for scope in self.scopes(obj.kind, obj.tenant):
            scope.used[obj.kind] -= self._bytes[obj.group]
        for key in [k for k, s in self._scopes.items() if not s.used_bytes]:
            del self._scopes[key]

    def evictable(self, obj: Obj, sign: int) -> None:
        """The object became evictable (+1) or no longer is (-1)."""
        if not self.limits:
            return
        for scope in self.scopes(obj.kind, obj.tenant):
            scope.evictable[obj.kind] += sign * self._bytes[obj.group]

    # --- checking ------------------------------------------------------------------------------

    @contextmanager
    def recount(self) -> Iterator[Recount]:
        """A count of all owners that is told of every slot that changes hands while it lasts."""
        recount = Recount()
        self._recounts.append(recount)
        try:
            yield recount
        finally:
            self._recounts.remove(recount)

    def excess(self, objects: Mapping[tuple[int, str], int]) -> list[str]:
        """What is over a limit, or charged otherwise than owned; ``objects``: how many, by group and tenant."""
        owned: dict[tuple[int, str], Counter[ObjectKind]] = {}
        for (group, tenant), count in objects.items():
            kind = self.model.groups[group].kind
            for i, limit in enumerate(self.limits):
                if limit.concerns(kind, tenant):
                    key = (i, tenant if limit.each_tenant else "")
                    owned.setdefault(key, Counter())[kind] += count * self._bytes[group]
        found = []
        for key in sorted(owned.keys() | self._scopes.keys()):
            limit, used = self.limits[key[0]], owned.get(key, Counter[ObjectKind]())
            charged = self._scopes[key].used if key in self._scopes else Counter[ObjectKind]()
            if used.total() > limit.bytes_max:
                found.append(f"{used.total()} bytes are in use, the limit is {limit}")
            if Scope(limit, used).committed() > limit.bytes_max:
                found.append(f"{dict(used)} bytes are in use, which leaves a kind less than its floor of {limit}")
            if +used != +charged:
                found.append(f"{dict(used)} bytes are in use, {dict(charged)} are charged to {limit}")
        return found

    def over_quota(self) -> list[str]:
        """Tenants that hold more than they may."""
        counted = (("leases", self.leases), ("restores", self.restores))
        return [
            f"{count} {what} of tenant {tenant!r}, the quota is {most}"
            for what, counts in counted
            for tenant, count in counts.items()
            if (most := getattr(self.quota(tenant), f"{what}_max")) is not None and count > most
        ]


class Recount:
    """How many objects own slots, by group and tenant, slice by slice: what changes behind its place is followed."""

    def __init__(self) -> None:
        self.owned: Counter[tuple[int, str]] = Counter()
        self._place = 0
        """Slots below are counted."""

    def look(self, owners: Sequence[Obj | None], part: range) -> None:
        """Count the slots of a part, which begins where the one before ended."""
        self.owned.update((o.group, o.tenant) for o in owners[part.start : part.stop] if o is not None)
        self._place = part.stop

    def changed(self, obj: Obj, change: int) -> None:
        """The object took its slot (+1), or gives it up (-1)."""
        if obj.slot < self._place:
            _count(self.owned, (obj.group, obj.tenant), change)


def _count(counts: Counter[K], key: K, change: int) -> None:
    counts[key] += change
    if counts[key] <= 0:
        del counts[key]


class WaitingLine(Generic[T]):
    """Who waits for room, in the order in which they may try.

    A place is the time of coming, less ``ageing_s`` a step of priority: a higher priority overtakes
    only what came within that time before it, so nobody waits behind later comers for ever.
    """

    def __init__(self, ageing_s: float) -> None:
        self.ageing_s = ageing_s
        self._places: list[tuple[float, int]] = []
        self._who: dict[tuple[float, int], T] = {}
        self._place_of: dict[int, tuple[float, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, who: object) -> bool:
        return id(who) in self._place_of

    def __iter__(self) -> Iterator[T]:
        """Everyone who stands in line now, first in turn first; the line may change meanwhile."""
        return iter([self._who[place] for place in self._places])

    def join(self, who: T, *, since_s: float, priority: int) -> None:
        """Stand in line; who stands there already keeps its place."""
        if who in self:
            return
        self._count += 1
        priority = max(-PRIORITY_MAX, min(PRIORITY_MAX, priority))
        place = (since_s - priority * self.ageing_s, self._count)
        insort(self._places, place)
        self._who[place] = who
        self._place_of[id(who)] = place

    def leave(self, who: T) -> None:
        """Step out; nothing happens if it does not stand there."""
        place = self._place_of.pop(id(who), None)
        if place is not None:
            self._places.remove(place)
            del self._who[place]
