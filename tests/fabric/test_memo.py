"""What a session remembers of prompts, for how long, and what makes it forget."""

from __future__ import annotations

import hashlib

from kvfabric.fabric.memo import ProbeMemo, Remembered

GRID = 4


def keys(name: str, n: int) -> bytes:
    """Chained digests of a prompt, one a grid step; ``a-b`` shares two steps with ``a``."""
    out, before = b"", b""
    for step in range(n // GRID):
        word = name.split("-", maxsplit=1)[0] if step < 2 else name
        before = hashlib.sha256(before + word.encode()).digest()
        out += before
    return out


def test_a_prompt_that_is_the_same_up_to_its_last_position_has_the_same_answer():
    memo = ProbeMemo(GRID)
    memo.learn(keys("a", 41), 41, 12, 0.0, cold=False)
    assert memo.recall(keys("a", 43), 43, 1.0) == Remembered(12, cold=False)
    assert memo.recall(keys("a", 45), 45, 1.0) is None, "it may be resumed from one step later"
    assert memo.recall(keys("b", 41), 41, 1.0) is None


def test_a_prompt_that_ends_behind_a_resumable_position_has_a_full_hit():
    memo = ProbeMemo(GRID)
    memo.learn(keys("a", 41), 41, 12, 0.0, cold=False)
    assert memo.recall(keys("a", 13), 13, 1.0) == Remembered(12, cold=False)
    assert memo.recall(keys("a", 12), 12, 1.0) is None, "at least one token is computed"


def test_what_begins_as_a_cold_prompt_did_is_taken_for_cold():
    memo = ProbeMemo(GRID)
    memo.learn(keys("a", 41), 41, 0, 0.0, cold=True)
    assert memo.recall(keys("a-b", 81), 81, 1.0) == Remembered(0, cold=True)
    memo.learn(keys("c", 41), 41, 0, 0.0, cold=False)
    assert memo.recall(keys("c-b", 81), 81, 1.0) is None, "nothing usable is not nothing there"
    assert memo.recall(keys("a", 3), 3, 9.0) == Remembered(0, cold=True), "a prompt without a position needs no cache"


def test_everything_is_forgotten_in_time_and_within_bounds():
    memo = ProbeMemo(GRID, ttl_s=2.0, entries_max=10)
    memo.learn(keys("a", 41), 41, 12, 0.0, cold=False)
    assert memo.recall(keys("a", 41), 41, 1.9) is not None
    assert memo.recall(keys("a", 41), 41, 2.0) is None
    for number in range(100):
        memo.learn(keys(f"p{number}", 41), 41, 12, 0.0, cold=number % 2 == 0)
    assert len(memo) <= 30


def test_a_store_clears_what_was_missing_and_a_shorter_grant_corrects_what_was_hoped():
    memo = ProbeMemo(GRID)
    memo.learn(keys("a", 41), 41, 0, 0.0, cold=True)
    memo.wrote(keys("a", 41), 41)
    assert memo.recall(keys("a", 41), 41, 0.5) is None
    assert memo.recall(keys("a-b", 81), 81, 0.5) is None
    memo.learn(keys("a", 41), 41, 40, 0.0, cold=False)
    memo.learn(keys("a", 41), 41, 20, 0.5, cold=False)
    assert memo.recall(keys("a", 41), 41, 1.0) == Remembered(20, cold=False)
