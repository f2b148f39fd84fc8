"""``kvfabric top``: the tables of ``status``, live, with what happened since the last look."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from .views import funnel, pools_by_kind, size, tables

if TYPE_CHECKING:
    from ...actors.fabric import Fabric


def watch(running: Fabric, *, every_s: float, times: int | None) -> None:
    """Look every ``every_s`` seconds until Ctrl-C, or so many times."""
    with Live(auto_refresh=False, screen=False) as live:
        for found, rates in looks(running, every_s, times):
            live.update(tables(found, since(rates)), refresh=True)


def tell(running: Fabric, *, every_s: float, times: int | None) -> None:
    """The same as JSON, an object a line: nodes, pools by kind, live leases, tokens by stage, rates."""
    for found, rates in looks(running, every_s, times):
        plain = {
            "fabric": found["fabric"],
            "holders": [{k: h.get(k) for k in ("address", "node", "grants", "leases")} for h in found["holders"]],
            "pools": {kind: dict(counts) for kind, counts in pools_by_kind(found).items()},
            "tokens": funnel(found),
            "rates": rates,
        }
        sys.stdout.write(json.dumps(plain) + "\n")
        sys.stdout.flush()


def looks(running: Fabric, every_s: float, times: int | None) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """What is found, and what happened a second since the look before: nothing at the first."""
    before: dict[str, Any] | None = None
    looked, rates, before_s = 0, dict[str, float](), 0.0
    while times is None or looked < times:
        began_s = time.monotonic()
        found = running.status()
        if before is not None:
            rates = {what: n / (began_s - before_s) for what, n in _grown(before, found).items()}
        yield found, rates
        before, before_s = found, began_s
        looked += 1
        if times is None or looked < times:
            time.sleep(max(0.0, every_s - (time.monotonic() - began_s)))


def _grown(before: dict[str, Any], found: dict[str, Any]) -> dict[str, int]:
    """What happened between two looks: acquires, tokens asked and granted, bytes between holders and from disk."""
    tokens, old = funnel(found), funnel(before)
    return {
        "acquires_per_s": _sum(found, "acquires_total") - _sum(before, "acquires_total"),
        "asked_tokens_per_s": tokens["asked"] - old["asked"],
        "granted_tokens_per_s": tokens["granted"] - old["granted"],
        "moved_bytes_per_s": _moved(found) - _moved(before),
        "restored_bytes_per_s": _sum(found, "restored_bytes") - _sum(before, "restored_bytes"),
    }


def since(rates: dict[str, float]) -> RenderableType:
    """The rates in one line; nothing at the first look."""
    if not rates:
        return Text("")
    parts = [
        f"{rates['acquires_per_s']:,.0f} acquires/s",
        f"{rates['asked_tokens_per_s']:,.0f} tokens asked/s",
        f"{rates['granted_tokens_per_s']:,.0f} granted/s",
        f"{size(int(rates['moved_bytes_per_s']))}/s moved",
        f"{size(int(rates['restored_bytes_per_s']))}/s restored",
    ]
    return Text("  ".join(parts), style="cyan")


def _sum(found: dict[str, Any], counter: str) -> int:
    return sum(int(holder.get("counters", {}).get(counter, 0)) for holder in found["holders"])


def _moved(found: dict[str, Any]) -> int:
    return sum(sum(holder.get("moved_bytes", {}).values()) for holder in found["holders"])
