"""What an operator sees at a glance of tiers and lost tokens."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console

from kvfabric.ops.operate.views import tables

KIND = "compressed_history"


def holder(name: str, **more: Any) -> dict[str, Any]:
    """A holder's status as it tells it, without processes and pools."""
    return {"address": name, "counters": {}, "host_memory": None, "disk": None, "lost_tokens": [], **more}


def shown(*holders: dict[str, Any]) -> str:
    status = {
        "fabric": "f",
        "model": "m",
        "weights": "",
        "bypassed": False,
        "holders": holders,
        "directory": (),
        "processes": {},
    }
    console = Console(width=160, record=True)
    with console.capture() as captured:
        console.print(tables(status))
    return captured.get()


def test_tiers_tell_their_state_why_and_how_full_they_are() -> None:
    host = {"pools": [{"slots": 4, "free": 1, "slot_bytes": 1 << 20}, {"slots": 2, "free": 2, "slot_bytes": 1 << 20}]}
    store = {"state": "ok", "detail": "", "used_bytes": 1 << 20, "bytes_max": 1 << 30}
    full = {"state": "full", "detail": "no space left", "used_bytes": 5 << 20, "bytes_max": 8 << 20, "store": store}
    seen = shown(holder("h0", host_memory=host, disk=full), holder("h1", disk=store))
    for row in (
        r"h0 +host memory +ok +3\.0 MiB +6\.0 MiB",
        r"h0 +disk +full: no space left +5\.0 MiB +8\.0 MiB",
        r"h0 +store +ok +1\.0 MiB +1\.0 GiB",
        r"h1 +disk +ok +1\.0 MiB +1\.0 GiB",
    ):
        assert re.search(row, seen), row


def test_causes_are_added_up_over_holders_the_largest_first() -> None:
    seen = shown(
        holder("h0", lost_tokens=[{"kind": KIND, "reason": "evicted", "tokens": 30, "requests": 1}]),
        holder(
            "h1",
            lost_tokens=[
                {"kind": KIND, "reason": "evicted", "tokens": 30, "requests": 2},
                {"kind": "sliding_window", "reason": "window_incomplete", "tokens": 180, "requests": 1},
            ],
        ),
    )
    first, second = (seen.index(reason) for reason in ("window_incomplete", "evicted"))
    assert first < second
    assert re.search(rf"evicted +{KIND} +60 +25\.0%", seen)


def test_without_tiers_and_losses_there_are_no_tables_of_them() -> None:
    seen = shown(holder("h0"))
    assert "tokens" in seen
    assert "tiers" not in seen
    assert "why tokens" not in seen
