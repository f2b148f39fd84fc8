"""The NIXL link: one-sided READs between hosts, with the guards that NIXL itself does not give.

What NIXL 1.5 was seen to do, and what is done about it here:

* a READ of memory that was reused or is being rewritten succeeds: results bear the digest of what landed, and
  ``headers`` re-reads the source's slot headers, so that the caller can prove the version;
* there is no time-out, and a released transfer goes on writing: past its deadline a transfer is kept, not
  released, its slots stay quarantined under a token until it is DONE, NIXL reports the peer disconnected,
  or the agent is destroyed (``fence``);
* a peer's memory that is unmapped ends the peer's process: the arena is registered once for the agent's life;
* a restarted peer is refused under its old name: the agent's name bears the incarnation, and connecting to a new
  life of a holder removes the old one;
* a copy between processes of one host runs inside ``transfer`` with the interpreter lock held: transfers are cut
  into parts of a few MiB;
* the first READ to a peer takes 20 to 50 ms: ``connect`` reads the peer's arena header, which also proves that
  the memory is the incarnation it should be.

A process that used this link ends by ``os._exit`` or with ``nixl_environment()`` set (see :mod:`nixl_settings`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..fabric.arena import ARENA_HEADER, ARENA_MAGIC, SLOT_HEADER, Arena, ArenaLayout, Bytes, Memory
from .link import (
    Headers,
    LinkError,
    LinkFailure,
    LinkKind,
    Pair,
    PairResult,
    QuietToken,
    Region,
    host_identity,
    other_kind,
    parts_of,
    unfit,
)
from .nixl_agent import DRAM, VRAM, FlightState, GpuRange, NixlAgent, Ranges
from .nixl_settings import NixlSettings
from .payloads import HostPayloads, Payloads

PARTS_IN_FLIGHT = 8
"""Parts of ``PART_BYTES`` asked for at once by one fetch."""
SCRATCH_BYTES = 1 << 20
SCRATCHES_MAX = 16
HEADER_GAP_ROWS = 64
"""Unwanted rows of a header table read along where that saves a descriptor (about 3 us each)."""

_SPINS = 64
_POLL_S = 50e-6

_FAILURE_OF = {
    FlightState.PEER_LOST: LinkFailure.PEER_LOST,
    FlightState.BROKEN: LinkFailure.BROKEN,
    FlightState.FENCED: LinkFailure.UNAVAILABLE,
}


_NIXL_NAME = {Memory.HOST: DRAM, Memory.CUDA: VRAM}


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """What a link moves bytes into: an arena, its payload in whichever memory, and its part on a GPU."""

    arena: Arena
    payloads: Payloads
    gpu: GpuRange | None = None

    def bases(self) -> dict[str, int]:
        """Where each part begins, for descriptors here and at peers."""
        host = {"base": int(self.arena.bytes.ctypes.data)}
        return host if self.gpu is None else {**host, "gpu_base": self.gpu.address, "gpu_device": self.gpu.device}


@dataclass(slots=True)
class _Scratch:
    """Registered memory that header reads land in; of use to the agent of its ``life`` only."""

    memory: Bytes
    life: int


@dataclass(slots=True)
class _Flight:
    """A READ. While it is in the link's table it may still write to its slots or its scratch.

    A header read nobody waits for any more is ``abandoned``: its scratch is taken back once it is quiet.
    """

    token: QuietToken
    peer: str
    indices: list[int] = field(default_factory=list)
    handle: Any = None
    state: FlightState = FlightState.DONE
    detail: str = ""
    scratch: _Scratch | None = None
    abandoned: bool = False


@dataclass(slots=True)
class _Peer:
    """What is kept about a holder; the lock lets one thread at a time connect to it."""

    connecting: threading.Lock = field(default_factory=threading.Lock)
    region: Region | None = None
    ready: bool = False


class NixlLink:
    """A :class:`~kvfabric.transport.link.Link` over NIXL; made by :meth:`start`."""

    kind = LinkKind.NIXL

    def __init__(self, own: OwnMemory, holder: str, incarnation: int, name: str, settings: NixlSettings) -> None:
        self._own = own
        self._arena = own.arena
        self._holder = holder
        self._incarnation = incarnation
        self._name = name
        self._settings = settings
        self._lock = threading.Lock()
        self._agent: NixlAgent | None = None
        self._why_not = "the link is closed"
        self._life = -1
        self._tokens = itertools.count(1)
        self._flights: dict[QuietToken, _Flight] = {}
        self._leaving: set[str] = set()
        self._scratches: list[_Scratch] = []
        self._scratches_made = 0
        self._peers: dict[str, _Peer] = {}

    @classmethod
    def start(
        cls,
        arena: Arena,
        *,
        holder: str,
        incarnation: int,
        suffix: str,
        settings: NixlSettings | None = None,
        payloads: Payloads | None = None,
        gpu: GpuRange | None = None,
    ) -> NixlLink | LinkError:
        """Make the agent and register the arena, which must then stay mapped until the link is closed.

        An arena with pools on a GPU is given with them, and with what reads their payload.
        ``suffix`` is random, the caller's: two processes that believe to be the same incarnation still differ.
        Returns an UNAVAILABLE error with the reason where NIXL is not installed or does not start.
        """
        name = f"{holder}@{incarnation}@{suffix}"
        own = OwnMemory(arena, payloads or HostPayloads(arena), gpu)
        link = cls(own, holder, incarnation, name, settings or NixlSettings())
        error = link._start_agent()
        return link if error is None else error

    def _start_agent(self) -> LinkError | None:
        self._life += 1
        name = f"{self._name}.{self._life}" if self._life else self._name
        agent = NixlAgent.start(name, self._arena.bytes[: self._arena.layout.size_bytes], self._settings, self._own.gpu)
        if isinstance(agent, LinkError):
            self._why_not = agent.detail
            return agent
        self._agent = agent
        return None

    def region(self) -> Region:
        with self._lock:
            agent = self._agent
            address = {} if agent is None else {"agent": agent.name, "metadata": agent.metadata}
        return Region(
            holder=self._holder,
            incarnation=self._incarnation,
            kind=self.kind,
            host=host_identity(),
            layout=self._arena.layout,
            address={**address, **self._own.bases()},
        )

    # -- peers

    def connect(self, region: Region, deadline_s: float) -> LinkError | None:
        return self._ready(region, time.monotonic() + deadline_s)

    def _ready(self, region: Region, deadline: float) -> LinkError | None:
        refusal = other_kind(region, self.kind)
        if refusal is not None:
            return refusal
        with self._lock:
            peer = self._peers.setdefault(region.holder, _Peer())
            if peer.ready and _same(peer.region, region):
                return None
        if not peer.connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return LinkError(LinkFailure.TIMED_OUT, f"{region.holder}: another thread still connects")
        try:
            return self._connect(peer, region, deadline)
        finally:
            peer.connecting.release()

    def _connect(self, peer: _Peer, region: Region, deadline: float) -> LinkError | None:
        name = _agent_of(region)
        metadata = region.address.get("metadata")
        if not name or not isinstance(metadata, bytes):
            return LinkError(LinkFailure.REFUSED, f"{region.holder}: its region names no NIXL agent")
        if region.layout.cuda_bytes and not isinstance(region.address.get("gpu_base"), int):
            return LinkError(LinkFailure.REFUSED, f"{region.holder}: its region does not say where its GPU memory is")
        with self._lock:
            if self._agent is None:
                return LinkError(LinkFailure.UNAVAILABLE, self._why_not)
            if peer.ready and _same(peer.region, region):
                return None
            if peer.region is not None and _agent_of(peer.region) != name:
                self._drop(_agent_of(peer.region))
            self._leaving.discard(name)
            peer.region, peer.ready = region, False
            error = self._agent.add_peer(name, metadata)
        if error is None:
            error = self._warm_up(region, deadline)
        with self._lock:
            if error is not None and error.failure is not LinkFailure.TIMED_OUT:
                self._drop(name)
            peer.ready = error is None and peer.region is region
        return error

    def _warm_up(self, region: Region, deadline: float) -> LinkError | None:
        """Read the peer's arena header: the first READ sets the connection up, and names the incarnation."""
        got = self._read_memory(region, [(0, ARENA_HEADER.itemsize)], deadline)
        if isinstance(got, LinkError):
            return got
        header = got.view(ARENA_HEADER)[0]
        if bytes(header["magic"]) != ARENA_MAGIC:
            return LinkError(LinkFailure.REFUSED, f"{region.holder}: no arena lies where its region says")
        if int(header["incarnation"]) != region.incarnation:
            detail = f"{region.holder}: incarnation {int(header['incarnation'])} found, {region.incarnation} expected"
            return LinkError(LinkFailure.REFUSED, detail)
        return None

    def disconnect(self, region: Region) -> None:
        with self._lock:
            self._forget(region)

    def _forget(self, region: Region) -> None:
        peer = self._peers.get(region.holder)
        if peer is None or not _same(peer.region, region):
            return
        del self._peers[region.holder]
        self._drop(_agent_of(region))

    def _drop(self, name: str) -> None:
        """Remove a peer's agent, once nothing is in flight from it: each transfer must tell its own end."""
        if any(flight.peer == name for flight in self._flights.values()):
            self._leaving.add(name)
            return
        self._leaving.discard(name)
        if self._agent is not None:
            self._agent.remove_peer(name)

    # -- transfers

    def fetch(self, region: Region, pairs: Sequence[Pair], deadline_s: float) -> list[PairResult]:
        deadline = time.monotonic() + deadline_s
        results: dict[int, PairResult] = {}
        wanted: list[int] = []
        for index, pair in enumerate(pairs):
            refusal = unfit(pair, region.layout, self._arena.layout)
            if refusal is not None:
                results[index] = refusal
            else:
                wanted.append(index)
        error = self._ready(region, deadline) if wanted else None
        if error is not None:
            results |= {index: PairResult(pairs[index].dst_slot, error.failure, error.detail) for index in wanted}
        else:
            self._fetch_parts(region, pairs, wanted, deadline, results)
        return [results[index] for index in range(len(pairs))]

    def _fetch_parts(
        self, region: Region, pairs: Sequence[Pair], wanted: list[int], deadline: float, results: dict[int, PairResult]
    ) -> None:
        parts = deque(
            alike
            for part in parts_of([pairs[index] for index in wanted])
            for alike in self._by_memory(region.layout, pairs, [wanted[i] for i in part])
        )
        flights: deque[_Flight] = deque()
        failed: LinkError | None = None
        while parts or flights:
            while parts and failed is None and len(flights) < PARTS_IN_FLIGHT:
                posted = self._post(region, pairs, parts.popleft())
                flights.append(posted)
            if failed is not None:
                for index in itertools.chain.from_iterable(parts):
                    results[index] = PairResult(pairs[index].dst_slot, failed.failure, failed.detail)
                parts.clear()
            if not flights:
                break
            flight = flights.popleft()
            error = self._await(flight, deadline)
            if error is None:
                slots = [(pairs[index].dst_slot, pairs[index].length_bytes) for index in flight.indices]
                for index, digest in zip(flight.indices, self._own.payloads.checksums(slots), strict=True):
                    results[index] = PairResult(pairs[index].dst_slot, digest)
                continue
            failed = failed or error
            token = None if self.quiet(flight.token) else flight.token
            for index in flight.indices:
                results[index] = PairResult(pairs[index].dst_slot, error.failure, error.detail, token)
        if failed is not None and failed.failure is LinkFailure.PEER_LOST:
            self.disconnect(region)

    def _by_memory(self, source: ArenaLayout, pairs: Sequence[Pair], indices: list[int]) -> list[list[int]]:
        """Indices of pairs, apart by where they lie on either side: NIXL takes one memory a side."""
        apart: dict[tuple[Memory, Memory], list[int]] = {}
        for index in indices:
            pair = pairs[index]
            memories = (self._arena.layout.memory_of(pair.dst_slot), source.memory_of(pair.src_slot))
            apart.setdefault(memories, []).append(index)
        return list(apart.values())

    def _post(self, region: Region, pairs: Sequence[Pair], indices: list[int]) -> _Flight:
        source, target = region.layout, self._arena.layout
        remote = np.zeros((len(indices), 3), dtype=np.uint64)
        local = np.zeros((len(indices), 3), dtype=np.uint64)
        here, there = target.memory_of(pairs[indices[0]].dst_slot), source.memory_of(pairs[indices[0]].src_slot)
        (own, own_device), (base, device) = _base_of(self._own.bases(), here), _base_of(region.address, there)
        for row, index in enumerate(indices):
            pair = pairs[index]
            remote[row] = (base + source.offset_of(pair.src_slot), pair.length_bytes, device)
            local[row] = (own + target.offset_of(pair.dst_slot), pair.length_bytes, own_device)
        filled = remote[:, 1] > 0
        memories = (_NIXL_NAME[here], _NIXL_NAME[there])
        with self._lock:
            return self._launch(_agent_of(region), local[filled], remote[filled], indices, None, memories=memories)

    def _launch(
        self,
        peer: str,
        local: Ranges,
        remote: Ranges,
        indices: list[int],
        scratch: _Scratch | None,
        *,
        memories: tuple[str, str] = (DRAM, DRAM),
    ) -> _Flight:
        flight = _Flight(QuietToken(next(self._tokens)), peer, indices, scratch=scratch)
        if self._agent is None or (scratch is not None and scratch.life != self._life):
            flight.state, flight.detail = FlightState.FENCED, self._why_not
        elif len(local):
            flight.handle, flight.state, flight.detail = self._agent.read(peer, local, remote, memories)
            if flight.handle is not None:  # else nothing was posted, and nothing can arrive
                self._flights[flight.token] = flight
                self._settle(flight)
        return flight

    def _await(self, flight: _Flight, deadline: float) -> LinkError | None:
        """Wait until the flight is done (None), failed, or past the deadline."""
        spins = 0
        while True:
            with self._lock:
                self._check(flight)
                state, detail = flight.state, flight.detail
            if state is FlightState.DONE:
                return None
            if state in _FAILURE_OF:
                return LinkError(_FAILURE_OF[state], detail)
            if time.monotonic() > deadline:
                return LinkError(LinkFailure.TIMED_OUT, "the transfer is still in progress at its deadline")
            spins += 1
            time.sleep(0 if spins < _SPINS else _POLL_S)

    def _check(self, flight: _Flight) -> None:
        if flight.state is FlightState.IN_FLIGHT and self._agent is not None:
            flight.state, flight.detail = self._agent.check(flight.handle)
            self._settle(flight)

    def _settle(self, flight: _Flight) -> None:
        """Let go of a flight that is proven quiet."""
        if flight.state not in {FlightState.DONE, FlightState.PEER_LOST}:
            return
        del self._flights[flight.token]
        if self._agent is not None:
            self._agent.release(flight.handle)
        flight.handle = None
        if flight.abandoned:
            self._give_back(flight.scratch)
        if flight.peer in self._leaving:
            self._drop(flight.peer)

    def quiet(self, token: QuietToken) -> bool:
        with self._lock:
            flight = self._flights.get(token)
            if flight is not None:
                self._check(flight)
            return token not in self._flights

    # -- headers

    def headers(self, region: Region, slots: Sequence[int], deadline_s: float) -> Headers | LinkError:
        deadline = time.monotonic() + deadline_s
        error = self._ready(region, deadline)
        if error is not None:
            return error
        layout = region.layout
        wanted = np.asarray(slots, dtype=np.int64)
        if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < layout.slots:
            return LinkError(LinkFailure.TOO_LONG, f"{region.holder}: a slot lies outside the arena")
        rows = np.zeros(len(wanted), dtype=SLOT_HEADER)
        order = np.argsort(wanted, kind="stable")
        size = SLOT_HEADER.itemsize
        for runs in _row_chunks(wanted[order]):
            ranges = [
                (layout.table_offset + int(first) * size, int(last - first + 1) * size) for _, first, last in runs
            ]
            got = self._read_memory(region, ranges, deadline)
            if isinstance(got, LinkError):
                if got.failure is LinkFailure.PEER_LOST:
                    self.disconnect(region)
                return got
            table = got.view(SLOT_HEADER)
            row = 0
            for positions, first, last in runs:
                which = order[positions]
                rows[which] = table[row + wanted[which] - first]
                row += int(last - first + 1)
        return rows

    def _read_memory(self, region: Region, ranges: list[tuple[int, int]], deadline: float) -> Bytes | LinkError:
        """Ranges (offset in the peer's arena, bytes), concatenated, a private copy. At most SCRATCH_BYTES."""
        base = int(region.address["base"])
        remote = np.zeros((len(ranges), 3), dtype=np.uint64)
        local = np.zeros((len(ranges), 3), dtype=np.uint64)
        position = 0
        with self._lock:
            scratch = self._take_scratch()
            if isinstance(scratch, LinkError):
                return scratch
            for row, (offset, length) in enumerate(ranges):
                remote[row, :2] = (base + offset, length)
                local[row, :2] = (scratch.memory.ctypes.data + position, length)
                position += length
            flight = self._launch(_agent_of(region), local, remote, [], scratch)
        error = self._await(flight, deadline)
        got = scratch.memory[:position].copy()
        with self._lock:
            if flight.token in self._flights:
                flight.abandoned = True
            else:
                self._give_back(scratch)
        return got if error is None else error

    def _take_scratch(self) -> _Scratch | LinkError:
        if self._agent is None:
            return LinkError(LinkFailure.UNAVAILABLE, self._why_not)
        if not self._scratches:
            for flight in [flight for flight in self._flights.values() if flight.abandoned]:
                self._check(flight)
        if self._scratches:
            return self._scratches.pop()
        if self._scratches_made >= SCRATCHES_MAX:
            return LinkError(LinkFailure.UNAVAILABLE, f"{SCRATCHES_MAX} header reads are not quiet yet")
        memory = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        try:
            self._agent.register(memory)
        except OSError as error:
            return LinkError(LinkFailure.BROKEN, str(error))
        self._scratches_made += 1
        return _Scratch(memory, self._life)

    def _give_back(self, scratch: _Scratch | None) -> None:
        if scratch is not None and scratch.life == self._life:
            self._scratches.append(scratch)

    # -- ends

    def fence(self) -> LinkError | None:
        with self._lock:
            self._destroy("the link was fenced")
            return self._start_agent()

    def close(self) -> None:
        with self._lock:
            self._destroy("the link is closed")

    def _destroy(self, why: str) -> None:
        self._why_not = why
        agent, self._agent = self._agent, None
        handles = []
        for flight in self._flights.values():
            handles.append(flight.handle)
            flight.handle, flight.state, flight.detail = None, FlightState.FENCED, why
        if agent is not None:
            agent.destroy(handles)
        self._flights.clear()
        self._leaving.clear()
        self._scratches.clear()
        self._scratches_made = 0
        for peer in self._peers.values():
            peer.region, peer.ready = None, False


def _base_of(address: Mapping[str, Any], memory: Memory) -> tuple[int, int]:
    """Where an arena's part in that memory begins, and on which device."""
    if memory is Memory.HOST:
        return int(address["base"]), 0
    return int(address["gpu_base"]), int(address["gpu_device"])


def _agent_of(region: Region) -> str:
    return str(region.address.get("agent", ""))


def _same(known: Region | None, region: Region) -> bool:
    """Whether two regions are one life of a holder, reached through one life of its agent."""
    return known is not None and known == region and _agent_of(known) == _agent_of(region)


def _row_chunks(ordered: Any) -> list[list[tuple[Any, int, int]]]:
    """Ascending slots as runs (positions, first, last), near ones joined; runs grouped to fit one scratch."""
    room = SCRATCH_BYTES // SLOT_HEADER.itemsize
    runs: list[tuple[Any, int, int]] = []
    start = 0
    for position in range(1, len(ordered) + 1):
        ends = position == len(ordered) or ordered[position] - ordered[position - 1] > HEADER_GAP_ROWS
        if ends or ordered[position] - ordered[start] >= room:
            runs.append((slice(start, position), int(ordered[start]), int(ordered[position - 1])))
            start = position
    chunks: list[list[tuple[Any, int, int]]] = []
    left = 0
    for run in runs:
        rows = run[2] - run[1] + 1
        if rows > left:
            chunks.append([])
            left = room
        chunks[-1].append(run)
        left -= rows
    return chunks
