"""Whole holders on two hosts, and the cable between them is pulled in mid transfer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from kvfabric.actors.info import FabricInfo
from kvfabric.actors.spec import FabricSpec
from kvfabric.fabric import wire
from kvfabric.fabric.messages import Member

from ..actors.stories import eventually, spec
from ..transport.hosts import HOSTS, bring_up, cut, needs_namespaces, two_hosts
from . import node_process
from .conftest import BIG_GROUPS
from .scene import EVEN, RESUME

pytestmark = [pytest.mark.faults, needs_namespaces]

NODES = ("a" * 40, "b" * 40)
DIRECTORY = "directory:0"
RATE = "1gbit"
"""Of the cable: 64 MiB take half a second."""
TIMEOUT_S = 3.0
SLOTS = (100, 36)
"""The reader has room for one prompt, so that its slots are used anew; the source keeps what is pinned beside the next."""


class Process:
    """One process on a host."""

    def __init__(self, namespace: str, *arguments: str) -> None:
        command = ["ip", "netns", "exec", namespace, sys.executable, node_process.__file__, *arguments]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, *what: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(what) + "\n")
        self.popen.stdin.flush()

    def hear(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"the process ended with {self.popen.wait(10)}"
        return json.loads(line)

    def ask(self, *what: Any) -> Any:
        self.tell(*what)
        return self.hear()

    def end(self) -> None:
        with self.popen:
            self.popen.kill()


class Hosts:
    """A fabric over two hosts: a holder and a worker on each, the directory with the second."""

    def __init__(self, namespaces: tuple[str, str], ends: ExitStack) -> None:
        self.namespaces = namespaces
        self._ends = ends
        self.spec = FabricSpec.load(
            spec(
                model={"name": "big", "groups": BIG_GROUPS},
                transport={"links": ["nixl"], "nixl_transports": "tcp", "transfer_timeout_s": TIMEOUT_S},
            )
        )
        places = [(0, f"holder:{NODES[0][:16]}:0"), (1, f"holder:{NODES[1][:16]}:0"), (1, DIRECTORY)]
        started = [self._start(place, address) for place, address in places]
        self.raw = [process.hear() for process in started]
        self.holders, self.directory = started[:2], started[2]
        for process in started:
            process.ask("members", self.raw)
        members = tuple(wire.decode_plain(Member, bytes.fromhex(raw)) for raw in self.raw)
        info = FabricInfo("hosts", self.spec, "v1", members, "").encode().hex()
        self.workers = [self._run(namespace, "worker") for namespace in namespaces]
        for worker, node in zip(self.workers, NODES, strict=True):
            assert worker.ask(info, node) == "ready"

    def _run(self, namespace: str, *arguments: str) -> Process:
        process = Process(namespace, *arguments)
        self._ends.callback(process.end)
        return process

    def _start(self, place: int, address: str) -> Process:
        setup = {
            "fabric": "hosts",
            "address": address,
            "incarnation": 1,
            "node": NODES[place],
            "host": HOSTS[place],
            "spec": self.spec.text,
            "shards": [0],
            "directory": DIRECTORY,
            "clock_s": None,
            "unreachable": [],
            "slots": dict.fromkeys(("csa", "tail", "idx", "swa"), SLOTS[place]),
        }
        role = "directory" if address == DIRECTORY else "holder"
        return self._run(self.namespaces[place], role, json.dumps(setup))

    def known(self, number: int) -> None:
        eventually(lambda: self.workers[1].ask("probe", number), lambda tokens: tokens == RESUME)

    def balanced(self, within_s: float = 30.0) -> None:
        def books() -> list[Any]:
            found = [holder.ask("status", None) for holder in self.holders]
            wrong: list[Any] = [(h["address"], key, h[key]) for h in found for key in EVEN if h[key]]
            return wrong + [p for h in found for p in h["pools"] if p["free"] + p["evictable"] != p["slots"]]

        eventually(books, lambda wrong: not wrong, within_s)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as namespaces, ExitStack() as ends:
        for name in namespaces:
            limit = f"qdisc add dev {name} root tbf rate {RATE} burst 1mb latency 50ms"
            subprocess.run(["ip", "netns", "exec", name, "tc", *limit.split()], check=True)
        yield Hosts(namespaces, ends)


def cut_in_mid_transfer(hosts: Hosts, number: int) -> dict[str, Any]:
    reader = hosts.workers[1]
    reader.tell("acquire_and_tell_of_first_bytes", number)
    assert reader.hear() == "arriving"
    cut(hosts.namespaces[0])
    return dict(reader.hear())


def cuts(hosts: Hosts, rounds: int) -> None:
    source, reader = hosts.workers
    for number in range(rounds):
        first = 3 * number
        assert source.ask("publish", first) is None
        hosts.known(first)
        told = cut_in_mid_transfer(hosts, first)
        assert (told["tokens"], told["wrong"]) == (0, 0)
        assert told["status"] in {"MISS", "PARTIAL_HIT"}
        assert told["cause"] in {"transfer_failed", "holder_lost"}
        assert told["took_s"] < 4 * TIMEOUT_S + 5.0
        # The destination slots are used anew while the cable is out: all of them are needed.
        reused = first + 1
        eventually(partial(reader.ask, "publish", reused), lambda refused: refused is None, within_s=20.0)
        for name in hosts.namespaces:
            bring_up(name)
        # Whatever was still on its way has nowhere to go: what is leased stays what was stored.
        for _ in range(5):
            told = reader.ask("acquire", reused)
            assert (told["status"], told["tokens"], told["wrong"]) == ("FULL_HIT", RESUME, 0)
            time.sleep(0.2)
        # And the same transfer over the cable that is back brings all of it.
        again = first + 2
        assert source.ask("publish", again) is None
        eventually(
            partial(reader.ask, "acquire", again),
            lambda told: told["tokens"] == RESUME and told["wrong"] == 0,
            within_s=30.0,
        )
        hosts.balanced()


def test_a_cable_pulled_in_mid_transfer_costs_a_recompute_and_reaches_no_slot_that_is_used_anew(hosts: Hosts) -> None:
    cuts(hosts, 1)


@pytest.mark.long
def test_a_cable_pulled_again_and_again(hosts: Hosts) -> None:
    cuts(hosts, 10)
