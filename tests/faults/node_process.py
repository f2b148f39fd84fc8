"""A process of a fabric on a host of its own: ``python node_process.py holder|directory SETUP_JSON`` or ``worker``.

A line of JSON in, a line of JSON out. A holder or directory first tells its Member record in hex; a supervisor's
right to grant is given once, for an hour. A worker speaks to the holder of its own host.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfabric import Session
from kvfabric.actors.directory import Directory
from kvfabric.actors.holder import Holder
from kvfabric.actors.info import FabricInfo
from kvfabric.actors.service import Service
from kvfabric.fabric import wire
from kvfabric.fabric.arena import PAGE_BYTES
from kvfabric.fabric.identity import weights_digest16
from kvfabric.fabric.messages import Birth, GrantUntil, Member, Members

SECRET = b"s" * 32


def content(number: int, group: str, index: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The one right content of an object of prompt ``number``."""
    rng = np.random.default_rng([number, sum(group.encode()), index])
    return rng.integers(0, 256, nbytes, dtype=np.uint8)


def tokens_of(number: int) -> list[int]:
    return [(number * 1_000_003 + 7919 * i) % 50_000 for i in range(518)]


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def serve(role: str, setup: dict[str, Any]) -> None:
    setup |= {"secret": SECRET, "weights": weights_digest16("v1")}
    service: Service = Holder(setup) if role == "holder" else Directory(setup)
    birth = wire.decode_plain(Birth, await service.start())  # type: ignore[attr-defined]
    service.received("supervisor", GrantUntil(service.incarnation, 3600.0))
    say(wire.encode_plain(birth.member).hex())
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        verb, argument = json.loads(line)
        if verb == "members":
            members = tuple(wire.decode_plain(Member, bytes.fromhex(raw)) for raw in argument)
            service.mesh.update(Members(1, members))
            say(None)
        else:
            say(json.loads(service.status()))
    await service.close()


class Worker:
    """Verbs of a session, by the number of a prompt."""

    def __init__(self, info: str, node: str) -> None:
        known = FabricInfo.decode(bytes.fromhex(info), node)
        self.session = Session(lambda: known, name=known.name)

    def needed(self, number: int) -> dict[str, dict[int, Any]]:
        model = self.session.model
        at = {"csa": range(32), "idx": range(32), "tail": range(127, 128), "swa": range(124, 128)}
        return {g: {i: content(number, g, i, model.group(g).block_bytes) for i in indices} for g, indices in at.items()}

    def publish(self, number: int) -> str | None:
        return self.session.publish(tokens_of(number), self.needed(number)).refused

    def probe(self, number: int) -> int:
        return self.session.probe(tokens_of(number)).tokens

    def acquire(self, number: int) -> dict[str, Any]:
        """What came of it, every leased byte compared."""
        began = time.monotonic()
        answer = self.session.acquire(tokens_of(number))
        told: dict[str, Any] = {
            "status": answer.status,
            "tokens": answer.tokens,
            "cause": None if answer.cause is None else answer.cause.reason,
            "sources": answer.sources,
            "took_s": time.monotonic() - began,
            "wrong": 0,
        }
        if answer.lease is not None:
            right = self.needed(number)
            with answer.lease as lease:
                for group in lease.views:
                    with lease.read(group) as views:
                        told["wrong"] += sum(not np.array_equal(views[i], right[group][i]) for i in views)
        return told

    def acquire_and_tell_of_first_bytes(self, number: int) -> dict[str, Any]:
        """An acquire that says "arriving" once bytes change in this host's arena, and then what came of it."""
        holders = self.session._holders
        arena = holders.client(holders.of_shard(0)).arena
        first = arena.layout.pool_offset[0]
        now = arena.bytes[first : first + arena.layout.pools[0].slots * arena.layout.pools[0].stride_bytes : PAGE_BYTES]
        before = now.copy()
        told: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: told.append(self.acquire(number)))
        thread.start()
        while np.array_equal(now, before) and thread.is_alive():
            pass
        say("arriving")
        thread.join()
        return told[0]


def work() -> None:
    worker = Worker(*json.loads(sys.stdin.readline()))
    say("ready")
    for line in sys.stdin:
        verb, argument = json.loads(line)
        say(getattr(worker, verb)(argument))


if __name__ == "__main__":
    try:
        if sys.argv[1] == "worker":
            work()
        else:
            asyncio.run(serve(sys.argv[1], json.loads(sys.argv[2])))
    except BaseException:  # noqa: BLE001 - os._exit would swallow it
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
