"""The pure world: the protocol cores under a virtual clock, in one thread.

Messages, transfers and disks take no time; only timers do. What a step asks runs until every queue
is empty; where every step waits, the clock jumps to the next deadline. So a story gives the same
answers each time, in milliseconds.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import xxhash

from ...fabric import wire
from ...fabric.arena import Arena, heap_arena
from ...fabric.context import HolderConfig
from ...fabric.directory import DirectoryCore
from ...fabric.effects import (
    DeleteExtent,
    Digested,
    DigestSlots,
    DiskRead,
    DiskWritten,
    Effect,
    Event,
    ReadExtent,
    Received,
    Send,
    StartTransfer,
    Tick,
    TransferDone,
    Undeliverable,
    WriteExtent,
)
from ...fabric.holder import HolderCore
from ...fabric.identity import weights_digest16
from ...fabric.kinds import ProtocolError
from ...fabric.messages import EventsSeen, GrantUntil, HolderGone, SetWeights, StoreBegin, StoreBegun
from ...fabric.model import ModelSpec
from ...policies.planning import planning_of
from .faults import Faults
from .machine import Life, Place
from .story import DIRECTORY, Fault, How, Story, Where
from .world import Books, Hung, Seat, Victim, layout_of, seats_of, slots_needed

DIRECTORY_ADDRESS = "directory:0"
SUPERVISOR = "supervisor"
RENEW_EVERY_S = 1.0
GRANT_S = 10.0
TIMERS_AT_ONCE_MAX = 100_000
"""Timers that fire without the clock moving: more is a loop."""
CLOCK_EPSILON_S = 1e-9
"""Sums of decimal seconds miss each other by less; a deadline that near is meant to be reached."""
PATIENCE_S = 366 * 86400.0
"""Bounds that the format does not speak of (the longest lease, the oldest open attempt) stay out of a story's way."""


class Reply:
    """Something a step waits for."""

    __slots__ = ("done", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None

    def set(self, value: Any) -> None:
        self.done, self.value = True, value

    def __await__(self) -> Generator[Reply, None, Any]:
        while not self.done:
            yield self
        return self.value


class PureWorld:
    """Implements ``World`` on the pure core."""

    def __init__(self, story: Story) -> None:
        self.model: ModelSpec = story.model
        self._now = 0.0
        self._queue: deque[Callable[[], None]] = deque()
        self._replies: dict[str, tuple[Life, Reply]] = {}
        self._writers: dict[str, Life] = {}
        """Whose memory the writer of each attempt (by its request) has mapped, dead or alive."""
        self._sleepers: list[tuple[float, int, Reply]] = []
        self._sequence = 0
        self._renew_at = RENEW_EVERY_S
        self._weights = story.model.weights
        self._retired: tuple[str, ...] = ()
        self._cut: set[frozenset[str]] = set()
        self._faults: dict[str, Faults] = {node: Faults() for node in story.nodes}
        self._counters: Counter[str] = Counter()
        self._seats = {node: seats_of(self.model, node) for node in story.nodes}
        self._places: dict[str, Place] = {}
        self._lives: dict[str, Life] = {}
        self._directory: DirectoryCore | None = None
        self._epoch = 0
        slots = slots_needed(story)
        for node, seats in self._seats.items():
            for seat in seats:
                of_node = {group.name: slots[node, group.name] for group in self.model.groups}
                layout, shares = layout_of(self.model, seat.shards, of_node, story.nodes[node])
                self._places[seat.holder] = Place(node, seat, layout, self._faults[node], shares)
        self._start_directory()
        for holder in self._places:
            self._start_holder(holder)
        self._pump()

    # --- running -------------------------------------------------------------------------------

    def seats(self, node: str) -> Sequence[Seat]:
        return self._seats[node]

    def run(self, work: Sequence[Coroutine[Any, Any, Any]], limit_s: float) -> list[Any]:
        results: list[Any] = [None] * len(work)
        waiting: dict[int, tuple[Coroutine[Any, Any, Any], Reply | None]] = {i: (w, None) for i, w in enumerate(work)}
        until_s = self._now + limit_s
        stalled, stalled_at_s = 0, self._now
        try:
            while waiting:
                moved = self._resume(waiting, results)
                if self._queue:
                    self._queue.popleft()()  # one at a time, so that steps meet each other half-way
                elif not moved:
                    stalled, stalled_at_s = (stalled + 1 if self._now == stalled_at_s else 0), self._now
                    if stalled > TIMERS_AT_ONCE_MAX or not self._jump(until_s):
                        raise Hung(f"{len(waiting)} of {len(work)} steps wait for ever")
        finally:
            for coroutine, _ in waiting.values():
                coroutine.close()
        self._settle()
        return results

    def _resume(self, waiting: dict[int, tuple[Coroutine[Any, Any, Any], Reply | None]], results: list[Any]) -> bool:
        """Let every step go on whose reply is there; whether any did."""
        ready = [i for i, (_, reply) in waiting.items() if reply is None or reply.done]
        for i in ready:
            coroutine, _ = waiting[i]
            try:
                waiting[i] = (coroutine, coroutine.send(None))
            except StopIteration as end:
                results[i] = end.value
                del waiting[i]
        return bool(ready)

    def _pump(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def _settle(self) -> None:
        """Every event of a reachable holder is applied: one whose events were lost on the way tells all."""
        self._pump()
        if self._directory is None:
            return
        for holder, life in self._lives.items():
            stream = self._directory.streams.get(holder)
            events = life.core.events
            if self._reachable(life.node, DIRECTORY) and (stream is None or stream.seq != events.seq):
                seen = EventsSeen(DIRECTORY_ADDRESS, self._epoch, life.incarnation, 0, True)
                self._post(DIRECTORY_ADDRESS, holder, seen)
        self._pump()

    # --- time ----------------------------------------------------------------------------------

    def now(self, node: str) -> float:
        return self._now

    async def advance(self, seconds: float) -> None:
        reply = Reply()
        self._sequence += 1
        heapq.heappush(self._sleepers, (self._now + seconds, self._sequence, reply))
        await reply

    def _next_deadline_s(self) -> float:
        deadlines = [self._renew_at]
        if self._sleepers:
            deadlines.append(self._sleepers[0][0])
        for life in self._lives.values():
            due_s = life.core.next_deadline_s
            if due_s is not None:
                deadlines.append(due_s)
        return min(deadlines)

    def _jump(self, until_s: float) -> bool:
        """Go to the next deadline and run what is due; False where it lies behind ``until_s``."""
        due_s = self._next_deadline_s()
        if due_s > until_s:
            return False
        self._now = max(self._now, due_s)
        if self._sleepers and self._sleepers[0][0] <= self._now + CLOCK_EPSILON_S:
            self._now = max(self._now, self._sleepers[0][0])
        reached_s = self._now + CLOCK_EPSILON_S
        if self._renew_at <= reached_s:
            self._renew_at += RENEW_EVERY_S
            for holder in list(self._lives):
                self._renew(holder)
        for holder, life in list(self._lives.items()):
            due = life.core.next_deadline_s
            if due is not None and due <= reached_s:
                self._now = max(self._now, due)
                self._deliver(holder, life.incarnation, Tick())
        self._pump()
        while self._sleepers and self._sleepers[0][0] <= reached_s and not self._due():
            heapq.heappop(self._sleepers)[2].set(None)
        return True

    def _due(self) -> bool:
        """Whether a core still has a timer that is due now: timers at one moment run before who slept until it."""
        return any(
            life.core.next_deadline_s is not None and life.core.next_deadline_s <= self._now
            for life in self._lives.values()
        )

    def _renew(self, holder: str) -> None:
        life = self._lives[holder]
        self._post(SUPERVISOR, holder, GrantUntil(life.incarnation, GRANT_S))

    # --- wire ----------------------------------------------------------------------------------

    async def ask(self, holder: str, message: Any) -> Any | None:
        life = self._lives.get(holder)
        if life is None:
            return None
        if isinstance(message, StoreBegin):
            self._writers[message.request] = life
        reply = Reply()
        self._replies[message.request] = (life, reply)
        self._post(f"client:{self._places[holder].node}", holder, message)
        try:
            return await reply
        finally:
            del self._replies[message.request]

    def _node_of(self, address: str) -> str | None:
        """The node an address lies on; None for the supervisor, whom every node reaches."""
        if address == DIRECTORY_ADDRESS:
            return DIRECTORY
        if address.startswith("client:"):
            return address.removeprefix("client:")
        place = self._places.get(address)
        return None if place is None else place.node

    def _reachable(self, one: str | None, other: str | None) -> bool:
        return one is None or other is None or frozenset((one, other)) not in self._cut

    def _post(self, sender: str, to: str, message: Any) -> None:
        self._queue.append(partial(self._carry, sender, to, wire.encode(message)))

    def _carry(self, sender: str, to: str, frame: bytes) -> None:
        message = wire.decode(frame)
        if to.startswith("client:"):
            _, reply = self._replies.get(message.request, (None, None))
            if reply is not None:
                reply.set(message)
            return
        alive = self._directory is not None if to == DIRECTORY_ADDRESS else to in self._lives
        if not alive or not self._reachable(self._node_of(sender), self._node_of(to)):
            if sender in self._lives:
                self._deliver(sender, self._lives[sender].incarnation, Undeliverable(to, message))
            return
        if to == DIRECTORY_ADDRESS:
            assert self._directory is not None
            self._perform(to, self._directory.handle(Received(sender, message), self._now))
        else:
            self._deliver(to, self._lives[to].incarnation, Received(sender, message))

    def _deliver(self, holder: str, incarnation: int, event: Event) -> None:
        life = self._lives.get(holder)
        if life is not None and life.incarnation == incarnation:
            self._perform(holder, life.core.handle(event, self._now))

    def _later(self, holder: str, event: Event) -> None:
        self._queue.append(partial(self._deliver, holder, self._lives[holder].incarnation, event))

    # --- effects -------------------------------------------------------------------------------

    def _perform(self, owner: str, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._post(owner, effect.to, effect.message)
            else:
                self._queue.append(partial(self._work, owner, self._lives[owner], effect))

    def _work(self, holder: str, life: Life, effect: Effect) -> None:
        """What is not a message: transfers, digests, disk. Nobody does it for the dead."""
        if self._lives.get(holder) is not life:
            return
        match effect:
            case StartTransfer():
                source = self._lives.get(effect.source)
                if source is not None and not self._reachable(life.node, source.node):
                    source = None
                moved, late = life.transfer(effect, source)
                self._later(holder, TransferDone(effect.token, moved))
                if late:
                    self._queue.append(partial(life.land, late))
            case DigestSlots():
                checksums = tuple(xxhash.xxh3_128_digest(life.arena.content(slot).data) for slot in effect.slots)
                self._later(holder, Digested(effect.token, checksums))
            case WriteExtent():
                self._later(holder, DiskWritten(effect.token, life.write_extent(effect)))
            case ReadExtent():
                self._later(holder, DiskRead(effect.token, life.read_extent(effect)))
            case DeleteExtent():
                life.place.disk.delete(effect.extent)
            case _:
                raise ProtocolError(f"the scenario world does not know the effect {type(effect).__name__}")

    # --- memory --------------------------------------------------------------------------------

    async def fill(self, holder: str, begun: StoreBegun, contents: Iterable[bytes]) -> bytes:
        life = self._writers[begun.request]
        checksums = []
        slots = [int(slot) for run in begun.slots for slot in np.frombuffer(run.slots, dtype="<u4")]
        for slot, content in zip(slots, contents, strict=True):
            checksums.append(xxhash.xxh3_128_digest(content))
            life.arena.payload(slot)[: len(content)] = np.frombuffer(content, dtype=np.uint8)
        return b"".join(checksums)

    def arena(self, holder: str) -> Arena | None:
        life = self._lives.get(holder)
        return None if life is None else life.arena

    # --- members -------------------------------------------------------------------------------

    def _start_holder(self, holder: str) -> None:
        place = self._places[holder]
        place.incarnation += 1
        arena = heap_arena(place.layout, place.incarnation)
        config = HolderConfig(
            holder,
            place.node,
            shards=place.seat.shards,
            directory=DIRECTORY_ADDRESS,
            verify_always=True,
            lease_s_max=PATIENCE_S,
            attempt_ttl_s=PATIENCE_S,
            slab_shares=place.slab_shares,
        )
        core = HolderCore(
            config,
            self.model,
            arena,
            place.incarnation,
            weights_digest16(self._weights),
            planning=planning_of(self.model),
        )
        self._lives[holder] = Life(place, core, arena, place.incarnation)
        self._renew(holder)
        if self._retired:
            self._post(SUPERVISOR, holder, self._weights_record())
        self._perform(holder, core.start(self._now, place.disk.found()))

    def _start_directory(self) -> None:
        self._epoch += 1
        self._directory = DirectoryCore(DIRECTORY_ADDRESS, self.model, self._epoch)
        self._perform(DIRECTORY_ADDRESS, self._directory.start(list(self._lives)))

    def _weights_record(self) -> SetWeights:
        return SetWeights(weights_digest16(self._weights), tuple(weights_digest16(w) for w in self._retired))

    async def set_weights(self, weights: str, retired: Sequence[str]) -> None:
        self._weights, self._retired = weights, tuple(retired)
        for holder in self._lives:
            self._post(SUPERVISOR, holder, self._weights_record())

    async def kill(self, member: str) -> None:
        self._kill(member)

    def _kill(self, member: str) -> None:
        if member == DIRECTORY:
            self._directory = None
            return
        dead = [self._lives[seat.holder] for seat in self._seats[member] if seat.holder in self._lives]
        for life in dead:
            holder = life.core.ctx.config.holder
            self._counters.update(life.core.ctx.counters)
            del self._lives[holder]
        for life in dead:
            gone = HolderGone(life.core.ctx.config.holder, life.incarnation)
            for to in (DIRECTORY_ADDRESS, *self._lives):
                self._post(SUPERVISOR, to, gone)
        for life, reply in self._replies.values():
            if life in dead:
                reply.set(None)  # its client learns that no reply will come

    async def restart(self, member: str) -> None:
        self._kill(member)
        self._pump()
        if member == DIRECTORY:
            self._start_directory()
        else:
            for seat in self._seats[member]:
                self._start_holder(seat.holder)

    async def partition(self, one: str, other: str) -> None:
        self._cut.add(frozenset((one, other)))

    async def heal(self, one: str, other: str) -> None:
        self._cut.discard(frozenset((one, other)))

    # --- faults and books ----------------------------------------------------------------------

    async def inject(self, node: str, fault: Fault, times: int, victim: Victim | None) -> None:
        self._faults[node].inject(fault, times, None if victim is None else (victim.group, victim.index))

    async def corrupt(self, node: str, victim: Victim, how: How, where: Where | None) -> None:
        assert victim.digest is not None
        for seat in self._seats[node]:
            if where is not Where.MEMORY:
                self._places[seat.holder].disk.corrupt(victim.group, victim.digest, how)
            life = self._lives.get(seat.holder)
            if life is None or where is Where.DISK:
                continue
            life.corrupt(victim, how)

    async def books(self) -> Books:
        books = Books()
        metrics = Counter(self._counters)
        for life in self._lives.values():
            metrics.update(life.core.ctx.counters)
            life.count(books)
        books.metrics = dict(metrics)
        return books

    def cluster(self) -> dict[str, Any] | None:
        return None

    def close(self) -> None:
        """Nothing outlives this world."""
