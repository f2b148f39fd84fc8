"""The directory: soft state with versions. Holders are the authority, this is where to ask them.

One core is one shard's life. A holder's stream here::

    UNKNOWN  --heartbeat 0 or batch 1--> KNOWN --batch seq + 1--> KNOWN
       |                                   '- a later batch waits a while for what is missing; what stays away
       '------- replay asked --> DUMP received in parts, out of sight -> replaces all at once -> KNOWN

Old lives are fenced, duplicates dropped. After its own restart a shard has a new epoch, answers empty and
refills from the holders. Nothing it says is trusted before a holder has pinned, so a wrong or late answer costs a
shorter prefix and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .bands import GONE, ON_TIER
from .effects import Effect, Event, Received, Send
from .index import ChainIndex, IndexLimits
from .messages import (
    CopiesFound,
    CopiesLookup,
    DumpPart,
    EventBatch,
    EventRun,
    EventsSeen,
    Found,
    Heartbeat,
    HolderGone,
    Lookup,
    Mark,
    ShardMap,
    Strip,
)
from .model import ModelSpec
from .segments import Router, span_of

HOLDERS_MAX = 16_384
FENCES_MAX = 4 * HOLDERS_MAX
EARLY_MAX = 16
"""Batches of one holder kept while an earlier one is missing."""
WAITING_MAX = 1024
OBJECTS_MAX = 1 << 26
"""Objects of one chain."""


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """Time-outs and bounds of one shard.

    ``replay_after_s``: how long a missing batch may stay away before a dump is asked for;
    ``stale_after_s``: before its holder is not trusted; ``wait_s``: how long a lookup waits for its marks.
    """

    limits: IndexLimits = field(default_factory=IndexLimits)
    replay_after_s: float = 3.0
    stale_after_s: float = 10.0
    wait_s: float = 0.25


@dataclass(slots=True)
class DumpIn:
    """A dump being received: its seq, the life it fills out of sight, the next part."""

    seq: int
    life: int
    part: int = 0


@dataclass(slots=True)
class Stream:
    """The directory's place in one holder's event stream."""

    incarnation: int
    life: int
    seq: int = 0
    mark: int = 0
    known: bool = False
    """False until its start or a dump was seen: what it says in between is not in order."""
    behind_since_s: float | None = None
    applied: int = 0
    """Objects that events of this life spoke of."""
    early: dict[int, EventBatch] = field(default_factory=dict)
    dump: DumpIn | None = None


@dataclass(slots=True)
class _Waiting:
    until_s: float
    sender: str
    lookup: Lookup


class DirectoryCore:
    """One directory shard's life. ``handle(event, now) -> effects``."""

    def __init__(
        self,
        name: str,
        model: ModelSpec,
        epoch: int,
        config: DirectoryConfig | None = None,
        shards: ShardMap | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.epoch = epoch
        self.config = config or DirectoryConfig()
        self.router = Router(shards or ShardMap(0, (name,)))
        self.streams: dict[str, Stream] = {}
        self.fences: dict[str, int] = {}
        """The least incarnation of each holder that may still speak."""
        self.index = ChainIndex(self.config.limits, span_of(model))
        self._maps: list[Router] = []
        """Maps told since segments of other shards began to be let go."""
        self._waiting: list[_Waiting] = []
        self._effects: list[Effect] = []
        self._units = tuple(group.unit_tokens for group in model.groups)
        self._now = 0.0

    def start(self, holders: Iterable[str]) -> list[Effect]:
        """Ask the holders known to the fabric for all they have."""
        return [Send(h, EventsSeen(self.name, self.epoch, 0, 0, True)) for h in holders]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one record; anything that is none of this protocol's is dropped."""
        self._now = max(now, self._now)
        if isinstance(event, Received):
            match event.message:
                case CopiesLookup():
                    self._send(event.sender, self.copies(event.message))
                case Lookup():
                    self._lookup(event.sender, event.message)
                case EventBatch():
                    self._batch(event.sender, event.message)
                case Heartbeat():
                    self._heartbeat(event.sender, event.message)
                case DumpPart():
                    self._dump(event.sender, event.message)
                case HolderGone():
                    self._gone(event.message)
                case ShardMap():
                    self._told_map(event.message)
                case _:
                    pass
        if self._waiting:
            self._answer_waiting()
        self.index.sweep()
        effects, self._effects = self._effects, []
        return effects

    @property
    def next_deadline_s(self) -> float | None:
        """When this core wants a Tick, on the clock of ``now``."""
        return min((w.until_s for w in self._waiting), default=None)

    def _send(self, to: str, message: Any) -> None:
        self._effects.append(Send(to, message))

    # --- streams -------------------------------------------------------------------------------

    def _stream(self, holder: str, incarnation: int) -> Stream | None:
        """The holder's stream for this life; None for a life that is over or one holder too many."""
        if incarnation < self.fences.get(holder, 0):
            return None
        stream = self.streams.get(holder)
        if stream is None or stream.incarnation < incarnation:
            if stream is None and len(self.streams) >= HOLDERS_MAX:
                return None
            self._end(holder)
            life = self.index.begin_life()
            self.index.show(life, holder, incarnation)
            stream = self.streams[holder] = Stream(incarnation, life)
            self._fence(holder, incarnation)
        return stream

    def _fence(self, holder: str, incarnation: int) -> None:
        self.fences.pop(holder, None)
        self.fences[holder] = incarnation
        if len(self.fences) > FENCES_MAX:
            oldest = next((h for h in self.fences if h not in self.streams), None)
            if oldest is not None:
                del self.fences[oldest]

    def _batch(self, sender: str, message: EventBatch) -> None:
        stream = self._stream(message.holder, message.incarnation)
        if stream is None or message.map_epoch > self.router.map.epoch:
            return
        if message.seq > stream.seq and (stream.known or message.seq == 1):
            stream.early[message.seq] = message
            self._apply_early(stream)
        elif message.seq > stream.seq:
            self._missing(stream)
        replay = not stream.known or self._overdue(stream)
        self._acknowledge(sender, stream, replay=replay)

    def _apply_early(self, stream: Stream) -> None:
        """Apply what is next, as far as it goes; what is early waits for what is missing."""
        while (batch := stream.early.pop(stream.seq + 1, None)) is not None:
            stream.known = True
            stream.seq, stream.mark = batch.seq, max(stream.mark, batch.mark)
            stream.applied += self.index.apply(stream.life, self._owned(batch.runs))
        for seq in sorted(stream.early)[EARLY_MAX:]:
            del stream.early[seq]
        if stream.early:
            self._missing(stream)
        else:
            stream.behind_since_s = None

    def _missing(self, stream: Stream) -> None:
        if stream.behind_since_s is None:
            stream.behind_since_s = self._now

    def _overdue(self, stream: Stream) -> bool:
        since = stream.behind_since_s
        return since is not None and self._now - since >= self.config.replay_after_s

    def _heartbeat(self, sender: str, message: Heartbeat) -> None:
        stream = self._stream(message.holder, message.incarnation)
        if stream is None:
            return
        if message.seq == 0:
            stream.known = True
        behind = message.seq > stream.seq
        if behind:
            # A heartbeat is sent only when nothing is under way: what is missing will not come by itself.
            self._missing(stream)
        elif stream.known and not stream.early:
            stream.behind_since_s = None
        self._acknowledge(sender, stream, replay=behind or not stream.known)

    def _acknowledge(self, sender: str, stream: Stream, *, replay: bool) -> None:
        dump, part = (stream.dump.seq, stream.dump.part) if stream.dump is not None else (0, 0)
        seen = EventsSeen(self.name, self.epoch, stream.incarnation, stream.seq, replay and not dump, dump, part)
        self._send(sender, seen)

    def _dump(self, sender: str, message: DumpPart) -> None:
        stream = self._stream(message.holder, message.incarnation)
        if stream is None or message.map_epoch > self.router.map.epoch:
            return
        dump = stream.dump
        if message.seq > stream.seq and (dump is None or message.seq > dump.seq) and message.part == 0:
            if dump is not None:
                self.index.end_life(dump.life)
            dump = stream.dump = DumpIn(message.seq, self.index.begin_life())
        if dump is not None and message.seq == dump.seq and message.part == dump.part:
            stream.applied += self.index.apply(dump.life, self._owned(message.runs))
            dump.part += 1
            if message.last:
                self._dump_whole(message, stream, dump)
        self._acknowledge(sender, stream, replay=not stream.known)

    def _dump_whole(self, message: DumpPart, stream: Stream, dump: DumpIn) -> None:
        """All parts are here: what this dump says replaces everything known of the holder."""
        self.index.end_life(stream.life)
        self.index.show(dump.life, message.holder, message.incarnation)
        stream.life, stream.seq, stream.known, stream.dump = dump.life, message.seq, True, None
        stream.mark = max(stream.mark, message.mark)
        for seq in [seq for seq in stream.early if seq <= stream.seq]:
            del stream.early[seq]
        self._apply_early(stream)

    def _gone(self, message: HolderGone) -> None:
        fence = max(self.fences.get(message.holder, 0), message.incarnation + 1)
        self._fence(message.holder, fence)
        stream = self.streams.get(message.holder)
        if stream is not None and stream.incarnation < fence:
            self._end(message.holder)
            del self.streams[message.holder]

    def _end(self, holder: str) -> None:
        stream = self.streams.get(holder)
        if stream is not None:
            self.index.end_life(stream.life)
            if stream.dump is not None:
                self.index.end_life(stream.dump.life)

    # --- shards --------------------------------------------------------------------------------

    def _told_map(self, message: ShardMap) -> None:
        before = self.router.map.epoch
        if not self.router.update(message):
            return
        if message.epoch > before + 1:
            # Segments may have gone and come back by maps not known here, with changes told elsewhere.
            self._start_over()
            return
        if not self.index.shedding:
            self._maps.clear()
        self._maps.append(Router(message))
        self.index.shed(lambda anchor: all(router.owner(anchor) == self.name for router in self._maps))

    def _start_over(self) -> None:
        """Forget all and ask every holder for all it has."""
        for holder, stream in list(self.streams.items()):
            self._end(holder)
            life = self.index.begin_life()
            self.index.show(life, holder, stream.incarnation)
            self.streams[holder] = Stream(stream.incarnation, life)
            self._send(holder, EventsSeen(self.name, self.epoch, stream.incarnation, 0, True))

    def _owned(self, runs: Iterable[EventRun]) -> Iterable[EventRun]:
        """Those of a batch's runs that make sense and are this shard's by its own map.

        A holder may have picked them by an earlier map than the one it knew when it sent them.
        """
        return [run for run in runs if self._makes_sense(run) and self._owns(run.anchor)]

    def _makes_sense(self, run: EventRun) -> bool:
        lane, units = run.lane, self._units
        return (
            0 <= lane.group < len(units)
            and 0 <= lane.shard < self.model.shards
            and GONE <= lane.state <= ON_TIER
            and run.unit == units[lane.group]
            and 0 <= run.first < OBJECTS_MAX
        )

    def _owns(self, anchor: bytes) -> bool:
        return self.router.owner(anchor) == self.name

    # --- lookups -------------------------------------------------------------------------------

    def _lookup(self, sender: str, message: Lookup) -> None:
        if message.marks and not self._reached(message.marks) and len(self._waiting) < WAITING_MAX:
            self._waiting.append(_Waiting(self._now + self.config.wait_s, sender, message))
            return
        self._send(sender, self.lookup(message))

    def _reached(self, marks: Iterable[Mark]) -> bool:
        """Whether every change that the asker knows of has been told here, or its holder's life is over."""
        for mark in marks:
            if mark.incarnation < self.fences.get(mark.holder, 0):
                continue
            stream = self.streams.get(mark.holder)
            if stream is None or stream.incarnation != mark.incarnation or stream.mark < mark.mark:
                return False
        return True

    def _answer_waiting(self) -> None:
        still = []
        for waiting in self._waiting:
            if self._now >= waiting.until_s or self._reached(waiting.lookup.marks):
                self._send(waiting.sender, self.lookup(waiting.lookup))
            else:
                still.append(waiting)
        self._waiting = still

    def lookup(self, message: Lookup) -> Found:
        """Presence along a prompt's segments at the fullest holders."""
        strips: Iterable[Strip] = message.strips
        moved: list[tuple[int, int]] = []
        if message.map_epoch < self.router.map.epoch:
            strips = self._mine(message.strips, moved)
        asked = tuple(strips)
        stripes, evicted = self.index.lookup(asked)
        return Found(
            message.op,
            self.epoch,
            message.ask,
            stripes,
            evicted,
            self._stale({stripe.holder for stripe in stripes}),
            not self._reached(message.marks),
            tuple(moved),
            self.router.map if moved else None,
            self.index.editions(asked),
        )

    def copies(self, message: CopiesLookup) -> CopiesFound:
        """What is held by others than those named, as far as their holders are trusted."""
        but = {*message.but, *self._stale(set(self.streams))}
        return CopiesFound(message.op, message.ask, tuple(self.index.copies(run, but) for run in message.runs))

    def _mine(self, strips: Iterable[Strip], moved: list[tuple[int, int]]) -> list[Strip]:
        """The segments that are this shard's by its newer map; the others are added to ``moved``."""
        mine = []
        for strip in strips:
            for at in range(0, strip.count, self.index.span):
                cut = strip.cut(at, self.index.span)
                if self._owns(cut.anchor):
                    mine.append(cut)
                else:
                    moved.append((cut.unit, cut.first))
        return mine

    def _stale(self, holders: set[str]) -> tuple[str, ...]:
        """Holders whose events have been missing for long."""
        stale = []
        for holder in holders:
            since = self.streams[holder].behind_since_s if holder in self.streams else None
            if since is not None and self._now - since >= self.config.stale_after_s:
                stale.append(holder)
        return tuple(sorted(stale))
