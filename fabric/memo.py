"""What a session lately heard of chain segments: hints for a scheduler that must not wait. A holder's pin decides.

An answer to a question is remembered by the segments that it spoke of, each under what its directory shard said
of itself: the segment's anchor, the shard's epoch, the segment's edition. A prompt is answered from what is known of
its segments, whoever asked for them, by the rules that a leader would ask:

* a segment heard of in another edition, or of another life of its shard, is as good as never heard of;
* of a segment that a shard knows nothing about, nothing is there whichever way a prompt goes on: a cold prefix;
* where a prompt leaves what was asked for, the rest of the segment is unknown. What is unknown is once taken for absent
  and once for present: if both give the same position, that is the answer, else there is none yet;
* a grant that differs from the hint shows that the segments changed: they are forgotten.

Digests bear the namespace, so tenants, weights and adapters never meet here. Nothing is kept longer than ``ttl_s``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .bitmaps import ones
from .kinds import INDEX_DIGEST_BYTES, Status
from .messages import Answer, Column, Prompt
from .model import ModelSpec
from .passport import Abi
from .planner import View
from .segments import narrow, span_of

NOT_TOLD = ("", 0, 0)
"""The edition of a segment whose shard did not answer, or does not tell editions."""
BRANCHES_MAX = 16
"""Ways to go on that are remembered of one segment."""
_UNKNOWN = "?"
"""Stands for a holder that might have what nothing is known of."""

Edition = tuple[str, int, int]
"""Shard, its epoch, its count of changes at the segment."""
SegmentKey = tuple[int, bytes]
"""Object unit in tokens, anchor."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """A resume position heard of lately, and whether nothing at all matched: certain of the first segments only.

    ``restorable_tokens``: how far once what lies on a tier was restored, where that is farther; else 0.
    """

    tokens: int
    cold: bool
    restorable_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Heard:
    """One answer, for as long as it is remembered."""

    keys: dict[int, bytes]
    columns: tuple[Column, ...]
    evicted: tuple[tuple[int, int], ...]
    unreachable: tuple[str, ...]
    size_bytes: int
    alive: bool = True

    def forget(self) -> None:
        self.alive = False
        self.keys, self.columns, self.evicted = {}, (), ()


@dataclass(slots=True)
class _Segment:
    edition: Edition
    known: bool
    until_s: float
    branches: list[_Heard] = field(default_factory=list)


@dataclass(slots=True)
class SegmentMemo:
    """At most ``segments_max`` segments of at most ``bytes_max`` bytes of answers."""

    model: ModelSpec
    ttl_s: float = 2.0
    segments_max: int = 65_536
    bytes_max: int = 64 << 20
    bytes_used: int = 0
    _span: int = field(init=False)
    _segments: OrderedDict[SegmentKey, _Segment] = field(default_factory=OrderedDict)
    _answers: OrderedDict[int, _Heard] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._span = span_of(self.model)

    def learn(self, prompt: Prompt, answer: Answer, now: float) -> None:
        """Take an answer to a question that asked for columns (``explain``)."""
        keys = {unit: narrow(wide) for unit, wide in prompt.keys}
        size = sum(len(blob) for blob in keys.values()) + sum(_size_bytes(column) for column in answer.columns)
        heard = _Heard(keys, answer.columns, answer.evicted, answer.unreachable, size)
        told = {(unit, start): (edition, known) for unit, start, edition, known in _told(answer, self._span)}
        used = False
        for unit, blob in keys.items():
            for start, anchor in _segments_of(blob, self._span):
                edition, known = told.get((unit, start), (NOT_TOLD, True))
                used |= self._put((unit, anchor), _Segment(edition, known, now + self.ttl_s), heard)
        if used:
            self._answers[id(heard)] = heard
            self.bytes_used += size
            while self.bytes_used > self.bytes_max:
                _, oldest = self._answers.popitem(last=False)
                self.bytes_used -= oldest.size_bytes
                oldest.forget()

    def _put(self, key: SegmentKey, fresh: _Segment, heard: _Heard) -> bool:
        kept = self._segments.get(key)
        if kept is not None and kept.edition == fresh.edition:
            fresh.branches = [branch for branch in kept.branches if branch.alive][-(BRANCHES_MAX - 1) :]
        elif kept is not None and kept.edition[:2] == fresh.edition[:2] and kept.edition > fresh.edition:
            return False  # it was overtaken on its way
        fresh.branches.append(heard)
        self._segments[key] = fresh
        self._segments.move_to_end(key)
        while len(self._segments) > self.segments_max:
            self._segments.popitem(last=False)
        return True

    def recall(self, prompt: Prompt, abis: tuple[Abi, ...], readers: tuple[str, ...], now: float) -> Remembered | None:
        """What is known of a prompt for these readers; None where what is not known could change it."""
        if prompt.n <= self.model.grid_tokens:
            return Remembered(0, cold=True)
        sources: dict[int, tuple[_Heard, dict[int, int]]] = {}
        unknown: dict[int, int] = {}
        for unit, wide in prompt.keys:
            unknown[unit] = self._gather(unit, narrow(wide), sources, now)
        if not sources and all(unknown.values()):
            return None
        view = View(self.model, prompt, abis, readers)
        for heard, masks in sources.values():
            self._add(view, heard, masks)
        known = view.found(tiers=False)
        restored = view.found()
        if any(unknown.values()):
            best = self._as_if_present(view, unknown).found()
            if best.tokens != restored.tokens:
                return None
        begin = ones(self._span)
        nothing = restored.status is Status.MISS and restored.cause is None
        cold = nothing and not any(bits & begin for bits in unknown.values())
        return Remembered(known.tokens, cold, restored.tokens if restored.tokens > known.tokens else 0)

    def _gather(self, unit: int, keys: bytes, sources: dict[int, tuple[_Heard, dict[int, int]]], now: float) -> int:
        """Which answers speak of which objects; returns those that none speaks of."""
        unknown = 0
        count = len(keys) // INDEX_DIGEST_BYTES
        for start, anchor in _segments_of(keys, self._span):
            size = min(self._span, count - start)
            kept = self._segments.get((unit, anchor))
            if kept is None or now >= kept.until_s:
                unknown |= ones(size) << start
                continue
            heard, agreed = _longest(kept.branches, unit, keys, start, size)
            if heard is not None and agreed:
                _, masks = sources.setdefault(id(heard), (heard, {}))
                masks[unit] = masks.get(unit, 0) | ones(agreed) << start
            if kept.known and agreed < size:
                unknown |= ones(size - agreed) << (start + agreed)
        return unknown

    def _add(self, view: View, heard: _Heard, masks: dict[int, int]) -> None:
        """Put what an answer said of these objects into a view."""
        for column in heard.columns:
            mask = masks.get(self.model.groups[column.group].unit_tokens, 0)
            place = (column.holder, column.group, column.shard)
            part = _masked(column, mask)
            before = view.columns.get(place)
            view.columns[place] = part if before is None else _joined(before, part)
        for group, bits in heard.evicted:
            mask = masks.get(self.model.groups[group].unit_tokens, 0)
            view.evicted[group] = view.evicted.get(group, 0) | bits & mask
        view.unreachable.update(heard.unreachable)

    def _as_if_present(self, view: View, unknown: dict[int, int]) -> View:
        """The same, with all that is unknown held by somebody, in every revision there is."""
        hopeful = View(view.model, view.prompt, view.abis, view.readers, columns=dict(view.columns))
        hopeful.unreachable, hopeful.evicted = view.unreachable, dict(view.evicted)
        revisions = {r for column in view.columns.values() for r in column.revisions} or {0}
        for group, spec in enumerate(self.model.groups):
            bits = unknown.get(spec.unit_tokens, 0)
            if bits:
                for shard in range(self.model.shards):
                    hopeful.columns[_UNKNOWN, group, shard] = Column(
                        _UNKNOWN, 0, group, shard, bits, 0, dict.fromkeys(revisions, bits), ((view.abis[group], bits),)
                    )
        return hopeful

    def granted(self, prompt: Prompt, abis: tuple[Abi, ...], readers: tuple[str, ...], tokens: int, now: float) -> None:
        """A holder decided: where the hint said something else, it is forgotten."""
        known = self.recall(prompt, abis, readers, now)
        if known is not None and known.tokens != tokens:
            self.drop(prompt)

    def drop(self, prompt: Prompt) -> None:
        """What was heard of a prompt's segments is outdated: it was refused, or the session stored some of it."""
        for unit, wide in prompt.keys:
            for _, anchor in _segments_of(narrow(wide), self._span):
                self._segments.pop((unit, anchor), None)

    def forget(self) -> None:
        """The fabric is another one now, or its processes are."""
        self._segments.clear()
        self._answers.clear()
        self.bytes_used = 0

    def __len__(self) -> int:
        return len(self._segments)


def _segments_of(keys: bytes, span: int) -> Iterator[tuple[int, bytes]]:
    """First object and anchor of each segment of ``span`` index digests."""
    step = span * INDEX_DIGEST_BYTES
    for at in range(0, len(keys), step):
        yield at // INDEX_DIGEST_BYTES, keys[at : at + INDEX_DIGEST_BYTES]


def _told(answer: Answer, span: int) -> Iterator[tuple[int, int, Edition, bool]]:
    for shard, epoch, unit, first, blob in answer.told:
        numbers = np.frombuffer(blob[: len(blob) // 8 * 8], "<u8").tolist()
        for place, number in enumerate(numbers):
            yield unit, first + place * span, (shard, epoch, number >> 1), bool(number & 1)


def _longest(branches: Sequence[_Heard], unit: int, keys: bytes, start: int, size: int) -> tuple[_Heard | None, int]:
    """The answer that agrees with a prompt's segment farthest, the latest of equals, and how far."""
    best, agreed = None, 0
    for heard in reversed(branches):
        theirs = heard.keys.get(unit, b"")
        count = _agreement(theirs, keys, start, min(size, len(theirs) // INDEX_DIGEST_BYTES - start))
        if count > agreed or best is None:
            best, agreed = heard, max(count, 0)
        if agreed == size:
            break
    return best, agreed


def _agreement(a: bytes, b: bytes, start: int, count: int) -> int:
    """How many objects from ``start`` are the same. Chained digests: equal at one means equal before it."""
    size = INDEX_DIGEST_BYTES
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        at = (start + middle - 1) * size
        if a[at : at + size] == b[at : at + size]:
            low = middle
        else:
            high = middle - 1
    return low


def _masked(column: Column, mask: int) -> Column:
    return Column(
        column.holder,
        column.incarnation,
        column.group,
        column.shard,
        column.memory & mask,
        column.tier & mask,
        {revision: bits & mask for revision, bits in column.revisions.items()},
        tuple((abi, bits & mask) for abi, bits in column.abis),
        tuple((reason, from_tier, bits & mask) for reason, from_tier, bits in column.bad),
    )


def _joined(a: Column, b: Column) -> Column:
    revisions = dict(a.revisions)
    for revision, bits in b.revisions.items():
        revisions[revision] = revisions.get(revision, 0) | bits
    return Column(
        a.holder,
        b.incarnation,
        a.group,
        a.shard,
        a.memory | b.memory,
        a.tier | b.tier,
        revisions,
        a.abis + b.abis,
        a.bad + b.bad,
    )


def _size_bytes(column: Column) -> int:
    parts: Iterable[int] = (
        column.memory,
        column.tier,
        *column.revisions.values(),
        *(bits for _, bits in column.abis),
        *(bits for _, _, bits in column.bad),
    )
    return 200 + sum(40 + bits.bit_length() // 8 for bits in parts)
