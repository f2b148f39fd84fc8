"""The event desk: what a holder tells the directory of its objects, in order and bounded.

A batch a step, numbered; unacknowledged batches are kept (a bounded number) and sent again; a gap,
a restarted directory or an overflow is answered with a full dump in bounded parts. What the
directory believes is never trusted, so a late event costs a shorter answer and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from .books import Change, Obj
from .context import HolderContext
from .kinds import INDEX_DIGEST_BYTES, Reason
from .lifecycle import State
from .messages import DumpPart, EventBatch, EventRun, EventsSeen, Heartbeat
from .passport import Abi

GONE, IN_MEMORY, ON_TIER = 0, 1, 2

Like = tuple[int, int, int, bool, int, Abi, Reason | None, bool]
"""What objects of one run share: group, shard, state, evicted, revision, ABI, bad, bad from tier."""


class EventDesk:
    """The event stream of one holder's life to its directory."""

    def __init__(self, ctx: HolderContext) -> None:
        self.ctx = ctx
        self.seq = 0
        self.acked = 0
        self.epoch = 0
        self._unacked: OrderedDict[int, EventBatch] = OrderedDict()
        self._overflowed = False

    @property
    def unacknowledged(self) -> int:
        """Batches kept because the directory has not said that it saw them."""
        return len(self._unacked)

    def start(self) -> None:
        """Begin telling the directory, at once and then by heartbeat, where this stream stands."""
        self._beat()

    def flush(self) -> None:
        """Send what changed in this step as one batch."""
        ctx = self.ctx
        if not ctx.books.changes:
            return
        changes, ctx.books.changes = ctx.books.changes, []
        self.seq += 1
        batch = EventBatch(ctx.config.holder, ctx.incarnation, self.seq, tuple(_runs(changes)))
        self._unacked[self.seq] = batch
        if len(self._unacked) > ctx.config.event_batches_kept:
            self._unacked.popitem(last=False)
            self._overflowed = True
        ctx.send(ctx.config.directory, batch)

    def seen(self, message: EventsSeen) -> None:
        """The directory's place in this stream; a replay is a dump."""
        if message.incarnation != self.ctx.incarnation:
            return
        if message.epoch != self.epoch:
            self.epoch, self.acked = message.epoch, 0
        self.acked = max(self.acked, message.seq)
        for seq in [s for s in self._unacked if s <= message.seq]:
            del self._unacked[seq]
        if message.replay:
            self.dump()

    def dump(self) -> None:
        """All visible objects as of now, in parts of at most ``dump_objects_max``."""
        ctx = self.ctx
        self._overflowed = False
        objects = [obj for table in ctx.books.table.values() for obj in table.values()]
        size = ctx.config.dump_objects_max
        chunks = [objects[i : i + size] for i in range(0, len(objects), size)] or [[]]
        for part, chunk in enumerate(chunks):
            runs = tuple(_runs(Change(obj, gone=False, evicted=False) for obj in chunk))
            ctx.send(
                ctx.config.directory,
                DumpPart(ctx.config.holder, ctx.incarnation, self.seq, part, len(chunks), runs),
            )

    def _beat(self) -> None:
        ctx = self.ctx
        if self._overflowed:
            self.dump()
        elif self._unacked:
            for batch in list(self._unacked.values()):
                ctx.send(ctx.config.directory, batch)
        else:
            ctx.send(ctx.config.directory, Heartbeat(ctx.config.holder, ctx.incarnation, self.seq))
        ctx.wake_at(ctx.now + ctx.config.event_ack_s, self._beat)


def _runs(changes: Iterable[Change]) -> Iterator[EventRun]:
    """Neighbouring changes of like objects as one run."""
    like: Like | None = None
    digests: list[bytes] = []
    versions: list[bytes] = []
    positions: list[int] = []
    for change in changes:
        obj = change.obj
        key = (
            obj.group,
            obj.shard,
            _state(obj, change.gone),
            change.evicted,
            obj.revision,
            obj.abi,
            obj.bad,
            obj.bad_from_tier,
        )
        if key != like:
            if like is not None:
                yield _run(like, digests, versions, positions)
            like, digests, versions, positions = key, [], [], []
        digests.append(obj.digest[:INDEX_DIGEST_BYTES])
        versions.append(obj.version.to_bytes(8, "little"))
        positions.append(obj.position)
    if like is not None:
        yield _run(like, digests, versions, positions)


def _state(obj: Obj, gone: bool) -> int:
    if gone:
        return GONE
    return IN_MEMORY if obj.state in (State.SEALED, State.DEMOTING) else ON_TIER


def _run(like: Like, digests: list[bytes], versions: list[bytes], positions: list[int]) -> EventRun:
    group, shard, state, evicted, revision, abi, bad, bad_from_tier = like
    return EventRun(
        group,
        shard,
        b"".join(digests),
        state,
        evicted,
        revision,
        abi,
        bad,
        bad_from_tier,
        b"".join(versions),
        tuple(positions),
    )
