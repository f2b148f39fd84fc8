"""An explanation as tables for people, or as one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...fabric.expected import Expected
from ...fabric.explanation import Explanation, Stretch


def plain(found: Explanation, *, by_range: bool) -> str:
    """One JSON object; the ranges only where they are asked for."""
    data = asdict(found)
    if not by_range:
        del data["stretches"]
    return json.dumps(data)


def print_explanation(found: Explanation, *, by_range: bool, console: Console | None = None) -> None:
    """What was found, group by group, and what to do about it."""
    console = console or Console()
    console.print(f"{found.status}: resume at {found.tokens} of {found.hash_tokens} tokens that the hashes promise")
    if found.cause is not None:
        c = found.cause
        also = f" (also: {', '.join(found.also)})" if found.also else ""
        console.print(f"cut by {c.group} ({c.kind}): {c.reason}, layer {c.layer}{also}")
    table = Table(box=None, pad_edge=False)
    table.add_column("group")
    table.add_column("kind")
    table.add_column("could serve up to", justify="right")
    for limit in found.limits:
        cut = found.cause is not None and limit.group in (found.cause.group, *found.also)
        table.add_row(Text(limit.group, style="red" if cut else ""), str(limit.kind), f"{limit.serves_tokens} tokens")
    console.print(table)
    if found.lengthen_groups:
        console.print(
            f"with {' and '.join(found.lengthen_groups)} usable there, the hit would reach {found.lengthen_to_tokens} tokens"
        )
    if found.replay_from is not None:
        console.print(f"windows and tails are replayed from {found.replay_from}")
    if found.plan:
        console.print(_plan(found.plan))
    if by_range:
        console.print(_ranges(found.stretches))


def _plan(weighed: tuple[Expected, ...]) -> Table:
    """Ways to resume with what each is expected to take; the first is taken."""
    table = Table(box=None, pad_edge=False, title="expected milliseconds", title_justify="left")
    for column in ("", "resume at", "replay from", "transfer", "restore", "replay", "prefill", "in all"):
        table.add_column(column, justify="right")
    for at, way in enumerate(weighed):
        seconds = (way.transfer_s, way.restore_s, way.replay_s, way.prefill_s, way.total_s)
        begins = "" if way.replay_from is None else str(way.replay_from)
        table.add_row("" if at else "taken", str(way.tokens), begins, *(f"{1000 * s:.2f}" for s in seconds))
    return table


def _ranges(stretches: tuple[Stretch, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("group", "shard", "tokens", "form", "tier", "holder", "version", "revision", "reason"):
        table.add_column(column, overflow="fold")
    for s in stretches:
        versions = "" if s.versions is None else "-".join(map(str, dict.fromkeys(s.versions)))
        table.add_row(
            s.group,
            str(s.shard),
            f"{s.from_token}..{s.to_token}",
            s.form,
            s.tier,
            f"{s.holder}#{s.incarnation}" if s.holder else "",
            versions,
            "" if s.revision is None else str(s.revision),
            s.reason or "",
        )
    return table
