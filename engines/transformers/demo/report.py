"""The demo's outcome: as one JSON object, and as tables for a terminal of 100 columns."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .records import FaultRun, Outcome, Run

WIDTH = 100


def plain(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain data. ``ttft_s`` is that of the longest resume; bytes are summed over the runs."""
    longest = max(outcome.runs, key=lambda run: run.resume_tokens)
    return {
        "model": outcome.model,
        "nodes": outcome.nodes,
        "runs": [
            {
                "prefix_tokens": run.prefix_tokens,
                "resume_tokens": run.resume_tokens,
                "computed_tokens": run.computed_tokens,
                "logits_equal": run.logits_equal,
            }
            for run in outcome.runs
        ],
        "resume_tokens": longest.resume_tokens,
        "logits_equal": outcome.logits_equal,
        "ttft_s": {"recompute": longest.recompute_s, "reuse": longest.reuse_s},
        "bytes_moved": dict(sum((Counter(run.moved_bytes) for run in outcome.runs), Counter())),
        "transport": outcome.transport,
        "faults": [
            {
                "kind": fault.kind,
                "fault": fault.fault,
                "hash_tokens": fault.hash_tokens,
                "granted_tokens": fault.granted_tokens,
                "status": fault.status,
                "cause": fault.cause,
                "logits_equal": fault.logits_equal,
                "tokens_wrong_if_reused_blindly": fault.tokens_wrong,
            }
            for fault in outcome.faults
        ],
    }


def show(outcome: Outcome, console: Console) -> None:
    """Print the tables."""
    console.print()
    console.print(_resumes(outcome))
    console.print()
    console.print(_moved(outcome))
    console.print()
    console.print(_faults(outcome))
    console.print()
    console.print(_verdict(outcome))


def _resumes(outcome: Outcome) -> Table:
    table = _table(f"{outcome.model} resumes on another node and decodes {outcome.decode_tokens} tokens")
    for column in ("tokens\nshared", "tokens\nreused", "tokens\ncomputed", "first token,\nno reuse"):
        table.add_column(column, justify="right")
    table.add_column("first token,\nreuse", justify="right")
    table.add_column("link")
    table.add_column("lease\nfence", justify="right")
    table.add_column("lease\ndeadline", justify="right")
    table.add_column("logits")
    for run in outcome.runs:
        table.add_row(
            f"{run.prefix_tokens}",
            f"{run.resume_tokens}",
            f"{run.computed_tokens}",
            _ms(run.recompute_s),
            _ms(run.reuse_s),
            outcome.transport,
            f"{run.fence}",
            f"in {run.lease_left_s:.0f} s",
            _equal(run.logits_equal),
        )
    return table


def _moved(outcome: Outcome) -> Table:
    table = _table("Bytes moved from A to B, by group")
    table.add_column("group")
    table.add_column("kind")
    for run in outcome.runs:
        table.add_column(f"for {run.prefix_tokens} tokens", justify="right")
    for group, kind in outcome.kinds.items():
        table.add_row(group, _kind(kind), *(f"{run.moved_bytes.get(group, 0):,}" for run in outcome.runs))
    table.add_section()
    table.add_row("all", "", *(f"{_total(run):,}" for run in outcome.runs))
    return table


def _faults(outcome: Outcome) -> Table:
    table = _table("One thing broken at a time, under the same tokens")
    table.add_column("what is wrong", ratio=1)
    table.add_column("tokens\nalone\npromise", justify="right")
    table.add_column("fabric\ngrants", justify="right")
    table.add_column("because", ratio=1)
    table.add_column("output")
    table.add_column(f"wrong\nof {outcome.decode_tokens}\nblindly", justify="right")
    for fault in outcome.faults:
        table.add_row(
            escape(fault.words),
            f"{fault.hash_tokens}",
            f"{fault.granted_tokens}",
            f"{escape(fault.cause)} [dim]({fault.status})[/dim]",
            _right(fault),
            f"[bold red]{fault.tokens_wrong}[/bold red]" if fault.tokens_wrong else "0",
        )
        table.add_section()
    return table


def _verdict(outcome: Outcome) -> Text:
    if outcome.logits_equal:
        worst = max((fault.tokens_wrong for fault in outcome.faults), default=0)
        return Text(
            "Every resumed run equals the run without a cache bit for bit. A cache keyed by tokens alone would have"
            f" got up to {worst} of {outcome.decode_tokens} tokens wrong, without an error.",
            style="bold green",
        )
    return Text("Some logits differ from the run without a cache: this must not happen.", style="bold red")


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", header_style="cyan", box=HORIZONTALS)


def _total(run: Run) -> int:
    return sum(run.moved_bytes.values())


def _kind(kind: str) -> str:
    return kind.replace("_", " ")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _equal(equal: bool) -> str:
    return "[green]equal[/green]" if equal else "[bold red]DIFFER[/bold red]"


def _right(fault: FaultRun) -> str:
    return "[green]right[/green]" if fault.logits_equal else "[bold red]WRONG[/bold red]"
