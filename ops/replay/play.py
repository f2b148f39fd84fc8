"""One replay: every request of a trace asks, resumes, computes the rest and stores it, in the trace's time."""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from ...fabric.arena import ArenaLayout
from ...fabric.checkpoints import BranchBook, published, trail_of
from ...fabric.kinds import ObjectKind, Reason
from ...fabric.messages import (
    Acquire,
    Answer,
    Done,
    Generated,
    Objects,
    Prompt,
    Release,
    StoreBegin,
    StoreBegun,
    StoreCommit,
    StoreItem,
)
from ...fabric.model import ModelSpec
from ...fabric.passport import Abi, AbiPassport
from ...fabric.series import Occupancy, Sample, added
from ...policies.checkpoint import checkpoint_policy
from ...policies.costs import CostGuess
from .machine import Setup, SimulatedFabric, checksums_of
from .models import Digests
from .trace import BLOCK_TOKENS, Request, Trace, infinite_cache_hits

LEASE_S = 60.0
COLLECT_EVERY = 400_000
"""Objects more than before from one look for garbage to the next."""
PREPARED = 256
"""Requests whose blocks' digests are computed at a time."""
WEIGHTS = bytes(16)


@dataclass(slots=True)
class Result:
    """What a replay found, as ``--json`` prints it."""

    requests: int
    tokens: int
    infinite_cache_hit_tokens: int
    hash_hit_tokens: int
    usable_hit_tokens: int
    effective_hit_tokens: int
    by_cause: dict[str, int]
    by_kind: dict[str, dict[str, int]]
    bytes_moved: int
    restores: int
    evictions: int
    wrong_reads: int
    wall_s: float
    skipped_lines: int = 0
    stores_refused: int = 0
    slabs_moved: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played on what.

    ``disk_bytes``: of each node; None for no disk. ``slabs``: groups share a node's memory. ``costs``: what a simulated
    plan believes.
    """

    trace: Trace
    model: ModelSpec
    nodes: int
    layout: ArenaLayout
    eviction: str
    checkpoint: str
    disk_bytes: int | None
    slabs: bool = False
    costs: CostGuess | None = None


@contextmanager
def _few_collections() -> Iterator[None]:
    """Look for garbage in circles seldom: a replay makes millions of objects that live long, and hardly any circle."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Replay:
    """Plays a trace on a simulated fabric. ``checkpoint``: which windows, tails and snapshots are kept."""

    def __init__(self, trace: Trace, setup: Setup, checkpoint: str) -> None:
        self.trace = trace
        self.setup = setup
        self.model: ModelSpec = setup.model
        self.fabric = SimulatedFabric(setup)
        self.wrong_reads = 0
        self.forgotten_tokens = 0
        """Stored once, and held by nobody when they were asked for again."""
        self._due = infinite_cache_hits(trace)
        self.stores_refused = 0
        self._largest: Counter[int] = Counter()
        """The most objects of each group that one request stored."""
        self._policy = checkpoint_policy(checkpoint)
        self._branches = BranchBook(self.model.grid_tokens)
        self._digests = Digests(self.model, setup.weights)
        self._abis: tuple[Abi, ...] = tuple(
            AbiPassport(alignment_bytes=group.alignment_bytes).abi() for group in self.model.groups
        )
        self._names = list(self.fabric.nodes)
        self._kept: dict[tuple[int, tuple[int, ...]], tuple[tuple[int, ...], ...]] = {}

    def run(self, progress: Callable[[int], None] | None = None) -> Result:
        """Play it all. ``progress`` is told how many requests are over."""
        began = time.perf_counter()
        with _few_collections():
            requests = self.trace.requests
            for number, request in enumerate(requests):
                if number % PREPARED == 0:
                    soon = requests[number : number + PREPARED]
                    self._digests.prepare(chain.from_iterable(one.blocks for one in soon))
                self.fabric.advance(request.at_s)
                self._one(number, request)
                if progress is not None and number % 64 == 63:
                    progress(number + 1)
        return self._result(time.perf_counter() - began)

    def _one(self, number: int, request: Request) -> None:
        blocks, tokens = request.blocks, request.input_tokens
        node = self._names[number % len(self._names)]
        readers = (node,) * self.model.shards
        prompt = self._digests.prompt(blocks, tokens)
        due = self._due[number] * BLOCK_TOKENS
        answer = self.fabric.ask(node, Acquire(f"a{number}", prompt, self._abis, readers, LEASE_S, None, 0, False))
        assert isinstance(answer, Answer)
        self.forgotten_tokens += max(0, due - answer.hash_tokens)
        if answer.grant is not None:
            self.wrong_reads += self.fabric.wrong_in(answer.grant, prompt)
        whole = len(blocks) * BLOCK_TOKENS
        if whole:
            self._store(node, number, prompt, whole, answer)
        if answer.grant is not None:
            self.fabric.ask(node, Release(f"r{number}", answer.grant.lease, answer.tokens))
        self.fabric.ask(node, Generated(f"g{number}", prompt, request.output_tokens))
        if self.setup.disk_bytes is not None:
            self.fabric.spill(node, f"d{number}", self._largest)

    def _store(self, node: str, number: int, prompt: Prompt, whole: int, answer: Answer) -> None:
        """Publish what the request computed: everything behind its resume position."""
        keys = dict(prompt.keys)
        resumed = answer.tokens if answer.grant is not None else 0
        items = []
        sums: list[bytes] = []
        for group, indices in enumerate(self._to_store(keys, whole, answer.hash_tokens)):
            spec = self.model.groups[group]
            first = resumed // spec.unit_tokens
            fresh = indices[bisect_left(indices, first) :]
            if not fresh:
                continue
            self._largest[group] = max(self._largest[group], len(fresh))
            digests = _digests_at(keys[spec.unit_tokens], fresh)
            for shard in range(self.model.shards):
                objects = Objects(group, shard, fresh, digests)
                items.append(StoreItem(objects, 0, spec.block_bytes, self._abis[group]))
        if not items:
            return
        begun = self.fabric.ask(node, StoreBegin(f"b{number}", prompt, tuple(items), (), replace=False))
        assert isinstance(begun, StoreBegun)
        if begun.refused is not None:
            self.stores_refused += 1
            return
        for run in begun.slots:
            blob = keys[self.model.groups[run.group].unit_tokens]
            sums.append(checksums_of(_digests_at(blob, run.indices)))
        done = self.fabric.ask(node, StoreCommit(f"c{number}", begun.attempt, b"".join(sums)))
        assert isinstance(done, Done)
        if done.refused is not None:
            self.stores_refused += 1

    def _to_store(self, keys: dict[int, bytes], whole: int, hash_tokens: int) -> tuple[tuple[int, ...], ...]:
        """By group, the objects that this prompt publishes under the checkpoint policy."""
        grid_keys = keys[self.model.grid_tokens]
        branches: tuple[int, ...] = ()
        if len(self.model.groups) > 1:
            self._branches.asked(grid_keys, min(hash_tokens, whole))
            branches = self._branches.along(grid_keys)
        positions = tuple(self._policy.positions(trail_of(self.model, whole, None, branches)))
        known = self._kept.get((whole, positions))
        if known is None:
            known = tuple(tuple(sorted(indices)) for indices in published(self.model, positions, whole))
            if len(self._kept) > 4096:
                self._kept.clear()
            self._kept[whole, positions] = known
        return known

    def _result(self, wall_s: float) -> Result:
        total = added(self.fabric.now_s, [node.core.sampler.sample() for node in self.fabric.nodes.values()])
        lost = Counter({reason.value: tokens for reason, tokens in total.lost_tokens.items()})
        lost[Reason.EVICTED.value] += self.forgotten_tokens
        return Result(
            requests=len(self.trace.requests),
            tokens=self.trace.tokens,
            infinite_cache_hit_tokens=sum(self._due) * BLOCK_TOKENS,
            hash_hit_tokens=total.hash_hit_tokens,
            usable_hit_tokens=total.usable_hit_tokens,
            effective_hit_tokens=total.effective_hit_tokens,
            by_cause={reason: tokens for reason, tokens in lost.items() if tokens},
            by_kind=by_kind(self.model, total.lost_by_kind, total.occupancy_bytes, self.forgotten_tokens),
            bytes_moved=total.moved_bytes,
            restores=total.restores,
            evictions=total.evictions,
            wrong_reads=self.wrong_reads,
            wall_s=round(wall_s, 3),
            skipped_lines=self.trace.bad,
            stores_refused=self.stores_refused,
            slabs_moved=sum(node.core.ctx.counters["slabs_moved"] for node in self.fabric.nodes.values()),
        )

    def series(self) -> list[list[Sample]]:
        """Every holder's samples over simulated time."""
        return [node.core.series() for node in self.fabric.nodes.values()]


def _digests_at(blob: bytes, indices: Sequence[int]) -> bytes:
    """Those of a prompt's digests that stand at these places, ascending."""
    if not indices:
        return b""
    first, last = indices[0], indices[-1]
    if last - first == len(indices) - 1:
        return blob[first * 32 : last * 32 + 32]
    return b"".join([blob[i * 32 : i * 32 + 32] for i in indices])


def by_kind(
    model: ModelSpec, lost_by_kind: Mapping[ObjectKind, int], occupancy: Occupancy, forgotten_tokens: int
) -> dict[str, dict[str, int]]:
    """By kind: tokens lost for want of it (history where nobody holds anything any more), bytes held at the end."""
    lost = Counter(lost_by_kind)
    lost[ObjectKind.COMPRESSED_HISTORY] += forgotten_tokens
    kinds = {group.kind for group in model.groups}
    return {
        kind.value: {"lost_tokens": lost[kind], "held_bytes": sum(occupancy.get(kind, {}).values())}
        for kind in ObjectKind
        if kind in kinds or lost[kind]
    }
