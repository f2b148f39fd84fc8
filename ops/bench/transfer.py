"""How fast links move bytes, beside what moves them barely: 64 MiB as 64 blocks, into a holder's arena.

Every ratio is the median over rounds of two measurements taken one after the other, so that a busy machine
slows both; speeds are for orientation. Each pair of processes is its own: a NIXL agent reads its environment once
and its process ends by ``os._exit``.

Beside Ray: the same bytes as torch tensors, put on one node of an embedded cluster and got on another. Both nodes
are on this machine, so both sides go over its loopback by TCP; NIXL is told to.

Verification is what the fabric does after each transfer: slot headers read again, versions and digests
compared. The figure by version alone exists here only; nothing turns digests off.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ...fabric.arena import Arena, ArenaLayout, PoolLayout
from ...transport.digest import checksum
from ...transport.link import Headers, Link, LinkError, Pair, Region
from ...transport.memfd import ArenaMemory
from ...transport.nixl_settings import NixlSettings, nixl_environment

BLOCKS = 64
BLOCK_BYTES = 1 << 20
TOTAL_BYTES = BLOCKS * BLOCK_BYTES
ROUNDS = 41
DEADLINE_S = 20.0
CHILD_TIMEOUT_S = 180.0

_SETTINGS = NixlSettings(transports="tcp", devices="lo")
_LAYOUT = ArenaLayout([PoolLayout(0, 0, BLOCKS, BLOCK_BYTES)])
_SLOTS = list(range(BLOCKS))
_PAIRS = [Pair(slot, slot, BLOCK_BYTES) for slot in _SLOTS]
_VERSION = 1
SHARED_MEMORY, NIXL, ISOLATED, TCP, RAY = "shared_memory", "nixl", "isolated", "tcp", "ray"
"""Ways of reading; ``isolated`` is NIXL in a process of its own, and what ``ray`` is measured beside."""
_MODULE = __spec__.name  # under `python -m` as well, where __name__ is __main__

Round = dict[str, float]
"""Seconds each way of moving the blocks took in one round."""

EXPECTED = (
    "same_host_digests_of_memcpy",
    "same_host_versions_of_memcpy",
    "nixl_tcp_of_bare_nixl_read",
    "isolated_nixl_tcp_over_ray_get",
)
"""Figures there must be: one that is missing fails like one that does not hold."""


def figures(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Transfer figures of this machine: name, value, unit, target (None: for orientation) and whether it holds.

    Raises RuntimeError with the child's words where a pair of processes could not measure.
    """
    shared = _measure(SHARED_MEMORY, rounds)
    nixl = _measure(NIXL, rounds)
    isolated = _measure(ISOLATED, rounds)
    tcp = _measure(TCP, rounds)
    beside_ray = _measure(RAY, rounds)
    return [
        _ratio("same_host_digests_of_memcpy", shared, "memcpy", "link", 0.55),
        _ratio("same_host_versions_of_memcpy", shared, "memcpy", "versions_only", 0.8),
        _ratio("nixl_tcp_of_bare_nixl_read", nixl, "bare", "link", 0.85),
        _ratio("isolated_nixl_tcp_of_bare_nixl_read", isolated, "bare", "link", 0.85),
        _ratio("isolated_nixl_tcp_over_ray_get", beside_ray, "ray_get", "link", 1.5),
        _speed("memcpy_speed", shared, "memcpy"),
        _speed("same_host_speed", shared, "link"),
        _speed("nixl_tcp_speed", nixl, "link"),
        _speed("isolated_nixl_tcp_speed", isolated, "link"),
        _speed("plain_tcp_speed", tcp, "link"),
        _speed("ray_get_speed", beside_ray, "ray_get"),
        _figure("nixl_first_read", 1e3 * nixl[0]["connect"], "ms"),
    ]


def _ratio(name: str, rounds: list[Round], base: str, measured: str, target: float) -> dict[str, Any]:
    return _figure(name, statistics.median(one[base] / one[measured] for one in rounds), "ratio", target)


def _speed(name: str, rounds: list[Round], measured: str) -> dict[str, Any]:
    return _figure(name, TOTAL_BYTES / 1e9 / statistics.median(one[measured] for one in rounds), "GB/s")


def _figure(name: str, value: float, unit: str, target: float | None = None) -> dict[str, Any]:
    holds = target is None or value >= target
    return {"name": name, "value": round(value, 3), "unit": unit, "target": target, "holds": holds}


# -- two processes a way


def _measure(way: str, rounds: int) -> list[Round]:
    """Run a reader, which starts its own source; its rounds."""
    secret = secrets.token_hex(16)
    done = subprocess.run(
        _command("read", way, rounds),
        input=secret,
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        env=_environment(way),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"bench transfer, {way}: {done.stderr.strip().splitlines()[-1:]}")
    measured: list[Round] = json.loads(done.stdout)
    return measured


def _command(role: str, way: str, rounds: int = 0) -> list[str]:
    return [sys.executable, "-m", _MODULE, role, way, str(rounds)]


def _environment(way: str) -> dict[str, str]:
    return {**os.environ, **nixl_environment(_SETTINGS)} if way in {NIXL, ISOLATED, RAY} else dict(os.environ)


def _start_link(way: str, memory: ArenaMemory, holder: str, secret: bytes) -> Link:
    started: Link | LinkError
    if way == NIXL:
        from ...transport.nixl_link import NixlLink

        started = NixlLink.start(
            memory.arena, holder=holder, incarnation=1, suffix=secrets.token_hex(4), settings=_SETTINGS
        )
    elif way in {ISOLATED, RAY}:
        from ...transport.isolated_link import IsolatedLink

        started = IsolatedLink.start(
            memory, holder=holder, incarnation=1, suffix=secrets.token_hex(4), settings=_SETTINGS
        )
    elif way == TCP:
        from ...transport.tcp_link import TcpLink

        started = TcpLink.start(memory.arena, holder=holder, incarnation=1, host="127.0.0.1", secret=secret)
    else:
        from ...transport.shared_memory_link import SharedMemoryLink

        started = SharedMemoryLink.start(memory, holder=holder, incarnation=1)
    if isinstance(started, LinkError):
        raise RuntimeError(started.detail)
    return started


def _source(way: str, secret: bytes) -> None:
    """Hold sealed blocks until the reader closes our stdin."""
    memory = ArenaMemory.create(_LAYOUT, 1, reserve=True)
    for slot, block in zip(_SLOTS, blocks(), strict=True):
        memory.arena.begin_write(slot)
        memory.arena.payload(slot)[:] = block
        memory.arena.seal(slot, BLOCK_BYTES, checksum(memory.arena.payload(slot)), bytes(16), 0)
    link = _start_link(way, memory, "source", secret)
    _say(base64.b64encode(msgpack.packb(link.region().to_plain())).decode())
    sys.stdin.read()


def _read(way: str, secret: bytes, rounds: int) -> None:
    """Measure all rounds against a source of our own."""
    source = subprocess.Popen(
        _command("source", way), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(way)
    )
    assert source.stdin is not None
    assert source.stdout is not None
    source.stdin.write(secret.hex() + "\n")
    source.stdin.flush()
    region = Region.from_plain(msgpack.unpackb(base64.b64decode(source.stdout.readline())))
    memory = ArenaMemory.create(_LAYOUT, 1, reserve=True)
    link = _start_link(way, memory, "reader", secret)
    began = time.perf_counter()
    _must(link.connect(region, DEADLINE_S))
    connected = time.perf_counter() - began
    ways: dict[str, Callable[[], None]] = {"link": lambda: _fetch_and_prove(link, region)}
    if way == SHARED_MEMORY:
        ways = _memory_ways(memory.arena, link, region) | ways
    if way in {NIXL, ISOLATED}:
        ways = _nixl_ways(memory.arena, region) | ways
    if way == RAY:
        from .transfer_ray import rounds_beside_ray

        _say(rounds_beside_ray(ways["link"], rounds, blocks()))
    else:
        _say([{"connect": connected, **_round(ways)} for _ in range(rounds + 1)][1:])
    source.kill()
    source.wait()


def _round(ways: dict[str, Callable[[], None]]) -> Round:
    spent = {}
    for name, move in ways.items():
        began = time.perf_counter()
        move()
        spent[name] = time.perf_counter() - began
    return spent


def _must(error: LinkError | None) -> None:
    if error is not None:
        raise RuntimeError(f"{error.failure}: {error.detail}")


def _headers(link: Link, region: Region) -> Headers:
    rows = link.headers(region, _SLOTS, DEADLINE_S)
    if isinstance(rows, LinkError):
        raise RuntimeError(f"{rows.failure}: {rows.detail}")
    if not (rows["version"] == _VERSION).all():
        raise RuntimeError("the source's versions changed")
    return rows


def blocks() -> list[npt.NDArray[np.uint8]]:
    """What every source holds."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8) for _ in _SLOTS]


def _fetch_and_prove(link: Link, region: Region) -> None:
    results = link.fetch(region, _PAIRS, DEADLINE_S)
    rows = _headers(link, region)
    got = b"".join(result.checksum or b"" for result in results)
    if got != rows["checksum"].tobytes():
        raise RuntimeError(f"digests differ: {[result.failure for result in results if result.failure]}")


def _memory_ways(arena: Arena, link: Link, region: Region) -> dict[str, Callable[[], None]]:
    """A plain copy of the same bytes from the peer's mapping, and one proven by versions alone."""
    from ...transport.shared_memory_link import SharedMemoryLink

    assert isinstance(link, SharedMemoryLink)
    peer = link.mapped(region, DEADLINE_S)
    if isinstance(peer, LinkError):
        raise RuntimeError(peer.detail)

    def memcpy() -> None:
        for pair in _PAIRS:
            np.copyto(arena.payload(pair.dst_slot), peer.payload(pair.src_slot))

    def versions_only() -> None:
        memcpy()
        _headers(link, region)

    return {"memcpy": memcpy, "versions_only": versions_only}


def _nixl_ways(arena: Arena, region: Region) -> dict[str, Callable[[], None]]:
    """NIXL as its own examples use it: one READ of all descriptors, polled until done."""
    from ...transport.nixl_agent import FlightState, NixlAgent

    agent = NixlAgent.start("bare", arena.bytes[: _LAYOUT.size_bytes], _SETTINGS)
    if isinstance(agent, LinkError):
        raise RuntimeError(agent.detail)
    _must(agent.add_peer(region.address["agent"], region.address["metadata"]))
    offsets = np.array([_LAYOUT.offset_of(slot) for slot in _SLOTS], dtype=np.uint64)
    remote = np.zeros((BLOCKS, 3), dtype=np.uint64)
    remote[:, 0] = offsets + np.uint64(region.address["base"])
    remote[:, 1] = BLOCK_BYTES
    local = remote.copy()
    local[:, 0] = offsets + np.uint64(arena.bytes.ctypes.data)

    def bare() -> None:
        handle, state, detail = agent.read(region.address["agent"], local, remote)
        while state is FlightState.IN_FLIGHT:
            time.sleep(0)
            state, detail = agent.check(handle)
        if state is not FlightState.DONE:
            raise RuntimeError(detail)
        agent.release(handle)

    return {"bare": bare}


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _main(role: str, way: str, rounds: int) -> None:
    secret = bytes.fromhex(sys.stdin.readline())
    if role == "read":
        _read(way, secret, rounds)
    else:
        _source(way, secret)


if __name__ == "__main__":
    try:
        _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except (RuntimeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        os._exit(1)
    os._exit(0)
