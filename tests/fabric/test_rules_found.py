"""Cuts that are easy to misname, each with the sentence of the scenario format that decides it."""

from __future__ import annotations

from typing import Any

from kvfabric.fabric.evidence import Blocked, GroupEvidence
from kvfabric.fabric.kinds import Cause, Layer, ObjectKind, Reason
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.rules import resolve

HISTORY, TAIL, INDEXER = ObjectKind.COMPRESSED_HISTORY, ObjectKind.UNCOMPRESSED_TAIL, ObjectKind.INDEXER


def model(*groups: dict[str, Any], drop_last_blocks: int = 0) -> ModelSpec:
    return ModelSpec.load({"groups": list(groups), "drop_last_blocks": drop_last_blocks})


def held(usable: dict[int, int], *blocked: Blocked) -> GroupEvidence:
    """Evidence of one group: bits by revision, everything usable matches."""
    matched = 0
    for bits in (*usable.values(), *(b.bits for b in blocked)):
        matched |= bits
    return GroupEvidence(usable, matched, blocked)


def test_a_cut_is_judged_in_the_revision_of_the_answer() -> None:
    """One revision is chosen; "of all choices the one that gives the largest p": here 0.

    In it the fifth block is missing. That a copy of the second is damaged cuts only revision 1.
    """
    spec = model({"name": "kv", "kind": "compressed_history", "block_tokens": 2}, drop_last_blocks=1)
    damaged = Blocked(Reason.CHECKSUM_MISMATCH, 0b0010)
    answer = resolve(spec, [held({0: 0b1111, 1: 0b0001}, damaged)], 13)
    assert (answer.tokens, answer.hash_tokens) == (6, 8)
    assert answer.cause == Cause("kv", HISTORY, Layer.INTERSECTION, Reason.NOT_STORED)


def test_a_history_of_which_nothing_is_missing_is_not_blamed_for_an_indexer_of_another_revision() -> None:
    """``not_stored``: "a history block is missing". ``index_stale``: "bears another revision than the block it indexes"."""
    spec = model(
        {"name": "kv", "kind": "compressed_history", "block_tokens": 16},
        {"name": "idx", "kind": "indexer", "of": "kv", "block_tokens": 16},
    )
    for kv, idx in ((0, 1), (1, 0)):
        answer = resolve(spec, [held({kv: 0xFF}), held({idx: 0xFF})], 130)
        assert (answer.tokens, answer.hash_tokens) == (0, 128)
        assert answer.cause == Cause("idx", INDEXER, Layer.INTERSECTION, Reason.INDEX_STALE)


def test_nor_for_a_tail_of_another_revision_where_only_a_speculative_reader_reads_the_history() -> None:
    """At p = 2 nothing is compressed, yet "every block group also holds the blocks of [p, p + d * grid)"."""
    spec = model(
        {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "ratio": 4, "endpoint_tokens": 1},
        {"name": "tail", "kind": "uncompressed_tail", "of": "kv", "block_tokens": 4, "endpoint_tokens": 2},
        drop_last_blocks=2,
    )
    answer = resolve(spec, [held({0: 0b11}), held({1: 0b11})], 8)
    assert (answer.tokens, answer.hash_tokens) == (0, 6)
    assert answer.cause == Cause("tail", TAIL, Layer.INTERSECTION, Reason.TAIL_GAP)
    assert resolve(spec, [held({1: 0b11}), held({1: 0b11})], 8).tokens == 2


def test_a_missing_snapshot_is_a_missing_snapshot_whatever_its_kind() -> None:
    """``snapshot_absent``: "of a snapshot: missing"; and a form state is "a snapshot that serves exactly its position"."""
    kv = {"name": "kv", "kind": "compressed_history", "block_tokens": 8}
    state = {"name": "s", "form": "state", "grid_tokens": 8}
    for kind in ("sliding_window", "uncompressed_tail", "indexer"):
        of = {} if kind == "sliding_window" else {"of": "kv"}
        spec = model(kv, state | {"kind": kind} | of)
        answer = resolve(spec, [held({0: 0b111}), held({0: 0b001})], 25)
        assert (answer.tokens, answer.hash_tokens) == (8, 24)
        assert answer.cause == Cause("s", ObjectKind(kind), Layer.INTERSECTION, Reason.SNAPSHOT_ABSENT)
