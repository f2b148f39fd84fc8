"""What a holder has: its objects by key, its pools, what is counted by slot, and how all that is found and used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from .admission import AdmissionBook, ByteLimit, TenantQuota
from .arena import Arena
from .claims import Slots, every
from .columns import bits_of, column_of, entry_of
from .eviction import EvictionFactory, HearsOutputs, LeastRecentlyUsed, PoolShape
from .identity import DIGEST_BYTES
from .kinds import ObjectKind
from .lifecycle import State
from .losses import Losses
from .messages import Column, Objects, Prompt, Room
from .model import ModelSpec
from .objects import Change, Obj, split
from .passport import Abi
from .pools import Pool, readers_pools
from .room import RoomBook, Structure
from .slabs import SlabBook
from .writing import DiskAdmission

NOBODY = "\0"
"""Who last had a slot that came from another pool: no tenant is called that."""

LAST_LOOKED = 64
"""So many of a prompt's last objects are looked for until one of them is there."""

_NOTHING: dict[bytes, int] = {}


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


class Holdings:
    """Objects, pools and slots of one holder, as they can be asked. What changes them: :class:`~.books.Books`."""

    victims: int = 0
    """Counts what left memory to make room."""
    now_s: float = 0.0
    """The time of the step under way."""
    writing: DiskAdmission | None = None
    """What may go to disk; None: everything."""
    last_tenants: dict[int, str] | None = None
    """By slot, whose state it last held, where a slot is overwritten before another tenant has it; else None."""

    def __init__(
        self,
        model: ModelSpec,
        shards: Sequence[int],
        arena: Arena,
        limits: Sequence[ByteLimit] = (),
        quotas: Mapping[str, TenantQuota] | None = None,
        *,
        eviction: EvictionFactory = LeastRecentlyUsed,
        slab_shares: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.admission = AdmissionBook(model, limits, quotas)
        self.shards = tuple(shards)
        self.arena = arena
        self.owner: list[Obj | None] = [None] * arena.layout.slots
        self.pools = readers_pools(arena.layout)
        self.slabs = SlabBook(arena, self.pools, slab_shares)
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
        policy = eviction(tuple(self.shapes.values()))
        self.leaving = RoomBook.of(self, policy, slots)
        self._hears_outputs = policy if isinstance(policy, HearsOutputs) else None
        self.losses = Losses(model, self.leaving.structure.prefix)
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
                there = [slot for slot in self.locate(group, shard, digests.get(spec.unit_tokens, ())) if slot >= 0]
                if there:
                    slots = np.array(there, dtype=np.int64)
                    self.leaving.retained.keep(slots, weight, self.now_s, ttl_s)
        self.leaving.again()

    def generated(self, prompt: Prompt, output_tokens: int) -> None:
        """The output that followed a prompt became so long: a policy that wants to know is told."""
        if self._hears_outputs is None:
            return
        keys, found = dict(prompt.keys), []
        for group, spec in enumerate(self.model.groups):
            blob = keys.get(spec.unit_tokens, b"")
            for shard in self.shards:
                last = self._last_of(group, shard, blob)
                if last >= 0:
                    found.append(last)
        if found:
            self._hears_outputs.generated(np.array(found, dtype=np.int64), output_tokens, self.now_s)

    def _last_of(self, group: int, shard: int, blob: bytes) -> int:
        """The slot of the last usable object in memory among the last few of these digests; -1: none is."""
        get = self.ready.get((group, shard), _NOTHING).get
        for end in range(len(blob), max(len(blob) - LAST_LOOKED * DIGEST_BYTES, 0), -DIGEST_BYTES):
            slot = get(blob[end - DIGEST_BYTES : end], -1)
            if slot >= 0:
                return slot
        return -1

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
            keys = digests.get(spec.unit_tokens, ())
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
        return not len(slots) or (every(revisions == revisions[0]) and every(abis == abis[0]))

    def abi_numbers_of(self, slots: Slots) -> list[int]:
        """The distinct ABIs (numbers into ``abis``) of these slots' objects; nearly always one."""
        numbers = self.abi_numbers[slots]
        if not len(numbers):
            return []
        first = numbers[0]
        return [int(first)] if every(numbers == first) else np.unique(numbers).tolist()

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
            if pool.evictable < len(table):  # else each one is in memory and unpinned
                for i, key in enumerate(digests.get(self.model.groups[group].unit_tokens, ())):
                    obj = table.get(key)
                    if obj is not None and (obj.state is State.RESTORING or (obj.pins and obj.slot >= 0)):
                        pinned |= 1 << i
            rooms.append(Room(group, shard, pool.room, pool.capacity, pinned))
        return rooms
