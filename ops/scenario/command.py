"""``kvfabric scenario run`` and ``kvfabric scenario check``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import show

if TYPE_CHECKING:
    from .source import Problem

FILES = typer.Argument(help="Scenario files (YAML).", show_default=False)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    scenario = typer.Typer(help="Stories about cache state, written as data.", no_args_is_help=True)
    scenario.command()(run)
    scenario.command()(check)
    app.add_typer(scenario, name="scenario")


def run(
    files: Annotated[list[Path], FILES],
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Run on a real Ray cluster: real processes, bytes and links.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line a file.")] = False,
) -> None:
    """Run scenarios. Exit status: 0 all passed, 1 an expectation failed, 2 a file is not valid."""
    from . import report
    from .run import json_line, run_files

    outcome = run_files(files, cluster=cluster)
    if json:
        for result in outcome.results:
            typer.echo(json_line(result))
    else:
        report.print_results(outcome.results)
    _complain(outcome.problems)
    raise typer.Exit(outcome.status)


def check(
    files: Annotated[list[Path], FILES],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line a valid file.")] = False,
) -> None:
    """Validate scenarios without running them. Exit status: 0 all are valid, 2 one is not."""
    from .run import INVALID, PASSED, check_files

    stories, problems = check_files(files)
    for story in stories:
        steps = len(story.steps)
        show({"file": str(story.file), "valid": True, "steps": steps}, f"{story.file}: valid, {steps} steps", json=json)
    _complain(problems)
    raise typer.Exit(INVALID if problems else PASSED)


def _complain(problems: list[Problem]) -> None:
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
