"""The drain desk: a holder that goes moves what is worth most to others, within its time and bandwidth.

    drain asked -> ASKING   which objects have a good copy elsewhere (the directory, for a bounded time)
                -> MOVING   the rest offered in order of worth, batch by batch, to holders with room
                -> WAITING  all moved or refused; leases run out
                -> DONE     at the deadline at the latest: what is left is dropped, leases are cut, the report told

What was moved makes room here first: into it comes, once all that was in memory is on its way, what lies below memory
and nowhere else, the last used first, and is moved likewise. With a store that all nodes share (G4) the drain waits until
what is on its way there has arrived, and counts what the store has as elsewhere. A batch is as large as what is measured to go within BATCH_S, and none
is begun that would not be over by the deadline: half a batch is worth nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, groupby

from .candidates import COMING_BYTES_MAX, COMING_OBJECTS_MAX, IN_MEMORY, Below, Candidate, Key, Sum, key_of
from .context import HolderContext
from .events import runs_of
from .ladder import entry_of
from .messages import CopiesFound, CopiesLookup, Drain, Drained, DrainTarget, Offer, Offered, Taken
from .objects import Obj, place_of
from .passport import Abi
from .segments import Router
from .wakes import Wake

SUPERVISOR = "supervisor"
BATCH_S = 0.5
BATCH_BYTES_FIRST = 128 << 10
BATCH_BYTES_MAX = 8 << 20
BATCH_OBJECTS_MAX = 512
BATCHES_A_TARGET = 2
TRIES_MAX = 3
LOOKUP_OBJECTS_MAX = 4096
LOOKUPS_AHEAD = 4
COPIES_WAIT_S = 2.0
COPIES_WAIT_SHARE = 0.1
"""Which part of a drain's time may pass before moving begins without knowing of copies elsewhere."""
RATE_LANDINGS = 8
"""Over how many answers to offers the rate is taken."""

WORTHS_TOLD_MAX = 1 << 16


class Stage(StrEnum):
    """Where a drain is."""

    IDLE = "idle"
    ASKING = "asking"
    MOVING = "moving"
    WAITING = "waiting"
    DONE = "done"


@dataclass(slots=True)
class Batch:
    """What one holder was offered and has not answered for."""

    target: str
    candidates: list[Candidate]
    size_bytes: int
    since_s: float
    timer: Wake | None = None


class DrainDesk:
    """The one drain of a holder's life."""

    def __init__(self, ctx: HolderContext) -> None:
        self.ctx = ctx
        self.stage = Stage.IDLE
        self.number = 0
        self.report: Drained | None = None
        self.deadline_s = 0.0
        self.release: Callable[[int], None] = lambda _: None
        self.writing: Callable[[], bool] = lambda: False
        """Whether a write attempt is open."""
        self.uploading: Callable[[], bool] = lambda: False
        """Whether something of the disk's is on its way to the store that all nodes share."""
        self.in_store: Callable[[Obj], bool] = lambda _: False
        self.below = Below(ctx)
        self._seen: tuple[int, int, bool] | None = None
        self._began_s = 0.0
        self._targets: tuple[DrainTarget, ...] = ()
        self._leaving: tuple[str, ...] = ()
        self._lost: set[str] = set()
        self._no_room: set[tuple[str, int, int]] = set()
        """Holders without a free slot for a group and shard: what is worth nothing pushes nothing out there."""
        self._queue: deque[Candidate] = deque()
        self._elsewhere: set[Key] = set()
        self._asked: dict[int, list[list[Obj]]] = {}
        self._to_ask: deque[tuple[str, list[list[Obj]]]] = deque()
        self._batches: dict[str, Batch] = {}
        self._rate: float | None = None
        self._landings: deque[tuple[float, int]] = deque(maxlen=RATE_LANDINGS + 1)
        self._moved, self._copies, self._dropped = Sum(), Sum(), Sum()
        self._settled: set[Key] = set()
        """Lined up once."""
        self._counted: set[Key] = set()
        self._timer: Wake | None = None

    # --- begin ---------------------------------------------------------------------------------

    def asked(self, message: Drain) -> None:
        """Begin, or learn of other targets and another deadline; the same again is told how it ended."""
        if message.number < self.number:
            return
        self.ctx.draining = True
        if message.number == self.number and self.stage is Stage.DONE:
            self._tell()
            return
        fresh = message.number > self.number
        self._targets, self._leaving = message.targets, message.leaving
        if fresh:
            self.number = message.number
            self.deadline_s = self.ctx.now + message.within_s
            self._start(message.within_s)
        self._offer()

    def _start(self, within_s: float) -> None:
        ctx = self.ctx
        if self._timer is not None:
            self._timer.cancel()
        self._timer = ctx.wake_at(self.deadline_s, self._time_over)
        if self.stage in (Stage.ASKING, Stage.MOVING):
            return  # only the deadline is another
        self._began_s = ctx.now
        self.report = None
        self.stage = Stage.ASKING
        self._collect()
        self.below.line_up()
        self._to_ask.extend(self._lookups())
        wait_s = min(COPIES_WAIT_S, within_s * COPIES_WAIT_SHARE)
        ctx.wake_at(ctx.now + wait_s, self._begin_to_move)
        self._look_up()

    def _collect(self) -> bool:
        """Line up what is in memory and not lined up yet; whether there was anything."""
        found = [candidate for candidate in self.candidates() if candidate.key not in self._settled]
        self._settled.update(candidate.key for candidate in found)
        self._queue.extend(found)
        return bool(found)

    def candidates(self) -> list[Candidate]:
        """What is in memory and worth anything to another, what is worth most first."""
        books = self.ctx.books
        objects = [
            obj
            for table in books.table.values()
            for obj in table.values()
            if obj.state in IN_MEMORY and obj.bad is None and not obj.first_out and obj.slot >= 0
        ]
        found = [Candidate(obj, worth) for obj, worth in zip(objects, books.worths(objects), strict=True)]
        self._raise_what_they_rest_on(found)
        found.sort(key=lambda c: (-c.worth, -c.obj.last_use, c.obj.position, c.obj.group, c.obj.shard))
        return found

    def worth_of_all(self) -> list[tuple[float, int]]:
        """What a drain would find now, what is worth most first: worth a byte, and bytes of equal worth."""
        runs = groupby(self.candidates(), key=lambda candidate: candidate.worth)
        return [(worth, sum(c.obj.length for c in run)) for worth, run in runs][:WORTHS_TOLD_MAX]

    def _raise_what_they_rest_on(self, found: list[Candidate]) -> None:
        """What another rests on is worth as much: without it, nobody reaches that one."""
        home_group = self.ctx.books.leaving.structure.home_group
        at = {candidate.key: candidate for candidate in found}
        for candidate in sorted(found, key=lambda c: (c.obj.group == home_group, -c.obj.position)):
            obj = candidate.obj
            rests = [(obj.group, obj.shard, obj.base)] if obj.base else []
            if obj.home and home_group is not None:
                rests.append((home_group, obj.shard, obj.home))
            for key in rests:
                below = at.get(key)
                if below is not None:
                    below.worth = max(below.worth, candidate.worth)

    # --- copies elsewhere ----------------------------------------------------------------------

    def _lookups(self) -> Iterator[tuple[str, list[list[Obj]]]]:
        """What to ask each directory shard: runs of objects that follow one another, in bounded questions."""
        router: Router = self.ctx.router
        by_shard: dict[str, list[Obj]] = {}
        for candidate in chain(self._queue, self.below.queue):
            if candidate.obj.place is not None:
                by_shard.setdefault(router.owner(candidate.obj.place.anchor), []).append(candidate.obj)
        for shard, objects in by_shard.items():
            objects.sort(key=lambda o: (o.group, o.shard, o.place.anchor if o.place else b"", o.position))
            for at in range(0, len(objects), LOOKUP_OBJECTS_MAX):
                part = objects[at : at + LOOKUP_OBJECTS_MAX]
                yield shard, [run for _, run in runs_of(part, self.ctx.model)]

    def _look_up(self) -> None:
        """Ask on, a few questions at a time; without any left, begin to move."""
        ctx = self.ctx
        while self._to_ask and len(self._asked) < LOOKUPS_AHEAD:
            shard, runs = self._to_ask.popleft()
            ask = ctx.number()
            self._asked[ask] = runs
            told = tuple(run for run, _ in runs_of([o for run in runs for o in run], ctx.model))
            ctx.send(shard, CopiesLookup(self._op, ask, (ctx.config.holder, *self._leaving), told))
        if not self._asked and not self._to_ask:
            self._begin_to_move()

    @property
    def _op(self) -> str:
        return f"drain/{self.ctx.config.holder}/{self.ctx.incarnation}/{self.number}"

    def copies_found(self, message: CopiesFound) -> None:
        """What needs no moving: others have it."""
        runs = self._asked.pop(message.ask, None) if message.op == self._op else None
        if runs is None or len(runs) != len(message.copies):
            return
        for run, bits in zip(runs, message.copies, strict=True):
            for at, obj in enumerate(run):
                if bits >> at & 1:
                    self._elsewhere.add((obj.group, obj.shard, obj.digest))
        self._look_up()

    def _begin_to_move(self) -> None:
        if self.stage is Stage.ASKING:
            self.stage = Stage.MOVING
            self._landings.append((self.ctx.now, 0))
            self._offer()

    # --- moving --------------------------------------------------------------------------------

    def _offer(self) -> None:
        """Keep every target busy, as long as there is something to move and time to move it."""
        if self.stage is not Stage.MOVING:
            return
        begun = True
        while begun and self._queue:
            begun = False
            for target in self._targets:
                begun = self._begin_batch(target) or begun
        self._bring()
        if not self._queue and not self._batches and not self.below.coming:
            self.stage = Stage.WAITING
            self.look()

    def _bring(self) -> None:
        """While nothing in memory waits: bring up the next of what lies below it, as far as it goes in time."""
        below, chosen = self.below, list[Candidate]()
        left_bytes = min(self._bytes_in_time()[1], COMING_BYTES_MAX) - below.coming_bytes
        while below.queue and not self._queue and len(chosen) + len(below.coming) < COMING_OBJECTS_MAX:
            candidate = below.queue[0]
            in_store = self.in_store(candidate.obj)
            if self.uploading() and not in_store and candidate.obj.below < 0:
                break  # it may be on its way to the store
            if candidate.below and not self._count_if_settled(candidate, in_store=in_store):
                if candidate.obj.length > left_bytes:
                    break
                left_bytes -= candidate.obj.length
                chosen.append(candidate)
            below.queue.popleft()
        chosen = below.with_room(chosen)
        if chosen:
            self._settled.update(candidate.key for candidate in chosen)
            below.bring(chosen, self._op, self.deadline_s, self._brought)

    def _brought(self, candidate: Candidate) -> None:
        """It stands in memory, or could not be read: that is counted at the end."""
        if candidate.there:
            self._queue.append(candidate)
        self._offer()

    def _begin_batch(self, target: DrainTarget) -> bool:
        """Offer this target the next that it may take; False where there is nothing for it, or no time."""
        open_here = [b for b in self._batches.values() if b.target == target.holder]
        if len(open_here) >= BATCHES_A_TARGET or target.holder in self._lost:
            return False
        taken, size_bytes = self._take(target)
        if not taken:
            return False
        ctx = self.ctx
        op = ctx.op()
        batch = self._batches[op] = Batch(target.holder, taken, size_bytes, ctx.now)
        offered = tuple(Offered(entry_of(c.obj), c.worth, c.obj.base, c.obj.home) for c in taken)
        ctx.send(target.holder, Offer(op, ctx.incarnation, self.deadline_s - ctx.now, offered))
        patience_s = ctx.config.transfer_timeout_s + 3 * ctx.config.request_timeout_s
        batch.timer = ctx.wake_at(ctx.now + patience_s, lambda: self._silent(op))
        return True

    def _bytes_in_time(self) -> tuple[float, float]:
        """How large a batch should be, so that it is gone within BATCH_S; and what still goes before the deadline."""
        if self._rate is None:
            return BATCH_BYTES_FIRST, float("inf")
        under_way = sum(batch.size_bytes for batch in self._batches.values())
        left = self._rate * (self.deadline_s - self.ctx.now) - under_way
        return min(self._rate * BATCH_S, BATCH_BYTES_MAX), left

    def _take(self, target: DrainTarget) -> tuple[list[Candidate], int]:
        """The next in line that this target may have, of one ABI a group, as many as go in time."""
        batch_bytes, left_bytes = self._bytes_in_time()
        taken: list[Candidate] = []
        passed: list[Candidate] = []
        abis: dict[int, Abi] = {}
        size_bytes = 0
        while self._queue and len(taken) < BATCH_OBJECTS_MAX and len(passed) < BATCH_OBJECTS_MAX:
            candidate = self._queue.popleft()
            obj = candidate.obj
            if self._settle(candidate):
                continue
            size = size_bytes + obj.length
            if size > left_bytes or (taken and size > batch_bytes):
                passed.append(candidate)
                break
            if not self._fits(candidate, target) or abis.setdefault(obj.group, obj.abi) != obj.abi:
                passed.append(candidate)
                continue
            taken.append(candidate)
            size_bytes = size
        self._queue.extendleft(reversed(passed))
        return taken, size_bytes

    def _settle(self, candidate: Candidate) -> bool:
        """Whether nothing is to be done for it: it is gone, elsewhere already, or nobody has room."""
        return not candidate.there or self._count_if_settled(candidate)

    def _count_if_settled(self, candidate: Candidate, *, in_store: bool = False) -> bool:
        """Count what is elsewhere already, or has nobody who would take it."""
        if in_store or candidate.key in self._elsewhere:
            self._count(self._copies, candidate)
            self._has_another(candidate)
            return True
        if self._nobody_for(candidate):
            self._count(self._dropped, candidate)
            return True
        return False

    def _count(self, fate: Sum, candidate: Candidate) -> None:
        self._counted.add(candidate.key)
        fate.add(candidate)

    def _fits(self, candidate: Candidate, target: DrainTarget) -> bool:
        if candidate.obj.shard not in target.shards or target.holder in candidate.full:
            return False
        return candidate.worth > 0 or (target.holder, *place_of(candidate.obj)) not in self._no_room

    def _nobody_for(self, candidate: Candidate) -> bool:
        """Whether no target is left that might take it."""
        return not any(self._fits(candidate, target) and target.holder not in self._lost for target in self._targets)

    def taken(self, peer: str, message: Taken) -> None:
        """What became of an offer: on to the next."""
        batch = self._batches.pop(message.op, None)
        if batch is None or batch.target != peer:
            return
        if batch.timer is not None:
            batch.timer.cancel()
        landed_bytes = 0
        again: list[Candidate] = []
        for place, candidate in enumerate(batch.candidates):
            bit = 1 << place
            if message.landed & bit:
                landed_bytes += candidate.obj.length
                self._count(self._moved, candidate)
                self._has_another(candidate)
            elif message.had & bit:
                self._count(self._copies, candidate)
                self._has_another(candidate)
            elif message.no_room & bit:
                candidate.full.add(peer)
                if candidate.worth <= 0:
                    self._no_room.add((peer, *place_of(candidate.obj)))
                again.append(candidate)
            else:
                candidate.tries += 1
                again.append(candidate)
        self._learn_rate(landed_bytes)
        self._line_up_again(again)
        self._offer()

    def _learn_rate(self, landed_bytes: int) -> None:
        """Bytes a second over all targets, over the last landings."""
        if not landed_bytes:
            return
        self._landings.append((self.ctx.now, landed_bytes))
        spent_s = self.ctx.now - self._landings[0][0]
        if spent_s > 0:
            self._rate = sum(nbytes for _, nbytes in list(self._landings)[1:]) / spent_s

    def _line_up_again(self, again: Iterable[Candidate]) -> None:
        for candidate in reversed(list(again)):
            if candidate.tries < TRIES_MAX and candidate.there and not self._nobody_for(candidate):
                self._queue.appendleft(candidate)
            elif candidate.there:
                self._count(self._dropped, candidate)

    def _has_another(self, candidate: Candidate) -> None:
        """It may make room here first."""
        if not candidate.obj.first_out:
            self.ctx.books.make_first_out(candidate.obj)

    def _silent(self, op: str) -> None:
        """A target does not answer: it gets no more."""
        batch = self._batches.pop(op, None)
        if batch is None:
            return
        self._lost.add(batch.target)
        for candidate in batch.candidates:
            candidate.tries += 1
        self._line_up_again(batch.candidates)
        self._offer()

    def unreachable(self, peer: str, op: str) -> None:
        batch = self._batches.get(op)
        if batch is not None and batch.target == peer:
            if batch.timer is not None:
                batch.timer.cancel()
            self._silent(op)

    # --- end -----------------------------------------------------------------------------------

    def look(self) -> None:
        """Over as soon as nothing is left to move or upload, no write is open and the last lease ended."""
        if self.stage is not Stage.WAITING:
            return
        books = self.ctx.books
        seen = (books.generation, books.room_gained, self.uploading())
        if self._seen != seen:
            self._seen = seen
            if (
                self._collect() or self.below.queue
            ):  # a write begun before was committed; room came, or an upload failed
                self.stage = Stage.MOVING
                self._offer()
                return
        if not self.ctx.leases.live and not self.writing() and not self.uploading():
            self._end(0)

    def _time_over(self) -> None:
        """The deadline: leases end here, whoever reads is refused by the arena's header."""
        if self.stage in (Stage.IDLE, Stage.DONE):
            return
        for candidate in [*self._queue, *(c for b in self._batches.values() for c in b.candidates)]:
            if candidate.there:
                self._count(self._copies if self.in_store(candidate.obj) else self._dropped, candidate)
        for batch in self._batches.values():
            if batch.timer is not None:
                batch.timer.cancel()
        self._queue.clear()
        self._batches.clear()
        leases = [record.lease for record in self.ctx.leases.live.values() if not record.graph]
        if self.ctx.leases.live:
            self.ctx.cut_off()
        for lease in leases:
            self.release(lease)
        self._end(len(leases))

    def _end(self, cut: int) -> None:
        ctx = self.ctx
        self.stage = Stage.DONE
        self._to_ask.clear()
        self._asked.clear()
        if self._timer is not None:
            self._timer.cancel()
        for table in ctx.books.table.values():
            for obj in table.values():
                if obj.state not in IN_MEMORY and obj.bad is None and key_of(obj) not in self._counted:
                    # The disk goes with the node; what the store has too is served by every other one.
                    elsewhere = self.in_store(obj) or key_of(obj) in self._elsewhere
                    self._count(self._copies if elsewhere else self._dropped, Candidate(obj, 0.0))
        self.report = Drained(
            self.number,
            ctx.incarnation,
            self._moved.tally(),
            self._copies.tally(),
            self._dropped.tally(),
            cut,
            ctx.now - self._began_s,
        )
        self._tell()

    def _tell(self) -> None:
        if self.report is not None:
            self.ctx.send(SUPERVISOR, self.report)

    @property
    def counts(self) -> Counter[str]:
        """Objects so far, for the status."""
        return Counter(moved=self._moved.objects, elsewhere=self._copies.objects, dropped=self._dropped.objects)
