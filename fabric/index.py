"""The directory's index: who has which objects of which chains, compact, bounded and fast to ask.

Objects lie in runs (``chains``); each run bears *bands*: objects of one holder's life that are
alike in several groups at once, a bitmap and a column of versions. A life that ended is struck from the list of lives at once and
its bands are swept away in small steps; so a restart costs nothing while it happens.

Over ``bytes_max`` whole segments are forgotten, those first that no lookup or event touched for a round
of the hand. Forgetting is safe: an answer becomes shorter, and a holder's next dump tells all anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .bands import EVICTED, GONE, IN_MEMORY, NOBODY, ON_TIER, UNTOLD, Cell, cost_bytes, evicted_objects_of, pack, unpack
from .bitmaps import ones
from .chains import KEY, RUN_BYTES, SEGMENT_BYTES, Band, Owner, Run, Segment
from .lookups import Seen, evicted_of, look
from .messages import Edition, EventRun, Lane, Strip, Stripe
from .passport import Abi
from .segments import SEGMENT_OBJECTS
from .versions import Versions

_NO_ABI = Abi(b"", 1)

Table = dict[bytes, Segment]


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds of one shard's index.

    ``copies_max``: lives told apart for one run (a hot prompt lies everywhere, a reader needs a few);
    ``holders_max``: holders named in one answer, the fullest first; ``evicted_max``: objects whose
    eviction is remembered; ``sweep_segments``: segments looked at in one step of sweeping.
    """

    bytes_max: int = 8 << 30
    copies_max: int = 256
    holders_max: int = 64
    evicted_max: int = 65_536
    sweep_segments: int = 64


@dataclass(slots=True)
class _Open:
    """One life's part of a run while a batch is applied: a bitmap and versions by offset, a lane."""

    table: Table
    anchor: bytes
    run: Run
    life: int
    cells: dict[Lane, Cell]
    shrank: bool = False


Opened = dict[Run, dict[int, _Open]]


@dataclass(slots=True)
class ChainIndex:
    """All chains of one directory shard. Lives are numbered by the caller's :meth:`begin_life`."""

    limits: IndexLimits = field(default_factory=IndexLimits)
    span: int = SEGMENT_OBJECTS
    """Objects a segment spans in what is asked."""
    lives: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Lives that count: number -> (holder, incarnation)."""
    tables: dict[int, Table] = field(default_factory=dict)
    """A table of segments by anchor for each object unit in tokens."""
    bytes_used: int = 0
    evicted_objects: int = 0
    forgotten_segments: int = 0
    _edition: int = 0
    """Changes so far."""
    _lives_edition: int = 0
    """When it was last changed which lives count: that concerns every segment."""
    _gone_edition: int = 0
    """When a segment last left."""
    _number: int = NOBODY
    _dead: set[int] = field(default_factory=set)
    _lanes: dict[Lane, Lane] = field(default_factory=dict)
    _owners: dict[tuple[int, tuple[Lane, ...]], Owner] = field(default_factory=dict)
    _evicted: OrderedDict[Run, tuple[Table, bytes]] = field(default_factory=OrderedDict)
    _hand: Iterator[tuple[Table, bytes]] | None = None
    _broom: Iterator[tuple[Table, bytes]] | None = None
    _sweeping: set[int] = field(default_factory=set)
    _owned: Callable[[bytes], bool] | None = None
    _shedding: Callable[[bytes], bool] | None = None

    # --- lives ---------------------------------------------------------------------------------

    def begin_life(self) -> int:
        """A number for a life; it counts for nothing until :meth:`show`."""
        self._number += 1
        return self._number

    def show(self, life: int, holder: str, incarnation: int) -> None:
        """From here on lookups see this life."""
        self.lives[life] = (holder, incarnation)
        self._edition += 1
        self._lives_edition = self._edition

    def end_life(self, life: int) -> None:
        """This life counts for nothing any more; its bands are swept away later."""
        self.lives.pop(life, None)
        self._dead.add(life)
        self._edition += 1
        self._lives_edition = self._edition

    # --- events --------------------------------------------------------------------------------

    def apply(self, life: int, runs: Iterable[EventRun]) -> int:
        """Take a batch of one life's changes; returns how many objects it spoke of."""
        opened: Opened = {}
        objects = 0
        for event in runs:
            objects += len(event.digests) // KEY
            self._event(life, event, opened)
        for run, entries in opened.items():
            self._close(run, entries)
        self._keep_bounds()
        return objects

    def _event(self, life: int, event: EventRun, opened: Opened) -> None:
        base = event.first % SEGMENT_OBJECTS
        digests = event.digests
        count = min(len(digests) // KEY, SEGMENT_OBJECTS - base)
        if count <= 0 or len(event.anchor) != KEY or (base == 0 and digests[:KEY] != event.anchor):
            return
        table = self.tables.get(event.unit)
        if table is None:
            table = self.tables[event.unit] = {}
        segment = table.get(event.anchor)
        gone = event.lane.state == GONE
        if segment is None:
            if gone:
                return
            segment = table[event.anchor] = Segment()
            self.bytes_used += SEGMENT_BYTES
        else:
            segment.used = True
        lane = self._lane(event.lane)
        told = len(event.versions) == 8 * (len(digests) // KEY)
        versions = np.frombuffer(event.versions, dtype="<u8") if told and event.versions else None
        at = 0
        # What is evicted leaves from the far end of its chain: the run that ends with it, mostly.
        before = segment.ends_with(base, digests[(count - 1) * KEY : count * KEY]) if gone else None
        if before is None and base and self._asks_parent(segment, base, digests):
            before = segment.find(base - 1, event.parent)
        while at < count:
            offset = base + at
            run = self._holding(segment, offset, digests[at * KEY : at * KEY + KEY], before)
            if run is not None:
                size = run.agrees(offset, digests, at, count - at)
            elif gone:
                # What follows the unknown is known only where a run begins.
                at, before = at + 1, None
                continue
            else:
                size = self._unknown(segment, offset, digests, at, count)
                run, fresh = segment.add(offset, digests[at * KEY : (at + size) * KEY], before)
                self.bytes_used += size * KEY + (RUN_BYTES if fresh else 0)
            entry = self._open(opened, table, event.anchor, run, life)
            column = None if versions is None or gone else versions[at : at + size]
            self._change(entry, opened, lane, offset, size, column, event.evicted)
            if gone:
                segment.left(run, offset)
            before = run
            at += size

    @staticmethod
    def _asks_parent(segment: Segment, offset: int, digests: bytes) -> bool:
        return _at_root(segment, offset, digests[:KEY]) is None and segment.begins(offset, digests[:KEY]) is None

    @staticmethod
    def _holding(segment: Segment, offset: int, digest: bytes, before: Run | None) -> Run | None:
        """The run that holds a digest, given the run that holds the one before it.

        Digests are chained, so it follows there, or a run begins with it, or nobody has it.
        """
        if before is not None and offset < before.end and before.digest_at(offset) == digest:
            return before
        return _at_root(segment, offset, digest) or segment.begins(offset, digest)

    def _unknown(self, segment: Segment, offset: int, digests: bytes, at: int, count: int) -> int:
        """How many objects from ``at`` on are unknown, the first being so: up to where another run begins."""
        if segment.floats:
            for first in sorted(segment.floats):
                place = at + first - offset
                if at < place < count and segment.begins(first, digests[place * KEY : place * KEY + KEY]) is not None:
                    return place - at
        return count - at

    def _lane(self, lane: Lane) -> Lane:
        known = self._lanes.get(lane)
        if known is None:
            if len(self._lanes) > 1 << 16:
                # Only sharing is lost: equal lanes stay equal.
                self._lanes.clear()
                self._owners.clear()
            known = self._lanes[lane] = lane
        return known

    def _open(self, opened: Opened, table: Table, anchor: bytes, run: Run, life: int) -> _Open:
        entries = opened.get(run)
        if entries is None:
            entries = opened[run] = {}
        entry = entries.get(life)
        if entry is None:
            cells: dict[Lane, Cell] = {}
            for band in run.bands:
                if band.owner.life == life:
                    unpack(band, cells)
            entry = entries[life] = _Open(table, anchor, run, life, cells)
        return entry

    def _change(  # noqa: PLR0917 - one place, all of one change
        self,
        entry: _Open,
        opened: Opened,
        lane: Lane,
        offset: int,
        size: int,
        versions: Versions | None,
        evicted: bool,
    ) -> None:
        mask = ones(size) << offset
        had = 0
        for other, cell in entry.cells.items():
            if other is not lane and other.group == lane.group and other.shard == lane.shard and other != lane:
                had |= cell.bits & mask
                cell.bits &= ~mask
        if lane.state == GONE:
            if had:
                entry.shrank = True
                if evicted:
                    self._was_evicted(entry, opened, lane, had)
            return
        cell = entry.cells.get(lane)  # type: ignore[assignment]
        if cell is None:
            cell = entry.cells[lane] = Cell(0, np.zeros(SEGMENT_OBJECTS, np.uint64))
        cell.bits |= mask
        if versions is not None and lane.state == IN_MEMORY:
            cell.versions[offset : offset + size] = versions
        if entry.run in self._evicted:
            self._not_evicted(entry, opened, lane.group, mask)

    # --- copies --------------------------------------------------------------------------------

    def copies(self, event: EventRun, but: Collection[str]) -> int:
        """Bit i: object i of the run has a good copy of its group, shard and revision at a holder not in ``but``."""
        segment = self.tables.get(event.unit, {}).get(event.anchor)
        if segment is None:
            return 0
        base, count = event.first % SEGMENT_OBJECTS, len(event.digests) // KEY
        found = at = 0
        while at < count:
            run = segment.find(base + at, event.digests[at * KEY : at * KEY + KEY])
            size = 1 if run is None else max(run.agrees(base + at, event.digests, at, count - at), 1)
            if run is not None:
                held = 0
                for band in run.bands:
                    if self._has(band, event.lane, but):
                        held |= band.bits
                found |= (held >> (base + at) & ones(size)) << at
            at += size
        return found

    def _has(self, band: Band, lane: Lane, but: Collection[str]) -> bool:
        """Whether a band speaks of such objects, usable, at another holder."""
        holder, _ = self.lives.get(band.life, ("", 0))
        return (
            bool(holder)
            and holder not in but
            and any(
                other.group == lane.group
                and other.shard == lane.shard
                and other.revision == lane.revision
                and other.abi == lane.abi
                and other.state in (IN_MEMORY, ON_TIER)
                and other.bad is None
                for other in band.owner.lanes
            )
        )

    # --- what was evicted ----------------------------------------------------------------------

    def _was_evicted(self, entry: _Open, opened: Opened, lane: Lane, bits: int) -> None:
        """Remember those objects of which no other life has a copy of this group and shard."""
        for band in entry.run.bands:
            life = band.owner.life
            if life == entry.life or life not in self.lives or not bits & band.bits:
                continue
            if any(other.group == lane.group and other.shard == lane.shard for other in band.owner.lanes):
                bits &= ~band.bits
        if bits:
            nobody = self._open(opened, entry.table, entry.anchor, entry.run, NOBODY)
            mark = self._lane(Lane(lane.group, 0, EVICTED, 0, _NO_ABI))
            cell = nobody.cells.get(mark)
            if cell is None:
                cell = nobody.cells[mark] = Cell(0, UNTOLD)
            self.evicted_objects += (bits & ~cell.bits).bit_count()
            cell.bits |= bits
            self._evicted[entry.run] = (entry.table, entry.anchor)
            self._evicted.move_to_end(entry.run)

    def _not_evicted(self, entry: _Open, opened: Opened, group: int, mask: int) -> None:
        nobody = self._open(opened, entry.table, entry.anchor, entry.run, NOBODY)
        for mark, cell in nobody.cells.items():
            if mark.group == group and cell.bits & mask:
                self.evicted_objects -= (cell.bits & mask).bit_count()
                cell.bits &= ~mask
                nobody.shrank = True

    # --- packing -------------------------------------------------------------------------------

    def _close(self, run: Run, entries: dict[int, _Open]) -> None:
        """Put what a batch touched of a run back as bands."""
        bands = [band for band in run.bands if band.owner.life not in entries]
        shrank = False
        for life, entry in entries.items():
            fresh = pack(entry.life, entry.cells, self._owner)
            shrank = shrank or entry.shrank or not fresh
            if fresh and life != NOBODY and self._is_full(bands):
                shrank = True
            else:
                bands.extend(fresh)
        first = next(iter(entries.values()))
        self._rebind(first.table, first.anchor, run, tuple(bands), shrank=shrank)

    def _is_full(self, bands: Sequence[Band]) -> bool:
        most = self.limits.copies_max
        return len(bands) >= most and len({band.life for band in bands}) >= most

    def _owner(self, life: int, lanes: tuple[Lane, ...]) -> Owner:
        known = self._owners.get((life, lanes))
        if known is None:
            known = self._owners[life, lanes] = Owner(life, lanes)
        return known

    def _rebind(self, table: Table, anchor: bytes, run: Run, bands: tuple[Band, ...], *, shrank: bool) -> None:
        """Give a run its bands; what no band speaks of any more leaves."""
        cost = cost_bytes(bands) - cost_bytes(run.bands)
        run.bands = bands
        segment = table[anchor]
        self._edition += 1
        segment.edition = self._edition
        if shrank:
            if not [band for band in bands if band.owner.life == NOBODY]:
                self._evicted.pop(run, None)
            held = len(run.digests)
            segment.trim(run)
            cost -= held + RUN_BYTES if not bands else held - len(run.digests)
            if segment.empty:
                del table[anchor]
                self._gone_edition = self._edition
                cost -= SEGMENT_BYTES
        self.bytes_used += cost

    # --- bounds --------------------------------------------------------------------------------

    def _keep_bounds(self) -> None:
        while self.evicted_objects > self.limits.evicted_max:
            run, (table, anchor) = next(iter(self._evicted.items()))
            self._forget_evicted(table, anchor, run)
        while self.bytes_used > self.limits.bytes_max and self._forget_one():
            pass

    def _forget_evicted(self, table: Table, anchor: bytes, run: Run) -> None:
        self.evicted_objects -= evicted_objects_of(run)
        bands = tuple(band for band in run.bands if band.life != NOBODY)
        self._rebind(table, anchor, run, bands, shrank=True)

    def _forget_one(self) -> bool:
        """Forget the next segment that nothing touched for a round; False where nothing is left."""
        for _ in range(3):
            if self._hand is None:
                self._hand = self._round()
            for table, anchor in self._hand:
                segment = table.get(anchor)
                if segment is None:
                    continue
                if segment.used:
                    segment.used = False
                    continue
                self._forget(table, anchor, segment)
                return True
            self._hand = None
        return False

    def _forget(self, table: Table, anchor: bytes, segment: Segment) -> None:
        for run in segment.runs():
            self.bytes_used -= run.cost_bytes
            if self._evicted.pop(run, None) is not None:
                self.evicted_objects -= evicted_objects_of(run)
        self.bytes_used -= SEGMENT_BYTES
        self.forgotten_segments += 1
        self._edition += 1
        self._gone_edition = self._edition
        del table[anchor]

    def _round(self) -> Iterator[tuple[Table, bytes]]:
        """Every segment known now, once."""
        for table in list(self.tables.values()):
            for anchor in list(table):
                yield table, anchor

    def shed(self, owned: Callable[[bytes], bool]) -> None:
        """Let go, in small steps of :meth:`sweep`, of every segment whose anchor is not owned any more."""
        self._owned, self._broom = owned, None

    @property
    def shedding(self) -> bool:
        """Whether some segments that are not owned may still be there."""
        return self._owned is not None

    def sweep(self) -> bool:
        """Sweep ended lives and segments of other shards out, a few segments a step; True while there is more to do."""
        if self._broom is None:
            if not self._dead and self._owned is None:
                return False
            self._sweeping, self._broom, self._shedding = set(self._dead), self._round(), self._owned
        for count, (table, anchor) in enumerate(self._broom, 1):
            segment = table.get(anchor)
            if segment is not None:
                if self._shedding is not None and not self._shedding(anchor):
                    self._forget(table, anchor, segment)
                else:
                    self._sweep_segment(table, anchor, segment)
            if count >= self.limits.sweep_segments:
                return True
        self._broom = None
        self._dead -= self._sweeping
        self._owners = {key: owner for key, owner in self._owners.items() if key[0] not in self._sweeping}
        if self._shedding is self._owned:
            self._owned = None
        return bool(self._dead) or self._owned is not None

    def _sweep_segment(self, table: Table, anchor: bytes, segment: Segment) -> None:
        for run in segment.runs():
            bands = tuple(band for band in run.bands if band.life not in self._sweeping)
            if len(bands) != len(run.bands):
                self._rebind(table, anchor, run, bands, shrank=True)

    # --- asking --------------------------------------------------------------------------------

    def lookup(self, strips: Sequence[Strip]) -> tuple[tuple[Stripe, ...], tuple[tuple[int, int], ...]]:
        """Who has what along a prompt: stripes of the fullest holders, and (group, bits) evicted."""
        seen: Seen = {}
        for strip in strips:
            table = self.tables.get(strip.unit)
            if table:
                look(table, strip, seen, self.span)
        return self._stripes(seen), evicted_of(seen)

    def editions(self, strips: Iterable[Strip]) -> tuple[Edition, ...]:
        """The state of each segment asked for, by a number that changes with what :meth:`lookup` says of it."""
        return tuple(self._editions_of(strip) for strip in strips)

    def _editions_of(self, strip: Strip) -> Edition:
        table = self.tables.get(strip.unit, {})
        told = []
        for at in range(0, strip.count, self.span):
            segment = table.get(strip.digests[at * KEY : at * KEY + KEY])
            last = self._gone_edition if segment is None else segment.edition
            told.append(max(last, self._lives_edition) << 1 | (segment is not None))
        return strip.unit, strip.first, np.array(told, "<u8").tobytes()

    def _stripes(self, seen: Seen) -> tuple[Stripe, ...]:
        owners = [owner for owner in seen if owner.life in self.lives]
        lives = {owner.life for owner in owners}
        if len(lives) > self.limits.holders_max:
            weight = dict.fromkeys(lives, 0)
            for owner in owners:
                weight[owner.life] += len(owner.lanes) * seen[owner].bits.bit_count()
            best = set(sorted(lives, key=lambda life: (-weight[life], self.lives[life]))[: self.limits.holders_max])
            owners = [owner for owner in owners if owner.life in best]
        return tuple(
            Stripe(*self.lives[owner.life], owner.lanes, seen[owner].bits, tuple(seen[owner].pieces))
            for owner in owners
        )

    def entries(self) -> Iterator[tuple[str, Lane, bytes, int]]:
        """Everything it says, object by object: holder, lane, digest, version (0 where none is told)."""
        for table in self.tables.values():
            for segment in table.values():
                for run in segment.runs():
                    for band in run.bands:
                        if band.life in self.lives:
                            yield from self._entries_of(run, band)

    def _entries_of(self, run: Run, band: Band) -> Iterator[tuple[str, Lane, bytes, int]]:
        holder, _ = self.lives[band.life]
        cells: dict[Lane, Cell] = {}
        unpack(band, cells)
        for lane, cell in cells.items():
            for offset in range(run.first, run.end):
                if cell.bits >> offset & 1:
                    yield holder, lane, run.digest_at(offset), int(cell.versions[offset])

    @property
    def runs(self) -> int:
        """How many runs there are; walks all segments."""
        return sum(1 for table in self.tables.values() for segment in table.values() for _ in segment.runs())


def _at_root(segment: Segment, offset: int, digest: bytes) -> Run | None:
    root = segment.root
    return root if root is not None and offset < root.end and root.digest_at(offset) == digest else None
