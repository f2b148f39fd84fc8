"""What is exported: every metric family, and their values read off one holder's core.

Names and units follow Prometheus' conventions. Nothing here runs on the way of an acquire: a timer
reads what :mod:`tally` and the books counted. ``docs/metrics.md`` holds the same table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from .kinds import LAYER_OF, Tier
from .series import Histogram
from .tally import is_validation

if TYPE_CHECKING:
    from .holder import HolderCore


class Type(StrEnum):
    """The three types of metric that are used."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: ``labels`` besides ``fabric`` and ``holder``, which every one bears."""

    name: str
    type: Type
    labels: tuple[str, ...]
    help: str


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a family; ``labels`` in its order. Of a histogram: the histogram itself."""

    name: str
    labels: tuple[str, ...]
    value: float | Histogram


COMMON_LABELS = ("fabric", "holder")
_C, _G, _H = Type.COUNTER, Type.GAUGE, Type.HISTOGRAM

FAMILIES: tuple[Family, ...] = (
    Family("kvfabric_requests_total", _C, ("stage",), "Acquires that got as far as this stage of the funnel"),
    Family("kvfabric_tokens_total", _C, ("stage",), "Tokens that got as far as this stage of the funnel"),
    Family("kvfabric_answers_total", _C, ("status",), "Answers to acquires by status"),
    Family("kvfabric_cut_requests_total", _C, ("layer", "kind", "reason"), "Acquires whose prefix was cut, by cause"),
    Family("kvfabric_cut_tokens_total", _C, ("layer", "kind", "reason"), "Tokens promised by hashes and not granted"),
    Family(
        "kvfabric_validation_failures_total",
        _C,
        ("layer", "kind", "reason"),
        "Acquires cut by one of the four layers of validation",
    ),
    Family("kvfabric_unreused_requests_total", _C, ("outcome", "reason"), "Leases that were not reused whole"),
    Family("kvfabric_unreused_tokens_total", _C, ("outcome", "reason"), "Granted tokens that were not reused"),
    Family(
        "kvfabric_recoveries_total",
        _C,
        ("way", "kind", "outcome", "reason"),
        "Objects fetched, restored or replayed: attempted, succeeded, failed",
    ),
    Family("kvfabric_alignment_lost_tokens_total", _C, (), "Tokens that only the resume grid forbade"),
    Family("kvfabric_replayed_tokens_total", _C, (), "Granted tokens whose windows the reader computes again"),
    Family("kvfabric_copies_total", _C, ("outcome",), "Copies of hot prefixes: asked for, placed, refused, dropped"),
    Family("kvfabric_writes_not_worth_total", _C, (), "Objects that second touch kept off the disk"),
    Family("kvfabric_admission_refusals_total", _C, ("verb", "reason"), "Acquires and stores refused for want of room"),
    Family("kvfabric_refusals_total", _C, ("reply", "reason"), "Other requests of clients that were refused"),
    Family("kvfabric_audits_total", _C, ("outcome",), "Leases whose state an adapter recomputed and compared"),
    Family("kvfabric_evictions_total", _C, ("tier",), "Objects in memory and extents on disk that made room"),
    Family("kvfabric_stored_objects_total", _C, (), "Objects that became visible by a commit"),
    Family("kvfabric_restored_bytes_total", _C, (), "Bytes brought back from a tier"),
    Family("kvfabric_written_bytes_total", _C, (), "Bytes written to a tier"),
    Family("kvfabric_transfer_bytes_total", _C, ("link",), "Bytes fetched from other holders"),
    Family("kvfabric_transfer_seconds_total", _C, ("link",), "Seconds that fetches from other holders took"),
    Family("kvfabric_held_bytes", _G, ("kind", "tier"), "Bytes held"),
    Family(
        "kvfabric_slots", _G, ("kind", "state"), "Slots of the pools: free, evictable, or held by a pin or a transfer"
    ),
    Family("kvfabric_quarantined_bytes", _G, ("kind",), "Bytes of slots that foreign bytes may still reach"),
    Family("kvfabric_live_leases", _G, (), "Leases this holder keeps pins for"),
    Family("kvfabric_waiting_requests", _G, ("for",), "Acquires in line for room, or to restore"),
    Family("kvfabric_directory_staleness_seconds", _G, (), "For how long the directory has not seen all that changed"),
    Family("kvfabric_refuses_grants", _G, ("mode",), "1 while this holder grants nothing: why"),
    Family("kvfabric_tail_length_tokens", _H, ("kind",), "Tokens of the tails that leases covered"),
    Family("kvfabric_swap_in_seconds", _H, ("kind",), "How long reading an object from a tier took"),
    Family("kvfabric_restore_wait_seconds", _H, ("kind",), "How long acquires stood in line to restore"),
    Family("kvfabric_recovery_seconds", _H, (), "How long acquires took that had to restore"),
    Family(
        "kvfabric_lease_age_seconds",
        _H,
        ("kind",),
        "How long leases that ended, and covered state of this kind, had lived",
    ),
)
FAMILY_OF: Mapping[str, Family] = {family.name: family for family in FAMILIES}

_STAGES = (
    ("asked", "acquires_total", "asked_tokens_total"),
    ("hash", "hash_hit_requests_total", "hash_hit_tokens_total"),
    ("usable", "usable_hit_requests_total", "usable_hit_tokens_total"),
    ("granted", "effective_hit_requests_total", "effective_hit_tokens_total"),
    ("reused", "reused_hit_requests_total", "reused_hit_tokens_total"),
)
STAGES = tuple(stage for stage, _, _ in _STAGES)
"""The funnel: asked for, promised by hashes, allowed by the rules, covered by leases, reused after a clean check."""

_PLAIN = {
    "kvfabric_alignment_lost_tokens_total": "tokens_lost_to_alignment_total",
    "kvfabric_replayed_tokens_total": "replayed_tokens_total",
    "kvfabric_stored_objects_total": "stored_objects",
    "kvfabric_restored_bytes_total": "restored_bytes",
    "kvfabric_written_bytes_total": "written_bytes",
    "kvfabric_writes_not_worth_total": "writes_not_worth",
}


def collect(core: HolderCore) -> list[Point]:
    """Everything a holder's core knows of itself at this moment."""
    return [*_funnel(core), *_causes(core), *_state(core), *_histograms(core)]


def _funnel(core: HolderCore) -> Iterator[Point]:
    count = core.ctx.counters
    for stage, requests, tokens in _STAGES:
        yield Point("kvfabric_requests_total", (stage,), count[requests])
        yield Point("kvfabric_tokens_total", (stage,), count[tokens])
    for name, counter in _PLAIN.items():
        yield Point(name, (), count[counter])
    for outcome in ("asked_for", "placed", "refused", "dropped"):
        yield Point("kvfabric_copies_total", (outcome,), count[f"copies_{outcome}"])
    for status, n in core.ctx.tally.answers.items():  # after the counters: reading them brings it up to date
        yield Point("kvfabric_answers_total", (str(status),), n)


def _causes(core: HolderCore) -> Iterator[Point]:
    tally = core.ctx.tally
    for (kind, reason), n in tally.cut_requests.items():
        labels = (str(LAYER_OF[reason]), str(kind), str(reason))
        yield Point("kvfabric_cut_requests_total", labels, n)
        yield Point("kvfabric_cut_tokens_total", labels, tally.cut_tokens[kind, reason])
        if is_validation(reason):
            yield Point("kvfabric_validation_failures_total", labels, n)
    for (how, why), n in tally.unreused_leases.items():
        outcome = (str(how), str(why or ""))
        yield Point("kvfabric_unreused_requests_total", outcome, n)
        yield Point("kvfabric_unreused_tokens_total", outcome, tally.unreused_tokens[how, why])
    for (way, kind, became, why), n in tally.recoveries.items():
        yield Point("kvfabric_recoveries_total", (str(way), str(kind), str(became), str(why or "")), n)
    for (verb, reason), n in tally.admission_refusals.items():
        yield Point("kvfabric_admission_refusals_total", (verb, str(reason)), n)
    for (reply, reason), n in tally.refusals.items():
        yield Point("kvfabric_refusals_total", (reply, str(reason)), n)
    for audited, n in tally.audits.items():
        yield Point("kvfabric_audits_total", (str(audited),), n)


def _state(core: HolderCore) -> Iterator[Point]:
    ctx = core.ctx
    books = ctx.books
    yield Point("kvfabric_evictions_total", (str(ctx.arena.layout.pools[0].tier),), books.victims)
    yield Point("kvfabric_evictions_total", (str(Tier.G3),), ctx.counters["extents_evicted"])
    for kind, tiers in core.sampler.sample().occupancy_bytes.items():
        for tier, nbytes in tiers.items():
            yield Point("kvfabric_held_bytes", (str(kind), str(tier)), nbytes)
    slots: dict[tuple[str, str], int] = {}
    for pool in books.pools.values():
        kind = books.model.groups[pool.group].kind
        held = pool.used - pool.evictable
        for state, n in (("free", pool.unused), ("evictable", pool.evictable), ("held", held)):
            slots[str(kind), state] = slots.get((str(kind), state), 0) + n
    for labels, n in slots.items():
        yield Point("kvfabric_slots", labels, n)
    for kind, nbytes in books.quarantined_bytes.items():
        yield Point("kvfabric_quarantined_bytes", (str(kind),), nbytes)
    yield Point("kvfabric_live_leases", (), len(ctx.leases.live))
    yield Point("kvfabric_waiting_requests", ("room",), len(core.leader.waiting))
    yield Point("kvfabric_waiting_requests", ("restore",), len(core.disk.line))
    yield Point("kvfabric_directory_staleness_seconds", (), core.events.staleness_s)
    for mode, on in (("bypassed", ctx.bypassed), ("draining", ctx.draining), ("not_granting", not ctx.may_grant)):
        yield Point("kvfabric_refuses_grants", (mode,), int(on))


def _histograms(core: HolderCore) -> Iterator[Point]:
    tally = core.ctx.tally
    by_kind = {
        "kvfabric_tail_length_tokens": tally.tail_tokens,
        "kvfabric_swap_in_seconds": tally.swap_in_s,
        "kvfabric_restore_wait_seconds": tally.restore_wait_s,
        "kvfabric_lease_age_seconds": core.ctx.leases.life_by_kind,
    }
    for name, histograms in by_kind.items():
        for kind, histogram in histograms.items():
            yield Point(name, (str(kind),), histogram)
    yield Point("kvfabric_recovery_seconds", (), core.ctx.recovery)


def exported_series(families: Iterable[Family] = FAMILIES) -> list[tuple[str, Type, tuple[str, ...]]]:
    """The series a scrape shows: a histogram is its buckets (``le``), its sum and its count."""
    found: list[tuple[str, Type, tuple[str, ...]]] = []
    for family in families:
        labels = (*COMMON_LABELS, *family.labels)
        if family.type is not Type.HISTOGRAM:
            found.append((family.name, family.type, labels))
            continue
        found.append((f"{family.name}_bucket", Type.GAUGE, (*labels, "le")))
        found += [(f"{family.name}_{part}", Type.GAUGE, labels) for part in ("sum", "count")]
    return found


def buckets(histogram: Histogram) -> Iterator[tuple[str, int]]:
    """Cumulative counts by upper end, as Prometheus wants them."""
    seen = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        seen += count
        yield "+Inf" if bound == float("inf") else f"{bound:g}", seen
