"""A holder that stands still past every deadline and wakes: its replacement serves, and nothing it does counts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric, LeaseRefused, Reason, Session, Status

from ..actors.stories import eventually
from .conftest import big_spec
from .scene import RESUME, Scene, arena_of, big_prompt, in_mid_transfer, read

pytestmark = pytest.mark.faults

GRANT_S = 4.0
"""Short, as tests wait for it to run out; long enough for a busy machine to renew the right of who does not stand still."""


@pytest.fixture
def brief(fabric: Fabric) -> Iterator[Scene]:
    """A fabric whose right to grant runs out soon."""
    with kvfabric.launch(big_spec(grant_s=GRANT_S), name="zombies") as running, Scene(running) as scene:
        scene.whole()
        yield scene


def group_of(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(int(child) for child in children)]


@contextlib.contextmanager
def standing_still(holder: dict[str, Any]) -> Iterator[list[int]]:
    """The holder's process and its link's, stopped until told."""
    pids = group_of(holder["pid"])
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def stop(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def whole(session: Session, tokens: list[int]) -> None:
    """All of it is granted, and right. On a busy machine so short a right to grant may have run out for a moment."""

    def granted() -> int:
        try:
            return read(session.acquire(tokens), session, tokens)
        except LeaseRefused as refused:
            if refused.reason is not Reason.HOLDER_LOST:
                raise
            return 0

    eventually(granted, lambda tokens: tokens == RESUME)


def test_a_source_that_stands_still_in_mid_transfer_is_replaced_and_reaches_nothing_when_it_wakes(brief: Scene) -> None:
    source, reader = brief.session(0), brief.session(1)
    tokens = big_prompt("zombie source")
    brief.publish(source, tokens)
    brief.known(reader, tokens)
    old_lease = source.acquire(tokens, lease_s=60.0).lease
    assert old_lease is not None
    zombie = brief.holder(0)
    with standing_still(zombie) as pids:
        answer = in_mid_transfer(reader, tokens, lambda: stop(pids), arena_of(reader))
        late = read(answer, reader, tokens)
        if late < RESUME:
            assert answer.cause is not None
            assert answer.cause.reason in {Reason.TRANSFER_FAILED, Reason.HOLDER_LOST}
        eventually(old_lease.check, lambda reason: reason is Reason.HOLDER_LOST, within_s=10.0)
        successor = eventually(
            lambda: next((h for h in brief.holders(0) if h["incarnation"] > zombie["incarnation"]), None), within_s=30.0
        )
        assert successor is not None
        fresh = brief.session(0)
        eventually(lambda: fresh.probe(big_prompt("nobody's")).cause, lambda cause: cause is None)
        # The reader's slots are used anew while the old transfer could still write to them.
        others = [big_prompt(f"after the zombie {number}") for number in range(2)]
        for other in others:
            brief.publish(fresh, other)
            brief.known(reader, other)
            whole(reader, other)
    # It wakes: nobody reads what it writes, nobody grants by it, and it is ended.
    assert old_lease.check() is Reason.HOLDER_LOST
    for _ in range(5):
        whole(reader, others[-1])
        time.sleep(0.2)
    eventually(lambda: [pid for pid in pids if Path(f"/proc/{pid}").exists()], lambda left: not left)
    assert brief.holder(0)["pid"] == successor["pid"]
    answer = reader.acquire(tokens)
    assert read(answer, reader, tokens) <= late
    if late < RESUME:
        assert answer.status is not Status.FULL_HIT
    brief.publish(fresh, tokens)
    brief.known(reader, tokens)
    whole(reader, tokens)
    brief.balanced()


def test_a_reader_that_stands_still_grants_nothing_when_it_wakes_after_its_right_ran_out(brief: Scene) -> None:
    source, reader = brief.session(0), brief.session(1)
    tokens = big_prompt("zombie reader")
    brief.publish(source, tokens)
    brief.known(reader, tokens)
    zombie = brief.holder(1)
    with standing_still(zombie) as pids:
        answer = in_mid_transfer(reader, tokens, lambda: stop(pids), arena_of(reader))
        assert (answer.tokens, answer.lease) == (0, None)
        assert answer.cause is not None
        assert answer.cause.reason is Reason.HOLDER_LOST
        eventually(lambda: [h for h in brief.holders(1) if h["incarnation"] > zombie["incarnation"]], within_s=30.0)
    eventually(lambda: [pid for pid in pids if Path(f"/proc/{pid}").exists()], lambda left: not left)
    brief.whole()
    brief.balanced()
    fresh = brief.session(1)
    brief.known(fresh, tokens)
    whole(fresh, tokens)
    brief.balanced()
