"""Loads that fail, a holder that dies, other weights, other content, no room: vLLM goes on and its tokens stay right.

Each test shows first, or last, that the same request would have been served: counted by the fabric.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ..actors.stories import eventually
from ..engines_shared.processes import Running
from .conftest import Site, prompt

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.faults]

FABRIC = "hard"
PROMPTS = [prompt(f"hard {i}") for i in range(6)]


@pytest.fixture(scope="module")
def expected(site: Site) -> list[list[int]]:
    told: list[list[int]] = site.alone("llama", PROMPTS)
    assert len({tuple(tokens) for tokens in told}) == len(PROMPTS)
    return told


@pytest.fixture(scope="module")
def first(site: Site, expected: list[list[int]]) -> Iterator[Running]:
    """An engine on node 0 that computed and stored all prompts."""
    site.fabric(FABRIC)
    engine = site.engine("llama", 0, FABRIC)
    assert engine.generate(PROMPTS) == expected
    engine.settle()
    yield engine
    site.end(engine)


@pytest.fixture(scope="module")
def second(site: Site, first: Running) -> Iterator[Running]:
    """An engine on node 1."""
    engine = site.engine("llama", 1, FABRIC)
    yield engine
    site.end(engine)


def reused_by(site: Site, engine: Running, prompts: list[list[int]], expected: list[list[int]]) -> int:
    """Tokens reused from the fabric by an engine that forgot all of its own; its tokens are right."""
    engine.forget()
    before = site.reused_tokens(FABRIC)
    assert engine.generate(prompts) == expected
    engine.settle()
    return site.reused_tokens(FABRIC) - before


def test_with_every_third_load_failing_tokens_stay_right(
    site: Site, second: Running, expected: list[list[int]]
) -> None:
    assert reused_by(site, second, PROMPTS, expected) == 6 * 192
    second.break_loads(3)
    second.forget()
    assert second.generate(PROMPTS) == expected, "what failed was computed"
    second.settle()
    loaded, failed = second.counts()
    assert failed == loaded // 3 >= 6
    second.break_loads(0)
    assert reused_by(site, second, PROMPTS, expected) == 6 * 192


def test_two_engines_at_once_load_and_store_and_both_are_right(
    site: Site, first: Running, second: Running, expected: list[list[int]]
) -> None:
    first.forget()
    second.forget()
    before = site.reused_tokens(FABRIC)
    waiting = [first.begin("generate", PROMPTS), second.begin("generate", PROMPTS[::-1])]
    one, other = (wait() for wait in waiting)
    assert one == expected
    assert other == expected[::-1]
    assert site.reused_tokens(FABRIC) - before == 2 * 6 * 192


def test_other_weights_of_the_same_shape_find_nothing(site: Site, first: Running) -> None:
    expected = site.alone("llama", PROMPTS[:2], seed=1)
    stored, before = site.stored(FABRIC), site.reused_tokens(FABRIC)
    other = site.engine("llama", 1, FABRIC, seed=1)
    assert other.generate(PROMPTS[:2]) == expected
    other.settle()
    assert site.reused_tokens(FABRIC) == before
    assert site.stored(FABRIC) == stored + 12, "its blocks lie beside those of the other weights"
    assert reused_by(site, other, PROMPTS[:2], expected) == 2 * 192, "and it finds those"
    site.end(other)


def test_another_cache_salt_finds_nothing(site: Site, second: Running, expected: list[list[int]]) -> None:
    second.forget()
    before = site.reused_tokens(FABRIC)
    assert second.generate(PROMPTS[:1], 16, "another tenant") == expected[:1]
    second.settle()
    assert site.reused_tokens(FABRIC) == before
    second.forget()
    assert second.generate(PROMPTS[:1], 16, "another tenant") == expected[:1]
    assert eventually(lambda: site.reused_tokens(FABRIC) - before) == 192


def test_preempted_requests_come_back_with_the_right_tokens(site: Site, first: Running) -> None:
    many = [prompt(f"crowd {i}", 100) for i in range(8)]
    expected = site.alone("llama", many, tokens=100)
    crowded = site.engine("llama", 1, FABRIC, num_gpu_blocks_override=26, max_model_len=256)
    crowded.count_preemptions()
    before = site.reused_tokens(FABRIC)
    assert crowded.generate(many, 100) == expected
    assert crowded.preemptions() > 0
    crowded.settle()
    crowded.forget()
    assert crowded.generate(many, 100) == expected
    assert site.reused_tokens(FABRIC) - before >= 8 * 96
    site.end(crowded)


def test_a_holder_killed_in_mid_run_costs_time_only(site: Site, second: Running, expected: list[list[int]]) -> None:
    assert reused_by(site, second, PROMPTS, expected) == 6 * 192
    holders = site.fabric(FABRIC).status()["holders"]
    second.forget()
    wait = second.begin("generate", PROMPTS * 4)
    for holder in holders:
        os.kill(holder["pid"], signal.SIGKILL)
    assert wait() == expected * 4
    dead = {holder["pid"] for holder in holders}

    def lives() -> list[int]:
        return [h["pid"] for h in site.fabric(FABRIC).status()["holders"] if h.get("grants")]

    eventually(lives, lambda pids: len(pids) == 2 and dead.isdisjoint(pids), within_s=60)
    second.forget()
    assert second.generate(PROMPTS) == expected
    second.settle()
    assert reused_by(site, second, PROMPTS, expected) == 6 * 192, "its successor serves what was stored since"
