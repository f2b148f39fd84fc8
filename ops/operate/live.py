"""``kvfabric top``: the tables of ``status``, live, with what happened since the last look."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from .views import funnel, size, tables

if TYPE_CHECKING:
    from ...actors.fabric import Fabric


def watch(running: Fabric, *, every_s: float, times: int | None) -> None:
    """Look every ``every_s`` seconds until Ctrl-C, or so many times."""
    before: dict[str, Any] | None = None
    looked = 0
    with Live(auto_refresh=False, screen=False) as live:
        while times is None or looked < times:
            began = time.monotonic()
            found = running.status()
            live.update(Group(tables(found), since(before, found, every_s)), refresh=True)
            before = found
            looked += 1
            if times is None or looked < times:
                time.sleep(max(0.0, every_s - (time.monotonic() - began)))


def since(before: dict[str, Any] | None, found: dict[str, Any], every_s: float) -> RenderableType:
    """Rates between two looks: requests, tokens asked and granted, bytes between holders and from disk."""
    if before is None:
        return Text("")
    tokens, old = funnel(found), funnel(before)
    parts = [
        f"{(_sum(found, 'acquires_total') - _sum(before, 'acquires_total')) / every_s:,.0f} acquires/s",
        f"{(tokens['asked'] - old['asked']) / every_s:,.0f} tokens asked/s",
        f"{(tokens['granted'] - old['granted']) / every_s:,.0f} granted/s",
        f"{size(int((_moved(found) - _moved(before)) / every_s))}/s between holders",
        f"{size(int((_sum(found, 'restored_bytes') - _sum(before, 'restored_bytes')) / every_s))}/s restored",
    ]
    return Text("   ".join(parts), style="cyan")


def _sum(found: dict[str, Any], counter: str) -> int:
    return sum(int(holder.get("counters", {}).get(counter, 0)) for holder in found["holders"])


def _moved(found: dict[str, Any]) -> int:
    return sum(sum(holder.get("moved_bytes", {}).values()) for holder in found["holders"])
