"""What a session remembers of chain segments: never something else than was true when it asked, and not for long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.identity import Namespace, PromptKeys, as_tokens, weights_digest16
from kvfabric.fabric.kinds import Status
from kvfabric.fabric.memo import NOT_TOLD, Remembered, SegmentMemo
from kvfabric.fabric.messages import Acquire, Answer, Column, Prompt, ShardMap
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.planner import View

from .directory_bed import ABI, BLOCK, MODEL, Bed

SEGMENT = 256


def prompt(*parts: tuple[int, int]) -> Prompt:
    """A prompt of so many blocks of each kind of token, and one token more."""
    tokens = [kind * 100_000 + i for kind, blocks in parts for i in range(blocks * BLOCK)]
    keys = PromptKeys(MODEL, Namespace("m", "v1"), as_tokens([*tokens, 7]))
    return Prompt(keys.namespace.digest(), weights_digest16("v1"), "", len(tokens) + 1, ((BLOCK, keys.keys(BLOCK)),))


class Asker:
    """A session's memory before a fabric of two shards: ``a`` is its own holder, ``b`` another node's."""

    def __init__(self, **bounds: Any) -> None:
        self.bed = Bed()
        names = ("directory:0", "directory:1")
        for name in names:
            self.bed.directory(name, ShardMap(1, names))
        self.bed.holder("a")
        self.bed.holder("b")
        self.bed.tell_map(ShardMap(1, names))
        self.memo = SegmentMemo(MODEL, **bounds)
        self.now = 0.0

    def probe(self, p: Prompt) -> Answer:
        message = Acquire(self.bed.request(), p, (ABI,), ("a",), 1.0, None, 0, True, explain=True, versions=False)
        answer: Answer = self.bed.ask("a", message)
        return answer

    def ask(self, p: Prompt) -> Answer:
        answer = self.probe(p)
        self.memo.learn(p, answer, self.now)
        return answer

    def recall(self, p: Prompt) -> Remembered | None:
        return self.memo.recall(p, (ABI,), ("a",), self.now)


LONG = ((1, 600),)


def test_what_was_asked_is_known_and_so_is_every_prompt_that_ends_inside_it():
    asker = Asker()
    asker.bed.store("b", prompt(*LONG), 0, 500)
    assert asker.recall(prompt(*LONG)) is None
    assert asker.ask(prompt(*LONG)).tokens == 500 * BLOCK
    assert asker.recall(prompt(*LONG)) == Remembered(500 * BLOCK, cold=False)
    for blocks in (1, 255, 256, 257, 499, 500, 501, 600):
        assert asker.recall(prompt((1, blocks))) == Remembered(min(blocks, 500) * BLOCK, cold=False)
    assert asker.recall(prompt((2, 600))) is None


def test_a_prompt_that_goes_on_otherwise_is_known_only_where_what_is_unknown_changes_nothing():
    asker = Asker()
    asker.bed.store("b", prompt(*LONG), 0, 300)
    asker.ask(prompt(*LONG))
    assert asker.recall(prompt((1, 400), (9, 100))) == Remembered(300 * BLOCK, cold=False), "a gap lies before it"
    assert asker.recall(prompt((1, 280), (9, 100))) is None, "its own way on may be there"
    asker.ask(prompt((1, 280), (9, 100)))
    assert asker.recall(prompt((1, 280), (9, 100))) == Remembered(280 * BLOCK, cold=False)
    assert asker.recall(prompt(*LONG)) == Remembered(300 * BLOCK, cold=False), "both ways on are remembered"


def test_a_prefix_that_the_directory_knows_nothing_of_is_cold_whichever_way_it_goes_on():
    asker = Asker()
    assert asker.ask(prompt((3, 10))).tokens == 0
    assert asker.recall(prompt((3, 10))) == Remembered(0, cold=True)
    assert asker.recall(prompt((3, 5), (4, 900))) == Remembered(0, cold=True)
    assert asker.recall(prompt((4, 10))) is None
    asker.bed.store("b", prompt((5, 20)), 10, 20)
    assert asker.ask(prompt((5, 20))).tokens == 0
    assert asker.recall(prompt((5, 20))) == Remembered(0, cold=False), "nothing usable is not nothing there"
    assert asker.recall(prompt((5, 0))) == Remembered(0, cold=True), "a prompt without a position needs no cache"


def test_another_edition_or_life_of_a_shard_outdates_what_was_heard_of_a_segment():
    asker = Asker()
    way, other = prompt((1, 20), (2, 20)), prompt((1, 20), (3, 20))
    asker.bed.store("b", way)
    asker.ask(way)
    asker.ask(other)
    assert asker.recall(way) == Remembered(40 * BLOCK, cold=False)
    asker.bed.drop("b", way, 10, 40)
    asker.ask(other)
    assert asker.recall(other) == Remembered(10 * BLOCK, cold=False)
    assert asker.recall(way) == Remembered(10 * BLOCK, cold=False), "of the old edition nothing is left"
    late = asker.probe(way)
    asker.bed.store("b", way)
    asker.ask(way)
    asker.memo.learn(way, late, asker.now)
    assert asker.recall(way) == Remembered(40 * BLOCK, cold=False), "an answer that was overtaken is no news"
    for name in list(asker.bed.directories):
        asker.bed.take(name, asker.bed.directory(name, ShardMap(1, tuple(asker.bed.directories))).start([]))
    asker.ask(way)
    assert asker.recall(way) == Remembered(0, cold=True), "a shard that was restarted and knows nothing yet"


def test_a_grant_that_differs_from_the_hint_forgets_it():
    asker = Asker()
    way = prompt(*LONG)
    asker.bed.store("b", way)
    asker.ask(way)
    asker.memo.granted(way, (ABI,), ("a",), 600 * BLOCK, asker.now)
    assert asker.recall(way) == Remembered(600 * BLOCK, cold=False)
    asker.memo.granted(way, (ABI,), ("a",), 100 * BLOCK, asker.now)
    assert asker.recall(way) is None


def test_a_store_forgets_that_something_was_missing():
    asker = Asker()
    asker.ask(prompt((3, 10)))
    asker.memo.drop(prompt((3, 30)))
    assert asker.recall(prompt((3, 10))) is None


def test_everything_is_forgotten_in_time_and_within_bounds():
    asker = Asker(ttl_s=2.0, segments_max=8, bytes_max=40_000)
    way = prompt(*LONG)
    asker.bed.store("b", way)
    asker.ask(way)
    asker.now = 1.9
    assert asker.recall(way) is not None
    asker.now = 2.0
    assert asker.recall(way) is None
    for kind in range(50):
        asker.ask(prompt((kind + 10, 300)))
        assert len(asker.memo) <= 8
        assert asker.memo.bytes_used <= 40_000
    assert asker.recall(prompt((59, 300))) == Remembered(0, cold=True)
    asker.memo.forget()
    assert len(asker.memo) == 0


def test_a_hot_anchor_remembers_a_bounded_number_of_ways_on():
    asker = Asker()
    asker.bed.store("b", prompt((1, 20)))
    ways = [prompt((1, 20), (kind, 20)) for kind in range(2, 40)]
    for way in ways:
        asker.ask(way)
    known = [asker.recall(way) for way in ways]
    assert known[-1] == Remembered(20 * BLOCK, cold=False)
    assert known[0] is None


def test_of_segments_whose_shard_is_silent_the_answer_counts_as_it_is():
    asker = Asker()
    way = prompt((1, 20))
    asker.bed.store("a", way, 0, 10)
    asker.bed.directories.clear()
    message = Acquire(asker.bed.request(), way, (ABI,), ("a",), 1.0, None, 0, True, explain=True, versions=False)
    assert asker.bed.ask("a", message) is None
    asker.bed.pass_s(10.0)
    (answer,) = asker.bed.replies[-1:]
    assert answer.told == ()
    asker.memo.learn(way, answer, 0.0)
    assert asker.recall(way) == Remembered(10 * BLOCK, cold=False)
    assert {segment.edition for segment in asker.memo._segments.values()} == {NOT_TOLD}


paths = st.lists(st.tuples(st.integers(1, 2), st.sampled_from((1, 3, 200, 256, 300))), min_size=1, max_size=3)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), paths, st.integers(0, 400), st.integers(1, 700)), max_size=4),
    st.lists(paths, min_size=1, max_size=4),
    st.lists(paths, min_size=1, max_size=6),
)
def test_what_is_recalled_is_what_asking_would_say(stores, asked, wanted):
    asker = Asker()
    for holder, path, first, count in stores:
        p = prompt(*path)
        end = min(first + count, p.n // BLOCK)
        if first < end:
            asker.bed.store(holder, p, first, end)
    for path in asked:
        asker.ask(prompt(*path))
    for path in [*asked, *wanted]:
        known = asker.recall(prompt(*path))
        truth = asker.probe(prompt(*path))
        assert known is not None or path not in asked
        if known is not None:
            assert known.tokens == truth.tokens
            if path in asked:
                assert known.cold == (truth.status is Status.MISS and truth.cause is None)


def test_the_editions_told_are_one_number_a_segment():
    asker = Asker()
    asker.bed.store("b", prompt(*LONG), 0, 300)
    told = asker.probe(prompt(*LONG)).told
    numbers = [int(n) for *_, blob in told for n in np.frombuffer(blob, "<u8")]
    assert len(numbers) == 3
    assert sum(n & 1 for n in numbers) == 2, "of the third segment nothing is known"


# --- a hybrid model, of which objects lie here and there ------------------------------------------

HYBRID = ModelSpec.model_validate(
    {
        "groups": [
            {"name": "csa", "kind": "compressed_history", "block_tokens": 16, "ratio": 4, "block_bytes": 16},
            {"name": "tail", "kind": "uncompressed_tail", "of": "csa", "block_tokens": 4, "block_bytes": 16},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 16, "block_bytes": 16},
        ]
    }
)
ABIS = (ABI, ABI, ABI)
trunks = st.lists(st.tuples(st.integers(1, 2), st.sampled_from((16, 48, 1008, 1040))), min_size=1, max_size=2)
spans = st.lists(
    st.tuples(trunks, st.integers(0, 2), st.integers(0, 80), st.integers(1, 300), st.booleans(), st.integers(0, 1)),
    max_size=8,
)


def hybrid(path: list[tuple[int, int]]) -> Prompt:
    tokens = [kind * 100_000 + i for kind, count in path for i in range(count)]
    keys = PromptKeys(HYBRID, Namespace("m", "v1"), as_tokens([*tokens, 7]))
    units = tuple((unit, keys.keys(unit)) for unit in HYBRID.units_tokens)
    return Prompt(keys.namespace.digest(), weights_digest16("v1"), "", len(tokens) + 1, units)


def wide(p: Prompt, group: int) -> list[bytes]:
    blob = dict(p.keys)[HYBRID.groups[group].unit_tokens]
    return [blob[i : i + 32] for i in range(0, len(blob), 32)]


class Universe:
    """Who has which object: (group, digest) -> (in memory or on a tier, revision), at one holder elsewhere."""

    def __init__(self, stored: list[Any]) -> None:
        self.has: dict[tuple[int, bytes], tuple[bool, int]] = {}
        self.anchors: set[tuple[int, bytes]] = set()
        for path, group, first, count, in_memory, revision in stored:
            digests = wide(hybrid(path), group)
            for i in range(first, min(first + count, len(digests))):
                self.has[group, digests[i]] = (in_memory, revision if group < 2 else 0)
                self.anchors.add((HYBRID.groups[group].unit_tokens, digests[i - i % SEGMENT]))

    def answer(self, p: Prompt) -> Answer:
        columns = []
        for group in range(3):
            memory = tier = 0
            revisions: dict[int, int] = {}
            for i, digest in enumerate(wide(p, group)):
                if (group, digest) in self.has:
                    in_memory, revision = self.has[group, digest]
                    memory |= in_memory << i
                    tier |= (not in_memory) << i
                    revisions[revision] = revisions.get(revision, 0) | 1 << i
            columns.append(Column("b", 1, group, 0, memory, tier, revisions, ((ABI, memory | tier),)))
        told = []
        for unit, blob in p.keys:
            anchors = [blob[at : at + 32] for at in range(0, len(blob), SEGMENT * 32)]
            numbers = [2 + ((unit, anchor) in self.anchors) for anchor in anchors]
            told.append(("directory:0", 1, unit, 0, np.array(numbers, "<u8").tobytes()))
        return Answer("", Status.MISS, 0, 0, 0, None, (), None, None, None, columns=tuple(columns), told=tuple(told))

    def truth(self, p: Prompt) -> Remembered:
        view = View(HYBRID, p, ABIS, ("a",))
        view.learn("b", self.answer(p).columns)
        ready, restored = view.found(tiers=False).tokens, view.found()
        return Remembered(ready, False, restored.tokens if restored.tokens > ready else 0)


def test_what_is_unknown_may_be_there_in_any_revision():
    way, asked = [(1, 48), (2, 48)], [(1, 48), (1, 48)]
    universe, memo = Universe([(way, group, 0, 80, True, 1) for group in range(3)]), SegmentMemo(HYBRID)
    memo.learn(hybrid(asked), universe.answer(hybrid(asked)), 0.0)
    assert memo.recall(hybrid(asked), ABIS, ("a",), 0.0) == Remembered(48, cold=False)
    assert universe.truth(hybrid(way)) == Remembered(96, cold=False)
    assert memo.recall(hybrid(way), ABIS, ("a",), 0.0) is None


@settings(max_examples=60)
@given(spans, st.lists(trunks, min_size=1, max_size=4), st.lists(trunks, max_size=4))
def test_a_hybrid_prompt_is_recalled_as_the_rules_would_answer_it(stored, asked, wanted):
    universe, memo = Universe(stored), SegmentMemo(HYBRID)
    for path in asked:
        memo.learn(hybrid(path), universe.answer(hybrid(path)), 0.0)
    for path in [*asked, *wanted]:
        known = memo.recall(hybrid(path), ABIS, ("a",), 0.0)
        assert known is not None or path not in asked
        if known is not None:
            assert replace(known, cold=False) == universe.truth(hybrid(path))
