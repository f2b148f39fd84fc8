"""Whose restore goes first, what it may take, and what is given up: the core's decisions, read by read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.fabric.effects import (
    DiskLost,
    DiskState,
    Received,
    Send,
    Undeliverable,
)
from kvfabric.fabric.extents import extent_bytes
from kvfabric.fabric.invariants import accounting
from kvfabric.fabric.kinds import ObjectKind, Reason, Status, Tier
from kvfabric.fabric.messages import (
    Acquire,
    Cancel,
    Lookup,
    PinEnd,
    PinReply,
    PinRequest,
    SwapOut,
)
from kvfabric.fabric.objects import Obj, split
from kvfabric.fabric.restores import Rate, RestoreLimit, RestoreQueue, Where
from kvfabric.fabric.series import quantile_s

from .one_disk import ABI, BLOCK, BLOCKS, WEIGHTS, Disk


def test_a_restore_ends_in_a_lease_over_the_stored_bytes() -> None:
    d = Disk()
    d.on_disk(1)
    request = d.acquire(1)
    assert d.answer(request) is None
    d.finish_all()
    answer = d.answer(request)
    assert answer is not None
    assert (answer.status, answer.tokens) == (Status.FULL_HIT, 64)
    d.sound()


# --- order -------------------------------------------------------------------------------------


def order_of(d: Disk, requests: Sequence[str]) -> list[str]:
    """Finish reads one at a time; the requests in the order of their answers."""
    seen: list[str] = []
    while d.reads:
        d.finish(d.reads[0])
        seen += [r for r in requests if r not in seen and d.answer(r) is not None]
    return seen


def one_at_a_time() -> Disk:
    return Disk(slots=64, restores_max=1, restore_share=1.0)


def test_the_earlier_deadline_is_restored_first() -> None:
    d = one_at_a_time()
    d.on_disk(1, 2, 3)
    late, none, soon = d.acquire(1, deadline_s=50.0), d.acquire(2), d.acquire(3, deadline_s=5.0)
    assert order_of(d, [late, none, soon]) == [soon, late, none]
    d.sound()


def test_a_higher_priority_is_restored_first_and_ageing_bounds_by_how_much() -> None:
    d = one_at_a_time()
    d.on_disk(1, 2, 3, 4)
    ordinary = d.acquire(1)
    urgent = d.acquire(2, priority=2)
    d.wait(9.0)
    urgent_later = d.acquire(3, priority=2)
    d.wait(2.0)
    too_late = d.acquire(4, priority=2)
    assert order_of(d, [ordinary, urgent, urgent_later, too_late]) == [urgent, urgent_later, ordinary, too_late]
    d.sound()


def test_a_parked_request_keeps_its_age_in_line() -> None:
    d = one_at_a_time()
    d.on_disk(1, 2)
    first = d.acquire(1)
    resumed = d.acquire(2, age_s=30.0)
    assert order_of(d, [first, resumed]) == [resumed, first]


def test_what_nobody_waits_for_is_restored_last() -> None:
    d = one_at_a_time()
    d.on_disk(1, 2)
    ahead = d.acquire(1, probe=True, prefetch=True)
    answer = d.answer(ahead)
    assert answer is not None
    assert answer.status is Status.PENDING
    awaited = d.acquire(2)
    before = d.core.ctx.counters["restored_objects"]
    while d.answer(awaited) is None:
        d.finish(d.reads[0])
    assert d.core.ctx.counters["restored_objects"] - before <= 9  # its own eight and the one that was being read
    d.finish_all()
    d.sound()


# --- caps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "most_bytes", "most_extents"), [((2 * BLOCK, 9), 2 * BLOCK, 9), ((99 * BLOCK, 1), 99 * BLOCK, 1)]
)
def test_bytes_and_extents_in_flight_of_one_kind_are_capped_and_other_kinds_go_on(
    limit: tuple[int, int], most_bytes: int, most_extents: int
) -> None:
    caps = (RestoreLimit(*limit, ObjectKind.COMPRESSED_HISTORY),)
    d = Disk(restore_limits=caps, restore_batch_bytes=BLOCK, restore_share=1.0)
    d.on_disk(1, 2, 3)
    requests = [d.acquire(n) for n in (1, 2, 3)]
    first_of_index = d.arena.layout.first_slot[1]
    while d.reads:
        reads = [read for effect in d.reads for read in effect.reads]
        history = [read for read in reads if read[2] < first_of_index]
        assert len(history) * BLOCK <= most_bytes
        assert len({extent for extent, _, _ in history}) <= most_extents
        if all(d.answer(r) is None for r in requests) and d.core.disk.restoring == 12 + len(history):
            assert len(reads) - len(history) == 12
        d.finish(d.reads[0])
    assert all((a := d.answer(r)) is not None and a.tokens == 64 for r in requests)
    d.sound()


def test_a_burst_of_restores_leaves_room_for_stores_and_every_restore_ends() -> None:
    d = Disk(slots=16)
    d.on_disk(*range(1, 13))
    requests = [d.acquire(n) for n in range(1, 13)]
    reserved = [sum(1 for obj in d.core.ctx.books.owner[first : first + 16] if obj) for first in (0, 16)]
    assert max(reserved) <= 8
    assert d.store(50) is None
    stored = d.acquire(50)
    assert (a := d.answer(stored)) is not None
    assert a.status is Status.FULL_HIT
    d.release(stored)
    done: set[str] = set()
    for _ in range(2000):
        if d.reads:
            d.finish(d.reads[0])
        for r in requests:
            if r not in done and d.answer(r) is not None:
                done.add(r)
                if (a := d.answer(r)) is not None and a.grant is not None:
                    d.release(r)
        if len(done) == len(requests):
            break
    answers = [d.answer(r) for r in requests]
    assert [a.tokens for a in answers if a is not None] == [64] * 12
    d.sound()


def pin_request(d: Disk, number: int) -> PinRequest:
    return PinRequest(f"n1/{number}", 1, d.prompt(number), d.objects(number), (0, 0), (ABI, ABI), False, True, 60.0)


def test_restores_for_other_holders_stand_in_the_same_line_and_end() -> None:
    d = Disk(slots=16)
    d.on_disk(*range(1, 5))
    for number in range(1, 5):
        d.handle(Received("n1", pin_request(d, number)))
    assert accounting(d.core).reserved == 2 * 8
    assert d.store(50) is None
    replies: list[str] = []
    while d.reads:
        d.finish(d.reads[0])
        for reply in d.sent:
            if isinstance(reply, PinReply) and reply.op not in replies:
                assert reply.refused is None
                assert sum(len(run.lengths) for run in reply.runs) == 8
                replies.append(reply.op)
                d.handle(Received("n1", PinEnd(reply.op, ())))
    assert sorted(replies) == [f"n1/{number}" for number in range(1, 5)]
    assert accounting(d.core).pins == 0
    d.sound()


def test_a_request_that_gave_up_in_line_is_not_restored_for() -> None:
    d = Disk(slots=16)
    d.on_disk(1, 2, 3)
    for number in (1, 2, 3):
        d.handle(Received("n1", pin_request(d, number)))
    d.handle(Received("n1", PinEnd("n1/3", ())))
    d.finish_all()
    assert accounting(d.core).on_tier == 8
    assert len(d.core.disk.line) == 0


def test_a_need_larger_than_the_share_goes_alone() -> None:
    d = Disk(slots=4)
    d.on_disk(1)
    request = d.acquire(1)
    d.finish_all()
    assert (a := d.answer(request)) is not None
    assert a.status is Status.FULL_HIT


# --- deadlines ---------------------------------------------------------------------------------


def test_what_would_be_late_is_given_up_at_once_and_what_would_not_is_awaited() -> None:
    d = Disk(restore_bytes_per_s=8 * BLOCK / 10.0)
    d.on_disk(1, 2)
    hopeless = d.acquire(1, deadline_s=9.0)
    answer = d.answer(hopeless)
    assert answer is not None
    assert (answer.status, answer.tokens, answer.hash_tokens) == (Status.PARTIAL_HIT, 0, 64)
    assert answer.cause is not None
    assert (answer.cause.reason, answer.cause.kind) == (Reason.DEADLINE_EXCEEDED, ObjectKind.DISK_PREFIX)
    assert d.reads == []
    hopeful = d.acquire(1, deadline_s=11.0)
    assert d.answer(hopeful) is None
    behind = d.acquire(2, deadline_s=12.0)
    assert (a := d.answer(behind)) is not None
    assert a.tokens == 0
    d.finish_all()
    assert (a := d.answer(hopeful)) is not None
    assert a.tokens == 64
    d.sound()


def test_a_deadline_that_passes_all_the_same_is_answered_from_memory() -> None:
    d = Disk()
    d.on_disk(1)
    request = d.acquire(1, deadline_s=5.0)
    d.wait(4.9)
    assert d.answer(request) is None
    d.wait(0.2)
    answer = d.answer(request)
    assert answer is not None
    assert (answer.tokens, answer.cause and answer.cause.reason) == (0, Reason.DEADLINE_EXCEEDED)
    d.finish_all()
    d.sound()


def test_the_estimate_is_learned_from_what_really_happened() -> None:
    d = Disk(restore_bytes_per_s=1e9)
    d.on_disk(*range(1, 8))
    for number in range(1, 7):
        request = d.acquire(number)
        for _ in range(len(d.reads)):
            d.wait(2.0)
            d.finish(d.reads[0])
        d.release(request)
    pending = d.answer(d.acquire(7, probe=True))
    assert pending is not None
    assert pending.status is Status.PENDING
    assert pending.expected_s == pytest.approx(2.0, rel=0.2)


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(0.001, 100)), min_size=1, max_size=50))
def test_a_learned_rate_stays_within_what_was_measured(samples: list[tuple[int, float]]) -> None:
    rate, now = Rate(1e9), 0.0
    for nbytes, seconds in samples:
        rate.done(nbytes, now, now + seconds)
        now += seconds
    rates = [nbytes / seconds for nbytes, seconds in samples]
    assert min(rates) * 0.999 <= rate.bytes_per_s <= max(rates) * 1.001


# --- calling off -------------------------------------------------------------------------------


def test_calling_off_frees_what_is_not_being_read_and_takes_nothing_from_others() -> None:
    d = Disk(slots=64, restores_max=2, restore_batch_bytes=BLOCK, restore_share=1.0)
    d.on_disk(1, 2)
    mine, shared, other = d.acquire(1), d.acquire(2), d.acquire(2)
    assert accounting(d.core).reserved == 16
    d.ask(Cancel(d.name(), mine))
    assert (a := d.answer(mine)) is not None
    assert a.grant is None
    assert accounting(d.core).reserved == 8 + 2
    d.ask(Cancel(d.name(), shared))
    assert accounting(d.core).reserved == 8 + 2
    d.finish_all()
    assert (a := d.answer(other)) is not None
    assert a.tokens == 64
    d.sound()


def test_a_prefetch_can_be_called_off() -> None:
    d = Disk(restores_max=1, restore_share=1.0)
    d.on_disk(1)
    ahead = d.acquire(1, probe=True, prefetch=True)
    assert accounting(d.core).reserved == 8
    d.ask(Cancel(d.name(), ahead))
    assert accounting(d.core).reserved == 1
    d.finish_all()
    d.sound()


def test_what_is_told_of_a_request_for_the_disk_can_wait_and_of_no_other() -> None:
    d = Disk(slots=64)
    d.on_disk(1)
    d.wait(0.0)

    def told(number: int, **fields: bool) -> bool:
        """What the core says of the directory's answer, before it hears it."""
        request: dict[str, Any] = {"lease_s": 30.0, "wait_s": None, "min_tokens": 0, "probe": False, **fields}
        message = Acquire(d.name(), d.prompt(number), (ABI, ABI), ("n0",), **request)
        effects = d.core.handle(Received("client:1", message), d.now)
        (lookup,) = (effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Lookup))
        unanswered = Undeliverable(lookup.to, lookup.message)
        found = d.core.for_a_tier(unanswered)
        d.handle(unanswered)
        assert not d.core.for_a_tier(unanswered), "what nobody waits for is told at once"
        return found

    assert told(1)
    assert not told(1, probe=True), "a question restores nothing"
    assert not told(2), "nothing of it lies on the disk"


# --- the disk's room ---------------------------------------------------------------------------


def size_of_one() -> int:
    d = Disk()
    d.on_disk(1)
    (entries,) = d.extents.values()
    return extent_bytes([e for e, _ in entries])


def test_room_on_disk_is_made_before_writing_and_the_least_used_goes_first() -> None:
    size = size_of_one()
    d = Disk(disk_bytes_max=3 * size)
    d.on_disk(1)
    d.wait(1.0)
    d.on_disk(2)
    d.wait(1.0)
    d.on_disk(3)
    d.wait(1.0)
    request = d.acquire(1)
    d.finish_all()
    d.release(request)
    d.on_disk(4)
    assert len(d.extents) == 3
    assert sum(extent_bytes([e for e, _ in entries]) for entries in d.extents.values()) <= 3 * size
    gone = d.answer(d.acquire(2))
    assert gone is not None
    assert gone.tokens == 0
    for number in (1, 3, 4):
        again = d.acquire(number)
        d.finish_all()
        assert (a := d.answer(again)) is not None
        assert a.tokens == 64
        d.release(again)
    d.sound()


def test_what_is_larger_than_the_disk_is_refused_and_nothing_goes_for_it() -> None:
    d = Disk(disk_bytes_max=size_of_one() - 1)
    assert d.store(1) is None
    assert d.swap_out(1).refused is Reason.DISK_FULL
    assert d.extents == {}
    assert (a := d.answer(d.acquire(1))) is not None
    assert a.status is Status.FULL_HIT
    d.sound()


def test_an_extent_being_restored_never_goes_to_make_room() -> None:
    size = size_of_one()
    d = Disk(disk_bytes_max=size)
    d.on_disk(1)
    request = d.acquire(1)
    assert d.store(2) is None
    assert d.swap_out(2).refused is Reason.DISK_FULL
    d.finish_all()
    assert (a := d.answer(request)) is not None
    assert a.tokens == 64
    assert d.swap_out(2).refused is None
    d.sound()


def test_what_has_a_copy_on_disk_is_not_written_again() -> None:
    d = Disk()
    d.on_disk(1)
    request = d.acquire(1)
    d.finish_all()
    d.release(request)
    before = dict(d.extents)
    assert d.swap_out(1).refused is None
    assert d.extents == before
    assert accounting(d.core).on_tier == 8
    d.sound()


def test_a_large_swap_out_becomes_several_extents_and_one_answer() -> None:
    d = Disk(extent_objects_max=3)
    assert d.store(1) is None
    assert d.swap_out(1).refused is None
    assert sorted(len(entries) for entries in d.extents.values()) == [2, 3, 3]
    request = d.acquire(1)
    d.finish_all()
    assert (a := d.answer(request)) is not None
    assert a.status is Status.FULL_HIT


def test_extents_that_are_lost_are_no_promise_any_more() -> None:
    d = Disk()
    d.on_disk(1, 2)
    one, _ = d.extents
    waiting = d.acquire(1)
    del d.extents[one]
    d.handle(DiskLost((one,)))
    d.finish_all()
    answer = d.answer(waiting)
    assert answer is not None
    assert (answer.tokens, answer.grant) == (0, None)
    assert (a := d.answer(d.acquire(1))) is not None
    assert (a.status, a.hash_tokens) == (Status.MISS, 0)
    again = d.acquire(2)
    d.finish_all()
    assert (a := d.answer(again)) is not None
    assert a.tokens == 64
    d.sound()


def test_a_disk_that_can_only_be_read_is_read() -> None:
    d = Disk()
    d.on_disk(1)
    assert d.store(2) is None
    d.handle(DiskState(None, Reason.DISK_FULL))
    assert d.swap_out(2).refused is Reason.DISK_FULL
    request = d.acquire(1)
    d.finish_all()
    assert (a := d.answer(request)) is not None
    assert a.tokens == 64
    d.handle(DiskState(None))
    assert d.swap_out(2).refused is None
    d.sound()


def test_a_holders_series_says_what_it_did() -> None:
    d = Disk()
    d.on_disk(1)
    kept = d.core.series()[-1].occupancy_bytes
    assert {kind: tiers[Tier.G3] for kind, tiers in kept.items()} == dict.fromkeys(
        (ObjectKind.COMPRESSED_HISTORY, ObjectKind.INDEXER), BLOCKS * BLOCK
    )
    request = d.acquire(1)
    d.wait(3.0)
    d.finish_all()
    d.release(request)
    d.swap_out(1)
    d.handle(DiskState(Reason.DISK_UNAVAILABLE))
    d.acquire(1)
    d.wait(60.0)
    first, *_, last = d.core.series()
    assert (first.requests, last.requests, last.at_s) == (0, 2, d.now)
    assert (last.tokens, last.hash_hit_tokens, last.effective_hit_tokens) == (130, 128, 64)
    assert last.lost_tokens == {Reason.DISK_UNAVAILABLE: 64}
    assert last.lost_by_kind == {ObjectKind.DISK_PREFIX: 64}
    assert (last.restores, last.restored_bytes, last.written_bytes) == (
        2 * BLOCKS,
        2 * BLOCKS * BLOCK,
        2 * BLOCKS * BLOCK,
    )
    assert (sum(last.recovery), quantile_s(last.recovery, 1.0)) == (1, 4.096)
    assert sum(last.lease_life) == 1
    assert all(tiers[Tier.G2] == 0 for tiers in last.occupancy_bytes.values())


def test_restores_and_writes_together_keep_the_holders_budget() -> None:
    per_s = 8 * BLOCK
    d = Disk(move_bytes_per_s=per_s)
    for number in range(1, 5):
        assert d.store(number) is None
        d.ask(SwapOut(d.name(), d.objects(number)))
        d.wait(2.0)
    assert len(d.extents) == 4
    began, asked = d.now, [d.acquire(number) for number in range(1, 5)]
    d.ask(SwapOut(d.name(), ()))
    while not all(map(d.answer, asked)):
        while d.reads:
            d.finish(d.reads[0])
        d.wait(0.05)
        assert d.now - began < 60.0
    moved = 4 * 2 * BLOCKS * BLOCK
    assert d.now - began >= (moved / per_s) * 0.7
    d.sound()


def test_what_is_prefetched_moves_after_live_requests_until_one_of_them_waits_for_it() -> None:
    def order(*, joins: bool) -> list[str]:
        """Answers in their order: of a request whose prompt was prefetched long ago, and of two others."""
        d = Disk(slots=64, move_bytes_per_s=8 * BLOCK, restore_share=1.0, restore_batch_objects=2)
        for number in (1, 2, 3):
            d.store(number)
            d.ask(SwapOut(d.name(), d.objects(number)))
            d.wait(4.0)
        assert len(d.extents) == 3
        d.acquire(1, probe=True, prefetch=True)
        asked = {"2": d.acquire(2)}
        if joins:
            asked["1"] = d.acquire(1)
            d.wait(0.1)
        asked["3"] = d.acquire(3)
        seen: list[str] = []
        while len(d.core.flow) or d.reads:
            while d.reads:
                d.finish(d.reads[0])
            there = d.core.ctx.books.ready[1, 0].keys() >= set(split(d.keys(1).keys(16))[:BLOCKS])
            answered = [name for name, r in asked.items() if d.answer(r)] + ["ahead"] * (there and not joins)
            seen += [name for name in answered if name not in seen]
            d.wait(0.05)
        d.sound()
        return seen

    assert order(joins=False) == ["2", "3", "ahead"]
    assert order(joins=True)[-1] == "3"


def scrubbing() -> Disk:
    return Disk(scrub_bytes_per_s=2 * BLOCK)


def spoil(d: Disk, number: int) -> None:
    """Turn a byte of the first object of a prompt, behind the books' back."""
    obj = next(d.core.ctx.books.find_all(d.objects(number)))
    d.arena.payload(obj.slot)[0] ^= 0xFF


def test_the_scrubber_finds_a_damaged_copy_before_it_is_asked_for() -> None:
    d = scrubbing()
    assert d.store(1) is None
    d.wait(10.0)
    assert "scrub_found" not in d.core.ctx.counters
    spoil(d, 1)
    d.wait(10.0)
    assert d.core.ctx.counters["scrub_found"] == 1
    request = d.acquire(1)
    answer = d.answer(request)
    assert answer is not None
    assert (answer.status, answer.cause and answer.cause.reason) == (Status.INVALID, Reason.CHECKSUM_MISMATCH)
    d.sound()


def test_what_the_scrubber_finds_beside_a_copy_on_disk_is_restored_from_there() -> None:
    d = scrubbing()
    d.on_disk(1)
    request = d.acquire(1)
    d.finish_all()
    d.release(request)
    spoil(d, 1)
    d.wait(10.0)
    assert d.core.ctx.counters["scrub_found"] == 1
    request = d.acquire(1)
    d.finish_all()
    answer = d.answer(request)
    assert answer is not None
    assert answer.status is Status.FULL_HIT
    d.sound()


def test_the_scrubber_keeps_its_rate_and_comes_round_to_everything() -> None:
    d = scrubbing()
    for number in range(1, 4):
        assert d.store(number) is None
    began = d.core.ctx.counters["scrubbed_bytes"]
    d.wait(60.0)
    digested = d.core.ctx.counters["scrubbed_bytes"] - began
    assert d.core.scrubber.rounds >= 3
    assert 0.5 * 60 * 2 * BLOCK <= digested <= 60 * 2 * BLOCK + 64 * BLOCK


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=30), st.integers(0, 9))
def test_the_bytes_before_a_place_are_those_of_what_waits_there(
    puts: list[tuple[int, bool, bool]], place_s: int
) -> None:
    queue = RestoreQueue((RestoreLimit(1 << 40, 1 << 10),))
    left: list[tuple[int, Obj]] = []
    for place, in_host, goes in puts:
        obj = Obj(ObjectKind.COMPRESSED_HISTORY, 0, 0, b"", 16, bytes(32), WEIGHTS, "", 1, 64 + place, ABI, b"")
        obj.below = 0 if in_host else -1
        queue.put(obj, place + 0.5)
        left.append((place, obj))
        if goes:
            queue.take(obj)
            left.pop()
    if left:
        first = queue.next(lambda _: True)
        left.remove(min(left, key=lambda one: one[0]) if first is None else next(x for x in left if x[1] is first))
    before = queue.bytes_before(place_s + 0.5)
    for where, host in ((Where.DISK, False), (Where.HOST, True)):
        assert before[where] == sum(o.length for at, o in left if at <= place_s and (o.below >= 0) is host)
    assert sum(queue.bytes_before(float("inf")).values()) == sum(o.length for _, o in left)
