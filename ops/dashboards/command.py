"""``kvfabric dashboards install DIR``: what Grafana and Prometheus read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import Json, show


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    dashboards = typer.Typer(help="Files for Grafana and Prometheus.", no_args_is_help=True)
    dashboards.callback()(_dashboards)
    dashboards.command()(install)
    app.add_typer(dashboards, name="dashboards")


def _dashboards() -> None:
    """Files for Grafana and Prometheus."""


def install(
    folder: Annotated[Path, typer.Argument(help="Where to write them; made if it is not there.")],
    *,
    json: Json = False,
) -> None:
    """Write the dashboard, Grafana's provisioning for it, and rules for Prometheus."""
    import json as codec

    import yaml

    from ...fabric.kinds import FabricError
    from .board import dashboard
    from .rules import rules

    boards = folder.resolve() / "dashboards"
    provider = {
        "name": "kvfabric",
        "type": "file",
        "disableDeletion": False,
        "allowUiUpdates": True,
        "options": {"path": str(boards)},
    }
    files = {
        boards / "kvfabric.json": codec.dumps(dashboard(), indent=1) + "\n",
        folder / "provisioning" / "dashboards" / "kvfabric.yaml": yaml.safe_dump(
            {"apiVersion": 1, "providers": [provider]}, sort_keys=False
        ),
        folder / "rules" / "kvfabric.yaml": yaml.safe_dump(rules(), sort_keys=False, width=200),
    }
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FabricError(f"{error.filename}: cannot be written: {error.strerror}") from None
    written = [str(path) for path in files]
    show({"written": written}, "\n".join(written), json=json)
