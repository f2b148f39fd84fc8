"""Holders and directory shards with a network in between that a test holds in its hands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kvfabric.fabric import wire
from kvfabric.fabric.arena import ArenaLayout, PoolLayout, heap_arena
from kvfabric.fabric.context import HolderConfig
from kvfabric.fabric.directory import DirectoryConfig, DirectoryCore
from kvfabric.fabric.effects import Received, Send, Tick
from kvfabric.fabric.holder import HolderCore
from kvfabric.fabric.identity import Namespace, PromptKeys, as_tokens, weights_digest16
from kvfabric.fabric.messages import (
    Acquire,
    Done,
    Drop,
    Found,
    Objects,
    Prompt,
    ShardMap,
    StoreBegin,
    StoreBegun,
    StoreCommit,
    StoreItem,
)
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.passport import Abi

BLOCK = 4
MODEL = ModelSpec.model_validate(
    {"groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": BLOCK, "block_bytes": 16}]}
)
ABI = Abi()
Held = Callable[[str, str, Any], bool]


def prompt_of(name: int, tokens: int) -> Prompt:
    keys = PromptKeys(MODEL, Namespace("m", "v1"), as_tokens([name + 1000, *range(tokens - 1)]))
    return Prompt(keys.namespace.digest(), weights_digest16("v1"), "", tokens, ((BLOCK, keys.keys(BLOCK)),))


class Bed:
    """``hold(sender, to, message)`` True keeps a message back in ``kept``; everything else is delivered in order."""

    def __init__(self, *, slots: int = 4096, model: ModelSpec = MODEL, **config: Any) -> None:
        self.model = model
        self.now = 0.0
        self.queue: deque[tuple[str, str, Any]] = deque()
        self.kept: list[tuple[str, str, Any]] = []
        self.hold: Held = lambda sender, to, message: False
        self.seen: list[tuple[str, str, Any]] = []
        self.directories: dict[str, DirectoryCore] = {}
        self.holders: dict[str, HolderCore] = {}
        self.replies: list[Any] = []
        self.epochs = 0
        self.slots = slots
        self.config = config
        self._requests = 0

    def directory(self, name: str = "directory:0", shards: ShardMap | None = None) -> DirectoryCore:
        """A fresh life of a shard: empty, with a new epoch."""
        self.epochs += 1
        core = DirectoryCore(name, self.model, self.epochs, DirectoryConfig(), shards)
        self.directories[name] = core
        return core

    def holder(self, name: str, incarnation: int = 1) -> HolderCore:
        layout = ArenaLayout([PoolLayout(0, 0, self.slots, 16)])
        config = HolderConfig(name, name, grants_always=True, **self.config)
        arena = heap_arena(layout, incarnation)
        core = HolderCore(config, self.model, arena, incarnation, weights_digest16("v1"))
        self.holders[name] = core
        self.take(name, core.start(self.now))
        self.run()
        return core

    def tell_map(self, told: ShardMap) -> None:
        for name in [*self.directories, *self.holders]:
            self.post("supervisor", name, told)
        self.run()

    # --- network -------------------------------------------------------------------------------

    def post(self, sender: str, to: str, message: Any) -> None:
        self.queue.append((sender, to, wire.decode(wire.encode(message))))

    def take(self, sender: str, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.post(sender, effect.to, effect.message)

    def run(self) -> None:
        while self.queue:
            sender, to, message = self.queue.popleft()
            if self.hold(sender, to, message):
                self.kept.append((sender, to, message))
            else:
                self.deliver(sender, to, message)

    def deliver(self, sender: str, to: str, message: Any) -> None:
        self.seen.append((sender, to, message))
        core = self.directories.get(to) or self.holders.get(to)
        if core is not None:
            self.take(to, core.handle(Received(sender, message), self.now))
        elif to.startswith("client:"):
            self.replies.append(message)

    def release(self, order: Callable[[list[Any]], list[Any]] = lambda kept: kept) -> None:
        """Let what was kept back arrive, in the order a test chooses."""
        kept, self.kept = self.kept, []
        self.hold = lambda sender, to, message: False
        for sender, to, message in order(kept):
            self.deliver(sender, to, message)
            self.run()

    def pass_s(self, seconds: float, step_s: float = 0.25) -> None:
        """Time passes; timers run."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + step_s)
            cores: dict[str, HolderCore | DirectoryCore] = {**self.holders, **self.directories}
            for name, core in cores.items():
                if core.next_deadline_s is not None and core.next_deadline_s <= self.now:
                    self.take(name, core.handle(Tick(), self.now))
                    self.run()

    # --- clients -------------------------------------------------------------------------------

    def ask(self, holder: str, message: Any) -> Any:
        before = len(self.replies)
        self.post("client:1", holder, message)
        self.run()
        return self.replies[before] if len(self.replies) > before else None

    def request(self) -> str:
        self._requests += 1
        return f"r{self._requests}"

    def store(self, holder: str, prompt: Prompt, first: int = 0, end: int | None = None) -> Done:
        indices = tuple(range(first, prompt.n // BLOCK if end is None else end))
        digests = b"".join(prompt.keys[0][1][i * 32 : i * 32 + 32] for i in indices)
        item = StoreItem(Objects(0, 0, indices, digests), 0, 16, ABI)
        begun = self.ask(holder, StoreBegin(self.request(), prompt, (item,), (), False))
        assert isinstance(begun, StoreBegun)
        assert begun.refused is None
        written = sum(len(run.indices) for run in begun.slots)
        done = self.ask(holder, StoreCommit(self.request(), begun.attempt, bytes(16 * written)))
        assert isinstance(done, Done)
        assert done.refused is None
        return done

    def drop(self, holder: str, prompt: Prompt, first: int, end: int) -> None:
        indices = tuple(range(first, end))
        digests = b"".join(prompt.keys[0][1][i * 32 : i * 32 + 32] for i in indices)
        assert self.ask(holder, Drop(self.request(), (Objects(0, 0, indices, digests),))).refused is None

    def probe(self, holder: str, prompt: Prompt, **fields: Any) -> Any:
        """Its Answer; None where it still waits."""
        message = Acquire(self.request(), prompt, (ABI,), (holder,), 1.0, None, 0, True, **fields)
        return self.ask(holder, message)

    def found(self, prompt: Prompt) -> dict[str, set[int]]:
        """What all shards say of a prompt: holder -> blocks."""
        some = next(iter(self.holders.values()))
        out: dict[str, set[int]] = {}
        for shard, lookup in some.ctx.router.lookups("x", prompt).items():
            if shard in self.directories:
                answer: Found = self.directories[shard].lookup(lookup)
                for stripe in answer.stripes:
                    bits = {i for i in range(stripe.bits.bit_length()) if stripe.bits >> i & 1}
                    out.setdefault(stripe.holder, set()).update(bits)
        return out

    def right(self, *prompts: Prompt) -> bool:
        """Whether the directory says of these prompts exactly what the holders have."""
        for prompt in prompts:
            keys = prompt.keys[0][1]
            true = {}
            for name, core in self.holders.items():
                table = core.ctx.books.table[0, 0]
                there = {i for i in range(prompt.n // BLOCK) if keys[i * 32 : i * 32 + 32] in table}
                if there:
                    true[name] = there
            if self.found(prompt) != true:
                return False
        return True

    def count(self, kind: type) -> int:
        return sum(1 for _, _, message in self.seen if isinstance(message, kind))
