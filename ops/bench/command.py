"""``kvfabric bench``: figures with their targets, as a table or as one JSON object.

Benches of packages that ``ops`` may not import are found by entry point, in the group ``kvfabric.benches``: functions
without arguments that return figures, named as the bench is.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

HELD, MISSED = 0, 1
BENCHES = "kvfabric.benches"

JSON = typer.Option("--json", help="Print one JSON object.")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    bench = typer.Typer(help="Measure against the targets.", no_args_is_help=True)
    bench.callback()(_bench)
    bench.command()(core)
    bench.command()(lease)
    bench.command()(transfer)
    bench.command()(tiers)
    bench.command()(directory)
    bench.command()(policies)
    bench.command()(operations)
    for entry in sorted(metadata.entry_points(group=BENCHES), key=lambda e: e.name):
        bench.command(entry.name, help=f"By {entry.value.partition(':')[0]}; see there.")(_measuring(entry))
    app.add_typer(bench, name="bench")


def _bench() -> None:
    """Measure against the targets. Exit status: 0 all hold, 1 one does not or is missing."""


def _measuring(entry: metadata.EntryPoint) -> Callable[[bool], None]:
    """The command of a bench that another package has."""

    def measure(json: Annotated[bool, JSON] = False) -> None:
        from .core import report

        raise typer.Exit(show(report(entry.name, entry.load()(), ()), json=json))

    return measure


def core(json: Annotated[bool, JSON] = False) -> None:
    """The pure core: rules, digests, simulation."""
    from .core import run

    raise typer.Exit(show(run(), json=json))


def directory(json: Annotated[bool, JSON] = False) -> None:
    """The directory: memory, look-ups, ingest, shards, rebuild, socket against Ray calls."""
    from .directory import run

    raise typer.Exit(show(run(), json=json))


def lease(json: Annotated[bool, JSON] = False) -> None:
    """Leases on state at hand: acquire and release against a Ray call, checks, sizes."""
    from .lease import run

    raise typer.Exit(show(run(), json=json))


def transfer(json: Annotated[bool, JSON] = False) -> None:
    """Links: shared memory and NIXL against a plain copy and a bare NIXL READ of the same bytes."""
    from .core import report
    from .transfer import EXPECTED, figures

    raise typer.Exit(show(report("transfer", figures(), EXPECTED), json=json))


def tiers(
    folder: Annotated[
        Path | None, typer.Option(help="On the disk to measure; default: the temporary folder's.")
    ] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """The disk tier: writing, restoring, and a burst of restores beside live requests."""
    from .tiers import run

    raise typer.Exit(show(run(folder), json=json))


def operations(json: Annotated[bool, JSON] = False) -> None:
    """Running it: a node that joins, one that is drained against one that is killed."""
    from .operations import run

    raise typer.Exit(show(run(), json=json))


def policies(
    more: Annotated[list[Path] | None, typer.Argument(metavar="[TRACE]...", help="More traces.")] = None,
    *,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Traces in Mooncake's format; without one, a generated trace.")
    ] = None,
    preset: Annotated[list[str] | None, typer.Option(help="Only these presets.")] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Eviction policies on traces: against each other, and against a cache that knows the future."""
    from .policies import PRESETS, run

    raise typer.Exit(show(run([*(trace or ()), *(more or ())], preset or PRESETS), json=json))


def show(result: dict[str, Any], *, json: bool) -> int:
    """Print a bench's result; the exit status it deserves."""
    if json:
        typer.echo(json_format.dumps(result))
    else:
        for figure in result["figures"]:
            verdict = "holds" if figure["holds"] else "MISSED"
            typer.echo(
                f"{figure['name']:<52} {figure['value']!s:>10} {figure['unit']:<10} target {figure['target']}: {verdict}"
            )
    return HELD if result["figures"] and all(figure["holds"] for figure in result["figures"]) else MISSED
