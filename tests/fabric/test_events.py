"""Events on their way to the directory: lost, doubled, reordered, replayed, too many, of lives that are over."""

from __future__ import annotations

import random

import pytest

from kvfabric.fabric.kinds import Reason
from kvfabric.fabric.messages import DumpPart, EventBatch, EventsSeen, Heartbeat, HolderGone, Mark

from .directory_bed import BLOCK, Bed, prompt_of

P, Q, R = (prompt_of(i, 400 * BLOCK + 1) for i in range(3))


def bed_with(*names: str, **config) -> Bed:
    bed = Bed(**config)
    bed.directory()
    for name in names:
        bed.holder(name)
    return bed


def events_only(sender, to, message) -> bool:
    return isinstance(message, EventBatch)


def test_what_is_stored_and_dropped_is_told_as_runs():
    bed = bed_with("a")
    bed.store("a", P)
    batches = [m for _, _, m in bed.seen if isinstance(m, EventBatch)]
    assert [len(run.digests) // 16 for run in batches[-1].runs] == [256, 144]
    bed.drop("a", P, 100, 300)
    assert bed.found(P) == {"a": {*range(100), *range(300, 400)}}
    assert bed.right(P)


@pytest.mark.parametrize("turn", [list.copy, list.reverse, random.Random(3).shuffle], ids=["ahead", "back", "mixed"])
def test_what_leaves_in_any_order_is_told_along_its_chains(turn):
    bed = bed_with("a")
    bed.store("a", P)
    bed.store("a", Q)
    books = bed.holders["a"].ctx.books
    leaving = [
        table[p.keys[0][1][i * 32 : i * 32 + 32]]
        for table in books.table.values()
        for p in (P, Q)
        for i in range(20, 90)
    ]
    turn(leaving)
    for obj in leaving:
        books.evict(obj)
    bed.drop("a", P, 10, 20)
    gone = [m for _, _, m in bed.seen if isinstance(m, EventBatch)][-1].runs
    assert sorted((run.first, len(run.digests) // 16) for run in gone) == [(10, 80), (20, 70)]
    assert bed.found(P) == {"a": {*range(10), *range(90, 400)}}
    assert bed.right(P, Q)


@pytest.mark.parametrize("seed", range(8))
def test_events_in_any_order_and_twice_say_the_same(seed):
    rng = random.Random(seed)
    bed = bed_with("a")
    bed.hold = events_only
    bed.store("a", P, 0, 200)
    bed.store("a", Q)
    bed.drop("a", P, 50, 120)
    bed.store("a", P)
    assert not bed.right(P)

    def shuffled(kept):
        twice = [*kept, *rng.sample(kept, 2)]
        rng.shuffle(twice)
        return twice

    bed.release(shuffled)
    assert bed.right(P, Q)
    assert bed.count(DumpPart) == 0


def test_a_lost_batch_is_sent_again_and_needs_no_dump():
    bed = bed_with("a")
    bed.hold = events_only
    bed.store("a", P)
    bed.kept.clear()
    bed.hold = lambda *_: False
    bed.store("a", Q)
    assert not bed.right(P)
    bed.pass_s(1.5)
    assert bed.right(P, Q)
    assert bed.count(DumpPart) == 0


def test_a_gap_that_nothing_fills_is_filled_by_a_dump():
    bed = bed_with("a", dump_objects_max=64)
    bed.store("a", P)
    stream = bed.directories["directory:0"].streams["a"]
    stream.seq -= 1  # as if the directory had missed what the holder thinks it acknowledged
    bed.store("a", Q)
    assert not bed.right(P, Q)
    bed.pass_s(2.5)
    assert bed.count(DumpPart) == 0, "what is missing may still come"
    bed.pass_s(2.5)
    assert bed.count(DumpPart) > 5
    assert bed.right(P, Q)


def test_a_restarted_directory_refills_from_the_holders_and_says_nothing_wrong_meanwhile():
    bed = bed_with("a", "b", dump_objects_max=64)
    bed.store("a", P)
    bed.store("b", P, 0, 300)
    bed.drop("a", P, 380, 400)
    bed.directory()
    assert bed.found(P) == {}
    bed.hold = lambda sender, to, message: isinstance(message, DumpPart)
    bed.pass_s(1.5)
    assert bed.kept
    assert bed.found(P) == {}, "a dump counts for nothing until it is whole"
    bed.release()
    bed.pass_s(1.5)
    assert bed.right(P)


def test_changes_during_a_dump_are_told_after_it():
    bed = bed_with("a", dump_objects_max=32)
    bed.store("a", P)
    bed.directory()
    bed.hold = lambda sender, to, message: isinstance(message, DumpPart)
    bed.pass_s(1.5)
    bed.hold = lambda sender, to, message: False
    kept, bed.kept = bed.kept, []
    before = bed.count(EventBatch)
    bed.drop("a", P, 10, 40)
    bed.store("a", Q)
    bed.kept = kept
    assert bed.count(EventBatch) == before, "nothing is told beside a dump"
    bed.release()
    bed.pass_s(1.5)
    assert bed.right(P, Q)


def test_lost_and_doubled_parts_of_a_dump_make_no_difference():
    bed = bed_with("a", dump_objects_max=16)
    bed.store("a", P)
    bed.directory()
    rng = random.Random(5)
    lossy = [True]
    bed.hold = lambda sender, to, message: (
        lossy[0] and isinstance(message, DumpPart | EventsSeen) and rng.random() < 0.3
    )
    bed.pass_s(12.0)
    lossy[0] = False
    bed.release(lambda kept: rng.sample(kept, len(kept)))
    bed.pass_s(3.0)
    assert bed.right(P)
    assert bed.holders["a"].events.settled


def test_a_slow_directory_holds_back_the_stream_and_costs_no_more_than_the_objects():
    bed = bed_with("a", event_batches_kept=4, slots=500)
    bed.hold = events_only
    for _ in range(20):
        bed.store("a", P)
        bed.drop("a", P, 0, 400)
    bed.store("a", P, 0, 100)
    stream = next(iter(bed.holders["a"].events.streams.values()))
    assert len(stream.unacked) == 4
    assert len(stream.pending) <= 400
    bed.release()
    bed.pass_s(3.0)
    assert bed.right(P)
    assert bed.count(EventBatch) < 12, "what changed often is told once"


def test_an_old_life_is_not_heard_and_a_gone_one_is_forgotten_at_once():
    bed = bed_with("a", "b")
    bed.store("a", P)
    bed.hold = lambda sender, to, message: sender == "a" and isinstance(message, EventBatch | Heartbeat)
    bed.store("a", Q)
    late, bed.kept = bed.kept, []
    bed.hold = lambda *_: False
    bed.holder("a", incarnation=2)
    assert bed.found(P) == {}
    bed.store("a", R, 0, 10)
    for sender, to, message in late:
        bed.deliver(sender, to, message)
        bed.run()
    assert bed.right(P, Q, R)
    bed.deliver("supervisor", "directory:0", HolderGone("a", 2))
    assert bed.found(R) == {}
    bed.deliver("a", "directory:0", Heartbeat("a", 2, 5))
    assert bed.found(R) == {}
    bed.store("b", R, 0, 10)
    assert bed.found(R) == {"b": set(range(10))}


def test_a_holder_that_never_catches_up_is_named_stale_and_not_trusted():
    bed = bed_with("a", "b")
    bed.store("a", P)
    assert bed.probe("b", P).tokens == 400 * BLOCK
    bed.hold = lambda sender, to, message: (
        isinstance(message, DumpPart) or (sender == "a" and getattr(message, "seq", 0) == 2)
    )
    bed.store("a", Q)
    bed.store("a", R)
    for _ in range(12):
        bed.pass_s(1.0)
    found = bed.probe("b", P)
    assert (found.tokens, found.hash_tokens) == (0, 400 * BLOCK)
    assert found.cause is not None
    assert found.cause.reason is Reason.HOLDER_LOST
    bed.release()
    bed.pass_s(3.0)
    assert bed.probe("b", P).tokens == 400 * BLOCK
    assert bed.right(P, Q, R)


def test_a_look_up_that_bears_a_mark_waits_for_what_its_asker_wrote():
    bed = bed_with("a", "b")
    bed.hold = events_only
    done = bed.store("a", P)
    assert bed.probe("b", P).tokens == 0
    marks = (Mark("a", 1, done.mark),)
    assert bed.probe("b", P, marks=marks) is None, "it waits"
    bed.release()
    assert bed.replies[-1].tokens == 400 * BLOCK


def test_a_mark_that_is_not_reached_in_time_delays_the_answer_and_no_more():
    bed = bed_with("a", "b")
    bed.store("a", P, 0, 100)
    bed.hold = events_only
    done = bed.store("a", P)
    assert bed.probe("b", P, marks=(Mark("a", 1, done.mark),)) is None
    bed.pass_s(0.5)
    assert bed.replies[-1].tokens == 100 * BLOCK
    gone = Mark("a", 0, 1 << 40)
    assert bed.probe("b", P, marks=(gone,)).tokens == 100 * BLOCK, "a life that is over is not waited for"


def test_an_object_without_a_place_in_its_chain_is_counted_and_not_told():
    bed = bed_with("a")
    bed.store("a", P, 0, 10)
    core = bed.holders["a"]
    obj = next(iter(core.ctx.books.table[0, 0].values()))
    obj.place = None
    bed.drop("a", P, 0, 10)
    assert core.ctx.counters["events_without_place"] == 1
