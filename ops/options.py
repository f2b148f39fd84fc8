"""Options that mean the same in every command."""

from __future__ import annotations

import json as codec
from typing import Annotated, Any

import typer

FabricName = Annotated[
    str, typer.Option("--fabric", envvar="KVFABRIC_FABRIC", help="Name of the running fabric.", show_default=True)
]
Address = Annotated[
    str,
    typer.Option("--address", envvar="RAY_ADDRESS", help="The Ray cluster; default: the one of this machine."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def show(value: Any, line: str, *, json: bool) -> None:
    """One JSON object, or one line for people."""
    typer.echo(codec.dumps(value) if json else line)
