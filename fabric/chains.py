"""Runs of one chain, 256 objects at most, and the segments they make up: the directory's index of one unit.

::

    segment ABCD...        root  A B C D E F G H        a run: digests as one bytes, bands of state
      (anchor A)                     |   '- I J         a branch: what continues D otherwise
                                     '----- K L M       a run whose object before it is not known

Only a segment's first digest and the first digest of each further run are hashed; inside a run
digests are compared as bytes, all at once. Digests are chained, so two prompts that agree at one object agree
before it: a comparison needs the first difference only. No digest stands in two runs of a segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .kinds import INDEX_DIGEST_BYTES
from .messages import Lane

KEY = INDEX_DIGEST_BYTES
RUN_BYTES = 256
"""A run without digests and bands: its object, the headers of its bytes and tuple, its place in a table."""
SEGMENT_BYTES = 208
BAND_BYTES = 112
"""A band without its versions."""
TAILS_FROM = 8
"""From how many runs on a segment also finds runs by their last digest."""


class Owner:
    """A life and the lanes of a band; equal ones are one object, so that it is compared and hashed by identity."""

    __slots__ = ("lanes", "life")

    def __init__(self, life: int, lanes: tuple[Lane, ...]) -> None:
        self.life = life
        self.lanes = lanes


class Band(NamedTuple):
    """Objects of one life that are alike in all its lanes: bit o is the object at offset o of the segment."""

    owner: Owner
    bits: int
    versions: bytes

    @property
    def life(self) -> int:
        return self.owner.life


class Run:
    """Consecutive objects of one chain within a segment, from offset ``first`` on."""

    __slots__ = ("bands", "digests", "first", "left_from", "up")

    def __init__(self, first: int, digests: bytes, up: Run | None) -> None:
        self.first = first
        self.digests = digests
        self.bands: tuple[Band, ...] = ()
        self.up = up
        """The run that this one branches off; None for a root, and where the object before is not known."""
        self.left_from = 0
        """Offset behind the object by which it is found as well, what follows having left somebody; 0: none."""

    @property
    def end(self) -> int:
        """Offset behind the last object."""
        return self.first + len(self.digests) // KEY

    def digest_at(self, offset: int) -> bytes:
        at = (offset - self.first) * KEY
        return self.digests[at : at + KEY]

    def agrees(self, offset: int, keys: bytes, at: int, count: int) -> int:
        """How many of ``count`` objects from ``offset`` equal those of ``keys`` from place ``at``."""
        start = (offset - self.first) * KEY
        count = min(count, self.end - offset)
        mine, start_keys = self.digests, at * KEY
        if mine[start : start + count * KEY] == keys[start_keys : start_keys + count * KEY]:
            return count
        low, high = 0, count - 1
        while low < high:
            middle = (low + high + 1) // 2
            # Chained digests: equal at one object means equal before it.
            place = (middle - 1) * KEY
            if mine[start + place : start + place + KEY] == keys[start_keys + place : start_keys + place + KEY]:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def cost_bytes(self) -> int:
        """About what this run takes in memory."""
        return RUN_BYTES + len(self.digests) + sum(BAND_BYTES + len(band.versions) for band in self.bands)


class Segment:
    """All runs known under one anchor."""

    __slots__ = ("edition", "floats", "others", "root", "tails", "used")

    def __init__(self) -> None:
        self.root: Run | None = None
        self.others: dict[bytes, Run] | None = None
        """Every run but the root by its first digest."""
        self.floats: dict[int, int] | None = None
        """How many runs without a known run before them begin at an offset."""
        self.tails: dict[bytes, Run] | None = None
        """Where there are many runs: all but the root by their last digest, and by the one where what left somebody began."""
        self.used = False
        """Touched again since the hand of forgetting came by."""
        self.edition = 0
        """The index's count of changes when this segment was last changed."""

    @property
    def empty(self) -> bool:
        return self.root is None and not self.others

    def runs(self) -> Iterator[Run]:
        """All runs; the segment may be changed meanwhile."""
        if self.root is not None:
            yield self.root
        if self.others:
            yield from list(self.others.values())

    # --- finding -------------------------------------------------------------------------------

    def walk(self, keys: bytes, at: int, count: int) -> Iterator[tuple[Run, int]]:
        """The runs along a prompt, each with the offset behind its last object that agrees.

        ``keys`` holds the prompt's index digests, this segment's from place ``at`` on, ``count`` of them.
        """
        run = self.root
        reached = 0
        if run is not None:
            reached = run.agrees(0, keys, at, count)
            yield run, reached
        others = self.others
        if others is None:
            return
        while reached < count:
            place = (at + reached) * KEY
            following = others.get(keys[place : place + KEY])
            if following is None or following.first != reached:
                following = self._next_float(keys, at, count, reached)
                if following is None:
                    return
            run = following
            reached = run.first + run.agrees(run.first, keys, at + run.first, count - run.first)
            yield run, reached

    def _next_float(self, keys: bytes, at: int, count: int, reached: int) -> Run | None:
        if not self.floats or self.others is None:
            return None
        for first in sorted(self.floats):
            if reached < first < count:
                place = (at + first) * KEY
                run = self.others.get(keys[place : place + KEY])
                if run is not None and run.first == first:
                    return run
        return None

    def begins(self, offset: int, digest: bytes) -> Run | None:
        """The run that begins at this offset with this digest."""
        run = self.others.get(digest) if self.others is not None else None
        return run if run is not None and run.first == offset else None

    def ends_with(self, offset: int, digest: bytes) -> Run | None:
        """The run whose last object, or last that did not leave somebody, has this digest, where there are many.

        None where it does not reach back to ``offset``.
        """
        run = self.tails.get(digest) if self.tails is not None else None
        return run if run is not None and run.first <= offset else None

    def find(self, offset: int, digest: bytes) -> Run | None:
        """The run that holds this digest at this offset; looks at every run where none begins or ends with it."""
        root = self.root
        if root is not None and offset < root.end and root.digest_at(offset) == digest:
            return root
        others = self.others
        if others is None:
            return None
        run = others.get(digest)
        if run is None and self.tails is not None:
            run = self.tails.get(digest)
        if run is not None and run.first <= offset < run.end and run.digest_at(offset) == digest:
            return run
        for run in others.values():
            # Thousands of runs where a segment is shared by all: no calls, and a place outside a run holds nothing.
            at = (offset - run.first) * KEY
            if at > 0 and run.digests[at : at + KEY] == digest:
                return run
        return None

    # --- changing ------------------------------------------------------------------------------

    def add(self, offset: int, digests: bytes, before: Run | None) -> tuple[Run, bool]:
        """Place unknown objects behind ``before``: they extend it or begin a run. True for a fresh one."""
        if before is not None and before.end == offset:
            self._untail(before)
            before.digests += digests
            self._tail(before)
            return before, False
        run = Run(offset, digests, before)
        if offset == 0:
            self.root = run
            return run, True
        self._enter(run)
        return run, True

    def _enter(self, run: Run) -> None:
        if self.others is None:
            self.others = {}
        self.others[run.digests[:KEY]] = run
        if run.up is None:
            self._float(run.first, 1)
        if self.tails is None and len(self.others) >= TAILS_FROM:
            self.tails = {other.digests[-KEY:]: other for other in self.others.values()}
        self._tail(run)

    def _leave(self, run: Run) -> None:
        if run is self.root:
            self.root = None
            return
        assert self.others is not None
        self._untail(run)
        self._unmark(run)
        del self.others[run.digests[:KEY]]
        if run.up is None:
            self._float(run.first, -1)
        if not self.others:
            self.others = self.tails = self.floats = None

    def _float(self, first: int, change: int) -> None:
        if self.floats is None:
            self.floats = {}
        count = self.floats.get(first, 0) + change
        if count:
            self.floats[first] = count
        else:
            del self.floats[first]

    def left(self, run: Run, offset: int) -> None:
        """Objects from this offset on left somebody: what leaves next ends before it, and is looked for by its end."""
        if self.tails is None or run is self.root or not run.first < offset < run.end:
            return
        self._unmark(run)
        run.left_from = offset
        self.tails[run.digest_at(offset - 1)] = run

    def _unmark(self, run: Run) -> None:
        if run.left_from and self.tails is not None:
            self.tails.pop(run.digest_at(run.left_from - 1), None)
        run.left_from = 0

    def _tail(self, run: Run) -> None:
        if self.tails is not None and run is not self.root:
            self.tails[run.digests[-KEY:]] = run

    def _untail(self, run: Run) -> None:
        if self.tails is not None and run is not self.root:
            self.tails.pop(run.digests[-KEY:], None)

    def trim(self, run: Run) -> None:
        """Cut off what no band speaks of at either end; without any band the run is gone.

        Branches that hung there stay findable, as runs whose object before is not known.
        """
        used = 0
        for band in run.bands:
            used |= band.bits
        if not used:
            self._leave(run)
            self._cast_off(run, 0, 0)
            return
        first, end = (used & -used).bit_length() - 1, used.bit_length()
        if first == run.first and end == run.end:
            return
        self._leave(run)
        run.digests = run.digests[(first - run.first) * KEY : (end - run.first) * KEY]
        if first != run.first:
            run.first, run.up = first, None
        if first == 0:
            self.root = run
        else:
            self._enter(run)
        self._cast_off(run, first, end)

    def _cast_off(self, run: Run, first: int, end: int) -> None:
        for other in self.others.values() if self.others else ():
            if other.up is run and not first < other.first <= end:
                other.up = None
                self._float(other.first, 1)


_shared: dict[int, int] = {}


def shared_bits(bits: int) -> int:
    """The same int for equal bitmaps that fill a range: most runs are held whole, by someone."""
    low = bits & -bits
    if not bits or (bits // low + 1) & (bits // low):
        return bits
    if len(_shared) > 1 << 14:
        _shared.clear()
    return _shared.setdefault(bits, bits)
