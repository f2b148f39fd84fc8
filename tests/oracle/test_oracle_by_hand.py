"""The oracle itself, on worlds small enough to judge by reading the scenario format."""

from __future__ import annotations

from collections.abc import Iterable

from .oracle import HISTORY, INDEXER, TAIL, WINDOW, Answer, Copy, Group, Oracle, World

PROMPT = tuple(range(520))


def stored(*parts: tuple[str, Iterable[int], int], shards: Iterable[int] = (0,)) -> World:
    """A world with usable objects: group, ends, revision."""
    copies = {
        (PROMPT[:end], name, s): {Copy(revision)} for name, ends, revision in parts for end in ends for s in shards
    }
    return World(copies)


def ends(unit: int, first: int, last: int) -> range:
    """Ends of the blocks that lie wholly in [first, last)."""
    return range(first + unit, last + 1, unit)


def ask(groups: Iterable[Group], world: World, n: int, *, shards: int = 1, drop_last: int = 0) -> Answer:
    return Oracle(groups, world, PROMPT[:n], shards=shards, drop_last=drop_last).answer()


def said(answer: Answer) -> tuple[str, str]:
    assert answer.cut is not None
    return answer.cut.group, answer.cut.reason


def test_history_that_ends_before_the_only_snapshot_is_the_cut_and_so_is_the_mirror_case() -> None:
    groups = (Group("full", HISTORY, 16), Group("ssm", HISTORY, 32, state=True))
    answer = ask(groups, stored(("full", ends(16, 0, 96), 0), ("ssm", [160], 0)), 200)
    assert (answer.tokens, answer.hash_tokens, answer.status) == (0, 160, "PARTIAL_HIT")
    assert said(answer) == ("full", "not_stored")
    answer = ask(groups, stored(("full", ends(16, 0, 160), 0), ("ssm", [96], 0)), 200)
    assert (answer.tokens, answer.hash_tokens) == (96, 160)
    assert said(answer) == ("ssm", "snapshot_absent")


def test_an_indexer_that_ends_early_or_bears_another_revision_is_the_cut() -> None:
    groups = (Group("kv", HISTORY, 64), Group("idx", INDEXER, 64, of="kv"))
    answer = ask(groups, stored(("kv", ends(64, 0, 512), 0), ("idx", ends(64, 0, 320), 0)), 520)
    assert (answer.tokens, answer.hash_tokens) == (320, 512)
    assert said(answer) == ("idx", "index_absent")
    for kv, idx in ((0, 1), (1, 0)):
        answer = ask(groups, stored(("kv", ends(64, 0, 512), kv), ("idx", ends(64, 0, 512), idx)), 520)
        assert answer.tokens == 0
        assert said(answer) == ("idx", "index_stale")


def test_the_larger_position_decides_between_revisions_and_the_higher_revision_between_equals() -> None:
    groups = (Group("kv", HISTORY, 64),)
    longer = {(PROMPT[:end], "kv", 0): {Copy(0)} | ({Copy(1)} if end <= 256 else set()) for end in ends(64, 0, 512)}
    oracle = Oracle(groups, World(longer), PROMPT)
    assert oracle.hit() == 512
    assert oracle.chosen(groups[0], 512) == 0
    assert oracle.chosen(groups[0], 256) == 1


def test_seven_of_eight_shards_are_an_incomplete_block() -> None:
    world = stored(("kv", [16], 0), shards=range(8))
    world.copies |= stored(("kv", [32], 0), shards=[0, 1, 2, 4, 5, 6, 7]).copies
    answer = ask((Group("kv", HISTORY, 16),), world, 40, shards=8)
    assert (answer.tokens, answer.hash_tokens) == (16, 32)
    assert said(answer) == ("kv", "block_incomplete")


def test_the_overlap_is_needed_at_a_position_that_every_ratio_divides() -> None:
    groups = (
        Group("csa", HISTORY, 16, ratio=4),
        Group("tail", TAIL, 4, of="csa", overlap=4),
        Group("swa", WINDOW, 4, window=16),
    )
    parts = (("csa", ends(16, 0, 64), 0), ("swa", ends(4, 0, 64), 0))
    assert ask(groups, stored(*parts, ("tail", ends(4, 0, 64), 0)), 70).status == "FULL_HIT"
    answer = ask(groups, stored(*parts, ("tail", ends(4, 0, 60), 0)), 70)
    assert (answer.tokens, answer.hash_tokens) == (48, 64)
    assert said(answer) == ("tail", "tail_gap")


def test_a_window_is_judged_at_absolute_positions_with_its_sinks() -> None:
    groups = (Group("swa", WINDOW, 4, window=9, sink=4),)
    # At 20 the window is [12, 20): with the sink's block that is all.
    assert ask(groups, stored(("swa", [4, 16, 20], 0)), 24).tokens == 20
    assert ask(groups, stored(("swa", [16, 20], 0)), 24).tokens == 0
    assert ask(groups, stored(("swa", [4, 12, 20], 0)), 24).tokens == 4


def test_a_block_serves_every_endpoint_inside_it_but_only_by_the_digest_at_its_end() -> None:
    groups = (Group("kv", HISTORY, 64, endpoint=16),)
    assert ask(groups, stored(("kv", [64], 0)), 64).tokens == 48
    assert ask(groups, stored(("kv", [64], 0)), 63).status == "MISS"


def test_a_lag_leaves_recent_tokens_to_the_tail() -> None:
    groups = (Group("kv", HISTORY, 16, ratio=4, lag=10), Group("tail", TAIL, 2, of="kv"))
    # At 32, 20 tokens are compressed (the second block meets them) and [20, 32) are raw.
    tail = ("tail", ends(2, 20, 32), 0)
    assert ask(groups, stored(("kv", [16, 32], 0), tail), 40).tokens == 32
    assert ask(groups, stored(("kv", [16], 0), tail), 40).tokens == 0


def test_a_speculative_reader_needs_the_steps_behind_its_position_too() -> None:
    groups = (Group("kv", HISTORY, 16),)
    answer = ask(groups, stored(("kv", ends(16, 0, 64), 0)), 70, drop_last=1)
    assert (answer.tokens, answer.hash_tokens, answer.status) == (48, 64, "PARTIAL_HIT")
    assert said(answer) == ("kv", "off_grid")
    answer = ask(groups, stored(("kv", ends(16, 0, 48), 0)), 70, drop_last=1)
    assert (answer.tokens, answer.hash_tokens) == (32, 48)
    assert said(answer) == ("kv", "not_stored")


def test_what_fails_together_is_named_together() -> None:
    groups = (Group("a", HISTORY, 16), Group("b", WINDOW, 16, window=20), Group("c", WINDOW, 16, window=20))
    world = stored(("a", ends(16, 0, 32), 0), ("b", ends(16, 0, 64), 0), ("c", ends(16, 0, 32), 0))
    answer = ask(groups, world, 70)
    assert (answer.tokens, answer.hash_tokens) == (32, 64)
    assert said(answer) == ("a", "not_stored")
    assert answer.cut is not None
    assert answer.cut.also == ("c",)


def test_damaged_bytes_with_nothing_shorter_are_invalid() -> None:
    world = World({(PROMPT[:16], "kv", 0): {Copy(0, "checksum_mismatch", on_disk=True)}})
    answer = ask((Group("kv", HISTORY, 16),), world, 20)
    assert answer.status == "INVALID"
    assert answer.cut is not None
    assert (answer.cut.kind, answer.cut.layer) == ("disk_prefix", "alignment")


def test_what_lies_on_no_grid_position_is_no_miss() -> None:
    groups = (Group("kv", HISTORY, 16), Group("ssm", HISTORY, 32, state=True))
    answer = ask(groups, stored(("kv", [16], 0)), 40)
    assert (answer.tokens, answer.hash_tokens, answer.status) == (0, 0, "PARTIAL_HIT")
    assert said(answer) == ("kv", "off_grid")
    assert ask(groups, World(), 40).status == "MISS"
