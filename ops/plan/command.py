"""``kvfabric plan``: bytes by kind, bandwidth and nodes for a model and a workload."""

from __future__ import annotations

import json as codec
from typing import Annotated, Any

import typer

from ..options import GIB_MAX, SECONDS_MAX, Json


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(plan)


def plan(
    *,
    preset: Annotated[str, typer.Option(help="A name from `kvfabric spec presets`, or a model's spec file (YAML).")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 8192,
    qps: Annotated[float, typer.Option(min=0, max=1e9, help="Requests a second.")] = 1.0,
    output_tokens: Annotated[int, typer.Option(min=0, help="Tokens computed behind the prompt, stored too.")] = 0,
    hit_share: Annotated[float, typer.Option(min=0, max=1, help="Part of a prompt that is there already.")] = 0.5,
    routed_share: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the requests that is sent to the node where that is.")
    ] = 0.0,
    restore_share: Annotated[
        float, typer.Option(min=0, max=1, help="Part of what a resume needs that lies on a tier.")
    ] = 0.0,
    reuse_s: Annotated[
        float, typer.Option(min=0, max=SECONDS_MAX, help="For how long state shall stay in memory.")
    ] = 600.0,
    lease_s: Annotated[float, typer.Option(min=0, max=SECONDS_MAX, help="How long a request holds its lease.")] = 10.0,
    checkpoint: Annotated[str, typer.Option(help="all, every:N, ends, branches.")] = "all",
    memory_gib: Annotated[
        float, typer.Option(min=0.001, max=GIB_MAX, help="Memory of one node for the fabric.")
    ] = 64.0,
    transfer_gib_s: Annotated[
        float | None, typer.Option(min=0.001, max=GIB_MAX, help="What one node receives a second; default: no limit.")
    ] = None,
    restore_gib_s: Annotated[
        float | None,
        typer.Option(min=0.001, max=GIB_MAX, help="What one node's disk restores a second; default: no limit."),
    ] = None,
    json: Json = False,
) -> None:
    """Print what a workload takes: bytes by kind, the working set, transfer and restore bandwidth, nodes."""
    from ...fabric.specs import known_model
    from ...policies.checkpoint import checkpoint_policy
    from .capacity import GIB, Node, Workload
    from .capacity import plan as planned

    workload = Workload(tokens, qps, output_tokens, hit_share, routed_share, restore_share, reuse_s, lease_s)
    transfer, restore = (None if rate is None else rate * GIB for rate in (transfer_gib_s, restore_gib_s))
    node = Node(int(memory_gib * GIB), transfer, restore)
    found = planned(known_model(preset), workload, node, checkpoint_policy(checkpoint)).plain()
    if json:
        typer.echo(codec.dumps(found))
    else:
        _print(found, qps, reuse_s)


def _print(found: dict[str, Any], qps: float, reuse_s: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..operate.views import size as size_of

    def size(count: float) -> str:
        return size_of(int(count))

    columns = ("resume_bytes", "stored_bytes", "new_bytes")
    table = Table(box=None, pad_edge=False)
    table.add_column("a request")
    for title in ("resumes from", "leaves in all", "of it new"):
        table.add_column(title, justify="right")
    for kind in found["kinds"]["stored_bytes"]:
        table.add_row(kind, *(size(found["kinds"][column][kind]) for column in columns))
    table.add_row("in all", *(size(found[column]) for column in columns), style="bold")
    by = ", ".join(f"{name} {count}" for name, count in found["nodes_by"].items())
    rates = ((f"{name}_bytes_per_s", words) for name, words in (("stored", "stored"), ("transfer", "between nodes")))
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{found['model']}: {qps:g} requests a second of {found['tokens']:,} tokens,"
        f" each resumes at {found['resume_tokens']:,} (grid {found['grid_tokens']:,})"
    )
    console.print(table)
    a_second = [f"{size(found[name])} {words}" for name, words in rates]
    a_second.append(f"{size(found['restore_bytes_per_s'])} from tiers")
    console.print(f"a second: {', '.join(a_second)}; {found['prefill_tokens_per_s']:,.0f} tokens computed")
    console.print(
        f"memory: {size(found['working_set_bytes'])} for the new state of {reuse_s:g} s"
        f" ({found['working_set_objects']:,} objects), {size(found['landing_bytes'])} where fetched state lands"
    )
    node = found["a_node"]
    console.print(
        f"nodes: {found['nodes']} (by {by}); on each {size(node['memory_bytes'])} of memory,"
        f" {size(node['transfer_bytes_per_s'])}/s received, {size(node['restore_bytes_per_s'])}/s restored"
    )
