"""A fabric's status as tables: the same for ``status`` and ``top``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...fabric.metrics import STAGES
from ...transport.disk.protocol import Health

CAUSES_SHOWN = 5
_STYLES = {Health.OK: "green", Health.STARTING: "yellow"}

_COUNTERS = {
    "asked": "asked_tokens_total",
    "hash": "hash_hit_tokens_total",
    "usable": "usable_hit_tokens_total",
    "granted": "effective_hit_tokens_total",
    "reused": "reused_hit_tokens_total",
}


def funnel(status: Mapping[str, Any]) -> dict[str, int]:
    """Tokens by stage, over all holders."""
    total: Counter[str] = Counter()
    for holder in status["holders"]:
        total.update(holder.get("counters", {}))
    return {stage: total[_COUNTERS[stage]] for stage in STAGES}


def rates(tokens: Mapping[str, int]) -> dict[str, float | None]:
    """``effective_hit_rate``: granted over asked; ``reused_hit_rate``: reused over asked. None where nothing was asked."""
    asked = tokens["asked"]
    return {
        "effective_hit_rate": tokens["granted"] / asked if asked else None,
        "reused_hit_rate": tokens["reused"] / asked if asked else None,
    }


def pools_by_kind(status: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Slots and bytes by kind, over all holders: ``slots``, ``free``, ``evictable``, ``held``, ``bytes``."""
    found: dict[str, Counter[str]] = {}
    for holder in status["holders"]:
        for pool in holder.get("pools", ()):
            of = found.setdefault(pool["kind"], Counter())
            used = pool["slots"] - pool["free"]
            of.update(
                slots=pool["slots"],
                free=pool["free"],
                evictable=pool["evictable"],
                held=used - pool["evictable"],
                bytes=used * pool["slot_bytes"],
            )
    return found


def lost_by_cause(status: Mapping[str, Any]) -> Counter[tuple[str, str]]:
    """Tokens promised by hashes and not granted, by kind and reason, over all holders."""
    found: Counter[tuple[str, str]] = Counter()
    for holder in status["holders"]:
        for one in holder.get("lost_tokens", ()):
            found[one["kind"], one["reason"]] += one["tokens"]
    return found


def tables(status: Mapping[str, Any], *lines: RenderableType) -> RenderableType:
    """Everything at a glance: what concerns all of it first, for a terminal may have too few rows for every process.

    ``lines``: more of that kind.
    """
    parts = [_head(status), *lines, _funnel(status), _lost(status), _pools(status), _tiers(status), _work(status)]
    return Group(*(part for part in parts if part is not None), _processes(status))


def _head(status: Mapping[str, Any]) -> RenderableType:
    words = [f"fabric {status['fabric']}", f"model {status['model']}", f"weights {status['weights'] or '-'}"]
    text = Text("   ".join(words), style="bold")
    if status["bypassed"]:
        text.append("   BYPASSED: every acquire answers recompute", style="bold red")
    return text


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="dim", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _processes(status: Mapping[str, Any]) -> Table:
    known = {told["address"]: told for told in (*status["holders"], *status["directory"]) if "address" in told}
    table = _table("processes", "process", "node", "life", "incarnation", "state")
    for address, process in sorted(status["processes"].items()):
        told = known.get(address, {})
        table.add_row(
            address,
            process["node"][:12],
            process["life"],
            str(told.get("incarnation", told.get("epoch", "-"))),
            _state(process, told),
        )
    return table


def _state(process: Mapping[str, Any], told: Mapping[str, Any]) -> Text:
    problem = told.get("error") or process["failure"]
    if problem:
        return Text(problem, style="red")
    if told.get("bypassed") or told.get("draining"):
        return Text("bypassed" if told.get("bypassed") else "draining", style="yellow")
    if "grants" in told:
        return Text("grants", style="green") if told["grants"] else Text("grants nothing", style="red")
    return Text("answers", style="green") if told else Text("says nothing", style="yellow")


def _pools(status: Mapping[str, Any]) -> Table:
    table = _table("pools by kind", "kind", "slots", "free", "evictable", "held", "bytes")
    for kind, of in sorted(pools_by_kind(status).items()):
        table.add_row(kind, *(f"{of[name]:,}" for name in ("slots", "free", "evictable", "held")), size(of["bytes"]))
    return table


def _lost(status: Mapping[str, Any]) -> Table | None:
    lost = lost_by_cause(status)
    if not lost:
        return None
    table = _table("why tokens that hashes promise were not granted", "reason", "kind", "tokens", "of all")
    for (kind, reason), tokens in lost.most_common(CAUSES_SHOWN):
        table.add_row(reason, kind, f"{tokens:,}", f"{tokens / lost.total():.1%}")
    return table


def _tiers(status: Mapping[str, Any]) -> Table | None:
    """Host memory, disk and store of each holder that has them: how they are, and how full."""
    table = _table("tiers", "holder", "tier", "state", "held", "of")
    for holder in status["holders"]:
        for tier, state, held, of in _tiers_of(holder):
            table.add_row(holder["address"], tier, state, size(held), size(of))
    return table if table.row_count else None


def _tiers_of(holder: Mapping[str, Any]) -> Iterator[tuple[str, Text, int, int]]:
    pools = (holder.get("host_memory") or {}).get("pools", ())
    if pools:
        held = sum((pool["slots"] - pool["free"]) * pool["slot_bytes"] for pool in pools)
        yield "host memory", Text("ok", style="green"), held, sum(pool["slots"] * pool["slot_bytes"] for pool in pools)
    disk = holder.get("disk")
    for name, tier in (("disk", disk), ("store", (disk or {}).get("store"))):
        if tier:
            yield name, _health(tier), tier["used_bytes"], tier["bytes_max"]


def _health(tier: Mapping[str, Any]) -> Text:
    if tier["state"] in _STYLES:
        return Text(tier["state"], style=_STYLES[tier["state"]])
    return Text(": ".join(word for word in (tier["state"], tier["detail"]) if word), style="red")


def _work(status: Mapping[str, Any]) -> Table:
    table = _table("work", "holder", "leases", "pinned", "quarantined", "attempts", "restores", "in line", "moved")
    for holder in status["holders"]:
        if "leases" not in holder:
            continue
        disk = holder.get("disk") or {}
        table.add_row(
            holder["address"],
            str(holder["leases"]),
            str(holder["pinned_slots"]),
            str(holder["quarantined_slots"]),
            str(holder["attempts"]),
            str(disk.get("restoring", "-")),
            str(disk.get("restores_in_line", "-")),
            size(sum(holder["moved_bytes"].values())),
        )
    return table


def _funnel(status: Mapping[str, Any]) -> Table:
    tokens = funnel(status)
    table = _table("tokens", *STAGES, "effective_hit_rate", "reused_hit_rate")
    shown = ("-" if rate is None else f"{rate:.1%}" for rate in rates(tokens).values())
    table.add_row(*(f"{tokens[stage]:,}" for stage in STAGES), *shown)
    return table


def leases_table(leases: list[dict[str, Any]]) -> Table:
    """Live leases, the one that ends first on top."""
    table = _table("leases", "lease", "holder", "tokens", "tenant", "age", "left", "slots", "ranks", "graph")
    for lease in sorted(leases, key=lambda one: one["left_s"]):
        table.add_row(
            str(lease["lease"]),
            lease["holder"],
            f"{lease['tokens']:,}",
            lease["tenant"] or "-",
            f"{lease['age_s']:.1f} s",
            f"{lease['left_s']:.1f} s",
            str(lease["slots"]),
            str(lease["ranks"]),
            "yes" if lease["graph"] else "-",
        )
    return table


def size(nbytes: int) -> str:
    """Bytes in a unit that reads well."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
