"""The four validation layers and the proof they yield.

Each layer is a named predicate over the materialised objects of one holder's share and gives a
:class:`Verdict`. A :class:`Proof` exists only where all four passed, and only :func:`prove` makes
one; a lease is built from nothing else.

    whole_block    the position lies on the grid, objects are whole
    abi            each record's passport joins the reader's
    intersection   everything the rules need at the position is here, on every shard of this
                   share, sealed, of one revision a family
    alignment      address and length fit the passport, the bytes' digest is the recorded one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .arena import PAGE_BYTES, SlotState
from .books import Books, Claim, Slots
from .cause import absent_reason, stale_reason
from .kinds import Form, Layer, ProtocolError, Reason
from .messages import SlotRun
from .model import ModelSpec
from .passport import Abi, abi_refusal
from .rules import needs


@dataclass(slots=True)
class HeldRun:
    """Objects of one group and shard that a share has pinned: indices, and their slots."""

    indices: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    _array: Slots = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def array(self) -> Slots:
        """The slots as an array, made once for as long as they stay the same."""
        if len(self._array) != len(self.slots):
            self._array = np.array(self.slots, dtype=np.int64)
        return self._array

    def add(self, index: int, slot: int) -> None:
        self.indices.append(index)
        self.slots.append(slot)

    def replace(self, place: int, slot: int) -> None:
        """Another slot bears the object at this place."""
        self.slots[place] = slot
        self._array = self._array[:0]

    def sort(self) -> None:
        """By index, as proofs and readers want them."""
        if self.indices != sorted(self.indices):
            order = sorted(range(len(self.indices)), key=self.indices.__getitem__)
            self.indices[:] = [self.indices[i] for i in order]
            self.slots[:] = [self.slots[i] for i in order]
            self._array = self._array[:0]


Held = dict[tuple[int, int], HeldRun]
"""The objects of one share, by (group, shard)."""

_MINT = object()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one layer found. ``reason`` None: passed."""

    layer: Layer
    reason: Reason | None = None
    group: int = 0
    shard: int = 0
    index: int = 0

    @property
    def passed(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True)
class ProvenRun:
    """Objects of one group and shard of a proof: which slots bear them, at which versions (uint64 each)."""

    group: int
    shard: int
    indices: tuple[int, ...]
    slots: Slots
    versions: bytes


class Proof:
    """Four passed verdicts and the exact slots they speak of. Only :func:`prove` makes one."""

    __slots__ = ("_headers", "claim", "parts", "runs", "shards", "tokens", "verdicts")

    def __init__(
        self,
        mint: object,
        *,
        tokens: int,
        shards: tuple[int, ...],
        verdicts: tuple[Verdict, ...],
        runs: tuple[ProvenRun, ...],
        headers: bytes,
    ) -> None:
        if mint is not _MINT:
            raise ProtocolError("a proof is made by prove() alone")
        self.tokens = tokens
        self.shards = shards
        self.verdicts = verdicts
        self.runs = runs
        self.claim = Claim.of((run.group, run.shard, run.slots) for run in runs)
        self.parts = tuple(
            SlotRun(run.group, run.shard, run.indices, run.slots.astype("<u4").tobytes(), run.versions) for run in runs
        )
        """The runs as a reader is told them."""
        self._headers = headers

    def stands(self, books: Books) -> bool:
        """Whether all four layers would pass again, for the same reader and position.

        They look at nothing but the slots' records and headers, and each record was made with its header: slots
        that serve, and whose headers are the ones that were proven, are the ones that were proven.
        """
        slots = self.claim.slots
        return bool(books.serving[slots].all()) and books.arena.headers[slots].tobytes() == self._headers


def whole_block(model: ModelSpec, tokens: int, n: int) -> Verdict:
    """The position lies on the grid, before the prompt's end."""
    if tokens <= 0 or tokens > n - 1 or tokens % model.grid_tokens:
        return Verdict(Layer.WHOLE_BLOCK, Reason.OFF_GRID)
    return Verdict(Layer.WHOLE_BLOCK)


def abi(abis: Sequence[Abi], held: Held, books: Books) -> Verdict:
    """Every record's passport joins the reader's."""
    for (group, shard), run in held.items():
        for number in books.abi_numbers_of(run.array):
            if abi_refusal(books.abis[number], abis[group]) is Reason.ABI_MISMATCH:
                good = books.abi_numbers[run.array] != number
                return _first_wrong(Layer.ABI, Reason.ABI_MISMATCH, (group, shard), run, good)
    return Verdict(Layer.ABI)


def intersection(
    model: ModelSpec,
    tokens: int,
    *,
    shards: Sequence[int],
    revisions: Sequence[int | None],
    held: Held,
    books: Books,
) -> Verdict:
    """Everything needed at the position is held, sealed at the recorded version, of one revision."""
    arena = books.arena
    for group, ranges in enumerate(needs(model, tokens)):
        wanted = [index for r in ranges for index in r]
        for shard in shards:
            run = held.get((group, shard), _NOTHING_HELD)
            if run.indices != wanted:
                missing = sorted(set(wanted).difference(run.indices))
                if missing:
                    reason = absent_reason(model.groups[group].kind, state=model.groups[group].form is Form.STATE)
                    return Verdict(Layer.INTERSECTION, reason, group, shard, missing[0])
            slots = run.array
            good = (arena.versions[slots] == books.versions[slots]) & (arena.states[slots] == SlotState.SEALED)
            if not good.all():
                return _first_wrong(Layer.INTERSECTION, Reason.VERSION_CHANGED, (group, shard), run, good)
            revision = revisions[group]
            if revision is not None:
                good = books.revisions[slots] == revision
                if not good.all():
                    reason = stale_reason(model.groups[group].kind, state=model.groups[group].form is Form.STATE)
                    return _first_wrong(Layer.INTERSECTION, reason, (group, shard), run, good)
    return Verdict(Layer.INTERSECTION)


def alignment(model: ModelSpec, abis: Sequence[Abi], held: Held, books: Books, digests: dict[int, bytes]) -> Verdict:
    """Address and length fit; where the bytes were digested, the digest is the recorded one.

    ``digests``: slot -> checksum of the bytes as they lie there now.
    """
    arena = books.arena
    for (group, shard), run in held.items():
        spec = model.groups[group]
        slots = run.array
        good = books.lengths[slots] == spec.block_bytes
        for number in books.abi_numbers_of(slots):
            if abi_refusal(books.abis[number], abis[group]) is Reason.MISALIGNED:
                good &= books.abi_numbers[slots] != number
        if PAGE_BYTES % spec.alignment_bytes and spec.alignment_bytes > PAGE_BYTES:
            good &= _offsets(books, slots) % spec.alignment_bytes == 0
        if not good.all():
            return _first_wrong(Layer.ALIGNMENT, Reason.MISALIGNED, (group, shard), run, good)
        recorded = arena.checksums[slots].view("<u8").reshape(-1, 2)
        good = (recorded == books.checksums[slots]).all(axis=1) & (arena.lengths[slots] == books.lengths[slots])
        for place, slot in enumerate(run.slots if digests else ()):
            if slot in digests and digests[slot] != books.checksums[slot].tobytes():
                good[place] = False
        if not good.all():
            return _first_wrong(Layer.ALIGNMENT, Reason.CHECKSUM_MISMATCH, (group, shard), run, good)
    return Verdict(Layer.ALIGNMENT)


def _offsets(books: Books, slots: Slots) -> Slots:
    return np.array([books.arena.layout.offset_of(slot) for slot in slots.tolist()], dtype=np.int64)


def _first_wrong(
    layer: Layer,
    reason: Reason,
    where: tuple[int, int],
    run: HeldRun,
    good: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> Verdict:
    return Verdict(layer, reason, *where, run.indices[int(np.flatnonzero(~good)[0])])


_NOTHING_HELD = HeldRun()


def prove(
    model: ModelSpec,
    *,
    tokens: int,
    n: int,
    shards: tuple[int, ...],
    revisions: Sequence[int | None],
    abis: Sequence[Abi],
    held: Held,
    books: Books,
    digests: dict[int, bytes],
) -> Proof | Verdict:
    """All four layers over what is materialised; the first refusal, or the proof."""
    for run in held.values():
        run.sort()
    verdicts = []
    for verdict in (
        whole_block(model, tokens, n),
        abi(abis, held, books),
        intersection(model, tokens, shards=shards, revisions=revisions, held=held, books=books),
        alignment(model, abis, held, books, digests),
    ):
        if not verdict.passed:
            return verdict
        verdicts.append(verdict)
    runs = []
    for (group, shard), run in sorted(held.items()):
        slots = run.array
        runs.append(ProvenRun(group, shard, tuple(run.indices), slots, books.versions[slots].tobytes()))
    slots = np.concatenate([run.slots for run in runs])
    headers = books.arena.headers[slots].tobytes()
    return Proof(_MINT, tokens=tokens, shards=shards, verdicts=tuple(verdicts), runs=tuple(runs), headers=headers)
