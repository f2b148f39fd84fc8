"""What one node publishes, another resumes from; and who may write where, until when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfabric
from kvfabric import Attempt, Fabric, FabricError, Reason, Session, Status

from .conftest import Away, holders
from .stories import NEEDED_AT_64, content, eventually, objects, only, prompt, wrong_bytes


def acquired(kept: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    """Over there: acquire, read all, release; what came of it."""
    session = kept.setdefault("session", None) or kvfabric.connect()
    kept["session"] = session
    answer = session.acquire(tokens)
    told = {
        "status": answer.status,
        "tokens": answer.tokens,
        "moved": dict(answer.moved_bytes or {}),
        "sources": answer.sources,
        "cause": answer.cause,
    }
    if answer.lease is not None:
        with answer.lease:
            told["wrong"] = wrong_bytes(answer.lease, session.model, tokens)
            told["leased"] = {g: sorted(answer.lease.views[g]) for g in answer.lease.views}
            told["check"] = answer.lease.check()
    return told


def test_another_node_resumes_from_what_one_published_over_nixl(fabric: Fabric, session: Session, away: Away) -> None:
    tokens = prompt("over nixl")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    here, there = holders(fabric)
    assert there["links"] == ["nixl"]
    before = there["moved_bytes"].get("nixl", 0)

    told = eventually(lambda: away.do(acquired, tokens), lambda told: told["status"] is Status.FULL_HIT)

    assert told["tokens"] == 64
    assert told["leased"] == {group: list(indices) for group, indices in NEEDED_AT_64.items()}
    assert told["wrong"] == []
    assert told["check"] is None
    expected = {g.name: len(NEEDED_AT_64[g.name]) * g.block_bytes for g in session.model.groups}
    assert told["moved"] == expected
    assert told["sources"] == (here["address"],)
    there = holders(fabric)[1]
    assert there["moved_bytes"]["nixl"] - before == sum(expected.values())
    assert there["link_of"] == {here["address"]: "nixl"}

    again = away.do(acquired, tokens)
    assert (again["status"], again["moved"], again["sources"]) == (Status.FULL_HIT, {}, ())


def test_a_full_hit_at_home_moves_nothing(session: Session) -> None:
    tokens = prompt("at home")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    answer = session.acquire(tokens)
    assert (answer.status, answer.tokens, answer.hash_tokens, answer.cause) == (Status.FULL_HIT, 64, 64, None)
    assert answer.moved_bytes == {}
    assert answer.lease is not None
    with answer.lease as lease:
        assert wrong_bytes(lease, session.model, tokens) == []


def test_a_prefix_of_which_one_object_is_missing_is_cut_and_the_cause_named(session: Session) -> None:
    tokens = prompt("no index")
    whole = objects(session.model, tokens)
    assert session.publish(tokens, only(whole, {**{g: whole[g] for g in whole}, "idx": range(2)})).ok
    answer = session.acquire(tokens)
    assert (answer.status, answer.tokens, answer.hash_tokens) == (Status.PARTIAL_HIT, 32, 64)
    assert answer.cause is not None
    assert (answer.cause.group, answer.cause.reason) == ("idx", Reason.INDEX_ABSENT)
    answer.cancel()

    explained = session.explain(tokens)
    assert (explained.tokens, explained.lengthen_to_tokens, explained.lengthen_groups) == (32, 64, ("idx",))
    assert session.publish(tokens, only(whole, {"idx": range(2, 4)})).ok
    assert session.probe(tokens).tokens == 64


def test_nothing_in_common_is_a_miss_without_a_cause(session: Session) -> None:
    answer = session.acquire(prompt("nobody published this"))
    assert (answer.status, answer.tokens, answer.cause, answer.lease) == (Status.MISS, 0, None, None)


def test_a_write_through_a_leased_view_fails(session: Session) -> None:
    tokens = prompt("read only")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    answer = session.acquire(tokens)
    assert answer.lease is not None
    with answer.lease as lease, lease.read("csa") as views:
        with pytest.raises(ValueError, match="read-only"):
            views[0][0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            views[0].flags.writeable = True
        assert wrong_bytes(lease, session.model, tokens) == []


def test_an_attempt_is_visible_and_closed_to_writers_with_its_commit(session: Session) -> None:
    tokens = prompt("in place")
    attempt = session.begin(tokens, NEEDED_AT_64)
    assert isinstance(attempt, Attempt)
    for group, indices in NEEDED_AT_64.items():
        nbytes = session.model.group(group).block_bytes
        for index in indices:
            assert attempt.view(group, index).shape == (nbytes,)
            attempt.view(group, index)[:] = content(tokens, group, index, nbytes)
    assert session.probe(tokens).status is Status.MISS

    view = attempt.view("csa", 0)
    assert attempt.commit().ok
    assert session.probe(tokens).status is Status.FULL_HIT
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0
    assert np.array_equal(view, content(tokens, "csa", 0, len(view)))


def test_an_attempt_cannot_touch_what_is_not_its_own(session: Session) -> None:
    attempt = session.begin(prompt("own slots"), {"csa": [0]})
    assert isinstance(attempt, Attempt)
    with pytest.raises(KeyError):
        attempt.view("csa", 1)
    attempt.abort()


def test_an_aborted_attempt_leaves_its_slots_free_and_nothing_visible(fabric: Fabric, session: Session) -> None:
    tokens = prompt("aborted")
    free = {p["group"]: p["free"] for p in holders(fabric)[0]["pools"]}
    attempt = session.begin(tokens, NEEDED_AT_64)
    assert isinstance(attempt, Attempt)
    held = {p["group"]: p["free"] for p in holders(fabric)[0]["pools"]}
    assert {g: free[g] - held[g] for g in free} == {g: len(i) for g, i in NEEDED_AT_64.items()}
    attempt.view("csa", 0)[:] = 1
    attempt.abort()
    assert {p["group"]: p["free"] for p in holders(fabric)[0]["pools"]} == free
    assert attempt.commit().refused is Reason.ATTEMPT_SUPERSEDED
    assert session.probe(tokens).status is Status.MISS


def test_a_late_commit_of_a_superseded_attempt_is_refused(session: Session) -> None:
    tokens = prompt("superseded")
    early, late = session.begin(tokens, {"csa": [0]}), session.begin(tokens, {"csa": [0]})
    assert isinstance(early, Attempt)
    assert isinstance(late, Attempt)
    late.view("csa", 0)[:] = 2
    early.view("csa", 0)[:] = 1
    assert late.commit().ok
    assert early.commit().refused is Reason.ATTEMPT_SUPERSEDED


def test_a_closed_session_gives_its_open_attempts_up(fabric: Fabric) -> None:
    free = {p["group"]: p["free"] for p in holders(fabric)[0]["pools"]}
    with kvfabric.connect() as leaving:
        assert isinstance(leaving.begin(prompt("left open"), {"csa": [0, 1]}), Attempt)
        assert holders(fabric)[0]["attempts"] == 1
    eventually(lambda: holders(fabric)[0]["attempts"], lambda open_ones: open_ones == 0)
    assert {p["group"]: p["free"] for p in holders(fabric)[0]["pools"]} == free


def test_publishing_leaves_no_descriptor_open_at_the_holder(fabric: Fabric, session: Session, ray: Any) -> None:
    pid = holders(fabric)[0]["pid"]
    tokens = prompt("descriptors")
    assert session.publish(tokens, only(objects(session.model, tokens), {"csa": [0]})).ok
    before = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    for number in range(20):
        tokens = prompt(f"descriptors {number}")
        assert session.publish(tokens, only(objects(session.model, tokens), {"csa": [0]})).ok
    assert len(list(Path(f"/proc/{pid}/fd").iterdir())) <= before + 2


def test_a_grown_request_shows_its_new_state_and_retires_the_old_in_one_commit(session: Session) -> None:
    tokens = prompt("grows", 140)
    assert session.publish(tokens[:70], objects(session.model, tokens, 64)).ok
    old = session.acquire(tokens[:70])
    assert old.lease is not None
    grown = objects(session.model, tokens, 128)
    fresh = {"csa": range(4, 8), "idx": range(4, 8), "tail": range(16, 32), "swa": range(16, 32)}
    assert session.extend(tokens, 64, only(grown, fresh)).ok

    assert session.probe(tokens).tokens == 128
    cut = session.probe(tokens[:70])
    assert cut.tokens == 0  # its window and tail left with the growth
    with old.lease as lease:  # but a lease that was granted keeps its slots
        assert wrong_bytes(lease, session.model, tokens) == []


def test_objects_that_do_not_fit_the_model_are_refused_by_name(session: Session) -> None:
    tokens = prompt("misuse")
    for wrong, words in (
        ({"kv": {0: np.zeros(1)}}, "objects.kv: the model has no such group"),
        ({"csa": {9: np.zeros(5000, np.uint8)}}, "objects.csa: index 9 lies outside"),
        ({"csa": {0: np.zeros(4999, np.uint8)}}, r"objects.csa\[0\]: 4999 bytes given"),
    ):
        with pytest.raises(FabricError, match=words):
            session.publish(tokens, wrong)
    assert session.probe(tokens).status is Status.MISS
