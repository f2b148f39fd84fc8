"""Options that mean the same in every command."""

from __future__ import annotations

import json as codec
from pathlib import Path
from typing import Annotated, Any

import typer

from ..fabric.kinds import FabricError

GIB_MAX = float(1 << 20)
SECONDS_MAX = 1e9
"""What a number on the command line may be at most: more is a slip, and ``inf`` is none."""

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


def writable(path: Path) -> None:
    """Tell before long work whether its result can be written there. Raises FabricError; leaves a file, maybe empty."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise FabricError(f"{path}: cannot be written: {error.strerror}") from None
