"""Mistakes in the steps of the protocol: checks left out, steps taken too early, slots used twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ...fabric import leases
from ...fabric.admission import AdmissionBook, Scope
from ...fabric.arena import Arena
from ...fabric.books import Books
from ...fabric.directory import DirectoryCore, Stream
from ...fabric.disk import DiskDesk
from ...fabric.effects import DiskRead, Moved, TransferDone
from ...fabric.fetching import FetchDesk
from ...fabric.grants import GrantDesk
from ...fabric.holdings import Holdings
from ...fabric.intake import Incoming, IntakeDesk
from ...fabric.kinds import ObjectKind, Reason
from ...fabric.leases import LeaseBook, read_refusal
from ...fabric.lifecycle import State
from ...fabric.lives import Lives
from ...fabric.messages import Done, LeaseGrant, LeasePart, PinEnd, Prompt, SourceRun, StoreCommit
from ...fabric.objects import Obj, split
from ...fabric.pins import PinDesk, SourcePin
from ...fabric.pools import Key
from ...fabric.shares import Arriving, Part, Source
from ...fabric.slab_desk import SlabDesk
from ...fabric.slabs import SlabBook
from ...fabric.stores import CHECKSUM_BYTES, StoreDesk
from ...fabric.validation import Proof
from .patches import Patches, call

Parts = Iterable[tuple[LeasePart, Arena | None]]


# --- readers ---------------------------------------------------------------------------------------


def fence(patches: Patches) -> None:
    """Weights and versions are read, whoever's they are."""
    honest = read_refusal

    def refusal(grant: LeaseGrant, deadline_s: float, parts: Parts, now: float) -> Reason | None:
        known = list(parts)
        refused = honest(grant, deadline_s, known, now)
        if refused is not Reason.HOLDER_LOST:
            return refused
        mapped = [(part, arena) for part, arena in known if arena is not None]
        if any(arena.weights != grant.weights for _, arena in mapped):
            return Reason.WEIGHTS_MISMATCH
        stand = all(leases.slots_unchanged(part, arena) for part, arena in mapped)
        return None if stand else Reason.VERSION_CHANGED

    patches.everywhere(honest, refusal)


def deadline(patches: Patches) -> None:
    """A lease is good for ever."""
    honest = read_refusal

    def refusal(grant: LeaseGrant, _: float, parts: Parts, now: float) -> Reason | None:
        return honest(grant, float("inf"), parts, now)

    patches.everywhere(honest, refusal)


def retired_weights(patches: Patches) -> None:
    """Weights in force are not looked at."""
    honest = read_refusal

    def refusal(grant: LeaseGrant, deadline_s: float, parts: Parts, now: float) -> Reason | None:
        refused = honest(grant, deadline_s, parts, now)
        return None if refused is Reason.WEIGHTS_MISMATCH else refused

    patches.everywhere(honest, refusal)


# --- grants ----------------------------------------------------------------------------------------


def standing(patches: Patches) -> None:
    """What was proven once stays proven."""
    patches.put(Proof, "stands", lambda *_: True)


# --- transfers -------------------------------------------------------------------------------------


def version_reread(patches: Patches) -> None:
    """The source is not asked again."""
    patches.put(FetchDesk, "unchanged_at_source", lambda *_: True)


def digest(patches: Patches) -> None:
    """A transfer that reports no fault brought the right bytes."""

    def landed(_: FetchDesk, __: Arriving, moved: Moved) -> bool:
        return moved.fault is None

    patches.put(FetchDesk, "landed_whole", landed)


def drain_digest(patches: Patches) -> None:
    """An offer's transfer that reports no fault brought the right bytes."""

    def landed(_: IntakeDesk, __: Incoming, moved: Moved) -> bool:
        return moved.fault is None

    patches.put(IntakeDesk, "landed_whole", landed)


def trust_directory(patches: Patches) -> None:
    """The source pins what lies under the digest; the requester takes it for what the directory said."""

    def find(desk: PinDesk, pin: SourcePin) -> Reason | None:
        for objects in pin.request.objects:
            run: list[tuple[int, Obj]] = []
            for index, key in zip(objects.indices, split(objects.digests), strict=True):
                obj = desk.ctx.books.find(objects.group, objects.shard, key)
                if obj is None:
                    return Reason.VERSION_CHANGED
                run.append((index, obj))
            pin.runs.append(run)
        return None

    def fit(_: FetchDesk, __: Part, source: Source, runs: tuple[SourceRun, ...]) -> bool:
        at = {(a.obj.group, a.obj.shard, a.index): a for a in source.arriving}
        for run in runs:
            for place, index in enumerate(run.slots.indices):
                arriving = at[run.slots.group, run.slots.shard, index]
                arriving.source_slot = int.from_bytes(run.slots.slots[place * 4 : place * 4 + 4], "little")
                arriving.version = run.slots.versions[place * 8 : place * 8 + 8]
                arriving.checksum = run.checksums[place * 16 : place * 16 + 16]
        return True

    patches.put(PinDesk, "_find", find)
    patches.put(FetchDesk, "_promises_fit", fit)


def grant_before_proof(patches: Patches) -> None:
    """What is being fetched counts as here once its transfer has begun."""
    transfer = vars(FetchDesk)["_transfer"]

    def begin(desk: FetchDesk, part: Part, source: Source, arriving: list[Arriving]) -> None:
        transfer(desk, part, source, arriving)
        source.ended = True
        for a in arriving:
            call(desk, "_arrived", part, a)
        call(desk, "_advance", part)

    def ended(desk: FetchDesk, event: TransferDone) -> bool:
        part, source, *_ = vars(desk)["_transfers"].pop(event.token)
        source.transferring -= 1
        desk.ctx.send(source.holder, PinEnd(part.request.op, ()))
        return True

    patches.put(FetchDesk, "_transfer", begin)
    patches.put(FetchDesk, "transferred", ended)


# --- slots -------------------------------------------------------------------------------------------


def reuse_quarantined(patches: Patches) -> None:
    """Quarantine is over as it begins."""
    quarantine, quiet = vars(Lives)["quarantine"], vars(Lives)["quiet"]

    def at_once(books: Lives, obj: Obj) -> None:
        quarantine(books, obj)
        quiet(books, obj)

    def later(books: Lives, obj: Obj) -> None:
        if obj.state is State.QUARANTINED:
            quiet(books, obj)

    patches.put(Lives, "quarantine", at_once)
    patches.put(Lives, "quiet", later)


def one_free_list(patches: Patches) -> None:
    """The first two pools share their free slots."""
    create = vars(Holdings)["__init__"]

    def joined(books: Holdings, *args: Any, **named: Any) -> None:
        create(books, *args, **named)
        first, second, *_ = books.pools.values()
        first.free += second.free
        second.free = first.free

    patches.put(Holdings, "__init__", joined)


def limit_outside_charge(patches: Patches) -> None:
    """Only who plans asks the limits."""
    patches.put(AdmissionBook, "lacking", lambda *_: None)
    patches.put(AdmissionBook, "over", lambda *_: None)


def floors_only_planned(patches: Patches) -> None:
    """Who takes a slot looks at the limit, and not at what it keeps for other kinds."""
    honest = vars(AdmissionBook)["_fits"]

    def fits(book: AdmissionBook, scope: Scope, need: Counter[ObjectKind], **how: Any) -> bool:
        bare = replace(scope.limit, floors=())
        return bool(honest(book, Scope(bare, scope.used, scope.evictable), need, **how))

    patches.put(AdmissionBook, "_fits", fits)


def quota_at_start(patches: Patches) -> None:
    """A tenant's leases are counted when it asks, and not when it is granted one."""
    honest = vars(GrantDesk)["refusal"]

    def refusal(desk: GrantDesk, prompt: Prompt) -> Reason | None:
        refused: Reason | None = honest(desk, prompt)
        return None if refused is Reason.QUOTA else refused

    patches.put(GrantDesk, "refusal", refusal)


def slab_not_empty(patches: Patches) -> None:
    """A slab that is to be given away goes at once."""

    def at_once(desk: SlabDesk) -> None:
        giving, books = desk.giving, desk.ctx.books
        if giving is None:
            return
        leaving, coming = (books.slabs.slots(key, giving.slab) for key in (giving.giver, giving.taker))
        books.pools[giving.giver].close(leaving)
        books.pools[giving.giver].closed = list(leaving)
        books.slabs.hand_over(giving.slab, giving.taker)
        books.room_gained += len(coming)
        desk.giving = None

    patches.put(SlabDesk, "_go_on", at_once)


def slab_kept(patches: Patches) -> None:
    """The free slots of a slab that was given away stay free to its giver."""
    honest = vars(SlabBook)["hand_over"]

    def kept(slabs: SlabBook, slab: int, taker: Key) -> None:
        giver = slabs.owner[slab]
        honest(slabs, slab, taker)
        slabs.pools[giver].free += slabs.slots(giver, slab)

    patches.put(SlabBook, "hand_over", kept)


def move_under_graph(patches: Patches) -> None:
    """A graph lease ends like any other, and its slots move on."""
    honest = vars(LeaseBook)["grant"]

    def ordinary(book: LeaseBook, proof: Any, **named: Any) -> Any:
        return honest(book, proof, **{**named, "graph": False})

    patches.put(LeaseBook, "grant", ordinary)


# --- disk --------------------------------------------------------------------------------------------


def restore_digest(patches: Patches) -> None:
    """A read that reports no fault brought the right bytes."""

    def refusal(_: DiskDesk, __: Obj, ___: bytes | None, refused: Reason | None) -> Reason | None:
        return refused

    patches.put(DiskDesk, "restore_refusal", refusal)


def restore_as_allocation(patches: Patches) -> None:
    """An object on a tier is reserved as if it were new."""

    def reserve(books: Books, objects: Sequence[Obj]) -> None:
        for obj in objects:
            obj.state = State.ABSENT
            books.reserve(obj)

    patches.put(Books, "reserve_restores", reserve)


def page_table_early(patches: Patches) -> None:
    """A restored slot can be read at once; what the read brings is not looked at."""
    restore = vars(DiskDesk)["restore"]

    def early(desk: DiskDesk, objects: list[Obj], *args: Any) -> None:
        restore(desk, objects, *args)
        desk.ctx.books.restored_all(objects)
        for obj in objects:
            desk.ctx.arrived(obj, None)

    def ignored(desk: DiskDesk, event: DiskRead) -> None:
        vars(desk)["_reading"].pop(event.token, None)
        call(desk, "_read_more")

    patches.put(DiskDesk, "restore", early)
    patches.put(DiskDesk, "read", ignored)


# --- stores ------------------------------------------------------------------------------------------


def late_commit(patches: Patches) -> None:
    """Every open attempt may become visible."""
    patches.put(StoreDesk, "commit_refusal", lambda *_: None)


def extend_in_two_steps(patches: Patches) -> None:
    """Half of a commit's objects are installed now, the others by the next timer."""
    commit = vars(StoreDesk)["_commit"]

    def halved(desk: StoreDesk, client: str, message: StoreCommit) -> Done:
        attempt = desk.attempts.get(message.attempt)
        half = len(attempt.objects) // 2 if attempt is not None else 0
        if attempt is None or not half:
            return commit(desk, client, message)  # type: ignore[no-any-return]
        rest, attempt.objects = attempt.objects[half:], attempt.objects[:half]
        first = message.checksums[: half * CHECKSUM_BYTES]
        done: Done = commit(desk, client, replace(message, checksums=first))
        books = desk.ctx.books

        def second() -> None:
            for i, obj in enumerate(rest, half):
                if done.refused is None:
                    books.seal(obj, message.checksums[i * CHECKSUM_BYTES : (i + 1) * CHECKSUM_BYTES])
                    books.install(obj)
                else:
                    books.give_up(obj)

        desk.ctx.wake_at(desk.ctx.now + 0.05, second)
        return done

    patches.put(StoreDesk, "_commit", halved)


# --- lives -------------------------------------------------------------------------------------------


def old_incarnation(patches: Patches) -> None:
    """Whoever speaks for a holder is listened to, whichever life it is of."""
    stream_of = vars(DirectoryCore)["_stream"]

    def unfenced(core: DirectoryCore, holder: str, incarnation: int) -> Stream | None:
        known = core.streams.get(holder)
        return known if known is not None else stream_of(core, holder, incarnation)

    patches.put(DirectoryCore, "_stream", unfenced)
    patches.put(PinDesk, "_refusal", lambda *_: None)
