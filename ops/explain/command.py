"""``kvfabric explain``: of a prompt in a running fabric, or of a step in a scenario file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import Address, FabricName


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(explain)


def explain(
    what: Annotated[
        str,
        typer.Argument(
            help="Token ids (1,2,3), a file of them (JSON list, or ids apart by white space), or a scenario file (YAML).",
            show_default=False,
        ),
    ],
    *,
    step: Annotated[
        int | None, typer.Option(help="Of a scenario: the acquire or probe to explain (default: the last).")
    ] = None,
    fabric: FabricName = "default",
    address: Address = "",
    tenant: Annotated[str, typer.Option(help="Whose namespace.")] = "",
    by_range: Annotated[
        bool, typer.Option("--by-range", help="List by token range: form, tier, holder, version, revision.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print, for each group, up to where it could serve, what cut the hit, and what would lengthen it."""
    from ..operate.attached import on_cluster
    from . import report
    from .sources import of_scenario, of_tokens, tokens_from

    path = Path(what)
    if path.suffix in {".yaml", ".yml"}:
        found = of_scenario(path, step)
    else:
        tokens = tokens_from(what)
        on_cluster(address)
        found = of_tokens(fabric, tokens, tenant)
    if json:
        typer.echo(report.plain(found, by_range=by_range))
    else:
        report.print_explanation(found, by_range=by_range)
