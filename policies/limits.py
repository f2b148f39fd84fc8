"""Admission limits: what a spec says of kinds and tenants, as the limits and quotas that a holder's books keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..fabric.admission import EVERY_TENANT as EVERY
from ..fabric.admission import ByteLimit, TenantQuota
from ..fabric.kinds import ObjectKind, SpecError
from ..fabric.model import ModelSpec

FLOOR_SHARE = 0.05
"""Of a limit on all kinds, what each kind of the model is sure of unless the spec says otherwise."""


@dataclass(frozen=True, slots=True)
class KindLimit:
    """At most ``bytes_max`` for one kind, and ``floor_share`` of every limit on all kinds for it alone."""

    bytes_max: int | None = None
    floor_share: float = FLOOR_SHARE


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """What one tenant, or every tenant by itself, may have of a holder. None: no limit."""

    bytes_max: int | None = None
    leases_max: int | None = None
    restores_max: int | None = None


def byte_limits(
    model: ModelSpec, bytes_max: int | None, kinds: Mapping[ObjectKind, KindLimit], tenants: Mapping[str, TenantLimit]
) -> tuple[ByteLimit, ...]:
    """The byte limits of one holder. ``tenants``: ``*`` for each that is not named.

    Raises SpecError for a kind that the model does not have, and floors that are more than the whole.
    """
    there = {group.kind for group in model.groups}
    for kind in kinds:
        if kind not in there:
            raise SpecError(f"limits.kinds.{kind}: no group of the model is of this kind")
    shares = {kind: kinds.get(kind, KindLimit()).floor_share for kind in sorted(there)}
    if sum(shares.values()) > 1:
        told = ", ".join(f"{kind} {share:g}" for kind, share in shares.items())
        raise SpecError(f"limits.kinds: the floors are more than the whole ({told})")

    def of_all_kinds(most: int, tenant: str | None = None, *, each: bool = False) -> ByteLimit:
        floors = tuple((kind, int(share * most)) for kind, share in shares.items())
        named = frozenset(tenants) - {EVERY} if each else frozenset[str]()
        return ByteLimit(most, tenant=tenant, each_tenant=each, floors=floors, but=named)

    found = [] if bytes_max is None else [of_all_kinds(bytes_max)]
    found += [ByteLimit(k.bytes_max, kind) for kind, k in kinds.items() if k.bytes_max is not None]
    for tenant, limit in tenants.items():
        if limit.bytes_max is not None:
            each = tenant == EVERY
            found.append(of_all_kinds(limit.bytes_max, None if each else tenant, each=each))
    return tuple(found)


def quotas(tenants: Mapping[str, TenantLimit]) -> tuple[tuple[str, TenantQuota], ...]:
    """The quotas on leases and restores, by tenant."""
    return tuple((tenant, TenantQuota(limit.leases_max, limit.restores_max)) for tenant, limit in tenants.items())
