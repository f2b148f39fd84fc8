"""The compact index says what plain dicts say, stays compact, and forgets within its bounds."""

from __future__ import annotations

import hashlib
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfabric.fabric.bands import GONE, IN_MEMORY, ON_TIER
from kvfabric.fabric.found import Hints
from kvfabric.fabric.index import ChainIndex, IndexLimits
from kvfabric.fabric.kinds import INDEX_DIGEST_BYTES as KEY
from kvfabric.fabric.kinds import Reason
from kvfabric.fabric.messages import EventRun, Found, Lane, Strip
from kvfabric.fabric.passport import Abi
from kvfabric.fabric.segments import SEGMENT_OBJECTS

from .plain_index import PlainIndex

UNITS = {0: 16, 1: 16, 2: 64}
ABIS = (Abi(b"a" * 8, 1), Abi(b"b" * 8, 4))
POINTS = (0, 1, 2, 31, 32, 100, 255, 256, 257, 300, 511, 512, 520)


def grow(before: list[bytes], name: str, count: int) -> list[bytes]:
    """A chain that goes on from another one's objects, as digests."""
    out = list(before)
    while len(out) < count:
        seed = (out[-1] if out else b"") + name.encode()
        out.append(hashlib.blake2b(seed, digest_size=KEY).digest())
    return out


def events(
    chain: list[bytes], first: int, end: int, lane: Lane, *, unit: int = 16, evicted: bool = False, version: int = 1
) -> list[EventRun]:
    """Objects of a chain as events, cut at segments; versions count up from ``version``."""
    runs = []
    while first < end:
        start = first - first % SEGMENT_OBJECTS
        stop = min(end, start + SEGMENT_OBJECTS)
        versions = (
            b"" if lane.state == GONE else b"".join((version + i).to_bytes(8, "little") for i in range(first, stop))
        )
        parent = b"" if first == start else chain[first - 1]
        runs.append(EventRun(lane, unit, chain[start], parent, first, b"".join(chain[first:stop]), versions, evicted))
        first = stop
    return runs


def expand(index: ChainIndex, strips: list[Strip]) -> tuple[dict[Any, Any], dict[int, set[int]]]:
    """A lookup as plain dicts: (holder, group, shard) -> index -> (lane, version), and what is evicted."""
    stripes, gone = index.lookup(strips)
    hints = Hints()
    hints.learn(Found("", 1, 0, stripes, gone))
    found: dict[Any, Any] = {}
    for key, parts in hints.stripes.items():
        for stripe, row in parts:
            indices = [i for i in range(stripe.bits.bit_length()) if stripe.bits >> i & 1]
            told = hints.versions(key, indices)
            for place, i in enumerate(indices):
                assert i not in found.get(key, {}), "one object stands in two lanes of a holder"
                found.setdefault(key, {})[i] = (
                    stripe.lanes[row],
                    int.from_bytes(told[place * 8 : place * 8 + 8], "little"),
                )
    return found, {group: {i for i in range(bits.bit_length()) if bits >> i & 1} for group, bits in gone}


def strip(chain: list[bytes], unit: int = 16) -> Strip:
    return Strip(unit, 0, b"".join(chain))


lanes = st.builds(
    Lane,
    group=st.sampled_from(sorted(UNITS)),
    shard=st.integers(0, 1),
    state=st.sampled_from((IN_MEMORY, IN_MEMORY, ON_TIER)),
    revision=st.sampled_from((0, 0, 7)),
    abi=st.sampled_from(ABIS),
    bad=st.sampled_from((None, None, None, Reason.CHECKSUM_MISMATCH)),
    bad_from_tier=st.just(False),
)


class IndexAgainstPlain(RuleBasedStateMachine):
    """Chains that branch at every kind of place; holders store, lose, evict, die and come back."""

    @initialize()
    def begin(self) -> None:
        self.index = ChainIndex(IndexLimits(sweep_segments=2))
        self.plain = PlainIndex()
        self.chains = {unit: [grow([], f"root{unit}", 530)] for unit in set(UNITS.values())}
        self.lives: dict[str, int] = {}
        self.told: list[tuple[list[bytes], int, int, Lane]] = []
        self.said: dict[tuple[int, bytes], tuple[int, Any]] = {}
        for holder in ("a", "b", "c"):
            self.start(holder)

    def start(self, holder: str) -> None:
        life = self.index.begin_life()
        self.index.show(life, holder, life)
        self.lives[holder] = life

    @rule(data=st.data(), unit=st.sampled_from((16, 64)), length=st.sampled_from(POINTS[1:]))
    def branch(self, data, unit, length) -> None:
        chains = self.chains[unit]
        if len(chains) < 12:
            base = data.draw(st.sampled_from(chains))
            at = data.draw(st.sampled_from([p for p in POINTS if p < len(base)]))
            chains.append(grow(base[:at], f"{unit}/{len(chains)}", at + length))

    def spans(self, data, unit: int, parts: int) -> list[tuple[list[bytes], int, int]]:
        """Parts of chains: anywhere, between the places where something may happen."""
        spans = []
        for _ in range(data.draw(st.integers(1, parts))):
            chain = data.draw(st.sampled_from(self.chains[unit]))
            points = [p for p in POINTS if p <= len(chain)] + [len(chain)]
            first, end = sorted(data.draw(st.tuples(st.sampled_from(points), st.sampled_from(points))))
            spans.append((chain, first, end))
        return spans

    @rule(data=st.data(), lane=lanes, holder=st.sampled_from("abc"), version=st.integers(1, 1 << 40))
    def store(self, data, lane, holder, version) -> None:
        spans = self.spans(data, UNITS[lane.group], 3)
        self.told += [(*span, lane) for span in spans]
        self.tell(holder, spans, lane, version)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), holder=st.sampled_from("abc"), version=st.integers(1, 1 << 40))
    def copy(self, data, holder, version) -> None:
        chain, first, end, lane = data.draw(st.sampled_from(self.told))
        self.tell(holder, [(chain, first, end)], lane, version)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), holder=st.sampled_from("abc"), evicted=st.booleans(), half=st.booleans())
    def remove(self, data, holder, evicted, half) -> None:
        chain, first, end, lane = data.draw(st.sampled_from(self.told))
        gone = Lane(lane.group, lane.shard, GONE, 0, Abi(b"", 1))
        self.tell(holder, [(chain, first, (first + end) // 2 if half else end)], gone, 0, evicted=evicted)

    @rule(data=st.data(), group=st.sampled_from(sorted(UNITS)), shard=st.integers(0, 1), holder=st.sampled_from("abc"))
    def remove_anything(self, data, group, shard, holder) -> None:
        self.tell(holder, self.spans(data, UNITS[group], 2), Lane(group, shard, GONE, 0, Abi(b"", 1)), 0, evicted=True)

    def tell(self, holder, spans, lane, version, *, evicted=False) -> None:
        unit = UNITS[lane.group]
        batch = []
        for chain, first, end in spans:
            batch += events(chain, first, end, lane, unit=unit, evicted=evicted, version=version)
        if holder not in self.lives:
            self.start(holder)
        self.plain.apply(holder, [_told(run) for run in batch])
        self.index.apply(self.lives[holder], batch)

    @rule(holder=st.sampled_from("abc"))
    def die(self, holder) -> None:
        if holder in self.lives:
            self.plain.end_life(holder)
            self.index.end_life(self.lives.pop(holder))

    @rule(holder=st.sampled_from("abc"))
    def restart(self, holder) -> None:
        self.die(holder)
        self.start(holder)

    @rule()
    def sweep(self) -> None:
        self.index.sweep()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        for unit, chains in self.chains.items():
            for chain in chains:
                groups = {g: chain for g, u in UNITS.items() if u == unit}
                found, gone = expand(self.index, [strip(chain, unit)])
                assert found == self.plain.lookup(groups, 2)
                assert gone == self.plain.gone(groups)
                self.editions(unit, chain, found, gone)
        assert self.index.evicted_objects == len(self.plain.evicted)
        assert self.index.bytes_used == recount(self.index)
        for table in self.index.tables.values():
            for segment in table.values():
                assert len(segment.tails or ()) <= len(segment.others or ())

    def editions(self, unit: int, chain: list[bytes], found: dict[Any, Any], gone: dict[int, set[int]]) -> None:
        """Of a segment in the same edition nothing else is said."""
        ((_, _, blob),) = self.index.editions([strip(chain, unit)])
        for place, start in enumerate(range(0, len(chain), SEGMENT_OBJECTS)):
            number = int.from_bytes(blob[place * 8 : place * 8 + 8], "little")
            part = range(start, min(start + SEGMENT_OBJECTS, len(chain)))
            there = {key: {i: told[i] for i in part if i in told} for key, told in found.items()}
            left = {group: bits & set(part) for group, bits in gone.items()}
            says = (
                {key: value for key, value in there.items() if value},
                {g: bits for g, bits in left.items() if bits},
            )
            before = self.said.get((unit, chain[part[-1]]))
            if before is not None:
                assert number >= before[0]
                assert number != before[0] or says == before[1]
            self.said[unit, chain[part[-1]]] = (number, says)
            assert number & 1 or says == ({}, {})

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        for life in self.lives.values():
            self.index.end_life(life)
        while self.index.sweep():
            pass
        assert not any(table and not self.plain.evicted for table in self.index.tables.values())


def _told(run: EventRun) -> EventRun:
    """Versions of what is not in memory are not kept."""
    if run.lane.state == IN_MEMORY:
        return run
    return EventRun(run.lane, run.unit, run.anchor, run.parent, run.first, run.digests, b"", run.evicted)


def recount(index: ChainIndex) -> int:
    """The bytes an index accounts for, counted anew."""
    from kvfabric.fabric.chains import SEGMENT_BYTES

    segments = [segment for table in index.tables.values() for segment in table.values()]
    assert not any(segment.empty for segment in segments)
    return sum(SEGMENT_BYTES + sum(run.cost_bytes for run in segment.runs()) for segment in segments)


TestIndexAgainstPlain = IndexAgainstPlain.TestCase
TestIndexAgainstPlain.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


KV = Lane(0, 0, IN_MEMORY, 0, ABIS[0])
KV_GONE = Lane(0, 0, GONE, 0, Abi(b"", 1))


def one_holder(limits: IndexLimits | None = None) -> tuple[ChainIndex, int]:
    index = ChainIndex(limits or IndexLimits())
    life = index.begin_life()
    index.show(life, "a", 1)
    return index, life


def held(index: ChainIndex, chain: list[bytes]) -> set[int]:
    return set(expand(index, [strip(chain)])[0].get(("a", 0, 0), {}))


def test_a_branch_is_found_after_what_it_left_is_gone_or_cut_short():
    for gone_from in (0, 40):
        index, life = one_holder()
        stem, branch = grow([], "stem", 120), None
        branch = grow(stem[:60], "branch", 100)
        index.apply(life, events(stem, 0, 120, KV))
        index.apply(life, events(branch, 60, 100, KV))
        assert held(index, branch) == set(range(100))
        index.apply(life, events(stem, gone_from, 120, KV_GONE))
        assert held(index, branch) == {*range(gone_from), *range(60, 100)}
        index.apply(life, events(stem, 0, 60, KV))
        assert held(index, branch) == set(range(100))


def test_a_thousand_continuations_share_their_prompt_and_leave_nothing_behind():
    index, life = one_holder()
    stem = grow([], "system", 200)
    index.apply(life, events(stem, 0, 200, KV))
    alone = index.bytes_used
    branches = [grow(stem, f"user{i}", 240) for i in range(1000)]
    for branch in branches:
        index.apply(life, events(branch, 200, 210, KV))
        index.apply(life, events(branch, 210, 240, KV))
    assert index.runs == 1000
    assert (index.bytes_used - alone) / (1000 * 40) < 16 + 12
    assert held(index, branches[500]) == set(range(240))
    for branch in branches:
        index.apply(life, events(branch, 200, 240, KV_GONE))
    assert index.bytes_used == alone
    (segment,) = index.tables[16].values()
    assert not segment.others
    assert not segment.tails
    assert not segment.floats


def test_a_window_that_slides_leaves_no_digests_behind():
    index, life = one_holder()
    chain = grow([], "chat", 2000)
    most = 0
    for end in range(10, 2000, 10):
        index.apply(life, events(chain, end - 10, end, KV))
        index.apply(life, events(chain, max(0, end - 50), max(0, end - 40), KV_GONE))
        most = max(most, index.bytes_used)
        assert held(index, chain) == set(range(max(0, end - 40), end))
    assert most < 2 * (40 * 16 + 256 + 208 + 112 + 400)


def test_over_its_bytes_the_index_forgets_what_nobody_asked_for():
    index, life = one_holder(IndexLimits(bytes_max=200_000))
    asked = grow([], "asked", 256)
    index.apply(life, events(asked, 0, 256, KV))
    for number in range(200):
        held(index, asked)
        index.apply(life, events(grow([], f"cold{number}", 256), 0, 256, KV))
        assert index.bytes_used <= 200_000
    assert index.forgotten_segments > 100
    assert held(index, asked) == set(range(256))
    assert held(index, grow([], "cold0", 256)) == set()
    assert index.bytes_used == recount(index)


def test_no_more_copies_of_a_run_are_told_apart_than_the_bound_and_an_answer_names_the_fullest():
    index = ChainIndex(IndexLimits(copies_max=5, holders_max=2))
    chain = grow([], "hot", 100)
    for number in range(1, 9):
        life = index.begin_life()
        index.show(life, f"h{number}", 1)
        index.apply(life, events(chain, 0, 10 * number, KV))
    found, _ = expand(index, [strip(chain)])
    assert {holder for holder, _, _ in found} == {"h4", "h5"}
    assert index.bytes_used == recount(index)


def test_an_eviction_is_forgotten_beyond_the_bound_oldest_first():
    index, life = one_holder(IndexLimits(evicted_max=100))
    chains = [grow([], f"e{i}", 40) for i in range(5)]
    for chain in chains:
        index.apply(life, events(chain, 0, 40, KV))
        index.apply(life, events(chain, 0, 40, KV_GONE, evicted=True))
    gone = [expand(index, [strip(chain)])[1].get(0, set()) for chain in chains]
    assert gone == [set(), set(), set(), set(range(40)), set(range(40))]
    assert index.bytes_used == recount(index)


def edition(index: ChainIndex, chain: list[bytes]) -> int:
    ((_, _, blob),) = index.editions([strip(chain)])
    return int.from_bytes(blob, "little")


def test_an_edition_grows_when_a_life_is_shown_or_ends_and_when_its_segment_comes_leaves_or_is_forgotten():
    index = ChainIndex(IndexLimits(bytes_max=200_000))
    life = index.begin_life()
    chain, elsewhere = grow([], "followed", 100), grow([], "elsewhere", 100)
    told = [edition(index, chain)]

    def then(change: Any, *args: Any) -> None:
        change(*args)
        told.append(edition(index, chain))

    then(index.apply, life, events(chain, 0, 100, KV))
    then(index.show, life, "a", 1)
    then(index.apply, life, events(chain, 50, 100, KV_GONE))
    then(index.apply, life, events(chain, 0, 50, KV_GONE))
    assert held(index, chain) == set()
    then(index.apply, life, events(chain, 0, 100, KV))
    before = edition(index, chain)
    index.apply(life, events(elsewhere, 0, 100, KV))
    assert edition(index, chain) == before, "what happens to another segment changes nothing"
    index._forget(index.tables[16], chain[0], index.tables[16][chain[0]])
    assert held(index, chain) == set()
    told.append(edition(index, chain))
    then(index.end_life, life)
    assert told == sorted(set(told))


def test_what_leaves_over_two_runs_or_behind_what_left_before_is_gone_where_many_runs_share_a_segment():
    stem = grow([], "stem", 20)
    middle = grow(stem, "middle", 30)
    leaf = grow(middle[:25], "leaf", 40)
    others = [grow(stem[:10], f"other{i}", 14) for i in range(20)]
    for pieces in (((22, 40),), ((35, 40), (30, 35), (22, 30), (20, 22))):
        index, life = one_holder()
        for chain in (grow(stem, "root", 28), *others, middle, leaf):
            index.apply(life, events(chain, 0, len(chain), KV))
        left: set[int] = set()
        for first, end in pieces:
            index.apply(life, events(leaf, first, end, KV_GONE, evicted=True))
            left |= set(range(first, end))
            assert held(index, leaf) == set(range(40)) - left
            assert expand(index, [strip(leaf)])[1] == {0: left}
        assert all(held(index, other) == set(range(14)) for other in others)
