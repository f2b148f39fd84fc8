"""The directory's shards of a simulated world: their lives, their map, and what they are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...fabric.directory import DirectoryConfig, DirectoryCore
from ...fabric.effects import Effect, Event, Received, Send, Tick
from ...fabric.messages import ShardMap
from ...fabric.supervisor import SUPERVISOR

if TYPE_CHECKING:
    from .world import World

SHARDS_MAX = 3
TELL_EVERY_S = 0.7


def address_of(number: int) -> str:
    """The address of a directory shard."""
    return f"directory:{number}"


def is_directory(address: str) -> bool:
    """Whether an address is a directory shard's."""
    return address.startswith("directory:")


class Directories:
    """All shards. The map names those that answer; one more or less is a new map, told until it is known."""

    def __init__(self, world: World, count: int) -> None:
        self.world = world
        self.wanted = tuple(address_of(i) for i in range(count))
        self.map = ShardMap(1, self.wanted)
        self.cores: dict[str, DirectoryCore | None] = {}
        self.epochs: dict[str, int] = {}
        self._epoch = 0
        self._tick_at: dict[str, float] = {}

    @property
    def nodes(self) -> list[str]:
        """Where the shards of the map are, each alone."""
        return [node_of(address) for address in self.map.shards]

    def alive(self) -> list[DirectoryCore]:
        """The shards of the map that run now."""
        return [core for address in self.map.shards if (core := self.cores.get(address)) is not None]

    # --- lives ---------------------------------------------------------------------------------

    def start(self, address: str) -> int:
        """A fresh life of a shard, empty, under a new epoch."""
        self._epoch += 1
        config = DirectoryConfig(replay_after_s=1.0, stale_after_s=4.0)
        core = self.cores[address] = DirectoryCore(address, self.world.model, self._epoch, config, self.map)
        self.epochs[address] = self._epoch
        self._tick_at.pop(address, None)
        self.world.trace.note(self.world.queue.now, address, "starts", self.map)
        if address in self.wanted and self.map.shards != self.wanted and all(self.cores.get(a) for a in self.wanted):
            self._new_map()
        self._perform(address, core.start(self.world.lives))
        self._tell_map(address)
        return self._epoch

    def end(self, address: str) -> int | None:
        """A shard's process dies; its epoch, or None if it does not run."""
        if self.cores.get(address) is None:
            return None
        self.cores[address] = None
        return self.epochs[address]

    # --- the map -------------------------------------------------------------------------------

    def reshard(self, count: int) -> None:
        """Want so many shards: those that are missing start first, then the map is told."""
        self.wanted = tuple(address_of(i) for i in range(count))
        if self.wanted != self.map.shards and all(self.cores.get(a) for a in self.wanted):
            self._new_map()

    def _new_map(self) -> None:
        self.map = ShardMap(self.map.epoch + 1, self.wanted)
        for address in [*self.cores, *self.world.holders]:
            self._tell_map(address)

    def tell(self, address: str) -> None:
        """A process started: it must learn the map."""
        self._tell_map(address)

    def _tell_map(self, address: str) -> None:
        """Tell one process the map until it knows it."""
        world = self.world
        if is_directory(address):
            core = self.cores.get(address)
            known = core.router.map if core is not None else None
        else:
            life = world.lives.get(address)
            known = life.core.ctx.router.map if life is not None and life.alive else None
        if known is not None and known.epoch < self.map.epoch and world.failure is None:
            world.transmit(SUPERVISOR, "s", address, self.map)
            world.queue.after(TELL_EVERY_S, self._tell_map, address)

    # --- records -------------------------------------------------------------------------------

    def deliver(self, address: str, sender: str, message: Any) -> bool:
        """Hand a record to a shard; False where it does not run."""
        if self.cores.get(address) is None:
            return False
        self._feed(address, Received(sender, message))
        return True

    def _feed(self, address: str, event: Event) -> None:
        world, core = self.world, self.cores.get(address)
        if core is None or world.failure is not None:
            return
        world.steps += 1
        message = event.message if isinstance(event, Received) else event
        world.trace.note(world.queue.now, address, "got", message)
        world.laws.before_directory(core, message)
        try:
            effects = core.handle(event, world.queue.now)
        except Exception as error:  # noqa: BLE001 - whatever a core raises is a finding
            world.fail("protocol", f"{address}: {type(error).__name__}: {error}", address)
            return
        world.laws.after_directory(core)
        self._perform(address, effects)
        self._schedule_tick(address, core)

    def _perform(self, address: str, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.world.transmit(address, node_of(address), effect.to, effect.message)

    def _schedule_tick(self, address: str, core: DirectoryCore) -> None:
        at = core.next_deadline_s
        if at is not None and not self.world.queue.now < self._tick_at.get(address, -1.0) <= at:
            self._tick_at[address] = at
            self.world.queue.after(max(0.0, at - self.world.queue.now), self._tick, address, at)

    def _tick(self, address: str, at: float) -> None:
        if self._tick_at.get(address) == at:
            del self._tick_at[address]
            self._feed(address, Tick())


def node_of(address: str) -> str:
    """The node a directory shard has for itself."""
    return f"d{address.rsplit(':', 1)[1]}"
