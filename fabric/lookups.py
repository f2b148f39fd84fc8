"""A lookup's walk through the segments of a prompt: what it sees of each owner, by bits along the prompt."""

from __future__ import annotations

from collections.abc import Mapping

from .bands import NOBODY
from .bitmaps import ones
from .chains import KEY, Owner, Segment
from .messages import Piece, Strip


class SeenOf:
    """What a lookup saw of one owner: bits along the prompt, and pieces of versions."""

    __slots__ = ("bits", "pieces")

    def __init__(self) -> None:
        self.bits = 0
        self.pieces: list[Piece] = []


Seen = dict[Owner, SeenOf]


def look(table: Mapping[bytes, Segment], strip: Strip, seen: Seen, span: int) -> None:
    """Add what a strip's segments, of ``span`` objects each, say: the hot loop of every lookup."""
    digests, total = strip.digests, strip.count
    for at in range(0, total, span):
        segment = table.get(digests[at * KEY : at * KEY + KEY])
        if segment is None:
            continue
        segment.used = True
        base = strip.first + at
        for run, end in segment.walk(digests, at, min(total - at, span)):
            inside = ones(end) if end < run.end else -1
            first, behind = base + run.first, base + end
            for owner, bits, versions in run.bands:
                held = bits & inside
                if held:
                    part = seen.get(owner)
                    if part is None:
                        part = seen[owner] = SeenOf()
                    part.bits |= held << base
                    if versions:
                        part.pieces.append((first, behind, versions))


def evicted_of(seen: Seen) -> tuple[tuple[int, int], ...]:
    """(group, bits) of what was taken out by choice and lies nowhere."""
    gone: dict[int, int] = {}
    for owner, part in seen.items():
        if owner.life == NOBODY:
            for lane in owner.lanes:
                gone[lane.group] = gone.get(lane.group, 0) | part.bits
    return tuple(sorted(gone.items()))
