"""What the verbs need of the world they run in: nodes, holders, a wire, a clock, and ways to break them.

``PureWorld`` is the protocol cores under a virtual clock; a cluster is the same cores in real
processes. A world decides nothing about answers: it carries records to holders, bytes into open
slots, and faults to where they belong.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...fabric.arena import Arena, ArenaLayout, PoolLayout
from ...fabric.budget import in_slabs
from ...fabric.kinds import Tier
from ...fabric.messages import StoreBegun
from ...fabric.model import ModelSpec
from .story import Acquire, Extend, Fault, How, Node, Store, Story, Where

SHARED_HOLDERS_MAX = 4
"""Holders a node has at most; with more shards each owns several."""


SLOTS_SPARE = 16


@dataclass(frozen=True, slots=True)
class Seat:
    """One holder of a node and the shards whose bytes lie there."""

    holder: str
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Victim:
    """Objects of one group to damage or to make fail: by chain digest, or any chain's at one index."""

    group: int
    index: int
    digest: bytes | None = None


@dataclass(slots=True)
class Books:
    """What the fabric's own books say, over all live holders; metrics count dead lives too."""

    pins: int = 0
    slots_lost: int = 0
    metrics: dict[str, int] = field(default_factory=dict)


class Hung(Exception):
    """Steps that never end: a fault of the fabric, not of the story."""


class World(Protocol):
    """One world, for one story. Verbs are coroutines that only :meth:`run` drives."""

    model: ModelSpec

    def seats(self, node: str) -> Sequence[Seat]:
        """The holders of a node, dead or alive, by shard: the first leads."""
        ...

    def run(self, work: Sequence[Coroutine[Any, Any, Any]], limit_s: float) -> list[Any]:
        """Drive these to their ends, all at once, then settle: every event applied by the directory.

        Raises Hung where one does not end within ``limit_s`` seconds of the story's time.
        """
        ...

    async def ask(self, holder: str, message: Any) -> Any | None:
        """Send a record as a client on the holder's node; its reply, or None where the holder is dead."""
        ...

    async def fill(self, holder: str, begun: StoreBegun, contents: Iterable[bytes]) -> bytes:
        """Write the bytes of an open attempt's slots, in the order begun; their checksums (16 bytes each)."""
        ...

    def arena(self, holder: str) -> Arena | None:
        """What a process on the holder's node can map read-only; None for a dead holder."""
        ...

    def now(self, node: str) -> float:
        """The monotonic clock of a node, in seconds."""
        ...

    async def advance(self, seconds: float) -> None:
        """Move the clock; due timers run in order."""
        ...

    async def set_weights(self, weights: str, retired: Sequence[str]) -> None:
        """Put a weights revision in force at every holder, now and after every restart."""
        ...

    async def kill(self, member: str) -> None:
        """Kill a node's holders, or the directory. Nothing happens to dead ones."""
        ...

    async def restart(self, member: str) -> None:
        """Kill what lives and bring fresh incarnations; a holder's disk is warm."""
        ...

    async def partition(self, one: str, other: str) -> None: ...

    async def heal(self, one: str, other: str) -> None: ...

    async def inject(self, node: str, fault: Fault, times: int, victim: Victim | None) -> None:
        """Have the next ``times`` operations at a node meet a fault; 0 clears it."""
        ...

    async def corrupt(self, node: str, victim: Victim, how: How, where: Where | None) -> None:
        """Damage every copy at a node behind the fabric's back, in memory, on disk, or (None) both."""
        ...

    async def books(self) -> Books: ...

    def cluster(self) -> dict[str, Any] | None:
        """Holder pids and transfer bytes; None where there are none."""
        ...

    def close(self) -> None: ...


def seats_of(model: ModelSpec, node: str) -> tuple[Seat, ...]:
    """Holders of a node: one, or up to four that own neighbouring shards."""
    count = min(SHARED_HOLDERS_MAX, model.shards)
    if count == 1:
        return (Seat(node, tuple(range(model.shards))),)
    bounds = [model.shards * i // count for i in range(count + 1)]
    return tuple(Seat(f"{node}.{i}", tuple(range(bounds[i], bounds[i + 1]))) for i in range(count))


def layout_of(
    model: ModelSpec, shards: Sequence[int], slots: Mapping[str, int], node: Node
) -> tuple[ArenaLayout, tuple[int, ...]]:
    """A holder's arena, and how many slabs each pool has at first: a pool a group and shard, and with host slots one of
    host memory below each. ``slots``: by group. Raises SpecError where they are too few to share slabs.
    """
    groups = [(g, group, s) for g, group in enumerate(model.groups) for s in shards]
    readers = Tier.G1 if node.host_memory else Tier.G2
    pools = [PoolLayout(g, s, slots[group.name], group.block_bytes, readers) for g, group, s in groups]
    if node.host_memory:
        pools += [PoolLayout(g, s, node.host_memory[group.name], group.block_bytes, Tier.G2) for g, group, s in groups]
    layout = ArenaLayout(pools)
    return in_slabs(layout) if node.slabs else (layout, ())


def slots_needed(story: Story) -> dict[tuple[str, str], int]:
    """(node, group) -> slots a group and shard: what the story says, or room for all it ever moves there."""
    needed = {(node, group.name): SLOTS_SPARE for node in story.nodes for group in story.model.groups}
    for step in story.each_step():
        if not isinstance(step.args, Store | Extend | Acquire):
            continue
        tokens = step.args.tokens
        n = tokens if isinstance(tokens, int) else tokens[1]
        for group in story.model.groups:
            needed[step.args.at, group.name] += n // group.unit_tokens
    for name, node in story.nodes.items():
        needed.update({(name, group): slots for group, slots in node.capacity.items()})
    return needed
