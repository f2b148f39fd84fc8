"""What goes wrong, and when: drawn from the seed's generator, each with its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...fabric.effects import DiskState
from ...fabric.kinds import Reason
from ...fabric.lifecycle import State
from ...fabric.supervisor import DrainNode
from .clients import Client
from .directories import SHARDS_MAX
from .shared_store import STORE, Content, Uid

if TYPE_CHECKING:
    from .world import Life, World

CLIENTS_A_NODE = 3
WEIGHTS_MAX = 400


class Faults:
    """The source of trouble of one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self._numbers = 0

    def begin(self) -> None:
        for node in self.world.nodes:
            for _ in range(CLIENTS_A_NODE):
                self.start_client(node)
        self.world.queue.after(self._pause(), self._strike)

    def start_client(self, node: str) -> None:
        if not self.world.calm:
            self.new_client(node).start()

    def new_client(self, node: str) -> Client:
        """A process under a name never used before."""
        self._numbers += 1
        client = Client(self.world, node, self._numbers)
        self.world.clients[client.name] = client
        return client

    def _pause(self) -> float:
        return self.rng.expovariate(1 / self.world.chance.fault_every_s)

    def _strike(self) -> None:
        world = self.world
        if world.calm or world.failure is not None:
            return
        weights = [weight if self._met_here(fault) else 0 for fault, weight in FAULTS]
        fault, _ = self.rng.choices(FAULTS, weights)[0]
        world.trace.note(world.queue.now, "fault", fault.__name__)
        if fault(self):
            world.steps += 1
            world.counts[f"fault {fault.__name__}"] += 1
        world.queue.after(self._pause(), self._strike)

    def _met_here(self, fault: Callable[[Faults], bool]) -> bool:
        if fault in OF_THE_STORE:
            return self.world.store is not None
        return self.world.drains or fault is not Faults.drain_node

    def _some_life(self) -> Life | None:
        lives = [life for life in self.world.lives.values() if life.alive and not life.paused]
        return self.rng.choice(lives) if lives else None

    # --- processes -----------------------------------------------------------------------------

    def crash(self) -> bool:
        """A holder's process dies; its node says so, and a fresh life starts soon."""
        life = self._some_life()
        if life is None:
            return False
        self.world.end_life(life)
        self.world.queue.after(
            self.rng.uniform(0.05, 1.0), lambda: self.world.exited(life.name, life.incarnation, proven=True)
        )
        return True

    def pause_holder(self) -> bool:
        """A holder freezes. Short, or so long that it is replaced and wakes as a zombie."""
        life = self._some_life()
        if life is None:
            return False
        life.paused = True
        self._suspect(life)
        self.world.queue.after(self.rng.choice((0.5, 2.0, 8.0)) * self.rng.uniform(0.5, 1.5), self.wake, life)
        return True

    def _suspect(self, life: Life) -> None:
        """The supervisor's driver finds that a process does not answer."""
        self.world.queue.after(
            self.rng.uniform(0.3, 1.5), lambda: self.world.exited(life.name, life.incarnation, proven=False)
        )

    def wake(self, life: Life) -> None:
        """A frozen process goes on with everything that piled up for it."""
        life.paused = False
        waiting, life.inbox = life.inbox, []
        for event in waiting:
            self.world.feed(life, event)

    def crash_client(self) -> bool:
        """A session's process dies where it stands."""
        clients = list(self.world.clients.values())
        if not clients:
            return False
        client = self.rng.choice(clients)
        client.die()
        self.world.queue.after(self.rng.uniform(0.1, 1.0), self.start_client, client.node)
        return True

    def reshard_directory(self) -> bool:
        """The directory's chains are answered for by more shards, or fewer."""
        count = self.rng.randrange(1, SHARDS_MAX + 1)
        other = count != len(self.world.directories.wanted)
        self.world.directories.reshard(count)
        return other

    def restart_directory(self) -> bool:
        """A shard's process dies and starts anew, empty."""
        world = self.world
        address = self.rng.choice(world.directories.map.shards)
        epoch = world.directories.end(address)
        if epoch is None:
            return False
        world.queue.after(self.rng.uniform(0.1, 2.0), lambda: world.exited(address, epoch, proven=True))
        return True

    def drain_node(self) -> bool:
        """A node is emptied and goes, at its deadline or as soon as it is drained; later it comes back, empty."""
        world = self.world
        stay = [n for n in world.nodes if n not in world.away and n not in world.supervisor.drains]
        if len(stay) < 2:
            return False
        node, within_s = self.rng.choice(stay), self.rng.choice((0.3, 1.5, 5.0)) * self.rng.uniform(0.5, 1.5)
        world.tell_supervisor(DrainNode(node, within_s, "asked"))
        world.queue.after(within_s + self.rng.uniform(-0.2, 2.5), world.leave, node)
        return True

    # --- network -------------------------------------------------------------------------------

    def partition(self) -> bool:
        """Two places lose each other for a while: nodes, the directory's or the supervisor's."""
        world = self.world
        one, other = self.rng.sample(self._places(), 2)
        pair = frozenset((one, other))
        world.cut.add(pair)
        if "s" in pair:
            for life in world.lives.values():
                if life.node in pair:
                    self._suspect(life)
        world.queue.after(self.rng.choice((0.5, 2.0, 8.0)) * self.rng.uniform(0.5, 1.5), world.cut.discard, pair)
        return True

    def _places(self) -> list[str]:
        world = self.world
        return [*world.nodes, *world.directories.nodes, "s", *([STORE] if world.store is not None else [])]

    # --- the shared store ----------------------------------------------------------------------

    def store_down(self) -> bool:
        """The store cannot be reached by anybody, for a while."""
        store = self.world.store
        assert store is not None
        store.down = True
        self.world.queue.after(self.rng.uniform(0.5, 4.0), self.store_up)
        return True

    def store_slow(self) -> bool:
        """Whatever is asked of the store takes long, for a while."""
        store = self.world.store
        assert store is not None
        store.slow = True
        self.world.queue.after(self.rng.uniform(2.0, 8.0), self.store_fast)
        return True

    def store_up(self) -> None:
        if self.world.store is not None:
            self.world.store.down = False

    def store_fast(self) -> None:
        if self.world.store is not None:
            self.world.store.slow = False

    def store_loses(self) -> bool:
        """An object of the store is gone, whoever counted on it."""
        there = self._stored()
        if there:
            del there[self.rng.choice(list(there))]
        return bool(there)

    def store_lies(self) -> bool:
        """The store gives other bytes than it took: of one block, or of a whole object."""
        there = list(self._stored().values())
        if there:
            self._turn(self.rng.choice(there))
        return bool(there)

    def _stored(self) -> dict[Uid, Content]:
        return {} if self.world.store is None else self.world.store.objects

    # --- bytes ---------------------------------------------------------------------------------

    def disk_down(self) -> bool:
        """A holder's disk fails as a whole, for a while."""
        life = self._some_life()
        if life is None:
            return False
        disk = self.world.disks[life.name]
        disk.refused = Reason.DISK_UNAVAILABLE
        self.world.feed(life, DiskState(Reason.DISK_UNAVAILABLE))
        self.world.queue.after(self.rng.uniform(0.2, 2.0), self.disk_up, life.name)
        return True

    def disk_up(self, name: str) -> None:
        self.world.disks[name].refused = None
        life = self.world.lives[name]
        self.world.feed(life, DiskState(None))

    def rot(self) -> bool:
        """Bytes on a tier turn: one object's, or a whole extent's."""
        life = self._some_life() if self.world.host_slots else None
        copies = [] if life is None else sorted(life.core.disk.host.pools.copies().items())
        if life is not None and copies and self.rng.random() < 0.5:
            slot, obj = self.rng.choice(copies)
            life.arena.payload(slot)[self.rng.randrange(obj.length)] ^= 1 << self.rng.randrange(8)
            return True
        disk = self.rng.choice(list(self.world.disks.values()))
        if not disk.extents:
            return False
        entries = self.rng.choice(list(disk.extents.values()))
        self._turn(entries)
        return True

    def rot_disks(self) -> None:
        """Something turns on every disk."""
        for disk in self.world.disks.values():
            if disk.extents:
                self._turn(self.rng.choice(list(disk.extents.values())))

    def _turn(self, entries: Content) -> None:
        for _, content in entries if self.rng.random() < 0.5 else [self.rng.choice(entries)]:
            content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)

    def flip(self) -> bool:
        """A byte in memory turns, under nobody's lease; only where every grant verifies."""
        life = self._some_life()
        if life is None or not self.world.verify_always:
            return False
        objects = [o for o in life.core.ctx.books.owner if o is not None and o.state is State.SEALED and not o.pins]
        if not objects:
            return False
        obj = self.rng.choice(objects)
        life.arena.payload(obj.slot)[self.rng.randrange(obj.length)] ^= 1 << self.rng.randrange(8)
        return True

    # --- weights -------------------------------------------------------------------------------

    def update_weights(self) -> bool:
        """New weights for all: at first soon, later seldom, for everything stored is lost to readers."""
        world = self.world
        count = len(world.weights)
        if count >= WEIGHTS_MAX or world.queue.now < 3.0 or (count > 2 and self.rng.random() < 0.7):
            return False
        world.update_weights()
        for client in world.clients.values():
            world.queue.after(self.rng.uniform(0.0, 2.0), self._adopt, client, world.weights[-1])
        return True

    def _adopt(self, client: Client, weights: str) -> None:
        client.weights = max(client.weights, weights)


FAULTS: tuple[tuple[Callable[[Faults], bool], int], ...] = (
    (Faults.crash, 4),
    (Faults.pause_holder, 4),
    (Faults.crash_client, 3),
    (Faults.restart_directory, 2),
    (Faults.reshard_directory, 1),
    (Faults.partition, 4),
    (Faults.drain_node, 3),
    (Faults.disk_down, 2),
    (Faults.rot, 4),
    (Faults.flip, 3),
    (Faults.update_weights, 1),
    (Faults.store_down, 3),
    (Faults.store_slow, 2),
    (Faults.store_loses, 3),
    (Faults.store_lies, 3),
)
OF_THE_STORE = frozenset({Faults.store_down, Faults.store_slow, Faults.store_loses, Faults.store_lies})
"""Faults that only worlds with such a store can meet."""
