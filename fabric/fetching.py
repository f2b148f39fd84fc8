"""The fetch desk: objects of shares on their way from other holders, from the source's pin to the copy that stands.

::

    pin at the source -> transfer -> re-read the source's headers -> seal, install
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from .context import HolderContext
from .effects import Moved, Pair, StartTransfer, TransferDone, TransferFault
from .expected import Measured, Work
from .kinds import Reason
from .lifecycle import State
from .messages import BadCopy, Fetch, Objects, PinEnd, PinEnded, PinReply, PinRequest, SourceRun
from .objects import Obj
from .shares import Arriving, Part, Source
from .tally import Outcome, Way


class FetchDesk:
    """All fetches of one holder. ``shares``: the shares in progress; ``advance``: told of each that may go on."""

    def __init__(self, ctx: HolderContext, shares: Mapping[str, Part], advance: Callable[[Part], None]) -> None:
        self.ctx = ctx
        self.shares = shares
        self._advance = advance
        self._transfers: dict[int, tuple[Part, Source, dict[int, Arriving], float]] = {}
        self._quarantined: dict[int, list[Obj]] = {}

    def begin(self, part: Part, source: Source) -> None:
        ctx = self.ctx
        message = PinRequest(
            part.request.op,
            source.incarnation,
            part.request.prompt,
            tuple(fetch.objects for fetch in source.fetches),
            part.request.revisions,
            part.request.abis,
            False,
            True,
            ctx.config.pins_s,
        )
        ctx.send(source.holder, message)
        source.asked_s = ctx.now
        deadline_s = ctx.now + ctx.config.request_timeout_s
        if any(bytes(8) in _versions(fetch) for fetch in source.fetches):
            deadline_s += ctx.config.recovery_wait_s  # the source restores it from its tier first
        ctx.wake_at(deadline_s, lambda: self._source_silent(part, source))

    def hurry(self, obj: Obj, wanted_s: float) -> None:
        """A request joined the fetch of this object: its share's bytes are wanted by then at the latest."""
        for part in self.shares.values():
            if part.wanted_s > wanted_s and any(a.obj is obj for s in part.sources.values() for a in s.arriving):
                part.wanted_s = wanted_s
                self.ctx.hurried |= {token: wanted_s for token, (of, *_) in self._transfers.items() if of is part}

    def pin_reply(self, peer: str, message: PinReply) -> None:
        part = self.shares.get(message.op)
        source = part.sources.get(peer) if part is not None else None
        if part is None or source is None or source.ended:
            if message.refused is None and message.runs:
                self.ctx.send(peer, PinEnd(message.op, ()))
            return
        if source.transferring or any(a.source_slot >= 0 for a in source.arriving):
            return
        if message.refused is not None:
            part.truth.extend(message.truth)
            part.bad.extend(message.bad)
            if message.refused is Reason.HOLDER_LOST:
                part.lost.append(peer)
            self._source_failed(part, source, message.refused)
            return
        if not self._promises_fit(part, source, message.runs):
            self.ctx.send(peer, PinEnd(message.op, ()))
            self._source_failed(part, source, Reason.VERSION_CHANGED)
            return
        restored = sum(map(self._tier_bytes, source.fetches))
        self.ctx.far_tiers.done(source.holder, restored, source.asked_s, self.ctx.now)
        self._transfer(part, source, source.arriving)

    def _tier_bytes(self, fetch: Fetch) -> int:
        """Bytes of what had no version, and so had to be restored at its source first."""
        return _versions(fetch).count(bytes(8)) * self.ctx.model.groups[fetch.objects.group].block_bytes

    def _promises_fit(self, part: Part, source: Source, runs: tuple[SourceRun, ...]) -> bool:
        """Take the promised slots, versions and checksums; False where they are not what was asked for."""
        at = {(a.obj.group, a.obj.shard, a.index): a for a in source.arriving}
        for run in runs:
            for place, index in enumerate(run.slots.indices):
                arriving = at.pop((run.slots.group, run.slots.shard, index), None)
                if arriving is None or run.lengths[place] > self.ctx.model.groups[run.slots.group].block_bytes:
                    return False
                arriving.source_slot = int.from_bytes(run.slots.slots[place * 4 : place * 4 + 4], "little")
                arriving.version = run.slots.versions[place * 8 : place * 8 + 8]
                arriving.checksum = run.checksums[place * 16 : place * 16 + 16]
                arriving.obj.length = run.lengths[place]
                arriving.obj.revision = run.revisions[place]
                arriving.obj.abi = run.abis[place]
                if not part.usable(arriving.obj, arriving.revision):
                    return False
        return not at

    def _transfer(self, part: Part, source: Source, arriving: list[Arriving]) -> None:
        ctx = self.ctx
        token = ctx.number()
        source.transferring += 1
        self._transfers[token] = (part, source, {a.obj.slot: a for a in arriving}, ctx.now)
        pairs = tuple(Pair(a.source_slot, a.obj.slot, a.obj.length) for a in arriving)
        for a in arriving:
            a.tries += 1
        deadline_s = ctx.now + ctx.config.transfer_timeout_s
        ctx.do(StartTransfer(token, source.holder, source.incarnation, pairs, deadline_s, part.wanted_s))

    def transferred(self, event: TransferDone) -> bool:
        """Bytes of a fetch arrived, or did not; False if the transfer is none of this desk's."""
        entry = self._transfers.pop(event.token, None)
        if entry is None:
            return False
        part, source, arriving, since_s = entry
        source.transferring -= 1
        again, landed_bytes = [], 0
        for moved in event.moved:
            a = arriving[moved.slot]
            if not moved.quiet:
                self._quarantine(event.token, a)
            elif self.landed_whole(a, moved):
                a.landed = moved.checksum
                part.moved_bytes[a.obj.group] = part.moved_bytes.get(a.obj.group, 0) + a.obj.length
                landed_bytes += a.obj.length
            elif moved.fault is not TransferFault.PEER_LOST and a.tries <= self.ctx.config.transfer_retries:
                again.append(a)
            else:
                a.fault = Reason.HOLDER_LOST if moved.fault is TransferFault.PEER_LOST else Reason.TRANSFER_FAILED
        if landed_bytes and not again:
            self.ctx.learn(Measured(Work.TRANSFER, landed_bytes, self.ctx.now - since_s, source.holder))
        if again:
            self.ctx.counters["transfer_retries"] += len(again)
            self._transfer(part, source, again)
        elif not source.transferring:
            self._end_pins(part, source)
        return True

    def landed_whole(self, a: Arriving, moved: Moved) -> bool:
        """The bytes that landed are the promised ones, by their digest."""
        return moved.fault is None and moved.checksum == a.checksum

    def _quarantine(self, token: int, a: Arriving) -> None:
        """Foreign bytes may still reach this slot: nobody gets it until that is proven over."""
        a.fault = Reason.TRANSFER_FAILED
        self.ctx.inflight.pop((a.obj.group, a.obj.shard, a.obj.digest), None)
        self.ctx.books.quarantine(a.obj)
        self._quarantined.setdefault(token, []).append(a.obj)

    def transfer_quiet(self, token: int) -> None:
        for obj in self._quarantined.pop(token, ()):
            self.ctx.books.quiet(obj)

    def _end_pins(self, part: Part, source: Source) -> None:
        ctx = self.ctx
        torn: dict[tuple[int, int], list[Arriving]] = {}
        for a in source.arriving:
            if a.fault is Reason.TRANSFER_FAILED and a.obj.state is State.FILLING:
                torn.setdefault((a.obj.group, a.obj.shard), []).append(a)
        suspect = tuple(
            Objects(g, s, tuple(a.index for a in run), b"".join(a.obj.digest for a in run))
            for (g, s), run in torn.items()
        )
        ctx.send(source.holder, PinEnd(part.request.op, suspect))
        ctx.wake_at(ctx.now + ctx.config.request_timeout_s, lambda: self._source_silent(part, source))

    def pin_ended(self, peer: str, message: PinEnded) -> None:
        """The source's headers after the transfer: unchanged versions prove what was read."""
        part = self.shares.get(message.op)
        source = part.sources.get(peer) if part is not None else None
        if part is None or source is None or source.ended or source.transferring:
            return
        source.ended = True
        part.bad.extend(message.bad)
        part.truth.extend(message.truth)
        wrong_there = {(b.group, b.shard, b.index) for b in message.bad}
        versions: dict[tuple[int, int, int], bytes] = {}
        for fetch, blob in zip(source.fetches, message.versions, strict=False):
            for place, index in enumerate(fetch.objects.indices):
                versions[fetch.objects.group, fetch.objects.shard, index] = blob[place * 8 : place * 8 + 8]
        stood = []
        for a in source.arriving:
            key = (a.obj.group, a.obj.shard, a.index)
            if a.fault is None and self.unchanged_at_source(a, versions.get(key, b"")):
                stood.append(a)
                continue
            moved = bool(message.truth) and versions.get(key) == bytes(8)
            reason = Reason.VERSION_CHANGED if moved or a.fault is None else a.fault
            if key not in wrong_there and reason is not Reason.VERSION_CHANGED:
                part.bad.append(BadCopy(source.holder, *key, reason, False))
            self._arriving_failed(part, a, reason)
        for a in stood:
            self._arrived(part, a)
        self._advance(part)

    def unchanged_at_source(self, a: Arriving, version: bytes) -> bool:
        """The source slot still bore the promised version after the last byte was read."""
        return version == a.version and bool(version)

    def _arrived(self, part: Part, a: Arriving) -> None:
        books = self.ctx.books
        books.seal(a.obj, a.checksum)
        books.install(a.obj)
        self.ctx.inflight.pop((a.obj.group, a.obj.shard, a.obj.digest), None)
        self.ctx.tally.recovery(Way.FETCH, a.obj.kind, Outcome.SUCCEEDED)
        self.ctx.counters["fetched_objects"] += 1
        self.ctx.counters["fetched_bytes"] += a.obj.length
        books.pin(a.obj)
        part.hold(a.index, a.obj)
        part.digests[a.obj.slot] = a.landed or b""
        part.awaited -= 1
        self.ctx.arrived(a.obj, None)

    def _arriving_failed(self, part: Part, a: Arriving, reason: Reason) -> None:
        self.ctx.inflight.pop((a.obj.group, a.obj.shard, a.obj.digest), None)
        self.ctx.tally.recovery(Way.FETCH, a.obj.kind, Outcome.FAILED, reason)
        if a.obj.state is State.FILLING:
            self.ctx.books.give_up(a.obj)
        part.awaited -= 1
        part.refuse(reason, a.obj.group)
        self.ctx.arrived(a.obj, reason)

    def _source_failed(self, part: Part, source: Source, reason: Reason) -> None:
        """Nothing of this source was or will be transferred."""
        source.ended = True
        for a in source.arriving:
            self._arriving_failed(part, a, reason)
        self._advance(part)

    def _source_silent(self, part: Part, source: Source) -> None:
        """No reply in time: the source counts as lost. A running transfer has its own deadline."""
        if not source.ended and not source.transferring and self.shares.get(part.request.op) is part:
            part.lost.append(source.holder)
            self._source_failed(part, source, Reason.HOLDER_LOST)

    def unreachable(self, peer: str, op: str) -> None:
        part = self.shares.get(op)
        source = part.sources.get(peer) if part is not None else None
        if part is not None and source is not None:
            self._source_silent(part, source)

    def in_hand(self) -> Iterator[Obj]:
        """Every object whose slot a fetch answers for, landing or not yet quiet."""
        for part in self.shares.values():
            for source in part.sources.values():
                yield from (a.obj for a in source.arriving)
        for objects in self._quarantined.values():
            yield from objects


def _versions(fetch: Fetch) -> list[bytes]:
    return [fetch.versions[i : i + 8] for i in range(0, len(fetch.versions), 8)]
