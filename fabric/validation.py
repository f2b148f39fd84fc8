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
from dataclasses import dataclass

import numpy as np

from .arena import PAGE_BYTES, Arena, SlotState
from .books import Obj
from .kinds import Form, Layer, ProtocolError, Reason
from .model import ModelSpec
from .passport import Abi, abi_refusal
from .rules import needs

Held = dict[tuple[int, int], dict[int, Obj]]
"""The objects of one share: (group, shard) -> index -> object."""

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
class ProvenSlot:
    """One object of a proof: which slot bears it, at which version."""

    group: int
    shard: int
    index: int
    slot: int
    version: int


class Proof:
    """Four passed verdicts and the exact slots they speak of. Only :func:`prove` makes one."""

    __slots__ = ("objects", "shards", "slot_numbers", "slot_versions", "slots", "tokens", "verdicts")

    def __init__(
        self,
        mint: object,
        *,
        tokens: int,
        shards: tuple[int, ...],
        verdicts: tuple[Verdict, ...],
        slots: tuple[ProvenSlot, ...],
        objects: tuple[Obj, ...],
    ) -> None:
        if mint is not _MINT:
            raise ProtocolError("a proof is made by prove() alone")
        self.tokens = tokens
        self.shards = shards
        self.verdicts = verdicts
        self.slots = slots
        self.slot_numbers = np.array([s.slot for s in slots], dtype=np.int64)
        self.slot_versions = np.array([s.version for s in slots], dtype="<u8").tobytes()
        self.objects = objects


def whole_block(model: ModelSpec, tokens: int, n: int) -> Verdict:
    """The position lies on the grid, before the prompt's end."""
    if tokens <= 0 or tokens > n - 1 or tokens % model.grid_tokens:
        return Verdict(Layer.WHOLE_BLOCK, Reason.OFF_GRID)
    return Verdict(Layer.WHOLE_BLOCK)


def abi(abis: Sequence[Abi], held: Held) -> Verdict:
    """Every record's passport joins the reader's."""
    for (group, shard), objects in held.items():
        for index, obj in objects.items():
            refusal = abi_refusal(obj.abi, abis[group])
            if refusal is Reason.ABI_MISMATCH:
                return Verdict(Layer.ABI, refusal, group, shard, index)
    return Verdict(Layer.ABI)


def intersection(
    model: ModelSpec,
    tokens: int,
    *,
    shards: Sequence[int],
    revisions: Sequence[int | None],
    held: Held,
    arena: Arena,
) -> Verdict:
    """Everything needed at the position is held, sealed at the recorded version, of one revision."""
    for group, ranges in enumerate(needs(model, tokens)):
        for shard in shards:
            objects = held.get((group, shard), {})
            for wanted in ranges:
                for index in wanted:
                    obj = objects.get(index)
                    if obj is None:
                        return Verdict(Layer.INTERSECTION, absent_reason(model, group), group, shard, index)
                    if arena.version(obj.slot) != obj.version or arena.state(obj.slot) is not SlotState.SEALED:
                        return Verdict(Layer.INTERSECTION, Reason.VERSION_CHANGED, group, shard, index)
                    if revisions[group] is not None and obj.revision != revisions[group]:
                        return Verdict(Layer.INTERSECTION, stale_reason(model, group), group, shard, index)
    return Verdict(Layer.INTERSECTION)


def alignment(model: ModelSpec, abis: Sequence[Abi], held: Held, arena: Arena, digests: dict[int, bytes]) -> Verdict:
    """Address and length fit; where the bytes were digested, the digest is the recorded one.

    ``digests``: slot -> checksum of the bytes as they lie there now.
    """
    for (group, shard), objects in held.items():
        spec = model.groups[group]
        for index, obj in objects.items():
            reason: Reason | None = None
            if (
                obj.length != spec.block_bytes
                or arena.layout.offset_of(obj.slot) % min(spec.alignment_bytes, PAGE_BYTES)
                or abi_refusal(obj.abi, abis[group]) is Reason.MISALIGNED
            ):
                reason = Reason.MISALIGNED
            elif (
                (obj.slot in digests and digests[obj.slot] != obj.checksum)
                or arena.checksum(obj.slot) != obj.checksum
                or int(arena.lengths[obj.slot]) != obj.length
            ):
                reason = Reason.CHECKSUM_MISMATCH
            if reason is not None:
                return Verdict(Layer.ALIGNMENT, reason, group, shard, index)
    return Verdict(Layer.ALIGNMENT)


def prove(
    model: ModelSpec,
    *,
    tokens: int,
    n: int,
    shards: tuple[int, ...],
    revisions: Sequence[int | None],
    abis: Sequence[Abi],
    held: Held,
    arena: Arena,
    digests: dict[int, bytes],
) -> Proof | Verdict:
    """All four layers over what is materialised; the first refusal, or the proof."""
    verdicts = []
    for verdict in (
        whole_block(model, tokens, n),
        abi(abis, held),
        intersection(model, tokens, shards=shards, revisions=revisions, held=held, arena=arena),
        alignment(model, abis, held, arena, digests),
    ):
        if not verdict.passed:
            return verdict
        verdicts.append(verdict)
    slots = tuple(
        ProvenSlot(group, shard, index, obj.slot, obj.version)
        for (group, shard), objects in held.items()
        for index, obj in objects.items()
    )
    proven = tuple(obj for objects in held.values() for obj in objects.values())
    return Proof(_MINT, tokens=tokens, shards=shards, verdicts=tuple(verdicts), slots=slots, objects=proven)


def absent_reason(model: ModelSpec, group: int) -> Reason:
    """The reason for an object of this group that is simply not there."""
    spec = model.groups[group]
    match spec.kind.value:
        case "uncompressed_tail":
            return Reason.TAIL_GAP if spec.form is Form.BLOCKS else Reason.SNAPSHOT_ABSENT
        case "sliding_window":
            return Reason.WINDOW_INCOMPLETE if spec.form is Form.BLOCKS else Reason.SNAPSHOT_ABSENT
        case "indexer":
            return Reason.INDEX_ABSENT if spec.form is Form.BLOCKS else Reason.SNAPSHOT_ABSENT
        case _:
            return Reason.NOT_STORED if spec.form is Form.BLOCKS else Reason.SNAPSHOT_ABSENT


def stale_reason(model: ModelSpec, group: int) -> Reason:
    """The reason for an object that is there under another revision than its family's."""
    match model.groups[group].kind.value:
        case "uncompressed_tail":
            return Reason.TAIL_GAP
        case "indexer":
            return Reason.INDEX_STALE
        case _:
            return Reason.NOT_STORED
