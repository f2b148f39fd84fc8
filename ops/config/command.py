"""``kvfabric config show``: every setting of a fabric, and where it came from."""

from __future__ import annotations

import json as codec
from typing import Annotated

import typer

from ..options import Json


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    config = typer.Typer(help="A fabric's settings, from all their sources.", no_args_is_help=True)
    config.callback()(_config)
    config.command("show")(show)
    app.add_typer(config, name="config")


def _config() -> None:
    """A fabric's settings: defaults < file < environment (KVFABRIC__FIELD) < arguments (--set)."""


def show(
    spec: Annotated[str, typer.Argument(help="The fabric's spec (YAML).")],
    *,
    origin: Annotated[bool, typer.Option("--origin", help="Tell where each value came from.")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help="FIELD=VALUE, over everything else.")] = None,
    json: Json = False,
) -> None:
    """Print what a fabric would be launched with. Exit status 2 for a field or value that is none."""
    from .settings import resolved

    rows = list(resolved(spec, arguments=set_ or ()).rows())
    if json:
        plain = {field: {"value": value, "origin": where} if origin else value for field, value, where in rows}
        typer.echo(codec.dumps(plain))
        return
    for field, value, where in rows:
        typer.echo(f"{field} = {codec.dumps(value)}" + (f"  # {where}" if origin else ""))
