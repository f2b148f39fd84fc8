"""Blocks under an engine's own names: stored on one node, loaded on another, absent under every other name."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvfabric
from kvfabric import Fabric, FabricError
from kvfabric.actors.client import HolderClient
from kvfabric.engines.shared.audit import Audits
from kvfabric.engines.shared.named_blocks import NamedBlocks, blocks_model
from kvfabric.fabric.kinds import Reason
from kvfabric.transport.slot_files import SlotWriter

from .conftest import Away
from .stories import eventually

BYTES = 8192
SALT = b"one engine"


def names(count: int, of: str = "a") -> list[bytes]:
    return [f"{of}{i}".encode() for i in range(count)]


def rows_of(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, BYTES // 4)).astype(np.float32).view(np.uint8)


@pytest.fixture(scope="module")
def named(fabric: Fabric) -> Iterator[Fabric]:
    model = blocks_model(block_bytes=BYTES, block_tokens=16)
    spec = {"model": model, "memory_bytes": 8 << 20, "node_resource": ("kvfabric_node_0", "kvfabric_node_1")}
    with kvfabric.launch(spec, name="named") as running:
        yield running


@pytest.fixture
def here(named: Fabric) -> Iterator[NamedBlocks]:
    session = kvfabric.connect("named")
    with session:
        yield NamedBlocks(session, scheme="test-1", salt=SALT, block_bytes=BYTES)


def load_there(kept: dict[str, Any], wanted: list[bytes], salt: bytes = SALT) -> tuple[list[int], list[str], bytes]:
    """Which came, why the others did not, and the bytes of those that came."""
    from kvfabric.engines.shared.named_blocks import NamedBlocks as Blocks

    with kvfabric.connect("named") as session:
        rows = np.zeros((len(wanted), 8192), np.uint8)
        moved = Blocks(session, scheme="test-1", salt=salt, block_bytes=8192).load(wanted, rows)
        return sorted(moved.done), sorted(set(map(str, moved.refused.values()))), rows[sorted(moved.done)].tobytes()


def test_blocks_are_loaded_on_another_node_in_any_order(here: NamedBlocks, away: Away) -> None:
    rows = rows_of(300)
    assert here.store(names(300), rows).done == list(range(300))
    assert all(here.present(names(300)))
    wanted = [7, 299, 3, 120]
    eventually(lambda: away.do(load_there, [names(300)[i] for i in wanted]), lambda told: len(told[0]) == 4)
    done, refused, got = away.do(load_there, [names(300)[i] for i in wanted])
    assert (done, refused) == ([0, 1, 2, 3], [])
    assert got == rows[wanted].tobytes()


def test_what_is_absent_is_refused_and_costs_nothing_else(here: NamedBlocks) -> None:
    rows = rows_of(4, seed=1)
    here.store(names(4, "b"), rows)
    wanted = [b"none", *names(2, "b"), b"neither", *names(4, "b")[2:]]
    into = np.zeros((6, BYTES), np.uint8)
    moved = here.load(wanted, into)
    assert sorted(moved.done) == [1, 2, 4, 5]
    assert set(moved.refused) == {0, 3}
    assert np.array_equal(into[[1, 2, 4, 5]], rows)
    assert moved.reused_tokens == 4 * 16
    assert here.present(wanted) == [False, True, True, False, True, True]


def test_a_store_is_two_requests_and_a_load_is_one(here: NamedBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    whole = HolderClient._request_in_order

    def counted(self: Any, client: Any, records: Any, timeout_s: float) -> Any:
        asked.extend(type(record).__name__ for record in records)
        return whole(self, client, records, timeout_s)

    monkeypatch.setattr(HolderClient, "_request_in_order", counted)
    monkeypatch.setattr(HolderClient, "writer", lambda *_: pytest.fail("the descriptor comes with the slots"))
    assert here.store(names(3, "few"), rows_of(3)).ok
    assert here.load(names(3, "few"), np.zeros((3, BYTES), np.uint8)).ok
    assert asked == ["StoreBegin", "StoreCommit", "Acquire"]


def test_a_holder_that_hands_no_descriptor_over_is_asked_for_it(
    here: NamedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of an earlier release."""
    whole, writer = HolderClient._request_in_order, HolderClient.writer
    asked: list[int] = []

    def without(self: Any, client: Any, records: Any, timeout_s: float) -> Any:
        answers = whole(self, client, records, timeout_s)
        for descriptor in (fd for answer in answers for fd in answer.descriptors):
            os.close(descriptor)
        return [answer._replace(descriptors=()) for answer in answers]

    def asking(self: HolderClient, attempt: int) -> SlotWriter:
        asked.append(attempt)
        return writer(self, attempt)

    monkeypatch.setattr(HolderClient, "_request_in_order", without)
    monkeypatch.setattr(HolderClient, "writer", asking)
    rows, into = rows_of(3, seed=7), np.zeros((3, BYTES), np.uint8)
    assert here.store(names(3, "older"), rows).ok
    assert here.load(names(3, "older"), into).ok
    assert np.array_equal(into, rows)
    assert len(asked) == 1


def test_where_memory_cannot_take_a_row_nothing_is_stored_and_no_slot_is_kept(
    named: Fabric, here: NamedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no memory")

    def in_hand() -> list[Any]:
        return [(holder["attempts"], holder["pools"]) for holder in named.status()["holders"]]

    before = eventually(in_hand, lambda found: all(not attempts for attempts, _ in found))
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", full)
        moved = here.store(names(3, "full"), rows_of(3))
    assert moved.refused == dict.fromkeys(range(3), Reason.ADMISSION_LIMIT)
    assert in_hand() == before
    assert here.present(names(3, "full")) == [False] * 3
    assert here.store(names(3, "full"), rows_of(3)).ok


def test_names_mean_nothing_under_another_salt(here: NamedBlocks, away: Away) -> None:
    here.store(names(3, "c"), rows_of(3))
    eventually(lambda: away.do(load_there, names(3, "c"))[0], lambda done: done == [0, 1, 2])
    assert away.do(load_there, names(3, "c"), b"other weights")[0] == []


@pytest.mark.parametrize(("changed", "outcome"), [(1.0, "equal"), (1.01, "close"), (-1.0, "mismatch")])
def test_an_audited_block_is_withheld_computed_and_judged(
    named: Fabric, monkeypatch: pytest.MonkeyPatch, changed: float, outcome: str
) -> None:
    with kvfabric.connect("named") as session:
        due, told = [True], []
        tell = session.audited

        def audited(tokens: Any, lease: Any, found: str) -> Any:
            told.append(str(found))
            return tell(tokens, lease, found)

        monkeypatch.setattr(session, "audit_due", lambda lease: due[0])
        monkeypatch.setattr(session, "audited", audited)
        blocks = NamedBlocks(session, scheme="test-1", salt=SALT, block_bytes=BYTES, audits=Audits(session, "float32"))
        mine, rows = names(3, outcome), rows_of(3, seed=2)
        computed = (rows.view(np.float32) * np.float32(changed)).view(np.uint8)
        blocks.store(mine, rows)
        into = np.zeros((3, BYTES), np.uint8)
        assert blocks.load(mine, into).done == []
        assert not into.any(), "the engine is to compute them"
        blocks.store(mine, computed)
        assert told == [outcome]
        due[0] = False
        assert blocks.load(mine, into).done == [0, 1, 2]
        assert np.array_equal(into, computed if outcome == "mismatch" else rows), "what proved wrong is replaced"
        due[0] = True
        assert blocks.load(mine, into).done == []
        blocks.close()
        assert told == [outcome, "late"], "nothing was computed anew"


def test_an_engine_with_blocks_of_another_size_is_told_what_to_launch(named: Fabric) -> None:
    with kvfabric.connect("named") as session, pytest.raises(FabricError, match="block_bytes=4096"):
        NamedBlocks(session, scheme="test-1", salt=SALT, block_bytes=4096)


def test_a_fabric_of_chains_takes_no_names(fabric: Fabric) -> None:
    with kvfabric.connect("default") as session, pytest.raises(FabricError, match="chained"):
        session.named([b"a"], scheme="test-1")
