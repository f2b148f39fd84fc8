"""A holder's books: its objects, its pools, and who owns each slot.

Every slot is free or owned by exactly one object; what an object is doing is its lifecycle state.
So nothing can be lost that is not visible here: free + owned = pool, always.

    visible objects     found by digest; SEALED in memory, or ON_TIER / DEMOTING / RESTORING
    hidden objects      RESERVED or FILLING for an attempt or a fetch, EVICTING while still pinned,
                        QUARANTINED until proven quiet

Kinds never share a free list: one pool a group and shard. Room comes from what is unpinned, in the
order of ``room``. Byte limits (``admission``) are charged where a slot gets its owner and discharged
where it loses it, here and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .admission import AdmissionBook, ByteLimit, Lack, TenantQuota
from .arena import Arena, ArenaLayout, SlotState
from .eviction import Arrivals, EvictionFactory, LeastRecentlyUsed, PoolShape
from .kinds import ObjectKind, ProtocolError, Reason
from .lifecycle import REPLACE_VERB, State, Verb, advance
from .messages import Column, Objects, Prompt, Room, SlotRun
from .model import ModelSpec
from .passport import Abi
from .room import RoomBook, Structure
from .segments import ChainPlace
from .writing import DiskAdmission

DIGEST_BYTES = 32


@dataclass(slots=True, eq=False)
class Obj:
    """One object of one shard at this holder."""

    kind: ObjectKind
    group: int
    shard: int
    digest: bytes
    position: int
    namespace: bytes
    weights: bytes
    tenant: str
    revision: int
    length: int
    abi: Abi
    checksum: bytes = b""
    state: State = State.ABSENT
    slot: int = -1
    version: int = 0
    on_disk: tuple[int, int] | None = None
    """(extent, entry) of a copy on the local disk, valid beside the copy in memory."""
    below: int = -1
    """The host slot of a copy below the readers' pools, valid beside those in memory and on disk; -1: none."""
    bad: Reason | None = None
    bad_from_tier: bool = False
    visible: bool = False
    place: ChainPlace | None = None
    """Where it lies in its chain; without one the directory is not told of it."""
    first_out: bool = False
    """Makes room before anything else: unusable, or of retired weights."""
    base: bytes = b""
    """Digest of the object before it in its chain, where a resume needs both."""
    home: bytes = b""
    """Digest of the history block that it ends in, without which it serves nobody."""
    linked: bool = False
    """What it rests on counts it."""
    books: Books | None = None
    """Whose slot it has: pins, uses and graph leases are counted there, by slot."""

    def advance(self, verb: Verb) -> None:
        self.state = advance(self.kind, self.state, verb)

    @property
    def pins(self) -> int:
        """What forbids moving or freeing it; an object without a slot has none."""
        return 0 if self.books is None or self.slot < 0 else int(self.books.pins[self.slot])

    @property
    def frozen(self) -> int:
        """Graph leases over it: it may be neither moved nor freed, whatever its pins."""
        return 0 if self.books is None or self.slot < 0 else int(self.books.frozen[self.slot])

    @property
    def last_use(self) -> int:
        """The tick of its last use; objects of one use share a tick."""
        return 0 if self.books is None or self.slot < 0 else int(self.books.last_use[self.slot])

    @property
    def on_a_tier(self) -> bool:
        """Whether a copy lies below, from which it can be restored."""
        return self.below >= 0 or self.on_disk is not None

    @property
    def evictable(self) -> bool:
        return self.visible and self.state is State.SEALED and not self.pins


@dataclass(slots=True)
class Pool:
    """The slots of one group and shard: ``first`` .. ``first + slots``."""

    group: int
    shard: int
    first: int
    slots: int
    free: list[int]
    evictable: int = 0

    @property
    def room(self) -> int:
        return len(self.free) + self.evictable


@dataclass(frozen=True, slots=True)
class Change:
    """What the directory is to learn of one object: its state after the change."""

    obj: Obj
    gone: bool
    evicted: bool


Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Claim:
    """Slots of several pools as one array, each slot once: what is pinned and let go together.

    ``starts``: where each pool's slots begin in ``slots``; no pool without any.
    """

    pools: tuple[tuple[int, int], ...]
    starts: Slots
    slots: Slots

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, Slots]]) -> Claim:
        """The claim on these slots, given as (group, shard, slots); empty runs claim nothing."""
        some = [run for run in runs if len(run[2])]
        if len(some) == 1:
            return cls((some[0][:2],), _FROM_THE_START, some[0][2])
        starts = list(accumulate((len(slots) for _, _, slots in some), initial=0))[: len(some)]
        slots = np.concatenate([slots for _, _, slots in some]) if some else np.empty(0, dtype=np.int64)
        return cls(tuple((group, shard) for group, shard, _ in some), np.array(starts, dtype=np.int64), slots)


_FROM_THE_START = np.zeros(1, dtype=np.int64)

_NOTHING: dict[bytes, int] = {}


def bits_of(mask: npt.NDArray[np.bool_]) -> int:
    """A mask as a bitmap: bit i for entry i."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def _count(mask: npt.NDArray[np.bool_], starts: Slots) -> list[int]:
    """How many are set in each run of a mask; the runs begin at ``starts`` and none is empty."""
    counted: list[int] = np.add.reduceat(mask, starts, dtype=np.int64).tolist()
    return counted


def split(blob: bytes) -> list[bytes]:
    """The digests in a blob of 32-byte digests."""
    return [blob[i : i + DIGEST_BYTES] for i in range(0, len(blob), DIGEST_BYTES)]


def _pools(layout: ArenaLayout) -> dict[tuple[int, int], Pool]:
    """The pools that readers read from, with every slot free."""
    pools = {}
    for first, pool in zip(layout.first_slot, layout.pools, strict=True):
        if pool.tier is layout.readers_tier:
            free = list(range(first + pool.slots - 1, first - 1, -1))
            pools[pool.group, pool.shard] = Pool(pool.group, pool.shard, first, pool.slots, free)
    return pools


def _shapes(model: ModelSpec, pools: Iterable[Pool]) -> dict[tuple[int, int], PoolShape]:
    """The pools as a policy sees them."""
    prefix = Structure(model).prefix
    shapes = {}
    for pool in pools:
        spec = model.groups[pool.group]
        place = (pool.group, pool.shard, pool.first, pool.slots)
        shapes[pool.group, pool.shard] = PoolShape(
            *place, spec.kind, spec.unit_tokens, spec.block_bytes, prefix[pool.group]
        )
    return shapes


class Books:
    """Objects, pools and slots of one holder; keeps the arena's headers in step."""

    victims: int = 0
    """Counts what left memory to make room."""
    now_s: float = 0.0
    """The time of the step under way."""

    def __init__(
        self,
        model: ModelSpec,
        shards: Sequence[int],
        arena: Arena,
        limits: Sequence[ByteLimit] = (),
        quotas: Mapping[str, TenantQuota] | None = None,
        *,
        eviction: EvictionFactory = LeastRecentlyUsed,
    ) -> None:
        self.model = model
        self.admission = AdmissionBook(model, limits, quotas)
        self.shards = tuple(shards)
        self.arena = arena
        self.owner: list[Obj | None] = [None] * arena.layout.slots
        self.pools = _pools(arena.layout)
        self.table: dict[tuple[int, int], dict[bytes, Obj]] = {
            (g, s): {} for g in range(len(model.groups)) for s in self.shards
        }
        self.ready: dict[tuple[int, int], dict[bytes, int]] = {key: {} for key in self.table}
        """Slots of the visible objects whose bytes are in memory and usable, by key."""
        slots = arena.layout.slots
        self.serving = np.zeros(slots, dtype=np.bool_)
        """By slot, whether it is one of ``ready``."""
        self.pins = np.zeros(slots, dtype=np.int32)
        self.frozen = np.zeros(slots, dtype=np.int32)
        self.last_use = np.zeros(slots, dtype=np.int64)
        self.uses = np.zeros(slots, dtype=np.int32)
        """How often the slot's object was used (stored, leased), where ``writing`` asks for it."""
        self.writing: DiskAdmission | None = None
        """What may go to disk; None: everything."""
        self.settled = np.zeros(slots, dtype=np.bool_)
        """Whether the slot's object is visible and sealed: evictable where nothing pins it."""
        self.first_out = np.zeros(slots, dtype=np.bool_)
        self.positions = np.zeros(slots, dtype=np.int64)
        self.versions = np.zeros(slots, dtype="<u8")
        self.lengths = np.zeros(slots, dtype="<u4")
        self.revisions = np.zeros(slots, dtype=np.int64)
        self.checksums = np.zeros((slots, 2), dtype="<u8")
        self.abi_numbers = np.zeros(slots, dtype=np.int32)
        self.abis: list[Abi] = []
        self._abi_number: dict[Abi, int] = {}
        self._leaving: set[int] = set()
        """Slots of EVICTING objects: free as soon as nothing pins them."""
        self.changes: list[Change] = []
        self.disk_dropped: list[tuple[int, int]] = []
        """Copies on disk (extent, entry) that no visible object refers to any more."""
        self.below_dropped: list[int] = []
        """Copies in host memory, by slot, likewise."""
        self.tick = 0
        self.generation = 0
        """Counts what changed of what can be found: a column taken at this count still holds."""
        self.room_gained = 0
        """Counts slots that became free or evictable: whoever waits for room watches it."""
        self.taken_over: Callable[[Obj], None] = lambda _: None
        """Told of an object that has the copies below of another from here on."""
        self.shapes = _shapes(model, self.pools.values())
        self.leaving = RoomBook.of(self, eviction(tuple(self.shapes.values())), slots)
        self.quarantined_bytes: Counter[ObjectKind] = Counter()
        """Of slots that foreign bytes may still reach."""

    # --- finding -------------------------------------------------------------------------------

    def find(self, group: int, shard: int, digest: bytes) -> Obj | None:
        """The visible object of that key; None also for a shard this holder does not own."""
        return self.table.get((group, shard), {}).get(digest)

    def find_all(self, objects: Iterable[Objects]) -> Iterator[Obj]:
        for run in objects:
            table = self.table.get((run.group, run.shard), {})
            for digest in split(run.digests):
                obj = table.get(digest)
                if obj is not None:
                    yield obj

    def touch(self, objects: Iterable[Obj]) -> None:
        """Mark a use: all objects of one use share a tick."""
        self.touch_slots(np.array([obj.slot for obj in objects if obj.slot >= 0], dtype=np.int64))

    def stored(self, objects: Iterable[Obj]) -> None:
        """These are about to be installed, later than every use so far: the first use of each."""
        self.tick += 1
        if self.writing is not None:
            self.uses[[obj.slot for obj in objects]] += 1

    def touch_slots(self, slots: Slots) -> None:
        """Mark a use of these slots' objects."""
        self.tick += 1
        self.last_use[slots] = self.tick
        if self.writing is not None:
            self.uses[slots] += 1
        self.leaving.policy.used(slots, self.tick, self.now_s)
        self.leaving.touched(slots)

    def retain(self, prompt: Prompt, weight: float, ttl_s: float) -> None:
        """Let what is here of a prompt make room later, for a while."""
        digests = {unit: split(blob) for unit, blob in prompt.keys}
        for group, spec in enumerate(self.model.groups):
            for shard in self.shards:
                there = [slot for slot in self.locate(group, shard, digests.get(spec.unit_tokens, [])) if slot >= 0]
                if there:
                    slots = np.array(there, dtype=np.int64)
                    self.leaving.retained.keep(slots, weight, self.now_s, ttl_s)
        self.leaving.again()

    def locate(self, group: int, shard: int, digests: Sequence[bytes]) -> list[int]:
        """The slots of usable objects in memory, by digest; -1 for what is elsewhere or nowhere."""
        get = self.ready.get((group, shard), _NOTHING).get
        return [get(digest, -1) for digest in digests]

    def locate_all(self, group: int, shard: int, digests: Sequence[bytes]) -> list[int] | None:
        """:meth:`locate` where all must be usable and in memory; None if any is not."""
        slots = list(map(self.ready.get((group, shard), _NOTHING).get, digests))
        return None if None in slots else slots  # type: ignore[return-value] # mypy does not see that no None is left

    def columns(self, holder: str, incarnation: int, prompt: Prompt, shards: Sequence[int]) -> list[Column]:
        """What is here along a prompt, one column a group and shard that has anything."""
        digests = {unit: split(blob) for unit, blob in prompt.keys}
        found = []
        for group, spec in enumerate(self.model.groups):
            keys = digests.get(spec.unit_tokens, [])
            for shard in shards:
                table = self.table.get((group, shard))
                if not table:
                    continue
                column = self._column(holder, incarnation, group, shard, keys)
                if column is not None:
                    found.append(column)
        return found

    def _column(self, holder: str, incarnation: int, group: int, shard: int, keys: Sequence[bytes]) -> Column | None:
        """One column; where all is in memory and alike, without looking at single objects."""
        table = self.table[group, shard]
        ready = self.ready[group, shard]
        slots = np.array(self.locate(group, shard, keys), dtype=np.int64)
        there = slots >= 0
        found = slots[there]
        if len(ready) < len(table) or not self._alike(found):
            entries = [(i, entry_of(table[key])) for i, key in enumerate(keys) if key in table]
            return column_of(holder, incarnation, group, shard, entries) if entries else None
        if not len(found):
            return None
        memory = bits_of(there)
        abi = self.abis[self.abi_numbers[found[0]]]
        revision = int(self.revisions[found[0]])
        versions = self.versions[found].tobytes()
        return Column(holder, incarnation, group, shard, memory, 0, {revision: memory}, ((abi, memory),), (), versions)

    def _alike(self, slots: Slots) -> bool:
        """Whether all these slots' objects are of one revision and ABI."""
        revisions, abis = self.revisions[slots], self.abi_numbers[slots]
        return not len(slots) or bool((revisions == revisions[0]).all() and (abis == abis[0]).all())

    def abi_numbers_of(self, slots: Slots) -> list[int]:
        """The distinct ABIs (numbers into ``abis``) of these slots' objects; nearly always one."""
        numbers = self.abi_numbers[slots]
        if not len(numbers):
            return []
        first = numbers[0]
        return [int(first)] if (numbers == first).all() else np.unique(numbers).tolist()

    def in_host(self, prompt: Prompt, group: int, shard: int) -> int:
        """Along a prompt, the objects of which the copy to restore lies in host memory, as bits."""
        table = self.table.get((group, shard), {})
        keys = dict(prompt.keys).get(self.model.groups[group].unit_tokens, b"")
        bits = 0
        for i, digest in enumerate(split(keys)):
            obj = table.get(digest)
            if obj is not None and obj.below >= 0:
                bits |= 1 << i
        return bits

    def rooms(self, prompt: Prompt) -> list[Room]:
        """Room in each pool, and which objects of the prompt are pinned already."""
        digests = {unit: split(blob) for unit, blob in prompt.keys}
        rooms = []
        for (group, shard), pool in self.pools.items():
            table = self.table[group, shard]
            pinned = 0
            for i, key in enumerate(digests.get(self.model.groups[group].unit_tokens, [])):
                obj = table.get(key)
                if obj is not None and (obj.state is State.RESTORING or (obj.pins and obj.slot >= 0)):
                    pinned |= 1 << i
            rooms.append(Room(group, shard, pool.room, pool.slots, pinned))
        return rooms

    # --- room ----------------------------------------------------------------------------------

    def lacking(self, objects: Collection[Obj]) -> Lack | None:
        """The first pool or limit that cannot take all these objects at once; None if all can."""
        wants: dict[tuple[int, int], int] = {}
        for obj in objects:
            key = (obj.group, obj.shard)
            wants[key] = wants.get(key, 0) + 1
        for key, count in wants.items():
            pool = self.pools.get(key)
            if pool is None or pool.room < count:
                return Lack(*key, Reason.ADMISSION_LIMIT)
        return self.admission.lacking(objects)

    def reserve(self, obj: Obj) -> None:
        """Give an ABSENT object a slot, evicting if need be. The caller asked :meth:`lacking`."""
        slot = self._make_room(obj)
        obj.advance(Verb.RESERVE)
        self._own(obj, slot)
        obj.advance(Verb.FILL)

    def reserve_at(self, obj: Obj, slot: int) -> None:
        """Give an ABSENT object this very slot; an evictable occupant leaves.

        Raises ProtocolError where the slot can be neither taken nor vacated.
        """
        occupant = self.owner[slot]
        if occupant is not None:
            self.evict(occupant)
        self._keep_limits(obj)
        self.pools[obj.group, obj.shard].free.remove(slot)
        obj.advance(Verb.RESERVE)
        self._own(obj, slot)
        obj.advance(Verb.FILL)

    def reserve_restore(self, obj: Obj) -> None:
        """Give an ON_TIER object a slot to be restored into."""
        slot = self._make_room(obj)
        obj.advance(Verb.SWAP_IN)
        self._own(obj, slot)

    def _make_room(self, obj: Obj) -> int:
        """A free slot for the object, its limits kept: whatever must leave for that leaves now."""
        pool = self.pools[obj.group, obj.shard]
        self._keep_limits(obj)
        if not pool.free:
            self._push_out(self.leaving.victim((pool,), None, f"pool {pool.group}/{pool.shard}"))
        return pool.free.pop()

    def worths(self, objects: Sequence[Obj]) -> list[float]:
        """What the policy says each of these objects, which have slots here, is worth."""
        slots = np.array([obj.slot for obj in objects], dtype=np.int64)
        if not len(slots):
            return []
        values = self.leaving.policy.values(slots, len(slots), self.now_s)
        raised: list[float] = self.leaving.retained.raised(slots, values, self.now_s).tolist()
        return raised

    def room_for(self, obj: Obj, worth: float) -> bool:
        """Whether a slot is free for an object, or is made so by letting go what is worth less."""
        if self.lacking([obj]) is not None:
            return False
        pool = self.pools[obj.group, obj.shard]
        if not pool.free:
            victim = self.leaving.victim((pool,), None, f"pool {pool.group}/{pool.shard}")
            if self.leaving.value[victim.slot] >= worth:
                return False
            self._push_out(victim)
        return True

    def _keep_limits(self, obj: Obj) -> None:
        """Let what must leave before this object is charged."""
        while (scope := self.admission.over(obj)) is not None:
            limit, groups = scope.limit, self.model.groups
            pools = [
                pool
                for pool in self.pools.values()
                if limit.kind in (None, groups[pool.group].kind) and scope.makes_room(groups[pool.group].kind, obj.kind)
            ]
            tenant = obj.tenant if limit.tenant is not None or limit.each_tenant else None
            self._push_out(self.leaving.victim(pools, tenant, f"limit {limit}"))

    def _push_out(self, victim: Obj) -> None:
        """A victim makes room, and what nobody can reach without it."""
        for obj in (*self.leaving.company(victim), victim):
            self.victims += 1
            self.leaving.policy.left(obj.slot, obj.digest, self.now_s)
            self.evict(obj)

    def _own(self, obj: Obj, slot: int) -> None:
        self.owner[slot] = obj
        self.uses[slot] = 0
        self.admission.charge(obj)
        obj.slot, obj.books = slot, self
        obj.version = self.arena.begin_write(slot)
        self.versions[slot] = obj.version

    # --- objects' lives ------------------------------------------------------------------------

    def seal(self, obj: Obj, checksum: bytes) -> None:
        """The bytes of a FILLING object stand; it is not visible yet."""
        obj.advance(Verb.SEAL)
        self._record(obj, checksum)

    def seal_all(self, objects: Sequence[Obj], checksums: bytes) -> None:
        """:meth:`seal` for all objects of an attempt at once; a checksum is 16 bytes."""
        if not objects:
            return
        for i, obj in enumerate(objects):
            obj.advance(Verb.SEAL)
            obj.checksum = checksums[16 * i : 16 * i + 16]
        slots = np.array([obj.slot for obj in objects], dtype=np.int64)
        lengths, revisions = [obj.length for obj in objects], [obj.revision for obj in objects]
        self.lengths[slots], self.revisions[slots] = lengths, revisions
        self.checksums[slots] = np.frombuffer(checksums, dtype="<u8").reshape(-1, 2)
        self.abi_numbers[slots] = [self._number_of(obj.abi) for obj in objects]
        self.positions[slots] = [obj.position for obj in objects]
        self.first_out[slots] = [obj.first_out for obj in objects]
        self.arena.seal_all(slots, lengths, checksums, b"".join(obj.digest[:16] for obj in objects), revisions)

    def _number_of(self, abi: Abi) -> int:
        number = self._abi_number.get(abi)
        if number is None:
            number = self._abi_number[abi] = len(self.abis)
            self.abis.append(abi)
        return number

    def _record(self, obj: Obj, checksum: bytes) -> None:
        """The slot's bytes are those of this checksum: in the books, then in the header."""
        slot = obj.slot
        obj.checksum = checksum
        self.lengths[slot] = obj.length
        self.revisions[slot] = obj.revision
        self.checksums[slot] = np.frombuffer(checksum, dtype="<u8")
        self.abi_numbers[slot] = self._number_of(obj.abi)
        self.positions[slot] = obj.position
        self.first_out[slot] = obj.first_out
        self.arena.seal(slot, obj.length, checksum, obj.digest[:16], obj.revision)

    def install(self, obj: Obj) -> None:
        """Make a SEALED object the visible one of its key; what it replaces leaves by its kind's verb."""
        self.install_all([obj])

    def install_all(self, objects: Sequence[Obj]) -> None:
        """Make SEALED objects visible that came together; those of one group and shard stand in a row."""
        for obj in objects:
            self._install(obj)
        for key, run in groupby(objects, key=lambda obj: (obj.group, obj.shard)):
            self._arrived(key, list(run))

    def _arrived(self, key: tuple[int, int], run: Sequence[Obj]) -> None:
        slots = np.array([obj.slot for obj in run], dtype=np.int64)
        self.leaving.touched(slots)
        digests, positions = [obj.digest for obj in run], [obj.position for obj in run]
        self.leaving.policy.arrived(Arrivals(self.shapes[key], slots, digests, positions, self.tick), self.now_s)

    def _install(self, obj: Obj) -> None:
        table = self.table[obj.group, obj.shard]
        old = table.get(obj.digest)
        if old is not None:
            self.retire(old, announce=False)
        obj.visible = True
        self.last_use[obj.slot] = self.tick
        table[obj.digest] = obj
        self.settled[obj.slot] = True
        self.leaving.link(obj)
        self._serve(obj)
        if obj.evictable:
            self._became_evictable(obj)
        self._changed(Change(obj, gone=False, evicted=False))

    def restored(self, obj: Obj, checksum: bytes) -> None:
        """A RESTORING object's bytes stand and are verified."""
        obj.advance(Verb.SWAPPED_IN)
        self._record(obj, checksum)
        self.last_use[obj.slot] = self.tick
        self.settled[obj.slot] = True
        self.leaving.link(obj)
        self._arrived((obj.group, obj.shard), [obj])
        self._serve(obj)
        if obj.evictable:
            self._became_evictable(obj)
        self._changed(Change(obj, gone=False, evicted=False))

    def restore_failed(self, obj: Obj, reason: Reason, *, for_good: bool) -> None:
        """A RESTORING object falls back to its tier, marked bad if its bytes there are."""
        obj.advance(Verb.RESTORE_FAILED)
        self._free(obj)
        if for_good:
            obj.bad, obj.bad_from_tier = reason, True
            self._changed(Change(obj, gone=False, evicted=False))

    def mark_bad(self, obj: Obj, reason: Reason) -> bool:
        """The bytes in memory proved wrong: keep the record (hashes still match), never serve it.

        False where a copy below takes their place, to be restored and judged by itself.
        """
        if obj.visible and obj.state is State.SEALED and obj.on_a_tier and obj.bad is None:
            self._fall_back(obj)
            return False
        if obj.bad is None:
            obj.bad = reason
            self.make_first_out(obj)
            if obj.visible:
                self._serve_no_more(obj)
                self._changed(Change(obj, gone=False, evicted=False))
        return True

    def _fall_back(self, obj: Obj) -> None:
        """The copy in memory leaves, at once or once unpinned; the one below is the visible one from here on."""
        copy = replace(
            obj, state=State.ABSENT, slot=-1, version=0, visible=False, first_out=False, books=None, linked=False
        )
        obj.on_disk, obj.below = None, -1
        self._leave(obj, Verb.EVICT, evicted=False, announce=False)
        self.find_on_disk(copy)
        self.taken_over(copy)

    def bar(self, obj: Obj, reason: Reason) -> None:
        """Never serve this visible object again, whatever copies it has: its record stays, its readers are refused."""
        if obj.state is State.RESTORING:
            self.retire(obj)
            return
        if obj.on_disk is not None and obj.slot >= 0:
            self.disk_dropped.append(obj.on_disk)
            obj.on_disk = None
        if obj.below >= 0 and obj.slot >= 0:
            self.below_dropped.append(obj.below)
            obj.below = -1
        obj.bad, obj.bad_from_tier = reason, obj.slot < 0
        if obj.slot >= 0:
            self.arena.vacate(obj.slot, SlotState.QUARANTINED)
            self._serve_no_more(obj)
            self.make_first_out(obj)
        self._changed(Change(obj, gone=False, evicted=False))

    def make_first_out(self, obj: Obj) -> None:
        """Let this object make room before any other."""
        obj.first_out = True
        if obj.slot >= 0:
            self.first_out[obj.slot] = True
            self.leaving.again()

    def retire(self, obj: Obj, *, announce: bool = True) -> None:
        """A commit outdated this visible object: by its kind's verb it leaves, at once or once unpinned.

        One that is being restored is quarantined: the read may still write to its slot.
        """
        if obj.state is State.RESTORING:
            self.quarantine(obj)
            return
        self._leave(obj, REPLACE_VERB[obj.kind], evicted=False, announce=announce)

    def evict(self, obj: Obj) -> None:
        """Take an unpinned object out of memory; a copy on disk keeps it findable."""
        if obj.pins:
            raise ProtocolError(f"a pinned {obj.kind} object cannot be evicted")
        if obj.on_a_tier and obj.bad is None:
            self._no_longer_evictable(obj)
            self.settled[obj.slot] = False
            obj.advance(Verb.EVICT)
            obj.advance(Verb.FALL_BACK)
            self._serve_no_more(obj)
            self._free(obj)
            self._changed(Change(obj, gone=False, evicted=False))
            return
        if self.writing is not None:
            self.writing.left(obj.digest)
        self._leave(obj, Verb.EVICT, evicted=True, announce=True)

    def forget(self, obj: Obj, *, evicted: bool) -> None:
        """An ON_TIER object whose last copy on a tier is gone."""
        obj.advance(Verb.LOSE)
        self._hide(obj)
        self._changed(Change(obj, gone=True, evicted=evicted))

    def _leave(self, obj: Obj, verb: Verb, *, evicted: bool, announce: bool) -> None:
        if obj.evictable:
            self._no_longer_evictable(obj)
        if obj.slot >= 0:
            self.settled[obj.slot] = False
        obj.advance(verb)
        self._hide(obj)
        if announce:
            self._changed(Change(obj, gone=True, evicted=evicted))
        if obj.state is State.EVICTING:
            if obj.pins:
                self._leaving.add(obj.slot)
            else:
                self._vacate(obj)

    def _changed(self, change: Change) -> None:
        self.generation += 1
        self.changes.append(change)

    def _hide(self, obj: Obj) -> None:
        self.generation += 1
        obj.visible = False
        if obj.on_disk is not None:
            self.disk_dropped.append(obj.on_disk)
            obj.on_disk = None
        if obj.below >= 0:
            self.below_dropped.append(obj.below)
            obj.below = -1
        table = self.table[obj.group, obj.shard]
        if table.get(obj.digest) is obj:
            del table[obj.digest]
            self._serve_no_more(obj)

    def demote(self, obj: Obj) -> None:
        """Begin writing a sealed object to a tier. The write holds a pin; the bytes stay readable."""
        self.pin(obj)
        self.settled[obj.slot] = False
        obj.advance(Verb.SWAP_OUT)

    def demoted(self, obj: Obj, extent: int, entry: int) -> None:
        """The extent stands: it is the object's, unless a commit outdated that meanwhile."""
        if obj.state is not State.DEMOTING:
            self.disk_dropped.append((extent, entry))
            self.unpin(obj)
            return
        if obj.on_disk is not None:
            self.disk_dropped.append(obj.on_disk)
        obj.on_disk = (extent, entry)
        self.copied_down(obj)

    def copied_down(self, obj: Obj) -> None:
        """A DEMOTING object's copy on a tier stands: free the slot, unless a reader pinned it meanwhile."""
        if obj.pins > 1:
            obj.advance(Verb.SWAP_FAILED)
            self.settled[obj.slot] = True
            self.unpin(obj)
            return
        self.pins[obj.slot] = 0
        obj.advance(Verb.SWAPPED_OUT)
        self._serve_no_more(obj)
        self._free(obj)
        self._changed(Change(obj, gone=False, evicted=False))

    def demotion_failed(self, obj: Obj) -> None:
        """Nothing was written: the object stays in memory."""
        if obj.state is State.DEMOTING:
            obj.advance(Verb.SWAP_FAILED)
            self.settled[obj.slot] = True
        self.unpin(obj)

    def find_on_disk(self, obj: Obj) -> None:
        """This object has a copy in an extent (of an earlier life, say) and none in memory."""
        obj.advance(Verb.FIND)
        obj.visible = True
        self.table[obj.group, obj.shard][obj.digest] = obj
        self._changed(Change(obj, gone=False, evicted=False))

    def give_up(self, obj: Obj) -> None:
        """A FILLING object will not be sealed, and nothing can write to its slot any more."""
        obj.advance(Verb.GIVE_UP)
        self._free(obj)

    def quarantine(self, obj: Obj) -> None:
        """A FILLING or RESTORING object whose slot foreign bytes may still reach."""
        was_visible = obj.visible
        obj.advance(Verb.QUARANTINE)
        self.quarantined_bytes[obj.kind] += self.model.groups[obj.group].block_bytes
        self.arena.vacate(obj.slot, SlotState.QUARANTINED)
        if was_visible:
            self._hide(obj)
            self._changed(Change(obj, gone=True, evicted=False))

    def quiet(self, obj: Obj) -> None:
        """Proven: nothing writes to this quarantined object's slot any more."""
        obj.advance(Verb.QUIET)
        self.quarantined_bytes[obj.kind] -= self.model.groups[obj.group].block_bytes
        self._free(obj)

    def _serve(self, obj: Obj) -> None:
        self.ready[obj.group, obj.shard][obj.digest] = obj.slot
        self.serving[obj.slot] = True

    def _serve_no_more(self, obj: Obj) -> None:
        slot = self.ready[obj.group, obj.shard].pop(obj.digest, None)
        if slot is not None:
            self.serving[slot] = False

    def _vacate(self, obj: Obj) -> None:
        obj.advance(Verb.VACATE)
        self._free(obj)

    def _free(self, obj: Obj) -> None:
        """Take the object's slot back."""
        self.arena.vacate(obj.slot)
        self.leaving.unlink(obj)
        self.settled[obj.slot] = False
        self.owner[obj.slot] = None
        self.pools[obj.group, obj.shard].free.append(obj.slot)
        self.admission.discharge(obj)
        obj.slot = -1
        self.room_gained += 1

    # --- pins ----------------------------------------------------------------------------------

    def pin(self, obj: Obj) -> None:
        if obj.evictable:
            self._no_longer_evictable(obj)
        self.pins[obj.slot] += 1

    def unpin(self, obj: Obj) -> None:
        """Raises ProtocolError below zero: a pin ends once."""
        if obj.pins <= 0:
            raise ProtocolError(f"a {obj.kind} object is not pinned")
        self.pins[obj.slot] -= 1
        if obj.pins:
            return
        if obj.state is State.EVICTING:
            self._leaving.discard(obj.slot)
            self._vacate(obj)
        elif obj.evictable:
            self._became_evictable(obj)

    def pin_slots(self, claim: Claim) -> None:
        """Pin usable objects, each slot once."""
        slots = claim.slots
        if not len(slots):
            return
        if self.admission.limits:
            for slot in slots.tolist():
                self.pin(self._owner(slot))
            return
        pins = self.pins[slots]
        for pool, idle in zip(claim.pools, _count(pins == 0, claim.starts), strict=True):
            self.pools[pool].evictable -= idle
        self.pins[slots] = pins + 1

    def unpin_slots(self, claim: Claim) -> None:
        """End one pin each. What nothing pins any more can be evicted, or leaves if it was outdated."""
        slots = claim.slots
        if not len(slots):
            return
        if self.admission.limits or (self._leaving and not self._leaving.isdisjoint(slots.tolist())):
            for slot in slots.tolist():
                self.unpin(self._owner(slot))
            return
        pins = self.pins[slots] - 1
        self.pins[slots] = pins
        idle = pins == 0
        if not idle.any():
            return
        for pool, count in zip(claim.pools, _count(idle, claim.starts), strict=True):
            self.pools[pool].evictable += count
        self.room_gained += 1

    def freeze(self, slots: Slots, by: int) -> None:
        """A graph lease begins (+1) or ended (-1) over these slots."""
        self.frozen[slots] += by

    def _owner(self, slot: int) -> Obj:
        obj = self.owner[slot]
        if obj is None:
            raise ProtocolError(f"slot {slot} is free: it can be neither pinned nor let go")
        return obj

    def _became_evictable(self, obj: Obj) -> None:
        self.pools[obj.group, obj.shard].evictable += 1
        self.admission.evictable(obj, 1)
        self.room_gained += 1

    def _no_longer_evictable(self, obj: Obj) -> None:
        self.pools[obj.group, obj.shard].evictable -= 1
        self.admission.evictable(obj, -1)


class Entry(NamedTuple):
    """What one holder has of one object, as columns are built from it."""

    in_memory: bool
    revision: int
    abi: Abi
    bad: Reason | None
    bad_from_tier: bool
    version: bytes


def entry_of(obj: Obj) -> Entry:
    """An object's entry: bytes that are being written to disk are still in memory."""
    in_memory = obj.state is State.SEALED or obj.state is State.DEMOTING
    return Entry(in_memory, obj.revision, obj.abi, obj.bad, obj.bad_from_tier, obj.version.to_bytes(8, "little"))


def column_of(holder: str, incarnation: int, group: int, shard: int, entries: Iterable[tuple[int, Entry]]) -> Column:
    """One holder's column from its entries by index, ascending."""
    memory = tier = 0
    revisions: dict[int, int] = {}
    abis: dict[Abi, int] = {}
    bad: dict[tuple[Reason, bool], int] = {}
    versions = []
    for i, entry in entries:
        bit = 1 << i
        if entry.bad is not None:
            bad[entry.bad, entry.bad_from_tier] = bad.get((entry.bad, entry.bad_from_tier), 0) | bit
        elif entry.in_memory:
            memory |= bit
            versions.append(entry.version)
        else:
            tier |= bit
        revisions[entry.revision] = revisions.get(entry.revision, 0) | bit
        abis[entry.abi] = abis.get(entry.abi, 0) | bit
    return Column(
        holder,
        incarnation,
        group,
        shard,
        memory,
        tier,
        revisions,
        tuple(abis.items()),
        tuple((reason, from_tier, bits) for (reason, from_tier), bits in bad.items()),
        b"".join(versions),
    )


def held_refusal(objects: Iterable[Obj]) -> Reason | None:
    """Why objects may not be moved or freed: a graph holds one, or a pin does."""
    pinned: Reason | None = None
    for obj in objects:
        if obj.frozen:
            return Reason.GRAPH_FROZEN
        if obj.pins:
            pinned = Reason.PINNED
    return pinned


def slot_run(group: int, shard: int, indices: Sequence[int], objects: Sequence[Obj]) -> SlotRun:
    """The slots and versions of objects, packed."""
    return SlotRun(
        group,
        shard,
        tuple(indices),
        b"".join(obj.slot.to_bytes(4, "little") for obj in objects),
        b"".join(obj.version.to_bytes(8, "little") for obj in objects),
    )
