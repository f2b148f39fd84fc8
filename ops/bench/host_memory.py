"""How fast blocks go between what readers map and host memory below it, and what each way to digest costs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ...fabric.arena import ArenaLayout, Checksum, PoolLayout
from ...fabric.kinds import Tier
from ...transport.digest import digester
from ...transport.memfd import ArenaMemory
from ...transport.payloads import HostPayloads, SlotCopy

BLOCK_BYTES = 1 << 20
BLOCKS = 64


def host_memory_ratios(rounds: int) -> dict[str, list[float]]:
    """By figure, a ratio a round: of times of the same bytes measured side by side.

    ``host_copy``: a plain copy against one slot to slot with its digest, as a step of the ladder is;
    ``lanes``: xxh3-128 against ``lanes_128`` on this CPU.
    """
    pools = [PoolLayout(0, 0, BLOCKS, BLOCK_BYTES, tier) for tier in (Tier.G1, Tier.G2)]
    memory = ArenaMemory.create(ArenaLayout(pools), 1, reserve=True)
    arena, payloads = memory.arena, HostPayloads(memory.arena)
    for slot in range(BLOCKS):
        arena.payload(slot)[:] = np.random.default_rng(slot).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)

    def plain() -> None:
        for slot in range(BLOCKS):
            np.copyto(arena.payload(BLOCKS + slot), arena.payload(slot))

    def ladder() -> None:
        payloads.copy([SlotCopy(slot, BLOCKS + slot, BLOCK_BYTES) for slot in range(BLOCKS)])

    def digest(way: Checksum) -> Callable[[], None]:
        def run() -> None:
            for slot in range(BLOCKS):
                digester(way).checksum(arena.payload(slot))

        return run

    pairs = {
        "host_copy": (plain, ladder),
        "lanes": (digest(Checksum.XXH3_128), digest(Checksum.LANES_128)),
    }
    ratios: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(rounds):
        for name, (bare, measured) in pairs.items():
            ratios[name].append(_seconds(bare) / _seconds(measured))
    memory.close()
    return ratios


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
