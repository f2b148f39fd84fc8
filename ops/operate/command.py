"""``kvfabric up``, ``down``, ``status``, ``top``, ``leases``, ``bypass``, ``weights``."""

from __future__ import annotations

import json as codec
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from ..options import Address, FabricName, Json, show
from .taking import drain, purge

TOP_EVERY_S = 1.0
WATCH_EVERY_S = 2.0


class Switch(StrEnum):
    """On or off."""

    ON = "on"
    OFF = "off"


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (up, down, status, top, leases, bypass, drain, purge):
        app.command()(command)
    weights = typer.Typer(help="Which weights are in force.", no_args_is_help=True)
    weights.callback()(_weights)
    weights.command()(advance)
    app.add_typer(weights, name="weights")


def up(
    spec: Annotated[str, typer.Argument(help="The fabric's spec (YAML); see `kvfabric config show`.")],
    *,
    fabric: FabricName = "default",
    address: Address = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="FIELD=VALUE in place of the file's, with dots: disk.path=/nvme.")
    ] = None,
    json: Json = False,
) -> None:
    """Start a fabric on a running Ray cluster, or attach to the one of that name. It outlives this command."""
    from ...actors.fabric import launch
    from ..config.settings import resolved
    from .attached import on_cluster

    wanted = resolved(spec, arguments=set_ or ()).spec
    on_cluster(address)
    running = launch(wanted, name=fabric)
    found = running.status()
    holders = len(found["holders"])
    show(found, f"fabric {fabric} is up: {holders} holders, {len(found['directory'])} directory shards", json=json)


def down(*, fabric: FabricName = "default", address: Address = "", json: Json = False) -> None:
    """End a fabric's processes. What it held in memory is gone; what it wrote to disk stays."""
    from .attached import attached

    with attached(fabric, address) as running:
        running.shutdown()
    show({"fabric": fabric, "down": True}, f"fabric {fabric} is down", json=json)


def status(
    *,
    fabric: FabricName = "default",
    address: Address = "",
    watch: Annotated[bool, typer.Option("--watch", help="Again every 2 seconds, until Ctrl-C.")] = False,
    json: Json = False,
) -> None:
    """Every process, pool, lease and link. With --watch and --json: one JSON object a line."""
    import time

    from .attached import attached
    from .views import funnel, rates

    with attached(fabric, address) as running:
        while True:
            found = running.status()
            tokens = funnel(found)
            if json:
                typer.echo(codec.dumps(found | {"tokens": tokens, **rates(tokens)}))
            else:
                _print(found)
            if not watch:
                return
            time.sleep(WATCH_EVERY_S)


def top(
    *,
    fabric: FabricName = "default",
    address: Address = "",
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1, max=3600)] = TOP_EVERY_S,
    times: Annotated[int | None, typer.Option(help="End after so many looks; default: Ctrl-C.", min=1)] = None,
    json: Json = False,
) -> None:
    """Watch a fabric live: nodes, pools by kind, leases, restores, and how far acquires get.

    With --json: one JSON object a line and look, with what happened a second since the one before.
    """
    from .attached import attached
    from .live import tell, watch

    with attached(fabric, address) as running:
        (tell if json else watch)(running, every_s=every, times=times)


def leases(*, fabric: FabricName = "default", address: Address = "", json: Json = False) -> None:
    """Every live lease: whose, how long, over how much."""
    from rich.console import Console

    from .attached import attached
    from .views import leases_table

    with attached(fabric, address) as running:
        found = running.leases()
    if json:
        typer.echo(codec.dumps({"leases": found}))
    else:
        Console().print(leases_table(found) if found else "no lease is live")


def bypass(
    switch: Annotated[Switch, typer.Argument(help="on or off.")],
    *,
    fabric: FabricName = "default",
    model: Annotated[str, typer.Option(help="Of every fabric of this model on the cluster, in place of one.")] = "",
    group: Annotated[str, typer.Option(help="The group that is suspected: causes name it.")] = "",
    address: Address = "",
    json: Json = False,
) -> None:
    """Answer recompute to every acquire, and let no lease be renewed: the first move on suspicion."""
    on = switch is Switch.ON
    done = _on_each(fabric, model, address, lambda running: running.bypass(on, group=group))
    words = "answer recompute to every acquire" if on else "grant again"
    show({"fabrics": done, "bypassed": on, "group": group}, f"{', '.join(done)}: {words}", json=json)


def _on_each(fabric: str, model: str, address: str, act: Callable[[Any], None]) -> list[str]:
    """Do it to one fabric, or to every fabric of a model; the names. Raises FabricError where there is none."""
    from ...actors.fabric import attach, fabrics
    from ...fabric.kinds import FabricError
    from .attached import attached, on_cluster

    if not model:
        with attached(fabric, address) as running:
            act(running)
        return [fabric]
    on_cluster(address)
    done = []
    for name in fabrics():
        running = attach(name)
        if running.spec.model.name == model:
            act(running)
            done.append(name)
    if not done:
        raise FabricError(f"--model {model}: no fabric of this model runs; `kvfabric status` names a fabric's model")
    return done


def _weights() -> None:
    """Which weights are in force."""


def advance(
    revision: Annotated[str, typer.Argument(help="The revision of the weights that readers load from here on.")],
    *,
    fabric: FabricName = "default",
    address: Address = "",
    json: Json = False,
) -> None:
    """Put a weights revision in force: state and leases of older ones are refused once this returns."""
    from .attached import attached

    with attached(fabric, address) as running:
        running.update_weights(revision)
    show({"fabric": fabric, "weights": revision}, f"fabric {fabric} is on weights {revision}", json=json)


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console

    from .views import tables

    Console().print(tables(found))
