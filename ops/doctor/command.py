"""``kvfabric doctor``: what is wrong with a running fabric, each with a remedy."""

from __future__ import annotations

import json as codec
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from ..options import Address, FabricName, Json

if TYPE_CHECKING:
    from ...actors.fabric import Fabric
    from .checks import Finding

WELL, SICK = 0, 1


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(doctor)


def doctor(*, fabric: FabricName = "default", address: Address = "", json: Json = False) -> None:
    """Check books, invariants, clocks, links, memory, disk, Ray's settings and versions.

    Exit status: 0 nothing fails (warnings may be told), 1 something fails.
    """
    from ..operate.attached import attached
    from .checks import Level

    with attached(fabric, address) as running:
        found = examine(running)
    sick = any(finding.level is Level.FAIL for finding in found)
    if json:
        typer.echo(codec.dumps({"fabric": fabric, "healthy": not sick, "findings": [asdict(f) for f in found]}))
    else:
        for finding in found:
            typer.echo(_line(finding))
    raise typer.Exit(SICK if sick else WELL)


def examine(running: Fabric) -> list[Finding]:
    """The findings about a running fabric."""
    import time

    from ...actors.health import process_facts
    from .checks import diagnose

    asked_s = time.time()
    facts = {
        "status": running.status(),
        "health": running.health(),
        "here": process_facts(),
        "asked_s": asked_s,
    }
    return diagnose(facts)


def _line(finding: Finding) -> str:
    where = f" {finding.where}:" if finding.where else ""
    remedy = f"\n       remedy: {finding.remedy}" if finding.remedy else ""
    return f"{finding.level:<5} {finding.check}:{where} {finding.detail}{remedy}"
