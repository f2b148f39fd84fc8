"""Placement by heat: a prefix that is granted often gets more copies, up to a limit.

Heat is an exponentially decaying count of grants: at a steady rate of r a second it stands at
r * half_life_s / ln 2. One copy is enough for ``hot_per_s``; each further multiple of it wants one more.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from blake3 import blake3


@dataclass(slots=True)
class HotCopies:
    """Implements ``Placement``. ``hot_per_s``: grants a second that one copy serves easily.

    ``half_life_s``: how fast heat is forgotten; ``copies_max``, ``keep_s``, ``share``, ``placing_max`` as the
    Protocol has them; ``known_max``: prefixes whose heat is known, the least recently used forgotten first.
    """

    hot_per_s: float = 2.0
    half_life_s: float = 30.0
    copies_max: int = 2
    keep_s: float = 60.0
    share: float = 0.2
    placing_max: int = 8
    known_max: int = 8192
    _heat: OrderedDict[bytes, tuple[float, float]] = field(default_factory=OrderedDict)

    def used(self, key: bytes, now: float) -> int:
        self._heat[key] = (self.heat(key, now) + 1.0, now)
        self._heat.move_to_end(key)
        while len(self._heat) > self.known_max:
            self._heat.popitem(last=False)
        return self.wanted(key, now)

    def heat(self, key: bytes, now: float) -> float:
        """The decayed count of a prefix's grants."""
        count, at = self._heat.get(key, (0.0, now))
        return count * math.exp2(-max(now - at, 0.0) / self.half_life_s)

    def wanted(self, key: bytes, now: float) -> int:
        rate_per_s = self.heat(key, now) * math.log(2) / self.half_life_s
        return min(self.copies_max, 1 + int(rate_per_s / self.hot_per_s))

    def choose(self, key: bytes, nodes: Sequence[str]) -> str:
        # Rendezvous: all choose alike, and prefixes spread over the nodes.
        return max(nodes, key=lambda node: blake3(key + node.encode()).digest(8))
