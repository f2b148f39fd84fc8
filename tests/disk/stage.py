"""Arenas with known bytes, stores and tiers over them: what the disk tests have in common."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from kvfabric.fabric.arena import Arena, ArenaLayout, PoolLayout
from kvfabric.fabric.effects import DiskRead, DiskWritten, Event, ExtentEntry, ReadExtent, WriteExtent
from kvfabric.fabric.passport import AbiPassport
from kvfabric.transport.digest import checksum
from kvfabric.transport.disk.blocks import Got, Want
from kvfabric.transport.disk.codecs import Codec
from kvfabric.transport.disk.driver import DiskSettings, DiskTier
from kvfabric.transport.disk.store import Draft, ExtentStore, Reconciled
from kvfabric.transport.memfd import ArenaMemory

E = TypeVar("E")

PASSPORT = AbiPassport(engine="vllm", kernel="flash", strides=(4096, 64), alignment_bytes=64)
LENGTHS = (4096, 5000, 96, 12288)
"""Object sizes of the pools: a page, more than one, less than one, three."""
SLOTS = 64


def layout(slots: int = SLOTS) -> ArenaLayout:
    return ArenaLayout([PoolLayout(g, 0, slots, length) for g, length in enumerate(LENGTHS)])


def arena() -> Arena:
    """Page-aligned, as direct I/O wants it."""
    return ArenaMemory.create(layout(), 1).arena


def content(key: int, length: int, *, packs: bool = False) -> np.ndarray:
    """The one right content of an object."""
    values = np.random.default_rng(key).integers(0, 4 if packs else 256, length, dtype=np.uint8)
    return np.sort(values) if packs else values


def fill(arena: Arena, slot: int, key: int, *, packs: bool = False) -> ExtentEntry:
    """Put an object into a slot; what an extent says of it."""
    group = arena.layout.pool_of(slot)
    length = LENGTHS[group]
    arena.begin_write(slot)
    arena.payload(slot)[:] = content(key, length, packs=packs)
    check = checksum(arena.payload(slot))
    arena.seal(slot, length, check, bytes(16), 0)
    abi = PASSPORT.abi()
    digest = key.to_bytes(32, "little")
    return ExtentEntry(
        group, 0, digest, key, key % 3, length, check, abi.fingerprint, abi.alignment_bytes, b"n" * 32, b"w" * 16, "t"
    )


def draft(uid: bytes, arena: Arena, keys: list[int], *, codec: Codec = Codec.NONE, packs: bool = False) -> Draft:
    """An extent of one object for each key, spread over all groups; the slots count from each pool's first."""
    slots = [arena.layout.first_slot[key % len(LENGTHS)] + place for place, key in enumerate(keys)]
    entries = [fill(arena, slot, key, packs=packs) for slot, key in zip(slots, keys, strict=True)]
    return Draft(uid, entries, slots, {PASSPORT.layout_fingerprint(): PASSPORT}, codec)


def at_once(_: int) -> None:
    """A pace without a budget."""


def open_store(root: Path, memory: Arena | None = None, **more: Any) -> tuple[ExtentStore, Reconciled]:
    settings = {"bytes_max": 1 << 30, "free_floor_bytes": 0, **more}
    return ExtentStore.open(root, "0", "node", memory or arena(), **settings)


def read_back(store: ExtentStore, uid: bytes, entries: list[ExtentEntry]) -> list[Got]:
    """Every block of an extent, each into a slot of the upper half of its pool, in the order of the entries."""
    first = store.arena.layout.first_slot
    wants = [Want(uid, n, first[e.group] + SLOTS // 2 + n) for n, e in enumerate(entries)]
    got = {g.slot: g for g in store.read(wants, at_once)}
    return [got[want.slot] for want in wants]


def uid_of(number: int) -> bytes:
    return random.Random(number).randbytes(16)


class Stage:
    """A tier with its child process over a real arena, and the events it told."""

    def __init__(self, root: Path, *, slots: int = SLOTS, **settings: Any) -> None:
        self.memory = ArenaMemory.create(layout(slots), 1)
        defaults: dict[str, Any] = {"bytes_max": 1 << 30, "passports": (PASSPORT,)}
        self.settings = DiskSettings(str(root), "0", "node", **(defaults | settings))
        self.events: list[Event] = []
        self._came = asyncio.Event()
        self.tier = DiskTier(self.settings, self.memory, self._tell)
        self._tokens = 0

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        self._came.set()

    async def start(self) -> Self:
        assert await self.tier.start(20.0)
        return self

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.tier.close()
        self.memory.close()

    @property
    def arena(self) -> Arena:
        return self.memory.arena

    async def event(self, kind: type[E], holds: Callable[[E], bool] = lambda _: True, timeout_s: float = 20.0) -> E:
        """The first event of that kind of which it holds; taken out."""
        async with asyncio.timeout(timeout_s):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and holds(event):
                        self.events.remove(event)
                        return event
                self._came.clear()
                await self._came.wait()

    async def state(self, *wanted: str, timeout_s: float = 20.0) -> dict[str, Any]:
        """The tier's status once it is in one of these states."""
        async with asyncio.timeout(timeout_s):
            while self.tier.status()["state"] not in wanted:  # noqa: ASYNC110 - a status is asked for, as a user would
                await asyncio.sleep(0.02)
        return self.tier.status()

    def put(self, keys: list[int], *, packs: bool = False) -> tuple[tuple[ExtentEntry, ...], tuple[int, ...]]:
        made = draft(b"", self.arena, keys, packs=packs)
        return tuple(made.entries), tuple(made.slots)

    def post_write(self, extent: int, keys: list[int], *, packs: bool = False) -> tuple[int, tuple[ExtentEntry, ...]]:
        self._tokens += 1
        entries, slots = self.put(keys, packs=packs)
        self.tier.write(WriteExtent(self._tokens, extent, entries, slots))
        return self._tokens, entries

    async def write(self, extent: int, keys: list[int], *, packs: bool = False) -> DiskWritten:
        token, _ = self.post_write(extent, keys, packs=packs)
        return await self.event(DiskWritten, lambda e: e.token == token)

    def post_read(self, extent: int, keys: list[int]) -> int:
        self._tokens += 1
        first = self.arena.layout.first_slot
        reads = tuple((extent, n, first[k % len(LENGTHS)] + SLOTS // 2 + n) for n, k in enumerate(keys))
        self.tier.read(ReadExtent(self._tokens, reads))
        return self._tokens

    async def read(self, extent: int, keys: list[int]) -> DiskRead:
        """Restore an extent written of these keys into the upper half of each pool."""
        token = self.post_read(extent, keys)
        return await self.event(DiskRead, lambda e: e.token == token)

    def right(self, keys: list[int], read: DiskRead, *, packs: bool = False) -> list[bool]:
        """Which blocks came back as they were stored: by what lies in the slot and by the checksum told."""
        first = self.arena.layout.first_slot
        told = {r.slot: r for r in read.restored}
        judged = []
        for n, key in enumerate(keys):
            slot = first[key % len(LENGTHS)] + SLOTS // 2 + n
            there = self.arena.payload(slot)
            right = content(key, LENGTHS[key % len(LENGTHS)], packs=packs)
            same = np.array_equal(there, right)
            if told[slot].refused is None:
                assert (told[slot].checksum == checksum(right)) == same
            judged.append(bool(same) and told[slot].refused is None)
        return judged
