"""Which pool should give a slab to which: by the tokens that each lost for want of room.

What a pool lost is what would have been a hit with more of it (:mod:`losses`). More of a pool saves tokens at about that
rate, so a slab goes from where it saves least to where it saves most, as long as the difference is clear and lasts:

* the taker lost ``SHARE_MIN`` of what was hit or lost in that time, and ``RATIO`` times what the giver did;
* after each move evidence is gathered anew; a pool that has many slabs takes or gives a few of them in one move;
* who took gives none, and who gave takes none, for its rest: ``REST_S`` at first, doubled with every turn against the one
  before, so that where the split is right as it is, moving back and forth dies out;
* every pool keeps its floor: ``FLOOR_SHARE`` of what it began with and at least one slab, so that no kind is starved out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .pools import Key

RATIO = 2.0
SHARE_MIN = 0.02
REST_S = 60.0
REST_S_MAX = 3600.0
FLOOR_SHARE = 0.25


@dataclass(slots=True)
class Stake:
    """One pool's part in the slabs. ``lost_tokens``: since the last move; ``idle_slabs``: whole slabs' worth of free slots.

    ``turned``: whether its last move took (1) or gave (-1); ``rests_until_s``: until when it does not turn.
    """

    key: Key
    slabs: int
    floor: int
    lost_tokens: float = 0.0
    idle_slabs: int = 0
    turned: int = 0
    rest_s: float = REST_S
    rests_until_s: float = float("-inf")

    def may(self, turn: int, now_s: float) -> bool:
        """Whether it may take (1) or give (-1) now."""
        return now_s >= self.rests_until_s or turn == self.turned

    def moves(self, turn: int, now_s: float) -> None:
        """It takes (1) or gives (-1) a slab."""
        if self.turned == -turn:
            self.rest_s = min(2 * self.rest_s, REST_S_MAX)
        elif now_s >= self.rests_until_s + self.rest_s:
            self.rest_s = max(self.rest_s / 2, REST_S)
        self.turned, self.rests_until_s = turn, now_s + self.rest_s


def floor_of(slabs: int) -> int:
    """How many of so many slabs a pool keeps in any case."""
    return max(1, int(slabs * FLOOR_SHARE))


def choose(stakes: Sequence[Stake], hit_tokens: float, now_s: float) -> tuple[Stake, Stake] | None:
    """(giver, taker) of one slab; None where all may stay as they are. ``hit_tokens``: granted since the last move."""
    least = SHARE_MIN * (hit_tokens + sum(stake.lost_tokens for stake in stakes))
    takers = sorted(stakes, key=lambda s: (-s.lost_tokens, s.slabs, s.key))
    givers = sorted(stakes, key=lambda s: (s.lost_tokens, -s.idle_slabs, -s.slabs, s.key))
    for taker in takers:
        if not taker.lost_tokens or taker.lost_tokens < least:
            return None
        if not taker.may(1, now_s):
            continue
        for giver in givers:
            if giver is taker or giver.slabs <= giver.floor or not giver.may(-1, now_s):
                continue
            if taker.lost_tokens >= RATIO * giver.lost_tokens:
                return giver, taker
    return None
