"""What fills a directory in the figures: long documents and agentic sessions, as their holders would tell them.

Half of the chain positions lie in documents of 64 to 8,192 blocks, each at one holder, stored in
prefill chunks. The other half are sessions: one of 64 system prompts (held everywhere), then 10 to 40 turns of
8 to 64 blocks; every seventh turn branches off an earlier one, every twentieth goes on at another holder. 200
sessions are under way at a time, so runs grow in turns, as memory does.

Versions are those of slots that are reused about equally often: within a pool they spread by
``version_spread`` around the number of writes so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ...fabric.bands import IN_MEMORY
from ...fabric.kinds import INDEX_DIGEST_BYTES as KEY
from ...fabric.messages import EventRun, Lane
from ...fabric.passport import Abi
from ...fabric.segments import SEGMENT_OBJECTS

ABI = Abi(b"benchabi", 256)
UNIT_TOKENS = 16
PREFILL_BLOCKS = 512
SESSIONS = 200
SYSTEM_PROMPTS = 64


def runs_of(chain: bytes, first: int, end: int, group: int, versions: bytes) -> Iterator[EventRun]:
    """Objects ``first`` to ``end`` of a chain (16 bytes a digest) as events; ``versions`` from ``first`` on."""
    lane = Lane(group, 0, IN_MEMORY, 0, ABI)
    start = first
    while start < end:
        base = start - start % SEGMENT_OBJECTS
        stop = min(end, base + SEGMENT_OBJECTS)
        yield EventRun(
            lane,
            UNIT_TOKENS,
            chain[base * KEY : base * KEY + KEY],
            b"" if start == base else chain[(start - 1) * KEY : start * KEY],
            start,
            chain[start * KEY : stop * KEY],
            versions[(start - first) * 8 : (stop - first) * 8],
        )
        start = stop


@dataclass(slots=True)
class _Session:
    chain: bytearray
    holder: int
    turns: int
    ends: list[int] = field(default_factory=list)


class Load:
    """An endless stream of (holder, events, new positions). ``positions`` counts distinct chain positions so far."""

    def __init__(self, seed: int, *, holders: int = 8, groups: int = 5, version_spread: int = 200) -> None:
        self.rng = np.random.default_rng(seed)
        self.holders = holders
        self.groups = groups
        self.spread = version_spread
        self.positions = 0
        self.chains: list[bytes] = []
        """Some whole chains, to look up."""
        self._written = [0.0] * holders
        self._prompts = [self.rng.bytes(KEY * int(n)) for n in self.rng.integers(100, 300, SYSTEM_PROMPTS)]
        self._sessions: list[_Session] = []

    def __iter__(self) -> Iterator[tuple[int, list[EventRun]]]:
        for prompt in self._prompts:
            self.positions += len(prompt) // KEY
            for holder in range(self.holders):
                yield holder, self._events(prompt, 0, len(prompt) // KEY, holder)
        documents = sessions = 0
        while True:
            before = self.positions
            if documents <= sessions:
                yield from self._document()
                documents += self.positions - before
            else:
                yield self._turn()
                sessions += self.positions - before

    def _events(self, chain: bytes, first: int, end: int, holder: int) -> list[EventRun]:
        count = end - first
        self._written[holder] += count
        base = int(2 * self._written[holder] / 50_000)
        events: list[EventRun] = []
        for group in range(self.groups):
            versions = (base + 1 + self.rng.integers(0, self.spread, count)).astype("<u8").tobytes()
            events.extend(runs_of(chain, first, end, group, versions))
        return events

    def _document(self) -> Iterator[tuple[int, list[EventRun]]]:
        count = int(np.clip(self.rng.lognormal(6.3, 1.1), 64, 8192))
        chain = self.rng.bytes(count * KEY)
        holder = int(self.rng.integers(self.holders))
        self.positions += count
        if len(self.chains) < 256:
            self.chains.append(chain)
        for first in range(0, count, PREFILL_BLOCKS):
            yield holder, self._events(chain, first, min(count, first + PREFILL_BLOCKS), holder)

    def _turn(self) -> tuple[int, list[EventRun]]:
        rng = self.rng
        if len(self._sessions) < SESSIONS:
            prompt = self._prompts[int(rng.integers(SYSTEM_PROMPTS))]
            session = _Session(bytearray(prompt), int(rng.integers(self.holders)), int(rng.integers(10, 41)))
            session.ends.append(len(prompt) // KEY)
            self._sessions.append(session)
        place = int(rng.integers(len(self._sessions)))
        session = self._sessions[place]
        if rng.random() < 1 / 7:
            at = int(rng.integers(len(session.ends)))
            del session.ends[at + 1 :]
            del session.chain[session.ends[at] * KEY :]
        if rng.random() < 1 / 20:
            session.holder = int(rng.integers(self.holders))
        first = len(session.chain) // KEY
        count = int(rng.integers(8, 65))
        session.chain += rng.bytes(count * KEY)
        session.ends.append(first + count)
        session.turns -= 1
        self.positions += count
        if session.turns <= 0:
            if len(self.chains) < 512:
                self.chains.append(bytes(session.chain))
            del self._sessions[place]
        return session.holder, self._events(bytes(session.chain), first, first + count, session.holder)
