"""A simulated fabric for replays: real cores and directory, simulated time, slots that have headers and no bytes.

Messages, transfers and disks take no time; only timers do, and they run when a request's time has passed them.
An object's checksum is made of its digest, so that whatever lies in a leased slot can be told from what should.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...fabric.arena import ArenaLayout, header_arena
from ...fabric.context import HolderConfig
from ...fabric.directory import DirectoryCore
from ...fabric.effects import (
    DeleteExtent,
    Digested,
    DigestSlots,
    DiskRead,
    DiskWritten,
    Effect,
    ExtentEntry,
    Moved,
    ReadExtent,
    Received,
    Restored,
    Send,
    StartTransfer,
    Tick,
    TransferDone,
    TransferFault,
    WriteExtent,
)
from ...fabric.eviction import EvictionFactory
from ...fabric.holder import HolderCore
from ...fabric.kinds import ProtocolError, Reason
from ...fabric.messages import LeaseGrant, Objects, Prompt, SwapOut
from ...fabric.model import ModelSpec
from ...policies.costs import CostGuess
from ...policies.planning import planning_of

DIRECTORY = "directory:0"
CLIENT = "client:replay"
SPILL_SHARE = 16
"""With a disk, at least so large a part of each pool is kept free, by moving down what is worth least."""
TIMERS_MAX = 1_000_000
"""Timers that run before one request: more is a loop."""


def checksums_of(digests: bytes) -> bytes:
    """The checksums, 16 bytes each, of objects with these digests of 32 bytes: each one's second half."""
    return np.frombuffer(digests, dtype="V16")[1::2].tobytes()


@dataclass(frozen=True, slots=True)
class Setup:
    """What a replay runs on. ``disk_bytes``: of each node; None for no disk.

    ``costs``: what a plan of least time believes. Transfers and restores take no simulated time, so nothing corrects it.
    """

    model: ModelSpec
    nodes: int
    layout: ArenaLayout
    weights: bytes
    eviction: EvictionFactory
    disk_bytes: int | None = None
    slab_shares: tuple[int, ...] = ()
    costs: CostGuess | None = None


@dataclass(slots=True)
class Node:
    """One holder: its core, and what its disk holds."""

    core: HolderCore
    extents: dict[int, tuple[ExtentEntry, ...]] = field(default_factory=dict)


class SimulatedFabric:
    """Holders ``n0`` .. and one directory, driven in one thread."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now_s = 0.0
        self._queue: deque[tuple[str, str, Any]] = deque()
        self._replies: dict[str, Any] = {}
        self._directory = DirectoryCore(DIRECTORY, setup.model, 1)
        self.nodes: dict[str, Node] = {}
        model = setup.model
        for number in range(setup.nodes):
            name = f"n{number}"
            config = HolderConfig(
                name,
                name,
                shards=tuple(range(model.shards)),
                directory=DIRECTORY,
                grants_always=True,
                disk_bytes_max=setup.disk_bytes,
                slab_shares=setup.slab_shares,
            )
            core = HolderCore(
                config,
                model,
                header_arena(setup.layout, 1),
                1,
                setup.weights,
                planning=planning_of(model, setup.costs),
                eviction=setup.eviction,
            )
            self.nodes[name] = Node(core)
        self._perform(DIRECTORY, self._directory.start(list(self.nodes)))
        for name, node in self.nodes.items():
            self._perform(name, node.core.start(0.0))
        self._pump()

    # --- asking ----------------------------------------------------------------------------------

    def ask(self, node: str, message: Any) -> Any:
        """The reply to a client's record. Raises ProtocolError where none comes."""
        self._queue.append((CLIENT, node, message))
        self._pump()
        limit_s = self.now_s + 3600.0
        while message.request not in self._replies and self._next_timer(limit_s):
            self._pump()
        reply = self._replies.pop(message.request, None)
        if reply is None:
            raise ProtocolError(f"{type(message).__name__} was never answered")
        return reply

    def advance(self, to_s: float) -> None:
        """Let simulated time pass, running every timer on the way."""
        for _ in range(TIMERS_MAX):
            if not self._next_timer(to_s):
                self.now_s = max(self.now_s, to_s)
                return
            self._pump()
        raise ProtocolError(f"more than {TIMERS_MAX} timers before {to_s} s")

    def _next_timer(self, until_s: float) -> bool:
        """Go to the first timer that is due by then and run it; False where there is none."""
        due = [(d, name) for name, node in self.nodes.items() if (d := node.core.next_deadline_s) is not None]
        if not due or min(due)[0] > until_s:
            return False
        at_s, name = min(due)
        self.now_s = max(self.now_s, at_s)
        self._perform(name, self.nodes[name].core.handle(Tick(), self.now_s))
        return True

    def _pump(self) -> None:
        queue = self._queue
        while queue:
            sender, to, message = queue.popleft()
            if to == DIRECTORY:
                self._perform(to, self._directory.handle(Received(sender, message), self.now_s))
            elif to == CLIENT:
                self._replies[message.request] = message
            else:
                self._perform(to, self.nodes[to].core.handle(Received(sender, message), self.now_s))

    def _perform(self, owner: str, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._queue.append((owner, effect.to, effect.message))
            else:
                self._work(owner, effect)

    # --- what the cores ask for ------------------------------------------------------------------

    def _work(self, owner: str, effect: Effect) -> None:
        node = self.nodes[owner]
        match effect:
            case StartTransfer():
                done = TransferDone(effect.token, self._moved(owner, effect))
                self._perform(owner, node.core.handle(done, self.now_s))
            case DigestSlots():
                arena = node.core.ctx.arena
                sums = tuple(arena.checksum(slot) for slot in effect.slots)
                self._perform(owner, node.core.handle(Digested(effect.token, sums), self.now_s))
            case WriteExtent():
                node.extents[effect.extent] = effect.entries
                self._perform(owner, node.core.handle(DiskWritten(effect.token, None), self.now_s))
            case ReadExtent():
                read = DiskRead(effect.token, tuple(self._restored(node, *one) for one in effect.reads))
                self._perform(owner, node.core.handle(read, self.now_s))
            case DeleteExtent():
                node.extents.pop(effect.extent, None)
            case _:
                raise ProtocolError(f"the replay does not know the effect {type(effect).__name__}")

    def _moved(self, owner: str, effect: StartTransfer) -> tuple[Moved, ...]:
        source = self.nodes.get(effect.source)
        if source is None:
            return tuple(Moved(pair.slot, None, TransferFault.PEER_LOST) for pair in effect.pairs)
        there = source.core.ctx.arena
        return tuple(Moved(pair.slot, there.checksum(pair.source_slot)) for pair in effect.pairs)

    @staticmethod
    def _restored(node: Node, extent: int, entry: int, slot: int) -> Restored:
        entries = node.extents.get(extent)
        if entries is None or entry >= len(entries):
            return Restored(slot, None, Reason.RESTORE_FAILED)
        return Restored(slot, entries[entry].checksum)

    # --- tiers -----------------------------------------------------------------------------------

    def spill(self, node: str, request: str, coming: Mapping[int, int]) -> None:
        """Move the least worth of each pool that is nearly full to the node's disk, before it is pushed out.

        ``coming``: by group, as many objects as a request may be expected to store.
        """
        core = self.nodes[node].core
        books = core.ctx.books
        moving: list[Objects] = []
        for pool in books.pools.values():
            spare = max(1, pool.capacity // SPILL_SHARE)
            reserve = min(max(spare, coming.get(pool.group, 0)), pool.capacity)
            if len(pool.free) >= reserve:
                continue
            unit = self.setup.model.groups[pool.group].unit_tokens
            found = books.leaving.least_worth(pool, reserve + spare - len(pool.free))
            indices = tuple(obj.position // unit - 1 for obj in found)
            if found:
                moving.append(Objects(pool.group, pool.shard, indices, b"".join(obj.digest for obj in found)))
        if moving:
            self.ask(node, SwapOut(request, tuple(moving)))

    # --- judging ---------------------------------------------------------------------------------

    def wrong_in(self, grant: LeaseGrant, prompt: Prompt) -> int:
        """Leased slots whose header names another object than the prompt's, or another checksum than its own."""
        keys = {unit: np.frombuffer(blob, dtype="V16").reshape(-1, 2) for unit, blob in prompt.keys}
        groups = self.setup.model.groups
        wrong = 0
        for part in grant.parts:
            arena = self.nodes[part.holder].core.ctx.arena
            for run in part.slots:
                slots = np.frombuffer(run.slots, dtype="<u4").astype(np.int64)
                due = keys[groups[run.group].unit_tokens][list(run.indices)]
                same = (arena.table["object"][slots] == due[:, 0]) & (arena.checksums[slots] == due[:, 1])
                wrong += len(slots) - int(np.count_nonzero(same))
        return wrong
