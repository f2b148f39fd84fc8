"""Second touch: only what was used twice is written to disk.

Most prompts are never asked for again; writing them wears the disk and pushes out what will be. A use is
a store or a lease. What left memory after one use is remembered for a while: the next use is its second.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

USES_MIN = 2


@dataclass(slots=True)
class SecondTouch:
    """Implements ``DiskAdmission``. Remembers at most ``size_max`` digests of what left after one use."""

    size_max: int = 65_536
    _once: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._once)

    def admits(self, digest: bytes, uses: int) -> bool:
        return uses >= USES_MIN or (uses > 0 and digest in self._once)

    def left(self, digest: bytes) -> None:
        """An object of this digest is in memory no more."""
        self._once[digest] = None
        self._once.move_to_end(digest)
        while len(self._once) > self.size_max:
            self._once.popitem(last=False)
