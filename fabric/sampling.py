"""The samples that a holder takes of itself: totals since its life began (:mod:`series`)."""

from __future__ import annotations

from .context import HolderContext
from .disk import DiskDesk
from .series import Occupancy, Sample, Timeline


class Sampler:
    """Takes a sample whenever one is due by the clock of the steps; one more whenever it is asked."""

    def __init__(self, ctx: HolderContext, disk: DiskDesk) -> None:
        self.ctx = ctx
        self.disk = disk
        self.timeline = Timeline()
        self._began_s: float | None = None

    def step(self) -> None:
        """After each step: keep a sample if it is time for one."""
        if self._began_s is None:
            self._began_s = self.ctx.now
        if self.ctx.now - self._began_s >= self.timeline.due_s:
            self.timeline.add(self.sample())

    def series(self) -> list[Sample]:
        """All samples kept, and one of this moment; in place of the last kept where that is hardly older."""
        last, kept = self.sample(), self.timeline.samples
        close = len(kept) > 1 and last.at_s - kept[-1].at_s < self.timeline.every_s / 2
        return [*(kept[:-1] if close else kept), last]

    def sample(self) -> Sample:
        """The totals of this moment."""
        ctx = self.ctx
        count = ctx.counters
        return Sample(
            at_s=ctx.now - (ctx.now if self._began_s is None else self._began_s),
            requests=count["acquires_total"],
            tokens=count["asked_tokens_total"],
            hash_hit_tokens=count["hash_hit_tokens_total"],
            usable_hit_tokens=count["usable_hit_tokens_total"],
            effective_hit_tokens=count["effective_hit_tokens_total"],
            lost_tokens=ctx.tally.lost_tokens,
            lost_by_kind=ctx.tally.lost_by_kind,
            occupancy_bytes=self._occupancy(),
            evictions=ctx.books.victims + count["extents_evicted"],
            restores=count["restored_objects"],
            moved_bytes=count["fetched_bytes"],
            restored_bytes=count["restored_bytes"],
            written_bytes=count["written_bytes"],
            recovery=tuple(ctx.recovery.counts),
            lease_life=tuple(ctx.leases.life.counts),
        )

    def _occupancy(self) -> Occupancy:
        """Bytes of owned slots by kind and tier, and of what the disk holds by kind."""
        ctx = self.ctx
        found: Occupancy = {}
        for layout in ctx.arena.layout.pools:
            readers = layout.tier is ctx.arena.layout.readers_tier
            pools = ctx.books.pools if readers else self.disk.host.pools.pools
            pool = pools[layout.group, layout.shard]
            here = found.setdefault(ctx.model.groups[layout.group].kind, {})
            here[layout.tier] = here.get(layout.tier, 0) + pool.used * layout.slot_bytes
        for (kind, tier), nbytes in self.disk.extents.bytes_held.items():
            if nbytes:
                found.setdefault(kind, {})[tier] = nbytes
        return found
