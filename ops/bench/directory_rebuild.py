"""A directory shard is killed and comes back empty: how long until it is whole again, and does it ever lie?

The shard is a process of its own behind its control socket; eight holders' cores, with their objects as a restart
finds them on disk, run in this one, one after another, so a cluster is faster. Looked up meanwhile are documents whose
holders are known: an answer that names a block or holder that is not there is wrong.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from ...fabric import wire
from ...fabric.arena import ArenaLayout, PoolLayout, heap_arena
from ...fabric.context import HolderConfig
from ...fabric.directory import DirectoryCore
from ...fabric.effects import ExtentEntry, Received, Send, Tick
from ...fabric.holder import HolderCore
from ...fabric.kinds import INDEX_DIGEST_BYTES as KEY
from ...fabric.messages import Found, Lookup, Strip
from ...fabric.segments import SEGMENT_OBJECTS
from ...transport.control_client import BlockingClient, ConnectionLost
from ...transport.control_socket import ConnectionInfo, serve_unix
from .directory_core import model_of
from .directory_load import UNIT_TOKENS

SHARD = "directory:0"
DOCUMENT_BLOCKS = 2048
HOLDERS = 8
TIMEOUT_S = 300.0
PROBES = 64


def serve(path: str, epoch: int, ready: Connection) -> None:
    """One life of the shard: takes a sender and its record, answers with what it would send there."""

    async def run() -> None:
        core = DirectoryCore(SHARD, model_of(1), epoch)

        def handle(_: ConnectionInfo, frame: bytes) -> bytes:
            sender, record = msgpack.unpackb(frame)
            effects = core.handle(Received(sender, wire.decode(record)), time.monotonic())
            sent = [wire.encode(effect.message) for effect in effects if isinstance(effect, Send)]
            return bytes(msgpack.packb(sent))

        await serve_unix(path, handle)
        ready.send(os.getpid())
        await asyncio.Event().wait()

    asyncio.run(run())


class Shard:
    """The shard's process, as this one sees it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.epoch = 0
        self.process: Any = None
        self.client: BlockingClient | None = None

    def start(self) -> None:
        """A fresh life, empty, with a new epoch."""
        self.epoch += 1
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self.process = context.Process(target=serve, args=(self.path, self.epoch, there), daemon=True)
        self.process.start()
        if not here.poll(60.0):
            raise ConnectionLost("the shard's process did not start")
        here.recv()
        self.client = BlockingClient.connect(f"unix:{self.path}")

    def kill(self) -> None:
        """SIGKILL, as the kernel would."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10.0)
        if self.client is not None:
            self.client.close()

    @property
    def processor_s(self) -> float:
        """Processor seconds that this life has taken so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ask(self, sender: str, record: Any) -> list[Any]:
        """Send a record; what the shard sends back."""
        assert self.client is not None
        answer = self.client.request(bytes(msgpack.packb([sender, wire.encode(record)])), 60.0)
        return [wire.decode(raw) for raw in msgpack.unpackb(answer.payload)]


class Holders:
    """Eight holders' cores with documents of 2,048 blocks each."""

    def __init__(self, positions: int) -> None:
        rng = np.random.default_rng(11)
        model = model_of(1)
        self.cores: dict[str, HolderCore] = {}
        self.documents: list[tuple[str, bytes]] = []
        for number in range(HOLDERS):
            name = f"holder:{number}"
            config = HolderConfig(name, name, grants_always=True)
            core = HolderCore(config, model, heap_arena(ArenaLayout([PoolLayout(0, 0, 1, 4096)]), 1), 1, bytes(16))
            entries: list[tuple[int, int, ExtentEntry]] = []
            for extent in range(positions // HOLDERS // DOCUMENT_BLOCKS):
                chain = rng.bytes(DOCUMENT_BLOCKS * KEY)
                self.documents.append((name, chain))
                entries.extend((extent + 1, index, _entry(chain, index)) for index in range(DOCUMENT_BLOCKS))
            core.start(0.0, entries)
            self.cores[name] = core

    @property
    def positions(self) -> int:
        return len(self.documents) * DOCUMENT_BLOCKS

    def pump(self, shard: Shard, name: str, effects: list[Any], meanwhile: Callable[[], None]) -> None:
        """Carry a holder's records to the shard and the answers back until there are none."""
        core = self.cores[name]
        while effects:
            meanwhile()
            following: list[Any] = []
            for effect in effects:
                if isinstance(effect, Send) and effect.to == SHARD:
                    for answer in shard.ask(name, effect.message):
                        following.extend(core.handle(Received(SHARD, answer), time.monotonic()))
            effects = following

    def beat(self, shard: Shard, meanwhile: Callable[[], None]) -> None:
        """Run due timers: heartbeats, and what they lead to."""
        for name, core in self.cores.items():
            due = core.next_deadline_s
            if due is not None and due <= time.monotonic():
                self.pump(shard, name, core.handle(Tick(), time.monotonic()), meanwhile)

    def probe(self, shard: Shard, place: int) -> tuple[int, int]:
        """Blocks a look-up misses of one document, and blocks it names wrongly."""
        name, chain = self.documents[place]
        found: Found = shard.ask("client:1", Lookup("x", 0, (Strip(UNIT_TOKENS, 0, chain),)))[0]
        right = wrong = 0
        for stripe in found.stripes:
            inside = stripe.bits & ((1 << DOCUMENT_BLOCKS) - 1)
            if stripe.holder == name:
                right |= inside
                wrong |= stripe.bits ^ inside
            else:
                wrong |= stripe.bits
        return DOCUMENT_BLOCKS - right.bit_count(), wrong.bit_count()


def _entry(chain: bytes, index: int) -> ExtentEntry:
    start = index - index % SEGMENT_OBJECTS
    digest = chain[index * KEY : index * KEY + KEY]
    anchor = chain[start * KEY : start * KEY + KEY]
    parent = b"" if index == start else chain[(index - 1) * KEY : index * KEY]
    position = (index + 1) * UNIT_TOKENS
    return ExtentEntry(
        0, 0, digest + digest, position, 0, 4096, bytes(16), bytes(8), 1, bytes(32), bytes(16), "", anchor, parent
    )


def rebuild(positions: int) -> dict[str, float]:
    """Kill a full shard and watch: seconds to the first answer and until whole, wrong answers, answers."""
    holders = Holders(positions)
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as directory:
        Path(directory).chmod(0o700)
        shard = Shard(f"{directory}/shard.sock")
        shard.start()
        _until_whole(holders, shard)
        shard.kill()
        killed = time.monotonic()
        shard.start()
        started = time.monotonic()
        processor_s, shard_s = time.process_time(), shard.processor_s
        answers, wrong = _until_whole(holders, shard)
        whole = time.monotonic()
        processor_s, shard_s = time.process_time() - processor_s, shard.processor_s - shard_s
        shard.kill()
    return {
        "positions": float(holders.positions),
        "process_s": started - killed,
        "whole_s": whole - killed,
        "holders_processor_s": processor_s,
        "shard_processor_s": shard_s,
        "answers": float(answers),
        "wrong": float(wrong),
    }


def _until_whole(holders: Holders, shard: Shard) -> tuple[int, int]:
    """How many look-ups were answered until all was known, one with every exchange, and how many of them wrongly."""
    rng = np.random.default_rng(1)
    places = rng.permutation(len(holders.documents))[:PROBES].tolist()
    asked: list[tuple[int, int]] = []

    def meanwhile() -> None:
        asked.append(holders.probe(shard, places[len(asked) % len(places)]))

    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        holders.beat(shard, meanwhile)
        final = [holders.probe(shard, place) for place in places]
        asked.extend(final)
        if not any(missing for missing, _ in final) and all(c.events.settled for c in holders.cores.values()):
            return len(asked), sum(1 for _, wrong in asked if wrong)
        time.sleep(0.01)
    raise TimeoutError(f"the shard was not whole after {TIMEOUT_S:.0f} s")
