"""``kvfabric record``: what happened to a lease's chain, as a scenario file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import Address, FabricName, Json, show

AGREES, DIFFERS = 0, 1


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(record)


def record(
    what: Annotated[
        str, typer.Argument(help="A lease's number (`kvfabric leases`, the log), or a chain's digest (64 hex).")
    ],
    *,
    out: Annotated[Path, typer.Option(help="The scenario file to write.")] = Path("recorded.yaml"),
    fabric: FabricName = "default",
    address: Address = "",
    json: Json = False,
) -> None:
    """Write what holders remember of a chain as a scenario that `kvfabric scenario run` replays.

    Holders remember a bounded number of decisions; the file bears no tokens. Exit status: 0 a replay on the pure core gives
    the answers that were given, 1 it does not (what happened before is forgotten, or room, faults or modes played a part).
    """
    from ...fabric.kinds import FabricError
    from ..operate.attached import attached
    from ..scenario.run import run_files
    from .story import dumped, scenario

    with attached(fabric, address) as running:
        told = running.history(what)
        story = scenario(running.spec.model, told, f"recorded from fabric {fabric}: {what[:16]}")
    try:
        out.write_text(dumped(story), encoding="utf-8")
    except OSError as error:
        raise FabricError(f"{out}: cannot be written: {error.strerror}") from None
    outcome = run_files([out])
    agrees = outcome.status == 0
    steps = len(story["steps"])
    show(
        {"file": str(out), "steps": steps, "replay_agrees": agrees, "problems": [str(p) for p in outcome.problems]},
        f"{out}: {steps} steps; a replay {'gives the same answers' if agrees else 'differs: kvfabric scenario run ' + str(out)}",
        json=json,
    )
    raise typer.Exit(AGREES if agrees else DIFFERS)
