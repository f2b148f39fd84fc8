"""The simulated world: lives of holders, a directory, a supervisor, a network, and what must hold.

A step is one delivered message, timer, fault or client call. After each step the touched holder's
invariants are checked, after every ``CHECK_ALL_EVERY`` those of all. The first violation ends a run.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...fabric import wire
from ...fabric.arena import Arena, heap_arena
from ...fabric.context import HolderConfig
from ...fabric.effects import Effect, Event, PeerClosed, Received, Send, Tick, Undeliverable
from ...fabric.holder import HolderCore
from ...fabric.identity import weights_digest16
from ...fabric.invariants import check
from ...fabric.messages import GrantSeen, GrantUntil, Member, Members, SetMode, SetWeights
from ...fabric.supervisor import (
    SUPERVISOR,
    Answered,
    Exited,
    Observed,
    Start,
    Started,
    Stop,
    SupervisorConfig,
    SupervisorCore,
    SupervisorEffect,
    SupervisorEvent,
    Wanted,
)
from ...fabric.supervisor import Tick as SupervisorTick
from ...policies.copies import HotCopies
from ...policies.planning import planning_of
from ...policies.second_touch import SecondTouch
from .directories import Directories, is_directory
from .directories import node_of as directory_node
from .judge import Content, Judge
from .laws import Laws
from .machine import Disk, Machine
from .models import (
    Layouts,
    Library,
    layout_of,
    planned,
    random_chance,
    random_extras,
    random_floors,
    random_guess,
    random_host_slots,
    random_limits,
    random_model,
    random_quotas,
    random_slots,
    weights_name,
)
from .queue import Queue, Trace, where
from .shared_store import STORE, SharedStore, StoreDriver

if TYPE_CHECKING:
    from .clients import Client

CHECK_ALL_EVERY = 100
WIRE_EVERY = 8
"""One message in so many goes through bytes and back; frozen records are shared otherwise."""
RIGHT_S = 5.0
LOOK_EVERY_S = 0.7


@dataclass(frozen=True, slots=True)
class Failure:
    """What a run ended with: which law was broken, by whom, and the last events about it."""

    law: str
    detail: str
    step: int
    trace: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Life:
    """One life of a holder: its core, its memory, and whether it runs."""

    name: str
    node: str
    incarnation: int
    arena: Arena
    core: HolderCore
    machine: Machine
    alive: bool = True
    paused: bool = False
    given_up: bool = False
    """The supervisor told everyone that this life is over, whether it is or not."""
    inbox: list[Event] = field(default_factory=list)
    tick_at: float | None = None
    right_until_s: float = 0.0
    """Until when this life may be trusted, in true time, by what the supervisor sent it."""
    clients: set[str] = field(default_factory=set)
    latest: dict[tuple[int, int, bytes], int] = field(default_factory=dict)
    """The last write attempt begun at each object."""

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


class World:
    """Everything of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.queue = Queue()
        self.trace = Trace()
        policies = random.Random(f"policies of {seed}")  # apart, so that a new policy leaves a seed's other draws alone
        self.model = planned(random_model(rng), policies)
        self.guess = random_guess(policies)
        self.quotas = random_quotas(policies)
        self.extras = random_extras(random.Random(f"extras of {seed}"))
        self.store = SharedStore() if self.extras.store else None
        self.writing = SecondTouch if policies.random() < 0.3 else None
        self.placing = policies.random() < 0.4
        self.content = Content()
        self.judge = Judge(self.model, self.content)
        self.layouts = Layouts(self.model)
        self.library = Library(rng, self.model)
        self.chance = random_chance(rng)
        self.slots = random_slots(rng, self.model)
        self.host_slots = random_host_slots(random.Random(f"host memory of {seed}"), self.slots)
        self.limits = random_floors(policies, random_limits(rng, self.model, self.slots))
        self.disk_bytes_max = rng.choice((400_000, 1_200_000)) // (4 if self.store is not None else 1)
        self.pin_ttl_s = rng.choice((0.25, 0.25, 2.0))
        self.verify_always = rng.random() < 0.25
        self.nodes = tuple(f"n{i}" for i in range(rng.randrange(2, 4)))
        self.split_shards = self.model.shards > 1 and rng.random() < 0.7
        self.holders: dict[str, tuple[str, tuple[int, ...]]] = {}
        for node in self.nodes:
            if self.split_shards:
                self.holders.update({f"{node}.{s}": (node, (s,)) for s in range(self.model.shards)})
            else:
                self.holders[node] = (node, tuple(range(self.model.shards)))
        self.offset = {node: rng.uniform(0, 1e5) for node in self.nodes}
        self.disks = {name: Disk() for name in self.holders}
        self.clients: dict[str, Client] = {}
        self._nobody_yet()
        self.directories = Directories(self, rng.choice((1, 1, 2, 3)))
        config = SupervisorConfig(
            grant_s=RIGHT_S, renew_s=1.4, start_timeout_s=30.0, settled_s=2.0, backoff_s=0.2, backoff_s_max=1.0
        )
        self.supervisor = SupervisorCore(config, 0.0, inherited=False, weights=weights_digest16(self.weights[0]))
        self.laws = Laws(self)

    def _nobody_yet(self) -> None:
        """Nothing has happened: no life, no trouble, nothing counted."""
        self.lives: dict[str, Life] = {}
        self.zombies: list[Life] = []
        self.incarnations: Counter[str] = Counter()
        self.cut: set[frozenset[str]] = set()
        self.away: set[str] = set()
        """Nodes that are not there now."""
        self.weights = [weights_name(1)]
        self.calm = False
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self.held: dict[str, set[tuple[str, int]]] = {}
        """Leases (leader, number) in the hands of each client."""
        self.wrong_reads = 0
        self.failure: Failure | None = None

    # --- beginning -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Let the supervisor look: it starts the directory and every holder."""
        self._look()

    def config(self, name: str) -> HolderConfig:
        node, shards = self.holders[name]
        return HolderConfig(
            holder=name,
            node=node,
            shards=shards,
            verify_always=self.verify_always,
            request_timeout_s=0.5,
            transfer_timeout_s=1.5,
            pin_ttl_s=self.pin_ttl_s,
            attempt_ttl_s=12.0,
            recovery_wait_s=4.0,
            rounds_max=8,
            restores_max=6,
            restore_bytes_max=1024,
            disk_bytes_max=self.disk_bytes_max,
            limits=self.limits,
            quotas=self.quotas,
            ageing_s=0.5,
            event_ack_s=3.1,
            event_batches_kept=8,
            dump_objects_max=16,
            lease_s_max=20.0,
            graph_check_s=3.0,
            spill_share=0.2 if self.seed % 2 else 0.0,
            remote=self.store is not None,
            move_bytes_per_s=self.budget_bytes_per_s,
            disk_scrub_bytes_per_s=self.extras.scrub_bytes_per_s,
            slab_look_s=0.7,
            slab_gather_s=1.3,
        )

    def start_holder(self, name: str) -> None:
        """A fresh life of a holder: empty memory, a warm disk, the weights in force."""
        node, shards = self.holders[name]
        self.incarnations[name] += 1
        incarnation = self.incarnations[name]
        layout, shares = layout_of(self.slots, self.host_slots, shards, self.slabs)
        arena = heap_arena(layout, incarnation)
        weights = weights_digest16(self.weights[-1])
        core = HolderCore(
            replace(self.config(name), slab_shares=shares),
            self.model,
            arena,
            incarnation,
            weights,
            planning=planning_of(self.model, self.guess),
            writing=self.writing() if self.writing else None,
            placement=HotCopies(hot_per_s=0.2, half_life_s=4.0, keep_s=2.0, share=0.4) if self.placing else None,
        )
        disk = self.disks[name]
        disk.incarnation = incarnation

        def feed(event: Event) -> None:
            self.feed(life, event)

        machine = Machine(
            rng=self.rng,
            queue=self.queue,
            chance=self.chance,
            arena=arena,
            incarnation=incarnation,
            disk=disk,
            feed=feed,
            peer=self.peer_for(node),
            counts=self.counts,
        )
        machine.calm = self.calm
        if self.store is not None:
            machine.store = StoreDriver(self.store, machine, name, lambda: self.reachable(node, STORE))
            self.queue.after(self.rng.uniform(0.0, 0.5), machine.store.look)
        life = self.lives[name] = Life(name, node, incarnation, arena, core, machine)
        self.trace.note(self.queue.now, str(life), "starts")
        effects = core.start(self.local(node), disk.found())
        self.perform(life, effects)
        self.schedule_tick(life)

    @cached_property
    def slabs(self) -> int:
        """Into how many slabs the readers' memory is cut; 0: a range for each pool."""
        return random.Random(f"slabs of {self.seed}").choice((0, 0, 0, 0, 0, 30))

    @property
    def budget_bytes_per_s(self) -> float | None:
        """What one holder may move: its share of what its node may."""
        node = self.extras.node_bytes_per_s
        return None if node is None else node * len(self.nodes) / len(self.holders)

    @property
    def restores(self) -> int:
        """Objects that came back from a disk so far."""
        return self.counts["restored"]

    @property
    def drains(self) -> bool:
        """Whether nodes are drained and go: where they do, little else lasts for long."""
        return self.seed % 3 == 2

    def local(self, node: str) -> float:
        """A node's monotonic clock."""
        return self.queue.now + self.offset[node]

    # --- steps ---------------------------------------------------------------------------------

    def fail(self, law: str, detail: str, *about: str) -> None:
        """End the run with the first thing that should never be."""
        if self.failure is None:
            self.failure = Failure(law, detail, self.steps, tuple(self.trace.last(40, *about)))

    def feed(self, life: Life, event: Event) -> None:
        """One event for one life: now, or when it wakes up; never, if it is dead."""
        if not life.alive or self.failure is not None:
            return
        if life.paused:
            life.inbox.append(event)
            return
        self.steps += 1
        what, about = ("got", event.message) if isinstance(event, Received) else ("event", event)
        self.trace.note(self.queue.now, str(life), what, about)
        self.laws.before(life, event)
        try:
            effects = life.core.handle(event, self.local(life.node))
        except Exception as error:  # noqa: BLE001 - whatever a core raises is a finding
            self.fail("protocol", f"{life}: {type(error).__name__}: {error}{where(error)}", life.name)
            return
        self.laws.after(life, event, effects)
        if isinstance(event, Received) and isinstance(event.message, GrantUntil):
            self._answer_right(life, event.message)
        self.perform(life, effects)
        self.check(life)
        if self.steps % CHECK_ALL_EVERY == 0:
            for other in [*self.lives.values(), *self.zombies]:
                if other.alive:
                    self.check(other)
                    self.laws.contents(other)
        self.schedule_tick(life)

    def check(self, life: Life) -> None:
        for violation in check(life.core):
            self.fail(violation.invariant, f"{life}: {violation.detail}", life.name)

    def schedule_tick(self, life: Life) -> None:
        wanted = life.core.next_deadline_s
        if wanted is None:
            return
        at = wanted - self.offset[life.node]
        if life.tick_at is None or at < life.tick_at:
            life.tick_at = at
            self.queue.after(max(0.0, at - self.queue.now) + self.rng.uniform(0, 0.15), self._tick, life, at)

    def _tick(self, life: Life, at: float) -> None:
        if life.tick_at == at:
            life.tick_at = None
            self.feed(life, Tick())

    def perform(self, life: Life, effects: list[Effect]) -> None:
        """What a core asked for, handed to network, memory and disk."""
        for effect in effects:
            if isinstance(effect, Send):
                self.transmit(life.name, life.node, effect.to, effect.message, life)
            else:
                self.laws.moved(life, effect)
                life.machine.carry_out(effect)

    # --- network -------------------------------------------------------------------------------

    def node_of(self, address: str) -> str:
        if address in self.holders:
            return self.holders[address][0]
        return directory_node(address) if is_directory(address) else "s"

    def reachable(self, one: str, other: str) -> bool:
        return one == other or frozenset((one, other)) not in self.cut

    def peer_for(self, node: str) -> Any:
        """A one-sided view of peers' memory from a node: paused processes' memory is readable too."""

        def peer(holder: str, incarnation: int) -> Arena | None:
            for life in [self.lives.get(holder), *self.zombies]:
                if life is not None and life.name == holder and life.incarnation == incarnation:
                    return life.arena if life.alive and self.reachable(node, life.node) else None
            return None

        return peer

    def transmit(self, sender: str, node: str, to: str, message: Any, life: Life | None = None) -> None:
        """Send a record: it may be lost, doubled, delayed past others; what cannot be reached says so, mostly."""
        rng, chance = self.rng, self.chance
        if to.startswith("client:"):
            self.queue.after(rng.uniform(0.0002, 0.002), self._to_client, life, to, message)
            return
        if not self.calm and rng.random() < chance.loss:
            return
        if rng.random() < 1 / WIRE_EVERY:
            message = wire.decode(wire.encode(message))
        self.queue.after(self._delay(), self._arrive, sender, node, to, message, life)
        if not self.calm and rng.random() < chance.twice:
            self.queue.after(self._delay() + rng.choice((0.0, 1.0)), self._arrive, sender, node, to, message, life)

    def _delay(self) -> float:
        rng = self.rng
        if not self.calm and rng.random() < self.chance.late:
            return rng.uniform(0.05, 1.5)
        return rng.uniform(0.0005, 0.02)

    def _arrive(self, sender: str, node: str, to: str, message: Any, life: Life | None) -> None:
        if self.reachable(node, self.node_of(to)):
            if to in self.holders:
                target = self.lives.get(to)
                if target is not None and target.alive:
                    self.feed(target, Received(sender, message))
                    return
            elif is_directory(to) and isinstance(message, GrantUntil | SetWeights | SetMode):
                return
            elif is_directory(to):
                if self.directories.deliver(to, sender, message):
                    return
            else:
                self.steps += 1
                self.trace.note(self.queue.now, SUPERVISOR, "got", message)
                self.tell_supervisor(Received(sender, message))
                return
        if life is not None and self.rng.random() < 0.7:
            self.queue.after(self.rng.uniform(0.001, 0.1), self.feed, life, Undeliverable(to, message))

    def _to_client(self, life: Life | None, to: str, message: Any) -> None:
        client = self.clients.get(to)
        if client is not None and life is not None and self.failure is None:
            self.steps += 1
            client.receive(life, message)

    # --- supervisor ----------------------------------------------------------------------------

    def _look(self) -> None:
        """The supervisor's driver looks at the cluster, again and again."""
        holders = self.holders.items()
        wanted = [Wanted(name, node, shards) for name, (node, shards) in holders if node not in self.away]
        shards = sorted({*self.directories.wanted, *self.directories.map.shards})
        wanted += [Wanted(address, directory_node(address)) for address in shards]
        self.tell_supervisor(Observed(tuple(wanted), frozenset(w.node for w in wanted)))
        self.tell_supervisor(SupervisorTick())
        self.queue.after(LOOK_EVERY_S, self._look)

    def tell_supervisor(self, event: SupervisorEvent) -> None:
        if self.failure is None:
            self.order(self.supervisor.handle(event, self.queue.now))

    def order(self, effects: list[SupervisorEffect]) -> None:
        """What the supervisor wants: records sent, processes started."""
        for effect in effects:
            if isinstance(effect, Stop):
                self._stop(effect)
            elif isinstance(effect, Start):
                self.queue.after(self.rng.uniform(0.05, 0.5), self._start, effect.wanted.address)
            elif isinstance(effect, Send) and (self.placing or not isinstance(effect.message, Members)):
                if isinstance(effect.message, Members) and effect.to not in self.lives:
                    continue
                life = self.lives.get(effect.to)
                if isinstance(effect.message, GrantUntil) and life is not None:
                    life.right_until_s = self.queue.now + RIGHT_S
                self.transmit(SUPERVISOR, "s", effect.to, effect.message)

    def _start(self, address: str) -> None:
        if is_directory(address):
            node = directory_node(address)
            member, clock_s = Member(address, self.directories.start(address), node, node, "", "", ()), self.queue.now
        else:
            old = self.lives.get(address)
            if old is not None and old.alive:
                self.zombies.append(old)
                self.queue.after(self.rng.uniform(0.5, 6.0), self.bury, old)
            self.start_holder(address)
            node, shards = self.holders[address]
            member = Member(address, self.incarnations[address], node, node, "", "", shards)
            clock_s = self.local(node)
            self.directories.tell(address)
        self.tell_supervisor(Started(member, clock_s))

    def _stop(self, effect: Stop) -> None:
        """End a replaced life: soon, where its node can be reached and listens; else it lives on as a zombie."""
        if is_directory(effect.address) and self.directories.epochs.get(effect.address) == effect.incarnation:
            self.directories.end(effect.address)
        life = self.lives.get(effect.address)
        if life is not None and life.incarnation == effect.incarnation:
            life.given_up = True
            if self.rng.random() < 0.3:
                self.queue.after(self.rng.uniform(0.01, 0.3), self._kill, life)

    def _kill(self, life: Life) -> None:
        if life.alive and not life.paused and self.reachable("s", life.node):
            self.end_life(life)

    def _answer_right(self, life: Life, right: GrantUntil) -> None:
        """The driver's reply to a right: this life's clock, and what it knows of weights and mode."""
        core = life.core
        seen = GrantSeen(life.incarnation, self.local(life.node), core.weights_number, core.mode_number)
        if right.incarnation == life.incarnation:
            self.transmit(life.name, life.node, SUPERVISOR, seen, life)

    def exited(self, address: str, incarnation: int, *, proven: bool) -> None:
        """A driver reports a process that is gone, or only silent."""
        life = self.lives.get(address)
        if proven:
            self.tell_supervisor(Exited(address, incarnation, proven))
        elif life is not None and life.incarnation == incarnation and self._silent(life):
            self.tell_supervisor(Exited(address, incarnation, proven))
            self._ping(life)

    def _silent(self, life: Life) -> bool:
        return life.paused or not self.reachable("s", life.node)

    def _ping(self, life: Life) -> None:
        """Look again whether a silent process answers, as long as nobody took its place."""
        if life.alive and self.lives.get(life.name) is life and self.failure is None:
            if self._silent(life):
                self.queue.after(0.5, self._ping, life)
            else:
                self.tell_supervisor(Answered(life.name, life.incarnation))

    def update_weights(self) -> None:
        """A new weights revision comes into force; every holder will know."""
        self.weights.append(weights_name(len(self.weights) + 1))
        self.library.forget(self.weights[:-2])
        self.content.forget()
        digests = [weights_digest16(w) for w in self.weights]
        self.order(self.supervisor.update_weights(digests[-1], digests[:-1]))

    # --- nodes ---------------------------------------------------------------------------------

    def leave(self, node: str) -> None:
        """A node ends with all that runs on it; it comes back after a while. Nothing, if it was away or came back already."""
        if node in self.away or node not in self.supervisor.drains:
            return
        self.away.add(node)
        for life in list(self.lives.values()):
            if life.node == node and life.alive:
                self.counts["moved off a node"] += life.core.drain.counts["moved"]
                self.end_life(life)
                self.exited(life.name, life.incarnation, proven=True)
        self.queue.after(2 * LOOK_EVERY_S, self.away.discard, node)

    # --- lives end -----------------------------------------------------------------------------

    def end_life(self, life: Life) -> None:
        """A process dies: its memory is gone, its connections close, nothing it started goes on."""
        life.alive = False
        life.machine.alive = False
        self.trace.note(self.queue.now, str(life), "dies")
        for name in sorted(life.clients):
            client = self.clients.get(name)
            if client is not None:
                client.closed(life)

    def bury(self, life: Life) -> None:
        """A zombie notices at last that it was replaced, or is killed."""
        if life in self.zombies:
            self.zombies.remove(life)
            self.end_life(life)

    def close_client(self, client: Client) -> None:
        """A client's process ends: every holder it was connected to learns that it writes no more."""
        self.clients.pop(client.name, None)
        for life in [*self.lives.values(), *self.zombies]:
            if client.name in life.clients:
                life.clients.discard(client.name)
                self.queue.after(self.rng.uniform(0.5, 0.6), self.feed, life, PeerClosed(client.name))
