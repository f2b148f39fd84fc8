"""Laws of the links between real processes: what arrives is proven, and what may still arrive is known."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from kvfabric.transport.digest import checksum

from .hosts import bring_up, cut, needs_namespaces, two_hosts

SCRIPT = Path(__file__).with_name("peer_process.py")
SLOT_BYTES = 1 << 20
BIG = list(range(48))
SMALL = list(range(48, 248))
SEALED = 2
ZEROS = checksum(np.zeros(SLOT_BYTES, dtype=np.uint8)).hex()


class Peer:
    """Drives one ``peer_process``."""

    def __init__(self, kind: str, holder: str, incarnation: int, *, device: str = "lo", wrap: list[str] | None = None):
        command = [*(wrap or []), sys.executable, str(SCRIPT), "--kind", kind, "--holder", holder]
        command += ["--incarnation", str(incarnation), "--device", device]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.region = ""

    def ready(self) -> Peer:
        self.region = self.hear()
        return self

    def tell(self, verb: str, *arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, arguments]) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait(10)}"
        return json.loads(line)

    def ask(self, verb: str, *arguments: object) -> Any:
        self.tell(verb, *arguments)
        return self.hear()

    def pause(self) -> None:
        """Stop the peer with all its processes, and wait until every thread stands still."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while set(self.thread_states()) != {"T"}:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def thread_states(self) -> Iterator[str]:
        for stat in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                state, _, group, *_ = stat.read_text().rsplit(")", 1)[1].split()
                if int(group) == self.process.pid:
                    yield state

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        with self.process:
            self.process.kill()


Start = Callable[..., Peer]


@contextlib.contextmanager
def starting() -> Iterator[Start]:
    peers: list[Peer] = []

    def begin(*arguments: Any, **settings: Any) -> Peer:
        peers.append(Peer(*arguments, **settings))
        return peers[-1]

    try:
        yield begin
    finally:
        for peer in peers:
            peer.end()


@pytest.fixture
def start() -> Iterator[Start]:
    with starting() as begin:
        yield begin


@pytest.fixture(scope="module", params=["nixl", "isolated", "tcp", "shared_memory"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(kind: str) -> Iterator[tuple[Peer, Peer]]:
    """A source and a reader for all tests that leave them as they were."""
    with starting() as begin:
        yield pair_up(begin, kind)


@pytest.fixture(params=["nixl", "tcp", "shared_memory"])
def in_process(request: pytest.FixtureRequest) -> str:
    """The kinds that run in the holder's own process: where a test costs processes, those do."""
    return str(request.param)


@pytest.fixture(params=["nixl", "isolated", "tcp"])
def network(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pair_up(start: Start, kind: str) -> tuple[Peer, Peer]:
    """A source with sealed slots, and a reader; started side by side, since importing takes most of a test."""
    source, reader = start(kind, "source", 7), start(kind, "reader", 3)
    source.ready()
    reader.ready()
    source.ask("fill", BIG + SMALL)
    return source, reader


def pairs_of(slots: list[int], length: int = SLOT_BYTES) -> list[list[int]]:
    """Each source slot into the one at the other end of its pool."""
    return [[slot, slots[-1 - index], length] for index, slot in enumerate(slots)]


def wait_quiet(reader: Peer, tokens: list[int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not all(reader.ask("quiet", tokens)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_what_is_read_bears_the_sources_digest_and_version(pair: tuple[Peer, Peer]) -> None:
    source, reader = pair
    assert reader.ask("connect", source.region, 10) is None
    pairs = pairs_of(BIG) + pairs_of(SMALL, 3000)
    got = reader.ask("fetch", source.region, pairs, 10)
    headers = reader.ask("headers", source.region, BIG + SMALL, 10)
    assert got["failures"] == [None] * len(pairs)
    assert got["checksums"] == [digest for _, _, digest in headers] == source.ask("digests", BIG + SMALL)
    assert {state for _, state, _ in headers} == {SEALED}
    assert reader.ask("digests", [dst for _, dst, _ in pairs]) == got["checksums"]
    # Slots in any order, repeated, and none at all.
    some = [247, 3, 3, 48, 150]
    assert reader.ask("headers", source.region, some, 10) == [headers[slot] for slot in some]
    assert reader.ask("headers", source.region, [], 10) == []
    assert reader.ask("fetch", source.region, [], 10)["checksums"] == []
    source.ask("fill", [3])
    assert reader.ask("headers", source.region, [3], 10)[0][0] == headers[3][0] + 1


@pytest.mark.faults
def test_a_corrupted_byte_at_the_source_changes_the_digest(pair: tuple[Peer, Peer]) -> None:
    source, reader = pair
    source.ask("corrupt", 4)
    got = reader.ask("fetch", source.region, [[3, 3, SLOT_BYTES], [4, 4, SLOT_BYTES]], 10)
    recorded = [row[2] for row in reader.ask("headers", source.region, [3, 4], 10)]
    source.ask("corrupt", 4)  # flips the same bits back
    assert got["checksums"][0] == recorded[0]
    assert got["checksums"][1] != recorded[1]


@pytest.mark.faults
def test_a_read_during_a_rewrite_is_detected_by_version_and_digest(pair: tuple[Peer, Peer]) -> None:
    source, reader = pair
    source.ask("rewrite", 0)
    torn = undetected = 0
    for _ in range(20):
        before = reader.ask("headers", source.region, [0], 10)[0]
        digest = reader.ask("fetch", source.region, [[0, 0, SLOT_BYTES]], 10)["checksums"][0]
        after = reader.ask("headers", source.region, [0], 10)[0]
        if before == after and before[1] == SEALED:
            undetected += digest != before[2]
        else:
            torn += 1
    source.ask("stop_rewriting")
    assert torn > 0
    assert undetected == 0


def test_threads_share_a_link(pair: tuple[Peer, Peer]) -> None:
    source, reader = pair
    big, small = pairs_of(BIG), pairs_of(SMALL, 3000)
    shares = [big[:12], big[12:24], small[:100], small[100:], big[24:], small[50:60]]
    assert reader.ask("fetch_from_threads", source.region, shares, 5) == []


def test_pairs_that_fit_no_slot_are_refused_alone(pair: tuple[Peer, Peer]) -> None:
    source, reader = pair
    pairs = [[0, 0, SLOT_BYTES], [0, 1, SLOT_BYTES + 1], [0, 60, SLOT_BYTES], [248, 2, 1], [0, 248, 1], [1, 3, 0]]
    got = reader.ask("fetch", source.region, pairs, 10)
    assert got["failures"] == [None, "too_long", "too_long", "too_long", "too_long", None]
    assert got["tokens"] == []
    assert reader.ask("headers", source.region, [248], 10) == "too_long"


def other_incarnation(region: str) -> str:
    plain = msgpack.unpackb(base64.b64decode(region))
    plain["incarnation"] += 1
    return base64.b64encode(msgpack.packb(plain)).decode()


def test_another_incarnation_than_the_region_names_is_refused(pair: tuple[Peer, Peer]) -> None:
    source, reader = pair
    stale = other_incarnation(source.region)
    failure, detail = reader.ask("connect", stale, 10)
    assert failure == "refused"
    assert "incarnation 7" in detail
    assert reader.ask("fetch", stale, [[0, 0, 9]], 10)["failures"] == ["refused"]
    assert reader.ask("fetch", source.region, [[0, 0, 9]], 10)["failures"] == [None]


@pytest.mark.faults
def test_a_restarted_peer_under_its_old_name_is_read_in_its_new_life_and_a_closed_link_reads_nothing(
    start: Start, in_process: str
) -> None:
    source, reader = pair_up(start, in_process)
    assert reader.ask("fetch", source.region, pairs_of(BIG[:4]), 10)["failures"] == [None] * 4
    source.end()
    successor = start(in_process, "source", 8).ready()
    successor.ask("fill", [0])
    successor.ask("fill", [0])
    got = reader.ask("fetch", successor.region, [[0, 5, SLOT_BYTES]], 10)
    assert got["failures"] == [None]
    assert reader.ask("headers", successor.region, [0], 10) == [[2, SEALED, got["checksums"][0]]]
    # The old life is not mistaken for the new one.
    if in_process != "shared_memory":
        assert reader.ask("fetch", source.region, [[0, 6, SLOT_BYTES]], 5)["failures"][0] in {"peer_lost", "refused"}
    reader.ask("close")
    assert reader.ask("fetch", successor.region, [[0, 0, 9]], 5)["failures"] == ["unavailable"]
    assert reader.ask("headers", successor.region, [0], 5) == "unavailable"


@pytest.mark.faults
@pytest.mark.parametrize("network", ["nixl", "tcp"])
def test_a_peer_killed_in_mid_transfer_is_a_typed_failure_within_seconds(start: Start, network: str) -> None:
    source, reader = pair_up(start, network)
    assert reader.ask("connect", source.region, 10) is None
    reader.tell("fetch_until_failure", source.region, pairs_of(BIG), 60)
    for _ in range(3):
        assert reader.hear() == "fetching"
    source.process.kill()
    killed = time.monotonic()
    got = reader.hear()
    while got == "fetching":
        got = reader.hear()
    assert time.monotonic() - killed < 10
    assert set(got["failures"]) <= {None, "peer_lost"}
    assert "peer_lost" in got["failures"]
    assert wait_quiet(reader, got["tokens"], 10)


@pytest.mark.faults
def test_a_transfer_past_its_deadline_is_quarantined_until_it_is_quiet(start: Start, network: str) -> None:
    source, reader = pair_up(start, network)
    assert reader.ask("connect", source.region, 10) is None
    source.pause()
    got = reader.ask("fetch", source.region, pairs_of(BIG), 0.3)
    assert 0.3 <= got["took_s"] < 5
    assert "timed_out" in got["failures"]
    assert reader.ask("headers", source.region, [0], 0.2) == "timed_out"
    late = [pair[1] for pair, failure in zip(pairs_of(BIG), got["failures"], strict=True) if failure]
    if network != "tcp":
        assert got["quarantined"]
        assert not all(reader.ask("quiet", got["tokens"]))
        reader.ask("clear", got["quarantined"])
    else:
        assert got["tokens"] == []
        reader.ask("clear", late)
    source.resume()
    assert wait_quiet(reader, got["tokens"], 10)
    # What was asked for did arrive behind the deadline's back, and in quarantined slots only.
    after = dict(zip(late, reader.ask("digests", late), strict=True))
    time.sleep(0.2)
    assert reader.ask("digests", late) == list(after.values())
    changed = {slot for slot, digest in after.items() if digest != ZEROS}
    assert changed <= set(got["quarantined"])
    assert bool(changed) is (network != "tcp")
    assert reader.ask("fetch", source.region, pairs_of(BIG), 10)["failures"] == [None] * len(BIG)


@pytest.mark.faults
def test_a_fence_ends_transfers_that_would_still_write(start: Start) -> None:
    source, reader = pair_up(start, "nixl")
    assert reader.ask("connect", source.region, 10) is None
    source.pause()
    got = reader.ask("fetch", source.region, pairs_of(BIG), 0.3)
    assert got["tokens"]
    old = reader.region
    assert reader.ask("fence") is None
    assert reader.ask("quiet", got["tokens"]) == [True] * len(got["tokens"])
    assert reader.ask("region") != old
    reader.ask("clear", BIG)
    before = reader.ask("digests", BIG)
    source.resume()
    time.sleep(0.5)
    assert reader.ask("digests", BIG) == before
    # The reader itself is as good as new, also as a source.
    other = start("nixl", "other", 1).ready()
    other.ask("fill", [0])
    assert reader.ask("fetch", other.region, [[0, 0, SLOT_BYTES]], 10)["failures"] == [None]
    assert other.ask("fetch", reader.ask("region"), [[0, 1, SLOT_BYTES]], 10)["failures"] == [None]


def test_a_region_of_another_kind_is_refused(start: Start, kind: str, pair: tuple[Peer, Peer]) -> None:
    source, reader = pair
    other = start("tcp" if kind != "tcp" else "shared_memory", "source", 7).ready()
    assert reader.ask("fetch", other.region, [[0, 0, 9]], 5)["failures"] == ["refused"]
    assert reader.ask("fetch", source.region, [[0, 0, 9]], 5)["failures"] == [None]


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    with two_hosts() as names:
        yield names


@pytest.mark.faults
@needs_namespaces
def test_a_cut_link_is_a_typed_failure_and_reads_go_on_when_it_is_back(
    start: Start, namespaces: tuple[str, str]
) -> None:
    here, there = namespaces
    source = start("nixl", "source", 7, device=here, wrap=["ip", "netns", "exec", here])
    reader = start("nixl", "reader", 3, device=there, wrap=["ip", "netns", "exec", there])
    source.ready()
    reader.ready()
    source.ask("fill", BIG)
    assert reader.ask("connect", source.region, 10) is None
    reader.tell("fetch_until_failure", source.region, pairs_of(BIG), 60)
    for _ in range(3):
        assert reader.hear() == "fetching"
    cut(here)
    was_cut = time.monotonic()
    got = reader.hear()
    while got == "fetching":
        got = reader.hear()
    assert time.monotonic() - was_cut < 20
    assert set(got["failures"]) <= {None, "peer_lost"}
    assert wait_quiet(reader, got["tokens"], 10)
    bring_up(here)
    bring_up(there)
    reader.ask("clear", BIG)
    before = reader.ask("digests", BIG)
    time.sleep(0.5)
    assert reader.ask("digests", BIG) == before
    assert reader.ask("fetch", source.region, pairs_of(BIG), 20)["failures"] == [None] * len(BIG)
