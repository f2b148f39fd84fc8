"""The slab desk: empties a slab of the pool that needs it least, and hands it to the one that needs it most.

::

    look -> close a slab -> what is worth most moves to other slots of its pool, the least worth of the pool leaves
         -> all its slots are free -> re-headered, the other pool's
         -> something there stays pinned, or a live request needs the slots: opened again

A slab is emptied by copies within the pool, a few at a time, that nobody waits for: they go last under a byte budget.
What is leased, read, frozen, captured by a graph or in quarantine is never moved: a slab with any of it is not
chosen, and where it comes to that meanwhile the slab stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .context import HolderContext
from .effects import Pair, StartTransfer, TransferDone
from .graphs import GraphDesk
from .holdings import NOBODY
from .objects import Obj
from .pools import Key, Pool
from .slab_balance import Stake, choose, floor_of

COPIES_MAX = 64
"""Objects that move at a time."""
PATIENCE_S = 30.0
"""How long a slab may take to become empty."""
RETRY_S = 0.25
STEP_SHARE = 1 / 12
"""By how much a pool may grow, or shrink, on the same evidence, beyond one slab: many small slabs follow a mix as fast as few."""
EVIDENCE_LIVES = 8.0
"""How old evidence may get that was not enough for a move, in times for which it is gathered at least."""


@dataclass(slots=True)
class Giving:
    """A slab on its way from one pool to another. ``more``: slabs that follow it on the same evidence."""

    slab: int
    giver: Key
    taker: Key
    until_s: float
    more: int


class SlabDesk:
    """Moves slabs between the readers' pools of one holder; without slabs, or with one pool, it does nothing."""

    def __init__(self, ctx: HolderContext, graphs: GraphDesk) -> None:
        self.ctx = ctx
        self.graphs = graphs
        books = ctx.books
        slabs = books.slabs
        self.stakes = {key: Stake(key, n := len(slabs.of(key)), floor_of(n)) for key in books.pools} if slabs else {}
        self.giving: Giving | None = None
        self.moved_slabs = 0
        self._copying: dict[int, dict[int, tuple[Obj, Obj]]] = {}
        """By transfer: old and new object, by the new one's slot."""
        self._restless: dict[int, list[Obj]] = {}
        self._since_s = 0.0
        self._hits_before = 0

    def start(self) -> None:
        if len(self.stakes) > 1:
            self.ctx.books.losses.follow(sum(pool.slots for pool in self.ctx.books.pools.values()) // len(self.stakes))
            self._wake()

    def _wake(self) -> None:
        self.ctx.wake_at(self.ctx.now + self.ctx.config.slab_look_s, self._look)

    def _look(self) -> None:
        books, now = self.ctx.books, self.ctx.now
        lost = books.losses.taken()
        by_group = Counter(group for group, _ in self.stakes)
        for key, stake in self.stakes.items():
            pool = books.pools[key]
            stake.lost_tokens += lost[key[0]] / by_group[key[0]]
            stake.slabs = len(books.slabs.of(key))
            stake.idle_slabs = len(pool.free) // len(books.slabs.slots(key, 0))
        if self.giving is None and now >= self._since_s + self.ctx.config.slab_gather_s:
            hits = self._hits() - self._hits_before
            found = choose(list(self.stakes.values()), hits, now)
            if found is not None:
                giver, taker = found
                self._begin(giver.key, taker.key, more=int(min(giver.slabs, taker.slabs) * STEP_SHARE))
            if found is not None or now >= self._since_s + EVIDENCE_LIVES * self.ctx.config.slab_gather_s:
                self._anew()
        self._wake()

    def _hits(self) -> int:
        return self.ctx.counters["effective_hit_tokens_total"]

    def _anew(self) -> None:
        """Gather evidence anew."""
        self._since_s, self._hits_before = self.ctx.now, self._hits()
        for stake in self.stakes.values():
            stake.lost_tokens = 0.0

    # --- emptying ------------------------------------------------------------------------------

    def _begin(self, giver: Key, taker: Key, *, more: int) -> None:
        slab = self._emptiest(giver)
        if slab is None:
            return
        self.giving = Giving(slab, giver, taker, self.ctx.now + PATIENCE_S, more)
        self.ctx.books.pools[giver].close(self.ctx.books.slabs.slots(giver, slab))
        self._go_on()

    def _emptiest(self, key: Key) -> int | None:
        """The slab of a pool that is emptied with the fewest moves; None where something must stay in each."""
        books, best = self.ctx.books, None
        for slab in books.slabs.of(key):
            slots = books.slabs.slots(key, slab)
            there = [obj for slot in slots if (obj := books.owner[slot]) is not None]
            if all(obj.evictable for obj in there) and not self._captured(key, slots):
                best = min(best or (len(there), slab), (len(there), slab))
        return None if best is None else best[1]

    def _captured(self, key: Key, slots: range) -> bool:
        """Whether a graph has captured one of these slots' addresses."""
        return any(slot in slots for graph in self.graphs.graphs.values() for slot in graph.slots.get(key, {}).values())

    def _go_on(self) -> None:
        """Move what can move; hand the slab over once it is empty, or open it again."""
        giving, books = self.giving, self.ctx.books
        if giving is None:
            return
        pool, slots = books.pools[giving.giver], books.slabs.slots(giving.giver, giving.slab)
        if pool.closing != slots:  # a live request needed it
            self._end("slabs_kept")
        elif len(pool.closed) == len(slots):
            if self._captured(giving.giver, slots):
                self._end("slabs_kept")
                return
            books.slabs.hand_over(giving.slab, giving.taker)
            self.stakes[giving.giver].moves(-1, self.ctx.now)
            self.stakes[giving.taker].moves(1, self.ctx.now)
            books.losses.relieved(giving.taker[0])
            coming = books.slabs.slots(giving.taker, giving.slab)
            books.room_gained += len(coming)
            if books.last_tenants is not None:
                books.last_tenants |= dict.fromkeys(coming, NOBODY)
            self._end("slabs_moved")
            if giving.more and len(books.slabs.of(giving.giver)) > self.stakes[giving.giver].floor:
                self._begin(giving.giver, giving.taker, more=giving.more - 1)
        elif self.ctx.now >= giving.until_s or self.ctx.draining:
            self._end("slabs_kept")
        else:
            if not self._copying:
                self._copy(pool, slots)
            self.ctx.wake_at(self.ctx.now + RETRY_S, self._go_on)

    def _end(self, how: str) -> None:
        """The slab has its new owner, or stays; what is still being copied arrives all the same."""
        if self.giving is not None:
            self.ctx.books.pools[self.giving.giver].reopen()
        self.giving = None
        self.ctx.counters[how] += 1

    def _copy(self, pool: Pool, slots: range) -> None:
        """Begin to move a few of the objects in a slab; whoever is worth less makes room for them."""
        ctx, books = self.ctx, self.ctx.books
        copying: dict[int, tuple[Obj, Obj]] = {}
        for slot in slots:
            obj = books.owner[slot]
            if obj is None or not obj.evictable or len(copying) >= COPIES_MAX:
                continue
            new = obj.elsewhere()
            books.pin(obj)
            lacking = books.lacking([new])
            if lacking is None and self._has_room(pool):
                books.reserve(new)
                copying[new.slot] = (obj, new)
            else:
                books.unpin(obj)
        if copying:
            token = ctx.number()
            self._copying[token] = copying
            pairs = tuple(Pair(old.slot, slot, old.length) for slot, (old, _) in copying.items())
            deadline_s = ctx.now + ctx.config.transfer_timeout_s
            ctx.do(StartTransfer(token, ctx.config.holder, ctx.incarnation, pairs, deadline_s))

    @staticmethod
    def _has_room(pool: Pool) -> bool:
        """Whether a slot outside the slab is free, or somebody can make one free."""
        return bool(pool.free or pool.evictable)

    # --- what was copied -----------------------------------------------------------------------

    def transferred(self, event: TransferDone) -> bool:
        """Objects were copied out of the slab, or not; False if the transfer is none of this desk's."""
        copying = self._copying.pop(event.token, None)
        if copying is None:
            return False
        books = self.ctx.books
        for moved in event.moved:
            old, new = copying.pop(moved.slot)
            if not moved.quiet:
                books.quarantine(new)
                self._restless.setdefault(event.token, []).append(new)
            elif moved.fault is None and moved.checksum == old.checksum and books.is_current(old) and old.pins == 1:
                books.moved(old, new)
            else:
                books.give_up(new)  # what lies in memory is judged where it is used
            books.unpin(old)
        self._go_on()
        return True

    def quiet(self, token: int) -> None:
        """Proven: no byte of this copy can still arrive."""
        for obj in self._restless.pop(token, ()):
            self.ctx.books.quiet(obj)

    def pinned(self) -> Iterator[Obj]:
        """Every object pinned while it is copied."""
        for copying in self._copying.values():
            yield from (old for old, _ in copying.values())

    def in_hand(self) -> Iterator[Obj]:
        """Every object whose slot a copy answers for."""
        for copying in self._copying.values():
            yield from (new for _, new in copying.values())
        for objects in self._restless.values():
            yield from objects
