"""The one check that cut a hit, and that mending what it names lengthens the hit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvfabric.fabric.bitmaps import ones
from kvfabric.fabric.evidence import Blocked, GroupEvidence
from kvfabric.fabric.kinds import Layer, ObjectKind, Reason, Status
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.rules import (
    Resolution,
    needs_past,
    resolve,
    serve_limits,
    usable_position,
    what_would_lengthen,
)

from .rules_by_hand import bits, held, history, in_revisions, indexer, model_of, recurrent, tail, window


def said(found: Resolution) -> tuple[str, str]:
    assert found.cause is not None
    return found.cause.group, found.cause.reason.value


def mended(model: ModelSpec, evidence: Sequence[GroupEvidence], n: int) -> int:
    """The hit once everything that the cut names is usable where it says."""
    cut = what_would_lengthen(model, evidence, n)
    assert cut is not None
    better = list(evidence)
    for name, revision in zip(cut.groups, cut.revisions, strict=True):
        i = model.index_of(name)
        restored = bits(j for blocks in needs_past(model, cut.target_tokens)[i] for j in blocks)
        into = 0 if revision is None else revision
        usable = better[i].usable | {into: better[i].usable.get(into, 0) | restored}
        better[i] = GroupEvidence(usable, better[i].matched | restored, better[i].blocked)
    found: int = usable_position(model, better, n)
    assert found == cut.target_tokens
    return found


KV_SSM = model_of(history("full"), recurrent("ssm"))


def test_history_before_the_only_snapshot_is_the_cut() -> None:
    evidence = [held(range(6)), held([4])]
    found = resolve(KV_SSM, evidence, 200)
    assert (found.tokens, found.hash_tokens, found.status) == (0, 160, Status.PARTIAL_HIT)
    assert said(found) == ("full", "not_stored")
    assert found.cause is not None
    assert (found.cause.kind, found.cause.layer) == (ObjectKind.COMPRESSED_HISTORY, Layer.INTERSECTION)
    assert mended(KV_SSM, evidence, 200) == 160


def test_snapshots_that_are_barred_together_are_called_so_where_they_lie() -> None:
    model = model_of(recurrent("gdn"), recurrent("ssm"), history("full"))
    barred = Blocked(Reason.QUARANTINED, bits([4]))
    evidence = [held([], blocked=(barred,)), held([], blocked=(barred,)), held(range(10))]
    found = resolve(model, evidence, 200)
    assert (found.tokens, found.hash_tokens, said(found), found.also) == (0, 160, ("gdn", "quarantined"), ("ssm",))
    assert mended(model, evidence, 200) == 160
    never = [held([]), held([]), held(range(10))]
    assert said(resolve(model, never, 200)) == ("gdn", "snapshot_absent")
    assert mended(model, never, 200) == 32


def test_the_snapshot_before_the_end_of_history_is_the_cut() -> None:
    evidence = [held(range(10)), held([2])]
    found = resolve(KV_SSM, evidence, 200)
    assert (found.tokens, found.hash_tokens) == (96, 160)
    assert said(found) == ("ssm", "snapshot_absent")
    assert found.also == ()
    assert mended(KV_SSM, evidence, 200) == 160


def test_a_full_hit_has_no_cause() -> None:
    found = resolve(KV_SSM, [held(range(10)), held([2, 4])], 200)
    assert (found.status, found.tokens, found.cause, found.revisions) == (Status.FULL_HIT, 160, None, (0, 0))
    assert what_would_lengthen(KV_SSM, [held(range(10)), held([2, 4])], 200) is None


def test_a_miss_is_where_no_object_bears_a_digest_of_the_prompt() -> None:
    model = model_of(history())
    assert resolve(model, [held(())], 100) == Resolution(0, 0, (None,), Status.MISS)
    # The block's end is the prompt's end: no prefix of at most n - 1 tokens.
    assert resolve(model, [held([0])], 16).status is Status.MISS
    assert resolve(model, [held([0])], 17).status is Status.FULL_HIT


KV_IDX = model_of(history("kv", 64), indexer("idx", "kv", 64))


def test_an_indexer_that_ends_early_is_absent() -> None:
    evidence = [held(range(8)), held(range(5))]
    found = resolve(KV_IDX, evidence, 520)
    assert (found.tokens, found.hash_tokens) == (320, 512)
    assert said(found) == ("idx", "index_absent")
    assert mended(KV_IDX, evidence, 520) == 512


@pytest.mark.parametrize(("kv", "idx"), [(0, 1), (1, 0)])
def test_an_indexer_of_another_revision_is_stale_and_not_the_history_missing(kv: int, idx: int) -> None:
    evidence = [held(range(8), kv), held(range(8), idx)]
    found = resolve(KV_IDX, evidence, 520)
    assert (found.tokens, found.hash_tokens) == (0, 512)
    assert said(found) == ("idx", "index_stale")
    assert mended(KV_IDX, evidence, 520) == 512


def test_an_indexer_is_stale_from_the_block_that_was_compressed_again() -> None:
    evidence = [held(range(8), 1), in_revisions(r1=range(3), r0=range(3, 8))]
    found = resolve(KV_IDX, evidence, 520)
    assert found.tokens == 192
    assert said(found) == ("idx", "index_stale")
    assert mended(KV_IDX, evidence, 520) == 512


def test_history_of_two_revisions_is_cut_where_they_meet() -> None:
    evidence = [in_revisions(r0=range(3), r1=range(3, 8)), held(range(8))]
    found = resolve(KV_IDX, evidence, 520)
    assert (found.tokens, found.revisions) == (192, (0, 0))
    assert said(found) == ("kv", "not_stored")
    assert mended(KV_IDX, evidence, 520) > 192


def test_what_is_split_together_is_named_together() -> None:
    split = in_revisions(r0=range(3), r1=range(3, 8))
    found = resolve(KV_IDX, [split, split], 520)
    assert found.tokens == 192
    assert said(found) == ("kv", "not_stored")
    assert found.also == ("idx",)
    assert mended(KV_IDX, [split, split], 520) > 192


def test_a_tail_of_another_revision_is_a_gap() -> None:
    model = model_of(history("kv", ratio=4), tail(overlap_tokens=4))
    evidence = [held(range(4), 1), held(range(16), 0)]
    found = resolve(model, evidence, 70)
    assert (found.tokens, said(found)) == (0, ("tail", "tail_gap"))
    assert mended(model, evidence, 70) == 64


def test_a_tail_that_is_never_needed_does_not_speak_for_its_history() -> None:
    model = model_of(history("kv", ratio=4), tail())
    evidence = [in_revisions(r0=range(2), r1=range(2, 4)), held(range(16), 1)]
    found = resolve(model, evidence, 70)
    assert (found.tokens, said(found), found.also) == (32, ("kv", "not_stored"), ())
    assert mended(model, evidence, 70) == 64


def test_the_overlap_at_an_aligned_position_is_the_cut() -> None:
    model = model_of(history("csa", ratio=4), tail("csa_tail", "csa", overlap_tokens=4), window("swa", 4, 16))
    evidence = [held(range(4)), held(range(15)), held(range(16))]
    found = resolve(model, evidence, 70)
    assert (found.tokens, found.hash_tokens) == (48, 64)
    assert said(found) == ("csa_tail", "tail_gap")
    assert found.cause is not None
    assert found.cause.kind is ObjectKind.UNCOMPRESSED_TAIL


def test_the_group_is_named_that_lengthens_the_hit_most_when_lifted() -> None:
    model = model_of(window("a", window_tokens=17), window("b", window_tokens=17))
    # Without a: 80, without b: 64.
    found = resolve(model, [held([0, 3]), held([0, 2, 4])], 100)
    assert (found.tokens, said(found)) == (16, ("a", "window_incomplete"))
    # Without a: 48, without b: 64.
    found = resolve(model, [held([0, 3]), held([0, 2])], 100)
    assert (found.tokens, said(found)) == (16, ("b", "window_incomplete"))


def test_groups_that_fail_together_are_all_named_in_model_order() -> None:
    model = model_of(window("w"), history("a"), history("b"))
    evidence = [held([0, 1, 4, 5]), held(range(2)), held(range(6))]
    found = resolve(model, evidence, 100)
    assert (found.tokens, found.hash_tokens) == (32, 96)
    assert said(found) == ("a", "not_stored")
    both = [held([0, 1]), held(range(2)), held(range(6))]
    found = resolve(model, both, 100)
    assert (said(found), found.also) == (("w", "window_incomplete"), ("a",))
    assert mended(model, both, 100) == 48


@pytest.mark.parametrize(
    ("reason", "layer", "status"),
    [
        (Reason.EVICTED, Layer.INTERSECTION, Status.PARTIAL_HIT),
        (Reason.BLOCK_INCOMPLETE, Layer.INTERSECTION, Status.PARTIAL_HIT),
        (Reason.HOLDER_LOST, Layer.TRANSPORT, Status.PARTIAL_HIT),
        (Reason.RESTORE_FAILED, Layer.TRANSPORT, Status.PARTIAL_HIT),
        (Reason.ABI_MISMATCH, Layer.ABI, Status.INVALID),
        (Reason.MISALIGNED, Layer.ALIGNMENT, Status.INVALID),
        (Reason.CHECKSUM_MISMATCH, Layer.ALIGNMENT, Status.INVALID),
    ],
)
def test_why_an_object_is_blocked_is_why_the_hit_is_cut(reason: Reason, layer: Layer, status: Status) -> None:
    model = model_of(history())
    first = resolve(model, [held(range(1, 4), blocked=(Blocked(reason, 1),))], 100)
    assert (first.tokens, first.status, said(first)) == (0, status, ("kv", reason.value))
    later = resolve(model, [held([0, 1, 3], blocked=(Blocked(reason, 0b100),))], 100)
    assert (later.tokens, later.status, said(later)) == (32, Status.PARTIAL_HIT, ("kv", reason.value))
    assert later.cause is not None
    assert later.cause.layer is layer


def test_the_first_entry_that_names_an_object_speaks_and_a_tier_makes_it_a_disk_prefix() -> None:
    entries = (Blocked(Reason.CHECKSUM_MISMATCH, 0b10, from_tier=True), Blocked(Reason.EVICTED, 0b11))
    found = resolve(model_of(history()), [held([0], blocked=entries)], 100)
    assert said(found) == ("kv", "checksum_mismatch")
    assert found.cause is not None
    assert found.cause.kind is ObjectKind.DISK_PREFIX


def test_a_missing_snapshot_is_called_so_whatever_its_kind() -> None:
    snapshot = {"name": "swa", "kind": "sliding_window", "form": "state", "grid_tokens": 16}
    model = model_of(history(), snapshot)
    assert said(resolve(model, [held(range(4)), held(())], 100)) == ("swa", "snapshot_absent")


def test_what_matches_on_no_grid_position_is_off_the_grid_and_no_miss() -> None:
    found = resolve(KV_SSM, [held([0]), held(())], 40)
    assert (found.tokens, found.hash_tokens, found.status) == (0, 0, Status.PARTIAL_HIT)
    assert said(found) == ("full", "off_grid")
    assert found.also == ("ssm",)
    assert found.cause is not None
    assert found.cause.layer is Layer.WHOLE_BLOCK
    # With 31 tokens to resume there is no grid position at all.
    assert resolve(KV_SSM, [held([0]), held(())], 31).also == ()


def test_a_speculative_reader_is_cut_by_the_prompts_end_or_by_what_is_missing() -> None:
    model = model_of(window("w"), history("kv"), drop_last_blocks=1)
    end = resolve(model, [held(range(4)), held(range(4))], 70)
    assert (end.tokens, end.hash_tokens, end.status) == (48, 64, Status.PARTIAL_HIT)
    assert said(end) == ("w", "off_grid")
    evidence = [held(range(6)), held(range(4))]
    missing = resolve(model, evidence, 200)
    assert (missing.tokens, said(missing)) == (48, ("kv", "not_stored"))
    assert mended(model, evidence, 200) == 80
    alone = resolve(model_of(recurrent(), drop_last_blocks=1), [held([0, 1])], 200)
    assert (alone.tokens, alone.status) == (64, Status.FULL_HIT)


def test_a_limit_from_outside_shortens_the_hit_and_leaves_its_name_to_the_caller() -> None:
    model = model_of(history())
    evidence = [in_revisions(r0=range(8), r1=range(2))]
    found = resolve(model, evidence, 200, limit_tokens=100)
    assert (found.tokens, found.hash_tokens, found.status, found.cause) == (96, 128, Status.PARTIAL_HIT, None)
    low = resolve(model, evidence, 200, limit_tokens=40)
    assert (low.tokens, low.revisions) == (32, (1,))
    assert resolve(model, evidence, 200, limit_tokens=0).tokens == 0
    assert resolve(model, evidence, 200, limit_tokens=128) == resolve(model, evidence, 200)


def test_a_limit_that_does_not_cut_leaves_the_cause_as_it_is() -> None:
    evidence = [held([0, 1, 3])]
    assert resolve(model_of(history()), evidence, 200, limit_tokens=64) == resolve(model_of(history()), evidence, 200)


def test_tokens_lost_to_alignment_are_those_that_only_the_common_grid_forbids() -> None:
    model = model_of(history("a", 1536), history("b", 3456))
    assert model.grid_tokens == 13_824
    found = resolve(model, [held(range(13)), held(range(5))], 30_000)
    # 13 x 1,536 and 5 x 3,456 = 17,280 are there.
    assert (found.tokens, found.status, found.tokens_lost_to_alignment) == (13_824, Status.FULL_HIT, 17_280 - 13_824)
    finer = model_of(history("a", 1536), history("b", 3456, endpoint_tokens=1536))
    assert finer.grid_tokens == 1536
    assert resolve(finer, [held(range(13)), held(range(5))], 30_000).tokens == 16_896


def test_snapshots_are_not_blamed_on_alignment() -> None:
    assert resolve(KV_SSM, [held(range(5)), held(range(2))], 200).tokens_lost_to_alignment == 0


def test_serve_limits_say_how_far_each_group_reaches_alone() -> None:
    model = model_of(history("kv", 64), indexer("idx", "kv", 64), window("swa", 64, 65))
    evidence = [in_revisions(r0=range(6), r1=range(2)), in_revisions(r1=range(7)), held([0, 4])]
    assert serve_limits(model, evidence, 450) == (384, 448, 320)
    assert serve_limits(model, evidence, 300) == (256, 256, 64)
    assert serve_limits(model, evidence, 64) == (0, 0, 0)


def test_no_single_answer_hides_that_nothing_of_any_group_is_there() -> None:
    model = model_of(history("a"), history("b"))
    blocked = (Blocked(Reason.HOLDER_LOST, ones(4)),)
    found = resolve(model, [held((), blocked=blocked), held((), blocked=blocked)], 100)
    assert (found.tokens, found.hash_tokens, said(found), found.also) == (0, 64, ("a", "holder_lost"), ("b",))
