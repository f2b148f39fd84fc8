"""``kvfabric drain`` and ``kvfabric purge``: take state off a node, or out of the fabric."""

from __future__ import annotations

import json as codec
from typing import Annotated, Any

import typer

from ..options import SECONDS_MAX, Address, FabricName, Json

PROVEN, LEFT = 0, 1


def drain(
    node: Annotated[str, typer.Argument(help="The node's Ray id, or a prefix of it.")],
    *,
    deadline_s: Annotated[
        float,
        typer.Option(
            "--deadline-s", min=0, max=SECONDS_MAX, help="Seconds until leases are cut and the rest is dropped."
        ),
    ] = 30.0,
    fabric: FabricName = "default",
    address: Address = "",
    json: Json = False,
) -> None:
    """Stop granting on a node and move what is worth most to others; tells what was moved and what was dropped."""
    from .attached import attached

    with attached(fabric, address) as running:
        summary = running.drain(node, deadline_s)
    _show(summary, json=json)


def purge(
    *,
    tenant: Annotated[str | None, typer.Option(help="All of a tenant; with --chain: whose namespace.")] = None,
    namespace: Annotated[str, typer.Option(help="All of a namespace, by its digest (64 hexadecimal digits).")] = "",
    chain: Annotated[
        str,
        typer.Option(help="What lies along a prompt: token ids (1,2,3) or a file of them; weights in force, no salt."),
    ] = "",
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Bar it from being served, in place of deleting.")
    ] = False,
    fabric: FabricName = "default",
    address: Address = "",
    json: Json = False,
) -> None:
    """Take state out of every tier of every holder, and prove that it is gone.

    Exit status: 0 proven, 1 something is left (held by a graph) or a holder did not answer.
    """
    from ...fabric.kinds import FabricError
    from ..explain.sources import tokens_from
    from .attached import attached

    if sum((bool(namespace), bool(chain), tenant is not None and not chain)) != 1:
        raise FabricError("purge: name one of --tenant, --namespace and --chain (which takes --tenant as well)")
    what: dict[str, Any] = {"tenant": tenant, "namespace": _digest(namespace), "quarantine": quarantine}
    tokens = tokens_from(chain) if chain else None
    with attached(fabric, address) as running:
        summary = running.purge(tokens, **what)
    _show(summary, json=json)
    raise typer.Exit(LEFT if summary["left"] or summary["unanswered"] else PROVEN)


def _digest(text: str) -> bytes:
    from ...fabric.kinds import FabricError

    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b"?"
    if text and len(digest) != 32:
        raise FabricError("--namespace: 64 hexadecimal digits are expected, as `kvfabric explain --json` prints them")
    return digest


def _show(summary: dict[str, Any], *, json: bool) -> None:
    if json:
        typer.echo(codec.dumps(summary))
        return
    for name, value in summary.items():
        typer.echo(f"{name}: {value if value != [] else '-'}")
