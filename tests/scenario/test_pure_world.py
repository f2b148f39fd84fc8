"""The pure world and the runner: clock, faults, and what must never pass for an answer."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
import xxhash

from kvfabric.ops.scenario.ledger import WrongBytes
from kvfabric.ops.scenario.pure import PureWorld, Reply
from kvfabric.ops.scenario.runner import agrees, run_story
from kvfabric.ops.scenario.story import Acquire, How, Node, Step, Store, Story
from kvfabric.ops.scenario.world import Hung
from kvfabric.transport.damage import damage

from .stage import Stage

MODEL: dict[str, Any] = {"groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 16}]}


def stage(**nodes: dict[str, int]) -> Stage:
    return Stage(MODEL, nodes or {"n0": {}, "n1": {}})


def test_a_step_that_waits_for_ever_is_a_hang_not_an_answer() -> None:
    world = stage().world

    async def never() -> None:
        await Reply()

    with pytest.raises(Hung):
        world.run([never()], 100.0)


def test_the_clock_jumps_only_while_every_step_waits() -> None:
    world = stage().world
    started = world.now("n0")
    order: list[tuple[str, float]] = []

    async def sleep(seconds: float) -> None:
        await world.advance(seconds)
        order.append((f"slept {seconds}", world.now("n0") - started))

    async def at_once() -> None:
        order.append(("at once", world.now("n0") - started))

    world.run([sleep(7.5), sleep(3), at_once()], 100.0)
    assert order == [("at once", 0.0), ("slept 3", 3.0), ("slept 7.5", 7.5)]


def test_decimal_seconds_reach_their_deadline() -> None:
    told = stage()
    told.do("store", at="n0", prompt="P", tokens=64)
    told.do("advance", seconds=0.1)
    told.do("acquire", at="n0", prompt="P", tokens=70, name="L", lease_s=0.7)
    for _ in range(6):
        told.do("advance", seconds=0.1)
    assert told.do("read", lease="L") == {"ok": True}
    told.do("advance", seconds=0.1)
    assert told.do("read", lease="L") == {"refused": "lease_expired"}


def test_the_right_to_grant_is_renewed_as_time_goes_by() -> None:
    told = stage()
    told.do("store", at="n0", prompt="P", tokens=64)
    told.do("advance", seconds=1000)
    assert told.do("acquire", at="n1", prompt="P", tokens=70)["status"] == "FULL_HIT"


def leased(told: Stage) -> tuple[Any, list[int]]:
    """The arena and slots of a lease L at n0 on four blocks."""
    told.do("store", at="n0", prompt="P", tokens=64)
    told.do("acquire", at="n0", prompt="P", tokens=70, name="L")
    arena = told.world.arena("n0")
    (part,) = told.verbs.leases["L"].grant.parts
    return arena, np.frombuffer(part.slots[0].slots, dtype="<u4").tolist()


def forge(arena: Any, slot: int, content: bytes) -> None:
    """Put bytes under a header whose checksum fits: only the story knows that they are wrong."""
    arena.payload(slot)[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    arena.table[slot]["checksum"] = np.void(xxhash.xxh3_128_digest(content))


def test_bytes_that_nobody_stored_are_no_answer() -> None:
    told = stage()
    arena, slots = leased(told)
    assert told.do("read", lease="L") == {"ok": True}
    forge(arena, slots[1], bytes(4096))
    with pytest.raises(WrongBytes, match="object 1"):
        told.do("read", lease="L")


def test_bytes_of_another_block_are_no_answer() -> None:
    told = stage()
    arena, slots = leased(told)
    forge(arena, slots[2], arena.content(slots[3]).tobytes())
    with pytest.raises(WrongBytes, match="object 2"):
        told.do("read", lease="L")


def test_a_lease_that_lacks_what_its_position_needs_is_no_answer() -> None:
    from dataclasses import replace

    told = stage()
    told.do("store", at="n0", prompt="P", tokens=64)
    told.do("acquire", at="n0", prompt="P", tokens=40, name="L")
    lease = told.verbs.leases["L"]
    lease.grant = replace(lease.grant, tokens=64)
    with pytest.raises(WrongBytes, match="lacks object 2"):
        told.do("read", lease="L")


class Forger(PureWorld):
    """A fabric that grants on bytes nobody stored."""

    def run(self, work: Any, limit_s: float) -> list[Any]:
        results = super().run(work, limit_s)
        arena = self.arena("n0")
        assert arena is not None
        forge(arena, int(np.flatnonzero(arena.states == 2)[0]), bytes(4096))
        return results


def test_a_wrong_byte_fails_the_story_whatever_it_expects() -> None:
    def step(verb: str, args: Any) -> Step:
        return Step(verb, args, None, (), 1)

    from kvfabric.fabric.model import ModelSpec
    from kvfabric.ops.scenario.story import Read

    steps = (
        step("store", Store(at="n0", prompt="P", tokens=64)),
        step("acquire", Acquire.model_validate({"at": "n0", "prompt": "P", "tokens": 70, "as": "L"})),
        step("read", Read(lease="L")),
        step("read", Read(lease="L")),
    )
    story = Story("f", "s", None, ModelSpec.load(MODEL), {"n0": Node()}, steps)
    assert run_story(story).passed

    class Late(Forger):
        """Forges behind the grant's back only."""

        def run(self, work: Any, limit_s: float) -> list[Any]:
            granted = any(getattr(w, "__name__", "") == "acquire" for w in work)
            return super().run(work, limit_s) if granted else PureWorld.run(self, work, limit_s)

    result = run_story(story, Late)
    assert not result.passed
    assert len(result.steps) == 3
    assert "WrongBytes" in result.steps[2].got["error"]


def test_a_late_writer_never_writes_into_anothers_slots() -> None:
    """Commits after an abort, a commit or a restart bring checksums and touch no memory."""
    told = stage(n0={"kv": 4})
    told.do("begin", name="s1", at="n0", prompt="P", tokens=64)
    told.do("abort", name="s1")
    told.do("quiesce", name="s1")
    told.do("store", at="n0", prompt="Q", tokens=64)
    told.do("acquire", at="n0", prompt="Q", tokens=70, name="L")
    assert told.do("commit", name="s1") == {"refused": "attempt_superseded"}
    assert told.do("read", lease="L") == {"ok": True}
    told.do("release", lease="L")
    told.do("begin", name="s2", at="n0", prompt="R", tokens=64)
    told.do("restart", node="n0")
    told.do("store", at="n0", prompt="Q", tokens=64)
    told.do("acquire", at="n0", prompt="Q", tokens=70, name="L")
    assert told.do("commit", name="s2") == {"refused": "holder_lost"}
    assert told.do("read", lease="L") == {"ok": True}


@pytest.mark.parametrize("how", How)
@pytest.mark.parametrize("data", [b"\x00", b"\x00" * 64, b"\xff" * 64, bytes(range(64))])
def test_damage_keeps_the_length_and_always_changes_something(how: How, data: bytes) -> None:
    damaged = damage(data, how)
    assert len(damaged) == len(data)
    assert damaged != data


def test_agreement_is_exact_in_value_and_type() -> None:
    got = {"tokens": 1, "cause": {"group": "kv", "reason": "evicted"}, "also": ["a"]}
    assert agrees(None, got)
    assert agrees({}, got)
    assert agrees({"tokens": 1, "cause": {"reason": "evicted"}}, got)
    assert not agrees({"tokens": True}, got)
    assert not agrees({"cause": {"reason": "not_stored"}}, got)
    assert not agrees({"cause": None}, got)
    assert agrees({"cause": None}, {"cause": None})
    assert not agrees({"cause": {"reason": "evicted"}}, {"cause": None})
    assert not agrees({"also": []}, got)
    assert agrees({"ok": False}, {"refused": "pinned"})
    assert not agrees({"ok": True}, {"refused": "pinned"})


def test_a_world_runs_its_steps_together_and_ends_what_is_left_after_a_fault() -> None:
    world = stage().world
    closed = []

    async def waits() -> None:
        try:
            await Reply()
        finally:
            closed.append(True)

    async def breaks() -> None:
        raise WrongBytes("no")

    work: list[Coroutine[Any, Any, Any]] = [waits(), breaks()]
    with pytest.raises(WrongBytes):
        world.run(work, 10.0)
    assert closed == [True]


def test_weights_updated_under_way_make_an_acquire_a_miss_and_refuse_a_store() -> None:
    told = stage()
    told.do("store", at="n0", prompt="P", tokens=64)
    answer, stored, _ = told.together(
        ("acquire", {"at": "n1", "prompt": "P", "tokens": 70, "name": "L"}),
        ("store", {"at": "n1", "prompt": "Q", "tokens": 64}),
        ("update_weights", {"to": "v2"}),
    )
    assert (answer["status"], answer["tokens"]) == ("MISS", 0)
    assert stored == {"refused": "weights_mismatch"}
    assert told.do("check", pins=0, slots_lost=0) == {"pins": 0, "slots_lost": 0}
    told.do("store", at="n1", prompt="P", tokens=64)
    assert told.do("acquire", at="n0", prompt="P", tokens=70)["status"] == "FULL_HIT"


def test_a_holder_killed_under_way_leaves_no_step_waiting() -> None:
    told = stage()
    told.do("store", at="n0", prompt="P", tokens=64)
    answer, stored, _ = told.together(
        ("acquire", {"at": "n1", "prompt": "P", "tokens": 70, "name": "L"}),
        ("store", {"at": "n0", "prompt": "Q", "tokens": 64}),
        ("kill", {"node": "n0"}),
    )
    assert answer["tokens"] == 0
    assert stored == {"refused": "holder_lost"}
    assert told.do("check", pins=0, slots_lost=0) == {"pins": 0, "slots_lost": 0}
    own, _ = told.together(
        ("acquire", {"at": "n1", "prompt": "P", "tokens": 70, "name": "L"}),
        ("kill", {"node": "n1"}),
    )
    assert own["tokens"] == 0
    told.do("restart", node="n0")
    told.do("restart", node="n1")
    told.do("store", at="n0", prompt="P", tokens=64)
    assert told.do("acquire", at="n1", prompt="P", tokens=70)["status"] == "FULL_HIT"


def test_concurrent_stores_of_one_content_leave_one_copy() -> None:
    told = stage(n0={"kv": 12})
    store = ("store", {"at": "n0", "prompt": "P", "tokens": 64})
    results = told.together(store, store, store)
    assert {"ok": True} in results
    assert all(r in ({"ok": True}, {"refused": "attempt_superseded"}) for r in results)
    assert told.do("acquire", at="n0", prompt="P", tokens=70, name="L")["status"] == "FULL_HIT"
    assert told.do("read", lease="L") == {"ok": True}
    assert told.do("check", pins=0, slots_lost=0) == {"pins": 4, "slots_lost": 0}
    told.do("store", at="n0", prompt="Q", tokens=128)
    assert told.do("probe", at="n0", prompt="Q", tokens=130)["status"] == "FULL_HIT"
