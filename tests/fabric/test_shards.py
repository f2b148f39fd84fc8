"""Several directory shards: who answers for what, what a lost one costs, what moves when they become more or fewer."""

from __future__ import annotations

import random

import pytest

from kvfabric.fabric.messages import EventBatch, Found, Lookup, ShardMap
from kvfabric.fabric.segments import SEGMENT_OBJECTS, Router

from .directory_bed import BLOCK, Bed, prompt_of

SHARDS = tuple(f"directory:{i}" for i in range(4))
LONG = prompt_of(1, 6 * SEGMENT_OBJECTS * BLOCK + 1)


def sharded(count: int, *holders: str, slots: int = 1 << 14, **config) -> Bed:
    bed = Bed(slots=slots, **config)
    told = ShardMap(1, SHARDS[:count])
    for shard in told.shards:
        bed.directory(shard, told)
    for holder in holders:
        bed.holder(holder)
    bed.tell_map(told)
    return bed


def segments_of(bed: Bed, shard: str) -> set[bytes]:
    return {anchor for table in bed.directories[shard].index.tables.values() for anchor in table}


def grow_to(bed: Bed, epoch: int, count: int) -> ShardMap:
    told = ShardMap(epoch, SHARDS[:count])
    for shard in told.shards:
        if shard not in bed.directories:
            bed.directory(shard, told)
    bed.tell_map(told)
    return told


def test_a_prompt_is_spread_over_shards_and_each_is_asked_once():
    bed = sharded(3, "a", "b")
    bed.store("a", LONG)
    assert bed.right(LONG)
    owners = [len(segments_of(bed, shard)) for shard in SHARDS[:3]]
    assert sum(owners) == 6
    bed.seen.clear()
    assert bed.probe("b", LONG).tokens == LONG.n - 1
    asked = [to for _, to, message in bed.seen if isinstance(message, Lookup)]
    assert len(asked) == len(set(asked)) == sum(1 for n in owners if n)


def test_all_continuations_of_one_prompt_do_not_meet_at_one_shard():
    router = Router(ShardMap(1, SHARDS))
    asked = router.lookups("x", LONG)
    assert len(asked) > 1
    assert sum(strip.count for lookup in asked.values() for strip in lookup.strips) == 6 * SEGMENT_OBJECTS


def test_a_lost_shard_costs_only_its_segments_until_it_is_refilled():
    bed = sharded(3, "a", "b", request_timeout_s=0.5)
    bed.store("a", LONG)
    lost = Router(ShardMap(1, SHARDS[:3])).owner(LONG.keys[0][1][3 * SEGMENT_OBJECTS * 32 :][:16])
    del bed.directories[lost]
    before = len(bed.replies)
    assert bed.probe("b", LONG) is None, "it waits for the shard that is gone"
    bed.pass_s(1.0)
    cut = bed.replies[before]
    router = Router(ShardMap(1, SHARDS[:3]))
    first = next(i for i in range(6) if router.owner(LONG.keys[0][1][i * SEGMENT_OBJECTS * 32 :][:16]) == lost)
    assert cut.tokens == first * SEGMENT_OBJECTS * BLOCK
    assert cut.cause.reason == "directory_unavailable"
    bed.directory(lost, ShardMap(1, SHARDS[:3]))
    bed.pass_s(3.0)
    assert bed.right(LONG)
    assert bed.probe("b", LONG).tokens == LONG.n - 1


@pytest.mark.parametrize(("count", "later"), [(2, 3), (1, 4), (3, 2), (4, 1)])
def test_only_what_must_move_moves(count, later):
    bed = sharded(count, "a", "b")
    prompts = [prompt_of(i, 2 * SEGMENT_OBJECTS * BLOCK + 1) for i in range(12)]
    for prompt in prompts:
        bed.store("a", prompt)
    before = {shard: segments_of(bed, shard) for shard in bed.directories}
    bed.seen.clear()
    told = grow_to(bed, 2, later)
    bed.pass_s(1.0)
    router = Router(told)
    moved = sum(1 for shard, held in before.items() for anchor in held if router.owner(anchor) != shard)
    assert 0 < moved < 24 or {count, later} == {1, 4}
    objects = sum(
        len(run.digests) // 16 for _, _, message in bed.seen if isinstance(message, EventBatch) for run in message.runs
    )
    assert objects == moved * SEGMENT_OBJECTS
    assert bed.right(*prompts)
    for shard in told.shards:
        assert segments_of(bed, shard) == {a for held in before.values() for a in held if router.owner(a) == shard}


def test_who_asks_by_an_old_map_is_told_where_a_segment_moved():
    bed = sharded(2, "a", "b")
    bed.store("a", LONG)
    told = ShardMap(2, SHARDS[:4])
    for shard in SHARDS[2:]:
        bed.directory(shard, told)
    for name in ("a", *bed.directories):
        bed.post("supervisor", name, told)
    bed.run()
    bed.pass_s(1.0)
    assert bed.holders["b"].ctx.router.map.epoch == 1
    bed.seen.clear()
    assert bed.probe("b", LONG).tokens == LONG.n - 1
    answers = [message for _, _, message in bed.seen if isinstance(message, Found)]
    assert any(answer.moved for answer in answers)
    assert bed.holders["b"].ctx.router.map == told, "it learned the new map from the answer"
    bed.seen.clear()
    bed.probe("b", LONG)
    assert not any(message.moved for _, _, message in bed.seen if isinstance(message, Found))


@pytest.mark.parametrize("seed", range(4))
def test_shards_come_and_go_under_load_and_no_answer_is_wrong(seed):
    rng = random.Random(seed)
    bed = sharded(2, "a", "b", "c", dump_objects_max=256)
    prompts = [prompt_of(i, rng.choice((40, 300, 600)) * BLOCK + 1) for i in range(8)]
    true: dict[int, int] = {}
    count, epoch = 2, 1
    for _ in range(60):
        place = rng.randrange(len(prompts))
        prompt = prompts[place]
        match rng.randrange(5):
            case 0 | 1:
                end = rng.randrange(1, prompt.n // BLOCK + 1)
                bed.store(rng.choice("ab"), prompt, 0, end)
                true[place] = max(true.get(place, 0), end)
            case 2:
                count, epoch = rng.randrange(1, 5), epoch + 1
                grow_to(bed, epoch, count)
            case 3:
                shard = rng.choice(SHARDS[:count])
                bed.directory(shard, ShardMap(epoch, SHARDS[:count]))
            case _:
                bed.pass_s(rng.choice((0.25, 2.0)))
        before = len(bed.replies)
        bed.probe("c", prompt)
        bed.pass_s(0.5)
        answer = bed.replies[before]
        assert answer.tokens <= true.get(place, 0) * BLOCK, "more than anybody ever had"
    bed.pass_s(8.0)
    assert bed.right(*prompts)
    for place, prompt in enumerate(prompts):
        assert bed.probe("c", prompt).tokens == true.get(place, 0) * BLOCK


@pytest.mark.parametrize("seed", range(6))
def test_shards_come_and_go_on_an_unkind_network_and_all_is_right_in_the_end(seed):
    rng = random.Random(1000 + seed)
    bed = sharded(2, "a", "b", "c", dump_objects_max=128, event_batches_kept=4, request_timeout_s=0.5)
    prompts = [prompt_of(i, rng.choice((40, 300, 600)) * BLOCK + 1) for i in range(6)]
    ever: dict[int, set[int]] = {i: set() for i in range(len(prompts))}
    lossy = [True]

    def unkind(sender: str, to: str, message: object) -> bool:
        if not lossy[0] or to.startswith("client:") or sender.startswith("client:"):
            return False
        if rng.random() < 0.1:
            bed.deliver(sender, to, message)  # twice, the first time out of turn
        return rng.random() < 0.15

    bed.hold = unkind
    count, epoch = 2, 1
    for _ in range(60):
        place = rng.randrange(len(prompts))
        prompt = prompts[place]
        match rng.randrange(6):
            case 0 | 1:
                end = rng.randrange(1, prompt.n // BLOCK + 1)
                bed.store(rng.choice("ab"), prompt, 0, end)
                ever[place] |= set(range(end))
            case 2:
                first = rng.randrange(prompt.n // BLOCK)
                bed.drop(rng.choice("ab"), prompt, first, prompt.n // BLOCK)
            case 3:
                count, epoch = rng.randrange(1, 5), epoch + 1
                grow_to(bed, epoch, count)
            case 4:
                bed.directory(rng.choice(SHARDS[:count]), ShardMap(epoch, SHARDS[:count]))
            case _:
                bed.pass_s(rng.choice((0.25, 2.0)))
        for holder, blocks in bed.found(prompts[place]).items():
            assert holder in "ab"
            assert blocks <= ever[place], "what nobody ever had is never told"
        bed.kept.clear()
    lossy[0] = False
    bed.tell_map(ShardMap(epoch, SHARDS[:count]))
    bed.pass_s(12.0)
    assert bed.right(*prompts)


def test_a_shard_that_missed_a_map_starts_over_and_keeps_nothing_that_was_dropped_meanwhile():
    bed = sharded(1, "a")
    bed.store("a", LONG)
    bed.directory(SHARDS[1], ShardMap(2, SHARDS[:2]))
    bed.hold = lambda sender, to, message: to == SHARDS[0] and isinstance(message, ShardMap)
    bed.tell_map(ShardMap(2, SHARDS[:2]))
    bed.pass_s(1.0)
    assert segments_of(bed, SHARDS[1])
    bed.drop("a", LONG, 0, 1000)
    bed.hold = lambda *_: False
    bed.kept.clear()
    bed.tell_map(ShardMap(3, SHARDS[:1]))
    bed.pass_s(3.0)
    assert bed.right(LONG)


def test_a_shard_takes_no_events_by_a_map_that_it_has_not_heard_of():
    bed = sharded(1, "a")
    bed.store("a", LONG)
    bed.directory(SHARDS[1], ShardMap(1, SHARDS[:1]))
    bed.hold = lambda sender, to, message: to == SHARDS[1] and isinstance(message, ShardMap)
    bed.tell_map(ShardMap(2, SHARDS[:2]))
    bed.pass_s(2.0)
    assert not segments_of(bed, SHARDS[1])
    assert not bed.holders["a"].events.settled, "nothing that was not taken is acknowledged"
    bed.release()
    bed.pass_s(3.0)
    assert bed.right(LONG)
    assert segments_of(bed, SHARDS[1])
