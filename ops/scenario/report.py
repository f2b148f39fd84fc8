"""Results as a table for people."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .runner import StoryResult


def print_results(results: list[StoryResult], console: Console | None = None) -> None:
    """One line a file, then every failed step with what was expected and what came."""
    console = console or Console()
    if not results:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("file", overflow="fold")
    table.add_column("scenario", overflow="fold")
    table.add_column("steps", justify="right")
    for result in results:
        done = sum(step.passed for step in result.steps)
        word = Text("passed", style="green") if result.passed else Text("failed", style="red")
        table.add_row(word, Text(result.file), Text(result.scenario), f"{done}/{len(result.steps)}")
    console.print(table)
    for result in results:
        if not result.passed:
            _print_failures(result, console)


def _print_failures(result: StoryResult, console: Console) -> None:
    table = Table(title=Text(result.file), title_justify="left", show_lines=True)
    for column in ("line", "step", "verb", "expected", "got"):
        table.add_column(column, justify="right" if column in {"line", "step"} else "left", overflow="fold")
    for step in result.steps:
        if not step.passed:
            cells = (str(step.line), str(step.step), step.verb, _short(step.expected), _short(step.got))
            table.add_row(*map(Text, cells))
    console.print(table)


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
