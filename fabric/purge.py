"""The purge desk: takes state out of every tier of one holder, or bars it from being served.

What matches is invisible at once, with its copies in host memory and every extent that holds bytes of
it; leases over it end, and their readers' next check refuses. What a graph froze, an open attempt
holds or a transfer still fills goes when that ends: ``left`` counts it, and who asked asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .arena import Memory, SlotState
from .context import HolderContext
from .disk import DiskDesk
from .effects import DeleteExtent
from .kinds import Reason
from .leases import LeaseRecord
from .messages import Audited, Done, Purge, Purged
from .objects import Obj, split
from .stores import StoreDesk
from .tally import AuditOutcome

Release = Callable[[int], None]


class PurgeDesk:
    """Purges, quarantines and audits of one holder."""

    def __init__(self, ctx: HolderContext, disk: DiskDesk, stores: StoreDesk, release: Release) -> None:
        self.ctx = ctx
        self.disk = disk
        self.stores = stores
        self._release = release

    # --- purge ---------------------------------------------------------------------------------

    def purge(self, message: Purge) -> Purged:
        """One pass; the next one says whether anything is left."""
        if message.quarantine:
            return self._bar(message)
        matches = _matcher(message)
        self.stores.supersede(matches)
        leases = self._end_leases(matches)
        found = [obj for obj in self._visible() if matches(obj)]
        slots = [slot for obj in found for slot in (obj.slot, obj.below) if slot >= 0]
        nbytes = sum(obj.length for obj in found)
        for obj in found:
            self.ctx.books.retire(obj)
        extents = self._delete_extents(message, matches)
        self.disk.forget_dropped()
        self._zero(slots)
        left = sum(matches(obj) for obj in self.ctx.books.owner if obj is not None)
        left += sum(matches(obj) for obj in self._visible() if obj.slot < 0)
        return Purged(message.request, self.ctx.config.holder, len(found), nbytes, extents, leases, left)

    def _visible(self) -> Iterator[Obj]:
        for table in self.ctx.books.table.values():
            yield from table.values()

    def _end_leases(self, matches: Callable[[Obj], bool]) -> int:
        """End what is leased of it, but for graphs: those may replay at any time."""
        ended = 0
        for record in list(self.ctx.leases.live.values()):
            if not record.graph and any(matches(obj) for obj in self._leased(record)):
                self._release(record.lease)
                ended += 1
        return ended

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

    def _zero(self, slots: list[int]) -> None:
        """Overwrite what is free now, where it lies in host memory."""
        arena, owner = self.ctx.arena, self.ctx.books.owner
        for slot in slots:
            if (
                arena.layout.memory_of(slot) is Memory.HOST
                and arena.states[slot] == SlotState.FREE
                and owner[slot] is None
            ):
                arena.payload(slot)[:] = 0

    # --- quarantine and audits -----------------------------------------------------------------

    def _bar(self, message: Purge) -> Purged:
        """Never serve it again: acquires are cut with ``quarantined`` until it is stored anew."""
        matches = _matcher(message)
        found = [obj for obj in self._visible() if matches(obj) and obj.bad is not Reason.QUARANTINED]
        leases = self._end_leases(matches)
        for obj in found:
            self.ctx.books.bar(obj, Reason.QUARANTINED)
        self.disk.forget_dropped()
        nbytes = sum(obj.length for obj in found)
        return Purged(message.request, self.ctx.config.holder, len(found), nbytes, 0, leases, 0)

    def audited(self, client: str, message: Audited) -> None:
        """Count it; a mismatch bars what was leased, here and at once. Other holders' copies are the supervisor's to bar."""
        record = self.ctx.leases.live.get(message.lease)
        if record is None:
            self.ctx.send(client, Done(message.request, Reason.LEASE_EXPIRED, ""))
            return
        outcome = AuditOutcome(message.outcome)
        self.ctx.tally.audits[outcome] += 1
        if outcome is AuditOutcome.MISMATCH:
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
