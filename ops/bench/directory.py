"""``kvfabric bench directory``: the directory's figures, each with its target.

Times are of a machine that may be busy: medians for latencies, the best of some stretches for
rates; what is a ratio is measured beside each other in one run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from . import directory_core, directory_rebuild
from .core import report
from .directory_core import figure

MEMORY_TARGET_BYTES = 40.0
MEMORY_TIMEOUT_S = 900.0
VERSION_SPREAD = 200
WIDE_SPREAD = 50_000
POSITIONS = 1_000_000
LOOKUP_POSITIONS = 200_000

Figure = dict[str, Any]


EXPECTED = (
    "directory_lookup_8192x7x8_p50",
    "directory_lookup_8192x7x8_groups_unlike_p50",
    "directory_lookup_64x7x8_p50",
    "directory_hint_8192x7x8_p50",
    "directory_ingest_runs",
    "directory_ingest_runs_of_64",
    "directory_ingest_lookup_p99",
    "directory_ingest_single_blocks",
    "directory_bytes_a_position_1m",
    "directory_bytes_a_position_3m",
    "directory_bytes_a_position_10m",
    "directory_bytes_a_position_100m_extrapolated",
    "directory_rebuild_whole",
    "directory_rebuild_wrong_answers",
    "directory_socket_p50_of_a_ray_call",
    "directory_socket_lookups_over_ray",
)
"""Figures there must be: one that is missing fails like one that does not hold."""


def run() -> dict[str, Any]:
    """Measure everything: ``{"bench", "machine", "figures": [{name, value, unit, target, holds}]}``."""
    return report("directory", figures(), EXPECTED)


def figures(*, cluster: bool = True) -> list[Figure]:
    """All figures. Without ``cluster`` nothing needs Ray."""
    found = [
        *directory_core.lookups(LOOKUP_POSITIONS),
        *directory_core.hints(),
        *directory_core.ingest(),
        *directory_core.shards(),
        *memory((1, 3, 10)),
        *rebuild(POSITIONS),
    ]
    if cluster:
        from . import directory_socket

        found.extend(directory_socket.figures())
    return found


def memory(millions: tuple[int, ...]) -> Iterator[Figure]:
    """Bytes a chain position at so many million positions x 5 groups on 8 holders, as growth of a fresh process."""
    grown = grown_apart(millions, VERSION_SPREAD)
    for point, at in zip(grown, millions, strict=True):
        yield figure(f"directory_bytes_a_position_{at}m", point["bytes_a_position"], "bytes", MEMORY_TARGET_BYTES)
    yield figure("directory_bytes_accounted_a_position", grown[-1]["accounted_a_position"], "bytes")
    yield figure("directory_blocks_a_run", grown[-1]["blocks_a_run"], "blocks")
    # The line through the last two points: what a process has beside its chains no longer counts.
    last, before = grown[-1], grown[-2]
    slope = (last["bytes"] - before["bytes"]) / (last["positions"] - before["positions"])
    at_100m = (last["bytes"] + slope * (100e6 - last["positions"])) / 100e6
    yield figure("directory_bytes_a_position_100m_extrapolated", at_100m, "bytes")
    wide = grown_apart(millions[:1], WIDE_SPREAD)[0]
    yield figure(f"directory_bytes_a_position_{millions[0]}m_wide_versions", wide["bytes_a_position"], "bytes")


def grown_apart(millions: tuple[float, ...], version_spread: int) -> list[dict[str, float]]:
    """Memory by positions, of a process that did nothing before: growth elsewhere hides in what was freed."""
    module = f"{__package__}.directory_memory"
    command = [sys.executable, "-m", module, ",".join(map(str, millions)), str(version_spread)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=MEMORY_TIMEOUT_S, check=True)
    found: list[dict[str, float]] = json.loads(ran.stdout)
    return found


def rebuild(positions: int) -> Iterator[Figure]:
    """A full shard is killed with SIGKILL and started again."""
    seen = directory_rebuild.rebuild(positions)
    yield figure("directory_rebuild_positions", seen["positions"], "positions")
    yield figure("directory_rebuild_process", seen["process_s"], "s")
    yield figure("directory_rebuild_whole", seen["whole_s"], "s")
    yield figure("directory_rebuild_processor_of_all_holders", seen["holders_processor_s"], "s")
    yield figure("directory_rebuild_processor_of_the_shard", seen["shard_processor_s"], "s")
    yield figure("directory_rebuild_answers_meanwhile", seen["answers"], "answers")
    yield figure("directory_rebuild_wrong_answers", seen["wrong"], "answers", 0.0)
