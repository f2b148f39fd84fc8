"""``kvfabric simulate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...fabric.kinds import SpecError

if TYPE_CHECKING:
    from .mutants import Mutant

CLEAN, BROKEN = 0, 1


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(simulate)


def simulate(
    seed: Annotated[int, typer.Option(help="What decides everything that happens; equal seeds run alike.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Delivered messages, timers, faults and calls.")] = 10_000,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Look for every known mistake in the protocol, and for none in itself.")
    ] = False,
    mutant: Annotated[str, typer.Option(help="Look for one mistake, by its name.", metavar="NAME")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object (with --mutants, one a line).")] = False,
) -> None:
    """Run the protocol on a simulated cluster.

    Exit status: 0 if the run was clean, or every mistake was found and the protocol as it is was clean; else 1.
    """
    if mutants or mutant:
        raise typer.Exit(_hunt(mutant, json=json))
    from . import report
    from .run import simulate as run

    result = run(seed, steps)
    typer.echo(report.as_json(result) if json else report.as_text(result))
    raise typer.Exit(CLEAN if result.clean else BROKEN)


def _hunt(name: str, *, json: bool) -> int:
    from . import report
    from .mutants import MUTANTS, hunt, hunt_none

    status = CLEAN
    for mistake in [_named(name)] if name else MUTANTS:
        found = hunt(mistake)
        status = status if found.found else BROKEN
        typer.echo(report.hunt_as_json(found) if json else report.hunt_as_text(found))
    if not name:
        none = hunt_none()
        status = BROKEN if none.found else status
        typer.echo(report.hunt_as_json(none) if json else report.hunt_as_text(none))
    return status


def _named(name: str) -> Mutant:
    from .mutants import BY_NAME

    if name not in BY_NAME:
        raise SpecError(f"--mutant: there is no {name!r}; there are {', '.join(BY_NAME)}")
    return BY_NAME[name]
