"""Recording and alert rules for Prometheus
(https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/).
"""

from __future__ import annotations

from typing import Any

from .board import PREFIX


def _rate(family: str, by: str, selector: str = "", window: str = "5m") -> str:
    return f"sum by ({by}) (rate({PREFIX}{family}{selector}[{window}]))"


def _record(name: str, stage: str) -> dict[str, Any]:
    part = _rate("kvfabric_tokens_total", "fabric", f'{{stage="{stage}"}}')
    asked = _rate("kvfabric_tokens_total", "fabric", '{stage="asked"}')
    return {"record": name, "expr": f"{part} / {asked}"}


def _alert(name: str, expr: str, severity: str, summary: str, remedy: str, *, after: str = "0m") -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        "for": after,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": remedy},
    }


def rules() -> dict[str, Any]:
    """The rule file as plain data."""
    alerts = [
        _alert(
            "KvfabricAuditMismatch",
            f'increase({PREFIX}kvfabric_audits_total{{outcome="mismatch"}}[10m]) > 0',
            "critical",
            "Fabric {{ $labels.fabric }}: recomputed state differs from leased state",
            "Wrong bytes passed every check. `kvfabric bypass on`, then `kvfabric doctor`.",
            after="0m",
        ),
        _alert(
            "KvfabricChecksumMismatch",
            _rate("kvfabric_cut_requests_total", "fabric", '{reason="checksum_mismatch"}', "10m") + " > 0",
            "warning",
            "Fabric {{ $labels.fabric }}: bytes were refused for their checksum",
            "Memory, a link or a disk damages bytes: `kvfabric doctor`, the kernel's log, SMART.",
            after="0m",
        ),
        _alert(
            "KvfabricHolderGrantsNothing",
            f'max by (fabric, holder) ({PREFIX}kvfabric_refuses_grants{{mode="not_granting"}}) > 0',
            "critical",
            "Holder {{ $labels.holder }} has lost its right to grant",
            "The supervisor does not reach it, or is gone: `kvfabric status`.",
            after="1m",
        ),
        _alert(
            "KvfabricBypassed",
            f'max by (fabric) ({PREFIX}kvfabric_refuses_grants{{mode="bypassed"}}) > 0',
            "warning",
            "Fabric {{ $labels.fabric }} has been bypassed for half an hour",
            "`kvfabric bypass off` once the suspicion is settled.",
            after="30m",
        ),
        _alert(
            "KvfabricDirectoryStale",
            f"max by (fabric, holder) ({PREFIX}kvfabric_directory_staleness_seconds) > 10",
            "warning",
            "The directory lags behind holder {{ $labels.holder }}",
            "Is every directory shard up (`kvfabric status`)? More of them: fabric.reshard(n).",
            after="2m",
        ),
        _alert(
            "KvfabricQuarantineGrows",
            f"sum by (fabric) ({PREFIX}kvfabric_quarantined_bytes) > 0.1 * sum by (fabric)"
            f" ({PREFIX}kvfabric_held_bytes)",
            "warning",
            "Fabric {{ $labels.fabric }}: more than a tenth of what it holds is quarantined",
            "Writers or transfers end without being proven quiet: look for crashed engines and cut links.",
            after="10m",
        ),
        _alert(
            "KvfabricRoomIsShort",
            _rate("kvfabric_admission_refusals_total", "fabric")
            + " > 0.1 * "
            + _rate("kvfabric_requests_total", "fabric", '{stage="asked"}'),
            "warning",
            "Fabric {{ $labels.fabric }}: one acquire in ten is refused for want of room",
            "More memory_bytes or nodes; `kvfabric leases` for leases that are kept too long.",
            after="10m",
        ),
        _alert(
            "KvfabricNothingIsReused",
            "kvfabric:effective_hit_rate:5m > 0.2 and kvfabric:reused_hit_rate:5m < 0.5 * kvfabric:effective_hit_rate:5m",
            "info",
            "Fabric {{ $labels.fabric }}: less than half of what is granted is reused",
            "kvfabric_unreused_tokens_total by outcome: does the engine report, does its check refuse?",
            after="30m",
        ),
    ]
    recorded = [
        _record("kvfabric:effective_hit_rate:5m", "granted"),
        _record("kvfabric:reused_hit_rate:5m", "reused"),
    ]
    return {
        "groups": [
            {"name": "kvfabric-recorded", "interval": "30s", "rules": recorded},
            {"name": "kvfabric-alerts", "interval": "30s", "rules": alerts},
        ]
    }
