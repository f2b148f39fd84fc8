"""``kvfabric replay``: a public trace through the real core in simulated time, or through real actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..options import GIB_MAX, writable

if TYPE_CHECKING:
    from ...fabric.series import Sample
    from .play import Plan, Result
    from .trace import Trace

GIB = 1 << 30
WRONG = 1
GENERATED_REQUESTS = 4000
CLUSTER_REQUESTS = 200


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(replay)


def replay(
    *,
    trace: Annotated[
        Path | None, typer.Option(help="A trace in Mooncake's format; without one, a generated trace is played.")
    ] = None,
    model: Annotated[str, typer.Option(help="A preset's name or a spec file.")] = "full_attention",
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="Holders; requests go to them in turn.")] = 1,
    capacity_gib: Annotated[float, typer.Option(min=0.001, max=GIB_MAX, help="Memory of each node.")] = 1024.0,
    disk_gib: Annotated[
        float | None, typer.Option(min=0.001, max=GIB_MAX, help="Disk of each node; default: none.")
    ] = None,
    eviction: Annotated[str, typer.Option(help="default, lru, s3fifo, or one that a package brings.")] = "default",
    checkpoint: Annotated[
        str, typer.Option(help="Which windows, tails and snapshots are kept: all, every:N, ends, branches.")
    ] = "branches",
    slabs: Annotated[
        bool, typer.Option("--slabs", help="Let groups share the memory slab by slab, as the mix of prompts changes.")
    ] = False,
    plan: Annotated[
        str | None, typer.Option(help="longest, or cost: the least expected time; default: the model's own.")
    ] = None,
    restore_gib_s: Annotated[
        float | None, typer.Option(min=0.001, max=GIB_MAX, help="What a costed plan takes a disk to give a second.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Play so many requests of the trace at most, or generate so many. Default: all, 4000 where they are"
            " generated; 200 with --cluster.",
        ),
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="On real actors, scaled down, every leased byte read and checked.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the generated trace.")] = 1,
    lenient: Annotated[bool, typer.Option("--lenient", help="Count and skip lines that are no requests.")] = False,
    series: Annotated[Path | None, typer.Option(help="Write what happened over time, for `kvfabric report`.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a trace: what was hit, what was lost and why. Exit status 1 if a leased slot held anything wrong."""
    from dataclasses import asdict

    from ...policies.checkpoint import checkpoint_policy
    from ...policies.costs import CostGuess
    from ...policies.eviction import eviction_policy
    from .models import layout_of, replay_model
    from .play import Plan
    from .trace import working_set_blocks

    spec = replay_model(model, plan)
    eviction_policy(eviction)
    checkpoint_policy(checkpoint)
    if series is not None:
        writable(series)
    found = _requests(trace, requests or (CLUSTER_REQUESTS if cluster else None), lenient=lenient, seed=seed)
    mean_tokens = max(1, found.tokens // len(found.requests))
    layout = layout_of(spec, int(capacity_gib * GIB), checkpoint, mean_tokens, working_set_blocks(found) + 1)
    disk_bytes = None if disk_gib is None else int(disk_gib * GIB)
    guess = None if restore_gib_s is None else CostGuess(restore_bytes_per_s=restore_gib_s * GIB)
    playing = Plan(found, spec, nodes, layout, eviction, checkpoint, disk_bytes, slabs, guess)
    with _progress("replaying", len(found.requests)) as told:
        result, samples = _on_cluster(playing, told) if cluster else _simulated(playing, told)
    if series is not None:
        _save(series, playing, result, samples, clock="real" if cluster else "simulated")
    if json:
        import json as codec

        typer.echo(codec.dumps(asdict(result)))
    else:
        _print(found, result)
    if result.wrong_reads:
        raise typer.Exit(WRONG)


def _simulated(plan: Plan, told: Callable[[int], None]) -> tuple[Result, list[Sample]]:
    from ...fabric.budget import in_slabs
    from ...fabric.series import merged
    from ...policies.eviction import eviction_policy
    from .machine import Setup
    from .play import WEIGHTS, Replay

    layout, shares = in_slabs(plan.layout) if plan.slabs else (plan.layout, ())
    eviction = eviction_policy(plan.eviction)
    setup = Setup(plan.model, plan.nodes, layout, WEIGHTS, eviction, plan.disk_bytes, shares, plan.costs)
    played = Replay(plan.trace, setup, plan.checkpoint)
    return played.run(told), merged(played.series())


def _on_cluster(plan: Plan, told: Callable[[int], None]) -> tuple[Result, list[Sample]]:
    from .cluster import on_cluster

    return on_cluster(plan, told)


def _requests(path: Path | None, most: int | None, *, lenient: bool, seed: int) -> Trace:
    """The first ``most`` requests of a trace; where there is none, so many are generated."""
    from .trace import generate

    if path is None:
        return generate(most or GENERATED_REQUESTS, seed)
    with _progress("reading") as told:
        found = _read(path, lenient, told)
    if most is not None:
        del found.requests[most:]
    return found


def _read(path: Path, lenient: bool, told: Callable[[int], None]) -> Trace:
    from .trace import load

    found = load(path, lenient=lenient, progress=told)
    for line in found.told:
        typer.echo(f"skipped {line}", err=True)
    if found.bad > len(found.told):
        typer.echo(f"skipped {found.bad - len(found.told)} more lines", err=True)
    return found


@contextmanager
def _progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while something takes long; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _save(
    path: Path, plan: Plan, result: Result, samples: list[Sample], *, clock: Literal["simulated", "real"]
) -> None:
    from ...fabric.kinds import FabricError
    from ..report.series import Series

    facts: dict[str, Any] = {"trace": plan.trace.name, "model": plan.model.name, "nodes": plan.nodes}
    facts |= {"requests": result.requests, "wrong reads": result.wrong_reads}
    title = f"Replay of {plan.trace.name}"
    try:
        Series(source="replay", clock=clock, title=title, facts=facts, samples=samples).save(path)
    except OSError as error:
        raise FabricError(f"{path}: cannot be written: {error.strerror}") from None


def _print(trace: Trace, result: Result) -> None:
    share = 100 / max(result.infinite_cache_hit_tokens, 1)
    rows = (
        ("requests", f"{result.requests:,}"),
        ("input tokens", f"{result.tokens:,}"),
        ("an infinite cache would hit", f"{result.infinite_cache_hit_tokens:,} tokens"),
        ("hashes promised", f"{result.hash_hit_tokens:,} ({result.hash_hit_tokens * share:.1f} % of that)"),
        ("rules allowed", f"{result.usable_hit_tokens:,} ({result.usable_hit_tokens * share:.1f} %)"),
        ("leases covered", f"{result.effective_hit_tokens:,} ({result.effective_hit_tokens * share:.1f} %)"),
        *((f"lost: {reason}", f"{tokens:,} tokens") for reason, tokens in sorted(result.by_cause.items())),
        *(
            (kind, f"{told['lost_tokens']:,} tokens lost for want of it, {told['held_bytes']:,} bytes held")
            for kind, told in result.by_kind.items()
        ),
        ("moved between nodes", f"{result.bytes_moved:,} bytes"),
        ("restored, evicted", f"{result.restores:,}, {result.evictions:,} objects"),
        ("wrong reads", f"{result.wrong_reads:,}"),
        ("time", f"{result.wall_s:.1f} s, {60 * result.requests / max(result.wall_s, 1e-9):,.0f} requests a minute"),
    )
    typer.echo(trace.name)
    for name, value in rows:
        typer.echo(f"  {name:<28} {value}")
