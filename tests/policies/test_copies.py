"""Placement: what is hot gets a second copy, what is cold loses it, and there is never too much of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.fabric.copies import cut
from kvfabric.fabric.messages import Members, Release
from kvfabric.fabric.model import ModelSpec
from kvfabric.policies.copies import HotCopies

from ..fabric.many_holders import Holders

MODEL = ModelSpec.load(
    {
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 64},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 6, "block_bytes": 64},
        ]
    }
)
P, Q = range(17), range(100, 117)
OF_P = 6 * 64
"""Bytes of what a resume at 16 takes."""


class Placing:
    """Holders on nodes of their own that place copies."""

    def __init__(self, holders: tuple[str, ...] = ("n0", "n1", "n2"), slots: int = 40, **policy: float) -> None:
        self.policies: list[HotCopies] = []
        self.policy = {"hot_per_s": 0.1, "half_life_s": 10.0, "keep_s": 5.0, **policy}
        self.world = Holders(MODEL, dict.fromkeys(holders, (0,)), slots=slots, placement=self._policy)
        self.tell(*holders)

    def _policy(self) -> HotCopies:
        return HotCopies(**self.policy)  # type: ignore[arg-type]

    def tell(self, *up: str) -> None:
        from kvfabric.fabric.effects import Received
        from kvfabric.fabric.messages import Member

        self.number = getattr(self, "number", 0) + 1
        members = tuple(Member(name, 1, name, name, "", "", (0,)) for name in up)
        for name in up:
            self.world.feed(name, Received("supervisor", Members(self.number, members)))

    def use(self, holder: str, prompt: range = P, times: int = 1) -> None:
        for _ in range(times):
            grant = self.world.granted(holder, prompt)
            self.world.ask(holder, Release(self.world.name(), grant.lease, None))

    def having(self, prompt: range = P) -> list[str]:
        """Who has all that a resume at 16 takes."""
        found = []
        for name, core in self.world.cores.items():
            keys = self.world.keys(prompt)
            digests = [keys.keys(4)[i * 32 : i * 32 + 32] for i in range(4)]
            if all(d in core.ctx.books.ready[0, 0] for d in digests) and all(
                d in core.ctx.books.ready[1, 0] for d in digests[2:]
            ):
                found.append(name)
        return found

    def count(self, name: str) -> int:
        return sum(core.ctx.counters[name] for core in self.world.cores.values())


def test_a_hot_prefix_gets_a_second_copy_and_no_third() -> None:
    placing = Placing()
    placing.world.store("n0", P)
    placing.use("n0")
    assert placing.having() == ["n0"]
    placing.use("n0", times=3)
    assert len(placing.having()) == 2
    for _ in range(10):
        placing.use("n0", times=5)
        placing.world.pass_time(2.0)
    assert len(placing.having()) == 2
    assert placing.count("copies_placed") == 1
    placing.world.at_rest()


def test_a_prefix_that_is_asked_for_now_and_then_stays_where_it_is() -> None:
    """Control."""
    placing = Placing()
    placing.world.store("n0", P)
    for _ in range(10):
        placing.use("n0")
        placing.world.pass_time(60.0)
    assert placing.having() == ["n0"]


def test_a_copy_stays_while_its_prefix_is_hot_anywhere_and_goes_when_it_is_cold() -> None:
    placing = Placing()
    placing.world.store("n0", P)
    for _ in range(20):
        placing.use("n0", times=3)
        placing.world.pass_time(2.0)
    assert len(placing.having()) == 2
    assert placing.count("copies_dropped") == 0
    placing.world.pass_time(120.0)
    assert placing.having() == ["n0"]
    assert placing.count("copies_dropped") == 1
    placing.world.at_rest()


def test_the_last_copy_never_goes() -> None:
    placing = Placing()
    placing.world.store("n0", P)
    placing.use("n0", times=4)
    assert len(placing.having()) == 2
    placing.world.drop("n0", P)
    placing.world.pass_time(120.0)
    assert len(placing.having()) == 1


def test_what_was_used_where_it_was_placed_stays() -> None:
    placing = Placing(keep_s=30.0)
    placing.world.store("n0", P)
    placing.use("n0", times=4)
    (other,) = set(placing.having()) - {"n0"}
    placing.use(other)
    placing.world.pass_time(300.0)
    assert placing.count("copies_dropped") == 1
    assert len(placing.having()) == 2, "it is a reader's by now: only lack of room takes it"


def test_placed_copies_take_no_more_than_their_share() -> None:
    size = Placing().world.arenas["n0"].layout.size_bytes
    placing = Placing(holders=("n0", "n1"), share=(2 * 8 * 64 + 1) / size, placing_max=100)
    for i in range(6):
        prompt = range(1000 * i, 1000 * i + 17)
        placing.world.store("n0", prompt)
        placing.use("n0", prompt, times=4)
    desk = placing.world.cores["n1"].copies
    assert len(desk.copies) == 2
    assert desk.placed_bytes == 2 * OF_P
    assert placing.count("copies_refused") == 4


def test_a_holder_places_only_so_many_prefixes_at_a_time() -> None:
    placing = Placing(placing_max=2, share=1.0)
    for i in range(5):
        prompt = range(1000 * i, 1000 * i + 17)
        placing.world.store("n0", prompt)
        placing.use("n0", prompt, times=4)
    assert placing.count("copies_placed") == 2


def test_a_node_that_left_is_given_no_copy() -> None:
    placing = Placing()
    placing.tell("n0")
    placing.world.store("n0", P)
    placing.use("n0", times=10)
    assert placing.having() == ["n0"]


def test_without_a_policy_nothing_is_placed() -> None:
    """Control."""
    placing = Placing()
    placing.world.placement = lambda: None
    for name in ("n0", "n1", "n2"):
        placing.world.start(name)
    placing.tell("n0", "n1", "n2")
    placing.world.store("n0", P)
    placing.use("n0", times=20)
    assert placing.having() == ["n0"]


def test_what_a_holder_asks_itself_counts_as_no_acquire() -> None:
    placing = Placing()
    placing.world.store("n0", P)
    placing.use("n0", times=4)
    assert len(placing.having()) == 2
    assert placing.count("acquires_total") == 4
    assert placing.count("effective_hit_tokens_total") == 64


# --- the policy --------------------------------------------------------------------------------------


@given(rate=st.floats(0.05, 20), hot=st.floats(0.1, 20), most=st.integers(1, 8))
def test_the_copies_wanted_follow_the_rate_up_to_the_limit(rate: float, hot: float, most: int) -> None:
    policy = HotCopies(hot_per_s=hot, half_life_s=10.0, copies_max=most)
    wanted, now = 1, 0.0
    while now < 100.0:
        now += 1 / rate
        wanted = policy.used(b"key", now)
        assert 1 <= wanted <= most
    # A decaying count of a steady rate lies between its values just before and just after a grant.
    slack = math.log(2) / 10.0
    low, high = (min(most, 1 + int(max(r, 0) / hot)) for r in (rate - slack, rate + slack))
    assert low <= wanted <= high
    assert policy.wanted(b"key", now + 1000.0) == 1


def test_the_prefixes_whose_heat_is_known_are_bounded() -> None:
    policy = HotCopies(known_max=3)
    for i in range(10):
        policy.used(bytes([i]), 0.0)
    assert [policy.heat(bytes([i]), 0.0) for i in (6, 7, 8, 9)] == [0.0, 1.0, 1.0, 1.0]


def test_all_choose_alike_and_prefixes_spread() -> None:
    policy, nodes = HotCopies(), ["a", "b", "c"]
    chosen = [policy.choose(bytes([i]), nodes) for i in range(60)]
    assert chosen == [HotCopies().choose(bytes([i]), nodes[::-1]) for i in range(60)]
    assert all(chosen.count(node) > 8 for node in nodes)


@pytest.mark.parametrize("tokens", [4, 8, 16])
def test_a_cut_prompt_can_be_resumed_up_to_there_and_no_farther(tokens: int) -> None:
    world = Holders(MODEL, {"n0": (0,)}, slots=40)
    world.store("n0", P)
    prompt = world.prompt(world.keys(P))
    shorter = cut(prompt, tokens)
    assert shorter == world.prompt(world.keys(range(tokens + 1)))
