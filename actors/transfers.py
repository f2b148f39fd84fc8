"""What a holder fetches: over the best link that both sides have, or from slot to slot of its own arena."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

import msgpack

from ..fabric.effects import Event, Moved, StartTransfer, TransferDone, TransferFault, TransferQuiet
from ..fabric.kinds import FabricError, WireError
from ..fabric.messages import Regions, RegionsRequest
from ..transport.link import Link, LinkFailure, LinkKind, Pair, PairResult, QuietToken, Region, preferred
from ..transport.payloads import Payloads, SlotCopy
from .clock import Clock
from .doors import UNSPOILT, TransferDoor
from .mesh import Mesh

logger = logging.getLogger(__name__)

T = TypeVar("T")
QUIET_POLL_S = 0.05


class InThread(Protocol):
    """Runs a call off the event loop."""

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]: ...


class Transfers:
    """The links of one holder and what goes over them. ``feed`` takes the events that become of it."""

    def __init__(
        self,
        address: str,
        clock: Clock,
        mesh: Mesh,
        payloads: Payloads,
        *,
        door: TransferDoor | None,
        in_thread: InThread,
        feed: Callable[[Event], None],
    ) -> None:
        self.links: dict[LinkKind, Link] = {}
        self.problems: dict[str, str] = {}
        """Why a link could not start, by its name."""
        self.moved: Counter[str] = Counter()
        """Bytes by link."""
        self.moved_s: defaultdict[str, float] = defaultdict(float)
        self.last_link: dict[str, str] = {}
        """The link that each peer was last read over."""
        self._regions: dict[tuple[str, int], tuple[Region, ...]] = {}
        self.address, self.clock, self.mesh, self.payloads, self.door = address, clock, mesh, payloads, door
        self._in_thread, self._feed = in_thread, feed

    def regions(self) -> tuple[bytes, ...]:
        """What a peer needs to read this holder's memory, one record a link."""
        return tuple(msgpack.packb(link.region().to_plain()) for link in self.links.values())

    async def close(self) -> None:
        """End the links."""
        for link in self.links.values():
            await self._in_thread(link.close)

    async def run(self, effect: StartTransfer) -> None:
        """Carry one transfer out, and feed what became of it."""
        if effect.source == self.address:
            moved = await self._in_thread(lambda: self._copy_here(effect))
            self._feed(TransferDone(effect.token, moved))
            return
        spoil = UNSPOILT if self.door is None else self.door.next(effect, self.mesh.unreachable)
        carried = [p for p in effect.pairs if p.slot not in spoil.failing]
        pairs = [Pair(p.source_slot, p.slot, p.length) for p in carried]
        began_s = time.monotonic()
        results = spoil.fault or await self._over_links(effect, pairs)
        if isinstance(results, TransferFault):
            self._feed(TransferDone(effect.token, tuple(Moved(p.slot, None, results) for p in effect.pairs)))
            return
        kind, landed = results
        self.last_link = {a: k for a, k in self.last_link.items() if a in self.mesh.members} | {effect.source: kind}
        self.moved_s[kind] += time.monotonic() - began_s
        moved = tuple(_moved(result) for result in landed)
        self.moved[kind] += sum(p.length for p, m in zip(carried, moved, strict=True) if m.checksum is not None)
        if self.door is not None:
            moved, late = self.door.spoil(spoil, moved, {p.slot: p.length for p in carried})
            moved += tuple(Moved(slot, None, TransferFault.FAILED) for slot in spoil.failing)
            if late:
                asyncio.get_running_loop().call_soon(self.door.land, late)
        self._feed(TransferDone(effect.token, moved))
        tokens = [r.token for r in landed if r.token is not None]
        if tokens:
            await self._until_quiet(effect.token, LinkKind(kind), tokens)

    async def _over_links(
        self, effect: StartTransfer, pairs: list[Pair]
    ) -> tuple[str, list[PairResult]] | TransferFault:
        """Over the best link that connects; once more with fresh regions where the peer's link began anew."""
        if not pairs:
            return TransferFault.FAILED
        key = (effect.source, effect.incarnation)
        while True:
            known = key in self._regions
            left = self.clock.left(effect.deadline_s)
            try:
                regions = await self._regions_of(effect.source, effect.incarnation, left)
            except FabricError as error:
                logger.info("%s: its regions are not known: %s", effect.source, error)
                return TransferFault.PEER_LOST
            try:
                kind, landed = await self._in_thread(partial(self._fetch, regions, pairs, effect.deadline_s))
            except FabricError as error:
                logger.info("transfer from %s: %s", effect.source, error)
                kind, landed = "", []
            lost = not landed or any(r.failure in _FROM_ANEW for r in landed)
            if lost:
                self._regions.pop(key, None)
            if lost and known and all(r.token is None for r in landed):
                continue
            return (kind, landed) if landed else TransferFault.FAILED

    def _copy_here(self, effect: StartTransfer) -> tuple[Moved, ...]:
        """In a thread: from slot to slot of this arena."""
        failing = frozenset() if self.door is None else self.door.failing_copies(effect)
        copies = [SlotCopy(p.source_slot, p.slot, p.length) for p in effect.pairs if p.slot not in failing]
        try:
            landed = dict(zip((c.target for c in copies), self.payloads.copy(copies), strict=True))
        except RuntimeError as error:  # what torch raises where a GPU fails
            logger.warning("copies within the arena failed: %s", error)
            landed = {}
        return tuple(
            Moved(p.slot, landed[p.slot]) if p.slot in landed else Moved(p.slot, None, TransferFault.FAILED)
            for p in effect.pairs
        )

    def _fetch(self, regions: tuple[Region, ...], pairs: list[Pair], deadline_s: float) -> tuple[str, list[PairResult]]:
        """In a thread: over the best way that connects. Raises FabricError where none does."""
        problems = []
        for link, region in preferred(self.links, regions):
            left = self.clock.left(deadline_s)
            if left <= 0:
                break
            error = link.connect(region, left)
            if error is None:
                return str(link.kind), link.fetch(region, pairs, max(self.clock.left(deadline_s), 0.001))
            problems.append(f"{link.kind}: {error.detail}")
        raise FabricError("; ".join(problems) or "no link that both sides have")

    async def _regions_of(self, source: str, incarnation: int, timeout_s: float) -> tuple[Region, ...]:
        known = self._regions.get((source, incarnation))
        if known is None:
            reply = await self.mesh.ask(source, RegionsRequest("regions"), timeout_s)
            if not isinstance(reply, Regions) or reply.incarnation != incarnation:
                raise WireError(f"{source}: another incarnation answers")
            try:
                known = tuple(Region.from_plain(msgpack.unpackb(raw, raw=False)) for raw in reply.regions)
            except (ValueError, TypeError, msgpack.UnpackException) as error:
                raise WireError(f"{source}: its regions are no records: {error}") from None
            for key in [key for key in self._regions if key[0] == source]:
                del self._regions[key]
            self._regions[source, incarnation] = known
        return known

    async def _until_quiet(self, token: int, kind: LinkKind, tokens: list[QuietToken]) -> None:
        link = self.links[kind]
        while not all(link.quiet(t) for t in tokens):  # noqa: ASYNC110 - a link is polled, it cannot call back
            await asyncio.sleep(QUIET_POLL_S)
        self._feed(TransferQuiet(token))


_FROM_ANEW = frozenset({LinkFailure.PEER_LOST, LinkFailure.REFUSED, LinkFailure.UNAVAILABLE})
"""Failures that a peer's link causes when it was started again: its region is another now."""

_FAULTS = {
    LinkFailure.PEER_LOST: TransferFault.PEER_LOST,
    LinkFailure.REFUSED: TransferFault.PEER_LOST,
    LinkFailure.TIMED_OUT: TransferFault.TIMED_OUT,
}


def _moved(result: PairResult) -> Moved:
    if result.checksum is not None:
        return Moved(result.dst_slot, result.checksum)
    failure = result.failure
    fault = TransferFault.FAILED if failure is None else _FAULTS.get(failure, TransferFault.FAILED)
    return Moved(result.dst_slot, None, fault, quiet=result.token is None)
