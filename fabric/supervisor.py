"""The supervisor: who should run where, who may grant, who is gone. ``handle(event, now) -> effects``.

A holder's life here::

    wanted -> STARTING -> UP -> (exit proven by a live node) -> wanted
                        ^    -> SILENT -> (its right to grant ran out) -> ended, wanted
                        |____________| (it answers again before that)

Silence is no proof: a partitioned node serves on. So a silent holder is replaced only after the
right to grant that it was last given has run out, and a new supervisor, which cannot know what its
predecessor granted, waits one whole grant lease before it replaces anyone. A process that fails to
start, or soon after, is started again at growing intervals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .effects import Received, Send, Undeliverable
from .messages import (
    Drain,
    Drained,
    DrainTally,
    DrainTarget,
    GrantSeen,
    GrantUntil,
    HolderGone,
    Load,
    Member,
    Members,
    Purge,
    SetMode,
    SetWeights,
    ShardMap,
    Warm,
)

SUPERVISOR = "supervisor"
"""The supervisor's address: what it alone may say is taken from no one else."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """Seconds: the right to grant, how often it is renewed, how long a start may take.

    A process that did not stay up for ``settled_s`` is started again after ``backoff_s``, twice that the
    next time and so on, at most ``backoff_s_max``.
    """

    grant_s: float = 10.0
    renew_s: float = 1.0
    start_timeout_s: float = 120.0
    settled_s: float = 10.0
    backoff_s: float = 1.0
    backoff_s_max: float = 30.0
    warm_bytes: int = 0
    warm_s: float = 30.0
    """What a holder that joins is offered of what is worth most elsewhere, and for how long; 0 bytes: nothing."""


class Life(StrEnum):
    """Where a wanted process is."""

    STARTING = "starting"
    UP = "up"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One process the fabric wants: its address and the node it belongs to ("" for any)."""

    address: str
    node: str
    shards: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """What the driver sees now: the processes that ought to run, and the nodes that are alive."""

    wanted: tuple[Wanted, ...]
    alive_nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Started:
    """A process came up and tells where it listens, and its own monotonic clock at that time."""

    member: Member
    clock_s: float


@dataclass(frozen=True, slots=True)
class Exited:
    """A process is gone. ``proven``: a live node reported its exit, so it serves no more."""

    address: str
    incarnation: int
    proven: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """A silent process answers again: it had not ended."""

    address: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A start did not succeed; it is tried again."""

    address: str
    detail: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """At ``asked_s`` (own clock) no later supervisor of this fabric was known: until a grant lease after it, none replaces anyone."""

    asked_s: float


@dataclass(frozen=True, slots=True)
class DrainNode:
    """A node goes, or is to be emptied: ``why`` is what said so. ``retire``: its holders end once they are drained."""

    node: str
    within_s: float
    why: str
    retire: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process under its next incarnation (a durable counter of the driver's)."""

    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Stop:
    """End one life of a process: it is wanted no more, or another takes its place."""

    address: str
    incarnation: int


SupervisorEvent = (
    Observed | Started | Exited | Answered | StartFailed | Tick | Confirmed | DrainNode | Received | Undeliverable
)
SupervisorEffect = Send | Start | Stop


@dataclass(slots=True)
class Process:
    """A process the supervisor knows of."""

    wanted: Wanted
    life: Life
    since_s: float
    member: Member | None = None
    granted_until_s: float = 0.0
    clock_s: float = 0.0
    """The process's own clock when it last answered."""
    load: Load | None = None


@dataclass(slots=True)
class NodeDrain:
    """One node being emptied: until when (own clock), and what each of its holders reported."""

    node: str
    number: int
    deadline_s: float
    why: str
    retire: bool
    reports: dict[str, Drained] = field(default_factory=dict)
    over: bool = False


@dataclass(slots=True)
class SupervisorCore:
    """All decisions about the fabric's processes.

    ``incarnation``: above that of every earlier supervisor of this fabric, so that what it tells
    holders is numbered above all that those said.
    """

    config: SupervisorConfig
    started_s: float
    inherited: bool
    weights: bytes = b""
    retired: tuple[bytes, ...] = ()
    bypassed: bool = False
    suspect: str = ""
    """The group that causes name while the fabric is bypassed."""
    drains: dict[str, NodeDrain] = field(default_factory=dict)
    """Nodes that are drained or were, by node, as long as they are there."""
    retired_nodes: set[str] = field(default_factory=set)
    """Nodes that are to have no holder, so that they can be taken away."""
    wanted: frozenset[str] = frozenset()
    """Addresses that ought to be up, as last seen."""
    processes: dict[str, Process] = field(default_factory=dict)
    restarts: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    incarnation: int = 0
    shard_map: ShardMap | None = None
    """The directory's shards, once they are told."""
    confirmed_s: float | None = None
    """When it was last known that no later supervisor rules; None: nobody looks."""
    _drain_number: int = 0
    _weights_number: int = 0
    _mode_number: int = 0
    _unsettled: dict[str, tuple[int, float]] = field(default_factory=dict)
    """How often in a row a process did not stay up, and when it may be started again."""
    _number: int = 0
    _renewed_s: float = -1e9
    _effects: list[SupervisorEffect] = field(default_factory=list)

    def handle(self, event: SupervisorEvent, now: float) -> list[SupervisorEffect]:
        """One step: what was seen in, what to do about it out. ``now``: monotonic seconds."""
        match event:
            case Observed():
                self._reconcile(event, now)
            case Started():
                self._started(event, now)
            case Exited():
                self._exited(event, now)
            case Answered():
                self._answered(event, now)
            case StartFailed():
                self._start_failed(event.address, event.detail, now)
            case Tick():
                self._renew(now)
            case Confirmed():
                self.confirmed_s = max(event.asked_s, self.confirmed_s or event.asked_s)
            case DrainNode():
                self._drain(event, now)
            case Received(message=GrantSeen() as message):
                self._seen(event.sender, message, now)
            case Received(message=Drained() as message):
                self._drained(event.sender, message)
            case _:
                pass
        effects, self._effects = self._effects, []
        return effects

    # --- processes -----------------------------------------------------------------------------

    def _reconcile(self, seen: Observed, now: float) -> None:
        self.drains = {node: drain for node, drain in self.drains.items() if node in seen.alive_nodes}
        self.retired_nodes &= seen.alive_nodes
        wanted = {w.address: w for w in seen.wanted if not w.shards or w.node not in self.retired_nodes}
        self.wanted = frozenset(a for a, w in wanted.items() if not self._leaves(w))
        for address, process in list(self.processes.items()):
            if process.life is Life.UP and process.member is not None and self._misplaced(process, wanted.get(address)):
                self._effects.append(Stop(address, process.member.incarnation))
                self._forget(address)
            elif process.life is Life.STARTING and now - process.since_s > self.config.start_timeout_s:
                self._start_failed(address, f"did not start within {self.config.start_timeout_s:.0f} s", now)
            elif process.life is Life.SILENT and process.member is not None and now >= process.granted_until_s:
                self._effects.append(Stop(address, process.member.incarnation))
                self._did_not_settle(process, now)
                self._forget(address)
        self._unsettled = {a: kept for a, kept in self._unsettled.items() if a in wanted}
        for address, want in wanted.items():
            if address not in self.processes and not self._leaves(want) and self._may_start(address, now):
                self.processes[address] = Process(want, Life.STARTING, now)
                self._effects.append(Start(want))

    @staticmethod
    def _misplaced(process: Process, want: Wanted | None) -> bool:
        """Whether a process is wanted no more, or elsewhere."""
        return want is None or (bool(want.node) and want.node != process.wanted.node)

    def _leaves(self, want: Wanted) -> bool:
        """A holder of a node that is drained: where it runs it goes on, where it does not nobody starts it."""
        return bool(want.shards) and want.node in self.drains

    def _may_start(self, address: str, now: float) -> bool:
        """A supervisor that took over cannot know who may still grant: it waits one grant lease."""
        if self.inherited and now - self.started_s < self.config.grant_s:
            return False
        return now >= self._unsettled.get(address, (0, 0.0))[1]

    def failed_starts(self, address: str) -> int:
        """How often in a row a process failed to start, or to stay up."""
        return self._unsettled.get(address, (0, 0.0))[0]

    def _start_failed(self, address: str, detail: str, now: float) -> None:
        process = self.processes.pop(address, None)
        self.failures[address] = detail
        if process is not None:
            self._did_not_settle(process, now)

    def _did_not_settle(self, process: Process, now: float) -> None:
        """Count a life that ended too soon; one that lasted makes the count start anew."""
        address, config = process.wanted.address, self.config
        if process.life is not Life.STARTING and now - process.since_s >= config.settled_s:
            self._unsettled.pop(address, None)
            return
        times = self._unsettled.get(address, (0, 0.0))[0]
        wait_s = 0.0 if times == 0 and process.life is Life.UP else config.backoff_s * 2 ** min(times, 16)
        self._unsettled[address] = (times + 1, now + min(wait_s, config.backoff_s_max))

    def _started(self, event: Started, now: float) -> None:
        member = event.member
        known = self.processes.get(member.address)
        if known is not None and known.member is not None and known.member.incarnation > member.incarnation:
            return
        wanted = known.wanted if known is not None else Wanted(member.address, member.node, member.shards)
        self.processes[member.address] = Process(wanted, Life.UP, now, member, clock_s=event.clock_s)
        self.failures.pop(member.address, None)
        self._tell_all()
        self._grant(self.processes[member.address], now)
        self._effects.append(Send(member.address, self._set_weights()))
        self._effects.append(Send(member.address, self._set_mode(member.node)))
        if self.shard_map is not None:
            self._effects.append(Send(member.address, self.shard_map))
        if member.node in self.drains:
            self._ask_to_drain(self.drains[member.node], now)
        elif self.config.warm_bytes and known is not None and known.life is Life.STARTING and member.shards:
            self._warm(member)

    def _exited(self, event: Exited, now: float) -> None:
        process = self.processes.get(event.address)
        if process is None or process.member is None or process.member.incarnation != event.incarnation:
            return
        self.restarts += 1
        if event.proven:
            self._did_not_settle(process, now)
            self._effects.append(Stop(event.address, event.incarnation))
            self._forget(event.address)
        elif process.life is Life.UP:
            process.life = Life.SILENT

    def _answered(self, event: Answered, now: float) -> None:
        """It only was slow or cut off for a while: nobody took its place, so it goes on as it was."""
        process = self.processes.get(event.address)
        if process is None or process.member is None or process.member.incarnation != event.incarnation:
            return
        if process.life is Life.SILENT:
            process.life = Life.UP
            self._tell_all()
            self._grant(process, now)

    def _forget(self, address: str) -> None:
        process = self.processes.pop(address)
        if process.member is None:
            return
        gone = HolderGone(address, process.member.incarnation)
        for other in self.processes.values():
            if other.member is not None:
                self._effects.append(Send(other.member.address, gone))
        self._tell_all()

    def _tell_all(self) -> None:
        self._number += 1
        members = self.members()
        for member in members.members:
            self._effects.append(Send(member.address, members))

    def members(self) -> Members:
        """Everyone who is up."""
        up = [p.member for p in self.processes.values() if p.member is not None and p.life is Life.UP]
        return Members(self._numbered(self._number), tuple(sorted(up, key=lambda m: m.address)))

    # --- rights and modes ----------------------------------------------------------------------

    def _renew(self, now: float) -> None:
        if now - self._renewed_s < self.config.renew_s:
            return
        self._renewed_s = now
        for process in self.processes.values():
            if process.life is Life.UP:
                self._grant(process, now)
        for drain in self.drains.values():
            if not drain.over:
                self._ask_to_drain(drain, now)

    def _grant(self, process: Process, now: float) -> None:
        """The right to grant, which ends before a supervisor that is not known here could replace anyone."""
        assert process.member is not None
        seconds = self.config.grant_s
        if self.confirmed_s is not None:
            seconds = min(seconds, self.confirmed_s + self.config.grant_s - now)
        if seconds <= 0:
            return
        process.granted_until_s = now + seconds
        grant = GrantUntil(process.member.incarnation, seconds, process.clock_s, self.incarnation)
        self._effects.append(Send(process.member.address, grant))

    def _seen(self, address: str, message: GrantSeen, now: float) -> None:
        """A process answered: its clock, and what it has not been told yet, or was and never got."""
        process = self.processes.get(address)
        if process is None or process.member is None or process.member.incarnation != message.incarnation:
            return
        process.clock_s = max(process.clock_s, message.clock_s)
        if self.shard_map is not None and message.map_epoch < self.shard_map.epoch:
            self._effects.append(Send(address, self.shard_map))
        if message.weights_number != self._numbered(self._weights_number):
            self._effects.append(Send(address, self._set_weights()))
        if message.mode_number != self._numbered(self._mode_number):
            self._effects.append(Send(address, self._set_mode(process.member.node)))
        if message.leaves_in_s is not None:
            self._drain(DrainNode(process.member.node, message.leaves_in_s, message.notice), now)
        process.load = message.load

    def _numbered(self, count: int) -> int:
        return self.incarnation << 32 | count

    def _set_weights(self) -> SetWeights:
        return SetWeights(self.weights, self.retired, self._numbered(self._weights_number))

    def _set_mode(self, node: str) -> SetMode:
        return SetMode(node in self.drains, self.bypassed, self._numbered(self._mode_number), self.suspect)

    def update_weights(self, weights: bytes, retired: Iterable[bytes]) -> list[SupervisorEffect]:
        """Put a weights revision in force on every holder."""
        self.weights, self.retired = weights, tuple(retired)
        self._weights_number += 1
        return [Send(a, self._set_weights()) for a in self._up()]

    def set_mode(self, *, bypassed: bool) -> list[SupervisorEffect]:
        """Bypass the whole fabric or not."""
        self.bypassed = bypassed
        self._mode_number += 1
        return self._modes()

    def _modes(self) -> list[SupervisorEffect]:
        members = [process.member for process in self.processes.values() if process.member is not None]
        return [Send(member.address, self._set_mode(member.node)) for member in members]

    def _warm(self, member: Member) -> None:
        """Have the fullest holder of the newcomer's shards offer it what is worth most."""
        donors = [
            (p.load.used_bytes, a)
            for a, p in self.processes.items()
            if p.life is Life.UP and p.load is not None and p.load.used_bytes and p.member is not None
            if set(p.member.shards) & set(member.shards) and p.member.node not in (member.node, *self.drains)
        ]
        if donors:
            warm = Warm(member.address, member.shards, self.config.warm_bytes, self.config.warm_s)
            self._effects.append(Send(max(donors)[1], warm))

    # --- drains --------------------------------------------------------------------------------

    def _drain(self, event: DrainNode, now: float) -> None:
        """Begin to empty a node, or sooner than it was said before."""
        known = self.drains.get(event.node)
        deadline_s = now + event.within_s
        if known is not None:
            known.retire = known.retire or event.retire
            if known.over or deadline_s >= known.deadline_s:
                self._drain_over(known)
                return
        self._drain_number += 1
        retire = event.retire or (known is not None and known.retire)
        drain = NodeDrain(event.node, self._numbered(self._drain_number), deadline_s, event.why, retire)
        self.drains[event.node] = drain
        self._mode_number += 1
        self._effects += self._modes()
        self._ask_to_drain(drain, now)

    def _ask_to_drain(self, drain: NodeDrain, now: float) -> None:
        """Tell the node's holders until each has reported; a node without any is drained."""
        up = [
            p.member for p in self.processes.values() if p.member is not None and p.life is Life.UP and p.member.shards
        ]
        stay = [m for m in up if m.node not in self.drains]
        targets = tuple(DrainTarget(m.address, m.node, m.shards) for m in sorted(stay, key=lambda m: m.address))
        leaving = tuple(sorted(m.address for m in up if m.node in self.drains))
        left_s = max(drain.deadline_s - now, 0.0)
        for member in up:
            if member.node == drain.node and member.address not in drain.reports:
                self._effects.append(Send(member.address, Drain(drain.number, left_s, targets, leaving)))
        self._drain_over(drain)

    def _drained(self, address: str, message: Drained) -> None:
        process = self.processes.get(address)
        if process is None or process.member is None or process.member.incarnation != message.incarnation:
            return
        drain = self.drains.get(process.member.node)
        if drain is not None and message.number == drain.number:
            drain.reports[address] = message
            self._drain_over(drain)

    def _drain_over(self, drain: NodeDrain) -> None:
        """Over once each of its holders has reported or is gone; a node to be retired then has holders no more."""
        there = {
            a
            for a, p in self.processes.items()
            if p.wanted.shards and p.wanted.node == drain.node and p.member is not None
        }
        drain.over = there <= drain.reports.keys()
        if drain.over and drain.retire:
            self.retired_nodes.add(drain.node)

    def drain_sum(self, node: str) -> dict[str, DrainTally]:
        """What became of a node's state, over its holders."""
        drain = self.drains.get(node)
        reports = list(drain.reports.values()) if drain is not None else []
        sums = {}
        for name in ("moved", "elsewhere", "dropped"):
            tallies: list[DrainTally] = [getattr(report, name) for report in reports]
            sums[name] = DrainTally(
                sum(t.objects for t in tallies), sum(t.size_bytes for t in tallies), sum(t.value for t in tallies)
            )
        return sums

    def engage(self, node: str) -> list[SupervisorEffect]:
        """A node that was emptied for want of work is to serve again."""
        if node in self.retired_nodes and all(p.wanted.node != node for p in self.processes.values()):
            self.retired_nodes.discard(node)
            self.drains.pop(node, None)
            self._mode_number += 1
            return self._modes()
        return []

    def set_shards(self, shard_map: ShardMap) -> list[SupervisorEffect]:
        """Put a shard map in force: everyone is told, now and whoever starts later."""
        self.shard_map = shard_map
        return [Send(a, shard_map) for a in self._up()]

    def _up(self) -> list[str]:
        return [a for a, p in self.processes.items() if p.life is Life.UP]


def is_supervisor_message(message: Any) -> bool:
    """Whether a record is one that only the supervisor may send."""
    return isinstance(
        message, Purge | GrantUntil | SetWeights | SetMode | ShardMap | HolderGone | Members | Drain | Warm
    )
