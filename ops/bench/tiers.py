"""How fast the disk tier moves bytes, and what a burst of restores costs those who need no disk.

Writing and restoring are measured beside plain large direct I/O on the same disk, round by round, so
that a busy disk slows both. The burst runs against a real holder process; who restores and who measures
are processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...actors.client import HolderClient, request_id
from ...actors.holder import Holder
from ...actors.info import FabricInfo
from ...actors.session import Session
from ...actors.spec import FabricSpec
from ...fabric import wire
from ...fabric.arena import ArenaLayout, PoolLayout
from ...fabric.effects import DiskRead, DiskWritten, Event, ExtentEntry, ReadExtent, WriteExtent
from ...fabric.identity import weights_digest16
from ...fabric.kinds import Status
from ...fabric.messages import Acquire, Answer, Birth, Done, GrantUntil, Member, Objects, Release, SwapOut
from ...fabric.passport import AbiPassport
from ...transport.control_client import AsyncClient
from ...transport.digest import checksum
from ...transport.disk.driver import DiskSettings, DiskTier
from ...transport.disk.io import IO_BYTES, open_at, page_buffer, read_all, write_all
from ...transport.memfd import ArenaMemory
from .core import report
from .host_memory import host_memory_ratios

BLOCK_BYTES = 1 << 20
BLOCKS = 256
EXTENTS = 4
READS = 32
ROUNDS = 7
SPEED_TARGET = 0.7

RESTORES = 200
PROMPT_BLOCKS = 16
BURST_BLOCK_BYTES = 64 << 10
BLOCK_TOKENS = 16
CALM_ASKS = 2000
HOLDER_TIMEOUT_S = 60.0
BURST_TIMEOUT_S = 120.0
P50_TARGET, P99_TARGET = 1.5, 3.0
EXPECTED = (
    "write_256_mib_against_plain_direct_io",
    "restore_256_mib_against_plain_direct_io",
    "acquire_p50_under_200_restores",
    "acquire_p99_under_200_restores",
    "restores_that_ended",
)
"""Figures there must be: one that is missing fails like one that does not hold."""
_NODE = "b" * 40
_MODULE = __spec__.name  # under `python -m` as well, where __name__ is __main__


def figures(folder: Path | None = None, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """The tiers' figures on the disk that ``folder`` lies on (default: that of the temporary folder).

    Name, value, unit, target (None: for orientation) and whether it holds. Raises RuntimeError where a
    process that takes part says that it cannot.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="kvfabric-bench-") as path:
        speed = asyncio.run(_speed(Path(path) / "speed", rounds))
        burst = _burst(Path(path) / "burst")
    found = []
    for verb in ("write", "restore"):
        ratio = statistics.median(b / t for b, t in zip(speed[f"bare {verb}"], speed[verb], strict=True))
        mbps = BLOCKS * BLOCK_BYTES / statistics.median(speed[verb]) / 1e6
        found.append(_figure(f"{verb}_256_mib_against_plain_direct_io", ratio, "ratio", SPEED_TARGET, at_least=True))
        found.append(_figure(f"{verb}_256_mib", mbps, "MB/s", None))
    host = {name: statistics.median(ratios) for name, ratios in host_memory_ratios(rounds).items()}
    found.append(_figure("host_copy_64_mib_digested_against_memcpy", host["host_copy"], "ratio", None))
    found.append(_figure("lanes_digest_64_mib_against_xxh3", host["lanes"], "ratio", None))
    found.append(_figure("acquire_p50_under_200_restores", burst["p50"], "ratio", P50_TARGET))
    found.append(_figure("acquire_p99_under_200_restores", burst["p99"], "ratio", P99_TARGET))
    found.append(_figure("restores_that_ended", burst["ended"], "restores", RESTORES, at_least=True))
    found.append(_figure("acquire_p50_without_restores", burst["calm_p50_us"], "us", None))
    found.append(_figure("acquire_p99_without_restores", burst["calm_p99_us"], "us", None))
    return found


def run(folder: Path | None = None) -> dict[str, Any]:
    """All figures as one object."""
    return report("tiers", figures(folder), EXPECTED)


def _figure(name: str, value: float, unit: str, target: float | None, *, at_least: bool = False) -> dict[str, Any]:
    holds = target is None or (value >= target if at_least else value <= target)
    return {"name": name, "value": round(value, 3), "unit": unit, "target": target, "holds": holds}


# --- speed -------------------------------------------------------------------------------------


async def _speed(root: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds a round of writing and restoring all blocks, and of plain I/O of as many bytes."""
    memory = ArenaMemory.create(ArenaLayout([PoolLayout(0, 0, 2 * BLOCKS, BLOCK_BYTES)]), 1)
    entries = _fill(memory)
    told: asyncio.Queue[Event] = asyncio.Queue()
    settings = DiskSettings(str(root), "0", "bench", bytes_max=1 << 40, passports=(AbiPassport(),))
    tier = DiskTier(settings, memory, told.put_nowait)
    spent: dict[str, list[float]] = {verb: [] for verb in ("write", "restore", "bare write", "bare restore")}
    try:
        if not await tier.start(HOLDER_TIMEOUT_S):
            raise RuntimeError(f"the disk tier does not start: {tier.status()['detail']}")
        bare = await asyncio.to_thread(_Bare, root)
        for number in range(rounds + 1):
            took = {
                "bare write": await asyncio.to_thread(bare.write),
                "write": await _write(tier, told, number, entries),
                "bare restore": await asyncio.to_thread(bare.read),
                "restore": await _restore(tier, told, number, entries),
            }
            if number:  # the first touches the pages
                for verb, seconds in took.items():
                    spent[verb].append(seconds)
        await asyncio.to_thread(bare.close)
    finally:
        await tier.close()
    return spent


def _fill(memory: ArenaMemory) -> list[ExtentEntry]:
    rng = np.random.default_rng(0)
    entries = []
    abi = AbiPassport().abi()
    for slot in range(2 * BLOCKS):
        memory.arena.begin_write(slot)
        payload = memory.arena.payload(slot)
        payload[:] = rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
        check = checksum(payload)
        memory.arena.seal(slot, BLOCK_BYTES, check, bytes(16), 0)
        digest = slot.to_bytes(32, "little")
        entries.append(
            ExtentEntry(0, 0, digest, 16, 0, BLOCK_BYTES, check, abi.fingerprint, 1, bytes(32), bytes(16), "")
        )
    return entries[:BLOCKS]


async def _write(tier: DiskTier, told: asyncio.Queue[Event], number: int, entries: list[ExtentEntry]) -> float:
    each = BLOCKS // EXTENTS
    began = time.perf_counter()
    for part in range(EXTENTS):
        slots = tuple(range(part * each, (part + 1) * each))
        extent = number * EXTENTS + part
        tier.write(WriteExtent(1000 * number + part, extent, tuple(entries[s] for s in slots), slots))
    left = EXTENTS
    while left:
        event = await told.get()
        if isinstance(event, DiskWritten):
            if event.refused is not None:
                raise RuntimeError(f"an extent was not written: {event.refused}")
            left -= 1
    return time.perf_counter() - began


async def _restore(tier: DiskTier, told: asyncio.Queue[Event], number: int, entries: list[ExtentEntry]) -> float:
    each, batch = BLOCKS // EXTENTS, BLOCKS // READS
    began = time.perf_counter()
    for part in range(READS):
        blocks = range(part * batch, (part + 1) * batch)
        reads = tuple((number * EXTENTS + b // each, b % each, BLOCKS + b) for b in blocks)
        tier.read(ReadExtent(1000 * number + 500 + part, reads))
    left = READS
    while left:
        event = await told.get()
        if isinstance(event, DiskRead):
            for block in event.restored:
                if block.checksum != entries[block.slot - BLOCKS].checksum:
                    raise RuntimeError(f"slot {block.slot}: {block.refused or 'other bytes than were written'}")
            left -= 1
    return time.perf_counter() - began


class _Bare:
    """A file of as many bytes, written and read in large direct calls, one after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._buffer = page_buffer(BLOCKS * BLOCK_BYTES)
        self._buffer[:] = np.random.default_rng(1).integers(0, 256, self._buffer.nbytes, dtype=np.uint8)

    def _calls(self) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]]:
        for at in range(0, self._buffer.nbytes, IO_BYTES):
            yield at, self._buffer[at : at + IO_BYTES]

    def _timed(self, flags: int, call: Callable[[int, list[Any], int], int], *, sync: bool) -> float:
        began = time.perf_counter()
        fd = open_at(self._folder, "bare", flags)
        try:
            for at, part in self._calls():
                call(fd, [part], at)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - began

    def write(self) -> float:
        return self._timed(os.O_WRONLY | os.O_CREAT | os.O_TRUNC, write_all, sync=True)

    def read(self) -> float:
        return self._timed(os.O_RDONLY, read_all, sync=False)

    def close(self) -> None:
        os.unlink("bare", dir_fd=self._folder)
        os.close(self._folder)


# --- burst -------------------------------------------------------------------------------------


def _burst(root: Path) -> dict[str, float]:
    """How long acquires from memory take, alone and while 200 prompts are restored for others."""
    spec = FabricSpec.load(
        {
            "model": {
                "name": "burst",
                "weights": "v1",
                "groups": [
                    {
                        "name": "kv",
                        "kind": "compressed_history",
                        "block_tokens": BLOCK_TOKENS,
                        "block_bytes": BURST_BLOCK_BYTES,
                    }
                ],
            },
            "memory_bytes": 512 << 20,
            "transport": {"links": ["tcp"]},
            "disk": {"path": str(root), "free_floor_bytes": 0},
        }
    )
    with _holder(spec) as member:
        info = FabricInfo("bench", spec, "v1", (member,), _NODE)
        with Session(lambda: info, name="bench") as session:
            _prepare(session, member)
            return _measure_burst(session, member)


def _tokens(number: int) -> list[int]:
    return [number * 100_000 + i for i in range(PROMPT_BLOCKS * BLOCK_TOKENS + 1)]


def _keys(session: Session, number: int) -> tuple[Acquire, Objects]:
    """A request for a prompt, and its objects."""
    message = session.request(_tokens(number))
    (_, digests) = message.prompt.keys[0]
    return message, Objects(0, 0, tuple(range(PROMPT_BLOCKS)), digests)


def _prepare(session: Session, member: Member) -> None:
    """Store and swap out what the burst will restore; keep prompt 0 in memory."""
    client = HolderClient(member)
    rng = np.random.default_rng(2)
    for number in range(RESTORES, -1, -1):
        blocks = {i: rng.integers(0, 256, BURST_BLOCK_BYTES, dtype=np.uint8) for i in range(PROMPT_BLOCKS)}
        stored = session.publish(_tokens(number), {"kv": blocks})
        if not stored.ok:
            raise RuntimeError(f"prompt {number} was not stored: {stored.refused}")
        if number:
            _, objects = _keys(session, number)
            done = client.call(SwapOut(request_id(), (objects,)), Done)
            if done.refused is not None:
                raise RuntimeError(f"prompt {number} was not written to disk: {done.refused}")
    client.close()


def _measure_burst(session: Session, member: Member) -> dict[str, float]:
    session.acquire(_tokens(0)).cancel()
    calm = [_ask(session) for _ in range(CALM_ASKS)]
    requests = [wire.encode(_keys(session, number)[0]).hex() for number in range(1, RESTORES + 1)]
    other = subprocess.Popen(
        [sys.executable, "-m", _MODULE, "burst", member.unix], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write("\n".join(requests) + "\n\n")
    other.stdin.flush()
    other.stdout.readline()  # it is connected, and begins once told
    other.stdin.write("go\n")
    other.stdin.flush()
    hit = []
    deadline = time.monotonic() + BURST_TIMEOUT_S
    while not select.select([other.stdout], [], [], 0)[0] and time.monotonic() < deadline:
        hit.append(_ask(session))
    said = other.stdout.readline()
    other.stdin.close()
    other.stdout.close()
    other.wait(HOLDER_TIMEOUT_S)
    return {
        "p50": _percentile(hit, 50) / _percentile(calm, 50),
        "p99": _percentile(hit, 99) / _percentile(calm, 99),
        "ended": float(said.strip() or 0),
        "calm_p50_us": 1e6 * _percentile(calm, 50),
        "calm_p99_us": 1e6 * _percentile(calm, 99),
    }


def _ask(session: Session) -> float:
    """Seconds that one acquire from memory takes."""
    began = time.perf_counter()
    answer = session.acquire(_tokens(0))
    took = time.perf_counter() - began
    if answer.status is not Status.FULL_HIT:
        raise RuntimeError(f"the prompt in memory is a {answer.status}: {answer.cause}")
    answer.cancel()
    return took


def _percentile(samples: list[float], percent: int) -> float:
    return float(np.percentile(samples, percent))


# --- other processes ---------------------------------------------------------------------------


@contextmanager
def _holder(spec: FabricSpec) -> Iterator[Member]:
    """A holder in a process of its own; it ends with the block."""
    setup = {
        "fabric": "bench",
        "address": "holder:bench:0",
        "incarnation": 1,
        "node": _NODE,
        "host": "127.0.0.1",
        "spec": spec.text,
        "shards": [0],
        "directory": "directory:0",
        "clock_s": None,
        "unreachable": [],
        "slots": {},
    }
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE, "holder", json.dumps(setup)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the holder's process ended before it was up")
        yield wire.decode_plain(Member, bytes.fromhex(line))
    finally:
        process.stdin.close()
        process.wait(HOLDER_TIMEOUT_S)
        process.stdout.close()


async def _serve(setup: dict[str, Any]) -> None:
    holder = Holder(setup | {"secret": os.urandom(32), "weights": weights_digest16("v1")})
    birth = wire.decode_plain(Birth, await holder.start())
    holder.received("supervisor", GrantUntil(holder.incarnation, 3600.0))
    sys.stdout.write(wire.encode_plain(birth.member).hex() + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await holder.close()


async def _restore_all(endpoint: str) -> None:
    """Ask for every prompt at once; say how many were granted."""
    lines = iter(sys.stdin.readline, "\n")
    requests = [bytes.fromhex(line) for line in lines]
    client = await AsyncClient.connect(endpoint, timeout_s=HOLDER_TIMEOUT_S)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()

    async def one(request: bytes) -> bool:
        answer = wire.decode((await client.request(request, BURST_TIMEOUT_S)).payload)
        if not isinstance(answer, Answer) or answer.grant is None:
            return False
        await client.request(wire.encode(Release(request_id(), answer.grant.lease, None)), BURST_TIMEOUT_S)
        return answer.status is Status.FULL_HIT

    ended = await asyncio.gather(*(one(request) for request in requests))
    sys.stdout.write(f"{sum(ended)}\n")
    sys.stdout.flush()
    await client.close()


if __name__ == "__main__":
    if sys.argv[1] == "holder":
        asyncio.run(_serve(json.loads(sys.argv[2])))
    else:
        asyncio.run(_restore_all(sys.argv[2]))
    os._exit(0)
