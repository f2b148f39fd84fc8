"""Sessions: processes that store, extend, acquire, read and forget, and sometimes die or fall asleep.

A script is a generator: it yields seconds to sleep, or a :class:`Call` to have answered. A call is
sent again until it is answered or the connection closes, so one that is not answered in bounded
time is a hang.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...fabric.effects import Received
from ...fabric.messages import Answer, Release
from .readers import Reader
from .writers import Writer

if TYPE_CHECKING:
    from .world import Life, World

RETRY_S = 1.5
THINK_S = 0.15
HANG_S = 60.0
BACK_OFF_S = 0.6
STORES_WHAT_IT_MISSED = 0.2


@dataclass(frozen=True, slots=True)
class Call:
    """A record for one life, to be answered by a record of the same request, or given up after a while."""

    life: Life
    message: Any
    give_up_s: float = float("inf")


Script = Generator["Call | float", Any, None]


class Client:
    """One process with one connection to each holder of its node."""

    def __init__(self, world: World, node: str, number: int) -> None:
        self.world = world
        self.node = node
        self.name = f"client:{node}/{number}"
        self.rng = world.rng
        self.weights = world.weights[-1]
        self.alive = True
        self._focus: int | None = None
        self._requests = 0
        self._waiting: Call | None = None
        self._since = 0.0
        self._script: Script = self._live()

    def script(self, script: Script) -> None:
        """Run this instead of a life of random actions."""
        self._script.close()
        self._script = script
        self.start()

    def start(self) -> None:
        self.world.queue.after(self.rng.uniform(0, 0.5), self._resume, self._script, None)

    def call(self, life: Life, message: Any, give_up_s: float = float("inf")) -> Call:
        """What a script yields to have ``message`` answered by ``life``; None if its connection closes."""
        return Call(life, message, give_up_s)

    def prompt_name(self) -> int:
        """Mostly the prompt this process was busy with last: who stores or swaps also reads."""
        if self._focus is None or self.rng.random() < 0.45:
            self._focus = self.rng.choice(self.world.library.names)
        return self._focus

    def request(self) -> str:
        """A request id never used before."""
        self._requests += 1
        return f"{self.name}:{self._requests}"

    def lives(self) -> list[Life] | None:
        """The holders of this node in the order of their shards; None while one is away."""
        found = []
        for name, (node, _) in self.world.holders.items():
            if node == self.node:
                life = self.world.lives.get(name)
                if life is None or not life.alive:
                    return None
                life.clients.add(self.name)
                found.append(life)
        return found

    # --- the script ----------------------------------------------------------------------------

    def _live(self) -> Script:
        """A life of actions, until the run is wound down."""
        writer, reader = Writer(self), Reader(self)
        begun = False
        while True:
            yield self.rng.expovariate(1 / (BACK_OFF_S if reader.turned_away else THINK_S))
            reader.turned_away = False
            if self.world.calm:
                return
            lives = self.lives()
            if lives is None:
                continue
            if not begun or (reader.missed and self.rng.random() < STORES_WHAT_IT_MISSED):
                begun, reader.missed = True, False
                yield from writer.store(lives)
            elif self.rng.random() < 0.27:
                yield from writer.act(lives)
            else:
                yield from reader.act(lives)

    def _resume(self, script: Script, value: Any) -> None:
        if not self.alive or script is not self._script or self.world.failure is not None:
            return
        self._waiting = None
        try:
            wanted = script.send(value)
        except StopIteration:
            return
        if isinstance(wanted, Call):
            self._call(script, wanted)
        else:
            self.world.queue.after(wanted, self._resume, script, None)

    # --- calls ---------------------------------------------------------------------------------

    def _call(self, script: Script, call: Call) -> None:
        self._waiting = call
        self._since = self.world.queue.now
        if not call.life.alive:
            self.world.queue.after(0.001, self._answered, call, None)
            return
        self._send(call)

    def _send(self, call: Call) -> None:
        """Hand the record over, and again later if no answer came."""
        if self._waiting is not call or not self.alive or not call.life.alive:
            return
        world = self.world
        if world.queue.now - self._since > HANG_S and not call.life.paused:
            world.fail("hang", f"{self.name}: {type(call.message).__name__} at {call.life}", self.name)
            return
        lost = not world.calm and self.rng.random() < world.chance.loss
        if not lost:
            delay = self.rng.uniform(0.0002, 0.002)
            if not world.calm and self.rng.random() < world.chance.late:
                delay = self.rng.uniform(0.01, 0.5)
            world.queue.after(delay, world.feed, call.life, Received(self.name, call.message))
        world.queue.after(RETRY_S, self._send, call)
        if world.queue.now == self._since and call.give_up_s < HANG_S:
            world.queue.after(call.give_up_s, self._answered, call, None)

    def receive(self, life: Life, message: Any) -> None:
        """A record from a holder: the answer to the call in flight, or to one of the past."""
        world = self.world
        world.trace.note(world.queue.now, self.name, "got", message)
        call = self._waiting
        if call is not None and call.life is life and message.request == call.message.request:
            self._answered(call, message)
        elif isinstance(message, Answer) and message.grant is not None and life.alive:
            release = Release(self.request(), message.grant.lease, None)
            if (message.grant.leader, message.grant.lease) not in world.held.get(self.name, ()):
                world.queue.after(0.001, world.feed, life, Received(self.name, release))

    def _answered(self, call: Call, message: Any) -> None:
        if self._waiting is call:
            self._resume(self._script, message)

    def closed(self, life: Life) -> None:
        """A holder's process ended: what was asked of it will not be answered."""
        call = self._waiting
        if call is not None and call.life is life:
            self.world.queue.after(0.01, self._answered, call, None)

    def die(self) -> None:
        """The process ends where it stands: its script, its writes, its leases' only user."""
        self.alive = False
        self._script.close()
        self.world.held.pop(self.name, None)
        self.world.close_client(self)
