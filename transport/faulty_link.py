"""A link that fails as real ones do, by seed: it wraps any link and ships with it for simulations and tests.

What it does to a pair that the wrapped link would have carried:

* ``loss``: nothing arrives, the peer seems lost;
* ``delay``: the call takes ``delay_s`` longer, slept by the caller's ``sleep``; where that passes the deadline the
  pair times out and its bytes *arrive later*, while its token is asked about;
* ``tear``: some of the bytes are others, as if the source had rewritten its slot meanwhile;
* ``early``: the pair is reported while half of its bytes are still to come; they come with the next call;
* ``partition(holder)``: every call waits its deadline out; bytes asked for arrive after ``heal``.

Equal seeds and equal calls give equal faults. Checksums are honest: of the bytes that lie there when reported.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..fabric.arena import Arena
from .digest import digester
from .link import Headers, Link, LinkError, LinkFailure, LinkKind, Pair, PairResult, QuietToken, Region

_FIRST_TOKEN = 1 << 32
"""Above the tokens of the wrapped link."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities, each in [0, 1]: of ``delay`` a call, of the others a pair. ``delay_s`` is in seconds."""

    loss: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.0
    tear: float = 0.0
    early: float = 0.0


@dataclass(slots=True)
class FaultCounters:
    """What was done so far, in pairs (``delayed`` in calls)."""

    lost: int = 0
    delayed: int = 0
    torn: int = 0
    early: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True)
class _Late:
    """A pair that timed out and whose bytes will arrive."""

    region: Region
    pair: Pair


@dataclass(frozen=True, slots=True)
class _Missing:
    """The second half of a pair that was reported early."""

    slot: int
    start: int
    content: np.ndarray[tuple[int], np.dtype[np.uint8]]


class FaultyLink:
    """A :class:`~kvfabric.transport.link.Link` over ``link``, which reads into ``arena``."""

    def __init__(
        self, link: Link, arena: Arena, faults: Faults, rng: random.Random, *, sleep: Callable[[float], None]
    ) -> None:
        self._link = link
        self._arena = arena
        self.faults = faults
        self._rng = rng
        self._sleep = sleep
        self._lock = threading.RLock()
        self._partitioned: set[str] = set()
        self._late: dict[QuietToken, _Late] = {}
        self._missing: list[_Missing] = []
        self._next_token = _FIRST_TOKEN
        self.counters = FaultCounters()

    @property
    def kind(self) -> LinkKind:
        return self._link.kind

    def region(self) -> Region:
        return self._link.region()

    def partition(self, holder: str) -> None:
        """Cut the way to a holder: nothing arrives and nothing is refused."""
        with self._lock:
            self._partitioned.add(holder)

    def heal(self, holder: str) -> None:
        with self._lock:
            self._partitioned.discard(holder)

    def _cut(self, region: Region, deadline_s: float) -> LinkError | None:
        """Wait the deadline out behind a partition."""
        if region.holder not in self._partitioned:
            return None
        self._sleep(deadline_s)
        return LinkError(LinkFailure.TIMED_OUT, f"{region.holder}: partitioned")

    def connect(self, region: Region, deadline_s: float) -> LinkError | None:
        with self._lock:
            self._complete()
            return self._cut(region, deadline_s) or self._link.connect(region, deadline_s)

    def disconnect(self, region: Region) -> None:
        self._link.disconnect(region)

    def fetch(self, region: Region, pairs: Sequence[Pair], deadline_s: float) -> list[PairResult]:
        with self._lock:
            self._complete()
            cut = self._cut(region, deadline_s)
            if cut is None and self._happens(self.faults.delay):
                self.counters.delayed += 1
                self._sleep(min(self.faults.delay_s, deadline_s))
                if self.faults.delay_s >= deadline_s:
                    cut = LinkError(LinkFailure.TIMED_OUT, f"{region.holder}: delayed beyond the deadline")
            if cut is not None:
                return [self._time_out(region, pair, cut) for pair in pairs]
            lost = [self._happens(self.faults.loss) for _ in pairs]
            carried = [pair for pair, gone in zip(pairs, lost, strict=True) if not gone]
            results = iter(self._link.fetch(region, carried, deadline_s))
            return [
                self._lose(pair) if gone else self._spoil(pair, next(results))
                for pair, gone in zip(pairs, lost, strict=True)
            ]

    def _happens(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _time_out(self, region: Region, pair: Pair, cut: LinkError) -> PairResult:
        token = QuietToken(self._next_token)
        self._next_token += 1
        self._late[token] = _Late(region, pair)
        return PairResult(pair.dst_slot, cut.failure, cut.detail, token)

    def _lose(self, pair: Pair) -> PairResult:
        self.counters.lost += 1
        return PairResult(pair.dst_slot, LinkFailure.PEER_LOST, "lost by the faulty link")

    def _spoil(self, pair: Pair, result: PairResult) -> PairResult:
        """Tear the pair, or report it early; both leave honest checksums of wrong bytes."""
        tears, early = self._happens(self.faults.tear), self._happens(self.faults.early)
        if result.failure is not None or pair.length_bytes == 0 or not (tears or early):
            return result
        view = self._arena.payload(pair.dst_slot)[: pair.length_bytes]
        if tears:
            self.counters.torn += 1
            start = self._rng.randrange(pair.length_bytes)
            np.invert(view[start:], out=view[start:])
        else:
            self.counters.early += 1
            start = pair.length_bytes // 2
            self._missing.append(_Missing(pair.dst_slot, start, view[start:].copy()))
            np.invert(view[start:], out=view[start:])
        return PairResult(pair.dst_slot, digester(self._arena.layout.checksum).checksum(view))

    def _complete(self) -> None:
        """The missing halves of what was reported early arrive."""
        for missing in self._missing:
            view = self._arena.payload(missing.slot)[missing.start :]
            np.copyto(view[: missing.content.nbytes], missing.content)
        self._missing.clear()

    def headers(self, region: Region, slots: Sequence[int], deadline_s: float) -> Headers | LinkError:
        with self._lock:
            self._complete()
            return self._cut(region, deadline_s) or self._link.headers(region, slots, deadline_s)

    def quiet(self, token: QuietToken) -> bool:
        """A late pair arrives, about every second time it is asked for, unless its way is partitioned."""
        with self._lock:
            late = self._late.get(token)
            if late is None:
                return token >= _FIRST_TOKEN or self._link.quiet(token)
            if late.region.holder in self._partitioned or self._happens(0.5):
                return False
            self._link.fetch(late.region, [late.pair], 1.0)
            self.counters.late += 1
            del self._late[token]
            return True

    def fence(self) -> LinkError | None:
        with self._lock:
            self._late.clear()
            self._missing.clear()
            return self._link.fence()

    def close(self) -> None:
        self.fence()
        self._link.close()
