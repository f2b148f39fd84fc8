"""A replay on real actors: the trace's requests one after another, real bytes, every leased byte read and judged.

Scaled down: a block has as many tokens and a pool as many slots as in the simulated replay, and a hundredth or a
thousandth of the bytes. Time is the machine's own: requests follow one another as fast as they are served.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ...actors import ray_api
from ...actors.fabric import Fabric, launch
from ...fabric.kinds import FabricError, ObjectKind, Reason, SpecError
from ...fabric.model import ModelSpec
from ...fabric.series import Sample, added, aligned, merged
from .cluster_player import Asked, NodePlayer, Played
from .play import Plan, Result, by_kind
from .trace import BLOCK_TOKENS, Trace, infinite_cache_hits

if TYPE_CHECKING:
    from ...fabric.arena import ArenaLayout

BLOCK_BYTES = 4096
"""Of the largest group's block; the others' are as much smaller as they really are, down to this:"""
BLOCK_BYTES_MIN = 64
ARENA_BYTES_MAX = 1 << 30
DISK_BYTES_MIN = 1 << 20
CALL_TIMEOUT_S = 120.0
SPILL_EVERY = 4
"""Requests between two looks at how full the pools are."""
SPILL_SHARE = 8
SPILLED_AT_ONCE = 4


def scaled(model: ModelSpec) -> tuple[ModelSpec, float]:
    """The model with small blocks, and how much smaller its largest is. Raises SpecError."""
    factor = BLOCK_BYTES / max(group.block_bytes for group in model.groups)
    plain = model.model_dump(mode="json", exclude_defaults=True)
    for group, spec in zip(plain["groups"], model.groups, strict=True):
        for field in ("layer_bytes", "page_bytes", "padding_bytes"):
            group.pop(field, None)
        size = max(int(spec.block_bytes * factor), BLOCK_BYTES_MIN)
        group["block_bytes"] = -(-size // spec.alignment_bytes) * spec.alignment_bytes
    return ModelSpec.load(plain), factor


def fabric_spec(model: ModelSpec, layout: ArenaLayout, **more: Any) -> tuple[dict[str, Any], float]:
    """A fabric's spec with small blocks and the layout's slots, and the factor. Raises SpecError where that is too much."""
    small, factor = scaled(model)
    slots = {small.groups[pool.group].name: pool.slots for pool in layout.pools}
    size = sum(pool.slots * small.groups[pool.group].block_bytes for pool in layout.pools)
    if size > ARENA_BYTES_MAX:
        raise SpecError(
            f"--capacity-gib: {size} bytes a node even scaled down, of {ARENA_BYTES_MAX} at most:"
            " lower it, or play fewer --requests"
        )
    return {"model": small.model_dump(mode="json", exclude_defaults=True), "slots": slots, **more}, factor


def on_cluster(plan: Plan, progress: Callable[[int], None] | None = None) -> tuple[Result, list[Sample]]:
    """Launch a fabric for a plan (on the cluster at hand, else an embedded one), play it there, and end it.

    Raises SpecError for a plan too large for real bytes, FabricError where the fabric does not come up.
    """
    with TemporaryDirectory(prefix="kvfabric-replay-") as folder:
        spec, factor = fabric_spec(plan.model, plan.layout, eviction=plan.eviction, checkpoint=plan.checkpoint)
        if plan.slabs:
            spec["slabs"] = {}
        if plan.disk_bytes is not None:
            bytes_max = max(int(plan.disk_bytes * factor), DISK_BYTES_MIN)
            spec["disk"] = {"path": folder, "bytes_max": bytes_max, "free_floor_bytes": 0}
        with launch(spec, name=f"replay-{os.getpid()}", nodes=plan.nodes) as fabric:
            played = ClusterReplay(plan.trace, fabric, disk=plan.disk_bytes is not None)
            return played.run(progress), played.series()


class ClusterReplay:
    """Plays a trace on a running fabric whose model's blocks divide, or are multiples of, a trace's."""

    def __init__(self, trace: Trace, fabric: Fabric, *, disk: bool = False) -> None:
        self.trace = trace
        self.fabric = fabric
        self.model = fabric.spec.model
        self.wrong_reads = 0
        self.reads_refused = 0
        """Leases that were over before all was read."""
        self._disk = disk
        self._tokens: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._lost_by_kind: Counter[ObjectKind] = Counter()
        self._due = infinite_cache_hits(trace)
        self._forgotten_tokens = 0
        self._stores_refused = 0
        self._numbers: dict[int, int] = {}

    def run(self, progress: Callable[[int], None] | None = None) -> Result:
        """Play it all, in order; the nodes take turns. ``progress`` is told how many requests are over."""
        with self._players() as players:
            before, began = self._total(), time.perf_counter()
            for number, request in enumerate(self.trace.requests):
                blocks = tuple(self._numbers.setdefault(block, len(self._numbers)) for block in request.blocks)
                player = players[number % len(players)]
                self._took(
                    number,
                    _call(player.play.remote(Asked(number, blocks, request.input_tokens, request.output_tokens))),
                )
                if self._disk and number % SPILL_EVERY == SPILL_EVERY - 1 and self._short_of_room():
                    for one in players:
                        _call(one.spill.remote(SPILLED_AT_ONCE))
                if progress is not None:
                    progress(number + 1)
            wall_s = time.perf_counter() - began
        return self._result(before, self._total(), wall_s)

    @contextmanager
    def _players(self) -> Iterator[list[Any]]:
        """An actor on each node that has a holder, in the order of their names."""
        import ray

        members = [member for member in self.fabric.info().members if member.shards]
        nodes = sorted({member.node for member in members})
        options: list[dict[str, Any]] = [
            {"num_cpus": 0, "label_selector": {"ray.io/node-id": node}, "max_restarts": 0} for node in nodes
        ]
        players: list[Any] = [
            ray.remote(NodePlayer).options(**each).remote(self.fabric.name, [m for m in members if m.node == node])
            for node, each in zip(nodes, options, strict=True)
        ]
        try:
            yield players
        finally:
            for player in players:
                ray.kill(player)

    def _took(self, number: int, played: Played) -> None:
        due = self._due[number] * BLOCK_TOKENS
        self._forgotten_tokens += max(0, due - played.hash_tokens)
        self._tokens.update(hash=played.hash_tokens, usable=played.usable_tokens, effective=played.tokens)
        lost = played.hash_tokens - played.tokens
        if lost > 0 and played.reason is not None:
            self._lost[str(played.reason)] += lost
        if lost > 0 and played.kind is not None:
            self._lost_by_kind[played.kind] += lost
        self.wrong_reads += played.wrong_reads
        self.reads_refused += played.reads_refused
        self._stores_refused += played.stores_refused

    def _short_of_room(self) -> bool:
        pools = [pool for holder in self.fabric.status()["holders"] for pool in holder.get("pools", ())]
        return any(pool["free"] < max(1, pool["slots"] // SPILL_SHARE) for pool in pools)

    def _total(self) -> Sample:
        return added(0.0, [samples[-1] for samples in self.fabric.series().values() if samples])

    def series(self) -> list[Sample]:
        """What the holders did over time, together."""
        return merged(aligned(self.fabric.series().values()))

    def _result(self, before: Sample, after: Sample, wall_s: float) -> Result:
        lost = self._lost + Counter({Reason.EVICTED.value: self._forgotten_tokens})

        def since(name: str) -> int:
            return int(getattr(after, name)) - int(getattr(before, name))

        return Result(
            requests=len(self.trace.requests),
            tokens=self.trace.tokens,
            infinite_cache_hit_tokens=sum(self._due) * BLOCK_TOKENS,
            hash_hit_tokens=self._tokens["hash"],
            usable_hit_tokens=self._tokens["usable"],
            effective_hit_tokens=self._tokens["effective"],
            by_cause=dict(lost),
            by_kind=by_kind(self.model, self._lost_by_kind, after.occupancy_bytes, self._forgotten_tokens),
            bytes_moved=since("moved_bytes"),
            restores=since("restores"),
            evictions=since("evictions"),
            wrong_reads=self.wrong_reads,
            wall_s=round(wall_s, 3),
            skipped_lines=self.trace.bad,
            stores_refused=self._stores_refused,
        )


def _call(reference: Any) -> Any:
    """What a player says. Raises FabricError where it died or is silent."""
    try:
        return ray_api.call(reference, CALL_TIMEOUT_S)
    except ray_api.Unavailable as error:
        raise FabricError(f"a player of the replay does not answer: {error}") from None
