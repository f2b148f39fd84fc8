"""Warming: a holder that has just joined gets what is worth most elsewhere, within bytes and time.

One that has much is asked, and offers as a drain offers, but keeps what it has. The newcomer takes it by the
same intake, with the same proofs, and only into room: what it was asked for meanwhile is worth more to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .candidates import Candidate
from .context import HolderContext
from .drain import BATCH_BYTES_MAX, BATCH_OBJECTS_MAX, DrainDesk
from .ladder import entry_of
from .messages import Offer, Offered, Taken, Warm
from .passport import Abi

WARMINGS_MAX = 8


@dataclass(slots=True)
class Warming:
    """One newcomer being warmed: what it is still to be offered, until when."""

    target: str
    until_s: float
    queue: deque[Candidate] = field(default_factory=deque)


class WarmDesk:
    """All newcomers that this holder warms."""

    def __init__(self, ctx: HolderContext, drain: DrainDesk) -> None:
        self.ctx = ctx
        self.drain = drain
        self.open: dict[str, Warming] = {}
        """By the op of the offer under way."""

    def asked(self, message: Warm) -> None:
        """Offer the newcomer what is worth most here, one offer after another."""
        if self.ctx.draining or len(self.open) >= WARMINGS_MAX:
            return
        warming = Warming(message.holder, self.ctx.now + message.within_s)
        left = message.bytes_max
        for candidate in self.drain.candidates():
            if candidate.obj.shard in message.shards and candidate.worth > 0 and candidate.obj.length <= left:
                left -= candidate.obj.length
                warming.queue.append(candidate)
        self._next(warming)

    def _next(self, warming: Warming) -> None:
        ctx = self.ctx
        taken: list[Candidate] = []
        abis: dict[int, Abi] = {}
        size_bytes = 0
        while warming.queue and len(taken) < BATCH_OBJECTS_MAX and size_bytes < BATCH_BYTES_MAX:
            candidate = warming.queue.popleft()
            obj = candidate.obj
            if candidate.there and abis.setdefault(obj.group, obj.abi) == obj.abi:
                taken.append(candidate)
                size_bytes += obj.length
        if not taken or ctx.now >= warming.until_s or ctx.draining:
            return
        op = ctx.op()
        self.open[op] = warming
        offered = tuple(Offered(entry_of(c.obj), c.worth, c.obj.base, c.obj.home) for c in taken)
        ctx.send(warming.target, Offer(op, ctx.incarnation, warming.until_s - ctx.now, offered))
        ctx.wake_at(warming.until_s, lambda: self._over(op))

    def _over(self, op: str) -> None:
        """Its time is over, answered or not."""
        self.open.pop(op, None)

    def taken(self, peer: str, message: Taken) -> bool:
        """On to the next offer, unless there was no room for this one; False if it is none of this desk's."""
        warming = self.open.get(message.op)
        if warming is None or warming.target != peer:
            return False
        del self.open[message.op]
        if not message.no_room:
            self._next(warming)
        return True
