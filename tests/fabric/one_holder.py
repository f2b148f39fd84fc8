"""One holder's core with a client, its transfers and digests done at once: for tests of single desks."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvfabric.fabric.arena import Arena, ArenaLayout, PoolLayout, heap_arena
from kvfabric.fabric.budget import in_slabs
from kvfabric.fabric.context import HolderConfig
from kvfabric.fabric.effects import Digested, DigestSlots, Moved, Received, Send, StartTransfer, Tick, TransferDone
from kvfabric.fabric.eviction import EvictionFactory, LeastRecentlyUsed
from kvfabric.fabric.holder import HolderCore
from kvfabric.fabric.identity import Namespace, PromptKeys, as_tokens, weights_digest16
from kvfabric.fabric.messages import (
    Acquire,
    Answer,
    LeaseGrant,
    Objects,
    Prompt,
    StoreBegin,
    StoreBegun,
    StoreCommit,
    StoreItem,
)
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.passport import AbiPassport
from kvfabric.transport.digest import checksum

ABI = AbiPassport().abi()
WEIGHTS = weights_digest16("v1")
CLIENT = "client:1"


class OneHolder:
    """A holder that grants always, asks no directory that answers, and moves bytes within itself at once."""

    def __init__(
        self,
        model: ModelSpec,
        slots: int = 16,
        *,
        slabs: int = 0,
        eviction: EvictionFactory = LeastRecentlyUsed,
        **config: Any,
    ) -> None:
        self.model = model
        layout = ArenaLayout([PoolLayout(g, 0, slots, spec.block_bytes) for g, spec in enumerate(model.groups)])
        if slabs:
            layout, config["slab_shares"] = in_slabs(layout, slabs)
        self.arena: Arena = heap_arena(layout, 1)
        bounds = HolderConfig("n0", "n0", grants_always=True, **config)
        self.core = HolderCore(bounds, model, self.arena, 1, WEIGHTS, eviction=eviction)
        self.now = 0.0
        self.replies: list[Any] = []
        self._asked = 0
        self._carry_out(self.core.start(self.now))

    def _carry_out(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send() if effect.to.startswith("client:"):
                    self.replies.append(effect.message)
                case StartTransfer():
                    moved = []
                    for pair in effect.pairs:
                        source = self.arena.payload(pair.source_slot)[: pair.length]
                        self.arena.payload(pair.slot)[: pair.length] = source
                        moved.append(Moved(pair.slot, checksum(source)))
                    self.handle(TransferDone(effect.token, tuple(moved)))
                case DigestSlots():
                    sums = tuple(checksum(self.arena.content(slot)) for slot in effect.slots)
                    self.handle(Digested(effect.token, sums))

    def handle(self, event: Any) -> None:
        self._carry_out(self.core.handle(event, self.now))

    def ask(self, record: Any, client: str = CLIENT) -> Any:
        """The reply to a client's record; requests that wait for the directory time out first."""
        before = len(self.replies)
        self.handle(Received(client, record))
        return self.replies[-1] if len(self.replies) > before else None

    def name(self) -> str:
        self._asked += 1
        return f"r{self._asked}"

    def keys(self, tokens: range) -> PromptKeys:
        return PromptKeys(self.model, Namespace(self.model.name, "v1"), as_tokens(tokens))

    def prompt(self, keys: PromptKeys) -> Prompt:
        units = tuple((unit, keys.keys(unit)) for unit in self.model.units_tokens)
        return Prompt(keys.namespace.digest(), WEIGHTS, "", len(keys), units)

    def store(self, tokens: range, seed: int = 0) -> Any:
        """Store every whole block of every group; the reply to the commit, or the refusal to begin."""
        keys = self.keys(tokens)
        items = []
        for g, spec in enumerate(self.model.groups):
            count = len(keys) // spec.unit_tokens
            objects = Objects(g, 0, tuple(range(count)), keys.keys(spec.unit_tokens))
            items.append(StoreItem(objects, 0, spec.block_bytes, ABI))
        begun = self.ask(StoreBegin(self.name(), self.prompt(keys), tuple(items), (), replace=True))
        assert isinstance(begun, StoreBegun)
        if begun.refused is not None:
            return begun
        sums = b""
        for run in begun.slots:
            for index, slot in zip(run.indices, np.frombuffer(run.slots, "<u4").tolist(), strict=True):
                payload = self.arena.payload(slot)
                payload[:] = (seed * 31 + run.group * 7 + index) % 256
                sums += checksum(payload)
        return self.ask(StoreCommit(self.name(), begun.attempt, sums))

    def acquire(self, tokens: range, **fields: Any) -> Answer:
        request = {"lease_s": 30.0, "wait_s": None, "min_tokens": 0, "probe": False, **fields}
        message = Acquire(
            self.name(), self.prompt(self.keys(tokens)), (ABI,) * len(self.model.groups), ("n0",), **request
        )
        answer = self.ask(message)
        if answer is None:
            self.pass_time(self.core.ctx.config.request_timeout_s)
            answer = self.replies[-1]
        assert isinstance(answer, Answer)
        return answer

    def granted(self, tokens: range, **fields: Any) -> LeaseGrant:
        grant = self.acquire(tokens, **fields).grant
        assert grant is not None
        return grant

    def pass_time(self, seconds: float) -> None:
        """Let time pass, waking the core whenever it asked for it."""
        end = self.now + seconds
        while (due := self.core.next_deadline_s) is not None and due <= end:
            self.now = max(due, self.now)
            self.handle(Tick())
        self.now = end
        self.handle(Tick())
