"""What a lease promises, to whom, and how its reader learns that it is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric, FabricError, Lease, LeaseRefused, Reason, Session, Status
from kvfabric.actors.client import TOLD_MAX, request_id
from kvfabric.fabric.messages import Renew, Renewed

from .conftest import Away, holders, successor
from .stories import content, eventually, objects, prompt, wrong_bytes


def leased(session: Session, name: str, **options: Any) -> tuple[list[int], Lease]:
    tokens = prompt(name)
    assert session.publish(tokens, objects(session.model, tokens)).ok
    answer = session.acquire(tokens, **options)
    assert answer.status is Status.FULL_HIT
    assert answer.lease is not None
    return tokens, answer.lease


READER = """
import ctypes, sys
from kvfabric import Lease
lease = Lease.open(bytes.fromhex(sys.stdin.readline()))
with lease.read("csa") as views:
    print(lease.tokens, lease.fence, [int(views[i].sum()) for i in views], flush=True)
    if sys.argv[1:] == ["write"]:
        ctypes.memset(views[0].ctypes.data, 7, 1)
lease.close()
"""


def read_elsewhere(lease: Lease, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In another process of this node, outside Ray: open by token, read one group."""
    return subprocess.run(
        [sys.executable, "-c", READER, *arguments],
        input=lease.token().hex() + "\n",
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_token_opens_the_lease_in_another_process_of_the_node(session: Session) -> None:
    tokens, lease = leased(session, "token")
    with lease:
        read = read_elsewhere(lease)
        sums = [int(content(tokens, "csa", i, 5000).sum()) for i in range(4)]
        assert (read.returncode, read.stderr) == (0, "")
        assert read.stdout == f"64 {lease.fence} {sums}\n"


def test_a_write_to_leased_memory_past_numpy_is_a_fault(session: Session) -> None:
    tokens, lease = leased(session, "fault")
    with lease:
        assert read_elsewhere(lease, "write").returncode == -signal.SIGSEGV
        assert wrong_bytes(lease, session.model, tokens) == []


def opened(kept: dict[str, Any], token: bytes) -> str:
    try:
        Lease.open(token).close()
    except FabricError as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


def test_a_token_is_refused_on_another_node(session: Session, away: Away) -> None:
    _, lease = leased(session, "other node")
    with lease:
        assert "another node" in away.do(opened, lease.token())
        assert opened({}, lease.token()) == "opened"


@pytest.mark.parametrize("token", [b"", b"\x93\x01\x02\x03", b"\xc1", b"\x97\x02" + b"\xc0" * 6])
def test_what_is_no_token_is_refused_in_one_line(session: Session, token: bytes) -> None:
    assert opened({}, token).startswith("WireError: ")


def test_a_lease_ends_at_its_deadline_and_its_pins_after_the_grace(fabric: Fabric, session: Session) -> None:
    eventually(lambda: holders(fabric)[0]["pinned_slots"], lambda pinned: pinned == 0)
    _, lease = leased(session, "expires", lease_s=0.3)
    assert lease.check() is None
    assert holders(fabric)[0]["pinned_slots"] == 13
    with lease.read("swa"):
        pass
    time.sleep(max(0.0, lease.deadline_s - time.monotonic()))
    assert lease.check() is Reason.LEASE_EXPIRED
    with pytest.raises(LeaseRefused) as refused, lease.read("swa"):
        pass
    assert refused.value.reason is Reason.LEASE_EXPIRED
    assert lease.renew() is Reason.LEASE_EXPIRED
    with pytest.raises(LeaseRefused):
        Lease.open(lease.token())
    assert holders(fabric)[0]["pinned_slots"] == 13  # for a reader that is still at it
    eventually(lambda: holders(fabric)[0]["pinned_slots"], lambda pinned: pinned == 0, within_s=5.0)


def test_a_read_that_outlives_its_lease_is_refused_at_its_end(session: Session) -> None:
    _, lease = leased(session, "too slow", lease_s=0.2)
    with pytest.raises(LeaseRefused) as refused, lease.read("csa"):
        time.sleep(max(0.0, lease.deadline_s - time.monotonic()))
    assert refused.value.reason is Reason.LEASE_EXPIRED


def test_a_renewed_lease_lives_on(session: Session) -> None:
    _, lease = leased(session, "renewed", lease_s=0.3)
    first = lease.deadline_s
    assert lease.renew(20.0) is None
    assert lease.deadline_s > first + 10.0
    time.sleep(max(0.0, first - time.monotonic()))
    with lease.read("csa"):
        pass
    lease.release()


def test_a_released_lease_gives_its_pins_back_and_may_be_released_again(fabric: Fabric, session: Session) -> None:
    _, lease = leased(session, "released")
    assert holders(fabric)[0]["pinned_slots"] == 13
    lease.release(reused_tokens=64)
    lease.release()
    eventually(lambda: holders(fabric)[0]["pinned_slots"], lambda pinned: pinned == 0)
    assert lease.check() is Reason.LEASE_EXPIRED
    assert lease.renew() is Reason.LEASE_EXPIRED


def test_fences_grow_from_lease_to_lease(session: Session) -> None:
    _, first = leased(session, "fence")
    second = session.acquire(prompt("fence")).lease
    assert second is not None
    with first, second:
        assert second.fence > first.fence


def test_a_reader_whose_slots_were_taken_for_others_sees_another_version(side: Fabric) -> None:
    with kvfabric.connect("side") as session:
        _, lease = leased(session, "evicted")
        reader = Lease.open(lease.token())
        assert reader.check() is None
        lease.release()
        assert reader.check() is None  # unpinned, and still there
        tokens = prompt("evicts")
        assert session.publish(tokens, objects(session.model, tokens)).ok
        assert reader.check() is Reason.VERSION_CHANGED
        with pytest.raises(LeaseRefused), reader.read("csa"):
            pass
        reader.close()


def test_a_leased_prompt_is_not_evicted_and_the_want_of_room_is_named(side: Fabric) -> None:
    with kvfabric.connect("side") as session:
        tokens, lease = leased(session, "stays")
        other = prompt("has no room")
        stored = session.publish(other, objects(session.model, other))
        assert (stored.refused, stored.group) == (Reason.ADMISSION_LIMIT, "csa")
        assert wrong_bytes(lease, session.model, tokens) == []
        lease.release()
        assert session.publish(other, objects(session.model, other)).ok


def test_new_weights_end_leases_and_hide_what_older_ones_made(fabric: Fabric, session: Session) -> None:
    tokens, lease = leased(session, "weights")
    attempt = session.begin(prompt("weights, late"), {"csa": [0]})
    assert isinstance(attempt, kvfabric.Attempt)
    fabric.update_weights("v2")
    try:
        assert lease.check() is Reason.WEIGHTS_MISMATCH
        with pytest.raises(LeaseRefused), lease.read("csa"):
            pass
        assert lease.renew() is Reason.WEIGHTS_MISMATCH
        assert attempt.commit().refused is Reason.WEIGHTS_MISMATCH
        session.refresh()
        assert session.weights_revision == "v1"  # what this process runs did not change
        assert session.acquire(tokens).status is Status.MISS
        assert session.publish(tokens, objects(session.model, tokens)).refused is Reason.WEIGHTS_MISMATCH
        with kvfabric.connect() as newer:
            assert newer.weights_revision == "v2"
            assert newer.acquire(tokens).status is Status.MISS
            _, fresh = leased(newer, "weights")
            assert fresh.check() is None
            fresh.release()
    finally:
        fabric.update_weights("v1")
    lease.release()


@pytest.mark.faults
def test_a_lease_of_a_killed_holder_is_lost_at_once(fabric: Fabric, session: Session) -> None:
    _, lease = leased(session, "killed holder")
    reader = Lease.open(lease.token())
    before = holders(fabric)[0]
    with lease.read("csa") as views:
        kept = views[0]
    os.kill(before["pid"], signal.SIGKILL)
    eventually(lease.check, lambda reason: reason is Reason.HOLDER_LOST, within_s=0.5)
    assert reader.check() is Reason.HOLDER_LOST
    assert int(kept[0]) >= 0  # the mapping stays readable until the reader lets go of it
    assert lease.renew() is Reason.HOLDER_LOST
    lease.release()
    reader.close()
    successor(fabric, before)


RELEASES = 300


def test_a_release_is_taken_before_whatever_is_asked_next_over_another_connection(session: Session) -> None:
    """Renewals go over another connection than releases do, and nothing but the client keeps the two in order."""
    tokens, lease = leased(session, "in order")
    client = lease._leader()
    refusals = []
    for _ in range(RELEASES):
        assert client.call(Renew(request_id(), lease.grant.lease, 30.0), Renewed).refused is None
        lease.release()
        refusals.append(client.call(Renew(request_id(), lease.grant.lease, 30.0), Renewed).refused)
        again = session.acquire(tokens).lease
        assert again is not None
        lease = again
    lease.release()
    assert None not in refusals, f"{refusals.count(None)} of {RELEASES} were overtaken"


def test_releases_without_a_question_between_them_stay_bounded_and_all_arrive(session: Session) -> None:
    tokens, first = leased(session, "many at once")
    client = first._leader()
    leases = [first, *(session.acquire(tokens).lease for _ in range(3 * TOLD_MAX))]
    for lease in leases:
        assert lease is not None
        lease.release()
        assert len(client._told) <= TOLD_MAX
    for lease in leases:
        assert lease is not None
        assert client.call(Renew(request_id(), lease.grant.lease, 30.0), Renewed).refused is not None
    assert client._told == []
