"""What directory shards answered, put together: columns for the rules, versions when a plan asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .bands import IN_MEMORY
from .bitmaps import ones
from .kinds import WireError
from .messages import Column, Found, Stripe
from .passport import Abi
from .versions import decode_versions

Key = tuple[str, int, int]
"""Holder, group, shard."""


@dataclass(slots=True)
class Hints:
    """The stripes of all shards' answers to one question, by holder, group and shard."""

    stripes: dict[Key, list[tuple[Stripe, int]]] = field(default_factory=dict)
    """Each with the row of its lane."""

    def learn(self, found: Found) -> None:
        """Take one shard's answer."""
        for stripe in found.stripes:
            for row, lane in enumerate(stripe.lanes):
                self.stripes.setdefault((stripe.holder, lane.group, lane.shard), []).append((stripe, row))

    def columns(self) -> Iterator[Column]:
        """One column a holder, group and shard, without versions: ask :meth:`versions` for those of a plan."""
        for (holder, group, shard), stripes in self.stripes.items():
            yield _column(holder, group, shard, stripes)

    def versions(self, key: Key, indices: Iterable[int]) -> bytes:
        """Expected versions (uint64 each) of objects in memory by index; zero where none was told."""
        wanted = list(indices)
        out = np.zeros(len(wanted), dtype="<u8")
        if not wanted:
            return b""
        asked = np.array(wanted, dtype=np.int64)
        for stripe, row in self.stripes.get(key, ()):
            for first, end, encoded in stripe.pieces:
                low, high = np.searchsorted(asked, (first, end))
                if low < high:
                    _fill(out[low:high], asked[low:high], stripe, row, first, end, encoded)
        return out.tobytes()


def _fill(  # noqa: PLR0917 - one piece of one column
    out: NDArray[np.uint64],
    asked: NDArray[np.int64],
    stripe: Stripe,
    row: int,
    first: int,
    end: int,
    encoded: bytes,
) -> None:
    held = stripe.bits >> first & ones(end - first)
    try:
        versions = decode_versions(encoded, len(stripe.lanes))[row]
    except WireError:
        return
    for place, index in enumerate(asked.tolist()):
        bit = 1 << (index - first)
        if held & bit:
            at = (held & (bit - 1)).bit_count()
            if len(versions) == 1:
                out[place] = versions[0]
            elif at < len(versions):
                out[place] = versions[at]


def _column(holder: str, group: int, shard: int, stripes: list[tuple[Stripe, int]]) -> Column:
    memory = tier = 0
    revisions: dict[int, int] = {}
    abis: dict[Abi, int] = {}
    bad: dict[tuple[object, bool], int] = {}
    for stripe, row in stripes:
        lane, bits = stripe.lanes[row], stripe.bits
        if lane.bad is not None:
            bad[lane.bad, lane.bad_from_tier] = bad.get((lane.bad, lane.bad_from_tier), 0) | bits
        elif lane.state == IN_MEMORY:
            memory |= bits
        else:
            tier |= bits
        revisions[lane.revision] = revisions.get(lane.revision, 0) | bits
        abis[lane.abi] = abis.get(lane.abi, 0) | bits
    return Column(
        holder,
        stripes[0][0].incarnation,
        group,
        shard,
        memory,
        tier,
        revisions,
        tuple(abis.items()),
        tuple((reason, from_tier, bits) for (reason, from_tier), bits in bad.items()),  # type: ignore[misc]
    )
