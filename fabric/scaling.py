"""Scaling with the work: which nodes' holders may go, and whether more nodes are worth asking for. Pure.

A live holder keeps its node from being taken away, so the fabric lets go of the holder of a node on which no
engine has run for a while, down to a floor. Asking for nodes is the other way: pressure that lasts asks for one
more, up to a cap; calm that lasts withdraws what was asked for. Two thresholds and two waits lie between them,
so that a burst asks for nothing and a pause withdraws nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .messages import Load


@dataclass(frozen=True, slots=True)
class ScaleDownConfig:
    """``idle_s``: how long no engine must have run on a node; the floors count what stays."""

    idle_s: float
    min_nodes: int = 1
    min_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeUse:
    """One node with holders, as seen now. ``stays``: it cannot be taken away (the head), or is on its way out already."""

    node: str
    engines: bool
    size_bytes: int
    stays: bool = False


@dataclass(slots=True)
class ScaleDown:
    """Which nodes to empty and let go."""

    config: ScaleDownConfig
    _idle_since_s: dict[str, float] = field(default_factory=dict)

    def look(self, nodes: Iterable[NodeUse], now: float, *, wanted: int = 0) -> list[str]:
        """The nodes that may go now, idle longest first; the caller drains them and says so by ``stays``.

        ``wanted``: how many nodes are asked for under pressure; none of so many goes for being idle.
        """
        seen = {use.node: use for use in nodes}
        self._idle_since_s = {n: at for n, at in self._idle_since_s.items() if n in seen and not seen[n].engines}
        for use in seen.values():
            if not use.engines:
                self._idle_since_s.setdefault(use.node, now)
        left_nodes, left_bytes = len(seen), sum(use.size_bytes for use in seen.values())
        going = []
        for node, since_s in sorted(self._idle_since_s.items(), key=lambda entry: (entry[1], entry[0])):
            use = seen[node]
            if use.stays or now - since_s < self.config.idle_s:
                continue
            if (
                left_nodes - 1 < max(self.config.min_nodes, wanted)
                or left_bytes - use.size_bytes < self.config.min_bytes
            ):
                continue
            left_nodes, left_bytes = left_nodes - 1, left_bytes - use.size_bytes
            going.append(node)
        return going

    def idle_s(self, node: str, now: float) -> float:
        """How long no engine has run on a node; 0 where one does."""
        return now - self._idle_since_s.get(node, now)


@dataclass(frozen=True, slots=True)
class ScaleUpConfig:
    """What pressure 1 is, and how long it must last.

    ``refused_per_s``: acquires without room; ``evicted_tokens_per_s``: lost to eviction; ``waiting``: restores in
    line. ``low``: the pressure below which it is calm. ``step_s``: from one more node to the next, and how long
    pressure must have lasted; ``calm_s``: how long it must have been calm. ``nodes_max``: the cap.
    """

    refused_per_s: float = 1.0
    evicted_tokens_per_s: float = 10_000.0
    waiting: float = 64.0
    low: float = 0.25
    step_s: float = 15.0
    calm_s: float = 120.0
    nodes_max: int = 8


@dataclass(frozen=True, slots=True)
class Pressure:
    """The signal and its parts, each over what is pressure 1."""

    refused: float = 0.0
    evicted: float = 0.0
    waiting: float = 0.0

    @property
    def value(self) -> float:
        return max(self.refused, self.evicted, self.waiting)


@dataclass(slots=True)
class ScaleUp:
    """Turns what holders count into pressure, and lasting pressure into a number of nodes."""

    config: ScaleUpConfig
    pressure: Pressure = field(default_factory=Pressure)
    wanted_nodes: int = 0
    """How many nodes are asked for; 0 for none beyond what there is."""
    _seen: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    _seen_s: float | None = None
    _high_since_s: float | None = None
    _low_since_s: float | None = None

    def look(self, loads: dict[tuple[str, int], Load], nodes: int, now: float) -> int:
        """Take what each life (address, incarnation) counted; the number of nodes to ask for, 0 for none."""
        self._measure(loads, now)
        config, value = self.config, self.pressure.value
        self._high_since_s = (self._high_since_s if self._high_since_s is not None else now) if value >= 1.0 else None
        self._low_since_s = (
            (self._low_since_s if self._low_since_s is not None else now) if value <= config.low else None
        )
        if self._high_since_s is not None and now - self._high_since_s >= config.step_s:
            self.wanted_nodes = max(self.wanted_nodes, min(nodes + 1, config.nodes_max))
            self._high_since_s = now
        elif self._low_since_s is not None and now - self._low_since_s >= config.calm_s:
            self.wanted_nodes = 0
        return self.wanted_nodes

    def _measure(self, loads: dict[tuple[str, int], Load], now: float) -> None:
        """Counters of lives that are new count from here on."""
        spent_s = now - self._seen_s if self._seen_s is not None else 0.0
        if self._seen_s is not None and spent_s <= 0:
            return
        before, self._seen_s = self._seen, now
        self._seen = {life: (load.refused, load.evicted_tokens) for life, load in loads.items()}
        if not spent_s:
            return
        grown = [
            (refused - before[life][0], evicted - before[life][1])
            for life, (refused, evicted) in self._seen.items()
            if life in before
        ]
        config = self.config
        self.pressure = Pressure(
            sum(refused for refused, _ in grown) / spent_s / config.refused_per_s,
            sum(evicted for _, evicted in grown) / spent_s / config.evicted_tokens_per_s,
            sum(load.waiting for load in loads.values()) / config.waiting,
        )
