"""The cluster world: real processes, bytes and links, on the clock of the story.

A holder a node (up to four where the model has shards), the directory and the supervisor are the
processes that serve; only their clocks are held. What a step asks runs until every process is at
rest; where every step waits, all clocks jump to the next deadline, as in the pure world. The steps of
``parallel`` really run at once; only their requests arrive in the file's order, so that who comes first is no chance.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash

from ...actors import ray_api
from ...actors.addresses import actor_name, holder_address
from ...actors.client import HolderClient, HolderLost, HolderSilent, Writable
from ...actors.clock import Clock
from ...actors.embedded import EmbeddedCluster
from ...actors.fabric import Fabric, launch
from ...actors.spec import FabricSpec
from ...actors.spec_sections import DiskSpec, SlabSpec, TransportSpec
from ...actors.supervisor import DIRECTORY as DIRECTORY_ADDRESS
from ...fabric.arena import Arena
from ...fabric.doors import Corrupt, InjectFault, Rest, TellAll
from ...fabric.kinds import FabricError
from ...fabric.messages import (
    Acquire,
    Answer,
    Done,
    Renew,
    Renewed,
    StoreAbort,
    StoreBegin,
    StoreBegun,
    StoreCommit,
    StoreQuiet,
)
from ...fabric.model import ModelSpec
from .extents import damage_extents
from .processes import Processes
from .story import DIRECTORY, Fault, How, Story, Where
from .world import SHARED_HOLDERS_MAX, Books, Hung, Seat, Victim, slots_needed

RENEW_EVERY_S = 1.0
TIMERS_AT_ONCE_MAX = 1000
"""Times that due timers are run without the clock moving: more is a loop."""
CLOCK_EPSILON_S = 1e-9
SETTLE_ROUNDS_MAX = 4
LEASE_S_MAX = 366 * 86400.0
REPLY_TIMEOUT_S = 60.0
STORE_RECORDS = (StoreBegin, StoreCommit, StoreAbort, StoreQuiet)
"""An attempt belongs to the connection that began it."""
DISK_VERBS = ("swap_out", "swap_in")
DISK_FAULTS = tuple(fault for fault in Fault if fault.startswith("disk_"))
HOST_MEMORY_BYTES = 1 << 20
"""Only said to have host memory at all: stories name its slots."""
DISK_BYTES_MAX = 1 << 30
REPLIES: dict[type, type] = {Acquire: Answer, StoreBegin: StoreBegun, Renew: Renewed}


class Cluster:
    """One embedded cluster for all stories of a run; a context manager that ends it."""

    def __init__(self, stories: Iterable[Story]) -> None:
        nodes = max((len(story.nodes) for story in stories), default=1)
        self._embedded = EmbeddedCluster.start(nodes)
        self._embedded.users += 1  # it outlives each story's fabric
        numbered = sorted((node, number) for number, node in enumerate(self._embedded.node_ids))
        self.nodes = [(node, f"kvfabric_node_{number}") for node, number in numbered]
        """Ray ids, ascending, each with a resource that this node alone offers."""
        self._fabrics = itertools.count(1)
        # In the cluster's own folder, which is swept even if this process is killed.
        self._disk = Path(tempfile.mkdtemp(prefix="disk-", dir=self._embedded.folder))

    def world(self, story: Story) -> ClusterWorld:
        """A fabric of its own for a story."""
        return ClusterWorld(story, self.nodes, f"scenario-{os.getpid()}-{next(self._fabrics)}", self._disk)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._embedded.close()


class Reply:
    """Something a step waits for; awaiting it raises what it failed with."""

    __slots__ = ("done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None

    def take(self, future: asyncio.Future[Any]) -> None:
        """The outcome of what was waited for."""
        if future.cancelled():
            self.error = Hung("given up")
        else:
            self.error = future.exception()
        if self.error is None:
            self.value = future.result()
        self.done = True

    def __await__(self) -> Generator[Reply, None, Any]:
        while not self.done:
            yield self
        if self.error is not None:
            raise self.error
        return self.value


class ClusterWorld:
    """Implements ``World`` on a fabric of its own."""

    def __init__(self, story: Story, nodes: Sequence[tuple[str, str]], name: str, disk: Path) -> None:
        self.model: ModelSpec = story.model
        # Holders are asked in the order of their names, so nodes take the same order in both worlds.
        places = dict(zip(sorted(story.nodes), nodes, strict=False))
        self._spec = _spec_of(story, {node: resource for node, (_, resource) in places.items()}, disk)
        self._disk = disk / name
        self._ray_nodes = {node: ray_node for node, (ray_node, _) in places.items()}
        self._seats = {node: _seats(self._spec, places[node][0]) for node in story.nodes}
        self._clock = Clock(0.0)
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="kvfabric-scenario")
        self._asked: dict[str, str] = {}
        self._operations: set[asyncio.Future[Any]] = set()
        self._writable: dict[tuple[str, int], Writable] = {}
        self._sleepers: list[tuple[float, int, Reply]] = []
        self._sequence = itertools.count()
        self._renew_at = RENEW_EVERY_S
        self._rests: dict[str, Rest] = {}
        self._cut: set[frozenset[str]] = set()
        self._faults: dict[str, dict[tuple[Fault, tuple[int, int] | None], int]] = {node: {} for node in story.nodes}
        self._counters: Counter[str] = Counter()
        self._moved_bytes = 0
        self._pids: dict[int, None] = {}
        self._fabric: Fabric = launch(self._spec, name=name)
        self._processes = Processes(ray_api.find_actor(actor_name(name, "supervisor")), self._clock)
        try:
            self._loop.run_until_complete(self._begin())
        except BaseException:
            self.close()
            raise

    async def _begin(self) -> None:
        await self._processes.find()
        lacking = [s.holder for seats in self._seats.values() for s in seats if s.holder not in self._processes.clients]
        if lacking:
            raise FabricError(f"--cluster: no holder came up for {', '.join(lacking)}: did a node of the cluster end?")
        await self._note_pids(list(self._processes.clients))
        await self._settle()

    # --- running -------------------------------------------------------------------------------

    def seats(self, node: str) -> Sequence[Seat]:
        return self._seats[node]

    def run(self, work: Sequence[Coroutine[Any, Any, Any]], limit_s: float) -> list[Any]:
        try:
            return self._loop.run_until_complete(self._drive(work, limit_s))
        except FabricError as error:  # no answer of the fabric's, but what became of a process or a request
            raise Hung(f"{type(error).__name__}: {error}") from error

    async def _drive(self, work: Sequence[Coroutine[Any, Any, Any]], limit_s: float) -> list[Any]:
        results: list[Any] = [None] * len(work)
        waiting: dict[int, tuple[Coroutine[Any, Any, Any], Reply | None]] = {i: (w, None) for i, w in enumerate(work)}
        until_s = self._clock.now() + limit_s
        stalled, stalled_at_s = 0, self._clock.now()
        try:
            while waiting:
                if await self._resume(waiting, results):
                    continue
                if not await self._pump(lambda: any(reply is not None and reply.done for _, reply in waiting.values())):
                    continue
                now = self._clock.now()
                stalled, stalled_at_s = (stalled + 1 if now == stalled_at_s else 0), now
                if stalled > TIMERS_AT_ONCE_MAX or not await self._jump(until_s):
                    raise Hung(f"{len(waiting)} of {len(work)} steps wait for ever")
        finally:
            for coroutine, _ in waiting.values():
                coroutine.close()
        await self._settle()
        return results

    async def _resume(
        self, waiting: dict[int, tuple[Coroutine[Any, Any, Any], Reply | None]], results: list[Any]
    ) -> bool:
        """Let every step go on whose reply is there, in order; whether any did."""
        ready = [i for i, (_, reply) in waiting.items() if reply is None or reply.done]
        for i in ready:
            coroutine, _ = waiting[i]
            try:
                waiting[i] = (coroutine, coroutine.send(None))
            except StopIteration as end:
                results[i] = end.value
                del waiting[i]
            if len(waiting) > 1:
                await self._processes.taken(self._asked)
        return bool(ready)

    async def _pump(self, early: Callable[[], bool] = lambda: False) -> bool:
        """Wait for everything in flight; False where ``early`` came true before that."""
        while True:
            while self._operations and not early():
                await asyncio.wait(self._operations, return_when=asyncio.FIRST_COMPLETED)
            rests = await self._processes.at_rest(self._asked, early)
            if rests is None:
                return False
            self._rests = rests
            if not self._operations:
                return True

    async def _settle(self) -> None:
        """Every event of a reachable holder is applied: one whose events were lost on the way tells all."""
        behind: list[str] = []
        for _ in range(SETTLE_ROUNDS_MAX):
            await self._pump()
            behind = self._behind()
            if not behind:
                return
            await self._processes.ask_all(TellAll("tell"), behind)
        raise Hung(f"the directory does not learn what {', '.join(behind)} tells it")

    def _behind(self) -> list[str]:
        """Reachable holders whose events a directory shard that lives has not all applied."""
        return [
            seat.holder
            for node, seats in self._seats.items()
            for seat in seats
            if frozenset((node, DIRECTORY)) not in self._cut
            and (rest := self._rests.get(seat.holder)) is not None
            and not all(self._applied(seat.holder, rest.incarnation, *told) for told in rest.told)
        ]

    def _applied(self, holder: str, incarnation: int, shard: str, seq: int) -> bool:
        rest = self._rests.get(shard)
        return rest is None or (holder, incarnation, seq) in rest.seen

    async def _operate(self, work: Awaitable[Any]) -> Any:
        """Have a step wait for something done to the cluster."""
        reply = Reply()
        operation = asyncio.ensure_future(work)
        self._operations.add(operation)
        operation.add_done_callback(self._operations.discard)
        operation.add_done_callback(reply.take)
        return await reply

    # --- time ----------------------------------------------------------------------------------

    def now(self, node: str) -> float:
        return self._clock.now()

    async def advance(self, seconds: float) -> None:
        reply = Reply()
        heapq.heappush(self._sleepers, (self._clock.now() + seconds, next(self._sequence), reply))
        await reply

    async def _jump(self, until_s: float) -> bool:
        """Go to the next deadline and run what is due; False where it lies behind ``until_s``."""
        due_at = {address: rest.due_s for address, rest in self._rests.items() if rest.due_s is not None}
        due_s = min([self._renew_at, *(s[0] for s in self._sleepers[:1]), *due_at.values()])
        if due_s > until_s:
            return False
        now_s = max(self._clock.now(), due_s)
        near = [*(s[0] for s in self._sleepers[:1]), *due_at.values()]
        now_s = max([now_s, *(s for s in near if s <= now_s + CLOCK_EPSILON_S)])
        if now_s > self._clock.now():
            await self._processes.move(now_s)
        if self._renew_at <= now_s + CLOCK_EPSILON_S:
            self._renew_at += RENEW_EVERY_S
            await self._processes.supervise("advance_clock", now_s)
        await self._processes.run_due([address for address, due in due_at.items() if due <= now_s])
        await self._pump()
        while self._sleepers and self._sleepers[0][0] <= now_s and not self._due(now_s):
            reply = heapq.heappop(self._sleepers)[2]
            reply.done = True
        return True

    def _due(self, now_s: float) -> bool:
        """Whether a core still has a timer that is due now: timers at one moment run before who slept until it."""
        return any(rest.due_s is not None and rest.due_s <= now_s for rest in self._rests.values())

    # --- requests ------------------------------------------------------------------------------

    async def ask(self, holder: str, message: Any) -> Any | None:
        client = self._processes.clients.get(holder)
        if client is None:
            return None
        reply = Reply()
        self._asked[message.request] = holder
        future = self._loop.run_in_executor(self._threads, self._exchange, holder, client, message)
        future.add_done_callback(lambda _: self._asked.pop(message.request))
        future.add_done_callback(reply.take)
        return await reply

    def _exchange(self, holder: str, client: HolderClient, message: Any) -> Any | None:
        """In a thread. Raises FabricError for a request that is refused as senseless."""
        expected = REPLIES.get(type(message), Done)
        try:
            if isinstance(message, StoreQuiet):
                writable = self._writable.pop((holder, message.attempt), None)
                if writable is not None:
                    writable.revoke()
            if not isinstance(message, STORE_RECORDS):
                return client.call_apart(message, expected, REPLY_TIMEOUT_S)
            reply: Any = client.call(message, expected)
            if isinstance(reply, StoreBegun) and reply.refused is None:
                slots = _slots_of(reply)
                if slots:
                    self._writable[holder, reply.attempt] = client.writable(reply.attempt, slots)
            return reply
        except HolderSilent as error:
            raise Hung(str(error)) from None
        except HolderLost:
            return None

    async def fill(self, holder: str, begun: StoreBegun, contents: Iterable[bytes]) -> bytes:
        writable = self._writable.get((holder, begun.attempt))
        checksums = []
        for slot, content in zip(_slots_of(begun), contents, strict=True):
            checksums.append(xxhash.xxh3_128_digest(content))
            if writable is not None:
                np.copyto(writable.view(slot)[: len(content)], np.frombuffer(content, dtype=np.uint8))
        if writable is not None:
            writable.seal()
        return b"".join(checksums)

    def arena(self, holder: str) -> Arena | None:
        client = self._processes.clients.get(holder)
        return client.arena if client is not None and client.alive else None

    # --- members -------------------------------------------------------------------------------

    def _addresses(self, member: str) -> list[str]:
        return [DIRECTORY_ADDRESS] if member == DIRECTORY else [seat.holder for seat in self._seats[member]]

    async def set_weights(self, weights: str, retired: Sequence[str]) -> None:
        del retired  # the supervisor knows which it had
        await self._operate(self._processes.supervise("update_weights", weights))

    async def kill(self, member: str) -> None:
        await self._operate(self._kill(member))

    async def _kill(self, member: str) -> None:
        """SIGKILL. The supervisor proves the exit and starts nothing in its place."""
        living = [address for address in self._addresses(member) if address in self._processes.members]
        if not living:
            return
        status = await self._processes.status(living)
        for address in living:
            if address in self._processes.clients:
                self._remember(member, status[address])
        await self._processes.supervise("keep_away", living)
        for address in living:
            os.kill(status[address]["pid"], signal.SIGKILL)
        await self._processes.forget(living)
        await self._processes.supervise("await_gone", living)

    def _remember(self, node: str, status: dict[str, Any]) -> None:
        """What a life counted, and the faults that still wait at its node."""
        self._counters.update(status["counters"])
        self._moved_bytes += sum(status["moved_bytes"].values())
        for fault, group, index, left in status["faults"]:
            load = None if group is None else (group, index)
            self._faults[node][Fault(fault), load] = left

    async def restart(self, member: str) -> None:
        await self._operate(self._restart(member))

    async def _restart(self, member: str) -> None:
        await self._kill(member)
        addresses = self._addresses(member)
        await self._processes.supervise("advance_clock", self._clock.now())
        await self._processes.supervise("bring", addresses)
        await self._processes.find()
        if member != DIRECTORY:
            await self._note_pids(addresses)
            for (fault, load), times in self._faults[member].items():
                await self._processes.ask_all(InjectFault("fault", str(fault), times, load), addresses)

    async def _note_pids(self, addresses: Sequence[str]) -> None:
        status = await self._processes.status(addresses)
        self._pids.update({status[address]["pid"]: None for address in addresses})

    async def partition(self, one: str, other: str) -> None:
        self._cut.add(frozenset((one, other)))
        await self._operate(self._cut_off())

    async def heal(self, one: str, other: str) -> None:
        self._cut.discard(frozenset((one, other)))
        await self._operate(self._cut_off())

    async def _cut_off(self) -> None:
        unreachable: dict[str, list[str]] = {}
        for pair in self._cut:
            for one, other in itertools.permutations(pair):
                for address in self._addresses(one):
                    unreachable.setdefault(address, []).extend(self._addresses(other))
        await self._processes.supervise("cut", unreachable)

    # --- faults and books ----------------------------------------------------------------------

    def _living(self, node: str) -> list[str]:
        return [address for address in self._addresses(node) if address in self._processes.clients]

    async def inject(self, node: str, fault: Fault, times: int, victim: Victim | None) -> None:
        load = None if victim is None else (victim.group, victim.index)
        self._faults[node][fault, load] = times
        await self._operate(self._processes.ask_all(InjectFault("fault", str(fault), times, load), self._living(node)))

    async def corrupt(self, node: str, victim: Victim, how: How, where: Where | None) -> None:
        assert victim.digest is not None
        if where is not Where.MEMORY:
            damage_extents(self._disk, self._ray_nodes[node], victim.group, victim.digest, str(how))
        if where is not Where.DISK:
            record = Corrupt("corrupt", victim.group, victim.digest, str(how))
            await self._operate(self._processes.ask_all(record, self._living(node)))

    async def books(self) -> Books:
        books: Books = await self._operate(self._books())
        return books

    async def _books(self) -> Books:
        status = await self._processes.status(list(self._processes.clients))
        counters = sum((Counter(one["counters"]) for one in status.values()), Counter(self._counters))
        pins = sum(one["pinned_slots"] for one in status.values())
        return Books(pins, sum(one["slots_lost"] for one in status.values()), dict(counters))

    def cluster(self) -> dict[str, Any] | None:
        living = self._processes.status(list(self._processes.clients))
        moved = sum(sum(one["moved_bytes"].values()) for one in self._loop.run_until_complete(living).values())
        return {"holder_pids": list(self._pids), "transfer_bytes": self._moved_bytes + moved}

    def close(self) -> None:
        """End the fabric; the cluster stays."""
        try:
            self._loop.run_until_complete(self._processes.close())
        finally:
            self._fabric.shutdown()
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._loop.close()


def _uses_disk(story: Story) -> bool:
    return any(step.verb in DISK_VERBS or getattr(step.args, "fault", "") in DISK_FAULTS for step in story.each_step())


def _spec_of(story: Story, resources: dict[str, str], disk: Path) -> FabricSpec:
    slots = slots_needed(story)
    host_slots = next((node.host_memory for node in story.nodes.values() if node.host_memory), {})
    return FabricSpec(
        model=story.model,
        slots={group.name: max(slots[node, group.name] for node in story.nodes) for group in story.model.groups},
        node_slots={
            resource: {group.name: slots[node, group.name] for group in story.model.groups}
            for node, resource in resources.items()
        },
        host_memory_bytes=HOST_MEMORY_BYTES if host_slots else None,
        host_slots=host_slots,
        slabs=SlabSpec() if any(node.slabs for node in story.nodes.values()) else None,
        node_resource=tuple(resources.values()),
        holders_per_node=min(SHARED_HOLDERS_MAX, story.model.shards),
        # A disk costs a process a holder: only what could ever be on it needs one.
        disk=DiskSpec(path=str(disk), bytes_max=DISK_BYTES_MAX, free_floor_bytes=0) if _uses_disk(story) else None,
        transport=TransportSpec(links=("shared_memory", "tcp")),
        verify="always",
        lease_s_max=LEASE_S_MAX,
        attempt_ttl_s=LEASE_S_MAX,
        testing=True,
        eviction="lru",  # what the format promises: room comes from the least recently used chain
    )


def _seats(spec: FabricSpec, node: str) -> tuple[Seat, ...]:
    return tuple(Seat(holder_address(node, i), spec.shards_of(i)) for i in range(spec.holders_per_node))


def _slots_of(begun: StoreBegun) -> list[int]:
    """The slots of an attempt, in the order begun."""
    return [int(slot) for run in begun.slots for slot in np.frombuffer(run.slots, dtype="<u4")]
