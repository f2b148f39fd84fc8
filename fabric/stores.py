"""The store desk: write attempts. begin (all or nothing) -> write in place -> commit -> visible.

    begun --commit--> visible          a later begin of any of its objects: begun -> superseded
    begun --abort---> quarantined --quiet--> gone
    superseded --commit--> refused (attempt_superseded), slots freed: its writer has finished
    begun or superseded, writer's connection closed or attempt too old: as abort, quiet at once if
    the writer is proven gone

A growing request (``retire``) makes its new objects visible and retires what they outdate in one
step, so another acquire sees all of it or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .births import Births
from .context import HolderContext, Recent
from .kinds import Reason
from .lifecycle import State
from .messages import Done, Objects, StoreAbort, StoreBegin, StoreBegun, StoreCommit, StoreQuiet
from .objects import Obj, slot_run, split
from .requests import gist
from .wakes import Wake

CHECKSUM_BYTES = 16


@dataclass(slots=True)
class Attempt:
    """One write attempt and its objects, in the order begun."""

    number: int
    request: str
    client: str
    objects: list[Obj]
    retire: tuple[Objects, ...]
    weights: bytes
    expires_s: float
    superseded: bool = False
    expiry: Wake | None = None


class _Fresh(NamedTuple):
    """What one item of a store writes."""

    indices: list[int]
    objects: list[Obj]


class StoreDesk:
    """All open write attempts of one holder."""

    def __init__(self, ctx: HolderContext) -> None:
        self.ctx = ctx
        self.attempts: dict[int, Attempt] = {}
        self.aborted: dict[int, tuple[str, list[Obj]]] = {}
        self._open: dict[tuple[int, int, bytes], int] = {}
        self._recent = Recent(ctx.config.answers_kept)

    # --- begin ---------------------------------------------------------------------------------

    def begin(self, client: str, message: StoreBegin) -> None:
        asked = gist(message)
        known = self._recent.get(message.request, asked)
        if known is None:
            known = self._begin(client, message)
            self._recent.put(message.request, known, asked)
        self.ctx.send(client, known)

    def _begin(self, client: str, message: StoreBegin) -> StoreBegun:
        ctx = self.ctx
        refusal = self._refusal(message)
        if refusal is not None:
            return StoreBegun(message.request, 0, (), refusal, "")
        by_item, kept = self._fresh_objects(message)
        fresh = [obj for run in by_item for obj in run.objects]
        for obj in kept:
            ctx.books.pin(obj)
        lacking = ctx.books.lacking(fresh)
        number = ctx.number()
        if lacking is None:
            ctx.books.reserve_all(fresh)
            self._supersede(fresh, number)
        for obj in kept:
            ctx.books.unpin(obj)
        if lacking is not None:
            ctx.counters["admission_refusals"] += 1
            ctx.tally.admission_refusals["store", lacking.reason] += 1
            if lacking.reason is Reason.ADMISSION_LIMIT:
                short = [obj for obj in fresh if (obj.group, obj.shard) == (lacking.group, lacking.shard)]
                ctx.books.losses.short(lacking.group, len(short) * ctx.model.groups[lacking.group].unit_tokens)
            return StoreBegun(message.request, 0, (), lacking.reason, ctx.model.groups[lacking.group].name)
        expires_s = ctx.now + ctx.config.attempt_ttl_s
        self.attempts[number] = Attempt(
            number, message.request, client, fresh, message.retire, message.prompt.weights, expires_s
        )
        self.attempts[number].expiry = ctx.wake_at(expires_s, lambda: self._expire(number))
        runs = tuple(
            slot_run(item.objects.group, item.objects.shard, run.indices, run.objects)
            for item, run in zip(message.items, by_item, strict=True)
        )
        return StoreBegun(message.request, number, runs, None, "")

    def _refusal(self, message: StoreBegin) -> Reason | None:
        ctx = self.ctx
        if message.prompt.weights in ctx.retired:
            return Reason.WEIGHTS_MISMATCH
        if ctx.draining:
            return Reason.DRAINING
        if len(self.attempts) >= ctx.config.attempts_max:
            return Reason.QUOTA
        return None

    def _fresh_objects(self, message: StoreBegin) -> tuple[list[_Fresh], list[Obj]]:
        """For each item the objects to write, with their indices; and the objects to leave alone."""
        ctx = self.ctx
        by_item: list[_Fresh] = []
        kept: list[Obj] = []
        births = Births(ctx.model, ctx.books.leaving.structure, message.prompt)
        for item in message.items:
            group, shard, indices = item.objects.group, item.objects.shard, item.objects.indices
            fresh = _Fresh([], [])
            by_item.append(fresh)
            if shard not in ctx.books.shards:
                continue
            digests = split(item.objects.digests)
            table = ctx.books.table[group, shard]
            there = list(map(table.get, digests))
            if any(there):
                left = []
                for at, obj in enumerate(there):
                    if obj is None or message.replace or not _same_content(obj, item.revision, item.abi):
                        left.append(at)
                    elif obj.state is State.SEALED:
                        kept.append(obj)
                indices, digests = tuple([indices[at] for at in left]), tuple([digests[at] for at in left])
            fresh.indices.extend(indices)
            fresh.objects.extend(births.of(group, shard, indices, digests, item.revision, item.length, item.abi))
        return by_item, kept

    def _supersede(self, fresh: Iterable[Obj], number: int) -> None:
        begun = self._open
        for obj in fresh:
            key = (obj.group, obj.shard, obj.digest)
            earlier = begun.get(key)
            if earlier is not None and earlier in self.attempts:
                self.attempts[earlier].superseded = True
            begun[key] = number

    # --- commit, abort -------------------------------------------------------------------------

    def commit(self, client: str, message: StoreCommit) -> None:
        asked = gist(message)
        known = self._recent.get(message.request, asked)
        if known is None:
            known = self._commit(client, message)
            self._recent.put(message.request, known, asked)
        self.ctx.send(client, known)

    def _commit(self, client: str, message: StoreCommit) -> Done:
        ctx = self.ctx
        attempt = self._attempt_of(client, message.attempt)
        if attempt is None and not ctx.of_this_life(message.attempt):
            return Done(message.request, Reason.HOLDER_LOST, "the attempt ended with an earlier life of this holder")
        if attempt is None:
            return Done(message.request, Reason.ATTEMPT_SUPERSEDED, "the attempt is not open to this client")
        if len(message.checksums) != CHECKSUM_BYTES * len(attempt.objects):
            return Done(message.request, Reason.CHECKSUM_MISMATCH, "one checksum an object is needed")
        self._close(attempt)
        refused = self.commit_refusal(attempt)
        if refused is not None:
            for obj in attempt.objects:
                ctx.books.give_up(obj)
            return Done(message.request, refused, "")
        ctx.books.seal_all(attempt.objects, message.checksums)
        ctx.books.stored(attempt.objects)
        for old in list(ctx.books.find_all(attempt.retire)):
            ctx.books.retire(old)
        ctx.books.install_all(attempt.objects)
        ctx.stored_runs.stored(ctx.books, attempt.objects)
        ctx.tally.count("stored_objects", len(attempt.objects))
        ctx.journal.happened(ctx.now, "stored", attempt.objects)
        return Done(message.request, None, "", ctx.mark)

    def commit_refusal(self, attempt: Attempt) -> Reason | None:
        """Why an attempt may not become visible: newer weights, or a later attempt at its content."""
        if attempt.weights in self.ctx.retired:
            return Reason.WEIGHTS_MISMATCH
        if attempt.superseded:
            return Reason.ATTEMPT_SUPERSEDED
        return None

    def supersede(self, matches: Callable[[Obj], bool]) -> None:
        """What is being written of this never becomes visible."""
        for attempt in self.attempts.values():
            if any(matches(obj) for obj in attempt.objects):
                attempt.superseded = True

    def abort(self, client: str, message: StoreAbort) -> None:
        attempt = self._attempt_of(client, message.attempt)
        if attempt is not None:
            self._quarantine(attempt)
        self.ctx.send(client, Done(message.request, None, ""))

    def _attempt_of(self, client: str, number: int) -> Attempt | None:
        """An open attempt, for the client that began it and for nobody else."""
        attempt = self.attempts.get(number)
        return attempt if attempt is not None and attempt.client == client else None

    def in_hand(self) -> Iterator[Obj]:
        """Every object whose slot an open or an aborted attempt answers for."""
        for attempt in self.attempts.values():
            yield from attempt.objects
        for _, objects in self.aborted.values():
            yield from objects

    def quiet(self, client: str, message: StoreQuiet) -> None:
        owner, _ = self.aborted.get(message.attempt, ("", []))
        attempt = self._attempt_of(client, message.attempt)
        if owner == client:
            self._quiet(message.attempt)
        elif attempt is not None and self.commit_refusal(attempt) is not None:
            self._close(attempt)  # it could never have become visible
            for obj in attempt.objects:
                self.ctx.books.give_up(obj)
        self.ctx.send(client, Done(message.request, None, ""))

    def client_gone(self, client: str) -> None:
        """The writer's process ended or let go of its mapping: nothing writes any more."""
        for attempt in [a for a in self.attempts.values() if a.client == client]:
            self._quarantine(attempt)
        for number in [n for n, (owner, _) in self.aborted.items() if owner == client]:
            self._quiet(number)

    def _expire(self, number: int) -> None:
        attempt = self.attempts.get(number)
        if attempt is not None:
            self.ctx.counters["attempts_expired"] += 1
            self._quarantine(attempt)

    def _quarantine(self, attempt: Attempt) -> None:
        self._close(attempt)
        for obj in attempt.objects:
            self.ctx.books.quarantine(obj)
        self.aborted[attempt.number] = (attempt.client, attempt.objects)

    def _quiet(self, number: int) -> None:
        _, objects = self.aborted.pop(number, ("", []))
        for obj in objects:
            self.ctx.books.quiet(obj)

    def _close(self, attempt: Attempt) -> None:
        del self.attempts[attempt.number]
        if attempt.expiry is not None:
            attempt.expiry.cancel()
        for obj in attempt.objects:
            key = (obj.group, obj.shard, obj.digest)
            if self._open.get(key) == attempt.number:
                del self._open[key]


def _same_content(there: Obj, revision: int, abi: object) -> bool:
    return there.bad is None and there.revision == revision and there.abi == abi
