"""Clients that keep to no order: replayed ids, others' leases and attempts, everything twice. Nothing wrong is leased."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvfabric.fabric.effects import PeerClosed, Received
from kvfabric.fabric.expected import Work
from kvfabric.fabric.invariants import check
from kvfabric.fabric.kinds import Status
from kvfabric.fabric.messages import (
    Acquire,
    Answer,
    Audited,
    Cancel,
    Computed,
    Drop,
    Generated,
    GraphIdle,
    GraphRegister,
    GraphRegistered,
    Misuse,
    Objects,
    Park,
    Release,
    Renew,
    Retain,
    StoreAbort,
    StoreBegin,
    StoreBegun,
    StoreCommit,
    StoreItem,
    StoreQuiet,
    SwapIn,
    SwapOut,
)
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.requests import CLIENT_RECORDS, refusal_of
from kvfabric.transport.digest import checksum

from .many_holders import ABI, Holders

MODEL = ModelSpec.load(
    {
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 64},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 6, "block_bytes": 64},
        ]
    }
)
PROMPTS = [range(9), range(17), range(100, 113), range(500, 521)]
HOLDERS = ["n0", "n1"]
CLIENTS = ["client:unix1", "client:unix2", "client:handle"]
LATER_S = (0.0, 0.01, 1.0, 3.0, 40.0, 400.0)


def bytes_of(group: int, digest: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(digest + bytes([group]) * 32, dtype=np.uint8)


class Hostile:
    """Draws records; what it saw in any reply, of whichever client, it uses for all of them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(f"hostile {seed}")
        self.world = Holders(MODEL, {"n0": (0,), "n1": (0,)}, slots=12, answers_kept=32)
        self.leases, self.attempts = [0, -1, 1 << 62], [0, -1, 1 << 62]
        self.begun: dict[int, StoreBegun] = {}
        self.digests: dict[int, dict[tuple[int, int], bytes]] = {}
        self.asked: dict[str, Any] = {}
        self.graphs = [0, -1]
        self.named = 0
        self.seen = {"granted": 0, "misuse": 0}

    def name(self) -> str:
        self.named += self.draw.random() < 0.85
        return f"r{self.named if self.draw.random() < 0.85 else self.draw.randrange(max(0, self.named - 20), self.named + 1)}"

    def prompt(self) -> Any:
        return self.world.prompt(self.world.keys(self.draw.choice(PROMPTS)))

    def objects(self) -> tuple[Objects, ...]:
        keys = self.world.keys(self.draw.choice(PROMPTS))
        found = []
        for group in range(len(MODEL.groups)):
            if self.draw.random() < 0.8:
                indices = tuple(i for i in range(len(keys) // 4) if self.draw.random() < 0.9)
                digests = b"".join(keys.keys(4)[32 * i : 32 * i + 32] for i in indices)
                found.append(Objects(group, 0, indices, digests))
        return tuple(found)

    def asks(self, holder: str) -> tuple[str, Any]:
        """Who asks what; mostly an attempt's own writer commits it."""
        client, record = self.draw.choice(CLIENTS), self.record(holder)
        ours = self.world.cores[holder].stores.attempts
        if isinstance(record, StoreCommit) and ours and self.draw.random() < 0.7:
            attempt = self.draw.choice(list(ours.values()))
            return attempt.client, StoreCommit(record.request, attempt.number, self.sums(holder, attempt.number))
        return client, record

    def record(self, holder: str) -> Any:
        draw, name = self.draw, self.name()
        lease, attempt = draw.choice(self.leases), draw.choice(self.attempts)
        usual = draw.random() < 0.6
        kind = draw.choice(
            [StoreBegin, StoreCommit, Acquire] if usual else sorted(CLIENT_RECORDS, key=lambda c: c.__name__)
        )
        match kind.__name__:
            case "Acquire":
                wait_s = draw.choice([None, 0.0, 2.0])
                wanted = Acquire(name, self.prompt(), (ABI,) * 2, (holder,), draw.choice([0.5, 30.0]), wait_s, 0, False)
                return replace(wanted, probe=draw.random() < 0.2, graph=draw.random() < 0.2)
            case "StoreBegin":
                items = tuple(StoreItem(o, draw.randrange(2), 64, ABI) for o in self.objects())
                retire = self.objects() if draw.random() < 0.2 else ()
                return StoreBegin(name, self.prompt(), items, retire, replace=draw.random() < 0.5)
            case "StoreCommit":
                return StoreCommit(name, attempt, self.sums(holder, attempt))
            case "Renew":
                return Renew(name, lease, draw.choice([0.5, 30.0]))
            case "Release":
                return Release(name, lease, draw.choice([None, 8, 1 << 20]))
            case "Audited":
                return Audited(name, lease, draw.choice(["equal", "close"]))
            case "Cancel":
                return Cancel(name, self.name())
            case "Computed":
                return Computed(name, Work.PREFILL, 10, 0.1)
            case "Generated":
                return Generated(name, self.prompt(), draw.choice([0, 12, 1 << 20]))
            case "Retain":
                return Retain(name, self.prompt(), draw.choice([1.0, 1e300]), draw.choice([-1e300, 0.0, 1.0, 1e300]))
            case "GraphRegister":
                grants = [b.grant for b in self.world.replies if isinstance(b, Answer) and b.grant is not None]
                return GraphRegister(name, draw.choice(grants).parts[0].slots if grants else ())
            case "GraphIdle":
                return GraphIdle(name, draw.choice(self.graphs), draw.random() < 0.5)
        if kind in (Drop, SwapIn, SwapOut):
            return kind(name, self.objects())
        if kind in (StoreAbort, StoreQuiet):
            return kind(name, attempt)
        return Park(name, lease)

    def sums(self, holder: str, attempt: int) -> bytes:
        begun = self.begun.get(attempt)
        if begun is None or self.draw.random() < 0.1:
            return bytes(16 * self.draw.randrange(5) + 1)
        sums = b""
        open_attempt = self.world.cores[holder].stores.attempts.get(attempt)
        for obj in open_attempt.objects if open_attempt is not None else ():
            content = bytes_of(obj.group, obj.digest)
            self.world.arenas[holder].payload(obj.slot)[:64] = content
            sums += checksum(content)
        return sums

    def step(self) -> None:
        world, holder = self.world, self.draw.choice(HOLDERS)
        told = len(world.replies)
        if self.draw.random() < 0.05:
            world.feed(holder, PeerClosed(self.draw.choice(CLIENTS)))
        elif self.draw.random() < 0.1:
            world.pass_time(self.draw.choice(LATER_S))
        else:
            client, record = self.asks(holder)
            if refusal_of(record, MODEL) is None:
                for _ in range(self.draw.choice([1, 1, 1, 2])):
                    world.feed(holder, Received(client, record))
                self.asked.setdefault(record.request, record)
        for reply in world.replies[told:]:
            self.hear(reply)

    def hear(self, reply: Any) -> None:
        if isinstance(reply, StoreBegun) and reply.attempt:
            self.attempts.append(reply.attempt)
            self.begun[reply.attempt] = reply
        elif isinstance(reply, GraphRegistered):
            self.graphs.append(reply.graph)
        elif isinstance(reply, Misuse):
            self.seen["misuse"] += 1
        elif isinstance(reply, Answer) and reply.grant is not None and reply.grant.lease not in self.leases:
            self.leases.append(reply.grant.lease)
            self.seen["granted"] += 1
            self.read(reply)
        del self.attempts[3:-20], self.leases[3:-20], self.graphs[2:-8]

    def read(self, answer: Answer) -> None:
        """What a lease names holds what was stored, for the prompt that was asked for."""
        assert answer.grant is not None
        core, arena = self.world.cores[answer.grant.leader], self.world.arenas[answer.grant.leader]
        if answer.grant.lease not in core.ctx.leases.live:
            return
        for run in answer.grant.parts[0].slots:
            for slot in np.frombuffer(run.slots, "<u4").tolist():
                obj = core.ctx.books.owner[slot]
                assert obj is not None
                assert bytes(arena.payload(slot)[:64]) == bytes(bytes_of(run.group, obj.digest))


@pytest.mark.parametrize("seed", range(2))
def test_no_order_of_requests_breaks_the_books_or_leases_what_was_not_stored(seed: int) -> None:
    hostile = Hostile(seed)
    world = hostile.world
    for number in range(300):
        hostile.step()
        if number % 10 == 0:
            assert [check(core) for core in world.cores.values()] == [[], []]
    assert hostile.seen["granted"]
    assert hostile.seen["misuse"]
    for holder in HOLDERS:
        for client in CLIENTS:
            world.feed(holder, PeerClosed(client))
    world.pass_time(2000.0)
    world.at_rest()
    assert world.store("n0", range(900, 917)).refused is None
    answer = world.acquire("n0", range(900, 917))
    assert answer is not None
    assert answer.status is Status.FULL_HIT
