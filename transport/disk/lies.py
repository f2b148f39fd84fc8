"""When wrong blocks are the disk's (or the store's) fault, and not theirs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from .blocks import Got

LIES_MIN = 16
LIES_WINDOW_S = 60.0


class Lies:
    """What was read lately, and how much of it was not what was written."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.wrong_blocks = 0
        """Over all time."""
        self._clock = clock
        self._judged: deque[tuple[float, int, int]] = deque()

    def add(self, got: Sequence[Got]) -> None:
        """Take in what was read; what could not be read says nothing."""
        read = [g for g in got if g.refused is None]
        wrong = sum(g.wrong for g in read)
        self.wrong_blocks += wrong
        if read:
            self._judged.append((self._clock(), wrong, len(read)))
        while self._judged and self._judged[0][0] < self._clock() - LIES_WINDOW_S:
            self._judged.popleft()

    def clear(self) -> None:
        """It was shown to tell the truth again."""
        self._judged.clear()

    @property
    def words(self) -> str:
        return f"{self._wrong()} blocks read within {LIES_WINDOW_S:.0f} s were not those written"

    def _wrong(self) -> int:
        return sum(wrong for _, wrong, _ in self._judged)

    @property
    def found(self) -> bool:
        """Many blocks wrong, and most: that is the disk and not a block."""
        wrong = self._wrong()
        return wrong >= LIES_MIN and 2 * wrong >= sum(count for _, _, count in self._judged)
