"""The purge desk: takes state out of every tier of one holder, or bars it from being served.

What matches is invisible at once, with its copies in host memory and every extent that holds bytes of
it; leases over it end, and their readers' next check refuses. What a graph froze, an open attempt
holds or a transfer still fills goes when that ends: ``left`` counts it, and who asked asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

from .arena import Memory, SlotState
from .context import LIFE_SHIFT, HolderContext
from .disk import DiskDesk
from .effects import DeleteExtent
from .kinds import Reason
from .leases import LeaseRecord
from .messages import Audited, Done, Purge, Purged
from .objects import Obj, split
from .slices import sliced
from .stores import StoreDesk
from .tally import AuditOutcome

Release = Callable[[int], None]
Pass = Generator[None, None, Purged]
"""A pass over all that a holder has, in slices: whoever drives it lets requests in between."""
SLICE_OBJECTS = 256


class PurgeDesk:
    """Purges, quarantines and audits of one holder."""

    def __init__(self, ctx: HolderContext, disk: DiskDesk, stores: StoreDesk, release: Release) -> None:
        self.ctx = ctx
        self.disk = disk
        self.stores = stores
        self._release = release

    # --- purge ---------------------------------------------------------------------------------

    def purge(self, message: Purge) -> Pass:
        """One pass, a slice a step; the next pass says whether anything is left.

        What a slice comes to is invisible from then on, and is overwritten in the same slice where nothing pins it.
        """
        if message.quarantine:
            return (yield from self._bar(message))
        matches = _matcher(message)
        self.stores.supersede(matches)
        objects = nbytes = 0
        pinned: list[int] = []
        for found in self._slices(matches):
            slots = [slot for obj in found for slot in (obj.slot, obj.below) if slot >= 0]
            objects, nbytes = objects + len(found), nbytes + sum(obj.length for obj in found)
            for obj in found:
                self.ctx.books.retire(obj)
            self.disk.forget_dropped()
            pinned += self._zero(slots)
            yield
        leases = 0
        for ended in self._end_leases(matches):
            leases += ended
            yield
        extents = self._delete_extents(message, matches)
        self.disk.forget_dropped()
        for held in sliced(pinned, SLICE_OBJECTS):
            self._zero(held)
            yield
        left = 0
        for owned in sliced(list(self.ctx.books.owner), SLICE_OBJECTS):
            left += sum(matches(obj) for obj in owned if obj is not None)
            yield
        for found in self._slices(matches):
            left += sum(obj.slot < 0 for obj in found)
            yield
        return Purged(message.request, self.ctx.config.holder, objects, nbytes, extents, leases, left)

    def _slices(self, matches: Callable[[Obj], bool]) -> Iterator[list[Obj]]:
        """What is visible as this begins, and still is and matches as its slice comes."""
        for table in self.ctx.books.table.values():
            for some in sliced(list(table.values()), SLICE_OBJECTS):
                yield [obj for obj in some if obj.visible and matches(obj)]

    def _end_leases(self, matches: Callable[[Obj], bool]) -> Iterator[int]:
        """End what is leased of it, but for graphs: those may replay at any time. After each lease, how many were."""
        for record in list(self.ctx.leases.live.values()):
            ends = not record.graph and any(matches(obj) for obj in self._leased(record))
            if ends:
                self._release(record.lease)
            yield int(ends)

    def _leased(self, record: LeaseRecord) -> Iterator[Obj]:
        owner = self.ctx.books.owner
        for slot in record.proof.claim.slots.tolist():
            obj = owner[slot]
            if obj is not None:
                yield obj

    def _delete_extents(self, message: Purge, matches: Callable[[Obj], bool]) -> int:
        """Delete every extent that has, or once had, bytes of what is purged; its other objects are lost with it."""
        book = self.disk.extents
        doomed = book.with_bytes_of(
            matches,
            lambda namespace, tenant: message.tenant in (None, tenant) and message.namespace in (b"", namespace),
            chain=bool(message.keys),
        )
        for extent in doomed:
            self.ctx.do(DeleteExtent(extent))
        self.disk.lose_everywhere(doomed)
        return len(doomed)

    def _zero(self, slots: Sequence[int]) -> list[int]:
        """Overwrite what is free now, where it lies in host memory; the slots that something still holds."""
        arena, owner, host, free = self.ctx.arena, self.ctx.books.owner, Memory.HOST, int(SlotState.FREE)
        held = []
        for slot in slots:
            if arena.layout.memory_of(slot) is not host:
                continue
            if arena.states[slot] == free and owner[slot] is None:
                arena.payload(slot)[:] = 0
            else:
                held.append(slot)
        return held

    # --- quarantine and audits -----------------------------------------------------------------

    def _bar(self, message: Purge) -> Pass:
        """Never serve it again: acquires are cut with ``quarantined`` until it is stored anew."""
        matches = _matcher(message)
        objects = nbytes = leases = 0
        for found in self._slices(matches):
            fresh = [obj for obj in found if obj.bad is not Reason.QUARANTINED]
            objects, nbytes = objects + len(fresh), nbytes + sum(obj.length for obj in fresh)
            for obj in fresh:
                self.ctx.books.bar(obj, Reason.QUARANTINED)
            self.disk.forget_dropped()
            yield
        for ended in self._end_leases(matches):
            leases += ended
            yield
        return Purged(message.request, self.ctx.config.holder, objects, nbytes, 0, leases, 0)

    def audited(self, client: str, message: Audited) -> None:
        """Count it; a mismatch bars what was leased, here and at once. Other holders' copies are the supervisor's to bar,
        and so are this one's where the lease has ended: what its slots hold by then is another matter.
        """
        leases = self.ctx.leases
        record = leases.live.get(message.lease)
        if record is None and not self.ctx.incarnation << LIFE_SHIFT < message.lease <= leases.fence:
            self.ctx.send(client, Done(message.request, Reason.LEASE_EXPIRED, "no lease of this holder's life"))
            return
        outcome = AuditOutcome(message.outcome)
        if record is None and outcome is not AuditOutcome.MISMATCH:
            outcome = AuditOutcome.LATE
        self.ctx.tally.audits[outcome] += 1
        if record is not None and outcome is AuditOutcome.MISMATCH:
            for obj in list(self._leased(record)):
                if obj.visible:
                    self.ctx.books.bar(obj, Reason.QUARANTINED)
        self.ctx.send(client, Done(message.request, None, ""))


def _matcher(message: Purge) -> Callable[[Obj], bool]:
    digests = {digest for _, blob in message.keys for digest in split(blob)}

    def matches(obj: Obj) -> bool:
        return (
            (message.tenant is None or obj.tenant == message.tenant)
            and (not message.namespace or obj.namespace == message.namespace)
            and (not digests or obj.digest in digests)
        )

    return matches
