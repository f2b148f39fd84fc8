"""Write attempts: all or nothing, visible at once, and never late."""

from __future__ import annotations

import pytest

from kvfabric.fabric.effects import PeerClosed
from kvfabric.fabric.identity import weights_digest16
from kvfabric.fabric.invariants import accounting, check
from kvfabric.fabric.kinds import Reason
from kvfabric.fabric.messages import (
    Done,
    Misuse,
    SetMode,
    SetWeights,
    StoreAbort,
    StoreBegin,
    StoreCommit,
    StoreItem,
    StoreQuiet,
)
from kvfabric.fabric.model import ModelSpec

from .many_holders import ABI, CLIENT, DIRECTORY, Holders

MODEL = ModelSpec.load(
    {
        "groups": [
            {"name": "csa", "kind": "compressed_history", "block_tokens": 8, "ratio": 4, "block_bytes": 64},
            {
                "name": "tail",
                "kind": "uncompressed_tail",
                "of": "csa",
                "block_tokens": 4,
                "overlap_tokens": 4,
                "block_bytes": 64,
            },
            {"name": "index", "kind": "indexer", "of": "csa", "block_tokens": 8, "block_bytes": 64},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 6, "block_bytes": 64},
        ]
    }
)
P = range(33)


@pytest.fixture
def world() -> Holders:
    return Holders(MODEL, {"n0": (0,)}, slots=16)


def seen(world: Holders, tokens: range = P) -> int:
    answer = world.acquire("n0", tokens, probe=True)
    assert answer is not None
    return answer.tokens


def test_nothing_is_visible_before_the_commit_and_all_of_it_after(world: Holders) -> None:
    begun = world.begin("n0", world.keys(P))
    assert begun.refused is None
    assert seen(world) == 0
    assert world.commit("n0", begun).refused is None
    assert seen(world) == 32
    world.at_rest()


def test_an_attempt_gets_all_its_slots_or_none(world: Holders) -> None:
    too_long = range(16 * 4 + 5)
    before = accounting(world.cores["n0"])
    begun = world.begin("n0", world.keys(too_long))
    assert (begun.refused, begun.group, begun.slots) == (Reason.ADMISSION_LIMIT, "tail", ())
    assert accounting(world.cores["n0"]) == before
    assert world.begin("n0", world.keys(range(16 * 4))).refused is None


def test_a_late_commit_of_a_superseded_attempt_is_refused(world: Holders) -> None:
    first = world.begin("n0", world.keys(P), client="client:a")
    sums = world.fill("n0", first, seed=1)
    second = world.begin("n0", world.keys(P), client="client:b")
    assert world.commit("n0", second, seed=2, client="client:b").refused is None
    late = world.ask("n0", StoreCommit("late", first.attempt, sums), "client:a")
    assert late.refused is Reason.ATTEMPT_SUPERSEDED
    assert check(world.cores["n0"]) == []
    assert accounting(world.cores["n0"]).reserved == 0
    assert seen(world) == 32


def test_an_earlier_commit_does_not_refuse_a_later_attempt(world: Holders) -> None:
    assert world.store("n0", P, seed=1).refused is None
    assert world.store("n0", P, seed=2, revision=1).refused is None
    world.at_rest()


def test_an_attempt_that_shares_one_object_supersedes_the_whole_earlier_one(world: Holders) -> None:
    first = world.begin("n0", world.keys(P))
    only = [world.objects(world.keys(P), 0, 0, [0])]
    assert world.begin("n0", world.keys(P), items=only).refused is None
    assert world.commit("n0", first).refused is Reason.ATTEMPT_SUPERSEDED


def test_an_aborted_attempts_slots_are_quarantined_until_it_is_quiet(world: Holders) -> None:
    begun = world.begin("n0", world.keys(P))
    count = sum(len(run.indices) for run in begun.slots)
    assert world.ask("n0", StoreAbort("a", begun.attempt)).refused is None
    assert accounting(world.cores["n0"]).quarantined == count
    assert world.commit("n0", begun).refused is Reason.ATTEMPT_SUPERSEDED
    assert world.ask("n0", StoreQuiet("q", begun.attempt), "client:other").refused is None
    assert accounting(world.cores["n0"]).quarantined == count, "another client cannot say that it is quiet"
    assert world.ask("n0", StoreQuiet("q2", begun.attempt)).refused is None
    world.at_rest()


def test_quarantined_slots_are_no_room(world: Holders) -> None:
    for start in (0, 1000):
        begun = world.begin("n0", world.keys(range(start, start + 32)))
        world.ask("n0", StoreAbort(world.name(), begun.attempt))
    assert world.begin("n0", world.keys(range(2000, 2032))).refused is Reason.ADMISSION_LIMIT


def test_a_writer_whose_process_is_gone_writes_no_more(world: Holders) -> None:
    begun = world.begin("n0", world.keys(P))
    world.feed("n0", PeerClosed("client:other"))
    assert accounting(world.cores["n0"]).reserved
    world.feed("n0", PeerClosed(CLIENT))
    world.at_rest()
    assert world.commit("n0", begun).refused is Reason.ATTEMPT_SUPERSEDED


def test_an_attempt_that_takes_too_long_is_quarantined_and_its_commit_refused(world: Holders) -> None:
    begun = world.begin("n0", world.keys(P))
    world.pass_time(world.cores["n0"].ctx.config.attempt_ttl_s + 1)
    assert accounting(world.cores["n0"]).quarantined
    assert world.commit("n0", begun).refused is Reason.ATTEMPT_SUPERSEDED
    world.ask("n0", StoreQuiet("q", begun.attempt))
    world.at_rest()


def test_a_repeated_request_is_answered_and_not_run_again(world: Holders) -> None:
    begun = world.begin("n0", world.keys(P), request="same")
    assert world.begin("n0", world.keys(P), request="same") == begun
    assert len(world.cores["n0"].stores.attempts) == 1
    sums = world.fill("n0", begun)
    done = world.ask("n0", StoreCommit("c", begun.attempt, sums))
    assert isinstance(done, Done)
    assert done.refused is None
    assert world.ask("n0", StoreCommit("c", begun.attempt, sums)) == done
    world.at_rest()


def test_an_id_that_stands_for_another_request_gets_no_answer_to_that_one(world: Holders) -> None:
    other = range(500, 533)
    begun = world.begin("n0", world.keys(P), request="same")
    sums = world.fill("n0", begun)
    assert isinstance(world.ask("n0", StoreCommit("same", begun.attempt, sums)), Misuse)
    assert world.ask("n0", StoreCommit("c", begun.attempt, sums)).refused is None
    assert isinstance(world.ask("n0", StoreCommit("c", begun.attempt, sums[:-1] + b"?")), Misuse)
    grant = world.granted("n0", P, request="a")
    for tokens, fields in ((other, {}), (P, {"probe": True}), (P[:-1], {})):
        assert isinstance(world.ask("n0", world.wanted("n0", tokens, request="a", **fields)), Misuse)
    retried = world.ask("n0", world.wanted("n0", P, request="a", lease_s=5.0), "client:again")
    assert (retried.grant.lease, retried.tokens) == (grant.lease, 32)
    world.hold_back = lambda _, to, __: to == DIRECTORY
    assert world.ask("n0", world.wanted("n0", other, request="b")) is None
    assert isinstance(world.ask("n0", world.wanted("n0", P, request="b")), Misuse)
    assert world.ask("n0", world.wanted("n0", other, request="b")) is None
    world.pass_time(10.0)
    assert (world.replies[-1].request, world.replies[-1].tokens) == ("b", 0)


def test_a_commit_without_a_checksum_for_each_object_leaves_the_attempt_open(world: Holders) -> None:
    begun = world.begin("n0", world.keys(P))
    sums = world.fill("n0", begun)
    assert world.ask("n0", StoreCommit("short", begun.attempt, sums[:-16])).refused is Reason.CHECKSUM_MISMATCH
    assert world.ask("n0", StoreCommit("whole", begun.attempt, sums)).refused is None


def test_what_began_under_older_weights_is_refused(world: Holders) -> None:
    begun = world.begin("n0", world.keys(P))
    old, new = weights_digest16("v1"), weights_digest16("v2")
    world.ask("n0", SetWeights(new, (old,), 1), "supervisor")
    assert world.commit("n0", begun).refused is Reason.WEIGHTS_MISMATCH
    assert world.begin("n0", world.keys(P)).refused is Reason.WEIGHTS_MISMATCH
    assert world.begin("n0", world.keys(P, weights="v2")).refused is None


def test_a_late_word_of_older_weights_changes_nothing(world: Holders) -> None:
    old, new = weights_digest16("v1"), weights_digest16("v2")
    world.ask("n0", SetWeights(new, (old,), 2), "supervisor")
    world.ask("n0", SetWeights(old, (new,), 1), "supervisor")
    assert world.begin("n0", world.keys(P)).refused is Reason.WEIGHTS_MISMATCH
    assert world.arenas["n0"].weights == new


def test_a_draining_holder_takes_no_stores(world: Holders) -> None:
    world.ask("n0", SetMode(True, False, 1), "supervisor")
    assert world.begin("n0", world.keys(P)).refused is Reason.DRAINING
    world.ask("n0", SetMode(False, False, 2), "supervisor")
    assert world.begin("n0", world.keys(P)).refused is None


def test_extend_makes_the_new_visible_and_retires_the_old_in_one_step(world: Holders) -> None:
    assert world.store("n0", range(17)).refused is None
    grant = world.granted("n0", range(17))
    keys = world.keys(P)
    items = [world.objects(keys, 0, 0, [2, 3]), world.objects(keys, 1, 0, [6, 7]), world.objects(keys, 2, 0, [2, 3])]
    items.append(world.objects(keys, 3, 0, [6, 7]))
    retire = (world.objects(keys, 1, 0, [0, 1, 2]), world.objects(keys, 3, 0, [0, 1]))
    begun = world.begin("n0", keys, items=items, retire=retire)
    core = world.cores["n0"]
    shapes = []
    for _ in range(2):
        table = core.ctx.books.table
        shapes.append([len(table[g, 0]) for g in range(4)])
        if len(shapes) == 1:
            assert world.commit("n0", begun).refused is None
    assert shapes == [[2, 4, 2, 4], [4, 4 + 2 - 3, 4, 4 + 2 - 2]]
    assert seen(world) == 32
    assert check(core) == []
    assert accounting(core).pinned == sum(len(run.indices) for part in grant.parts for run in part.slots)


def test_old_leases_keep_the_slots_that_a_commit_retired(world: Holders) -> None:
    assert world.store("n0", P, seed=1).refused is None
    grant = world.granted("n0", P)
    before = [world.arenas["n0"].versions.copy(), world.arenas["n0"].bytes.copy()]
    assert world.store("n0", P, seed=2, revision=1).refused is None
    part, arena = world.parts(grant)[0]
    assert arena is not None
    for run in part.slots:
        for place in range(len(run.indices)):
            slot = int.from_bytes(run.slots[4 * place : 4 * place + 4], "little")
            assert arena.version(slot) == before[0][slot]
    assert check(world.cores["n0"]) == []


def test_objects_that_are_there_already_are_left_alone_unless_replaced(world: Holders) -> None:
    assert world.store("n0", P).refused is None
    again = world.begin("n0", world.keys(P), replace=False)
    assert all(not run.indices for run in again.slots)
    restamped = world.begin("n0", world.keys(P), replace=False, revision=1)
    assert all(run.indices for run in restamped.slots)


def test_no_more_attempts_are_open_than_the_bound() -> None:
    world = Holders(MODEL, {"n0": (0,)}, slots=16, attempts_max=2)
    one = [world.objects(world.keys(P), 0, 0, [0])]
    two = [world.objects(world.keys(P), 0, 0, [1])]
    three = [world.objects(world.keys(P), 0, 0, [2])]
    first = world.begin("n0", world.keys(P), items=one)
    assert world.begin("n0", world.keys(P), items=two).refused is None
    assert world.begin("n0", world.keys(P), items=three).refused is Reason.QUOTA
    assert world.commit("n0", first).refused is None
    assert world.begin("n0", world.keys(P), items=three).refused is None


def test_an_attempt_of_an_earlier_life_is_told_so(world: Holders) -> None:
    begun = world.begin("n0", world.keys(P))
    world.start("n0")
    refused = world.ask("n0", StoreCommit("c", begun.attempt, bytes(16)))
    assert refused.refused is Reason.HOLDER_LOST


def test_an_item_of_a_shard_that_lives_elsewhere_gets_no_slots(world: Holders) -> None:
    keys = world.keys(P)
    elsewhere = world.objects(keys, 0, 0, [0])
    item = StoreItem(type(elsewhere)(0, 1, elsewhere.indices, elsewhere.digests), 0, 64, ABI)
    begun = world.ask("n0", StoreBegin("r", world.prompt(keys), (item,), (), True))
    assert begun.refused is None
    assert [run.indices for run in begun.slots] == [()]
