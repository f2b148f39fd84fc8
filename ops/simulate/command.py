"""``kvfabric simulate``."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(simulate)


def simulate(
    seed: Annotated[int, typer.Option(help="What decides everything that happens; equal seeds run alike.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Delivered messages, timers, faults and calls.")] = 10_000,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the protocol on a simulated cluster. Exit status: 0 clean, 1 a law was broken."""
    from . import report
    from .run import simulate as run

    result = run(seed, steps)
    typer.echo(report.as_json(result) if json else report.as_text(result))
    raise typer.Exit(0 if result.clean else 1)
