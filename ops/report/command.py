"""``kvfabric report``: one self-contained HTML page of a replay's series file, or of a running fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import Address, FabricName, Json, show


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(report)


def report(
    series: Annotated[
        Path | None, typer.Argument(help="A series file of `kvfabric replay`; without one, a running fabric is asked.")
    ] = None,
    *,
    fabric: FabricName = "default",
    address: Address = "",
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("kvfabric-report.html"),
    save: Annotated[Path | None, typer.Option(help="Write the running fabric's series file as well.")] = None,
    json: Json = False,
) -> None:
    """Write one HTML page: hit over time, why tokens were lost, what is held where, recovery, lease life."""
    from ...fabric.kinds import FabricError
    from ..operate.attached import on_cluster
    from .page import page
    from .series import Series, of_fabric

    if series is None:
        on_cluster(address)
    found = Series.load(series) if series is not None else of_fabric(fabric)
    try:
        if save is not None:
            found.save(save)
        out.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise FabricError(f"{error.filename}: cannot be written: {error.strerror}") from None
    written = [str(path) for path in (out, save) if path is not None]
    show({"written": written}, str(out), json=json)
