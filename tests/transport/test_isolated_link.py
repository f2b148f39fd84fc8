"""Laws of the link in a process of its own: what ends there does not end the holder."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvfabric.fabric.arena import ArenaLayout, PoolLayout
from kvfabric.fabric.kinds import WireError
from kvfabric.transport import isolated_link, link_wire
from kvfabric.transport.digest import checksum
from kvfabric.transport.isolated_link import IsolatedLink
from kvfabric.transport.link import LinkError, LinkFailure, Pair, PairResult, QuietToken
from kvfabric.transport.memfd import ArenaMemory
from kvfabric.transport.nixl_settings import NixlSettings

LAYOUT = ArenaLayout([PoolLayout(0, 0, 8, 1 << 20)])
PAIRS = [Pair(slot, slot, 1 << 20) for slot in range(8)]
TCP = NixlSettings(transports="tcp", devices="lo")


def start(holder: str, **settings: str) -> IsolatedLink:
    memory = ArenaMemory.create(LAYOUT, 1)
    memory.arena.bytes[LAYOUT.offset_of(0) :] = len(holder)
    link = IsolatedLink.start(memory, holder=holder, incarnation=1, suffix=secrets.token_hex(4), settings=TCP)
    assert isinstance(link, IsolatedLink)
    return link


@pytest.fixture(scope="module")
def links() -> Iterator[tuple[IsolatedLink, IsolatedLink]]:
    """A source and a reader, each with its child; tests end the children, and leave the links working."""
    with ThreadPoolExecutor() as pool:
        source, reader = pool.map(start, ("source", "reader"))
    yield source, reader
    source.close()
    reader.close()


def pid_of(link: IsolatedLink) -> int:
    assert link._child is not None
    return link._child.process.pid


def wait_until(holds: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def failures(results: list[PairResult]) -> set[LinkFailure | None]:
    return {result.failure for result in results}


@pytest.mark.faults
def test_a_killed_child_costs_typed_failures_and_is_started_again(links: tuple[IsolatedLink, IsolatedLink]) -> None:
    source, reader = links
    before, restarts = source.region(), (source.restarts, reader.restarts)
    assert failures(reader.fetch(before, PAIRS, 10)) == {None}
    os.kill(pid_of(reader), signal.SIGKILL)
    assert failures(reader.fetch(before, PAIRS, 10)) <= {LinkFailure.UNAVAILABLE}
    assert wait_until(lambda: reader.restarts == restarts[1] + 1)
    assert failures(reader.fetch(before, PAIRS, 10)) == {None}
    # The source's child ends as well; peers ask for its region again.
    os.kill(pid_of(source), signal.SIGABRT)
    assert wait_until(lambda: source.restarts == restarts[0] + 1)
    assert source.region().address["agent"] != before.address["agent"]
    assert failures(reader.fetch(before, PAIRS, 5)) <= {LinkFailure.PEER_LOST, LinkFailure.REFUSED}
    results = reader.fetch(source.region(), PAIRS, 10)
    assert {result.checksum for result in results} == {checksum(np.full(1 << 20, 6, dtype=np.uint8))}


@pytest.mark.faults
def test_a_child_that_does_not_answer_is_ended_and_proves_quiet(
    links: tuple[IsolatedLink, IsolatedLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_link, "ANSWER_GRACE_S", 0.2)
    source, reader = links
    restarts = reader.restarts
    assert reader.connect(source.region(), 10) is None
    os.kill(pid_of(reader), signal.SIGSTOP)
    results = reader.fetch(source.region(), PAIRS, 0.2)
    assert failures(results) == {LinkFailure.UNAVAILABLE}
    assert all(result.token is None for result in results)
    assert "did not answer" in results[0].detail
    assert wait_until(lambda: reader.restarts == restarts + 1)
    assert failures(reader.fetch(source.region(), PAIRS, 10)) == {None}


@pytest.mark.faults
def test_tokens_of_an_ended_child_are_quiet_and_not_mistaken_for_another_ones(
    links: tuple[IsolatedLink, IsolatedLink],
) -> None:
    source, reader = links
    assert reader.connect(source.region(), 10) is None
    os.kill(pid_of(source), signal.SIGSTOP)
    first = reader.fetch(source.region(), PAIRS, 0.2)
    tokens = {result.token for result in first if result.token is not None}
    assert tokens
    assert not any(reader.quiet(token) for token in tokens)
    assert reader.fence() is None
    assert all(reader.quiet(token) for token in tokens)
    second = reader.fetch(source.region(), PAIRS, 0.2)
    assert tokens.isdisjoint({result.token for result in second})
    assert reader.fence() is None
    reader._memory.arena.bytes[LAYOUT.offset_of(0) :] = 0
    os.kill(pid_of(source), signal.SIGCONT)
    time.sleep(0.3)
    assert not reader._memory.arena.bytes[LAYOUT.offset_of(0) :].any()
    assert wait_until(lambda: failures(reader.fetch(source.region(), PAIRS, 5)) == {None})


@pytest.mark.faults
def test_a_stopped_owner_outlives_a_reader_killed_in_mid_transfer(
    links: tuple[IsolatedLink, IsolatedLink],
) -> None:
    source, reader = links
    assert reader.connect(source.region(), 10) is None
    os.kill(pid_of(source), signal.SIGSTOP)
    reader.fetch(source.region(), PAIRS, 0.2)
    reader.fence()
    os.kill(pid_of(source), signal.SIGCONT)

    # UCX may or may not abort the source's child now; its holder reads on either way.
    def served() -> bool:
        return failures(reader.fetch(source.region(), PAIRS, 5)) == {None}

    assert wait_until(served)


HOLDER = """
import secrets, sys
from kvfabric.fabric.arena import ArenaLayout, PoolLayout
from kvfabric.fabric.kinds import WireError
from kvfabric.transport.isolated_link import IsolatedLink
from kvfabric.transport.memfd import ArenaMemory
memory = ArenaMemory.create(ArenaLayout([PoolLayout(0, 0, 8, 1 << 20)]), int(sys.argv[1]))
link = IsolatedLink.start(memory, holder="h", incarnation=1, suffix=secrets.token_hex(4))
print(link._child.process.pid, flush=True)
sys.stdin.read()
if sys.argv[2] == "close":
    link.close()
"""


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.faults
@pytest.mark.parametrize("ending", ["kill", "close", "drop", "interrupt"])
def test_the_child_ends_with_its_holder_however_that_ends(ending: str) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "1", ending],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    assert alive(child)
    if ending == "kill":
        holder.kill()
    if ending == "interrupt":
        os.killpg(holder.pid, signal.SIGINT)  # Ctrl-C reaches the whole group
    _, noise = holder.communicate(timeout=20)
    assert wait_until(lambda: not alive(child), 10)
    assert "link_process" not in noise
    if ending in {"close", "drop"}:
        assert (noise, holder.returncode) == ("", 0)


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_link_that_cannot_start_says_why_and_leaves_no_child() -> None:
    before = children()
    memory = ArenaMemory.create(LAYOUT, 1)
    error = IsolatedLink.start(
        memory, holder="h", incarnation=1, suffix="x", settings=NixlSettings(backend="CARRIER_PIGEON")
    )
    assert isinstance(error, LinkError)
    assert error.failure is LinkFailure.UNAVAILABLE
    assert "CARRIER_PIGEON" in error.detail
    assert children() <= before


def test_results_survive_the_wire() -> None:
    pairs = [Pair(1, 2, 3), Pair(4, 5, 6), Pair(7, 8, 9)]
    results = [
        PairResult(2, b"x" * 16),
        PairResult(5, LinkFailure.TIMED_OUT, "late", QuietToken(7)),
        PairResult(8, LinkFailure.PEER_LOST, "gone"),
    ]
    assert link_wire.unpack_pairs(link_wire.pack_pairs(pairs)) == pairs
    assert link_wire.unpack_pairs(link_wire.pack_pairs([])) == []
    packed = link_wire.pack_reply(None, link_wire.pack_results(results))
    error, value = link_wire.unpack_reply(packed)
    assert error is None
    assert link_wire.unpack_results(value, pairs) == results
    for junk in (b"", b"\xc1", b"\x93\x01\x02\x03"):
        with pytest.raises(WireError):
            link_wire.unpack_reply(junk)
        with pytest.raises(WireError):
            link_wire.unpack_request(junk)
