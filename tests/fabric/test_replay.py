"""Replay: what may be missing, how far back computing must begin, and who never replays."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.fabric.evidence import GroupEvidence
from kvfabric.fabric.identity import Namespace
from kvfabric.fabric.kinds import Status
from kvfabric.fabric.messages import Drop, Release
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.needs import needs, rules_of
from kvfabric.fabric.presets import preset
from kvfabric.fabric.replay import exact_replay_tokens, replay_of, shortest_replay_tokens
from kvfabric.fabric.rules import hash_tokens, servable
from kvfabric.ops.simulate.judge import Content, Judge
from kvfabric.ops.simulate.models import planned, random_model

from .many_holders import Holders

HYBRID: list[dict[str, Any]] = [
    {"name": "csa", "kind": "compressed_history", "block_tokens": 8, "ratio": 4, "layers": [2, 3]},
    {
        "name": "tail",
        "kind": "uncompressed_tail",
        "of": "csa",
        "block_tokens": 4,
        "overlap_tokens": 4,
        "layers": [2, 3],
    },
    {"name": "idx", "kind": "indexer", "of": "csa", "block_tokens": 8, "layers": [2, 3]},
    {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 9, "layers": [0, 1, 2, 3]},
]
PROMPT = range(100)


def hybrid(groups: list[dict[str, Any]] = HYBRID, **fields: Any) -> ModelSpec:
    return ModelSpec.load({"replay": True, "groups": [{"block_bytes": 64} | g for g in groups], **fields})


def test_an_exact_replay_is_as_long_as_layers_times_window() -> None:
    assert exact_replay_tokens(hybrid()) == 4 * 9
    flash = preset("deepseek_v4_flash").model_copy(update={"replay": True})
    layers = next(g for g in flash.groups if g.name == "swa").layers
    assert exact_replay_tokens(flash) == len(layers) * 128


def test_a_tail_that_reaches_farther_than_its_layers_window_counts_instead() -> None:
    wide = [g | ({"overlap_tokens": 12} if g["name"] == "tail" else {}) for g in HYBRID]
    assert exact_replay_tokens(hybrid(wide)) == 2 * 9 + 2 * (3 + 12)


def test_groups_that_name_no_layers_share_one() -> None:
    bare = [{k: v for k, v in g.items() if k != "layers"} for g in HYBRID]
    assert exact_replay_tokens(hybrid(bare)) == 9


@pytest.mark.parametrize(
    "group",
    [
        {"name": "state", "kind": "compressed_history", "form": "state", "grid_tokens": 8},
        {"name": "rows", "kind": "sliding_window", "form": "state", "grid_tokens": 8},
    ],
)
def test_state_that_looks_back_for_ever_is_never_replayed(group: dict[str, Any]) -> None:
    assert replay_of(hybrid([*HYBRID, group])) is None
    assert replay_of(hybrid([*HYBRID])) is not None


def test_snapshots_of_a_window_whose_width_is_known_can_be_replayed() -> None:
    rows = {"name": "rows", "kind": "sliding_window", "form": "state", "grid_tokens": 8, "window_tokens": 40}
    replay = replay_of(hybrid([*HYBRID, rows]))
    assert replay is not None
    assert needs(replay.model, 16)[4] == ()
    assert exact_replay_tokens(hybrid([*HYBRID, rows])) == 4 * 9 + 40


def test_a_model_replays_only_where_its_spec_says_so_and_something_can_be_rebuilt() -> None:
    assert replay_of(hybrid(replay=False)) is None
    assert replay_of(hybrid(HYBRID[:1])) is None


def test_sinks_are_kept_or_missed_like_any_history() -> None:
    sunk = [g | ({"sink_tokens": 6} if g["name"] == "swa" else {}) for g in HYBRID]
    replay = replay_of(hybrid(sunk))
    assert replay is not None
    assert needs(replay.model, 48) == ((range(6),), (), (range(6),), (range(2),))


@given(seed=st.integers(0, 10_000), data=st.data())
def test_a_replay_needs_what_is_not_computed_again_and_nothing_else(seed: int, data: st.DataObject) -> None:
    """Against the simulator's own loops: the same positions, the same objects, the same length."""
    model = planned(random_model(random.Random(seed)), random.Random(seed)).model_copy(update={"replay": True})
    judge = Judge(model, Content())
    replay = replay_of(model)
    if replay is None:
        assert judge.replay_tokens == 0
        return
    assert judge.replay_tokens == replay.exact_tokens
    for p in range(judge.grid, 90, judge.grid):
        found = [frozenset(i for r in ranges for i in r) for ranges in needs(replay.model, p)]
        assert found == judge.needed(p, replays=True)
    presence = [data.draw(st.integers(0, (1 << 90 // g.unit_tokens) - 1)) for g in model.groups]
    n = 90
    there = {
        (g, s): {i: {0} for i in range(n) if bits >> i & 1}
        for g, bits in enumerate(presence)
        for s in range(model.shards)
    }
    evidence = [GroupEvidence({0: held}, held, ()) for held in presence]
    bits = servable(replay.model, evidence, n)
    for p in range(judge.grid, hash_tokens(model, evidence, n) + 1, judge.grid):
        assert bool(bits >> p // judge.grid & 1) == judge.serves(p, n, there, replays=True)


@given(seed=st.integers(0, 10_000), p=st.integers(1, 60))
def test_spans_are_the_ranges_of_many_positions_at_once(seed: int, p: int) -> None:
    model = random_model(random.Random(seed))
    for relaxed in (model, *([replay.model] if (replay := replay_of(model)) else [])):
        rules = rules_of(relaxed)
        for rule in rules.groups:
            position = p * rules.grid
            head, first, end = (int(part[0]) for part in rule.spans(np.array([position], np.int64)))
            found = {*range(head), *range(first, end)}
            assert found == {i for r in rule.ranges(position, 0) for i in r}
            assert head <= first or first >= end


# --- a holder that replays -------------------------------------------------------------------------


def fabric(**fields: Any) -> Holders:
    return Holders(hybrid(**fields), {"n0": (0,), "n1": (0,)}, slots=40)


def without(world: Holders, holder: str, groups: tuple[int, ...], tokens: range = PROMPT) -> None:
    keys = world.keys(tokens)
    assert world.ask(holder, Drop(world.name(), tuple(world.objects(keys, g, 0) for g in groups))).refused is None


def test_windows_and_tails_that_are_gone_are_replayed_from_far_enough_before() -> None:
    world = fabric()
    world.store("n0", PROMPT)
    without(world, "n0", (1, 3))
    answer = world.acquire("n0", PROMPT)
    assert answer is not None
    assert (answer.status, answer.tokens, answer.hash_tokens) == (Status.FULL_HIT, 96, 96)
    assert answer.replay_from == 96 - 36
    assert answer.grant is not None
    assert answer.grant.replay_from == 60
    assert {run.group for part in answer.grant.parts for run in part.slots} == {0, 2}
    world.ask(
        "n0",
        Release(world.name(), answer.grant.lease, None),
    )
    world.at_rest()


def test_without_replay_in_the_spec_the_same_prompt_is_computed_anew() -> None:
    """Control."""
    world = fabric(replay=False)
    world.store("n0", PROMPT)
    without(world, "n0", (1, 3))
    answer = world.acquire("n0", PROMPT)
    assert answer is not None
    assert (answer.tokens, answer.replay_from) == (0, None)


def test_a_replay_that_would_begin_before_a_kept_position_is_not_chosen() -> None:
    world = fabric()
    world.store("n0", PROMPT)
    keys = world.keys(PROMPT)
    # Everything at 72 is kept: a replay of 96 would begin at 60, and compute more.
    behind = tuple(world.objects(keys, g, 0, range(18, 25)) for g in (1, 3))
    assert world.ask("n0", Drop(world.name(), behind)).refused is None
    answer = world.acquire("n0", PROMPT)
    assert answer is not None
    assert (answer.tokens, answer.replay_from) == (72, None)


def test_a_graph_is_never_granted_a_replay() -> None:
    world = fabric()
    world.store("n0", PROMPT)
    without(world, "n0", (1, 3))
    answer = world.acquire("n0", PROMPT, graph=True)
    assert answer is not None
    assert (answer.tokens, answer.replay_from) == (0, None)


def test_history_for_a_replay_comes_from_another_holder() -> None:
    world = fabric()
    world.store("n1", PROMPT)
    without(world, "n1", (1, 3))
    answer = world.acquire("n0", PROMPT)
    assert answer is not None
    assert (answer.tokens, answer.replay_from) == (96, 60)
    assert dict(answer.moved_bytes) == {"csa": 12 * 64, "idx": 12 * 64}


def test_a_probe_says_where_a_replay_would_begin() -> None:
    world = fabric()
    world.store("n0", PROMPT)
    without(world, "n0", (1, 3))
    answer = world.acquire("n0", PROMPT, probe=True)
    assert answer is not None
    assert (answer.status, answer.tokens, answer.replay_from, answer.grant) == (Status.FULL_HIT, 96, 60, None)


def test_a_replay_that_will_do_is_shorter_and_labelled() -> None:
    world = fabric()
    world.store("n0", PROMPT)
    without(world, "n0", (1, 3))
    exact = world.acquire("n0", PROMPT)
    assert exact is not None
    assert (exact.replay_from, exact.approximate) == (60, False)
    near = world.acquire("n0", PROMPT, replay_tokens=9)
    assert near is not None
    assert (near.tokens, near.replay_from, near.approximate) == (96, 87, True)
    assert near.grant is not None
    assert (near.grant.replay_from, near.grant.approximate) == (87, True)
    long = world.acquire("n0", PROMPT, replay_tokens=500)
    assert long is not None
    assert (long.replay_from, long.approximate) == (60, False), "never more than is exact"
    assert shortest_replay_tokens(world.model) == 9


def test_a_request_that_names_no_length_is_never_answered_approximately() -> None:
    """Not even right after one that was, nor where an exact replay computes more than a kept position."""
    world = fabric()
    world.store("n0", PROMPT)
    keys = world.keys(PROMPT)
    behind = tuple(world.objects(keys, g, 0, range(18, 25)) for g in (1, 3))
    assert world.ask("n0", Drop(world.name(), behind)).refused is None
    near = world.acquire("n0", PROMPT, replay_tokens=9)
    assert near is not None
    assert (near.tokens, near.replay_from, near.approximate) == (96, 87, True)
    exact = world.acquire("n0", PROMPT)
    assert exact is not None
    assert (exact.tokens, exact.replay_from, exact.approximate) == (72, None, False)


def test_approximate_state_has_a_namespace_of_its_own() -> None:
    plain, near = (Namespace("m", "v1", "t", b"s", ("a", "r"), approximate=a) for a in (False, True))
    assert plain.digest() != near.digest()
    assert plain.digest() == Namespace("m", "v1", "t", b"s", ("a", "r")).digest()


# --- the law itself, on a network ------------------------------------------------------------------


def forward(
    embedded: npt.NDArray[np.float64],
    windows: list[int],
    full: list[npt.NDArray[np.float64]],
    start: int,
) -> list[npt.NDArray[np.float64]]:
    """A small network over tokens [start, n): each layer's window rows, as it leaves them.

    A layer mixes each token with the last ``window`` rows of its own input, those before ``start`` unknown
    (zero), and, if ``full`` has them, with all earlier rows of history, which were kept.
    """
    hidden = embedded.copy()
    hidden[:start] = 0.0
    rows = []
    for layer, window in enumerate(windows):
        rows.append(hidden.copy())
        out = hidden.copy()
        for t in range(start, len(hidden)):
            seen = hidden[max(0, t - window + 1) : t + 1]
            past = full[layer][: t + 1].mean(axis=0) if len(full) > layer and layer % 2 else 0.0
            out[t] = np.tanh(hidden[t] + np.arange(1, len(seen) + 1) @ seen + past)
        hidden = out
    return rows


@given(
    windows=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    position=st.integers(1, 40),
    seed=st.integers(0, 100),
)
def test_a_replay_of_the_exact_length_leaves_what_a_prefill_leaves_and_a_shorter_one_does_not(
    windows: list[int], position: int, seed: int
) -> None:
    """The sum of the layers' windows is enough, in any order; one window alone is not, under several layers."""
    groups: list[dict[str, Any]] = [{"name": "kv", "kind": "compressed_history", "block_tokens": 1}]
    groups += [
        {"name": f"w{i}", "kind": "sliding_window", "block_tokens": 1, "window_tokens": w, "layers": [i]}
        for i, w in enumerate(windows)
    ]
    replay = replay_of(hybrid(groups))
    assert replay is not None
    embedded = np.random.default_rng(seed).normal(size=(position, 3))
    prefilled = forward(embedded, windows, [], 0)
    history = [rows.copy() for rows in forward(embedded, windows, prefilled, 0)]
    true = forward(embedded, windows, history, 0)
    kept = [rows[max(0, position - w + 1) :] for rows, w in zip(true, windows, strict=True)]

    def left(start: int) -> list[npt.NDArray[np.float64]]:
        rows = forward(embedded, windows, history, start)
        return [r[max(0, position - w + 1) :] for r, w in zip(rows, windows, strict=True)]

    exact = left(replay.start(position))
    assert all(np.array_equal(a, b) for a, b in zip(exact, kept, strict=True))
    last = windows[-1]
    # The top layer's rows see back through every layer below; its own window alone does not reach that far.
    reach = sum(w - 1 for w in windows[:-1]) + last - 1
    if len(windows) > 1 and position > reach and min(windows) > 2:
        near = left(position - last)
        assert not all(np.array_equal(a, b) for a, b in zip(near, kept, strict=True))
