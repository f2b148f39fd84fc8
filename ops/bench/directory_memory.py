"""How much memory a directory shard takes: growth of a process of its own, which prints it as JSON."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from ...fabric.index import ChainIndex
from .directory_load import Load

PAGE_BYTES = 4096


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES


def grow(points: list[int], *, groups: int, version_spread: int) -> list[dict[str, float]]:
    """Fill one index up to each number of positions; bytes a position at each."""
    load = Load(7, groups=groups, version_spread=version_spread)
    index = ChainIndex()
    lives = [index.begin_life() for _ in range(load.holders)]
    for number, life in enumerate(lives):
        index.show(life, f"holder:{number}", 1)
    stream = iter(load)
    for _ in range(64):
        index.apply(lives[0], next(stream)[1])
    index = ChainIndex()
    lives = [index.begin_life() for _ in range(load.holders)]
    for number, life in enumerate(lives):
        index.show(life, f"holder:{number}", 1)
    load = Load(8, groups=groups, version_spread=version_spread)
    stream = iter(load)
    gc.collect()
    before = resident_bytes()
    found = []
    for point in sorted(points):
        while load.positions < point:
            holder, events = next(stream)
            index.apply(lives[holder], events)
        load.chains.clear()
        gc.collect()
        grown = resident_bytes() - before
        found.append(
            {
                "positions": load.positions,
                "bytes": grown,
                "bytes_a_position": grown / load.positions,
                "accounted_a_position": index.bytes_used / load.positions,
                "blocks_a_run": load.positions / index.runs,
            }
        )
    return found


if __name__ == "__main__":
    millions, spread = sys.argv[1], int(sys.argv[2])
    numbers = [int(float(m) * 1_000_000) for m in millions.split(",")]
    sys.stdout.write(json.dumps(grow(numbers, groups=5, version_spread=spread)) + "\n")
