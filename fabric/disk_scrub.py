"""The scrubber of the local disk: reads what lies there again, slowly, round and round, for disks lie.

One bounded part of one extent at a time, never more than ``disk_scrub_bytes_per_s``, and behind everything that
requests wait for. The driver reads into memory of its own and tells what it found. A wrong copy is given up, so
that another takes its place: the one in memory, or the store's. The only one is marked, and cuts the hit there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .context import HolderContext
from .effects import DropLocal, ExtentScrubbed, ScrubExtent
from .extent_book import ExtentBook
from .kinds import Reason
from .lifecycle import State
from .objects import Obj
from .scrub import BATCH_BYTES, BATCH_SLOTS, IDLE_S


@dataclass(slots=True)
class Part:
    """What of one extent is being read again: objects by entry, and when the next part may follow."""

    extent: int
    objects: dict[int, Obj]
    due_s: float


@dataclass(slots=True)
class Found:
    """What the rounds found in this life. ``last``: the latest wrong copy, in words; "" where there was none."""

    rounds: int = 0
    wrong: int = 0
    unread: int = 0
    last: str = ""


@dataclass(slots=True)
class _Round:
    """What is left of one round: extents, and entries of the one begun."""

    extents: deque[int] = field(default_factory=deque)
    extent: int = -1
    entries: deque[int] = field(default_factory=deque)


class DiskScrubber:
    """One holder's rounds over its extents. ``disk_scrub_bytes_per_s`` None: none."""

    def __init__(self, ctx: HolderContext, extents: ExtentBook) -> None:
        self.ctx = ctx
        self.found = Found()
        self._extents = extents
        self._round = _Round()
        self._running: dict[int, Part] = {}

    def start(self) -> None:
        """Begin the rounds, where the configuration wants any."""
        if self.ctx.config.disk_scrub_bytes_per_s is not None:
            self.ctx.wake_at(self.ctx.now + IDLE_S, self._next)

    def _next(self) -> None:
        """Have the next part read; the one after it follows its answer, as late as these bytes are worth."""
        ctx = self.ctx
        chosen = self._choose()
        if not chosen:
            ctx.wake_at(ctx.now + IDLE_S, self._next)
            return
        rate = ctx.config.disk_scrub_bytes_per_s
        assert rate is not None
        token, nbytes = ctx.number(), sum(obj.length for obj in chosen.values())
        self._running[token] = Part(self._round.extent, chosen, ctx.now + nbytes / rate)
        ctx.do(ScrubExtent(token, self._round.extent, tuple(chosen), nbytes))

    def _choose(self) -> dict[int, Obj]:
        """The next entries of the extent that was begun, or of the next one that has any."""
        round_, size, chosen = self._round, 0, dict[int, Obj]()
        while not round_.entries:
            if not round_.extents:
                self.found.rounds += bool(round_.extent >= 0)
                round_.extent = -1
                round_.extents.extend(self._extents.local())
                if not round_.extents:
                    return {}
            round_.extent = round_.extents.popleft()
            round_.entries.extend(sorted(self._extents.live(round_.extent)))
        live = self._extents.live(round_.extent)
        while round_.entries and len(chosen) < BATCH_SLOTS and size < BATCH_BYTES:
            entry = round_.entries.popleft()
            obj = live.get(entry)
            if obj is not None and obj.bad is None:
                chosen[entry] = obj
                size += obj.length
        return chosen

    def scrubbed(self, event: ExtentScrubbed) -> None:
        """Judge what was read; what changed meanwhile, or could not be read, says nothing of the bytes."""
        part = self._running.pop(event.token, None)
        if part is None:
            return
        wrong = False
        for (entry, obj), checksum in zip(part.objects.items(), event.checksums, strict=False):
            if obj.on_disk != (part.extent, entry) or obj.state is State.RESTORING:
                continue
            if checksum is None:
                self.found.unread += 1
                continue
            self.ctx.counters["disk_scrubbed_bytes"] += obj.length
            if checksum != obj.checksum:
                wrong = True
                self._wrong(part.extent, entry, obj)
        if wrong and self._extents.is_remote(part.extent) and not self._extents.only_remote(part.extent):
            self._extents.gone_from(part.extent, remote=False)
            self.ctx.do(DropLocal(part.extent))  # the store's copy of it is read from here on
        self.ctx.wake_at(max(part.due_s, self.ctx.now), self._next)

    def _wrong(self, extent: int, entry: int, obj: Obj) -> None:
        self.found.wrong += 1
        group = self.ctx.model.groups[obj.group].name
        self.found.last = f"extent {extent}, entry {entry} ({group}): {Reason.CHECKSUM_MISMATCH}"
        self.ctx.counters["disk_scrub_found"] += 1
        self.ctx.journal.happened(self.ctx.now, "wrong_on_disk", [obj])
        if not self._extents.is_remote(extent):
            self.ctx.books.wrong_on_disk(obj, Reason.CHECKSUM_MISMATCH)
