"""Laws of the links that ship for simulations and tests: the loopback, and the faulty one around it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvfabric.fabric.arena import Arena, ArenaLayout, PoolLayout, heap_arena
from kvfabric.transport.digest import checksum
from kvfabric.transport.faulty_link import Faults, FaultyLink
from kvfabric.transport.link import LinkError, LinkFailure, LinkKind, Pair, PairResult, Region, preferred
from kvfabric.transport.loopback_link import LoopbackLink, LoopbackNetwork

LAYOUT = ArenaLayout([PoolLayout(0, 0, 32, 1000)])
PAIRS = [Pair(slot, 31 - slot, 1000 - slot) for slot in range(32)]


class World:
    """Holders ``a`` (the source, filled) and ``b`` (the reader, behind a faulty link) in one process."""

    def __init__(self, seed: int = 0, **faults: float) -> None:
        self.network = LoopbackNetwork()
        self.source, self.target = heap_arena(LAYOUT, 1), heap_arena(LAYOUT, 2)
        rng = np.random.default_rng(seed)
        for slot in range(LAYOUT.slots):
            self.source.begin_write(slot)
            self.source.payload(slot)[:] = rng.integers(0, 256, 1000, dtype=np.uint8)
            self.source.seal(slot, 1000 - slot, checksum(self.source.content(slot)), b"o" * 16, 0)
        self.region = LoopbackLink(self.network, self.source, holder="a", incarnation=1).region()
        self.slept: list[float] = []
        self.link = FaultyLink(
            LoopbackLink(self.network, self.target, holder="b", incarnation=2),
            self.target,
            Faults(**faults),
            random.Random(seed),
            sleep=self.slept.append,
        )

    def fetch(self, deadline_s: float = 1.0) -> list[PairResult]:
        return self.link.fetch(self.region, PAIRS, deadline_s)

    def arrived(self, pair: Pair) -> bool:
        got = self.target.payload(pair.dst_slot)[: pair.length_bytes]
        return bool((got == self.source.payload(pair.src_slot)[: pair.length_bytes]).all())

    def true_checksum(self, pair: Pair) -> bytes:
        return checksum(self.source.payload(pair.src_slot)[: pair.length_bytes])


def test_without_faults_everything_arrives() -> None:
    world = World()
    results = world.fetch()
    assert [result.checksum for result in results] == [world.true_checksum(pair) for pair in PAIRS]
    assert all(world.arrived(pair) for pair in PAIRS)
    headers = world.link.headers(world.region, [5, 3], 1)
    assert isinstance(headers, np.ndarray)
    assert headers["length"].tolist() == [995, 997]
    assert headers["version"].tolist() == [1, 1]


def test_lost_pairs_write_nothing_and_say_so() -> None:
    world = World(loss=0.5)
    results = world.fetch()
    lost = [result.failure is LinkFailure.PEER_LOST for result in results]
    assert 4 < sum(lost) == world.link.counters.lost < 28
    assert [world.arrived(pair) for pair in PAIRS] == [not gone for gone in lost]
    assert all(result.token is None for result in results)


def test_torn_pairs_bear_the_checksum_of_the_wrong_bytes() -> None:
    world = World(tear=0.5)
    results = world.fetch()
    wrong = [result.checksum != world.true_checksum(pair) for result, pair in zip(results, PAIRS, strict=True)]
    assert sum(wrong) == world.link.counters.torn > 4
    assert wrong == [not world.arrived(pair) for pair in PAIRS]
    for result, pair in zip(results, PAIRS, strict=True):
        assert result.checksum == checksum(world.target.payload(pair.dst_slot)[: pair.length_bytes])


def test_early_pairs_are_incomplete_when_reported_and_complete_at_the_next_call() -> None:
    world = World(early=0.5)
    results = world.fetch()
    early = [not world.arrived(pair) for pair in PAIRS]
    assert sum(early) == world.link.counters.early > 4
    assert early == [r.checksum != world.true_checksum(p) for r, p in zip(results, PAIRS, strict=True)]
    world.link.headers(world.region, [0], 1)
    assert all(world.arrived(pair) for pair in PAIRS)


def test_a_delay_within_the_deadline_only_takes_time() -> None:
    world = World(delay=1.0, delay_s=0.25)
    assert all(result.failure is None for result in world.fetch())
    assert world.slept == [0.25]


def test_a_delay_beyond_the_deadline_writes_later_while_its_token_is_not_quiet() -> None:
    world = World(delay=1.0, delay_s=5.0)
    results = world.fetch(deadline_s=0.5)
    assert world.slept == [0.5]
    assert {result.failure for result in results} == {LinkFailure.TIMED_OUT}
    assert not any(world.arrived(pair) for pair in PAIRS)
    asked = 0
    for result, pair in zip(results, PAIRS, strict=True):
        assert result.token is not None
        while not world.link.quiet(result.token):
            assert not world.arrived(pair)
            asked += 1
        assert world.arrived(pair)
        assert world.link.quiet(result.token)
    assert asked > 8


def test_behind_a_partition_nothing_is_quiet_until_it_heals() -> None:
    world = World()
    world.link.partition("a")
    results = world.fetch(deadline_s=0.5)
    connected = world.link.connect(world.region, 0.5)
    assert connected == LinkError(LinkFailure.TIMED_OUT, "a: partitioned")
    assert world.slept == [0.5, 0.5]
    tokens = [result.token for result in results if result.token is not None]
    assert len(tokens) == len(PAIRS)
    assert not any(world.link.quiet(token) for token in tokens for _ in range(5))
    world.link.heal("a")
    for token in tokens:
        while not world.link.quiet(token):
            pass
    assert all(world.arrived(pair) for pair in PAIRS)
    assert all(result.failure is None for result in world.fetch())


def test_a_fence_keeps_late_bytes_out() -> None:
    world = World()
    world.link.partition("a")
    tokens = [result.token for result in world.fetch() if result.token is not None]
    world.link.fence()
    world.link.heal("a")
    assert all(world.link.quiet(token) for token in tokens)
    assert not any(world.arrived(pair) for pair in PAIRS)


def trace(seed: int) -> list[Any]:
    world = World(seed, loss=0.2, delay=0.3, delay_s=2.0, tear=0.2, early=0.2)
    story: list[Any] = []
    for _ in range(20):
        results = world.fetch()
        story.append([(result.outcome, result.token) for result in results])
        story.append([world.link.quiet(result.token) for result in results if result.token is not None])
    return [*story, world.link.counters, checksum(world.target.bytes)]


def test_equal_seeds_make_equal_faults_and_others_differ() -> None:
    assert trace(11) == trace(11)
    assert trace(11) != trace(12)


def test_a_holder_that_ended_is_lost_and_a_closed_link_unavailable() -> None:
    world = World()
    world.network.remove("a", 1)
    assert {result.failure for result in world.fetch()} == {LinkFailure.PEER_LOST}
    world.network.add("a", 2, world.source)
    assert {result.failure for result in world.fetch()} == {LinkFailure.PEER_LOST}  # another life
    world.link.close()
    assert {result.failure for result in world.fetch()} == {LinkFailure.UNAVAILABLE}


@pytest.mark.parametrize("pair", [Pair(0, 0, 1001), Pair(32, 0, 1), Pair(0, 32, 1), Pair(-1, 0, 1), Pair(0, 0, -1)])
def test_a_pair_that_fits_no_slot_is_refused(pair: Pair) -> None:
    world = World()
    assert world.link.fetch(world.region, [pair], 1)[0].failure is LinkFailure.TOO_LONG


class Stub:
    """Stands for a link where only its kind matters."""

    def __init__(self, kind: LinkKind) -> None:
        self.kind = kind


def test_the_best_way_both_sides_have_is_preferred_and_memory_is_shared_on_one_host_only() -> None:
    arena = heap_arena(LAYOUT, 1)
    loop = LoopbackLink(LoopbackNetwork(), arena, holder="x", incarnation=1).region()

    def region(kind: LinkKind, host: str = loop.host) -> Region:
        return Region("x", 1, kind, host, LAYOUT, {})

    def kinds(*offers: Region) -> list[LinkKind]:
        links = {kind: Stub(kind) for kind in (LinkKind.TCP, LinkKind.NIXL, LinkKind.SHARED_MEMORY)}
        return [link.kind for link, _ in preferred(links, offers)]  # type: ignore[arg-type]

    here = [region(LinkKind.TCP), region(LinkKind.SHARED_MEMORY), region(LinkKind.NIXL)]
    there = [region(kind, "elsewhere") for kind in (LinkKind.TCP, LinkKind.SHARED_MEMORY, LinkKind.NIXL)]
    assert kinds(*here) == [LinkKind.SHARED_MEMORY, LinkKind.NIXL, LinkKind.TCP]
    assert kinds(*there) == [LinkKind.NIXL, LinkKind.TCP]
    assert kinds(region(LinkKind.TCP), loop) == [LinkKind.TCP]
    assert kinds() == []


def test_a_region_survives_the_wire_and_nothing_else_is_taken_for_one() -> None:
    from kvfabric.fabric.kinds import WireError

    region = Region("x", 7, LinkKind.TCP, "host", LAYOUT, {"host": "h", "port": 1})
    again = Region.from_plain(region.to_plain())
    assert (again, again.address, again.layout.to_plain()) == (region, region.address, LAYOUT.to_plain())
    for damage in ({"kind": "pigeon"}, {"address": 3}, {"layout": [[1]]}, {"incarnation": "x"}):
        with pytest.raises(WireError):
            Region.from_plain({**region.to_plain(), **damage})
    with pytest.raises(WireError):
        Region.from_plain(b"junk")


def test_every_link_reads_an_arena_of_its_own_layout() -> None:
    small = ArenaLayout([PoolLayout(0, 0, 2, 10)])
    network = LoopbackNetwork()
    source, target = heap_arena(LAYOUT, 1), heap_arena(small, 2)
    region = LoopbackLink(network, source, holder="a", incarnation=1).region()
    link = LoopbackLink(network, target, holder="b", incarnation=2)
    results = link.fetch(region, [Pair(0, 1, 10), Pair(0, 1, 11)], 1)
    assert [result.failure for result in results] == [None, LinkFailure.TOO_LONG]
    assert isinstance(target, Arena)
