"""Readers: acquire in every form, read under the lease, renew, release, forget; and judge what is read."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...fabric.arena import Arena
from ...fabric.kinds import Reason, Status
from ...fabric.leases import read_refusal, slots_unchanged
from ...fabric.messages import (
    Acquire,
    Answer,
    Cancel,
    GraphIdle,
    GraphRegister,
    GraphRegistered,
    LeaseGrant,
    LeasePart,
    Park,
    Release,
    Renew,
    Renewed,
    SlotRun,
)
from ...fabric.passport import Abi
from .judge import Held, parts_sound
from .models import PROMPT_TOKENS_MAX, TENANTS, Text

if TYPE_CHECKING:
    from .clients import Client
    from .world import Life

LONG_S = 4.0
"""Leases that last this long are read again and again."""
PASSING = frozenset({Reason.QUOTA, Reason.NOT_GRANTING, Reason.DRAINING})
"""Refusals that no other prompt would fare better with: who meets one waits."""

Script = Generator[Any, Any, None]


@dataclass(slots=True)
class Reading:
    """One lease in a reader's hands."""

    text: Text
    abis: tuple[Abi, ...]
    grant: LeaseGrant
    lives: dict[str, Life]
    deadline_s: float
    graph: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """A registered graph: where, its number, the prompt's length, and the slot of each group, shard and index."""

    life: Life
    number: int
    tokens: int
    slots: dict[tuple[int, int, int], int]


class Reader:
    """The reading half of a session."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.world = client.world
        self.rng = client.rng
        self._graph: Graph | None = None
        self.missed = False
        """Whether nothing at all was found last: who computes it stores it."""
        self.turned_away = False
        """Whether the last acquire was refused for a reason that takes its time to pass."""

    def act(self, lives: list[Life]) -> Script:
        """Acquire something, and use what is granted; or lose patience and say so."""
        world, leader = self.world, lives[0]
        graph = self._graph if self._graph is not None and self._graph.life is leader else None
        if self.rng.random() < 0.5:
            graph = None
        text = self._text(graph.tokens if graph is not None else None)
        message = self._request(lives, text, graph)
        hasty = self.rng.random() < 0.06
        answer = yield self.client.call(leader, message, self.rng.uniform(0.001, 0.1) if hasty else float("inf"))
        if answer is None and hasty and leader.alive:
            world.counts["cancels"] += 1
            yield self.client.call(leader, Cancel(self.client.request(), message.request))
        if not isinstance(answer, Answer):
            return
        world.counts[f"answers {answer.status}"] += 1
        world.counts["acquires"] += 1
        if answer.cause is not None:
            world.counts[f"cause {answer.cause.reason}"] += 1
        self._judge_answer(answer, message, text)
        self.missed = answer.status is Status.MISS
        self.turned_away = answer.cause is not None and answer.cause.reason in PASSING
        if answer.grant is None:
            return
        world.counts["granted"] += 1
        world.counts["replays granted"] += answer.replay_from is not None
        by_name = {life.name: life for life in lives}
        reading = Reading(text, message.abis, answer.grant, by_name, answer.grant.deadline_s, message.graph)
        mine, lease = world.held.setdefault(self.client.name, set()), (answer.grant.leader, answer.grant.lease)
        mine.add(lease)
        if message.graphs:
            self._in_place(reading, leader)
        yield from (self._replay(reading, leader) if message.graph else self._use(reading, leader))
        mine.discard(lease)

    def _request(self, lives: list[Life], text: Text, registered: Graph | None) -> Acquire:
        """An acquire in any of its forms."""
        rng, world = self.rng, self.world
        abis = world.layouts.first
        if rng.random() < 0.04:
            odd = rng.randrange(len(abis))
            abis = tuple(world.layouts.second[g] if g == odd else abi for g, abi in enumerate(abis))
        probe = registered is None and rng.random() < 0.07
        graph = registered is not None or (not probe and rng.random() < 0.12)
        return Acquire(
            self.client.request(),
            text.prompt,
            abis,
            self._readers(lives),
            rng.choice((0.5, 1.0, 2.0, 5.0, 14.0)),
            rng.choice((None, None, None, 0.0, 1.0, 4.0)),
            rng.choice((0, 0, 0, world.judge.grid, 3 * world.judge.grid)),
            probe,
            graph,
            rng.choice((0, 0, 1, -1)),
            deadline_s=rng.uniform(0.05, 3.0) if rng.random() < 0.06 else None,
            graphs=((lives[0].name, registered.number),) if registered is not None else (),
            prefetch=probe and rng.random() < 0.3,
        )

    def _text(self, n: int | None = None) -> Text:
        rng, library = self.rng, self.world.library
        n = n or rng.randrange(PROMPT_TOKENS_MAX // 3, PROMPT_TOKENS_MAX + 8)
        tenant = TENANTS[0] if rng.random() < 0.9 else TENANTS[1]
        return library.text(self.client.prompt_name(), n, self.client.weights, tenant)

    def _readers(self, lives: list[Life]) -> tuple[str, ...]:
        """The holder of each shard on this node."""
        of_shard = {shard: life.name for life in lives for shard in self.world.holders[life.name][1]}
        return tuple(of_shard[shard] for shard in range(self.world.model.shards))

    def _judge_answer(self, answer: Answer, message: Acquire, text: Text) -> None:
        """What no answer may say, whatever is stored."""
        world, grant = self.world, answer.grant
        wrong = None
        if answer.tokens > answer.hash_tokens:
            wrong = f"{answer.tokens} tokens are more than the {answer.hash_tokens} that hashes promise"
        elif grant is not None and (message.probe or grant.tokens != answer.tokens or grant.tokens >= len(text)):
            wrong = f"a grant of {grant.tokens} tokens for {answer.tokens} of {len(text)}"
        elif grant is not None and grant.tokens < message.min_tokens:
            wrong = f"{grant.tokens} tokens are less than the {message.min_tokens} asked for"
        elif grant is not None and grant.weights != text.prompt.weights:
            wrong = "the grant is of other weights than the prompt"
        elif grant is not None and (grant.replay_from != answer.replay_from or (answer.replay_from and message.graph)):
            wrong = f"a grant that replays from {grant.replay_from}, an answer from {answer.replay_from}"
        elif grant is not None:
            wrong = parts_sound(grant, world.model.shards)
        if wrong is not None:
            world.fail("wrong_answer", f"{self.client.name}: {wrong}", self.client.name)

    # --- use -----------------------------------------------------------------------------------

    def _use(self, reading: Reading, leader: Life) -> Script:
        """Read, perhaps renew and read again, then release; or forget, and be refused later."""
        yield from self._read(reading)
        lease_s = reading.deadline_s - self.world.local(self.client.node)
        for _ in range(self.rng.randrange(1, 5) if lease_s > LONG_S and self.rng.random() < 0.7 else 0):
            yield self.rng.uniform(0.5, 4.0)
            yield from self._read(reading)
        for _ in range(self.rng.choice((0, 0, 1, 2))):
            yield self.rng.uniform(0.1, 2.0)
            message = Renew(self.client.request(), reading.grant.lease, self.rng.choice((0.5, 1.0, 3.0, 9.0)))
            renewed = yield self.client.call(leader, message)
            if not isinstance(renewed, Renewed) or renewed.refused is not None:
                return
            reading.deadline_s = max(reading.deadline_s, renewed.deadline_s)
            yield from self._read(reading)
        ends = self.rng.random()
        if ends < 0.08:
            yield self.client.call(leader, Park(self.client.request(), reading.grant.lease))
            return
        if ends < 0.75:
            yield self.client.call(leader, Release(self.client.request(), reading.grant.lease, reading.grant.tokens))
            return
        yield self.rng.uniform(0.0, 6.0)
        yield from self._read(reading)

    def _replay(self, reading: Reading, leader: Life) -> Script:
        """A captured graph reads at fixed addresses until its process says it is idle, deadline or not."""
        for _ in range(self.rng.randrange(2, 7)):
            if any(not reading.lives[part.holder].alive for part in reading.grant.parts):
                return
            moved = [p for p in reading.grant.parts if not slots_unchanged(p, reading.lives[p.holder].arena)]
            if moved:
                self.world.fail(
                    "moved_under_graph",
                    f"{self.client.name}: graph lease {reading.grant.lease} at {moved[0].holder}",
                    moved[0].holder,
                    self.client.name,
                )
                return
            self._judge(reading, self._take(reading, 0) + self._take(reading, 1))
            yield self.rng.uniform(0.2, 2.5)
        if len(reading.grant.parts) == 1 and self.rng.random() < (0.6 if self._graph is None else 0.1):
            yield from self._register(reading, leader)
        yield self.client.call(leader, Release(self.client.request(), reading.grant.lease, None))

    def _register(self, reading: Reading, leader: Life) -> Script:
        """Capture a graph over the slots in hand, or drop the one there is."""
        known = self._graph
        if known is not None:
            self._graph = None
            if known.life.alive:
                yield self.client.call(known.life, GraphIdle(self.client.request(), known.number, True))
            return
        slots = reading.grant.parts[0].slots
        reply = yield self.client.call(leader, GraphRegister(self.client.request(), slots))
        if isinstance(reply, GraphRegistered) and reply.refused is None:
            self.world.counts["graphs registered"] += 1
            self._graph = Graph(leader, reply.graph, len(reading.text), _places(slots))

    def _in_place(self, reading: Reading, leader: Life) -> None:
        """A lease for a registered graph lies in that graph's slots."""
        if self._graph is None:
            return
        leased = _places(reading.grant.parts[0].slots)
        self.world.counts["graph leases in place"] += 1
        odd = [place for place, slot in leased.items() if self._graph.slots.get(place) != slot]
        if odd:
            detail = f"{self.client.name}: {odd[0]} of graph {self._graph.number} lies in slot {leased[odd[0]]}"
            self.world.fail("moved_under_graph", detail, leader.name)

    # --- read ----------------------------------------------------------------------------------

    def _read(self, reading: Reading) -> Script:
        """A guarded read: refused before, or refused after, or every byte is right."""
        refused = self._refusal(reading)
        if refused is None:
            held = self._take(reading, 0)
            yield self.rng.uniform(0.0, 0.2)
            held += self._take(reading, 1)
            refused = self._refusal(reading)
            if refused is None:
                self.world.counts["reads"] += 1
                self._judge(reading, held)
                return
        self.world.counts[f"refused {refused}"] += 1

    def _refusal(self, reading: Reading) -> Reason | None:
        """What the reader sees by itself, checked against what the world knows."""
        now = self.world.local(self.client.node)
        parts: list[tuple[LeasePart, Arena | None]] = [
            (part, reading.lives[part.holder].arena) for part in reading.grant.parts
        ]
        grant = reading.grant
        refused = read_refusal(grant, reading.deadline_s, parts, now)
        wrong = self._wrongly(reading, refused, now)
        if wrong is not None:
            self.world.fail("fence", f"{self.client.name}: lease {grant.lease}: {wrong}", self.client.name)
        return refused

    def _wrongly(self, reading: Reading, refused: Reason | None, now: float) -> str | None:
        """Why a refusal, or a permission, cannot be right."""
        lives = [reading.lives[part.holder] for part in reading.grant.parts]
        if refused is None:
            if now >= reading.deadline_s:
                return "read past its deadline"
            if any(life.core.ctx.weights != reading.grant.weights for life in lives):
                return "read under retired weights"
            if any(self.world.queue.now > life.right_until_s for life in lives):
                return "read from a life that may not grant any more"
        elif refused is Reason.VERSION_CHANGED and now < reading.deadline_s and self._all_serve(lives):
            return "its slots changed before its deadline"
        return None

    def _all_serve(self, lives: list[Life]) -> bool:
        """Whether none of these lives ended, in truth or by the supervisor's word."""
        return all(life.alive and not life.given_up for life in lives)

    def _take(self, reading: Reading, half: int) -> list[Held]:
        """Every second leased slot's bytes, as they lie there now."""
        held = []
        for part in reading.grant.parts:
            arena = reading.lives[part.holder].arena
            for run in part.slots:
                for place, index in enumerate(run.indices):
                    if place % 2 == half:
                        slot = int.from_bytes(run.slots[place * 4 : place * 4 + 4], "little")
                        held.append(Held(run.group, run.shard, index, arena.content(slot).tobytes()))
        return held

    def _judge(self, reading: Reading, held: list[Held]) -> None:
        text = reading.text
        wrong = self.world.judge.verdict(len(text), reading.grant, text.digests, reading.abis, held)
        if wrong is not None:
            self.world.wrong_reads += 1
            about = [part.holder for part in reading.grant.parts]
            self.world.fail("wrong_read", f"{self.client.name}: lease {reading.grant.lease}: {wrong}", *about)


def _places(runs: tuple[SlotRun, ...]) -> dict[tuple[int, int, int], int]:
    """The slot of each group, shard and index."""
    return {
        (run.group, run.shard, index): int.from_bytes(run.slots[place * 4 : place * 4 + 4], "little")
        for run in runs
        for place, index in enumerate(run.indices)
    }
