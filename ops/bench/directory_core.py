"""One shard's core: lookups in a full index, ingest with lookups beside it, several shards. In one process, no sockets."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import numpy as np

from ...fabric import wire
from ...fabric.directory import DirectoryCore
from ...fabric.effects import Received
from ...fabric.kinds import INDEX_DIGEST_BYTES as KEY
from ...fabric.kinds import Status
from ...fabric.memo import SegmentMemo
from ...fabric.messages import Answer, Column, EventBatch, EventRun, Found, Lookup, Prompt, ShardMap, Strip
from ...fabric.model import ModelSpec
from ...fabric.segments import SEGMENT_OBJECTS, Router
from .directory_load import ABI, UNIT_TOKENS, Load, runs_of

LOOKUP_ROUNDS = 200
INGEST_S = 3.0
LOOKUP_EVERY_S = 0.01
BATCH_OBJECTS = 2048
EVEN_BLOCKS = 64
LONG_BLOCKS, SHORT_BLOCKS = 8192, 64
GROUPS, HOLDERS = 7, 8

Figure = dict[str, Any]


def figure(name: str, value: float, unit: str, target: float | None = None, *, most: bool = True) -> Figure:
    """One figure; without a target it is only told."""
    holds = target is None or (value <= target if most else value >= target)
    return {"name": name, "value": round(value, 2), "unit": unit, "target": target, "holds": holds}


def model_of(groups: int) -> ModelSpec:
    """So many groups of ordinary history, in blocks of 16 tokens."""
    kinds = [{"name": f"g{i}", "kind": "compressed_history", "block_tokens": UNIT_TOKENS} for i in range(groups)]
    return ModelSpec.load({"name": "bench", "groups": kinds})


def percentile(values: list[float], share: float) -> float:
    """The value below which that share of all lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


class Told:
    """A shard's core with batches numbered as its holders would number them."""

    def __init__(self, groups: int, name: str = "directory:0", shards: ShardMap | None = None) -> None:
        self.core = DirectoryCore(name, model_of(groups), 1, shards=shards)
        self._seq: dict[int, int] = {}

    def batch(self, holder: int, runs: list[EventRun]) -> EventBatch:
        seq = self._seq[holder] = self._seq.get(holder, 0) + 1
        return EventBatch(f"holder:{holder}", 1, seq, 0, tuple(runs), self.core.router.map.epoch)

    def tell(self, holder: int, runs: list[EventRun]) -> None:
        self.core.handle(Received(f"holder:{holder}", self.batch(holder, runs)), 0.0)


def whole_prompt(told: Told, rng: np.random.Generator, *, alike: bool) -> bytes:
    """A prompt of 8,192 blocks that all holders have in all groups; its digests.

    Not ``alike``: every other group lacks some segments, so that no two groups share their bitmaps.
    """
    chain = rng.bytes(LONG_BLOCKS * KEY)
    for holder in range(HOLDERS):
        for group in range(GROUPS):
            versions = rng.integers(100, 300, LONG_BLOCKS).astype("<u8").tobytes()
            runs = list(runs_of(chain, 0, LONG_BLOCKS, group, versions))
            if not alike:
                runs = [run for run in runs if group == 0 or (run.first // SEGMENT_OBJECTS) % (group + 2)]
            told.tell(holder, runs)
    return chain


def lookup_us(told: Told, chain: bytes, blocks: int) -> list[float]:
    """Microseconds of lookups of a prompt's first blocks, in the index alone."""
    strips = (Strip(UNIT_TOKENS, 0, chain[: blocks * KEY]),)
    spent = []
    for _ in range(LOOKUP_ROUNDS):
        start = time.perf_counter()
        told.core.index.lookup(strips)
        spent.append((time.perf_counter() - start) * 1e6)
    return spent


def lookups(positions: int) -> Iterator[Figure]:
    """Lookups of 8,192 and 64 blocks x 7 groups x 8 holders in an index of so many other positions."""
    told = Told(GROUPS)
    load = Load(3, groups=GROUPS)
    for holder, events in load:
        told.tell(holder, events)
        if load.positions >= positions:
            break
    rng = np.random.default_rng(5)
    alike, unlike = whole_prompt(told, rng, alike=True), whole_prompt(told, rng, alike=False)
    long = lookup_us(told, alike, LONG_BLOCKS)
    yield figure("directory_lookup_8192x7x8_p50", statistics.median(long), "us", 500.0)
    yield figure("directory_lookup_8192x7x8_p99", percentile(long, 0.99), "us")
    ragged = lookup_us(told, unlike, LONG_BLOCKS)
    yield figure("directory_lookup_8192x7x8_groups_unlike_p50", statistics.median(ragged), "us", 500.0)
    yield figure("directory_lookup_64x7x8_p50", statistics.median(lookup_us(told, alike, SHORT_BLOCKS)), "us", 60.0)
    cold = lookup_us(told, rng.bytes(LONG_BLOCKS * KEY), LONG_BLOCKS)
    yield figure("directory_lookup_8192_cold_p50", statistics.median(cold), "us")
    found = Found("x", 1, 0, *told.core.index.lookup((Strip(UNIT_TOKENS, 0, alike),)))
    yield figure("directory_answer_8192x7x8_bytes", len(wire.encode(found)), "bytes")


def hints() -> Iterator[Figure]:
    """What a session's memory of segments answers a scheduler, of 8,192 blocks x 7 groups at 8 holders."""
    model, rng = model_of(GROUPS), np.random.default_rng(8)
    prompt = Prompt(
        bytes(32), bytes(16), "", LONG_BLOCKS * UNIT_TOKENS + 1, ((UNIT_TOKENS, rng.bytes(LONG_BLOCKS * 32)),)
    )
    bits, abis = (1 << LONG_BLOCKS) - 1, (ABI,) * GROUPS
    columns = tuple(
        Column(f"holder:{holder}", 1, group, 0, bits, 0, {0: bits}, ((ABI, bits),))
        for holder in range(HOLDERS)
        for group in range(GROUPS)
    )
    told = (("directory:0", 1, UNIT_TOKENS, 0, (np.ones(LONG_BLOCKS // SEGMENT_OBJECTS, "<u8") * 3).tobytes()),)
    memo = SegmentMemo(model)
    memo.learn(prompt, Answer("", Status.MISS, 0, 0, 0, None, (), None, None, None, columns=columns, told=told), 0.0)
    spent = []
    for _ in range(LOOKUP_ROUNDS):
        start = time.perf_counter()
        known = memo.recall(prompt, abis, ("holder:0",), 1.0)
        spent.append((time.perf_counter() - start) * 1e6)
        if known is None or known.tokens != LONG_BLOCKS * UNIT_TOKENS:
            raise AssertionError(f"a prompt that is whole at every holder was recalled as {known}")
    yield figure("directory_hint_8192x7x8_p50", statistics.median(spent), "us")


def _frames(told: Told, load: Load, objects: int) -> Iterator[tuple[str, bytes, int]]:
    """Batches as they come over the wire: sender, bytes, objects."""
    waiting: dict[int, list[EventRun]] = {}
    for holder, events in load:
        runs = waiting.setdefault(holder, [])
        runs.extend(events)
        count = sum(len(run.digests) // KEY for run in runs)
        if count >= objects:
            del waiting[holder]
            yield f"holder:{holder}", wire.encode(told.batch(holder, runs)), count


def _even_frames(told: Told, blocks: int) -> Iterator[tuple[str, bytes, int]]:
    """Batches of chains that grow by exactly so many blocks at a time, in every group: no run is longer."""
    rng = np.random.default_rng(7)
    length = 4 * SEGMENT_OBJECTS
    for holder in cycle(range(HOLDERS)):
        chain = rng.bytes(length * KEY)
        versions = rng.integers(100, 300, length).astype("<u8").tobytes()
        batch: list[EventRun] = []
        for first in range(0, length, blocks):
            for group in range(5):
                batch.extend(runs_of(chain, first, first + blocks, group, versions[first * 8 : (first + blocks) * 8]))
            if 5 * blocks * (len(batch) // 5) >= BATCH_OBJECTS or first + blocks == length:
                yield f"holder:{holder}", wire.encode(told.batch(holder, batch)), blocks * len(batch)
                batch = []


def ingest() -> Iterator[Figure]:
    """Events a second with decoding, while a lookup of 8,192 blocks comes in every 10 ms."""
    told = Told(5)
    load = Load(4)
    asked = whole_prompt(told, np.random.default_rng(6), alike=True)
    strips = (Strip(UNIT_TOKENS, 0, asked),)
    frames = list(islice(_frames(told, load, BATCH_OBJECTS), 1200))
    objects, late, spent = _under_load(told, frames, strips)
    runs = sum(len(wire.decode(frame).runs) for _, frame, _ in frames[:50])
    yield figure("directory_ingest_blocks_a_run", sum(n for *_, n in frames[:50]) / runs, "blocks")
    yield figure("directory_ingest_runs", objects / spent, "events/s", 300_000.0, most=False)
    yield figure("directory_ingest_lookup_p99", percentile(late, 0.99) * 1e3, "ms")
    even = Told(5)
    frames = list(islice(_even_frames(even, EVEN_BLOCKS), 1200))
    objects, late, spent = _under_load(even, frames, strips)
    yield figure("directory_ingest_runs_of_64", objects / spent, "events/s", 300_000.0, most=False)
    yield figure("directory_ingest_runs_of_64_lookup_p99", percentile(late, 0.99) * 1e3, "ms")
    single = Told(5)
    chains = [np.random.default_rng(n).bytes(256 * KEY) for n in range(64)]
    steps = []
    for block in range(200):
        batch: list[EventRun] = []
        for chain in chains:
            for group in range(5):
                batch.extend(runs_of(chain, block, block + 1, group, (block + 1).to_bytes(8, "little")))
        steps.append(("holder:0", wire.encode(single.batch(0, batch)), len(batch)))
    objects, _, spent = _under_load(single, steps, strips)
    yield figure("directory_ingest_single_blocks", objects / spent, "events/s")


def _under_load(
    told: Told, frames: list[tuple[str, bytes, int]], strips: tuple[Strip, ...]
) -> tuple[int, list[float], float]:
    """Apply frames one after another; lookups fall due meanwhile and wait for the batch at hand."""
    late: list[float] = []
    objects = 0
    start = time.perf_counter()
    due = start + LOOKUP_EVERY_S
    for sender, frame, count in frames:
        told.core.handle(Received(sender, wire.decode(frame)), 0.0)
        objects += count
        now = time.perf_counter()
        while due <= now:
            told.core.handle(Received("client:1", Lookup("x", 0, strips)), 0.0)
            late.append(time.perf_counter() - due)
            due += LOOKUP_EVERY_S
            now = time.perf_counter()
        if now - start > INGEST_S:
            break
    return objects, late or [0.0], time.perf_counter() - start


def shards() -> Iterator[Figure]:
    """1, 2 and 4 shards: what one shard's process spends on its part of a prompt, and its share of the bytes."""
    for count in (1, 2, 4):
        told = ShardMap(1, tuple(f"directory:{i}" for i in range(count)))
        router = Router(told)
        cores = {shard: Told(5, shard, told) for shard in told.shards}
        load = Load(9)
        for holder, events in load:
            parts: dict[str, list[EventRun]] = {}
            for run in events:
                parts.setdefault(router.owner(run.anchor), []).append(run)
            for shard, runs in parts.items():
                cores[shard].tell(holder, runs)
            if load.positions > 200_000:
                break
        prompts = [c for c in load.chains if len(c) >= 1024 * KEY][:40]
        busiest, asked = _spend(cores, router, prompts)
        used = [core.core.index.bytes_used for core in cores.values()]
        yield figure(f"directory_{count}_shards_lookups_if_a_core_each", asked / busiest, "lookups/s")
        yield figure(f"directory_{count}_shards_largest_share_of_bytes", max(used) / sum(used), "share")


def _spend(cores: dict[str, Told], router: Router, prompts: list[bytes]) -> tuple[float, int]:
    """CPU seconds of the busiest shard, and how many prompts were asked: other load must not count."""
    spent = dict.fromkeys(cores, 0.0)
    step = SEGMENT_OBJECTS * KEY
    for _ in range(5):
        for prompt in prompts:
            parts: dict[str, list[Strip]] = {}
            for at in range(0, len(prompt), step):
                cut = Strip(UNIT_TOKENS, at // KEY, prompt[at : at + step])
                parts.setdefault(router.owner(cut.anchor), []).append(cut)
            for shard, strips in parts.items():
                lookup = Lookup("x", 1, tuple(strips))
                start = time.process_time()
                wire.encode(cores[shard].core.lookup(lookup))
                spent[shard] += time.process_time() - start
    return max(spent.values()), 5 * len(prompts)
