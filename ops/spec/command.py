"""``kvfabric spec``: print presets, specs from Hugging Face configs, and what a spec amounts to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..options import GIB_MAX, Json
from ..options import show as say


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    spec = typer.Typer(help="Model specs: the rules and sizes of one model's cache.", no_args_is_help=True)
    spec.command("presets")(presets)
    spec.command("preset")(preset)
    spec.command("from-hf")(from_hf)
    spec.command("show")(show)
    spec.command("size")(size)
    app.add_typer(spec, name="spec")


def presets(json: Json = False) -> None:
    """List the models that are known by name."""
    from ...fabric.presets import PRESETS, source

    sources = {name: " ".join(source(name).split()) for name in PRESETS}
    say({"presets": sources}, "\n".join(f"{name}  ({told})" for name, told in sources.items()), json=json)


def preset(
    name: Annotated[str, typer.Argument(help="A name from `kvfabric spec presets`.")],
    scale: Annotated[int, typer.Option(help="Divide sizes and lengths by this, for tests.")] = 1,
    *,
    json: Json = False,
) -> None:
    """Print a known model's spec as YAML."""
    from ...fabric import presets as known
    from ...fabric.specs import dump_spec

    model = known.preset(name, scale)
    say(model.model_dump(mode="json", exclude_defaults=True), dump_spec(model).rstrip("\n"), json=json)


def from_hf(
    path: Annotated[Path, typer.Argument(help="A Hugging Face config.json, or the folder it is in.")],
    *,
    json: Json = False,
) -> None:
    """Print the spec of the model that a Hugging Face config describes, as YAML."""
    from ...fabric.hf import read_hf
    from ...fabric.specs import dump_spec

    model = read_hf(path)
    say(model.model_dump(mode="json", exclude_defaults=True), dump_spec(model).rstrip("\n"), json=json)


def show(
    spec: Annotated[str, typer.Argument(help="A spec file (YAML) or the name of a preset.")],
    tokens: Annotated[int, typer.Option(min=1, help="Bytes are told for a prompt of this many tokens.")] = 1 << 20,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a spec, and print its grid, each group's rule and what it takes in bytes."""
    from ...fabric.specs import known_model, summary

    plain = summary(known_model(spec), tokens=tokens)
    if json:
        import json as codec

        typer.echo(codec.dumps(plain))
    else:
        _print_summary(plain)


def size(
    spec: Annotated[str, typer.Argument(help="A spec file (YAML) or the name of a preset.")],
    *,
    memory_gib: Annotated[float, typer.Option(min=0.0001, max=GIB_MAX, help="Memory of one holder.")] = 64.0,
    checkpoint: Annotated[str, typer.Option(help="all, every:N, ends, branches.")] = "all",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="How long prompts are expected to be.")] = 8192,
    holders: Annotated[int, typer.Option(min=1, help="Holders that share the model's shards.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print how one memory budget is split: the slots of each group, and the tokens of prompts that they hold."""
    from ...fabric.budget import sizes
    from ...fabric.specs import known_model
    from ...policies.checkpoint import checkpoint_policy

    checkpoint_policy(checkpoint)
    model = known_model(spec)
    shards = -(-model.shards // holders)
    plain = sizes(model, int(memory_gib * (1 << 30)), shards, checkpoint=checkpoint, prompt_tokens=prompt_tokens)
    if json:
        import json as codec

        typer.echo(codec.dumps(plain))
        return
    typer.echo(f"{plain['name']}: {plain['memory_bytes']:,} bytes for {shards} of {model.shards} shards, {checkpoint}")
    for group in plain["groups"]:
        typer.echo(
            f"  {group['name']:<20} {group['slots']:>12,} slots of {group['slot_bytes']:>12,} bytes"
            f" hold {group['tokens']:>14,} tokens"
        )


def _print_summary(plain: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    at = plain["bytes_at"]
    table = Table(title=f"{plain['name']}: grid {plain['grid_tokens']} tokens", title_justify="left")
    for column in ("group", "kind", "unit (tokens)", "bytes an object", "a resume at p needs"):
        table.add_column(column, overflow="fold")
    for group in plain["groups"]:
        kind = group["kind"] if group["form"] == "blocks" else f"{group['kind']} ({group['form']})"
        sizes = (str(group["unit_tokens"]), f"{group['object_bytes']:,}")
        table.add_row(group["name"], kind, *sizes, group["needs"])
    console = Console()
    console.print(table)
    console.print(
        f"{plain['bytes_per_token']:,.0f} bytes a token and {plain['fixed_bytes']:,} fixed; "
        f"{at['bytes']:,} bytes at {at['tokens']:,} tokens"
    )
