"""What was stored together, as it was found right then: a prompt that lies in such runs is proven without a look at each object.

A run is a row of one chain: it is found by its last digest, and is the prompt's where all its digests are. That its
slots still bear what they bore their headers say, which are read every time. A prompt that is not made of whole
runs and the tail of one is looked up object by object.
"""

from __future__ import annotations

from collections.abc import Sequence

from .books import Books
from .identity import DIGEST_BYTES
from .objects import Obj, by_place
from .validation import SealedRun, sealed_runs

RUN_MIN = 4
"""Objects of a run that is worth remembering: a shorter one is looked up as quickly."""
SLOTS_MAX = 1 << 17
"""Of all runs kept together: each takes about 120 bytes a slot."""


class StoredRuns:
    """The last runs that were stored, the oldest first to go."""

    def __init__(self, slots_max: int = SLOTS_MAX, run_min: int = RUN_MIN) -> None:
        self._slots_max = slots_max
        self._run_min = run_min
        self._slots = 0
        self._kept: dict[tuple[int, int, bytes], SealedRun] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def stored(self, books: Books, objects: Sequence[Obj]) -> None:
        """These were stored in one commit and are visible; those of one group and shard stand in a row."""
        rows = [row for _, row in by_place(objects)]
        long = [row for row in rows if self._run_min <= len(row) <= self._slots_max]
        for run in sealed_runs(books, long) if long else ():
            self._keep(run)

    def _keep(self, run: SealedRun) -> None:
        key = (run.group, run.shard, run.digests[-DIGEST_BYTES:])
        self._drop(key)
        self._kept[key] = run
        self._slots += len(run.slots)
        while self._slots > self._slots_max:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[int, int, bytes]) -> None:
        dropped = self._kept.pop(key, None)
        if dropped is not None:
            self._slots -= len(dropped.slots)

    def along(self, group: int, shard: int, chain: bytes, wanted: range) -> Sequence[SealedRun] | None:
        """The runs that make up these objects of a chain (a digest each), in order; None where they do not."""
        found: list[SealedRun] = []
        end = wanted.stop
        if len(chain) < DIGEST_BYTES * end:
            return None
        while end > wanted.start:
            run = self._kept.get((group, shard, chain[DIGEST_BYTES * (end - 1) : DIGEST_BYTES * end]))
            if run is None:
                return None
            run = run.tail(end - wanted.start)
            begin = end - len(run.slots)
            if run.digests != chain[DIGEST_BYTES * begin : DIGEST_BYTES * end]:
                return None
            found.append(run)
            end = begin
        found.reverse()
        return found
