"""Admission: byte limits per kind and tenant, and the line of those that wait for room.

A limit is checked and charged in the same step: an object is charged when it takes a slot and
discharged when the slot is free again, by whatever path (store, fetch, restore, eviction), because
:class:`~kvfabric.fabric.books.Books` is the one place where slots change hands. What is in use but
evictable counts as room, as it does for a pool: whoever needs it pushes it out, least recently used
first.

    whole need or nothing    a need is asked for all its pools and limits at once
    larger than the limit    never waits: no eviction can make that room
    over a tenant's limit    refused as ``quota``; over any other, ``admission_limit``
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from .kinds import ObjectKind, Reason
from .messages import Cap
from .model import ModelSpec

if TYPE_CHECKING:
    from .books import Obj

T = TypeVar("T")

PRIORITY_MAX = 16
"""Priorities lie in -PRIORITY_MAX..PRIORITY_MAX, so that ageing overtakes any of them in bounded time."""


@dataclass(frozen=True, slots=True)
class ByteLimit:
    """At most ``bytes_max`` bytes of slots in one scope of one holder.

    ``kind`` None: all kinds together. ``tenant`` None: all tenants together, or with
    ``each_tenant`` every tenant by itself.
    """

    bytes_max: int
    kind: ObjectKind | None = None
    tenant: str | None = None
    each_tenant: bool = False

    @property
    def reason(self) -> Reason:
        """What a refusal by this limit is called."""
        return Reason.QUOTA if self.tenant is not None or self.each_tenant else Reason.ADMISSION_LIMIT

    def concerns(self, kind: ObjectKind, tenant: str) -> bool:
        return self.kind in (None, kind) and self.tenant in (None, tenant)


@dataclass(slots=True)
class Scope:
    """What one limit counts, for one tenant if it is a limit of each."""

    limit: ByteLimit
    used_bytes: int = 0
    evictable_bytes: int = 0
    order: list[tuple[int, int, int, Obj]] = field(default_factory=list)
    """Heap of what may make room here, as a pool's."""

    @property
    def room_bytes(self) -> int:
        return self.limit.bytes_max - self.used_bytes + self.evictable_bytes


@dataclass(frozen=True, slots=True)
class Lack:
    """The first pool or limit that cannot take a need: the group named, and why."""

    group: int
    shard: int
    reason: Reason


class AdmissionBook:
    """The limits of one holder and what is charged to them. Without limits it costs nothing."""

    def __init__(self, model: ModelSpec, limits: Sequence[ByteLimit] = ()) -> None:
        self.model = model
        self.limits = tuple(limits)
        self._scopes: dict[tuple[int, str], Scope] = {}
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
        needs: dict[int, tuple[Scope, int]] = {}
        for obj in objects:
            for scope in self.scopes(obj.kind, obj.tenant):
                need = needs.get(id(scope), (scope, 0))[1] + self._bytes[obj.group]
                needs[id(scope)] = (scope, need)
                if need > scope.room_bytes:
                    return Lack(obj.group, obj.shard, scope.limit.reason)
        return None

    def caps(self, tenant: str) -> tuple[Cap, ...]:
        """What each limit leaves one tenant, for a planner elsewhere."""
        found = []
        for i, limit in enumerate(self.limits):
            groups = tuple(g for g, spec in enumerate(self.model.groups) if limit.concerns(spec.kind, tenant))
            if groups:
                scope = self._scopes.get((i, tenant if limit.each_tenant else "")) or Scope(limit)
                found.append(Cap(groups, max(scope.room_bytes, 0), limit.bytes_max, limit.reason))
        return tuple(found)

    def over(self, obj: Obj) -> Scope | None:
        """A scope that must make room before this object is charged; None if none must."""
        size = self._bytes[obj.group]
        for scope in self.scopes(obj.kind, obj.tenant):
            if scope.used_bytes + size > scope.limit.bytes_max:
                return scope
        return None

    # --- charging ------------------------------------------------------------------------------

    def charge(self, obj: Obj) -> None:
        """The object took a slot."""
        for scope in self.scopes(obj.kind, obj.tenant):
            scope.used_bytes += self._bytes[obj.group]

    def discharge(self, obj: Obj) -> None:
        """The object's slot is free."""
        for scope in self.scopes(obj.kind, obj.tenant):
            scope.used_bytes -= self._bytes[obj.group]
        for key in [k for k, s in self._scopes.items() if not s.used_bytes]:
            del self._scopes[key]

    def evictable(self, obj: Obj, sign: int) -> None:
        """The object became evictable (+1) or no longer is (-1)."""
        for scope in self.scopes(obj.kind, obj.tenant):
            scope.evictable_bytes += sign * self._bytes[obj.group]

    def enqueue(self, obj: Obj, entry: tuple[int, int, int, Obj]) -> None:
        """Let the object make room in its scopes in its turn."""
        for scope in self.scopes(obj.kind, obj.tenant):
            heapq.heappush(scope.order, entry)
            if len(scope.order) > 4 * (scope.used_bytes // self._bytes[obj.group]) + 256:
                scope.order = compacted(scope.order)

    # --- checking ------------------------------------------------------------------------------

    def excess(self, owners: Iterable[Obj | None]) -> list[str]:
        """What is over a limit, or charged otherwise than owned."""
        if not self.limits:
            return []
        by_group = Counter((obj.group, obj.tenant) for obj in owners if obj is not None)
        owned: dict[tuple[int, str], int] = {}
        for (group, tenant), count in by_group.items():
            for i, limit in enumerate(self.limits):
                if limit.concerns(self.model.groups[group].kind, tenant):
                    key = (i, tenant if limit.each_tenant else "")
                    owned[key] = owned.get(key, 0) + count * self._bytes[group]
        found = []
        for key in sorted(owned.keys() | self._scopes.keys()):
            limit = self.limits[key[0]]
            used, charged = owned.get(key, 0), self._scopes[key].used_bytes if key in self._scopes else 0
            if used > limit.bytes_max:
                found.append(f"{used} bytes are in use, the limit is {limit}")
            if used != charged:
                found.append(f"{used} bytes are in use, {charged} are charged to {limit}")
        return found


def compacted(order: list[tuple[int, int, int, Obj]]) -> list[tuple[int, int, int, Obj]]:
    """A heap with the newest entry of each object that is still evictable."""
    live = {id(e[3]): e for e in sorted(order, key=lambda e: e[2]) if e[3].evictable}
    order = list(live.values())
    heapq.heapify(order)
    return order


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
