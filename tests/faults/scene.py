"""What the fault tests share: both nodes' sessions in one process, moments to strike at, and the books afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvfabric import Fabric, LeaseRefused, Reason, Session
from kvfabric.actors.answer import Answer
from kvfabric.fabric.arena import PAGE_BYTES, Arena
from kvfabric.fabric.model import ModelSpec

from ..actors.stories import content, eventually, prompt, wrong_bytes

BIG_BLOCK_BYTES = 2 << 20
TOKENS = 518
RESUME = 512
NEEDED = {"csa": range(32), "idx": range(32), "tail": range(127, 128), "swa": range(124, 128)}
"""What a resume at RESUME needs: 64 MiB of history, and a little of the rest."""


def big_prompt(name: str) -> list[int]:
    return prompt(name, TOKENS)


def needed(model: ModelSpec, tokens: list[int]) -> dict[str, dict[int, Any]]:
    """What a resume at RESUME reads, and no more."""
    return {
        name: {i: content(tokens, name, i, model.group(name).block_bytes) for i in indices}
        for name, indices in NEEDED.items()
    }


EVEN = ("pinned_slots", "attempts", "quarantined_slots", "leases", "slots_lost")
"""What a holder's status tells that must come back to nothing."""


class Scene:
    """A fabric of two nodes as this process sees it: a session with each node's holder."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.nodes = sorted({m.node for m in fabric.info().members if m.shards}, key=lambda n: n != fabric.info().node)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()

    def session(self, place: int) -> Session:
        """A new session with the holders of a node, as a process on that node has it: one host, many nodes."""
        node = self.nodes[place]
        made = Session(lambda: replace(self.fabric.info(), node=node), name=self.fabric.name)
        return self._open.enter_context(made)

    def holders(self, place: int) -> list[dict[str, Any]]:
        """The status of a node's holders, by address."""
        found = [h for h in self.fabric.status()["holders"] if h.get("node") == self.nodes[place]]
        return sorted(found, key=lambda h: h["address"])

    def holder(self, place: int) -> dict[str, Any]:
        return self.holders(place)[0]

    def whole(self, within_s: float = 60.0) -> None:
        """Wait until every holder is up and may grant."""
        places = len(self.nodes)
        count = self.fabric.spec.holders_per_node

        def away() -> list[Any]:
            found = self.fabric.status()["holders"]
            return [h for h in found if not h.get("grants")] + ["missing"] * (places * count - len(found))

        eventually(away, lambda missing: not missing, within_s)

    def balanced(self, within_s: float = 30.0) -> None:
        """No pin, attempt or quarantine is left, no slot is lost, every slot is free or may be evicted."""

        def books() -> list[Any]:
            wrong: list[Any] = []
            for h in self.fabric.status()["holders"]:
                wrong += [(h["address"], key, h.get(key)) for key in EVEN if h.get(key) != 0]
                uneven = [p for p in h.get("pools", ()) if p["free"] + p["evictable"] != p["slots"]]
                wrong += [(h["address"], pool) for pool in uneven]
            return wrong

        eventually(books, lambda wrong: not wrong, within_s)

    def publish(self, session: Session, tokens: list[int]) -> None:
        stored = session.publish(tokens, needed(session.model, tokens))
        assert stored.ok, stored

    def known(self, session: Session, tokens: list[int]) -> None:
        """Wait until a session's node knows from the directory that the whole prompt is there."""
        eventually(lambda: session.probe(tokens).tokens, lambda found: found == RESUME)


def read(answer: Answer, session: Session, tokens: list[int]) -> int:
    """Check every leased byte and release; how many tokens the lease covered."""
    if answer.lease is None:
        assert answer.tokens == 0 or answer.status.value in {"PENDING", "INVALID", "MISS", "PARTIAL_HIT"}
        return 0
    with answer.lease as lease:
        assert wrong_bytes(lease, session.model, tokens) == []
        return lease.tokens


def cut(read_all: Callable[[], int]) -> bool:
    """Whether a strike came before the grant. A lease that was granted and then lost its holder was struck too late."""
    try:
        return read_all() < RESUME
    except LeaseRefused as refused:
        if refused.reason is not Reason.HOLDER_LOST:
            raise
        return False


def arena_of(session: Session, shard: int = 0) -> Arena:
    """The arena of the holder that a session reads a shard from, mapped as its workers map it."""
    return session._holders.client(session._holders.of_shard(shard)).arena


def sample(arena: Arena, group: int = 0) -> npt.NDArray[np.uint8]:
    """The first byte of each page of a group's slots."""
    pool = next(n for n, p in enumerate(arena.layout.pools) if p.group == group)
    first = arena.layout.pool_offset[pool]
    last = first + arena.layout.pools[pool].slots * arena.layout.pools[pool].stride_bytes
    return arena.bytes[first:last:PAGE_BYTES]


def in_mid_transfer(session: Session, tokens: list[int], strike: Callable[[], object], arena: Arena) -> Answer:
    """Acquire, and strike as soon as first bytes change in the arena that they travel to."""
    now = sample(arena)
    before = now.copy()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(session.acquire, tokens)
        while np.array_equal(now, before) and not coming.done():
            pass
        strike()
        return coming.result(60)


def kill(process: dict[str, Any]) -> Callable[[], None]:
    return lambda: os.kill(process["pid"], signal.SIGKILL)
