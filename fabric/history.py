"""What a holder's journal says of one chain: for ``kvfabric record``. Digests, never tokens."""

from __future__ import annotations

from typing import Any

from .context import HolderContext
from .journal import Answered, Happened, Released
from .messages import Prompt
from .objects import split


def chain_of(ctx: HolderContext, *, lease: int = 0, digest: bytes = b"") -> Prompt | None:
    """The longest prompt in the journal that a lease was granted for, or whose chain bears a digest; None for none."""
    found: Prompt | None = None
    for entry in ctx.journal:
        if not isinstance(entry, Answered):
            continue
        prompt, grant = entry.request.prompt, entry.answer.grant
        meant = grant is not None and grant.lease == lease if lease else _bears(prompt, digest)
        if meant and (found is None or prompt.n > found.n):
            found = prompt
    return found


def _bears(prompt: Prompt, digest: bytes) -> bool:
    return any(blob.find(digest) % len(digest) == 0 for _, blob in prompt.keys if digest in blob)


def history_of(ctx: HolderContext, keys: dict[int, bytes]) -> list[dict[str, Any]]:
    """Everything the journal has about a chain, given by its digests a unit; ``ago_s``: how long ago it was."""
    chain = {unit: split(blob) for unit, blob in keys.items()}
    index = {digest for digests in chain.values() for digest in digests}
    found: list[dict[str, Any]] = []
    leases: set[int] = set()
    for entry in ctx.journal:
        told: dict[str, Any] | None = None
        match entry:
            case Answered():
                told = _answered(entry, chain)
                if told is not None and told["lease"]:
                    leases.add(told["lease"])
            case Happened():
                told = _happened(ctx, entry, index)
            case Released() if entry.lease in leases:
                told = {"what": "released", "lease": entry.lease}
            case _:
                told = None
        if told is not None:
            found.append({"ago_s": ctx.now - entry.at_s, **told})
    return found


def _answered(entry: Answered, chain: dict[int, tuple[bytes, ...]]) -> dict[str, Any] | None:
    """An acquire of this chain, or of one that leaves it after ``shared`` tokens; None for another's."""
    request, answer = entry.request, entry.answer
    shared, whole = 0, True
    for unit, blob in request.prompt.keys:
        mine, theirs = split(blob), chain.get(unit, ())
        same = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )
        shared = max(shared, same * unit)
        whole = whole and same == len(mine)
    if not shared:
        return None
    cause = answer.cause
    return {
        "what": "acquire",
        "tokens": request.prompt.n,
        "shared": None if whole else shared,
        "branch": "" if whole else max((blob[-32:] for _, blob in request.prompt.keys if blob), default=b"").hex()[:8],
        "wait_s": request.wait_s,
        "lease_s": request.lease_s,
        "min_tokens": request.min_tokens,
        "graph": request.graph,
        "lease": 0 if answer.grant is None else answer.grant.lease,
        "status": str(answer.status),
        "granted": answer.tokens,
        "hash_tokens": answer.hash_tokens,
        "cause": None if cause is None else {"group": cause.group, "kind": cause.kind, "reason": cause.reason},
    }


def _happened(ctx: HolderContext, entry: Happened, chain: set[bytes]) -> dict[str, Any] | None:
    """What happened to objects of the chain, by group, shard and revision: indices."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for place in entry.objects:
        if place.digest in chain:
            unit = ctx.model.groups[place.group].unit_tokens
            groups.setdefault((place.group, place.shard, place.revision), []).append(place.position // unit - 1)
    if not groups:
        return None
    return {"what": entry.what, "objects": [[*key, sorted(set(indices))] for key, indices in sorted(groups.items())]}
