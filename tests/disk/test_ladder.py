"""The ladder GPU -> host memory -> disk: one way down and up, whatever the tier; no copy is lost or used unproven."""

from __future__ import annotations

from collections import Counter

import pytest

from kvfabric.fabric.arena import ArenaLayout, PoolLayout, SlotState
from kvfabric.fabric.effects import DiskState, Moved, Received, TransferDone, TransferFault, TransferQuiet
from kvfabric.fabric.invariants import check
from kvfabric.fabric.kinds import ObjectKind, Reason, Status, Tier
from kvfabric.fabric.lifecycle import State
from kvfabric.fabric.messages import Drop, SetWeights, SwapIn, SwapOut
from kvfabric.fabric.objects import Obj

from .one_disk import BLOCKS, WEIGHTS, Disk

OF_A_PROMPT = 2 * BLOCKS


def lying(d: Disk) -> Counter[str]:
    """How many objects have a copy where: in the readers' memory, in host memory, on disk."""
    found: Counter[str] = Counter()
    for obj in everything(d):
        found["readers"] += obj.state in (State.SEALED, State.DEMOTING)
        found["host"] += obj.below >= 0
        found["disk"] += obj.on_disk is not None
    return +found


def everything(d: Disk) -> list[Obj]:
    return [obj for table in d.core.ctx.books.table.values() for obj in table.values()]


def of(d: Disk, number: int) -> list[Obj]:
    return list(d.core.ctx.books.find_all(d.objects(number)))


def on_its_way_down(d: Disk, number: int) -> None:
    """Begin to swap out; the copies end when the test says so."""
    d.hold_copies = True
    assert d.ask(SwapOut(d.name(), d.objects(number))) is None


def no_disk(d: Disk) -> Disk:
    d.handle(DiskState(Reason.DISK_UNAVAILABLE))
    return d


def test_the_highest_tier_of_an_arena_is_what_readers_map() -> None:
    assert ArenaLayout([PoolLayout(0, 0, 1, 64)]).readers_tier is Tier.G2
    both = ArenaLayout([PoolLayout(0, 0, 2, 64, Tier.G2), PoolLayout(0, 0, 1, 64, Tier.G1)])
    assert both.readers_tier is Tier.G1
    d = Disk(5, host_slots=3)
    assert {pool.slots for pool in d.core.ctx.books.pools.values()} == {5}
    assert {pool.slots for pool in d.core.disk.host.pools.pools.values()} == {3}


def test_swapping_out_takes_host_memory_before_the_disk() -> None:
    d = Disk(8, host_slots=8)
    d.store(1)
    assert d.swap_out(1).refused is None
    assert lying(d) == {"host": OF_A_PROMPT}
    assert not d.extents
    assert {obj.state for obj in everything(d)} == {State.ON_TIER}
    assert all(pool.room == 8 for pool in d.core.ctx.books.pools.values())
    d.sound()


def test_a_copy_in_host_memory_is_pending_as_one_on_disk_is() -> None:
    answers = []
    for d in (Disk(8), Disk(8, host_slots=8)):
        d.store(1)
        d.swap_out(1)
        d.hold_copies = True
        for fields in ({"probe": True}, {"wait_s": 0.0}):
            answer = d.answer(d.acquire(1, **fields))
            assert answer is not None
            assert answer.cause is not None
            answers.append((answer.status, answer.tokens, answer.cause, answer.also, answer.grant))
            assert answer.expected_s is not None
            assert answer.expected_s > 0
    assert answers[:2] == answers[2:]
    assert answers[0][:2] == (Status.PENDING, 16 * BLOCKS)
    assert (answers[0][2].kind, answers[0][2].reason) == (ObjectKind.DISK_PREFIX, Reason.RESTORE_PENDING)


def test_what_comes_from_host_memory_is_expected_sooner_than_what_comes_from_the_disk() -> None:
    expected_s = []
    for d in (Disk(8, restore_bytes_per_s=1e6), Disk(8, host_slots=8, restore_bytes_per_s=1e6, host_bytes_per_s=1e7)):
        d.store(1)
        d.swap_out(1)
        answer = d.answer(d.acquire(1, probe=True))
        assert answer is not None
        assert answer.expected_s is not None
        expected_s.append(answer.expected_s)
    assert expected_s[0] == pytest.approx(10 * expected_s[1])


def test_nothing_is_granted_before_the_copy_back_has_landed() -> None:
    d = Disk(8, host_slots=8)
    d.store(1)
    d.swap_out(1)
    d.hold_copies = True
    waits = d.acquire(1)
    assert d.answer(waits) is None
    assert {obj.state for obj in everything(d)} == {State.RESTORING}
    d.sound()
    while d.copies:
        d.copy(d.copies[0])
    answer = d.answer(waits)
    assert answer is not None
    assert (answer.status, answer.tokens) == (Status.FULL_HIT, 16 * BLOCKS)
    assert answer.grant is not None
    for obj in everything(d):
        assert d.arena.state(obj.slot) is SlotState.SEALED
        assert (d.arena.payload(obj.slot) == d.arena.payload(obj.below)).all()
    d.sound()


def test_what_was_restored_goes_down_again_without_being_copied() -> None:
    d = Disk(8, host_slots=8)
    d.store(1)
    d.swap_out(1)
    d.release(d.acquire(1))
    d.hold_copies = True
    assert d.swap_out(1).refused is None
    assert not d.copies
    assert lying(d) == {"host": OF_A_PROMPT}


def test_a_copy_in_host_memory_that_turned_cuts_the_hit_there_with_its_cause() -> None:
    d = no_disk(Disk(8, host_slots=8))
    d.store(1)
    d.swap_out(1)
    third = next(obj for obj in of(d, 1) if obj.group == 0 and obj.position == 48)
    d.arena.payload(third.below)[7] ^= 1
    answer = d.answer(d.acquire(1))
    assert answer is not None
    assert (answer.status, answer.tokens) == (Status.PARTIAL_HIT, 32)
    assert answer.cause is not None
    assert (answer.cause.group, answer.cause.kind) == ("kv", ObjectKind.DISK_PREFIX)
    assert answer.cause.reason is Reason.CHECKSUM_MISMATCH
    d.sound()


def test_where_the_copy_in_host_memory_turned_the_one_on_disk_is_taken() -> None:
    d = Disk(8, host_slots=4)
    d.on_disk(1, 2)  # 1 overflows to the disk
    assert lying(d) == {"host": OF_A_PROMPT, "disk": OF_A_PROMPT}
    d.acquire(1)
    d.finish_all()  # through host memory: 1 lies in all three now
    assert {(obj.below >= 0, obj.on_disk is not None) for obj in of(d, 1)} == {(True, True)}
    d.wait(40.0)
    d.swap_out(1)
    for obj in of(d, 1):
        d.arena.payload(obj.below)[0] ^= 1
    waits = d.acquire(1)
    assert d.answer(waits) is None
    d.finish_all()
    answer = d.answer(waits)
    assert answer is not None
    assert (answer.status, answer.tokens) == (Status.FULL_HIT, 16 * BLOCKS)
    d.sound()


def test_the_oldest_copies_make_room_on_the_disk() -> None:
    d = Disk(16, host_slots=BLOCKS)
    d.on_disk(1, 2, 3)
    assert {(obj.below >= 0, obj.on_disk is not None) for obj in of(d, 3)} == {(True, False)}
    for number in (1, 2):
        assert {(obj.below >= 0, obj.on_disk is not None) for obj in of(d, number)} == {(False, True)}
    for number in (1, 2, 3):
        waits = d.acquire(number)
        d.finish_all()
        answer = d.answer(waits)
        assert answer is not None
        assert answer.status is Status.FULL_HIT
    d.sound()


def test_what_is_on_disk_comes_back_through_host_memory() -> None:
    d = Disk(8, host_slots=BLOCKS)
    d.on_disk(1, 2)
    waits = d.acquire(1)
    host = range(16, 16 + 2 * BLOCKS)
    assert {slot in host for read in d.reads for _, _, slot in read.reads} == {True}
    d.finish_all()
    assert d.answer(waits) is not None
    assert lying(d)["readers"] == OF_A_PROMPT
    d.sound()


@pytest.mark.parametrize("host_slots", [1, 2, 3])
def test_a_prompt_longer_than_host_memory_passes_through_it_both_ways(host_slots: int) -> None:
    d = Disk(8, host_slots=host_slots)
    d.on_disk(1)
    assert lying(d)["host"] + lying(d)["disk"] >= OF_A_PROMPT
    waits = d.acquire(1)
    d.finish_all()
    answer = d.answer(waits)
    assert answer is not None
    assert (answer.status, answer.tokens) == (Status.FULL_HIT, 16 * BLOCKS)
    d.sound()


def test_without_a_disk_nothing_newer_is_lost_for_what_is_swapped_out() -> None:
    d = no_disk(Disk(16, host_slots=BLOCKS))
    assert d.store(1) is None
    assert d.swap_out(1).refused is None
    assert d.store(2) is None
    assert d.swap_out(2).refused is None  # older copies leave for good
    assert not of(d, 1)
    assert lying(d) == {"host": OF_A_PROMPT}
    small = no_disk(Disk(8, host_slots=1))
    small.store(1)
    assert small.swap_out(1).refused is Reason.DISK_FULL
    assert lying(small) == {"host": 2, "readers": OF_A_PROMPT - 2}
    for each in (d, small):
        each.sound()


def test_a_disk_that_takes_nothing_loses_no_demotion_and_hangs_no_restore() -> None:
    d = Disk(16, host_slots=BLOCKS)
    d.on_disk(1)
    d.write_refused = Reason.DISK_FULL
    assert d.store(2) is None
    done = d.swap_out(2)
    kept = lying(d)
    assert kept["readers"] + kept["host"] >= OF_A_PROMPT
    assert done.refused in (None, Reason.DISK_FULL)
    assert len(of(d, 2)) == OF_A_PROMPT
    waits = d.acquire(2)
    d.finish_all()
    answer = d.answer(waits)
    assert answer is not None
    assert answer.status is Status.FULL_HIT
    d.sound()


def test_a_copy_down_that_fails_leaves_the_object_where_it_was() -> None:
    d = Disk(8, host_slots=8)
    d.store(1)
    on_its_way_down(d, 1)
    assert {obj.state for obj in everything(d)} == {State.DEMOTING}
    d.sound()
    for copy in list(d.copies):
        d.copy(copy, TransferFault.FAILED)
    assert {obj.state for obj in everything(d)} == {State.SEALED}
    assert [r.refused for r in d.replies.values()][-1] is Reason.TRANSFER_FAILED
    assert lying(d) == {"readers": OF_A_PROMPT}
    d.sound()


def test_what_is_pinned_while_it_is_copied_down_stays_and_has_both_copies() -> None:
    d = Disk(8, host_slots=8)
    d.store(1)
    on_its_way_down(d, 1)
    leased = d.acquire(1)
    answer = d.answer(leased)
    assert answer is not None
    assert answer.grant is not None
    for copy in list(d.copies):
        d.copy(copy)
    assert lying(d) == {"readers": OF_A_PROMPT, "host": OF_A_PROMPT}
    d.sound()
    d.release(leased)
    d.sound()


def test_what_a_commit_outdates_on_its_way_down_or_up_is_nobodys_copy() -> None:
    d = Disk(16, host_slots=8)
    d.store(1)
    on_its_way_down(d, 1)
    assert d.store(1) is None  # the same prompt anew, while its old bytes go down
    for copy in list(d.copies):
        d.copy(copy)
    assert lying(d) == {"readers": OF_A_PROMPT}
    d.hold_copies = False
    d.swap_out(1)
    d.hold_copies = True
    waits = d.acquire(1)
    d.sound()
    assert d.store(1) is None  # and while they come up: those slots are quarantined until the copy ends
    assert any(o is not None and o.state is State.QUARANTINED for o in d.core.ctx.books.owner)
    d.sound()
    d.hold_copies = False
    for copy in list(d.copies):
        d.copy(copy)
    answer = d.answer(waits)
    assert answer is not None
    assert answer.status is Status.FULL_HIT
    assert lying(d) == {"readers": OF_A_PROMPT}
    d.sound()


def test_a_copy_that_may_still_write_keeps_its_slots_until_it_is_proven_quiet() -> None:
    d = Disk(8, host_slots=8)
    d.store(1)
    on_its_way_down(d, 1)
    down = d.copies.pop(0)
    late = tuple(Moved(p.slot, None, TransferFault.TIMED_OUT, quiet=False) for p in down.pairs)
    d.handle(TransferDone(down.token, late))
    quarantined = [slot for slot in range(16, 32) if d.arena.state(slot) is SlotState.QUARANTINED]
    assert quarantined == sorted(p.slot for p in down.pairs)
    d.sound()
    d.handle(TransferQuiet(down.token))
    d.sound()
    d.copies.clear()
    assert all(d.arena.state(slot) is not SlotState.QUARANTINED for slot in range(16, 32))
    assert lying(d)["host"] == 0


def test_an_object_that_is_dropped_leaves_no_copy_below() -> None:
    d = Disk(8, host_slots=8)
    d.store(1)
    d.swap_out(1)
    d.release(d.acquire(1))
    assert lying(d) == {"readers": OF_A_PROMPT, "host": OF_A_PROMPT}
    d.ask(Drop(d.name(), d.objects(1)))  # takes it from memory; what lies below stays findable
    assert lying(d) == {"host": OF_A_PROMPT}
    assert d.store(1) is None  # replaced: the old copies are nobody's
    assert lying(d) == {"readers": OF_A_PROMPT}
    assert all(len(pool.free) == 8 for pool in d.core.disk.host.pools.pools.values())
    d.sound()


def test_copies_of_retired_weights_leave_host_memory_first() -> None:
    d = no_disk(Disk(16, host_slots=BLOCKS + 1))
    d.store(1)
    d.swap_out(1)
    d.handle(Received("supervisor", SetWeights(b"x" * 16, (WEIGHTS,), 1)))
    pool = d.core.disk.host.pools.pools[0, 0]
    assert [d.core.disk.host.pools.used_at[slot] for slot in pool.standing] == [0] * BLOCKS
    d.sound()


def test_swapping_in_brings_all_of_it_back() -> None:
    d = Disk(8, host_slots=BLOCKS)
    d.on_disk(1, 2)
    d.ask(SwapIn(d.name(), d.objects(2)))
    assert {obj.state for obj in of(d, 2)} == {State.SEALED}
    name = d.name()
    d.ask(Drop(d.name(), d.objects(2)))
    d.ask(SwapIn(name, d.objects(1)))
    d.finish_all()
    assert d.replies[name].refused is None
    assert {obj.state for obj in of(d, 1)} == {State.SEALED}
    d.sound()


def test_the_invariants_see_a_host_slot_that_is_lost_or_counted_twice() -> None:
    d = Disk(8, host_slots=8)
    d.store(1)
    d.swap_out(1)
    assert check(d.core) == []
    pool = d.core.disk.host.pools.pools[0, 0]
    lost = pool.free.pop()
    assert [v.invariant for v in check(d.core)] == ["nothing_is_lost"] * len(check(d.core))
    assert d.core.disk.host.pools.lost() == 1
    pool.free.append(lost)
    assert check(d.core) == []
    obj = next(iter(pool.standing.values()))
    obj.below, kept = -1, obj.below
    assert check(d.core)
    obj.below = kept
    assert check(d.core) == []
