"""The event desk: what a holder tells the directory's shards of its objects, in order and bounded.

One stream a shard. Changes wait by object, the latest state replacing the earlier, so a slow shard costs
no more memory than there are objects; at most ``event_batches_kept`` batches are under way at a time,
sent again until they are acknowledged::

    STREAMING  pending -> batch (seq + 1) -> acknowledged
        |  a shard that lost its place (restart, gap) asks for a replay
    DUMPING    all visible objects in bounded parts, a few under way, acknowledged part by part;
               what changes meanwhile waits -> STREAMING

What the directory believes is never trusted, so a late event costs a shorter answer and nothing else.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, NamedTuple

from .bands import GONE, IN_MEMORY, ON_TIER
from .context import HolderContext
from .kinds import INDEX_DIGEST_BYTES
from .lifecycle import State
from .messages import DumpPart, EventBatch, EventRun, EventsSeen, Heartbeat, Lane, ShardMap
from .model import ModelSpec
from .objects import Change, Obj
from .passport import Abi
from .segments import Router

DUMP_PARTS_AHEAD = 4
MOVE_PAUSE_S = 0.002
_NO_ABI = Abi(b"", 1)
_MEMORY = frozenset({State.SEALED, State.DEMOTING})


class _Pending(NamedTuple):
    obj: Obj
    gone: bool
    evicted: bool
    number: int


@dataclass(slots=True)
class _Dump:
    """A dump under way: the objects as of its start, and which part is awaited and which was sent last."""

    seq: int
    mark: int
    objects: list[Obj]
    awaited: int = 0
    sent: int = 0


@dataclass(slots=True)
class ShardStream:
    """This holder's stream to one shard."""

    shard: str
    seq: int = 0
    epoch: int = 0
    pending: OrderedDict[tuple[int, int, bytes], _Pending] = field(default_factory=OrderedDict)
    unacked: OrderedDict[int, EventBatch] = field(default_factory=OrderedDict)
    dump: _Dump | None = None
    behind_since_s: float | None = None
    """Since when the shard has not said that it saw everything; None if it has."""


class EventDesk:
    """The event streams of one holder's life to its directory."""

    def __init__(self, ctx: HolderContext) -> None:
        self.ctx = ctx
        self.streams = {shard: ShardStream(shard) for shard in ctx.router.shards}
        self._moving: Iterator[Obj] | None = None
        self._owners_before: Router | None = None
        self._left = 0
        self._seqs: dict[str, int] = {}
        """Where the streams to shards that are none now ended."""

    @property
    def seq(self) -> int:
        """The last batch or dump of the first shard's stream."""
        return self.streams[self.ctx.router.shards[0]].seq

    @property
    def unacknowledged(self) -> int:
        """Batches kept for one shard, at most, because it has not said that it saw them."""
        return max(len(stream.unacked) for stream in self.streams.values())

    @property
    def settled(self) -> bool:
        """Whether every shard said that it saw everything."""
        idle = all(not (s.pending or s.unacked or s.dump) for s in self.streams.values())
        return idle and self._moving is None

    def start(self) -> None:
        """Begin telling the directory, at once and then by heartbeat, where these streams stand."""
        self._beat()

    def flush(self) -> None:
        """Send what changed in this step."""
        books = self.ctx.books
        if books.changes:
            changes, books.changes = books.changes, []
            gone = [obj for change in changes if change.gone for obj in change.objects]
            if gone:
                self.ctx.journal.happened(self.ctx.now, "dropped", gone)
            if not self._told_at_once(changes):
                for change in changes:
                    self._put(change)
        for stream in self.streams.values():
            if stream.pending:
                self._send_batches(stream)

    def _told_at_once(self, changes: Sequence[Change]) -> bool:
        """Send a step's changes as they are, where there is one shard and nothing waits; False where they must be sorted."""
        ctx = self.ctx
        if len(self.streams) > 1 or self._moving is not None:
            return False
        (stream,) = self.streams.values()
        count = sum([len(change.objects) for change in changes])
        if stream.pending or stream.dump is not None or len(stream.unacked) >= ctx.config.event_batches_kept:
            return False
        if count > ctx.config.dump_objects_max or (len(changes) > 1 and not _distinct(changes, count)):
            return False
        if [obj for change in changes for obj in change.objects if obj.place is None]:
            return False
        ctx.changes_told += count
        self._send(stream, _runs(changes, self._unit))
        return True

    @property
    def staleness_s(self) -> float:
        """For how long the shard that lags most has not said that it saw everything."""
        since = [s.behind_since_s for s in self.streams.values() if s.behind_since_s is not None]
        return self.ctx.now - min(since) if since else 0.0

    def _put(self, change: Change) -> None:
        for obj in change.objects:
            self.ctx.changes_told += 1
            self._route(obj, gone=change.gone, evicted=change.evicted)

    def _route(self, obj: Obj, *, gone: bool, evicted: bool) -> None:
        place = obj.place
        if place is None:
            self.ctx.counters["events_without_place"] += 1
            return
        self._pend(self.streams[self.ctx.router.owner(place.anchor)], obj, gone=gone, evicted=evicted)

    def _pend(self, stream: ShardStream, obj: Obj, *, gone: bool, evicted: bool) -> None:
        key = (obj.group, obj.shard, obj.digest)
        stream.pending[key] = _Pending(obj, gone, evicted, self.ctx.changes_told)
        stream.pending.move_to_end(key)

    def _send_batches(self, stream: ShardStream) -> None:
        ctx, pending = self.ctx, stream.pending
        if pending and stream.behind_since_s is None:
            stream.behind_since_s = ctx.now
        if stream.dump is not None:
            return
        while pending and len(stream.unacked) < ctx.config.event_batches_kept:
            count = min(len(pending), ctx.config.dump_objects_max)
            taken = [pending.popitem(last=False)[1] for _ in range(count)]
            same = groupby(taken, lambda change: (change.gone, change.evicted))
            self._send(stream, _runs([Change([p.obj for p in some], *how) for how, some in same], self._unit))

    def _send(self, stream: ShardStream, runs: Iterable[EventRun]) -> None:
        """The next batch of a stream."""
        ctx = self.ctx
        if stream.behind_since_s is None:
            stream.behind_since_s = ctx.now
        stream.seq += 1
        mark, map_epoch = self._told_up_to(stream), ctx.router.map.epoch
        batch = EventBatch(ctx.config.holder, ctx.incarnation, stream.seq, mark, tuple(runs), map_epoch)
        stream.unacked[stream.seq] = batch
        ctx.send(stream.shard, batch)

    def _told_up_to(self, stream: ShardStream) -> int:
        """The change up to which this shard is told everything once what is being sent arrives."""
        if self._moving is not None:
            return 0
        return next(iter(stream.pending.values())).number - 1 if stream.pending else self.ctx.changes_told

    def _unit(self, group: int) -> int:
        return self.ctx.model.groups[group].unit_tokens

    # --- what the shards say -------------------------------------------------------------------

    def seen(self, message: EventsSeen) -> None:
        """A shard's place in its stream; a replay is a dump."""
        stream = self.streams.get(message.shard)
        if stream is None or message.incarnation not in (0, self.ctx.incarnation):
            return
        if message.epoch < stream.epoch:
            return
        restarted, stream.epoch = message.epoch != stream.epoch, message.epoch
        dump = stream.dump
        if dump is not None and not restarted and message.seq < dump.seq:
            self._dump_seen(stream, dump, message)
            return
        stream.dump = None
        for seq in [s for s in stream.unacked if s <= message.seq]:
            del stream.unacked[seq]
        if not (stream.unacked or stream.pending):
            stream.behind_since_s = None
        if message.replay or (restarted and dump is not None):
            self._begin_dump(stream)
        else:
            self._send_batches(stream)

    def _dump_seen(self, stream: ShardStream, dump: _Dump, message: EventsSeen) -> None:
        if message.dump == dump.seq:
            if message.part > dump.awaited:
                dump.awaited = message.part
                dump.sent = max(dump.sent, dump.awaited)
                self._send_parts(stream)
        elif message.replay and dump.awaited:
            # The shard knows of no part of it.
            dump.awaited = dump.sent = 0
            self._send_parts(stream)

    def told_map(self, message: ShardMap) -> None:
        """The directory's shards are others: what must move is told to who answers for it."""
        before = Router(self.ctx.router.map)
        if not self.ctx.router.update(message):
            return
        shards = self.ctx.router.shards
        lost = [stream for shard, stream in self.streams.items() if shard not in shards]
        for stream in lost:
            # A shard that comes back must not take what it has not seen for what it has.
            self._seqs[stream.shard] = stream.seq
        self.streams = {s: self.streams.get(s) or ShardStream(s, self._seqs.pop(s, 0)) for s in shards}
        if self._moving is not None or message.epoch > before.map.epoch + 1:
            # What was moved by a map not known here, or only in part, is told anew as a whole.
            self._moving = self._owners_before = None
            self.dump()
            return
        for stream in lost:
            for pending in stream.pending.values():
                self._route(pending.obj, gone=pending.gone, evicted=pending.evicted)
        self._owners_before = before
        objects = [obj for table in self.ctx.books.table.values() for obj in table.values()]
        self._moving, self._left = iter(objects), len(objects)
        self._move()

    def _move(self) -> None:
        """Look at some objects: those that another shard answers for are told to it."""
        moving, before = self._moving, self._owners_before
        if moving is None or before is None:
            return
        for obj in islice(moving, self.ctx.config.dump_objects_max):
            if obj.place is not None and obj.visible:
                owner = self.ctx.router.owner(obj.place.anchor)
                if owner != before.owner(obj.place.anchor):
                    self._pend(self.streams[owner], obj, gone=False, evicted=False)
        self._left -= self.ctx.config.dump_objects_max
        if self._left > 0:
            self.ctx.wake_at(self.ctx.now + MOVE_PAUSE_S, self._move)
        else:
            self._moving = self._owners_before = None

    # --- dumps ---------------------------------------------------------------------------------

    def dump(self) -> None:
        """Tell every shard all there is."""
        for stream in self.streams.values():
            self._begin_dump(stream)

    def _begin_dump(self, stream: ShardStream) -> None:
        """All visible objects of a shard, in parts of at most ``dump_objects_max``; it replaces what was under way."""
        objects = list(self._objects_of(stream.shard))
        stream.unacked.clear()
        stream.pending.clear()
        stream.seq += 1
        stream.dump = _Dump(stream.seq, self._told_up_to(stream), objects)
        self._send_parts(stream)

    def _objects_of(self, shard: str) -> Iterator[Obj]:
        """All objects that a shard answers for; neighbours share their segment, so it is drawn for once."""
        owner, alone = self.ctx.router.owner, len(self.streams) == 1
        anchor, mine = b"", False
        for table in self.ctx.books.table.values():
            for obj in table.values():
                place = obj.place
                if place is not None and not alone and place.anchor != anchor:
                    anchor, mine = place.anchor, owner(place.anchor) == shard
                if place is not None and (alone or mine):
                    yield obj

    def _send_parts(self, stream: ShardStream) -> None:
        ctx, dump = self.ctx, stream.dump
        assert dump is not None
        size = ctx.config.dump_objects_max
        parts = max(1, -(-len(dump.objects) // size))
        while dump.sent < min(parts, dump.awaited + DUMP_PARTS_AHEAD):
            part = dump.objects[dump.sent * size : (dump.sent + 1) * size]
            visible = [obj for obj in part if obj.visible]
            last = dump.sent == parts - 1
            ctx.send(
                stream.shard,
                DumpPart(
                    ctx.config.holder,
                    ctx.incarnation,
                    dump.seq,
                    dump.mark,
                    dump.sent,
                    last,
                    tuple(_run(like, self._unit) for like in _alike(visible)),
                    ctx.router.map.epoch,
                ),
            )
            dump.sent += 1

    def _beat(self) -> None:
        ctx = self.ctx
        for stream in self.streams.values():
            if stream.dump is not None:
                stream.dump.sent = stream.dump.awaited
                self._send_parts(stream)
            elif stream.unacked:
                for batch in list(stream.unacked.values()):
                    ctx.send(stream.shard, batch)
            else:
                ctx.send(stream.shard, Heartbeat(ctx.config.holder, ctx.incarnation, stream.seq))
        ctx.wake_at(ctx.now + ctx.config.event_ack_s, self._beat)


def runs_of(objects: Iterable[Obj], model: ModelSpec) -> Iterator[tuple[EventRun, list[Obj]]]:
    """Like objects that follow one another in a chain, as runs; what has no place in a chain is left out."""
    placed = [obj for obj in objects if obj.place is not None]
    for like in _alike(placed):
        yield _run(like, lambda group: model.groups[group].unit_tokens), like


def _distinct(changes: Sequence[Change], count: int) -> bool:
    """Whether these are changes of so many different objects, by key."""
    return len({(obj.group, obj.shard, obj.digest) for change in changes for obj in change.objects}) == count


def _runs(changes: Iterable[Change], unit_of: Callable[[int], int]) -> Iterator[EventRun]:
    """Changes of like objects that follow one another in a chain, as one run."""
    for (gone, evicted), same in groupby(changes, lambda change: (change.gone, change.evicted)):
        objects, follows = _chained([obj for change in same for obj in change.objects])
        # What is gone is alike, and what follows in a chain is of one segment: the first of the next has no parent.
        for like in (objects,) if gone and follows else _alike(objects, gone=gone):
            yield _run(like, unit_of, gone=gone, evicted=evicted)


def _chained(objects: Sequence[Obj]) -> tuple[list[Obj], bool]:
    """The objects along their chains, whatever the order they changed in (what is evicted leaves from its far end).

    True where each follows the one before. They are different ones and change alike, so their order is free, and the fewer runs they make the better.
    """
    names: list[Any] = [obj.digest[:INDEX_DIGEST_BYTES] for obj in objects]
    parents: list[Any] = [obj.place.parent if obj.place is not None else b"" for obj in objects]
    places = {(obj.group, obj.shard) for obj in objects}
    if len(places) == 1:
        # Nearly always one piece of one chain, as it was stored or from its end.
        if parents[1:] == names[:-1]:
            return list(objects), True
        if parents[:-1] == names[1:]:
            return list(objects[::-1]), True
    else:
        names = [(obj.group, obj.shard, name) for obj, name in zip(objects, names, strict=True)]
        parents = [(obj.group, obj.shard, parent) for obj, parent in zip(objects, parents, strict=True)]
    here = set(names)
    following: dict[Any, int] = {}
    firsts = []
    for at, parent in enumerate(parents):
        if parent in here and parent not in following:
            following[parent] = at
        else:
            firsts.append(at)
    chained = []
    for first in firsts:
        at_next: int | None = first
        while at_next is not None:
            chained.append(objects[at_next])
            at_next = following.pop(names[at_next], None)
    chained.extend([objects[at] for at in following.values()])  # only a chain that bites its own tail has no first
    return chained, False


def _alike(objects: list[Obj], *, gone: bool = False) -> Iterator[list[Obj]]:
    """Objects whose change is the same, cut where one does not follow or is not like the one before it."""
    if not objects:
        return
    start, before = 0, objects[0]
    for at, obj in enumerate(objects):
        if at and not _follows(before, obj, gone=gone):
            yield objects[start:at]
            start = at
        before = obj
    yield objects[start:]


def _follows(a: Obj, b: Obj, *, gone: bool) -> bool:
    """Whether b comes next after a in its segment and differs in nothing that a lane tells: asked of every object of a dump."""
    here, there = a.place, b.place
    assert here is not None
    assert there is not None
    if there.parent != a.digest[:INDEX_DIGEST_BYTES] or there.anchor != here.anchor:
        return False
    if a.group != b.group or a.shard != b.shard:
        return False
    return gone or (
        (a.state is b.state or (a.state in _MEMORY) == (b.state in _MEMORY))
        and a.revision == b.revision
        and (a.abi is b.abi or a.abi == b.abi)
        and a.bad is b.bad
        and a.bad_from_tier == b.bad_from_tier
    )


def _run(
    objects: Sequence[Obj], unit_of: Callable[[int], int], *, gone: bool = False, evicted: bool = False
) -> EventRun:
    first = objects[0]
    place, unit = first.place, unit_of(first.group)
    assert place is not None
    versions = b""
    if gone:
        lane = Lane(first.group, first.shard, GONE, 0, _NO_ABI)
    else:
        in_memory = first.state in _MEMORY
        state = IN_MEMORY if in_memory else ON_TIER
        lane = Lane(first.group, first.shard, state, first.revision, first.abi, first.bad, first.bad_from_tier)
        if in_memory:
            versions = struct.pack(f"<{len(objects)}Q", *[obj.version for obj in objects])
    return EventRun(
        lane,
        unit,
        place.anchor,
        place.parent,
        first.position // unit - 1,
        b"".join([obj.digest[:INDEX_DIGEST_BYTES] for obj in objects]),
        versions,
        evicted,
    )
