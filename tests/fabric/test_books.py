"""A holder's books: who owns each slot, and who leaves to make room."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvfabric.fabric.arena import ArenaLayout, PoolLayout, SlotState, heap_arena
from kvfabric.fabric.books import Books
from kvfabric.fabric.claims import Claim
from kvfabric.fabric.kinds import ProtocolError, Reason
from kvfabric.fabric.lifecycle import State
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.objects import Obj
from kvfabric.fabric.passport import AbiPassport

MODEL = ModelSpec.load(
    {
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 64},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 8, "block_bytes": 64},
        ]
    }
)
ABI = AbiPassport().abi()
SLOTS = 4


@pytest.fixture
def books() -> Books:
    layout = ArenaLayout([PoolLayout(g, 0, SLOTS, 64) for g in range(2)])
    return Books(MODEL, (0,), heap_arena(layout, 1))


def obj(name: int, group: int = 0, position: int = 4, revision: int = 0) -> Obj:
    digest = bytes([name, group]) * 16
    return Obj(
        kind=MODEL.groups[group].kind,
        group=group,
        shard=0,
        digest=digest,
        position=position,
        namespace=b"n" * 32,
        weights=b"w" * 16,
        tenant="",
        revision=revision,
        length=64,
        abi=ABI,
    )


def put(books: Books, new: Obj) -> Obj:
    """Reserve, fill, seal, install."""
    assert books.lacking([new]) is None
    books.reserve(new)
    books.seal(new, bytes(16))
    books.install(new)
    books.touch([new])
    return new


def present(books: Books, group: int = 0) -> set[int]:
    return {digest[0] for digest in books.table[group, 0]}


def test_a_slot_is_free_or_has_one_owner(books: Books) -> None:
    first = put(books, obj(1))
    assert books.owner[first.slot] is first
    assert first.slot not in books.pools[0, 0].free
    books.evict(first)
    assert first.slot == -1
    assert len(books.pools[0, 0].free) == SLOTS


def test_kinds_never_share_a_free_list(books: Books) -> None:
    for name in range(SLOTS):
        put(books, obj(name))
    assert books.lacking([obj(9)]) is None, "its own kind makes room"
    lack = books.lacking([obj(n, group=1) for n in range(SLOTS + 1)])
    assert lack is not None
    assert (lack.group, lack.reason) == (1, Reason.ADMISSION_LIMIT)
    assert {o.group for o in books.owner[:SLOTS] if o} == {0}


def test_room_comes_from_the_least_recently_used(books: Books) -> None:
    objects = [put(books, obj(name)) for name in range(SLOTS)]
    books.touch([objects[0]])
    put(books, obj(10))
    put(books, obj(11))
    assert present(books) == {0, 3, 10, 11}


def test_of_one_use_the_far_end_of_the_chain_leaves_first(books: Books) -> None:
    objects = [put(books, obj(name, position=4 * (name + 1))) for name in range(SLOTS)]
    books.touch(objects)
    put(books, obj(10))
    assert present(books) == {0, 1, 2, 10}


def test_what_is_pinned_makes_no_room(books: Books) -> None:
    objects = [put(books, obj(name)) for name in range(SLOTS)]
    for pinned in objects[:3]:
        books.pin(pinned)
    assert books.lacking([obj(10), obj(11)]) is not None
    put(books, obj(10))
    assert present(books) == {0, 1, 2, 10}
    with pytest.raises(ProtocolError, match="pinned"):
        books.evict(objects[0])
    books.unpin(objects[0])
    assert books.lacking([obj(11), obj(12)]) is None


def test_a_pin_ends_once(books: Books) -> None:
    one = put(books, obj(1))
    books.pin(one)
    books.pin(one)
    books.unpin(one)
    books.unpin(one)
    with pytest.raises(ProtocolError, match="not pinned"):
        books.unpin(one)


def test_pins_of_whole_runs_count_like_single_ones(books: Books) -> None:
    objects = [put(books, obj(name)) for name in range(3)]
    slots = np.array([o.slot for o in objects])
    books.pin(objects[0])
    claim = Claim.of([(0, 0, slots)])
    books.pin_slots(claim)
    assert [o.pins for o in objects] == [2, 1, 1]
    assert books.pools[0, 0].evictable == 0
    books.unpin_slots(claim)
    assert [o.pins for o in objects] == [1, 0, 0]
    assert books.pools[0, 0].evictable == 2


def test_unusable_bytes_make_room_before_all_others(books: Books) -> None:
    objects = [put(books, obj(name)) for name in range(SLOTS)]
    books.mark_bad(objects[3], Reason.CHECKSUM_MISMATCH)
    put(books, obj(10))
    assert present(books) == {0, 1, 2, 10}


def test_a_replaced_object_leaves_at_once_or_when_nobody_reads_it(books: Books) -> None:
    old = put(books, obj(1))
    new = put(books, obj(1, revision=1))
    assert (old.slot, old.state) == (-1, State.ABSENT)
    books.pin(new)
    newest = put(books, obj(1, revision=2))
    assert (new.state, new.slot >= 0) == (State.EVICTING, True)
    assert books.find(0, 0, newest.digest) is newest
    books.unpin(new)
    assert (new.state, new.slot) == (State.ABSENT, -1)


def test_a_header_changes_before_its_bytes_and_again_as_they_leave(books: Books) -> None:
    one = obj(1)
    books.reserve(one)
    slot, version = one.slot, one.version
    assert books.arena.state(slot) is SlotState.WRITING
    books.seal(one, b"s" * 16)
    assert (books.arena.state(slot), books.arena.version(slot)) == (SlotState.SEALED, version)
    books.install(one)
    books.evict(one)
    assert books.arena.version(slot) > version
    assert books.arena.state(slot) is SlotState.FREE


def test_what_is_quarantined_is_nobodys_until_it_is_quiet(books: Books) -> None:
    one = obj(1)
    books.reserve(one)
    slot = one.slot
    books.quarantine(one)
    assert books.arena.state(slot) is SlotState.QUARANTINED
    assert slot not in books.pools[0, 0].free
    assert books.lacking([obj(n) for n in range(2, 2 + SLOTS)]) is not None
    books.quiet(one)
    assert books.lacking([obj(n) for n in range(2, 2 + SLOTS)]) is None


def test_an_evicted_object_with_a_copy_on_disk_stays_findable(books: Books) -> None:
    one = put(books, obj(1))
    one.on_disk = (7, 0)
    books.evict(one)
    assert (one.state, one.slot) == (State.ON_TIER, -1)
    assert books.find(0, 0, one.digest) is one
    assert books.disk_dropped == []


@pytest.mark.parametrize("pinned", [False, True])
def test_an_object_that_is_bad_in_memory_falls_back_to_its_copy_on_disk(books: Books, pinned: bool) -> None:
    one = put(books, obj(1))
    one.on_disk = (7, 0)
    if pinned:
        books.pin(one)
    taken: list[Obj] = []
    books.taken_over = taken.append
    assert not books.mark_bad(one, Reason.CHECKSUM_MISMATCH)
    found = books.find(0, 0, one.digest)
    assert taken == [found]
    assert found is not None
    assert (found.state, found.slot, found.on_disk, found.bad) == (State.ON_TIER, -1, (7, 0), None)
    assert books.locate(0, 0, [one.digest]) == [-1]
    assert (one.state, one.slot >= 0) == ((State.EVICTING, True) if pinned else (State.ABSENT, False))
    if pinned:
        books.unpin(one)
    assert one.slot == -1
    assert books.disk_dropped == []


def test_an_object_that_is_bad_in_memory_and_nowhere_else_stays_marked(books: Books) -> None:
    one = put(books, obj(1))
    assert books.mark_bad(one, Reason.CHECKSUM_MISMATCH)
    assert books.find(0, 0, one.digest) is one
    books.evict(one)
    assert books.find(0, 0, one.digest) is None


def test_a_demoted_object_that_someone_pinned_meanwhile_stays_in_memory(books: Books) -> None:
    one = put(books, obj(1))
    books.demote(one)
    books.pin(one)
    books.demoted(one, 7, 0)
    assert (one.state, one.pins, one.on_disk) == (State.SEALED, 1, (7, 0))
    books.unpin(one)
    other = put(books, obj(2))
    books.demote(other)
    books.demoted(other, 8, 0)
    assert (other.state, other.slot) == (State.ON_TIER, -1)


def test_what_a_commit_outdates_while_it_is_written_out_leaves_both_places(books: Books) -> None:
    one = put(books, obj(1))
    books.demote(one)
    put(books, obj(1, revision=1))
    assert one.state is State.EVICTING
    books.demoted(one, 7, 0)
    assert (one.state, one.slot) == (State.ABSENT, -1)
    assert books.disk_dropped == [(7, 0)]


def test_an_object_replaced_while_it_is_restored_is_quarantined(books: Books) -> None:
    one = put(books, obj(1))
    one.on_disk = (7, 0)
    books.evict(one)
    books.reserve_restores([one])
    slot = one.slot
    put(books, obj(1, revision=1))
    assert one.state is State.QUARANTINED
    assert books.owner[slot] is one, "the read may still write there"
    books.quiet(one)
    assert books.owner[slot] is None


def held_by(books: Books) -> list[object]:
    """Everything the books say of objects, pools and headers, whichever of a pool's slots has which object."""
    columns: list[npt.NDArray[Any]] = [books.settled, books.serving, books.pins, books.versions, books.last_use]
    columns += [books.lengths, books.arena.versions, books.arena.states]
    there = {
        (o.group, o.digest): (o.state, o.visible, o.linked, [int(c[o.slot]) for c in columns])
        for o in books.owner
        if o is not None
    }
    assert {key: dict(slots) for key, slots in books.ready.items()} == {
        key: {o.digest: o.slot for o in table.values()} for key, table in books.table.items()
    }
    pools = [(len(pool.free), pool.evictable) for pool in books.pools.values()]
    free = sorted(int(c[slot]) for pool in books.pools.values() for slot in pool.free for c in columns)
    return [
        there,
        pools,
        free,
        books.victims,
        [(obj.digest, c.gone, c.evicted) for c in books.changes for obj in c.objects],
    ]


def test_what_is_done_to_many_is_what_is_done_to_each(books: Books) -> None:
    layout = ArenaLayout([PoolLayout(g, 0, SLOTS, 64) for g in range(2)])
    one_by_one = Books(MODEL, (0,), heap_arena(layout, 1))
    names = [[(1, 0), (2, 0), (1, 1)], [(2, 0), (3, 0)], [(4, 0), (5, 0), (4, 1), (5, 1)], [(6, 0), (1, 0)]]
    for step in names:
        together, singly = ([obj(name, group) for name, group in step] for _ in range(2))
        assert books.lacking(together) is one_by_one.lacking(singly) is None
        books.reserve_all(together)
        for new in singly:
            one_by_one.reserve(new)
        for which, objects in ((books, together), (one_by_one, singly)):
            which.seal_all(objects, bytes(16 * len(objects)))
            which.stored(objects)
        books.install_all(together)
        for new in singly:
            one_by_one.install(new)
        assert held_by(books) == held_by(one_by_one)
    leaving = [o for o in books.table[0, 0].values() if o.digest[0] % 2] + list(books.table[1, 0].values())
    assert len(leaving) > 2
    books.evict_all(leaving)
    for gone in leaving:
        one_by_one.evict(one_by_one.table[gone.group, 0][gone.digest])
    assert held_by(books) == held_by(one_by_one)
    assert sum(len(c.objects) for c in books.changes if c.gone) == len(leaving) + books.victims
    with pytest.raises(ProtocolError, match="pinned"):
        books.evict_all([pinned_of(books)])


def pinned_of(books: Books) -> Obj:
    one = next(o for o in books.owner if o is not None)
    books.pin(one)
    return one


def test_of_two_objects_of_one_name_that_come_together_the_later_is_found(books: Books) -> None:
    twins = [obj(1), obj(1), obj(2)]
    books.reserve_all(twins)
    books.seal_all(twins, bytes(48))
    books.install_all(twins)
    assert [o.visible for o in twins] == [False, True, True]
    assert books.find(0, 0, twins[1].digest) is twins[1]
    assert (len(books.pools[0, 0].free), books.pools[0, 0].evictable) == (SLOTS - 2, 2)
