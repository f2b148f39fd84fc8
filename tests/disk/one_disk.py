"""One holder's core over a disk that the test plays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvfabric.fabric.arena import ArenaLayout, PoolLayout, heap_arena
from kvfabric.fabric.context import HolderConfig
from kvfabric.fabric.effects import (
    DeleteExtent,
    Digested,
    DigestSlots,
    DiskRead,
    DiskWritten,
    DropLocal,
    ExtentEntry,
    ExtentScrubbed,
    ExtentUploaded,
    Moved,
    ReadExtent,
    Received,
    Restored,
    ScrubExtent,
    Send,
    StartTransfer,
    Tick,
    TransferDone,
    TransferFault,
    Undeliverable,
    UploadExtent,
    WriteExtent,
)
from kvfabric.fabric.holder import HolderCore
from kvfabric.fabric.identity import Namespace, PromptKeys, as_tokens, weights_digest16
from kvfabric.fabric.invariants import accounting, check
from kvfabric.fabric.kinds import Reason, Tier
from kvfabric.fabric.messages import (
    Acquire,
    Answer,
    Done,
    Objects,
    Prompt,
    Release,
    StoreBegin,
    StoreBegun,
    StoreCommit,
    StoreItem,
    SwapOut,
)
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.passport import AbiPassport
from kvfabric.transport.digest import checksum

ABI = AbiPassport().abi()
WEIGHTS = weights_digest16("v1")
BLOCK = 4096
MODEL = ModelSpec.load(
    {
        "name": "two",
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": BLOCK},
            {"name": "idx", "kind": "indexer", "of": "kv", "block_tokens": 16, "block_bytes": BLOCK},
        ],
    }
)
BLOCKS = 4
"""Blocks of each group of a prompt; so 8 objects, 4 slots of each pool."""


class Disk:
    """A holder's core over a disk whose reads end when the test says so, in the order it says.

    With ``host_slots`` readers have GPU memory, and each pool so many slots of host memory below it.
    """

    def __init__(self, slots: int = 32, *, host_slots: int = 0, **config: Any) -> None:
        readers = Tier.G1 if host_slots else Tier.G2
        pools = [PoolLayout(g, 0, slots, BLOCK, readers) for g in range(2)]
        pools += [PoolLayout(g, 0, host_slots, BLOCK, Tier.G2) for g in range(2) if host_slots]
        layout = ArenaLayout(pools)
        self.arena = heap_arena(layout, 1)
        self.core = HolderCore(HolderConfig("n0", "n0", grants_always=True, **config), MODEL, self.arena, 1, WEIGHTS)
        self.now = 0.0
        self.replies: dict[str, Any] = {}
        self.reads: list[ReadExtent] = []
        self.scrubs: list[ScrubExtent] = []
        self.copies: list[StartTransfer] = []
        """Copies within the arena that have not ended: those that come while ``hold_copies``."""
        self.hold_copies = self.hold_scrubs = False
        self.sent: list[Any] = []
        self.extents: dict[int, list[tuple[ExtentEntry, bytes]]] = {}
        self.deleted: list[int] = []
        self.uploads: list[int] = []
        self.dropped: list[int] = []
        self.write_refused: Reason | None = None
        self._asked = 0
        self._do(self.core.start(0.0))

    def _do(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            match effect:
                case Send() if effect.to.startswith("client:"):
                    self.replies[effect.message.request] = effect.message
                case Send() if effect.to.startswith("directory"):
                    self.handle(Undeliverable(effect.to, effect.message))
                case Send():
                    self.sent.append(effect.message)
                case DigestSlots():
                    sums = tuple(checksum(self.arena.content(slot)) for slot in effect.slots)
                    self.handle(Digested(effect.token, sums))
                case WriteExtent():
                    if self.write_refused is None:
                        there = [self.arena.content(slot).tobytes() for slot in effect.slots]
                        self.extents[effect.extent] = list(zip(effect.entries, there, strict=True))
                    self.handle(DiskWritten(effect.token, self.write_refused))
                case ReadExtent():
                    self.reads.append(effect)
                case ScrubExtent():
                    self.scrubs.append(effect)
                    if not self.hold_scrubs:
                        self._scrub(effect)
                case StartTransfer():
                    self.copies.append(effect)
                    if not self.hold_copies:
                        self.copy(effect)
                case DeleteExtent():
                    self.deleted.append(effect.extent)
                    del self.extents[effect.extent]
                case UploadExtent():
                    self.uploads.append(effect.extent)
                    self.handle(ExtentUploaded(effect.extent))
                case DropLocal():
                    self.dropped.append(effect.extent)

    def handle(self, event: Any) -> None:
        self._do(self.core.handle(event, self.now))
        if not isinstance(event, Tick) and (due := self.core.next_deadline_s) is not None and due <= self.now:
            self.handle(Tick())

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.core.next_deadline_s) is not None and due <= end:
            self.now = max(due, self.now)
            self.handle(Tick())
        self.now = end
        self.handle(Tick())

    def ask(self, record: Any, client: str = "client:1") -> Any:
        self.handle(Received(client, record))
        return self.replies.get(record.request)

    def name(self) -> str:
        self._asked += 1
        return f"r{self._asked}"

    # --- prompts -------------------------------------------------------------------------------

    def keys(self, number: int) -> PromptKeys:
        tokens = range(1 + number * 1000, 1 + number * 1000 + 16 * BLOCKS + 1)
        return PromptKeys(MODEL, Namespace("two", "v1"), as_tokens(list(tokens)))

    def prompt(self, number: int) -> Prompt:
        keys = self.keys(number)
        return Prompt(keys.namespace.digest(), WEIGHTS, "", len(keys), ((16, keys.keys(16)),))

    def objects(self, number: int) -> tuple[Objects, ...]:
        digests = self.keys(number).keys(16)
        return tuple(Objects(g, 0, tuple(range(BLOCKS)), digests) for g in range(2))

    def store(self, number: int) -> Any:
        items = tuple(StoreItem(objects, 0, BLOCK, ABI) for objects in self.objects(number))
        begun = self.ask(StoreBegin(self.name(), self.prompt(number), items, (), replace=True))
        assert isinstance(begun, StoreBegun)
        if begun.refused is not None:
            return begun.refused
        sums = b""
        for run in begun.slots:
            for index, slot in zip(run.indices, np.frombuffer(run.slots, "<u4").tolist(), strict=True):
                payload = self.arena.payload(slot)
                payload[:] = (number * 31 + run.group * 7 + index) % 256
                sums += checksum(payload)
        return self.ask(StoreCommit(self.name(), begun.attempt, sums)).refused

    def swap_out(self, number: int) -> Done:
        done = self.ask(SwapOut(self.name(), self.objects(number)))
        assert isinstance(done, Done)
        return done

    def on_disk(self, *numbers: int) -> None:
        for number in numbers:
            assert self.store(number) is None
            assert self.swap_out(number).refused is None

    def acquire(self, number: int, **fields: Any) -> str:
        """Ask; the request's name."""
        request = {"lease_s": 30.0, "wait_s": None, "min_tokens": 0, "probe": False, **fields}
        message = Acquire(self.name(), self.prompt(number), (ABI, ABI), ("n0",), **request)
        self.ask(message)
        return message.request

    def answer(self, request: str) -> Answer | None:
        found: Answer | None = self.replies.get(request)
        return found

    def release(self, request: str) -> None:
        answer = self.answer(request)
        assert answer is not None
        assert answer.grant is not None
        self.ask(Release(self.name(), answer.grant.lease, None))

    # --- the disk ------------------------------------------------------------------------------

    def finish(self, read: ReadExtent, refused: Reason | None = None) -> None:
        restored = []
        for extent, number, slot in read.reads:
            if refused is not None or extent not in self.extents:
                restored.append(Restored(slot, None, refused or Reason.RESTORE_FAILED))
                continue
            content = np.frombuffer(self.extents[extent][number][1], dtype=np.uint8)
            self.arena.payload(slot)[:] = content
            restored.append(Restored(slot, checksum(content)))
        self.reads.remove(read)
        self.handle(DiskRead(read.token, tuple(restored)))

    def _scrub(self, effect: ScrubExtent) -> None:
        there = self.extents.get(effect.extent)
        found = () if there is None else tuple(checksum(np.frombuffer(there[e][1], np.uint8)) for e in effect.entries)
        self.handle(ExtentScrubbed(effect.token, found))

    def spoil(self, extent: int, entry: int) -> None:
        """Turn a byte of what lies on the disk, behind everybody's back."""
        known, content = self.extents[extent][entry]
        self.extents[extent][entry] = (known, bytes([content[0] ^ 0xFF]) + content[1:])

    def copy(self, copy: StartTransfer, fault: TransferFault | None = None) -> None:
        moved = []
        for pair in copy.pairs:
            if fault is None:
                self.arena.payload(pair.slot)[:] = self.arena.payload(pair.source_slot)
            landed = checksum(self.arena.payload(pair.slot)) if fault is None else None
            moved.append(Moved(pair.slot, landed, fault))
        self.copies.remove(copy)
        self.handle(TransferDone(copy.token, tuple(moved)))

    def finish_all(self) -> None:
        for _ in range(1000):
            if not self.reads:
                return
            self.finish(self.reads[0])
        raise AssertionError("reads never end")

    def sound(self) -> None:
        assert check(self.core) == []
        assert accounting(self.core).lost == 0
