"""The lives of a holder's objects in its slots: sealed, installed, pinned, moved between tiers, evicted, freed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from .arena import SlotState
from .claims import Claim, Slots, count_runs, every
from .eviction import Arrivals
from .holdings import Holdings
from .kinds import ProtocolError, Reason
from .lifecycle import REPLACE_VERB, State, Verb
from .objects import Change, Obj, advance_all, by_place, slots_of
from .passport import Abi


class Lives(Holdings):
    """Each verb moves one object on, keeps the counts and the arena's headers in step, and notes what changed."""

    # --- objects' lives ------------------------------------------------------------------------

    def seal(self, obj: Obj, checksum: bytes) -> None:
        """The bytes of a FILLING object stand; it is not visible yet."""
        obj.advance(Verb.SEAL)
        self._record(obj, checksum)

    def seal_all(self, objects: Sequence[Obj], checksums: bytes) -> None:
        """:meth:`seal` for all objects of an attempt at once; a checksum is 16 bytes."""
        if not objects:
            return
        advance_all(objects, Verb.SEAL)
        for i, obj in enumerate(objects):
            obj.checksum = checksums[16 * i : 16 * i + 16]
        self._record_all(objects, checksums)

    def _record_all(self, objects: Sequence[Obj], checksums: bytes) -> None:
        """:meth:`_record` for objects whose checksums are set."""
        slots = slots_of(objects)
        # Of as many groups, mostly each with its own length: arrays are made of lists once.
        lengths = np.array([obj.length for obj in objects], dtype=np.int64)
        revisions = np.array([obj.revision for obj in objects], dtype=np.int64)
        self.lengths[slots], self.revisions[slots] = lengths, revisions
        self.checksums[slots] = np.frombuffer(checksums, dtype="<u8").reshape(-1, 2)
        self.abi_numbers[slots] = self._numbers_of(objects)
        self.positions[slots] = [obj.position for obj in objects]
        self.first_out[slots] = [obj.first_out for obj in objects]
        self.arena.seal_all(slots, lengths, checksums, b"".join([obj.digest[:16] for obj in objects]), revisions)

    def _number_of(self, abi: Abi) -> int:
        number = self._abi_number.get(abi)
        if number is None:
            number = self._abi_number[abi] = len(self.abis)
            self.abis.append(abi)
        return number

    def _numbers_of(self, objects: Iterable[Obj]) -> list[int]:
        """The number of each one's ABI: those of a group have the same one, mostly, and are looked up together."""
        numbers: list[int] = []
        last: Abi | None = None
        number = -1
        for obj in objects:
            if obj.abi is not last:
                last, number = obj.abi, self._number_of(obj.abi)
            numbers.append(number)
        return numbers

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
        for key, fresh in by_place(objects):
            self._install_run(key, fresh)
            self._arrived(key, [obj for obj in fresh if obj.visible])

    def _arrived(self, key: tuple[int, int], run: Sequence[Obj]) -> None:
        slots = slots_of(run)
        self.leaving.touched(slots)
        digests, positions = [obj.digest for obj in run], [obj.position for obj in run]
        self.losses.came(key[0], digests)
        base = self.ready[key].get(run[0].base, -1)
        arrivals = Arrivals(self.shapes[key], slots, digests, positions, self.tick, base)
        self.leaving.policy.arrived(arrivals, self.now_s)

    def _install_run(self, key: tuple[int, int], run: Sequence[Obj]) -> None:
        """SEALED objects of one group and shard: found from here on, in place of what they replace."""
        table = self.table[key]
        shown: list[Obj] = []
        for obj in run:
            old = table.get(obj.digest)
            if old is not None:
                self._show(key, shown)
                shown = []
                self.retire(old, announce=False)
            table[obj.digest] = obj
            shown.append(obj)
        self._show(key, shown)

    def _show(self, key: tuple[int, int], objects: Sequence[Obj]) -> None:
        """These SEALED objects, each the one of its digest in the table, are visible."""
        if not objects:
            return
        ready = self.ready[key]
        for obj in objects:
            obj.visible = True
            ready[obj.digest] = obj.slot
        self.leaving.link_all(key, objects)
        slots = slots_of(objects)
        self.last_use[slots] = self.tick
        self.settled[slots] = True
        self.serving[slots] = True
        pinned = np.count_nonzero(self.pins[slots])
        self._all_became_evictable(key, [obj for obj in objects if obj.evictable] if pinned else objects)
        self._changed(objects, gone=False, evicted=False)

    def is_current(self, obj: Obj) -> bool:
        """Whether an object is the visible one of its key still."""
        return self.find(obj.group, obj.shard, obj.digest) is obj

    def moved(self, old: Obj, new: Obj) -> None:
        """A pinned object's bytes stand in another slot as well, proven: that copy is the visible one from here on.

        It has the uses and the copies below of the old one, which leaves once nothing pins it.
        """
        self.seal(new, old.checksum)
        new.on_disk, old.on_disk = old.on_disk, None
        new.below, old.below = old.below, -1
        used, slots = old.last_use, (old.slot, new.slot)
        self.uses[new.slot] = self.uses[old.slot]
        self.leaving.moved(*slots)
        self._install_run((new.group, new.shard), [new])
        self.last_use[new.slot] = used
        if new.on_a_tier:
            self.taken_over(new)

    def restored_all(self, objects: Sequence[Obj]) -> None:
        """The bytes of RESTORING objects stand, and are those of their checksums."""
        if not objects:
            return
        advance_all(objects, Verb.SWAPPED_IN)
        self._record_all(objects, b"".join(obj.checksum for obj in objects))
        for key, back in by_place(objects):
            self._show(key, back)
            self._arrived(key, back)

    def restore_failed(self, obj: Obj, reason: Reason, *, for_good: bool) -> None:
        """A RESTORING object falls back to its tier, marked bad if its bytes there are."""
        obj.advance(Verb.RESTORE_FAILED)
        self._free(obj)
        if for_good:
            obj.bad, obj.bad_from_tier = reason, True
            self._changed([obj], gone=False, evicted=False)

    def wrong_on_disk(self, obj: Obj, reason: Reason) -> None:
        """The copy on disk proved wrong: it is given up where there is another, else the object is never served."""
        if obj.state is State.ON_TIER and obj.below < 0:
            obj.bad, obj.bad_from_tier = reason, True
            self._changed([obj], gone=False, evicted=False)
        elif obj.on_disk is not None:
            self.disk_dropped.append(obj.on_disk)
            obj.on_disk = None

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
                self._changed([obj], gone=False, evicted=False)
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
        self._changed([obj], gone=False, evicted=False)

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
            self._changed([obj], gone=False, evicted=False)
            return
        if self.writing is not None:
            self.writing.left(obj.digest)
        self._leave(obj, Verb.EVICT, evicted=True, announce=True)

    def evict_all(self, objects: Sequence[Obj]) -> None:
        """:meth:`evict` for many at once; those of one group and shard best stand in a row."""
        plain = self._all_plain(objects)
        if not plain:
            return
        slots = slots_of(plain)
        if self.writing is not None:
            for obj in plain:
                self.writing.left(obj.digest)
        advance_all(plain, Verb.EVICT, Verb.VACATE)
        self._changed(plain, gone=True, evicted=True)
        self.settled[slots] = False
        self.serving[slots] = False
        self.arena.vacate_all(slots, SlotState.FREE)
        for key, run in by_place(plain):
            table, ready, pool, owner = self.table[key], self.ready[key], self.pools[key], self.owner
            pool.evictable -= len(run)
            pool.give_back_all([obj.slot for obj in run])
            for obj in run:
                digest = obj.digest
                del table[digest]
                ready.pop(digest, None)
                if obj.linked:
                    self.leaving.unlink(obj)
                owner[obj.slot] = None
                obj.visible, obj.slot = False, -1
        self.room_gained += len(plain)

    def _all_plain(self, objects: Sequence[Obj]) -> Sequence[Obj]:
        """Those that need nothing but to leave memory; the others are evicted on the spot."""
        slots = slots_of(objects)
        on_tiers = [obj for obj in objects if obj.below >= 0 or obj.on_disk is not None]
        idle = every(self.settled[slots]) and not np.count_nonzero(self.pins[slots])
        if idle and not on_tiers and not self.admission.limits:
            return objects
        plain = []
        for obj in objects:
            if obj.on_a_tier or self.admission.limits or not obj.evictable:
                self.evict(obj)
            else:
                plain.append(obj)
        return plain

    def forget(self, obj: Obj, *, evicted: bool) -> None:
        """An ON_TIER object whose last copy on a tier is gone."""
        obj.advance(Verb.LOSE)
        self._hide(obj)
        self._changed([obj], gone=True, evicted=evicted)

    def _leave(self, obj: Obj, verb: Verb, *, evicted: bool, announce: bool) -> None:
        if obj.evictable:
            self._no_longer_evictable(obj)
        if obj.slot >= 0:
            self.settled[obj.slot] = False
        obj.advance(verb)
        self._hide(obj)
        if announce:
            self._changed([obj], gone=True, evicted=evicted)
        if obj.state is State.EVICTING:
            if obj.pins:
                self._leaving.add(obj.slot)
            else:
                self._vacate(obj)

    def _changed(self, objects: Sequence[Obj], *, gone: bool, evicted: bool) -> None:
        """These different objects changed, one after another."""
        self.generation += len(objects)
        self.changes.append(Change(tuple(objects), gone, evicted))

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
        self._changed([obj], gone=False, evicted=False)

    def stays(self, obj: Obj) -> None:
        """Nothing was written, or beside the object only: it stays in memory."""
        if obj.state is State.DEMOTING:
            obj.advance(Verb.SWAP_FAILED)
            self.settled[obj.slot] = True
        self.unpin(obj)

    def find_on_disk(self, obj: Obj) -> None:
        """This object has a copy in an extent (of an earlier life, say) and none in memory."""
        obj.advance(Verb.FIND)
        obj.visible = True
        self.table[obj.group, obj.shard][obj.digest] = obj
        self._changed([obj], gone=False, evicted=False)

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
            self._changed([obj], gone=True, evicted=False)

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
        self.pools[obj.group, obj.shard].give_back(obj.slot)
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
        counts = count_runs(pins == 0, claim.starts) if np.count_nonzero(pins) else claim.counts
        for pool, idle in zip(claim.pools, counts, strict=True):
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
        counts = claim.counts
        if np.count_nonzero(pins):
            idle = pins == 0
            if not np.count_nonzero(idle):
                return
            counts = count_runs(idle, claim.starts)
        for pool, count in zip(claim.pools, counts, strict=True):
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

    def _all_became_evictable(self, key: tuple[int, int], objects: Sequence[Obj]) -> None:
        self.pools[key].evictable += len(objects)
        self.room_gained += len(objects)
        if self.admission.limits:
            for obj in objects:
                self.admission.evictable(obj, 1)

    def _no_longer_evictable(self, obj: Obj) -> None:
        self.pools[obj.group, obj.shard].evictable -= 1
        self.admission.evictable(obj, -1)
