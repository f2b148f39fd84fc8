"""kill -9 of whoever takes part: the answer is right, nothing is lost, and the same request succeeds afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric, FabricError, Reason, Session, Status
from kvfabric.actors import ray_api
from kvfabric.actors.supervisor import actor_name

from ..actors.stories import content, eventually, objects, prompt, spec, wrong_bytes
from .conftest import NODES, big_spec
from .scene import RESUME, TOKENS, Scene, arena_of, big_prompt, in_mid_transfer, kill, read

pytestmark = pytest.mark.faults

TRIES = 6
"""A busy machine may strike too late: then the transfer was over, and the next one is struck."""


def struck(scene: Scene, name: str, victim: int, others: int, *, least: int = 1) -> Iterator[tuple[list[int], Any]]:
    """Transfers from node 0 to node 1, with a holder killed in the middle of each; those that it cut."""
    cut = 0
    for number in range(TRIES):
        tokens = big_prompt(f"{name} {number}")
        source, reader = scene.session(0), scene.session(1)
        scene.publish(source, tokens)
        scene.known(reader, tokens)
        before = scene.holder(victim)
        answer = in_mid_transfer(reader, tokens, kill(before), arena_of(reader))
        if read(answer, reader, tokens) < RESUME:
            cut += 1
            yield tokens, answer
        scene.whole()
        assert scene.holder(victim)["incarnation"] > before["incarnation"]
        assert scene.holder(others)["slots_lost"] == 0
        if cut == least:
            return
    pytest.fail(f"none of {TRIES} strikes hit a transfer")


def resumed_whole(scene: Scene, tokens: list[int]) -> None:
    """The same from the beginning, without a fault: all of it arrives."""
    source, reader = scene.session(0), scene.session(1)
    scene.publish(source, tokens)
    scene.known(reader, tokens)
    answer = eventually(lambda: reader.acquire(tokens), lambda answer: answer.lease is not None)
    assert answer.status is Status.FULL_HIT
    assert read(answer, reader, tokens) == RESUME


def of_a_killed_source(scene: Scene, least: int) -> None:
    for tokens, answer in struck(scene, "source", victim=0, others=1, least=least):
        # What had arrived and was proven may be used; the rest is not there, and the cause says why.
        assert answer.status in {Status.MISS, Status.PARTIAL_HIT}
        assert answer.cause is not None
        assert answer.cause.reason in {Reason.HOLDER_LOST, Reason.TRANSFER_FAILED}
        scene.balanced()
    scene.whole()
    resumed_whole(scene, tokens)


def of_a_killed_reader(scene: Scene, least: int) -> None:
    for tokens, answer in struck(scene, "reader", victim=1, others=0, least=least):
        assert (answer.tokens, answer.lease) == (0, None)
        assert answer.cause is not None
        assert answer.cause.reason is Reason.HOLDER_LOST
        scene.balanced()  # the source let go of what it had pinned
        assert read(scene.session(0).acquire(tokens), scene.session(0), tokens) == RESUME
    scene.whole()
    resumed_whole(scene, tokens)


def test_a_source_killed_in_mid_transfer_costs_a_shorter_prefix_and_nothing_else(scene: Scene) -> None:
    of_a_killed_source(scene, 1)


def test_a_reader_killed_in_mid_transfer_leaves_no_pin_at_its_source(scene: Scene) -> None:
    of_a_killed_reader(scene, 1)
