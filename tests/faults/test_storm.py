"""Many sessions that acquire, abandon and renew while evictions run: no wrong byte, no pin left, no slot lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfabric
from kvfabric import Fabric

from ..actors.stories import spec
from . import storm
from .conftest import NODES
from .scene import Scene

pytestmark = pytest.mark.faults

PROCESSES, SESSIONS = 8, 8
SLOTS = 40
"""Ten prompts' worth, of the 24 that are asked for."""


@pytest.fixture(scope="module")
def crowded(fabric: Fabric) -> Iterator[Fabric]:
    slots = dict.fromkeys(("csa", "tail", "idx", "swa"), SLOTS)
    brief = spec(slots=slots, node_resource=NODES, transport={"links": ["shared_memory", "nixl"]})
    with kvfabric.launch(brief, name="storm") as running:
        yield running


def storm_for(running: Fabric, for_s: float, seed: int) -> Counter[str]:
    """What came of it, over all processes."""
    with Scene(running) as scene:
        scene.whole()
        order = {
            "info": running.info().encode().hex(),
            "nodes": scene.nodes,
            "for_s": for_s,
            "seed": seed,
            "processes": PROCESSES,
            "sessions": SESSIONS,
        }
        ran = subprocess.run(
            [sys.executable, Path(storm.__file__)],
            input=json.dumps(order) + "\n",
            capture_output=True,
            text=True,
            timeout=for_s + 120,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        told = [Counter(json.loads(line)) for line in ran.stdout.splitlines()]
        assert len(told) == PROCESSES
        scene.balanced()
        return sum(told, Counter())


def laws_hold(came: Counter[str]) -> None:
    sys.stdout.write(json.dumps(came) + "\n")
    assert came["wrong"] == 0
    assert came["raised"] == 0
    for outcome in ("granted", "stored", "abandoned", "renewed"):
        assert came[outcome] > PROCESSES, came
    assert came["stored"] * 4 > 2 * SLOTS, "nothing had to be evicted"


def test_sixty_four_sessions_meet_no_wrong_byte_and_leave_nothing_behind(crowded: Fabric) -> None:
    laws_hold(storm_for(crowded, 4.0, 1))


@pytest.mark.long
def test_sixty_four_sessions_meet_no_wrong_byte_in_half_a_minute(crowded: Fabric) -> None:
    laws_hold(storm_for(crowded, 30.0, 2))
