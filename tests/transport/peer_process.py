"""A process with an arena and a link of one kind, driven by lines of JSON: run as a script by the link tests.

Its own process because a NIXL agent may end its process, and because peers are killed and stopped. It ends by os._exit.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from kvfabric.fabric.arena import ArenaLayout, PoolLayout
from kvfabric.transport.digest import checksum
from kvfabric.transport.link import Link, LinkError, Pair, Region
from kvfabric.transport.memfd import ArenaMemory
from kvfabric.transport.nixl_settings import NixlSettings, nixl_environment

SLOT_BYTES = 1 << 20
LAYOUT = ArenaLayout([PoolLayout(0, 0, 48, SLOT_BYTES), PoolLayout(1, 0, 200, 3000)])
SECRET = b"0123456789abcdef"


def content_of(slot: int, version: int) -> np.ndarray:
    """What a peer of these tests keeps in a slot."""
    length = LAYOUT.pools[LAYOUT.pool_of(slot)].slot_bytes
    return np.random.default_rng((slot, version)).integers(0, 256, length, dtype=np.uint8)


class Process:
    def __init__(self, kind: str, holder: str, incarnation: int, device: str) -> None:
        self.memory = ArenaMemory.create(LAYOUT, incarnation)
        self.arena = self.memory.arena
        self.link = self.start(kind, holder, incarnation, device)
        self.stop_writing = threading.Event()

    def start(self, kind: str, holder: str, incarnation: int, device: str) -> Link:
        started: Link | LinkError
        if kind == "nixl":
            settings = NixlSettings(transports="tcp", devices=device)
            os.environ.update(nixl_environment(settings))
            from kvfabric.transport.nixl_link import NixlLink

            started = NixlLink.start(
                self.arena, holder=holder, incarnation=incarnation, suffix=str(os.getpid()), settings=settings
            )
        elif kind == "isolated":
            from kvfabric.transport.isolated_link import IsolatedLink

            started = IsolatedLink.start(
                self.memory,
                holder=holder,
                incarnation=incarnation,
                suffix=str(os.getpid()),
                settings=NixlSettings(transports="tcp", devices=device),
            )
        elif kind == "tcp":
            from kvfabric.transport.tcp_link import TcpLink

            started = TcpLink.start(self.arena, holder=holder, incarnation=incarnation, host="127.0.0.1", secret=SECRET)
        else:
            from kvfabric.transport.shared_memory_link import SharedMemoryLink

            started = SharedMemoryLink.start(self.memory, holder=holder, incarnation=incarnation)
        if isinstance(started, LinkError):
            raise SystemExit(started.detail)
        return started

    # -- verbs

    def region(self) -> str:
        return base64.b64encode(msgpack.packb(self.link.region().to_plain())).decode()

    def fill(self, slots: Sequence[int]) -> None:
        for slot in slots:
            version = self.arena.begin_write(slot)
            content = content_of(slot, version)
            self.arena.payload(slot)[:] = content
            self.arena.seal(slot, content.nbytes, checksum(content), b"o" * 16, version)

    def corrupt(self, slot: int) -> None:
        self.arena.payload(slot)[5] ^= 0xFF

    def rewrite(self, slot: int) -> None:
        """Rewrite a slot over and over, by the header protocol, until told to stop."""

        def run() -> None:
            while not self.stop_writing.is_set():
                self.fill([slot])

        self.writer = threading.Thread(target=run, daemon=True)
        self.writer.start()

    def stop_rewriting(self) -> None:
        self.stop_writing.set()
        self.writer.join()

    def connect(self, region: str, deadline_s: float) -> list[str] | None:
        error = self.link.connect(parse(region), deadline_s)
        return None if error is None else [error.failure, error.detail]

    def disconnect(self, region: str) -> None:
        self.link.disconnect(parse(region))

    def fetch(self, region: str, pairs: list[list[int]], deadline_s: float) -> dict[str, Any]:
        began = time.monotonic()
        results = self.link.fetch(parse(region), [Pair(*pair) for pair in pairs], deadline_s)
        return {
            "took_s": time.monotonic() - began,
            "checksums": [result.checksum.hex() if result.checksum else None for result in results],
            "failures": [result.failure for result in results],
            "details": [result.detail for result in results],
            "tokens": sorted({int(result.token) for result in results if result.token is not None}),
            "quarantined": [result.dst_slot for result in results if result.token is not None],
        }

    def fetch_until_failure(self, region: str, pairs: list[list[int]], deadline_s: float) -> dict[str, Any]:
        while True:
            say("fetching")
            answer = self.fetch(region, pairs, deadline_s)
            if any(answer["failures"]):
                return answer

    def fetch_from_threads(self, region: str, shares: list[list[list[int]]], rounds: int) -> list[str]:
        """Each thread fetches its own pairs over and over and proves them by the headers; what went wrong."""
        wrong: list[str] = []

        def run(pairs: list[list[int]]) -> None:
            for _ in range(rounds):
                got = self.fetch(region, pairs, 20)
                rows = self.headers(region, [pair[0] for pair in pairs], 20)
                if isinstance(rows, str):
                    wrong.append(rows)
                elif got["checksums"] != [row[2] for row in rows]:
                    wrong.append(str(got["failures"]))

        threads = [threading.Thread(target=run, args=(pairs,)) for pairs in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return wrong

    def headers(self, region: str, slots: list[int], deadline_s: float) -> list[list[Any]] | str:
        rows = self.link.headers(parse(region), slots, deadline_s)
        if isinstance(rows, LinkError):
            return rows.failure
        return [[int(row["version"]), int(row["state"]), bytes(row["checksum"]).hex()] for row in rows]

    def digests(self, slots: list[int]) -> list[str]:
        return [checksum(self.arena.payload(slot)).hex() for slot in slots]

    def clear(self, slots: list[int]) -> None:
        for slot in slots:
            self.arena.payload(slot)[:] = 0

    def quiet(self, tokens: list[int]) -> list[bool]:
        return [self.link.quiet(token) for token in tokens]  # type: ignore[arg-type]

    def fence(self) -> str | None:
        error = self.link.fence()
        return None if error is None else error.detail

    def close(self) -> None:
        self.link.close()


def parse(region: str) -> Region:
    return Region.from_plain(msgpack.unpackb(base64.b64decode(region)))


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--holder", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--device", default="lo")
    process = Process(**vars(parser.parse_args()))
    say(process.region())
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        say(getattr(process, verb)(*arguments))


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - os._exit would swallow it
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
