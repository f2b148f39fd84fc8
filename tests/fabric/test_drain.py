"""A holder that drains: what is worth most moves in time, the rest is dropped with a count, leases end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvfabric.fabric.effects import ExtentUploaded, Received, RemoteState, StartTransfer, TransferDone
from kvfabric.fabric.invariants import check
from kvfabric.fabric.kinds import Reason, Status
from kvfabric.fabric.leases import read_refusal
from kvfabric.fabric.messages import Drain, Drained, DrainTarget, GrantUntil, Release, SetMode, SwapOut, Taken, Warm
from kvfabric.fabric.model import ModelSpec

from .many_holders import Holders

BLOCK_BYTES = 4096
MODEL = ModelSpec.load(
    {
        "name": "drained",
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": BLOCK_BYTES},
            {"name": "idx", "kind": "indexer", "of": "kv", "block_tokens": 4, "block_bytes": BLOCK_BYTES},
        ],
    }
)
BLOCKS = 4


def chain(number: int, blocks: int = BLOCKS) -> range:
    return range(number * 1000, number * 1000 + 4 * blocks + 1)


def bed(holders: str = "ab", **config: Any) -> Holders:
    return Holders(MODEL, dict.fromkeys(holders, (0,)), slots=config.pop("slots", 64), **config)


def drain(bed: Holders, holder: str, to: str, within_s: float = 10.0, leaving: str = "") -> None:
    targets = tuple(DrainTarget(name, f"node-{name}", (0,)) for name in to)
    bed.feed(holder, Received("supervisor", Drain(1, within_s, targets, tuple(leaving))))


def report(bed: Holders, holder: str) -> Drained | None:
    told = [record for sender, to, record in bed.sent if sender == holder and to == "supervisor"]
    return next((record for record in reversed(told) if isinstance(record, Drained)), None)


def held(bed: Holders, holder: str, tokens: range) -> int:
    """How many objects of a prompt a holder has."""
    return len(list(bed.cores[holder].ctx.books.find_all(bed.everything(bed.keys(tokens), holder))))


def test_all_of_a_drained_holders_state_is_served_by_another_and_told_in_numbers() -> None:
    holders = bed()
    for number in range(3):
        holders.store("a", chain(number), seed=number)
    drain(holders, "a", "b")
    told = report(holders, "a")
    assert told is not None
    objects = 3 * BLOCKS * 2
    assert (told.moved.objects, told.moved.size_bytes, told.dropped.objects) == (objects, objects * BLOCK_BYTES, 0)
    assert told.leases_cut == 0
    del holders.cores["a"]
    for number in range(3):
        answer = holders.acquire("b", chain(number))
        assert answer is not None
        assert (answer.status, answer.tokens) == (Status.FULL_HIT, 4 * BLOCKS)
        assert answer.grant is not None
        slot = int(np.frombuffer(answer.grant.parts[0].slots[0].slots, "<u4")[0])
        assert holders.arenas["b"].payload(slot)[0] == number * 31 % 251


def test_what_another_holder_has_is_not_moved_again_unless_that_one_leaves_too() -> None:
    holders = bed("abc")
    holders.store("a", chain(0))
    assert holders.granted("c", chain(0)).tokens == 4 * BLOCKS  # it has a copy of its own from here on
    holders.pass_time(5.0)
    drain(holders, "a", "b")
    told = report(holders, "a")
    assert told is not None
    assert (told.moved.objects, told.elsewhere.objects, told.dropped.objects) == (0, 2 * BLOCKS, 0)

    holders.store("c", chain(1))
    holders.granted("b", chain(1))
    holders.pass_time(40.0)
    drain(holders, "c", "a", leaving="ab")  # nobody that stays has it; `a` drains, so it takes nothing
    told = report(holders, "c")
    assert told is None or told.moved.objects == 0
    holders.pass_time(20.0)
    told = report(holders, "c")
    assert told is not None
    assert told.elsewhere.objects == 0
    assert told.dropped.objects == 4 * BLOCKS


def test_with_room_for_less_what_was_used_most_moves_and_the_rest_is_counted_as_dropped() -> None:
    holders = bed(slots=BLOCKS * 3)
    for number in range(3):
        holders.store("a", chain(number))
    for _ in range(5):
        grant = holders.granted("a", chain(1))
        holders.ask("a", Release(holders.name(), grant.lease, None))
    holders.store("b", chain(7))
    for _ in range(3):
        grant = holders.granted("b", chain(7))
        holders.ask("b", Release(holders.name(), grant.lease, None))
    holders.store("b", chain(8))
    drain(holders, "a", "b")
    told = report(holders, "a")
    assert told is not None
    assert told.moved.objects + told.dropped.objects == 3 * BLOCKS * 2
    assert told.dropped.objects > 0
    del holders.cores["a"]
    kept = {n: held(holders, "b", chain(n)) for n in (0, 1, 2, 7)}
    assert kept[1] == 2 * BLOCKS, "what was used most"
    assert kept[7] == 2 * BLOCKS, "and what is worth more there already stays"
    assert min(kept[0], kept[2]) < 2 * BLOCKS


class SlowLink(Holders):
    """A link of so many bytes a second: transfers end when their bytes had time to pass, one after another."""

    bytes_per_s = 40_960.0

    def __init__(self, *args: Any, **how: Any) -> None:
        self.busy_until_s = 0.0
        self.waiting: list[tuple[float, str, StartTransfer]] = []
        super().__init__(*args, **how)

    def _carry_out(self, name: str, effects: Any) -> None:
        mine = [e for e in effects if isinstance(e, StartTransfer)]
        super()._carry_out(name, [e for e in effects if not isinstance(e, StartTransfer)])
        for effect in mine:
            size = sum(pair.length for pair in effect.pairs)
            self.busy_until_s = max(self.busy_until_s, self.now) + size / self.bytes_per_s
            self.waiting.append((self.busy_until_s, name, effect))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.waiting and self.waiting[0][0] <= end:
            at, name, effect = self.waiting.pop(0)
            super().pass_time(at - self.now)
            self.feed(name, TransferDone(effect.token, self._moved(name, effect)))
        super().pass_time(end - self.now)


def test_over_a_slow_link_the_best_that_fits_in_time_moves() -> None:
    holders = SlowLink(MODEL, dict.fromkeys("ab", (0,)), slots=512)
    for number in range(100):
        holders.store("a", chain(number))
    used = range(0, 100, 2)
    for number in used:
        for _ in range(3):
            grant = holders.granted("a", chain(number))
            holders.ask("a", Release(holders.name(), grant.lease, None))
    within_s = 40.0  # room for 400 of the 800 objects: those of the used chains
    books = holders.cores["a"].ctx.books
    worths = sorted(books.worths([obj for table in books.table.values() for obj in table.values()]))
    drain(holders, "a", "b", within_s=within_s)
    holders.pass_time(within_s + 5.0)
    told = report(holders, "a")
    assert told is not None
    fits = int(within_s * holders.bytes_per_s) // BLOCK_BYTES
    assert told.moved.objects <= fits
    assert told.moved.value >= 0.95 * BLOCK_BYTES * sum(worths[-fits:])
    assert sum(held(holders, "b", chain(n)) for n in used) >= 0.9 * len(used) * 2 * BLOCKS


def test_leases_run_out_or_are_cut_at_the_deadline_and_no_right_to_grant_comes_back() -> None:
    holders = bed()
    holders.store("a", chain(0))
    short = holders.granted("a", chain(0), lease_s=2.0)
    drain(holders, "a", "b", within_s=30.0)
    assert report(holders, "a") is None, "a lease lives"
    assert read_refusal(short, short.deadline_s, holders.parts(short), holders.now) is None
    refused = holders.acquire("a", chain(0))
    assert refused is not None
    assert refused.cause is not None
    assert refused.cause.reason is Reason.DRAINING
    holders.pass_time(4.0)
    ran_out = report(holders, "a")
    assert ran_out is not None
    assert ran_out.leases_cut == 0

    long = holders.granted("b", chain(0), lease_s=60.0)
    drain(holders, "b", "", within_s=5.0)
    assert read_refusal(long, long.deadline_s, holders.parts(long), holders.now) is None
    holders.pass_time(5.5)
    cut = report(holders, "b")
    assert cut is not None
    assert cut.leases_cut == 1
    assert read_refusal(long, long.deadline_s, holders.parts(long), holders.now) is Reason.HOLDER_LOST
    holders.feed("b", Received("supervisor", GrantUntil(1, 60.0)))
    assert not holders.cores["b"].ctx.may_grant


@pytest.mark.parametrize("arrives", [True, False])
def test_what_lies_on_the_nodes_disk_alone_is_dropped_unless_the_store_of_all_nodes_gets_it_in_time(
    arrives: bool,
) -> None:
    holders = bed(remote=True)
    holders.feed("a", RemoteState(None))
    holders.store("a", chain(0))
    holders.ask("a", SwapOut(holders.name(), holders.everything(holders.keys(chain(0)), "a")))
    (extent,) = holders.disks["a"]
    drain(holders, "a", "", within_s=20.0)
    holders.pass_time(5.0)
    assert report(holders, "a") is None, "the extent is on its way to the store"
    if arrives:
        holders.feed("a", ExtentUploaded(extent, None))
    else:
        holders.pass_time(15.5)
    told = report(holders, "a")
    assert told is not None
    objects = 2 * BLOCKS
    assert (told.elsewhere.objects, told.dropped.objects) == ((objects, 0) if arrives else (0, objects))


def swapped_out(holders: Holders, holder: str, *tokens: range) -> None:
    for one in tokens:
        told = holders.ask(holder, SwapOut(holders.name(), holders.everything(holders.keys(one), holder)))
        assert told.refused is None
        holders.pass_time(1.0)


def test_what_lies_on_the_nodes_disk_alone_is_brought_up_and_moved_too_however_small_its_memory() -> None:
    holders = bed()
    holders.slots = BLOCKS + 1
    holders.start("a")
    prompts = [chain(number) for number in range(6)]
    for number, tokens in enumerate(prompts):
        holders.store("a", tokens, seed=number)
        if number < 5:
            swapped_out(holders, "a", tokens)
    drain(holders, "a", "b")
    holders.pass_time(2.0)
    told = report(holders, "a")
    assert told is not None
    objects = 6 * 2 * BLOCKS
    assert (told.moved.objects, told.moved.size_bytes, told.dropped.objects) == (objects, objects * BLOCK_BYTES, 0)
    assert check(holders.cores["a"]) == []
    del holders.cores["a"]
    for number, tokens in enumerate(prompts):
        grant = holders.granted("b", tokens)
        assert grant.tokens == 4 * BLOCKS
        slot = int(np.frombuffer(grant.parts[0].slots[0].slots, "<u4")[0])
        assert holders.arenas["b"].payload(slot)[0] == number * 31 % 251


def test_over_a_slow_link_what_is_in_memory_moves_first_then_of_the_disk_what_was_used_last() -> None:
    holders = SlowLink(MODEL, dict.fromkeys("ab", (0,)), slots=512)
    for number in range(12):
        holders.store("a", chain(number))
    swapped_out(holders, "a", *map(chain, range(8)))
    within_s = 8.0  # room for 80 of the 96 objects
    drain(holders, "a", "b", within_s=within_s)
    holders.pass_time(within_s + 2.0)
    told = report(holders, "a")
    assert told is not None
    fits = int(within_s * holders.bytes_per_s) // BLOCK_BYTES
    assert 0.9 * fits <= told.moved.objects <= fits
    assert told.moved.objects + told.dropped.objects == 12 * 2 * BLOCKS
    kept = [held(holders, "b", chain(number)) for number in range(12)]
    assert kept[8:] == [2 * BLOCKS] * 4, "what is in memory"
    assert kept[:8] == sorted(kept[:8]), "of the disk, the later the better"
    assert kept[0] == 0


def test_what_nobody_has_room_for_is_not_brought_up_in_vain() -> None:
    holders = bed()
    holders.slots = 2 * BLOCKS
    holders.start("b")
    for number in range(20):
        holders.store("a", chain(number))
        swapped_out(holders, "a", chain(number))
    drain(holders, "a", "b")
    holders.pass_time(3.0)
    told = report(holders, "a")
    assert told is not None
    assert (told.moved.objects, told.dropped.objects) == (2 * 2 * BLOCKS, 18 * 2 * BLOCKS)
    assert holders.cores["a"].ctx.counters["restored_objects"] <= 2 * 64, "what its pools hold, once"


def test_what_another_holder_has_is_not_brought_up_and_what_cannot_be_read_is_dropped_with_a_count() -> None:
    holders = bed("abc")
    for number in range(3):
        holders.store("a", chain(number))
    assert holders.granted("c", chain(0)).tokens == 4 * BLOCKS
    swapped_out(holders, "a", *map(chain, range(3)))
    second = sorted(holders.disks["a"])[1]
    holders.disks["a"][second] = [(entry, b"?" * len(content)) for entry, content in holders.disks["a"][second]]
    before = holders.cores["a"].ctx.counters["restored_bytes"]
    drain(holders, "a", "b")
    holders.pass_time(12.0)
    told = report(holders, "a")
    assert told is not None
    objects = 2 * BLOCKS
    assert (told.moved.objects, told.elsewhere.objects) == (objects, objects)
    assert holders.cores["a"].ctx.counters["restored_bytes"] - before == objects * BLOCK_BYTES
    assert held(holders, "b", chain(2)) == objects
    assert held(holders, "b", chain(1)) == 0


def test_a_target_that_dies_costs_its_batch_and_another_takes_it() -> None:
    holders = bed("abc")
    for number in range(4):
        holders.store("a", chain(number))
    holders.hold_back = lambda sender, to, record: "b" in (sender, to) and to != "directory:0"
    drain(holders, "a", "bc", within_s=60.0)
    holders.pass_time(59.0)
    told = report(holders, "a")
    assert told is not None
    assert (told.moved.objects, told.dropped.objects) == (4 * BLOCKS * 2, 0)
    for core in holders.cores.values():
        assert check(core) == []


def test_bytes_that_land_damaged_or_change_at_their_source_are_not_kept() -> None:
    holders = bed()
    holders.store("a", chain(0))
    intake = holders.cores["b"].intake
    intake.landed_whole = lambda incoming, moved: False  # type: ignore[method-assign]
    drain(holders, "a", "b")
    told = report(holders, "a")
    assert told is not None
    assert (told.moved.objects, told.dropped.objects) == (0, 2 * BLOCKS)
    assert holders.acquire("b", chain(0)).tokens in (0, 4 * BLOCKS)  # type: ignore[union-attr]
    assert check(holders.cores["b"]) == []


def test_what_is_committed_while_draining_moves_too() -> None:
    holders = bed()
    begun = holders.begin("a", holders.keys(chain(0)))
    drain(holders, "a", "b", within_s=30.0)
    assert report(holders, "a") is None, "a write is open"
    holders.commit("a", begun)
    told = report(holders, "a")
    assert told is not None
    assert told.moved.objects == 2 * BLOCKS


def test_the_same_drain_again_is_answered_with_its_report() -> None:
    holders = bed()
    holders.store("a", chain(0))
    drain(holders, "a", "b")
    first = report(holders, "a")
    holders.sent.clear()
    drain(holders, "a", "b")
    assert report(holders, "a") == first
    assert first is not None


@pytest.mark.parametrize("lost", [Taken, Drained])
def test_a_lost_record_ends_no_drain_in_doubt(lost: type) -> None:
    holders = bed(pin_ttl_s=5.0)
    holders.store("a", chain(0))
    holders.hold_back = lambda sender, to, record: isinstance(record, lost)
    drain(holders, "a", "b", within_s=40.0)
    holders.pass_time(45.0)
    told = report(holders, "a")
    assert told is not None
    assert told.moved.objects + told.dropped.objects + told.elsewhere.objects == 2 * BLOCKS
    holders.at_rest()


def test_a_drained_holder_takes_no_offer_and_a_mode_alone_moves_nothing() -> None:
    holders = bed()
    holders.store("a", chain(0))
    holders.feed("b", Received("supervisor", SetMode(True, False, 1)))
    drain(holders, "a", "b", within_s=3.0)
    holders.pass_time(4.0)
    told = report(holders, "a")
    assert told is not None
    assert (told.moved.objects, told.dropped.objects) == (0, 2 * BLOCKS)
    assert report(holders, "b") is None


def test_a_newcomer_is_offered_what_is_worth_most_within_its_bytes_and_nothing_is_lost_for_it() -> None:
    holders = bed()
    for number in range(4):
        holders.store("a", chain(number))
    for _ in range(3):
        grant = holders.granted("a", chain(2))
        holders.ask("a", Release(holders.name(), grant.lease, None))
    bytes_max = 2 * BLOCKS * BLOCK_BYTES
    holders.feed("a", Received("supervisor", Warm("b", (0,), bytes_max, 10.0)))
    assert [held(holders, "b", chain(n)) for n in range(4)] == [0, 0, 2 * BLOCKS, 0]
    assert [held(holders, "a", chain(n)) for n in range(4)] == [2 * BLOCKS] * 4
    answer = holders.acquire("a", chain(2))
    assert answer is not None
    assert answer.status is Status.FULL_HIT, "it goes on serving"
    holders.pass_time(60.0)
    assert holders.cores["a"].warming.open == {}


@pytest.mark.parametrize(("pin_ttl_s", "moved"), [(1.0, 0), (60.0, 2 * BLOCKS)])
def test_what_was_not_pinned_at_its_source_until_the_last_byte_was_read_is_not_kept(
    pin_ttl_s: float, moved: int
) -> None:
    holders = SlowLink(MODEL, dict.fromkeys("ab", (0,)), slots=64, pin_ttl_s=pin_ttl_s)
    holders.bytes_per_s = 2 * BLOCKS * BLOCK_BYTES / 3.0
    holders.store("a", chain(0))
    drain(holders, "a", "b", within_s=30.0)
    holders.pass_time(40.0)
    told = report(holders, "a")
    assert told is not None
    assert told.moved.objects == held(holders, "b", chain(0)) == moved
    assert check(holders.cores["b"]) == []
