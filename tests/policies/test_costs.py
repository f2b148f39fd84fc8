"""Costs: lines that follow what is measured, and plans that take the least expected time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.choosing import Terms, cheapest, choose
from kvfabric.fabric.expected import Measured, Work
from kvfabric.fabric.identity import Namespace, PromptKeys, as_tokens, weights_digest16
from kvfabric.fabric.kinds import ObjectKind, Reason, Status
from kvfabric.fabric.messages import Column, Computed, Drop, Prompt
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.offers import Offers, offers_of
from kvfabric.fabric.passport import AbiPassport
from kvfabric.fabric.planner import View
from kvfabric.fabric.replay import replay_of
from kvfabric.fabric.rules import servable
from kvfabric.ops.simulate.models import planned, random_guess, random_model
from kvfabric.policies.costs import CostGuess, LeastTime, Line

from ..fabric.many_holders import Holders

ABI = AbiPassport().abi()


# --- lines -----------------------------------------------------------------------------------------


@given(
    fixed_s=st.floats(0, 0.1),
    unit_s=st.floats(1e-10, 1e-6),
    guess=st.tuples(st.floats(0, 0.1), st.floats(1e-10, 1e-6)),
    seed=st.integers(0, 1000),
)
def test_a_line_converges_to_what_things_really_take(
    fixed_s: float, unit_s: float, guess: tuple[float, float], seed: int
) -> None:
    """From any first guess, whatever the sizes."""
    rng, line = random.Random(seed), Line(*guess, prior_amount=1 << 20)
    for _ in range(400):
        amount = rng.randrange(1, 1 << 24)
        line.learn(amount, fixed_s + unit_s * amount)
    for amount in (1 << 12, 1 << 20, 1 << 24):
        true = fixed_s + unit_s * amount
        assert line.seconds(amount) == pytest.approx(true, rel=0.02, abs=1e-7)


@given(seconds=st.lists(st.tuples(st.integers(1, 1 << 24), st.floats(0, 1e4)), max_size=60))
def test_a_line_never_promises_less_than_nothing(seconds: list[tuple[int, float]]) -> None:
    line = Line(0.001, 1e-9, 1 << 20)
    for amount, took in seconds:
        line.learn(amount, took)
        assert line.fixed_s >= 0
        assert line.unit_s >= 0
        assert line.seconds(0) == 0
        assert line.seconds(1 << 20) <= line.seconds(1 << 24)


def test_one_size_alone_teaches_its_speed() -> None:
    line = Line(0.01, 1e-9, 1 << 20)
    for _ in range(100):
        line.learn(1 << 20, 2.0)
    assert line.seconds(1 << 20) == pytest.approx(2.0, rel=0.01)


def test_a_stall_is_no_new_speed_and_a_change_is() -> None:
    line = Line(0.0, 1e-9, 1 << 20)
    for _ in range(50):
        line.learn(1 << 20, 0.001)
    line.learn(1 << 20, 60.0)
    assert line.seconds(1 << 20) < 0.003
    for _ in range(60):
        line.learn(1 << 20, 0.05)
    assert line.seconds(1 << 20) == pytest.approx(0.05, rel=0.05)


def test_each_source_has_its_own_speed_and_an_unknown_one_that_of_all() -> None:
    costs = LeastTime()
    for _ in range(60):
        costs.learn(Measured(Work.TRANSFER, 1 << 20, 0.5, "far"))
        costs.learn(Measured(Work.TRANSFER, 1 << 20, 0.001, "near"))
    assert costs.line_of("far").seconds(1 << 20) == pytest.approx(0.5, rel=0.05)
    assert costs.line_of("near").seconds(1 << 20) == pytest.approx(0.001, rel=0.05)
    assert 0.001 < costs.line_of("new").seconds(1 << 20) < 0.5


def test_the_sources_remembered_are_bounded() -> None:
    costs = LeastTime()
    for i in range(1100):
        costs.learn(Measured(Work.TRANSFER, 1 << 20, 0.5, f"holder {i}"))
    assert len(costs.sources) == 1024


# --- offers and choices ------------------------------------------------------------------------------


def view_of(model: ModelSpec, rng: random.Random, n: int = 80) -> View:
    """A prompt some of which lies at its reader, some at two others, some on tiers."""
    keys = PromptKeys(model, Namespace(model.name, model.weights), as_tokens(range(n)))
    units = tuple((unit, keys.keys(unit)) for unit in model.units_tokens)
    prompt = Prompt(keys.namespace_digest, weights_digest16(model.weights), "", n, units)
    view = View(model, prompt, (ABI,) * len(model.groups), ("n0",) * model.shards)
    whole = rng.randrange(n // 2, n)
    for group, spec in enumerate(model.groups):
        for shard in range(model.shards):
            for holder in ("n0", "n1", "n2"):
                everything = (1 << whole // spec.unit_tokens) - 1
                there = everything & (rng.getrandbits(90) | rng.choice((0, everything)))
                tier = there & (rng.getrandbits(90) if rng.random() < 0.5 else 0)
                if there:
                    versions = bytes(8) * (there & ~tier).bit_count()
                    column = Column(
                        holder, 1, group, shard, there & ~tier, tier, {0: there}, ((ABI, there),), (), versions
                    )
                    view.columns[holder, group, shard] = column
    return view


@settings(max_examples=60)
@given(seed=st.integers(0, 100_000), tiers=st.booleans(), least=st.integers(0, 80))
def test_only_what_can_be_served_is_ever_chosen_and_nothing_offered_is_sooner(
    seed: int, tiers: bool, least: int
) -> None:
    rng = random.Random(seed)
    model = planned(random_model(rng), rng).model_copy(update={"replay": True})
    view, planning = view_of(model, rng), LeastTime(random_guess(rng))
    found = view.found(tiers=tiers)
    choice = choose(view, found, planning, Terms(tiers, replays=True, min_tokens=least, explain=True))
    replay = replay_of(model)
    using = view.replaying() if choice.replays else view
    bits = servable(using.model, using.evidence(tiers=tiers), view.prompt.n)
    assert bits >> choice.found.tokens // model.grid_tokens & 1
    offers = offers_of(view, tiers=tiers, replayed=0 if replay is None else replay.exact_tokens)
    seconds = planning.seconds(offers)
    enough = offers.tokens >= least
    best = seconds[enough].min() if enough.any() else seconds.min()
    assert choice.expected[0].total_s == pytest.approx(best)
    assert choice.expected[0].tokens == choice.found.tokens
    if enough.any():
        assert choice.found.tokens >= least


@settings(max_examples=60)
@given(seed=st.integers(0, 100_000))
def test_offers_count_exactly_the_bytes_that_a_plan_moves(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng)
    view = view_of(model, rng)
    offers = offers_of(view, tiers=True)
    assert offers.tokens[0] == 0
    for at, tokens in enumerate(offers.tokens.tolist()):
        moved = restored = 0
        for part in view.plan(tokens, (0,) * len(model.groups)):
            for fetch in part.fetches:
                o = fetch.objects
                size = len(o.indices) * model.groups[o.group].block_bytes
                moved += size
                tier = view.columns[fetch.source, o.group, o.shard].tier
                restored += sum(tier >> i & 1 for i in o.indices) * model.groups[o.group].block_bytes
            for o in part.local:
                tier = view.columns[part.holder, o.group, o.shard].tier
                restored += sum(tier >> i & 1 for i in o.indices) * model.groups[o.group].block_bytes
        assert sum(int(by[at]) for by in offers.moved.values()) == moved
        assert int(offers.restored[at]) == restored


@settings(max_examples=30)
@given(seed=st.integers(0, 100_000))
def test_what_lies_in_host_memory_is_copied_and_the_rest_restored(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng)
    view = view_of(model, rng)
    host = {(g, s): rng.getrandbits(90) for g in range(len(model.groups)) for s in range(model.shards)}
    split = offers_of(view, tiers=True, in_host=lambda g, s: host[g, s])
    plain = offers_of(view, tiers=True)
    assert (split.restored + split.copied == plain.restored).all()
    none = offers_of(view, tiers=True, in_host=lambda *_: -1)
    elsewhere = offers_of(view, tiers=False)
    assert (none.restored <= plain.restored).all()
    assert not elsewhere.restored.any()
    assert not elsewhere.copied.any()


def test_a_copy_out_of_host_memory_has_a_line_of_its_own() -> None:
    costs = LeastTime()
    for _ in range(60):
        costs.learn(Measured(Work.COPY, 1 << 20, 0.25))
        costs.learn(Measured(Work.RESTORE, 1 << 20, 2.0))
    zeros = np.zeros(1, np.int64)
    mega = np.full(1, 1 << 20, np.int64)
    copied = costs.expected(Offers(2, zeros, zeros, {}, zeros, mega), 0)
    restored = costs.expected(Offers(2, zeros, zeros, {}, mega, zeros), 0)
    assert copied.restore_s == pytest.approx(0.25, rel=0.05)
    assert restored.restore_s == pytest.approx(2.0, rel=0.05)
    assert costs.known()["copy"]["samples"] == 60


def test_of_equal_offers_the_longer_is_taken() -> None:
    offers = Offers(100, np.array([0, 16, 32]), np.zeros(3, np.int64), {}, np.zeros(3, np.int64), np.zeros(3, np.int64))
    free = LeastTime(CostGuess(prefill_tokens_per_s=1e30))
    assert cheapest(offers, np.round(free.seconds(offers), 9)) == 2


# --- holders that plan by cost -----------------------------------------------------------------------

GROUPS: list[dict[str, Any]] = [
    {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 4096},
    {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 5, "block_bytes": 4096},
]
PROMPT = range(65)


def fabric(guess: CostGuess, **fields: Any) -> Holders:
    model = ModelSpec.load({"groups": GROUPS, "plan": "cost", **fields})
    return Holders(model, {"n0": (0,), "n1": (0,)}, slots=40, planning=lambda: LeastTime(guess))


DEAR_DISK = CostGuess(prefill_tokens_per_s=1000, restore_start_s=10.0)
DEAR_LINK = CostGuess(prefill_tokens_per_s=1000, transfer_start_s=10.0)
DEAR_PREFILL = CostGuess(prefill_tokens_per_s=1)


def test_what_would_take_longer_from_the_disk_than_to_compute_is_left_there_and_named() -> None:
    world = fabric(DEAR_DISK)
    world.store("n0", PROMPT)
    world.swap_out("n0", PROMPT)
    answer = world.acquire("n0", PROMPT)
    assert answer is not None
    assert (answer.status, answer.tokens, answer.usable_tokens) == (Status.PARTIAL_HIT, 0, 64)
    assert answer.cause is not None
    assert (answer.cause.group, answer.cause.kind) == ("kv", ObjectKind.DISK_PREFIX)
    assert answer.cause.reason is Reason.DEADLINE_EXCEEDED


def test_where_computing_is_dearer_the_same_prompt_is_restored() -> None:
    """Control."""
    world = fabric(DEAR_PREFILL)
    world.store("n0", PROMPT)
    world.swap_out("n0", PROMPT)
    answer = world.acquire("n0", PROMPT)
    assert answer is not None
    assert (answer.status, answer.tokens) == (Status.FULL_HIT, 64)


def test_a_far_copy_is_fetched_only_where_that_is_sooner() -> None:
    for guess, tokens in ((DEAR_LINK, 32), (DEAR_PREFILL, 64)):
        world = fabric(guess)
        world.store("n1", PROMPT)
        world.store("n0", range(33))
        answer = world.acquire("n0", PROMPT)
        assert answer is not None
        assert answer.tokens == tokens, guess


def test_a_request_for_at_least_so_many_tokens_gets_them_whatever_they_cost() -> None:
    world = fabric(DEAR_LINK)
    world.store("n1", PROMPT)
    answer = world.acquire("n0", PROMPT, min_tokens=40)
    assert answer is not None
    assert answer.tokens == 64


def test_a_plan_learns_from_what_engines_report() -> None:
    """Engines that compute slowly turn a disk that was too slow into the sooner way."""
    world = fabric(CostGuess(prefill_tokens_per_s=1e6))
    world.store("n0", PROMPT)
    world.swap_out("n0", PROMPT)
    before = world.acquire("n0", PROMPT)
    assert before is not None
    assert before.tokens == 0
    for tokens in (100, 1000, 64, 500) * 8:
        assert world.ask("n0", Computed(world.name(), Work.PREFILL, tokens, tokens / 100)).refused is None
    after = world.acquire("n0", PROMPT)
    assert after is not None
    assert after.tokens == 64


def test_replay_competes_with_prefill_by_what_each_takes() -> None:
    """Windows are gone: to replay 10 tokens of 64 is sooner than to compute all, unless replaying is slow."""
    groups = [GROUPS[0], GROUPS[1] | {"window_tokens": 10}]
    for replay_tokens_per_s, tokens, replay_from in ((1000, 64, 54), (10, 0, None)):
        guess = CostGuess(prefill_tokens_per_s=1000, replay_tokens_per_s=replay_tokens_per_s)
        world = fabric(guess, groups=groups, replay=True)
        world.store("n0", PROMPT)
        keys = world.keys(PROMPT)
        world.ask("n0", Drop(world.name(), (world.objects(keys, 1, 0),)))
        answer = world.acquire("n0", PROMPT)
        assert answer is not None
        assert (answer.tokens, answer.replay_from) == (tokens, replay_from)


def test_a_probe_that_asks_why_is_told_what_was_weighed() -> None:
    world = fabric(DEAR_LINK)
    world.store("n1", PROMPT)
    world.store("n0", range(33))
    answer = world.acquire("n0", PROMPT, probe=True, explain=True)
    assert answer is not None
    chosen, longest, nothing = answer.plan[:3]
    assert (chosen.tokens, chosen.transfer_s) == (32, 0)
    assert longest.tokens == 64
    assert longest.transfer_s > 10
    assert (nothing.tokens, nothing.transfer_s) == (0, 0)
    assert chosen.total_s == min(offer.total_s for offer in answer.plan)
