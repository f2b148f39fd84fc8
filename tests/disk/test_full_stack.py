"""A real holder process with a disk: what it stored is served by the next life on its node."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfabric.actors.answer import Answer
from kvfabric.actors.spec import FabricSpec
from kvfabric.fabric.kinds import ObjectKind, Reason, SpecError, Status
from kvfabric.fabric.messages import Answer as WireAnswer

from .lives import MODEL, Life, prompt

pytestmark = pytest.mark.faults


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {"path": str(tmp_path / "disk"), "bytes_max": 1 << 28, "free_floor_bytes": 0}


@pytest.fixture
def lives(disk: dict[str, Any]) -> Iterator[Any]:
    running: list[Life] = []

    def start(incarnation: int, **more: Any) -> Life:
        life = Life(disk | more.pop("disk", {}), incarnation, **more)
        running.append(life)
        return life

    yield start
    for life in running:
        life.close()


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_a_holder_killed_and_restarted_serves_what_its_disk_holds_bit_for_bit(lives: Any, codec: str) -> None:
    tokens = prompt(1)
    first = lives(1, disk={"codec": codec})
    first.store(tokens)
    assert first.swap_out(tokens).refused is None
    assert first.status()["disk"]["extents"] == 1
    before = first.session.acquire(tokens)
    assert (before.status, before.tokens) == (Status.FULL_HIT, 64)
    assert first.wrong(before, tokens) == []
    first.kill()

    second = lives(2, disk={"codec": codec})
    assert second.status()["incarnation"] == 2
    probed = second.session.probe(tokens)
    assert (probed.status, probed.tokens) == (Status.PENDING, 64)
    assert probed.expected_s is not None
    assert probed.expected_s > 0
    after = second.session.acquire(tokens)
    assert (after.status, after.tokens, after.hash_tokens) == (Status.FULL_HIT, 64, 64)
    assert second.wrong(after, tokens) == []
    assert after.lease is not None
    assert after.lease.check() is None
    assert second.status()["counters"]["restored_objects"] > 0


def test_what_was_only_in_memory_is_gone_with_its_life(lives: Any) -> None:
    """The control: without a swap-out nothing is on disk."""
    tokens = prompt(2)
    first = lives(1)
    first.store(tokens)
    first.kill()
    answer = lives(2).session.acquire(tokens)
    assert (answer.tokens, answer.lease) == (0, None)


def test_state_on_disk_of_older_weights_is_never_found(lives: Any) -> None:
    tokens = prompt(3)
    first = lives(1)
    first.store(tokens)
    assert first.swap_out(tokens).refused is None
    first.close()
    second = lives(2, weights="v2")
    assert second.session.acquire(tokens).tokens == 0
    second.close()
    assert lives(3, weights="v1").session.acquire(tokens).tokens == 64


def test_a_reader_of_another_layout_is_refused_by_what_the_extent_itself_says(lives: Any) -> None:
    tokens = prompt(4)
    first = lives(1)
    first.store(tokens)
    assert first.swap_out(tokens).refused is None
    first.close()
    other = {"csa": {"kernel": "another", "alignment_bytes": 1}}
    second = lives(2, passports=other)
    answer = second.session.acquire(tokens)
    assert answer.tokens == 0
    assert answer.cause is not None
    assert answer.cause.reason is Reason.ABI_MISMATCH


def test_a_flipped_byte_on_disk_cuts_the_hit_there_and_nowhere_else(lives: Any, tmp_path: Path) -> None:
    from kvfabric.transport.disk import format as extent_format

    tokens = prompt(5)
    life = lives(1)
    life.store(tokens)
    assert life.swap_out(tokens).refused is None
    (path,) = (tmp_path / "disk").glob("test*/0.*/*.kvx")
    raw = bytearray(path.read_bytes())
    header = extent_format.decode(bytes(raw), len(raw))
    at = next(p for e, p in zip(header.entries, header.places, strict=True) if (e.group, e.position) == (0, 64))
    raw[at.offset + 1234] ^= 0x10
    path.write_bytes(raw)
    answer = life.session.acquire(tokens)
    assert (answer.status, answer.tokens) == (Status.PARTIAL_HIT, 48)
    assert answer.cause is not None
    assert (answer.cause.group, answer.cause.kind) == ("csa", ObjectKind.DISK_PREFIX)
    assert answer.cause.reason is Reason.CHECKSUM_MISMATCH
    assert life.wrong(answer, tokens) == []


def test_a_disk_that_cannot_be_opened_is_no_hit_and_nothing_else_stops(lives: Any) -> None:
    tokens, others = prompt(6), prompt(7)
    life = lives(1)
    life.store(tokens)
    assert life.swap_out(tokens).refused is None
    life.tell("inject disk_open_fails 1000000")
    answer = life.session.acquire(tokens)
    assert (answer.tokens, answer.hash_tokens) == (0, 64)
    assert answer.cause is not None
    assert answer.cause.reason is Reason.DISK_UNAVAILABLE
    life.store(others)
    held = life.session.acquire(others)
    assert (held.status, held.tokens) == (Status.FULL_HIT, 64)
    held.cancel()
    assert life.swap_out(others).refused is Reason.DISK_UNAVAILABLE
    assert life.status()["disk"]["state"] == "unavailable"
    life.tell("inject disk_open_fails 0")
    deadline = time.monotonic() + 20
    while life.status()["disk"]["state"] != "ok":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert life.session.acquire(tokens).tokens == 64


def test_a_tenant_at_its_quota_of_restores_waits_in_line_and_others_do_not(lives: Any) -> None:
    life = lives(1, limits={"tenants": {"small": {"restores_max": 1}}})
    prompts = {("large", 20), ("large", 21), ("small", 22), ("small", 23)}
    for tenant, number in prompts:
        life.store(prompt(number), tenant=tenant)
        assert life.swap_out(prompt(number), tenant=tenant).refused is None
    life.tell("inject disk_slow 1000")  # so that all of them are being restored at once

    def waited(tenant: str) -> int:
        """How many of a tenant's restores, asked for together, stood in line."""
        before = life.status()["counters"].get("restore_waits", 0)
        asked = [life.session.request(prompt(n), tenant=whose) for whose, n in prompts if whose == tenant]
        answers = life.client.call_many(asked, WireAnswer, 60.0)
        assert [(a.status, a.tokens) for a in answers] == [(Status.FULL_HIT, 64)] * 2, "each ends, at its quota or not"
        waits: int = life.status()["counters"].get("restore_waits", 0) - before
        return waits

    assert waited("large") == 0
    assert waited("small") == 1


def test_the_child_may_die_under_a_restore_and_the_reader_recomputes_then_hits(lives: Any) -> None:
    tokens = prompt(8)
    life = lives(1, disk={"bytes_per_s": 40_000.0})
    life.store(tokens)
    assert life.swap_out(tokens).refused is None
    answers: list[Answer] = []
    reader = threading.Thread(target=lambda: answers.append(life.session.acquire(tokens)))
    reader.start()
    deadline = time.monotonic() + 10
    while not life.status()["disk"]["outstanding"]:
        assert time.monotonic() < deadline
    children = Path(f"/proc/{life.process.pid}/task").glob("*/children")
    pids = {int(pid) for listed in children for pid in listed.read_text().split()}
    (child,) = [pid for pid in pids if b"transport.disk.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(child, signal.SIGKILL)
    reader.join(30)
    assert answers[0].tokens == 0
    assert answers[0].cause is not None
    assert answers[0].cause.reason in (Reason.DISK_UNAVAILABLE, Reason.RESTORE_FAILED)
    while life.status()["disk"]["state"] != "ok":
        assert time.monotonic() < deadline + 20
        time.sleep(0.05)
    again = life.session.acquire(tokens)
    assert again.tokens == 64
    assert life.wrong(again, tokens) == []


def test_what_cannot_make_its_deadline_is_answered_at_once(lives: Any) -> None:
    tokens = prompt(9)
    life = lives(1, disk={"bytes_per_s": 60_000.0})
    life.store(tokens)
    assert life.swap_out(tokens).refused is None
    taught = life.session.acquire(tokens)
    assert taught.tokens == 64
    taught.cancel()
    assert life.swap_out(tokens).refused is None
    began = time.monotonic()
    answer = life.session.acquire(tokens, deadline_s=0.2)
    assert time.monotonic() - began < 0.2
    assert (answer.tokens, answer.hash_tokens) == (0, 64)
    assert answer.cause is not None
    assert (answer.cause.reason, answer.cause.kind) == (Reason.DEADLINE_EXCEEDED, ObjectKind.DISK_PREFIX)
    assert life.session.acquire(tokens, deadline_s=30.0).tokens == 64


def test_a_full_cap_lets_the_least_used_extent_go(lives: Any, tmp_path: Path) -> None:
    life = lives(1, disk={"bytes_max": 400_000})
    prompts = [prompt(20 + n) for n in range(5)]
    for tokens in prompts:
        life.store(tokens)
        assert life.swap_out(tokens).refused is None
    sizes = [p.stat().st_size for p in (tmp_path / "disk").glob("test*/0.*/*.kvx")]
    assert sum(sizes) <= 400_000
    assert len(sizes) < len(prompts)
    assert life.session.acquire(prompts[-1]).tokens == 64
    assert life.session.acquire(prompts[0]).tokens == 0


def test_a_prefetched_prefix_is_in_memory_when_it_is_asked_for(lives: Any) -> None:
    tokens = prompt(10)
    life = lives(1)
    life.store(tokens)
    assert life.swap_out(tokens).refused is None
    ahead = life.session.prefetch(tokens, by_s=10.0)
    assert (ahead.status, ahead.tokens, ahead.lease) == (Status.PENDING, 64, None)
    deadline = time.monotonic() + 10
    while (found := life.session.acquire(tokens, wait_s=0.0)).status is not Status.FULL_HIT:
        assert time.monotonic() < deadline
    assert life.wrong(found, tokens) == []
    assert life.status()["pinned_slots"] == len(
        {s for v in ("csa", "idx", "tail", "swa") for s in life.slots(found, v)}
    )


def test_a_parked_request_resumes_from_disk_with_its_age(lives: Any) -> None:
    tokens = prompt(11)
    life = lives(1)
    life.store(tokens)
    held = life.session.acquire(tokens)
    assert held.lease is not None
    before = {p["group"]: p["free"] for p in life.status()["pools"]}
    parked = life.session.park(held.lease)
    assert parked.refused is None
    after = {p["group"]: p["free"] for p in life.status()["pools"]}
    assert after["csa"] == before["csa"] + 4
    assert life.status()["pinned_slots"] == 0
    resumed = life.session.acquire(tokens, parked=parked)
    assert (resumed.status, resumed.tokens) == (Status.FULL_HIT, 64)
    assert life.wrong(resumed, tokens) == []


def test_a_restore_called_off_gives_its_slots_back(lives: Any) -> None:
    tokens, others = prompt(12), prompt(13)
    life = lives(1, disk={"bytes_per_s": 30_000.0})
    for stored in (tokens, others):
        life.store(stored)
        assert life.swap_out(stored).refused is None
    free = {p["group"]: p["free"] for p in life.status()["pools"]}
    pending = [life.session.acquire(stored, wait_s=0.0) for stored in (tokens, others)]
    assert [p.status for p in pending] == [Status.PENDING] * 2
    for answer in pending:
        answer.cancel()
    deadline = time.monotonic() + 20
    while life.status()["disk"]["restoring"] or life.status()["disk"]["restores_waiting"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pools = life.status()["pools"]
    assert all(p["free"] + p["evictable"] >= free[p["group"]] for p in pools)
    assert life.status()["counters"]["acquires_cancelled"] >= 1


def test_a_disk_spec_names_what_is_wrong_with_it() -> None:
    def refused(**disk: Any) -> str:
        with pytest.raises(SpecError) as told:
            FabricSpec.load({"model": MODEL, "disk": disk})
        return str(told.value)

    assert "disk.path" in refused(path="relative/folder")
    assert "disk.codec" in refused(path="/x", codec="gzip")
    assert "disk.restore_limits" in refused(path="/x", restore_limits={"no_kind": {}})
    assert FabricSpec.load({"model": MODEL, "disk": {"path": "/x"}}).disk is not None
    assert FabricSpec.load({"model": MODEL}).disk is None
