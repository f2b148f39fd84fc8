"""Several holders and a directory that hear each other at once, unless a test holds a record back.

Bytes are a function of prompt, group, index and revision, so what is read can be told apart. Disks
keep extents in a dictionary, over the lives of their holder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvfabric.fabric import wire
from kvfabric.fabric.arena import Arena, ArenaLayout, PoolLayout, heap_arena
from kvfabric.fabric.context import HolderConfig
from kvfabric.fabric.copies import Placement
from kvfabric.fabric.directory import DirectoryCore
from kvfabric.fabric.effects import (
    DeleteExtent,
    Digested,
    DigestSlots,
    DiskRead,
    DiskWritten,
    ExtentEntry,
    Moved,
    ReadExtent,
    Received,
    Restored,
    Send,
    StartTransfer,
    Tick,
    TransferDone,
    WriteExtent,
)
from kvfabric.fabric.holder import HolderCore
from kvfabric.fabric.identity import Namespace, PromptKeys, as_tokens, weights_digest16
from kvfabric.fabric.invariants import accounting, check
from kvfabric.fabric.messages import (
    Acquire,
    Answer,
    Drop,
    LeaseGrant,
    LeasePart,
    Objects,
    Prompt,
    StoreBegin,
    StoreBegun,
    StoreCommit,
    StoreItem,
    SwapIn,
    SwapOut,
)
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.offers import Planning
from kvfabric.fabric.passport import Abi, AbiPassport
from kvfabric.fabric.writing import DiskAdmission
from kvfabric.transport.digest import checksum

ABI = AbiPassport().abi()
CLIENT = "client:1"
DIRECTORY = "directory:0"

Extents = dict[int, list[tuple[ExtentEntry, bytes]]]


class Holders:
    """Holders by name; each owns the shards it is given. Every record crosses as bytes."""

    def __init__(
        self,
        model: ModelSpec,
        holders: dict[str, tuple[int, ...]],
        *,
        slots: int = 16,
        weights: str = "v1",
        planning: Callable[[], Planning | None] = lambda: None,
        writing: Callable[[], DiskAdmission | None] = lambda: None,
        placement: Callable[[], Placement | None] = lambda: None,
        **config: Any,
    ) -> None:
        self.model = model
        self.shards = holders
        self.slots = slots
        self.weights = weights
        self.config = config
        self.planning = planning
        self.writing = writing
        self.placement = placement
        self.now = 100.0
        self.cores: dict[str, HolderCore] = {}
        self.arenas: dict[str, Arena] = {}
        self.disks: dict[str, Extents] = {name: {} for name in holders}
        self.lives = dict.fromkeys(holders, 0)
        self.read_s = 0.0
        """How long each read of a disk takes."""
        self.replies: list[Any] = []
        self.sent: list[tuple[str, str, Any]] = []
        self.hold_back: Callable[[str, str, Any], bool] = lambda sender, to, record: False
        """Whether a record between holders or to the directory is lost."""
        self._queue: deque[tuple[str, Any]] = deque()
        self._asked = 0
        self.directory = DirectoryCore(DIRECTORY, model, 1)
        for name in holders:
            self.start(name)

    def start(self, name: str) -> None:
        """A fresh life: empty memory, the disk as it was left."""
        self.lives[name] += 1
        layout = ArenaLayout(
            [
                PoolLayout(g, s, self.slots, spec.block_bytes)
                for g, spec in enumerate(self.model.groups)
                for s in self.shards[name]
            ]
        )
        arena = self.arenas[name] = heap_arena(layout, self.lives[name])
        config = HolderConfig(name, name, self.shards[name], grants_always=True, **self.config)
        core = self.cores[name] = HolderCore(
            config,
            self.model,
            arena,
            self.lives[name],
            weights_digest16(self.weights),
            planning=self.planning(),
            writing=self.writing(),
            placement=self.placement(),
        )
        found = [(e, i, entry) for e, entries in self.disks[name].items() for i, (entry, _) in enumerate(entries)]
        self._carry_out(name, core.start(self.now, found))
        self.run()

    # --- driving -------------------------------------------------------------------------------

    def run(self) -> None:
        """Deliver everything that is under way."""
        while self._queue:
            to, event = self._queue.popleft()
            core = self.directory if to == DIRECTORY else self.cores[to]
            self._carry_out(to, core.handle(event, self.now))

    def feed(self, name: str, event: Any) -> None:
        self._queue.append((name, event))
        self.run()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, waking each core whenever it asked for it."""
        end = self.now + seconds
        while True:
            due = [(at, n) for n, c in self.cores.items() if (at := c.next_deadline_s) is not None and at <= end]
            if not due:
                break
            at, name = min(due)
            self.now = max(at, self.now)
            self.feed(name, Tick())
        self.now = end

    def _carry_out(self, name: str, effects: Sequence[Any]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(name, effect)
                case StartTransfer():
                    self._queue.append((name, TransferDone(effect.token, self._moved(name, effect))))
                case DigestSlots():
                    arena = self.arenas[name]
                    sums = tuple(checksum(arena.content(slot)) for slot in effect.slots)
                    self._queue.append((name, Digested(effect.token, sums)))
                case WriteExtent():
                    arena = self.arenas[name]
                    self.disks[name][effect.extent] = [
                        (e, arena.payload(slot)[: e.length].tobytes())
                        for e, slot in zip(effect.entries, effect.slots, strict=True)
                    ]
                    self._queue.append((name, DiskWritten(effect.token, None)))
                case ReadExtent():
                    self.now += self.read_s
                    self._queue.append((name, DiskRead(effect.token, tuple(self._read(name, r) for r in effect.reads))))
                case DeleteExtent():
                    self.disks[name].pop(effect.extent, None)

    def _send(self, name: str, effect: Send) -> None:
        record = wire.decode(wire.encode(effect.message))
        self.sent.append((name, effect.to, record))
        if effect.to.startswith("client:"):
            self.replies.append(record)
        elif (effect.to in self.cores or effect.to == DIRECTORY) and not self.hold_back(name, effect.to, record):
            self._queue.append((effect.to, Received(name, record)))

    def _moved(self, name: str, effect: StartTransfer) -> tuple[Moved, ...]:
        source, target = self.arenas[effect.source], self.arenas[name]
        for pair in effect.pairs:
            target.payload(pair.slot)[: pair.length] = source.payload(pair.source_slot)[: pair.length]
        return tuple(Moved(p.slot, checksum(target.payload(p.slot)[: p.length])) for p in effect.pairs)

    def _read(self, name: str, read: tuple[int, int, int]) -> Restored:
        extent, number, slot = read
        content = np.frombuffer(self.disks[name][extent][number][1], np.uint8)
        payload = self.arenas[name].payload(slot)
        payload[: len(content)] = content
        return Restored(slot, checksum(payload[: len(content)]))

    # --- clients -------------------------------------------------------------------------------

    def name(self) -> str:
        self._asked += 1
        return f"r{self._asked}"

    def ask(self, holder: str, record: Any, client: str = CLIENT) -> Any:
        """The reply to a client's record, or None while it waits for something."""
        before = len(self.replies)
        self.feed(holder, Received(client, record))
        return self.replies[-1] if len(self.replies) > before else None

    def keys(self, tokens: Sequence[int], tenant: str = "", weights: str | None = None) -> PromptKeys:
        return PromptKeys(self.model, Namespace(self.model.name, weights or self.weights, tenant), as_tokens(tokens))

    def prompt(self, keys: PromptKeys) -> Prompt:
        units = tuple((unit, keys.keys(unit)) for unit in self.model.units_tokens)
        namespace = keys.namespace
        return Prompt(namespace.digest(), weights_digest16(namespace.weights), namespace.tenant, len(keys), units)

    def objects(self, keys: PromptKeys, group: int, shard: int, indices: Sequence[int] | None = None) -> Objects:
        unit = self.model.groups[group].unit_tokens
        chosen = tuple(range(len(keys) // unit) if indices is None else indices)
        blob = keys.keys(unit)
        return Objects(group, shard, chosen, b"".join(blob[32 * i : 32 * i + 32] for i in chosen))

    def everything(self, keys: PromptKeys, holder: str) -> tuple[Objects, ...]:
        return tuple(self.objects(keys, g, s) for g in range(len(self.model.groups)) for s in self.shards[holder])

    def begin(
        self,
        holder: str,
        keys: PromptKeys,
        *,
        revision: int = 0,
        abi: Abi = ABI,
        items: Sequence[Objects] | None = None,
        retire: tuple[Objects, ...] = (),
        replace: bool = True,
        client: str = CLIENT,
        request: str = "",
    ) -> StoreBegun:
        chosen = self.everything(keys, holder) if items is None else items
        wanted = tuple(StoreItem(o, revision, self.model.groups[o.group].block_bytes, abi) for o in chosen)
        message = StoreBegin(request or self.name(), self.prompt(keys), wanted, retire, replace)
        begun = self.ask(holder, message, client)
        assert isinstance(begun, StoreBegun)
        return begun

    def fill(self, holder: str, begun: StoreBegun, seed: int = 0) -> bytes:
        """Write an attempt's slots; their checksums."""
        sums = b""
        for run in begun.slots:
            for index, slot in zip(run.indices, np.frombuffer(run.slots, "<u4").tolist(), strict=True):
                payload = self.arenas[holder].payload(slot)
                payload[:] = (seed * 31 + run.group * 7 + run.shard * 3 + index) % 251
                sums += checksum(payload)
        return sums

    def commit(self, holder: str, begun: StoreBegun, *, seed: int = 0, client: str = CLIENT) -> Any:
        return self.ask(holder, StoreCommit(self.name(), begun.attempt, self.fill(holder, begun, seed)), client)

    def store(self, holder: str, tokens: range, **how: Any) -> Any:
        """Store every whole object of the holder's shards; the reply to the commit, or the refusal to begin."""
        tenant, seed = how.pop("tenant", ""), how.pop("seed", 0)
        begun = self.begin(holder, self.keys(tokens, tenant), **how)
        return begun if begun.refused is not None else self.commit(holder, begun, seed=seed)

    def wanted(self, holder: str, tokens: Sequence[int], **fields: Any) -> Acquire:
        """The request for a lease."""
        tenant, request = fields.pop("tenant", ""), fields.pop("request", "") or self.name()
        weights = fields.pop("weights", None)
        readers = fields.pop("readers", (holder,) * self.model.shards)
        abis = fields.pop("abis", (ABI,) * len(self.model.groups))
        how = {"lease_s": 30.0, "wait_s": None, "min_tokens": 0, "probe": False, **fields}
        return Acquire(request, self.prompt(self.keys(tokens, tenant, weights)), abis, readers, **how)

    def acquire(self, holder: str, tokens: Sequence[int], **fields: Any) -> Answer | None:
        """The answer, or None while the request waits. What nobody answers times out first."""
        patient = fields.pop("patient", False)
        message = self.wanted(holder, tokens, **fields)
        request, answer = message.request, self.ask(holder, message)
        if answer is None and not patient:
            self.pass_time(3 * self.cores[holder].ctx.config.request_timeout_s)
            answer = next((r for r in reversed(self.replies) if getattr(r, "request", "") == request), None)
        assert answer is None or isinstance(answer, Answer)
        return answer

    def granted(self, holder: str, tokens: Sequence[int], **fields: Any) -> LeaseGrant:
        answer = self.acquire(holder, tokens, **fields)
        assert answer is not None
        assert answer.grant is not None, answer
        return answer.grant

    def drop(self, holder: str, tokens: range) -> Any:
        return self.ask(holder, Drop(self.name(), self.everything(self.keys(tokens), holder)))

    def swap_out(self, holder: str, tokens: range) -> Any:
        return self.ask(holder, SwapOut(self.name(), self.everything(self.keys(tokens), holder)))

    def swap_in(self, holder: str, tokens: range) -> Any:
        return self.ask(holder, SwapIn(self.name(), self.everything(self.keys(tokens), holder)))

    def parts(self, grant: LeaseGrant) -> list[tuple[LeasePart, Arena | None]]:
        """A lease's parts with the arenas that a reader has mapped."""
        return [(part, self.arenas[part.holder]) for part in grant.parts]

    def at_rest(self) -> None:
        """No invariant is broken anywhere, nothing is pinned, reserved or quarantined."""
        for core in self.cores.values():
            assert check(core) == []
            books = accounting(core)
            assert (books.pins, books.reserved, books.quarantined, books.lost) == (0, 0, 0, 0)
