"""A claim: slots of several pools that are pinned and let go together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Claim:
    """Slots of several pools as one array, each slot once: what is pinned and let go together.

    ``starts``: where each pool's slots begin in ``slots``; no pool without any.
    """

    pools: tuple[tuple[int, int], ...]
    starts: Slots
    slots: Slots
    counts: list[int] = field(init=False, compare=False)
    """How many slots of each pool."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", [b - a for a, b in pairwise([*self.starts.tolist(), len(self.slots)])])

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, Slots]]) -> Claim:
        """The claim on these slots, given as (group, shard, slots); empty runs claim nothing."""
        some = [run for run in runs if len(run[2])]
        if len(some) == 1:
            return cls((some[0][:2],), _FROM_THE_START, some[0][2])
        starts = list(accumulate((len(slots) for _, _, slots in some), initial=0))[: len(some)]
        slots = np.concatenate([slots for _, _, slots in some]) if some else np.empty(0, dtype=np.int64)
        return cls(tuple((group, shard) for group, shard, _ in some), np.array(starts, dtype=np.int64), slots)


_FROM_THE_START = np.zeros(1, dtype=np.int64)


def every(mask: npt.NDArray[np.bool_]) -> bool:
    """Whether all of a mask is set: what ``mask.all()`` says, in a tenth of the time where a mask is short."""
    return 0 not in mask.tobytes()


def count_runs(mask: npt.NDArray[np.bool_], starts: Slots) -> list[int]:
    """How many are set in each run of a mask; the runs begin at ``starts`` and none is empty."""
    counted: list[int] = np.add.reduceat(mask, starts, dtype=np.int64).tolist()
    return counted
