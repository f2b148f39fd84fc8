"""The directory: soft state with versions. Holders are the authority, this is where to ask them.

It fences old lives of a holder, drops duplicates, notices gaps and asks for a dump; after its own
restart it has a new epoch, answers empty and refills. Nothing it says is trusted before a holder
has pinned, so a wrong or late answer costs a shorter prefix and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .books import Entry, column_of
from .effects import Effect, Event, Received, Send
from .events import GONE, IN_MEMORY
from .kinds import INDEX_DIGEST_BYTES
from .messages import (
    Column,
    DumpPart,
    EventBatch,
    EventRun,
    EventsSeen,
    Found,
    Heartbeat,
    HolderGone,
    Lookup,
    Prompt,
)
from .model import ModelSpec

EVICTED_KEPT_MAX = 65_536
HOLDERS_MAX = 16_384
DUMP_PARTS_MAX = 65_536


@dataclass(slots=True)
class Stream:
    """The directory's place in one holder's event stream."""

    incarnation: int
    seq: int = 0
    known: bool = False
    """False until its start or a dump was seen: what it says in between is not in order."""
    keys: set[tuple[int, int, bytes]] = field(default_factory=set)
    dump_seq: int = -1
    dump_parts: dict[int, tuple[EventRun, ...]] = field(default_factory=dict)


class DirectoryCore:
    """One directory shard's life. ``handle(event, now) -> effects``."""

    def __init__(self, name: str, model: ModelSpec, epoch: int) -> None:
        self.name = name
        self.model = model
        self.epoch = epoch
        self.streams: dict[str, Stream] = {}
        self.fences: dict[str, int] = {}
        """The least incarnation of each holder that may still speak."""
        self.index: dict[tuple[int, int], dict[bytes, dict[str, Entry]]] = {}
        self.evicted: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._effects: list[Effect] = []

    def start(self, holders: Iterable[str]) -> list[Effect]:
        """Ask the holders known to the fabric for all they have."""
        return [Send(h, EventsSeen(self.name, self.epoch, 0, 0, True)) for h in holders]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one record; anything that is none of this protocol's is dropped."""
        if isinstance(event, Received):
            match event.message:
                case Lookup():
                    self._send(event.sender, self.lookup(event.message))
                case EventBatch():
                    self._batch(event.sender, event.message)
                case Heartbeat():
                    self._heartbeat(event.sender, event.message)
                case DumpPart():
                    self._dump(event.sender, event.message)
                case HolderGone():
                    self._gone(event.message)
                case _:
                    pass
        effects, self._effects = self._effects, []
        return effects

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
            self._clear(holder)
            stream = self.streams[holder] = Stream(incarnation)
            self.fences[holder] = incarnation
        return stream

    def _batch(self, sender: str, message: EventBatch) -> None:
        stream = self._stream(message.holder, message.incarnation)
        if stream is None:
            return
        if message.seq == stream.seq + 1 and (stream.known or message.seq == 1):
            stream.known = True
            stream.seq = message.seq
            for run in message.runs:
                self._apply(message.holder, stream, run)
        self._acknowledge(sender, stream, replay=message.seq > stream.seq)

    def _heartbeat(self, sender: str, message: Heartbeat) -> None:
        stream = self._stream(message.holder, message.incarnation)
        if stream is None:
            return
        if message.seq == 0:
            stream.known = True
        self._acknowledge(sender, stream, replay=message.seq > stream.seq)

    def _acknowledge(self, sender: str, stream: Stream, *, replay: bool) -> None:
        seen = EventsSeen(self.name, self.epoch, stream.incarnation, stream.seq, replay)
        self._send(sender, seen)

    def _dump(self, sender: str, message: DumpPart) -> None:
        stream = self._stream(message.holder, message.incarnation)
        if stream is None or message.seq < stream.seq or message.parts > DUMP_PARTS_MAX:
            return
        if message.seq > stream.dump_seq:
            stream.dump_seq, stream.dump_parts = message.seq, {}
        if message.seq != stream.dump_seq or message.part >= message.parts:
            return
        stream.dump_parts[message.part] = message.runs
        if len(stream.dump_parts) < message.parts:
            return
        self._clear(message.holder)
        for part in range(message.parts):
            for run in stream.dump_parts[part]:
                self._apply(message.holder, stream, run)
        stream.seq, stream.known = message.seq, True
        stream.dump_seq, stream.dump_parts = -1, {}
        self._acknowledge(sender, stream, replay=False)

    def _gone(self, message: HolderGone) -> None:
        fence = max(self.fences.get(message.holder, 0), message.incarnation + 1)
        self.fences[message.holder] = fence
        stream = self.streams.get(message.holder)
        if stream is not None and stream.incarnation < fence:
            self._clear(message.holder)
            del self.streams[message.holder]

    def _clear(self, holder: str) -> None:
        stream = self.streams.get(holder)
        if stream is not None:
            for group, shard, digest in stream.keys:
                self._remove(holder, group, shard, digest)
            stream.keys = set()

    # --- index ---------------------------------------------------------------------------------

    def _apply(self, holder: str, stream: Stream, run: EventRun) -> None:
        table = self.index.setdefault((run.group, run.shard), {})
        size = INDEX_DIGEST_BYTES
        for place in range(len(run.digests) // size):
            digest = run.digests[place * size : place * size + size]
            key = (run.group, run.shard, digest)
            if run.state == GONE:
                stream.keys.discard(key)
                last = self._remove(holder, run.group, run.shard, digest)
                if last and run.evicted:
                    self._remember_evicted(run.group, digest)
                continue
            stream.keys.add(key)
            version = run.versions[place * 8 : place * 8 + 8]
            table.setdefault(digest, {})[holder] = Entry(
                run.state == IN_MEMORY, run.revision, run.abi, run.bad, run.bad_from_tier, version
            )
            self.evicted.pop((run.group, digest), None)

    def _remove(self, holder: str, group: int, shard: int, digest: bytes) -> bool:
        """True where that was the last copy known."""
        table = self.index.get((group, shard), {})
        holders = table.get(digest)
        if holders is None or holders.pop(holder, None) is None:
            return False
        if holders:
            return False
        del table[digest]
        return True

    def _remember_evicted(self, group: int, digest: bytes) -> None:
        self.evicted[group, digest] = None
        while len(self.evicted) > EVICTED_KEPT_MAX:
            self.evicted.popitem(last=False)

    def lookup(self, message: Lookup) -> Found:
        """Presence along a prompt at every holder, one column a holder, group and shard."""
        columns: list[Column] = []
        evicted = []
        keys = _index_keys(message.prompt)
        for group, spec in enumerate(self.model.groups):
            digests = keys.get(spec.unit_tokens, [])
            for shard in range(self.model.shards):
                table = self.index.get((group, shard))
                if table:
                    columns.extend(self._columns(group, shard, table, digests))
            gone = sum(1 << i for i, d in enumerate(digests) if (group, d) in self.evicted)
            if gone:
                evicted.append((group, gone))
        return Found(message.op, self.epoch, tuple(columns), tuple(evicted))

    def _columns(
        self, group: int, shard: int, table: dict[bytes, dict[str, Entry]], digests: list[bytes]
    ) -> Iterable[Column]:
        by_holder: dict[str, list[tuple[int, Entry]]] = {}
        for i, digest in enumerate(digests):
            for holder, entry in table.get(digest, {}).items():
                by_holder.setdefault(holder, []).append((i, entry))
        for holder, entries in by_holder.items():
            yield column_of(holder, self.streams[holder].incarnation, group, shard, entries)


def _index_keys(prompt: Prompt) -> dict[int, list[bytes]]:
    return {unit: [blob[i : i + INDEX_DIGEST_BYTES] for i in range(0, len(blob), 32)] for unit, blob in prompt.keys}
