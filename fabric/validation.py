"""The four validation layers and the proof they yield.

Each layer is a named predicate over the materialised objects of one holder's share and gives a
:class:`Verdict`. A :class:`Proof` exists only where all four passed, and only :func:`prove` makes
one, or :func:`prove_stored` of what passed them when it was stored; a lease is built from nothing else.

    whole_block    the position lies on the grid, objects are whole
    abi            each record's passport joins the reader's
    intersection   everything the rules need at the position is here, on every shard of this
                   share, sealed, of one revision a family
    alignment      address and length fit the passport, the bytes' digest is the recorded one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from .arena import PAGE_BYTES, Arena, SlotState
from .books import Books
from .cause import absent_reason, stale_reason
from .claims import Claim, Slots, every
from .kinds import Form, Layer, ProtocolError, Reason
from .messages import SlotRun
from .model import ModelSpec
from .objects import Obj
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

Mask = npt.NDArray[np.bool_]

_MINT = object()
_SEALED = int(SlotState.SEALED)
_ANY = -1
"""Stands for a group whose revision nothing binds; revisions are not negative."""


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
    """Four passed verdicts and the exact slots they speak of. Only :func:`prove` and :func:`prove_stored` make one."""

    __slots__ = ("_headers", "claim", "parts", "runs", "shards", "tokens", "verdicts")

    def __init__(
        self,
        mint: object,
        *,
        tokens: int,
        shards: tuple[int, ...],
        verdicts: tuple[Verdict, ...],
        runs: tuple[ProvenRun, ...],
        claim: Claim,
        headers: bytes,
    ) -> None:
        if mint is not _MINT:
            raise ProtocolError("a proof is made by prove() or prove_stored() alone")
        self.tokens = tokens
        self.shards = shards
        self.verdicts = verdicts
        self.runs = runs
        self.claim = claim
        blob, ends = claim.slots.astype("<u4").tobytes(), accumulate(4 * len(run.slots) for run in runs)
        self.parts = tuple(
            SlotRun(run.group, run.shard, run.indices, blob[end - 4 * len(run.slots) : end], run.versions)
            for run, end in zip(runs, ends, strict=True)
        )
        """The runs as a reader is told them."""
        self._headers = headers

    def stands(self, books: Books) -> bool:
        """Whether all four layers would pass again, for the same reader and position.

        They look at nothing but the slots' records and headers, and each record was made with its header: slots
        that serve, and whose headers are the ones that were proven, are the ones that were proven.
        """
        slots = self.claim.slots
        return every(books.serving[slots]) and headers_of(books.arena, slots) == self._headers


def whole_block(model: ModelSpec, tokens: int, n: int) -> Verdict:
    """The position lies on the grid, before the prompt's end."""
    if tokens <= 0 or tokens > n - 1 or tokens % model.grid_tokens:
        return Verdict(Layer.WHOLE_BLOCK, Reason.OFF_GRID)
    return Verdict(Layer.WHOLE_BLOCK)


class Share:
    """One holder's share laid out as arrays: the held slots, group by group, and what the books record of them."""

    def __init__(self, held: Held, books: Books, abis: Sequence[Abi]) -> None:
        for run in held.values():
            run.sort()
        self.books = books
        self.held = held
        self.runs = [(group, shard, run) for (group, shard), run in sorted(held.items()) if run.slots]
        self.claim = Claim.of([(group, shard, run.array) for group, shard, run in self.runs])
        self.slots = self.claim.slots
        self._abi_numbers = books.abi_numbers[self.slots]
        self._refusals = list(self._refused_abis(abis))

    def _refused_abis(self, abis: Sequence[Abi]) -> Iterator[tuple[int, int, Reason]]:
        """What does not join the reader's ABI: the run's place, the ABI's number, why."""
        numbers = self._abi_numbers
        firsts = numbers[self.claim.starts]
        if every(numbers == self.by_run(firsts)):
            found: Iterable[tuple[int, int]] = enumerate(firsts.tolist())
        else:
            ends = [*self.claim.starts[1:], len(numbers)]
            spans = zip(self.claim.starts, ends, strict=True)
            found = [(place, n) for place, (a, b) in enumerate(spans) for n in np.unique(numbers[a:b]).tolist()]
        for place, number in found:
            refusal = abi_refusal(self.books.abis[number], abis[self.runs[place][0]])
            if refusal is not None:
                yield place, number, refusal

    def by_run(self, values: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A value a run, to be held against each of its slots."""
        one_a_run = np.asarray(values)
        # Of one run, it goes for all slots as it is.
        return one_a_run if len(self.runs) == 1 else np.repeat(one_a_run, self.claim.counts)

    @property
    def joined(self) -> bool:
        """Whether all ABIs join the reader's."""
        return not self._refusals

    def joins(self, reason: Reason) -> Mask:
        """Which slots' ABIs are not refused for this reason."""
        good = np.ones(len(self.slots), dtype=np.bool_)
        for place, number, why in self._refusals:
            if why is reason:
                good &= ~((self.by_run(range(len(self.runs))) == place) & (self._abi_numbers == number))
        return good

    def verdict(self, layer: Layer, reason: Reason, good: Mask) -> Verdict | None:
        """The refusal of the first slot that is not good; None if all are."""
        if every(good):
            return None
        at = int(np.flatnonzero(~good)[0])
        for (group, shard, run), count in zip(self.runs, self.claim.counts, strict=True):
            if at < count:
                return Verdict(layer, reason, group, shard, run.indices[at])
            at -= count
        raise AssertionError("a mask is as long as the slots")


def abi(share: Share) -> Verdict:
    """Every record's passport joins the reader's."""
    if share.joined:
        return Verdict(Layer.ABI)
    wrong = share.verdict(Layer.ABI, Reason.ABI_MISMATCH, share.joins(Reason.ABI_MISMATCH))
    return wrong or Verdict(Layer.ABI)


def intersection(
    model: ModelSpec, tokens: int, share: Share, *, shards: Sequence[int], revisions: Sequence[int | None]
) -> Verdict:
    """Everything needed at the position is held, sealed at the recorded version, of one revision."""
    books, slots = share.books, share.slots
    for group, ranges in enumerate(needs(model, tokens)):
        wanted = list(chain.from_iterable(ranges))
        for shard in shards:
            run = share.held.get((group, shard), _NOTHING_HELD)
            if run.indices != wanted:
                missing = sorted(set(wanted).difference(run.indices))
                if missing:
                    reason = absent_reason(model.groups[group].kind, state=model.groups[group].form is Form.STATE)
                    return Verdict(Layer.INTERSECTION, reason, group, shard, missing[0])
    wrong = share.verdict(Layer.INTERSECTION, Reason.VERSION_CHANGED, _sealed_as_recorded(share))
    if wrong is not None:
        return wrong
    recorded = books.revisions[slots]
    bound = [(_ANY if revisions[group] is None else revisions[group]) for group, _, _ in share.runs]
    asked = share.by_run(np.array(bound, dtype=np.int64))
    good = (recorded == asked) | (asked == _ANY)
    if not every(good):
        at = share.verdict(Layer.INTERSECTION, Reason.VERSION_CHANGED, good)
        assert at is not None
        spec = model.groups[at.group]
        return replace(at, reason=stale_reason(spec.kind, state=spec.form is Form.STATE))
    return Verdict(Layer.INTERSECTION)


def _sealed_as_recorded(share: Share) -> Mask:
    books, slots = share.books, share.slots
    arena = books.arena
    same: Mask = (arena.versions[slots] == books.versions[slots]) & (arena.states[slots] == _SEALED)
    return same


def alignment(model: ModelSpec, share: Share, digests: dict[int, bytes]) -> Verdict:
    """Address and length fit; where the bytes were digested, the digest is the recorded one.

    ``digests``: slot -> checksum of the bytes as they lie there now.
    """
    books, slots = share.books, share.slots
    arena = books.arena
    lengths = books.lengths[slots]
    good = lengths == share.by_run([model.groups[group].block_bytes for group, _, _ in share.runs])
    if not share.joined:
        good &= share.joins(Reason.MISALIGNED)
    large = [model.groups[group].alignment_bytes for group, _, _ in share.runs]
    if any(PAGE_BYTES % size and size > PAGE_BYTES for size in large):
        good &= (_offsets(books, slots) % share.by_run(large) == 0) | (share.by_run(large) <= PAGE_BYTES)
    wrong = share.verdict(Layer.ALIGNMENT, Reason.MISALIGNED, good)
    if wrong is not None:
        return wrong
    good = arena.lengths[slots] == lengths
    recorded, now = books.checksums[slots], arena.checksums[slots]
    if recorded.tobytes() != now.tobytes():
        good &= (recorded == now.view("<u8").reshape(-1, 2)).all(axis=1)
    for place, slot in enumerate(slots.tolist() if digests else ()):
        if slot in digests and digests[slot] != books.checksums[slot].tobytes():
            good[place] = False
    return share.verdict(Layer.ALIGNMENT, Reason.CHECKSUM_MISMATCH, good) or Verdict(Layer.ALIGNMENT)


def _offsets(books: Books, slots: Slots) -> Slots:
    return np.array([books.arena.layout.offset_of(slot) for slot in slots.tolist()], dtype=np.int64)


def headers_of(arena: Arena, slots: Slots) -> bytes:
    """The headers of slots, one after the other. Many in few rows are copied by rows, which is far faster."""
    headers = arena.headers
    if len(slots) >= MANY_SLOTS:
        ends = np.flatnonzero(np.diff(slots, append=-2) != 1) + 1
        if len(ends) <= len(slots) // MANY_SLOTS * ROWS_MAX:
            rows = zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)
            return b"".join([headers[int(slots[a]) : int(slots[b - 1]) + 1].tobytes() for a, b in rows])
    return headers[slots].tobytes()


MANY_SLOTS = 1024
ROWS_MAX = 64

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
    share = Share(held, books, abis)
    verdicts = []
    layers: tuple[Callable[[], Verdict], ...] = (
        lambda: whole_block(model, tokens, n),
        lambda: abi(share),
        lambda: intersection(model, tokens, share, shards=shards, revisions=revisions),
        lambda: alignment(model, share, digests),
    )
    for layer in layers:
        verdict = layer()
        if not verdict.passed:
            return verdict
        verdicts.append(verdict)
    versions = books.versions[share.slots].tobytes()
    indices = [tuple(run.indices) for _, _, run in share.runs]
    headers = headers_of(books.arena, share.slots)
    return _proven(tokens, shards, tuple(verdicts), share.claim, indices, versions=versions, headers=headers)


def _proven(
    tokens: int,
    shards: tuple[int, ...],
    verdicts: tuple[Verdict, ...],
    claim: Claim,
    indices: Sequence[tuple[int, ...]],
    *,
    versions: bytes,
    headers: bytes,
) -> Proof:
    """The proof of these verdicts. ``indices``: of each pool of the claim; versions and headers: of its slots."""
    runs, at = [], 0
    for (group, shard), of_pool in zip(claim.pools, indices, strict=True):
        end = at + len(of_pool)
        runs.append(ProvenRun(group, shard, of_pool, claim.slots[at:end], versions[8 * at : 8 * end]))
        at = end
    return Proof(_MINT, tokens=tokens, shards=shards, verdicts=verdicts, runs=tuple(runs), claim=claim, headers=headers)


# --- what was stored together ------------------------------------------------------------------


class SealedRun:
    """Objects of one group, shard, revision and ABI that were stored in a row, and what was found right then.

    That is all that the layers ask of a slot by itself: sealed at its recorded version, of the length, address and
    digest that fit. It holds as long as the slots serve under the same headers. Only :func:`sealed_runs` makes one.
    """

    __slots__ = ("abi", "digests", "group", "headers", "revision", "shard", "slots", "versions")

    def __init__(
        self,
        mint: object,
        *,
        place: tuple[int, int],
        digests: bytes,
        slots: Slots,
        versions: bytes,
        headers: bytes,
        revision: int,
        abi: Abi,
    ) -> None:
        if mint is not _MINT:
            raise ProtocolError("a sealed run is made by sealed_runs() alone")
        self.group, self.shard = place
        self.digests = digests
        self.slots = slots
        self.versions = versions
        self.headers = headers
        self.revision = revision
        self.abi = abi

    def tail(self, count: int) -> SealedRun:
        """Its last ``count`` objects; itself where it has no more."""
        more = len(self.slots) - count
        if more <= 0:
            return self
        ends = (part[more * (len(part) // len(self.slots)) :] for part in (self.digests, self.versions, self.headers))
        digests, versions, headers = ends
        return SealedRun(
            _MINT,
            place=(self.group, self.shard),
            digests=digests,
            slots=self.slots[more:],
            versions=versions,
            headers=headers,
            revision=self.revision,
            abi=self.abi,
        )


def sealed_runs(books: Books, rows: Sequence[Sequence[Obj]]) -> Iterator[SealedRun]:
    """The rows (of one group and shard each, no two of the same) that are right, each slot by itself."""
    model, abis = books.model, [_NO_ABI] * len(books.model.groups)
    held: Held = {}
    for row in rows:
        first = row[0]
        alike = all(obj.visible and obj.revision == first.revision and obj.abi == first.abi for obj in row)
        if alike and (first.group, first.shard) not in held:
            held[first.group, first.shard] = HeldRun(list(range(len(row))), [obj.slot for obj in row])
            abis[first.group] = first.abi
    share = Share(held, books, abis)
    if not share.joined or not _sealed_as_recorded(share).all() or not alignment(model, share, {}).passed:
        return
    for row in rows:
        place = (row[0].group, row[0].shard)
        run = held.get(place)
        if run is None or run.slots[0] != row[0].slot:
            continue
        yield SealedRun(
            _MINT,
            place=place,
            digests=b"".join([obj.digest for obj in row]),
            slots=run.array,
            versions=books.versions[run.array].tobytes(),
            headers=headers_of(books.arena, run.array),
            revision=row[0].revision,
            abi=row[0].abi,
        )


def prove_stored(
    model: ModelSpec,
    *,
    tokens: int,
    n: int,
    abis: Sequence[Abi],
    runs: Sequence[tuple[tuple[int, ...], Sequence[SealedRun]]],
    books: Books,
) -> Proof | None:
    """The proof, on all shards, of what was stored in these runs; None where any layer may refuse: :func:`prove` says which.

    ``runs``: of each group and shard that the position needs, in their order, the indices needed and the runs that bear
    just these, in order.
    """
    parts = [part for _, of_one in runs for part in of_one]
    revisions: dict[int, int] = {part.group: part.revision for part in parts}
    for family in model.families:
        if len({revisions[group] for group in family if group in revisions}) > 1:
            return None
    if any(part.revision != revisions[part.group] for part in parts):
        return None
    if any(abi_refusal(part.abi, abis[part.group]) is not None for part in parts):
        return None
    verdict = whole_block(model, tokens, n)
    if not parts or not verdict.passed:
        return None
    slots = np.concatenate([part.slots for part in parts])
    ends = list(accumulate(len(indices) for indices, _ in runs))
    starts = np.array([0, *ends[:-1]], dtype=np.int64)
    proof = _proven(
        tokens,
        tuple(range(model.shards)),
        (verdict, Verdict(Layer.ABI), Verdict(Layer.INTERSECTION), Verdict(Layer.ALIGNMENT)),
        Claim(tuple((of_one[0].group, of_one[0].shard) for _, of_one in runs), starts, slots),
        [indices for indices, _ in runs],
        versions=b"".join([part.versions for part in parts]),
        headers=b"".join([part.headers for part in parts]),
    )
    return proof if proof.stands(books) else None


_NO_ABI = Abi(b"", 1)
