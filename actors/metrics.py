"""The way of a holder's metrics to Prometheus: Ray's own metrics agent of the node serves them.

Counts are plain integers until a timer comes: ``Counter.inc`` takes 1 to 3 us, an integer a twentieth of
that. Histograms go as the cumulative series that Prometheus reads (``_bucket`` by ``le``, ``_sum``,
``_count``): Ray's own take one call an observation, and report sums of the buckets' middles. Ray
prefixes every name with ``ray_``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..fabric.kinds import FabricError
from ..fabric.metrics import FAMILY_OF, Point, Type, buckets, exported_series
from ..fabric.series import Histogram


class MetricsExport:
    """The families of one holder, registered with Ray; :meth:`flush` tells what grew."""

    def __init__(self, fabric: str, holder: str) -> None:
        from ray.util.metrics import Counter, Gauge

        common = {"fabric": fabric, "holder": holder}
        self._metrics: dict[str, Any] = {}
        for name, type_, labels in exported_series():
            family = FAMILY_OF.get(name) or FAMILY_OF[name.rpartition("_")[0]]
            cls = Counter if type_ is Type.COUNTER else Gauge
            metric = cls(name, description=family.help, tag_keys=labels)
            metric.set_default_tags(common)
            self._metrics[name] = metric
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    def flush(self, points: Iterable[Point]) -> None:
        """Tell Ray's agent. Raises FabricError for a point of a family that is none, or with other labels."""
        for point in points:
            family = FAMILY_OF.get(point.name)
            if family is None or len(family.labels) != len(point.labels):
                raise FabricError(f"metrics: {point.name} with {len(point.labels)} labels is no family")
            tags = dict(zip(family.labels, point.labels, strict=True))
            if isinstance(point.value, Histogram):
                self._histogram(point.name, tags, point.value)
            elif family.type is Type.COUNTER:
                self._counter(point.name, point.labels, tags, point.value)
            else:
                self._metrics[point.name].set(point.value, tags)

    def _counter(self, name: str, labels: tuple[str, ...], tags: dict[str, str], value: float) -> None:
        grown = value - self._told.get((name, labels), 0)
        if grown > 0:
            self._told[name, labels] = value
            self._metrics[name].inc(grown, tags)

    def _histogram(self, name: str, tags: dict[str, str], histogram: Histogram) -> None:
        count = 0
        for le, count in buckets(histogram):
            self._metrics[f"{name}_bucket"].set(count, {**tags, "le": le})
        self._metrics[f"{name}_sum"].set(histogram.total, tags)
        self._metrics[f"{name}_count"].set(count, tags)


def link_points(moved_bytes: dict[str, int], moved_s: dict[str, float]) -> list[Point]:
    """What each link carried, and how long it took."""
    return [
        *(Point("kvfabric_transfer_bytes_total", (link,), n) for link, n in moved_bytes.items()),
        *(Point("kvfabric_transfer_seconds_total", (link,), s) for link, s in moved_s.items()),
    ]
