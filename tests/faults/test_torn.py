"""Bytes that change behind a holder's back: what is torn or rotten is noticed, and never delivered."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvfabric import Lease, LeaseRefused, Reason, Session, Status
from kvfabric.fabric.arena import Arena
from kvfabric.fabric.kinds import Cause
from kvfabric.transport.memfd import map_read_write

from ..actors.stories import content, eventually
from .scene import NEEDED, RESUME, Scene, arena_of, big_prompt, needed, read

pytestmark = pytest.mark.faults


def writable(holder: dict[str, Any], like: Arena) -> Arena:
    """A holder's arena, mapped for writing behind its back."""
    for descriptor in Path(f"/proc/{holder['pid']}/fd").iterdir():
        if "kvfabric-arena" in str(descriptor.readlink()):
            with descriptor.open("rb+", buffering=0) as found:
                return map_read_write(os.dup(found.fileno()), like.layout)
    raise AssertionError("the holder has no arena")


def slots_of(session: Session, tokens: list[int], group: str) -> dict[int, int]:
    """Where a node's copy of a prompt lies: index -> slot."""
    lease = session.acquire(tokens).lease
    assert lease is not None
    with lease:
        return {index: lease.views[group].slot(index) for index in lease.views[group]}


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Do something over and over in a thread."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def torn_transfers(scene: Scene, rounds: int) -> None:
    """A writer spoils a slot and puts it right again, header untouched, while another node reads."""
    source, reader = scene.session(0), scene.session(1)
    arena = writable(scene.holder(0), arena_of(source))
    before = retries(scene)
    granted: list[int] = []

    def torn(granted: list[int]) -> int:
        """Where the writer hits between two reads is up to the machine."""
        return retries(scene) - before + sum(tokens < RESUME for tokens in granted)

    number = 0
    while number < rounds or (number < 20 * rounds and not torn(granted)):
        number += 1
        tokens = big_prompt(f"torn {number}")
        scene.publish(source, tokens)
        scene.known(reader, tokens)
        payload = arena.payload(slots_of(source, tokens, "csa")[number % 32])

        def flicker(payload: Any = payload) -> None:
            payload[: 1 << 16] ^= 0xFF
            time.sleep(0.002)
            payload[: 1 << 16] ^= 0xFF
            time.sleep(0.004)

        with beside(flicker):
            answer = reader.acquire(tokens)
            granted.append(read(answer, reader, tokens))
        if granted[-1] < RESUME:
            assert reason_of(answer.cause) in {Reason.CHECKSUM_MISMATCH, Reason.TRANSFER_FAILED, Reason.VERSION_CHANGED}
    assert torn(granted) > 0, "nothing was torn"


def reason_of(cause: Cause | None) -> Reason | None:
    return None if cause is None else cause.reason


def retries(scene: Scene) -> int:
    """How often a transfer brought other bytes than were promised and was tried again."""
    return int(scene.holder(1)["counters"].get("transfer_retries", 0))


def test_transfers_of_slots_that_a_writer_spoils_meanwhile_deliver_nothing_torn(scene: Scene) -> None:
    torn_transfers(scene, 6)
    resumed_afterwards(scene)


@pytest.mark.long
def test_many_transfers_of_slots_that_a_writer_spoils_meanwhile(scene: Scene) -> None:
    torn_transfers(scene, 100)
    resumed_afterwards(scene)


def resumed_afterwards(scene: Scene) -> None:
    """Without the writer all of it arrives."""
    source, reader, tokens = scene.session(0), scene.session(1), big_prompt("calm")
    scene.publish(source, tokens)
    scene.known(reader, tokens)
    answer = reader.acquire(tokens)
    assert answer.status is Status.FULL_HIT
    assert read(answer, reader, tokens) == RESUME


def torn_reads(scene: Scene, for_s: float) -> None:
    """Readers whose lease was given back read on, while stores evict and rewrite the very slots."""
    session, readers = scene.session(0), scene.session(0)
    torn = whole = delivered_wrong = number = 0
    reasons: set[Reason] = set()
    until = time.monotonic() + for_s
    while time.monotonic() < until or not (torn and whole):
        assert time.monotonic() < until + 60.0, (torn, whole)
        number += 1
        tokens = big_prompt(f"evicted {number}")
        scene.publish(session, tokens)
        granted = readers.acquire(tokens).lease
        assert granted is not None
        reader = Lease.open(granted.token())
        granted.release()
        right = [content(tokens, "csa", i, 2 << 20) for i in NEEDED["csa"]]
        others = [big_prompt(f"evicts {number} {n}") for n in range(2)]
        todo = [(other, needed(session.model, other)) for other in others]

        def evict(todo: list[Any] = todo) -> None:
            if todo:
                other, objects = todo.pop()
                session.publish(other, objects)

        def read_on(reader: Lease = reader, right: list[Any] = right) -> None:
            nonlocal whole, torn, delivered_wrong
            try:
                with reader.read("csa") as views:
                    equal = all(np.array_equal(views[i], right[i]) for i in views)
                whole += 1
                delivered_wrong += not equal
            except LeaseRefused as refused:
                reasons.add(refused.reason)
                torn += 1

        read_on()  # nothing is rewritten yet
        with beside(evict):
            for _ in range(6):
                read_on()
        reader.close()
    assert delivered_wrong == 0
    assert reasons == {Reason.VERSION_CHANGED}


def test_reads_of_slots_that_are_rewritten_meanwhile_are_refused_at_their_end(scene: Scene) -> None:
    torn_reads(scene, 1.0)


@pytest.mark.long
def test_many_reads_of_slots_that_are_rewritten_meanwhile(scene: Scene) -> None:
    torn_reads(scene, 60.0)


@pytest.mark.parametrize("group", ["csa", "idx", "swa"])
def test_a_corrupted_byte_at_the_source_cuts_the_prefix_there_and_a_new_store_heals_it(
    scene: Scene, group: str
) -> None:
    source, reader = scene.session(0), scene.session(1)
    tokens = big_prompt(f"rotten {group}")
    scene.publish(source, tokens)
    scene.known(reader, tokens)
    slots = slots_of(source, tokens, group)
    index = max(slots)
    writable(scene.holder(0), arena_of(source)).payload(slots[index])[7] ^= 0x10
    answer = reader.acquire(tokens)
    assert read(answer, reader, tokens) < RESUME
    assert reason_of(answer.cause) is Reason.CHECKSUM_MISMATCH
    assert answer.cause is not None
    assert answer.cause.group == group
    # The source knows it now, and does not serve it at home either.
    home = source.acquire(tokens)
    assert read(home, source, tokens) < RESUME
    scene.publish(source, tokens)
    answer = eventually(lambda: reader.acquire(tokens), lambda answer: answer.lease is not None)
    assert read(answer, reader, tokens) == RESUME
