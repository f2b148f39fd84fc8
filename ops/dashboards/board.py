"""The dashboard as Grafana's JSON model (https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/).

Every expression names families of :mod:`kvfabric.fabric.metrics` under the prefix that Ray gives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PREFIX = "ray_"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, COLUMNS = 12, 8, 2
SCHEMA_VERSION = 39
UID = "kvfabric"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: a title, the unit of its axis in Grafana's words, expressions with legends, what to read from it."""

    title: str
    unit: str
    rows: tuple[tuple[str, str], ...]
    about: str = ""


def rate(family: str, by: str = "", **labels: str) -> str:
    """The rate of a counter over all holders, summed ``by`` labels."""
    chosen = ", ".join(['fabric=~"$fabric"', *(f'{k}="{v}"' for k, v in labels.items())])
    summed = f"sum by ({by}) " if by else "sum "
    return f"{summed}(rate({PREFIX}{family}{{{chosen}}}[$__rate_interval]))"


def level(family: str, by: str, how: str = "sum") -> str:
    """A gauge over all holders."""
    return f'{how} by ({by}) ({PREFIX}{family}{{fabric=~"$fabric"}})'


def share(part: str, whole: str = "asked") -> str:
    """Tokens of one stage over those of another."""
    return f"{rate('kvfabric_tokens_total', stage=part)} / {rate('kvfabric_tokens_total', stage=whole)}"


def quantile(family: str, q: float, by: str = "kind") -> str:
    """A quantile of a histogram over the last interval."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{family}_bucket', by=labels)})"


def _funnel() -> list[Panel]:
    return [
        Panel("Tokens by stage", "short", ((rate("kvfabric_tokens_total", by="stage"), "{{stage}}"),)),
        Panel(
            "effective_hit_rate and reused_hit_rate",
            "percentunit",
            ((share("granted"), "effective_hit_rate"), (share("reused"), "reused_hit_rate")),
            "Granted over asked, and reused (reported after a clean check) over asked. They are never one number.",
        ),
        Panel(
            "Tokens promised and not granted, by reason",
            "short",
            ((rate("kvfabric_cut_tokens_total", by="kind, reason"), "{{kind}} {{reason}}"),),
            "Why hashes promised more than leases cover; the words are those of kvfabric explain.",
        ),
        Panel(
            "Granted and not reused",
            "short",
            ((rate("kvfabric_unreused_tokens_total", by="outcome, reason"), "{{outcome}} {{reason}}"),),
        ),
        Panel(
            "Validation failures",
            "short",
            (
                (
                    rate("kvfabric_validation_failures_total", by="layer, kind, reason"),
                    "{{layer}} {{kind}} {{reason}}",
                ),
            ),
        ),
        Panel("Tokens lost to alignment", "short", ((rate("kvfabric_alignment_lost_tokens_total"), "tokens/s"),)),
    ]


def _state() -> list[Panel]:
    return [
        Panel("Bytes held", "bytes", ((level("kvfabric_held_bytes", "kind, tier"), "{{kind}} {{tier}}"),)),
        Panel("Slots", "short", ((level("kvfabric_slots", "kind, state"), "{{kind}} {{state}}"),)),
        Panel("Evictions", "short", ((rate("kvfabric_evictions_total", by="tier"), "{{tier}}"),)),
        Panel(
            "Refused for want of room, and in line",
            "short",
            (
                (rate("kvfabric_admission_refusals_total", by="verb, reason"), "{{verb}} {{reason}}"),
                (level("kvfabric_waiting_requests", "for"), "in line for {{for}}"),
            ),
        ),
        Panel(
            "Live leases and their age",
            "short",
            (
                (level("kvfabric_live_leases", "holder"), "{{holder}}"),
                (quantile("kvfabric_lease_age_seconds", 0.99), "p99 age in seconds, {{kind}}"),
            ),
        ),
        Panel("Quarantined bytes", "bytes", ((level("kvfabric_quarantined_bytes", "kind"), "{{kind}}"),)),
    ]


def _recovery() -> list[Panel]:
    return [
        Panel(
            "Recoveries",
            "short",
            ((rate("kvfabric_recoveries_total", by="way, outcome, reason"), "{{way}} {{outcome}} {{reason}}"),),
        ),
        Panel(
            "Swap-in and restore wait, p99",
            "s",
            (
                (quantile("kvfabric_swap_in_seconds", 0.99), "swap-in {{kind}}"),
                (quantile("kvfabric_restore_wait_seconds", 0.99), "wait {{kind}}"),
                (quantile("kvfabric_recovery_seconds", 0.99, by=""), "acquire that restores"),
            ),
        ),
        Panel(
            "Transfers by link",
            "Bps",
            ((rate("kvfabric_transfer_bytes_total", by="link"), "{{link}}"),),
        ),
        Panel(
            "Directory staleness",
            "s",
            ((level("kvfabric_directory_staleness_seconds", "holder", "max"), "{{holder}}"),),
        ),
        Panel("Grants refused to everyone", "short", ((level("kvfabric_refuses_grants", "mode"), "{{mode}}"),)),
        Panel("Audits", "short", ((rate("kvfabric_audits_total", by="outcome"), "{{outcome}}"),)),
    ]


SECTIONS: tuple[tuple[str, list[Panel]], ...] = (
    ("How far requests get", _funnel()),
    ("What is held", _state()),
    ("Ways back, and health", _recovery()),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana takes it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, section in SECTIONS:
        panels.append(_row(len(panels) + 1, title, y))
        y += 1
        for number, panel in enumerate(section):
            at = {"x": number % COLUMNS * WIDTH, "y": y + number // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_graph(len(panels) + 1, panel, at))
        y += -(-len(section) // COLUMNS) * HEIGHT
    return {
        "uid": UID,
        "title": "kvfabric",
        "tags": ["kvfabric", "ray"],
        "editable": True,
        "schemaVersion": SCHEMA_VERSION,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source_variable(), _fabric_variable()]},
        "panels": panels,
    }


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": 24, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _graph(number: int, panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for place, (expression, legend) in enumerate(panel.rows)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _fabric_variable() -> dict[str, Any]:
    query = f"label_values({PREFIX}kvfabric_requests_total, fabric)"
    return {
        "name": "fabric",
        "label": "Fabric",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "fabric"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }
