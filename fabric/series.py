"""What a holder (or a replay) did over time: cumulative samples, kept in bounded memory.

Every count is a running total since the series began, so that any two samples give the rate between
them and dropping samples loses resolution only. Histograms are counts by :data:`BOUNDS_S`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator

from .kinds import ObjectKind, Reason, Tier

BOUNDS_S: tuple[float, ...] = tuple(0.0005 * (1 << i) for i in range(24))
"""Upper ends of a histogram's buckets, in seconds (0.5 ms, doubling, to 70 min); one more bucket takes the rest."""

Occupancy = dict[ObjectKind, dict[Tier, int]]
"""Bytes held at one moment, by kind of object and tier."""


class Histogram:
    """How often something took how long (or was how large): one count a bucket of ``bounds``, and their sum."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """The upper end of the bucket within which that share of all lies; None where nothing was counted."""
    total, seen = sum(counts), 0
    for bound, count in zip((*BOUNDS_S, BOUNDS_S[-1]), counts, strict=False):
        seen += count
        if count and seen >= share * total:
            return bound
    return None


class Sample(BaseModel):
    """The totals at one moment, ``at_s`` seconds after the series began on its own clock (real or simulated).

    ``tokens``: asked for; ``hash_hit_tokens``: promised by hashes; ``usable_hit_tokens``: allowed by the rules over
    everything reachable; ``effective_hit_tokens``: covered by granted leases. ``lost_tokens``: hash_hit -
    effective by the reason of the answer's cause. ``lost_by_kind``: the same by the cause's kind.
    ``occupancy_bytes`` alone is no total but what is held at this moment. ``evictions``: objects and
    extents that made room; ``restores``: objects brought back from a tier; ``moved_bytes``: fetched from other holders,
    ``restored_bytes``, ``written_bytes``: from and to tiers. ``recovery``: histogram of how long acquires took
    that had to restore; ``lease_life``: of how long leases lived.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_s: float = Field(ge=0)
    requests: int = Field(default=0, ge=0)
    tokens: int = Field(default=0, ge=0)
    hash_hit_tokens: int = Field(default=0, ge=0)
    usable_hit_tokens: int = Field(default=0, ge=0)
    effective_hit_tokens: int = Field(default=0, ge=0)
    lost_tokens: dict[Reason, int] = Field(default_factory=dict)
    lost_by_kind: dict[ObjectKind, int] = Field(default_factory=dict)
    occupancy_bytes: Occupancy = Field(default_factory=dict)
    evictions: int = Field(default=0, ge=0)
    restores: int = Field(default=0, ge=0)
    moved_bytes: int = Field(default=0, ge=0)
    restored_bytes: int = Field(default=0, ge=0)
    written_bytes: int = Field(default=0, ge=0)
    recovery: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    lease_life: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)

    @field_validator("recovery", "lease_life")
    @classmethod
    def _has_every_bucket(cls, counts: tuple[int, ...]) -> tuple[int, ...]:
        if len(counts) != len(BOUNDS_S) + 1 or any(count < 0 for count in counts):
            raise ValueError(f"{len(BOUNDS_S) + 1} counts are expected, one a bucket")
        return counts


_SAMPLES: TypeAdapter[list[Sample]] = TypeAdapter(list[Sample])


def dumped(samples: list[Sample]) -> str:
    """Samples as a JSON list."""
    return _SAMPLES.dump_json(samples).decode()


def loaded(plain: object) -> list[Sample]:
    """Samples from what a JSON list holds. Raises ValidationError for anything else."""
    return _SAMPLES.validate_python(plain)


class Timeline:
    """Samples at even distances, at most ``samples_max``: once full, every second one goes and the distance doubles."""

    def __init__(self, every_s: float = 5.0, samples_max: int = 720) -> None:
        self.every_s = every_s
        self.samples_max = samples_max
        self.samples: list[Sample] = []
        self.due_s = 0.0
        """When, seconds after the beginning, the next sample is wanted."""

    def add(self, sample: Sample) -> None:
        """Keep this one; the caller asks ``due_s`` first, but for the last of a series."""
        self.samples.append(sample)
        if len(self.samples) > self.samples_max:
            del self.samples[1::2]
            self.every_s *= 2
        self.due_s = sample.at_s + self.every_s


def aligned(series: Iterable[Sequence[Sample]]) -> list[list[Sample]]:
    """Series that end at one moment, whenever each began, on the clock of the longest."""
    each = [list(samples) for samples in series if samples]
    end_s = max((samples[-1].at_s for samples in each), default=0.0)
    return [[s.model_copy(update={"at_s": s.at_s + end_s - samples[-1].at_s}) for s in samples] for samples in each]


def merged(series: Iterable[Sequence[Sample]]) -> list[Sample]:
    """Several holders' series as one: at each sampled moment the sum of everyone's latest sample.

    Holders that began at different moments are sampled at different ones: those that belong together count as one.
    """
    each = [list(samples) for samples in series if samples]
    moments = _together(each)
    latest = [0] * len(each)
    found = []
    for moment in moments:
        current = []
        for place, samples in enumerate(each):
            while latest[place] < len(samples) and samples[latest[place]].at_s <= moment:
                latest[place] += 1
            if latest[place]:
                current.append(samples[latest[place] - 1])
        found.append(added(moment, current))
    return found


def _together(each: Sequence[Sequence[Sample]]) -> list[float]:
    """The moments of samples, the last of those that lie closer than holders sample themselves; the first stays.

    Between two samples of others one holder's totals stand still: a rate over so short a time would be one holder's.
    """
    moments = sorted({sample.at_s for samples in each for sample in samples})
    gaps_s = [median(b.at_s - a.at_s for a, b in pairwise(samples)) for samples in each if len(samples) > 2]
    if len(each) < 2 or not gaps_s:
        return moments
    near_s, kept, began_s = max(gaps_s) / 2, list[float](), moments[0]
    for moment in moments:
        if not kept or moment - began_s >= near_s:
            kept.append(moment)
            began_s = moment
        elif len(kept) > 1 or moment == moments[-1]:
            kept[-1] = moment
    return kept


_TOTALS = (
    "requests",
    "tokens",
    "hash_hit_tokens",
    "usable_hit_tokens",
    "effective_hit_tokens",
    "evictions",
    "restores",
    "moved_bytes",
    "restored_bytes",
    "written_bytes",
)


def added(at_s: float, samples: Sequence[Sample]) -> Sample:
    """The sum of samples, as of ``at_s``."""
    lost: dict[Reason, int] = {}
    by_kind: dict[ObjectKind, int] = {}
    occupancy: Occupancy = {}
    for sample in samples:
        for reason, tokens in sample.lost_tokens.items():
            lost[reason] = lost.get(reason, 0) + tokens
        for kind, tokens in sample.lost_by_kind.items():
            by_kind[kind] = by_kind.get(kind, 0) + tokens
        for kind, tiers in sample.occupancy_bytes.items():
            for tier, nbytes in tiers.items():
                here = occupancy.setdefault(kind, {})
                here[tier] = here.get(tier, 0) + nbytes
    return Sample(
        at_s=at_s,
        lost_tokens=lost,
        lost_by_kind=by_kind,
        occupancy_bytes=occupancy,
        recovery=_column_sums(sample.recovery for sample in samples),
        lease_life=_column_sums(sample.lease_life for sample in samples),
        **{name: sum(getattr(sample, name) for sample in samples) for name in _TOTALS},
    )


def _column_sums(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip((0,) * (len(BOUNDS_S) + 1), *rows, strict=True)))
