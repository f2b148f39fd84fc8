"""A real holder in a process of its own, with a disk, and a session of this process with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvfabric.actors.answer import Answer
from kvfabric.actors.client import HolderClient, request_id
from kvfabric.actors.info import FabricInfo
from kvfabric.actors.session import Session
from kvfabric.actors.spec import FabricSpec
from kvfabric.fabric import wire
from kvfabric.fabric.messages import Done, Member, Objects, Purge, StatusReply, StatusRequest, SwapOut
from kvfabric.transport.disk.protocol import Health

MODEL = {
    "name": "hybrid",
    "weights": "v1",
    "groups": [
        {"name": "csa", "kind": "compressed_history", "block_tokens": 16, "ratio": 4, "block_bytes": 5000},
        {
            "name": "tail",
            "kind": "uncompressed_tail",
            "of": "csa",
            "block_tokens": 4,
            "overlap_tokens": 4,
            "block_bytes": 700,
        },
        {"name": "idx", "kind": "indexer", "of": "csa", "block_tokens": 16, "block_bytes": 96},
        {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 16, "block_bytes": 4096},
    ],
}
NODE = "a" * 40


def prompt(number: int, tokens: int = 70) -> list[int]:
    return [(number * 1_000_003 + 7919 * i) % 50_000 for i in range(tokens)]


def content(tokens: list[int], group: int, index: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng([*tokens[:4], group, index]).integers(0, 256, nbytes, dtype=np.uint8)


class Life:
    """One life of the holder, and a session of this process with it. Its disk is not scrubbed unless ``disk`` says so."""

    def __init__(
        self, disk: dict[str, Any], incarnation: int, weights: str = "v1", node: str = NODE, **spec: Any
    ) -> None:
        quiet = {"scrub_bytes_per_s": None, **disk}  # or it finds damage before the reader that a test has in mind
        self.spec = FabricSpec.load(
            {"model": MODEL | {"weights": weights}, "disk": quiet, "transport": {"links": ["tcp"]}} | spec
        )
        setup = {
            "fabric": f"test{os.getpid()}",
            "address": f"holder:{node[:16]}:0",
            "incarnation": incarnation,
            "node": node,
            "host": "127.0.0.1",
            "spec": self.spec.text,
            "shards": [0],
            "directory": "directory:0",
            "weights": weights,
            "clock_s": None,
            "unreachable": [],
            "slots": self.spec.slots,
        }
        script = Path(__file__).with_name("holder_process.py")
        self.process = subprocess.Popen(
            [sys.executable, script, json.dumps(setup)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.member: Member = wire.decode_plain(Member, bytes.fromhex(self.process.stdout.readline()))
        info = FabricInfo("test", self.spec, weights, (self.member,), node)
        self.session = Session(lambda: info, name="test")
        self.client = HolderClient(self.member)
        self._disk_known()

    def _disk_known(self, within_s: float = 30.0) -> None:
        """Wait until the disk's process has told how its disk is: on a busy machine that may take a while."""
        deadline = time.monotonic() + within_s
        while (disk := self.status()["disk"]) is not None and disk["state"] == Health.STARTING:
            assert time.monotonic() < deadline, disk
            time.sleep(0.02)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"

    def store(self, tokens: list[int], **key: Any) -> None:
        objects = {
            g.name: {i: content(tokens, n, i, g.block_bytes) for i in range(len(tokens) // g.unit_tokens)}
            for n, g in enumerate(self.spec.model.groups)
        }
        assert self.session.publish(tokens, objects, **key).ok

    def swap_out(self, tokens: list[int], **key: Any) -> Done:
        keys = self.session.keys(tokens, **key)
        groups = enumerate(self.spec.model.groups)
        runs = tuple(
            Objects(n, 0, tuple(range(len(tokens) // g.unit_tokens)), keys.keys(g.unit_tokens)) for n, g in groups
        )
        return self.client.call(SwapOut(request_id(), runs), Done)

    def purge(self, tokens: list[int]) -> None:
        """What the supervisor has a holder do where a chain is purged: one pass."""
        prompt = self.session.keys(tokens).prompt
        self.tell(f"purge {wire.encode(Purge('p', None, prompt.namespace, prompt.keys, False)).hex()}")

    def status(self) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self.client.call(StatusRequest("s"), StatusReply).status)
        return reply

    def wrong(self, answer: Answer, tokens: list[int]) -> list[str]:
        """Leased objects that are not as they were stored."""
        assert answer.lease is not None
        found = []
        for n, group in enumerate(self.spec.model.groups):
            with answer.lease.read(group.name) as views:
                right = {index: content(tokens, n, index, group.block_bytes) for index in views}
                found += [f"{group.name}[{i}]" for i in views if not np.array_equal(views[i], right[i])]
        return found

    def slots(self, answer: Answer, group: str) -> list[int]:
        assert answer.lease is not None
        with answer.lease.read(group) as views:
            return [views.slot(index) for index in views]

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self._end()

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
        self._end()

    def _end(self) -> None:
        self.session.close()
        self.client.close()
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
