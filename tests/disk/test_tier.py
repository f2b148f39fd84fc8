"""The tier with its child process: faults are states with a reason, and it heals when the disk does."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfabric.fabric.effects import DeleteExtent, DiskFound, DiskLost, DiskRead, DiskState, DiskWritten
from kvfabric.fabric.kinds import Reason
from kvfabric.transport.disk.faults import DiskFault

from .stage import Stage

KEYS = list(range(12))
pytestmark = pytest.mark.faults


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 90.0))


def extents(root: Path) -> list[Path]:
    return sorted(root.glob("0.*/*.kvx"))


def test_what_is_written_is_restored_and_found_by_a_later_life(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path, codec="zstd") as one:
            assert (await one.write(7, KEYS)).refused is None
            assert all(one.right(KEYS, await one.read(7, KEYS)))
            assert one.tier.status()["state"] == "ok"
        async with Stage(tmp_path) as two:
            found = await two.event(DiskFound)
            assert [entry.position for _, _, entry in found.entries] == KEYS
            assert await two.event(DiskState) == DiskState(None, None)
            number = found.entries[0][0]
            assert all(two.right(KEYS, await two.read(number, KEYS)))
            two.tier.delete(DeleteExtent(number))
            assert (await two.read(number, KEYS)).restored[0].refused is Reason.RESTORE_FAILED
        assert extents(tmp_path) == []

    run(story)


def test_a_child_that_is_killed_refuses_what_it_owed_and_another_serves_what_stood(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path, bytes_per_s=100_000.0) as one:
            assert (await one.write(1, KEYS)).refused is None
            assert await one.event(DiskState) == DiskState(None, None)
            first = one.tier.child_pid
            assert first is not None
            token, _ = one.post_write(2, KEYS)
            reading = one.post_read(1, KEYS)
            os.kill(first, signal.SIGKILL)
            assert (await one.event(DiskState)).refused is Reason.DISK_UNAVAILABLE
            assert (await one.event(DiskWritten, lambda e: e.token == token)).refused is Reason.DISK_UNAVAILABLE
            read = await one.event(DiskRead, lambda e: e.token == reading)
            assert {r.refused for r in read.restored} == {Reason.DISK_UNAVAILABLE}
            assert await one.event(DiskState) == DiskState(None, None)
            assert one.tier.child_pid not in (None, first)
            assert not any(isinstance(e, DiskFound | DiskLost) for e in one.events)
            assert all(one.right(KEYS, await one.read(1, KEYS)))
            assert one.tier.status()["restarts"] == 1

    run(story)


def test_a_child_ends_with_its_holder_whatever_it_does(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path, bytes_per_s=1.0) as one:
            pid = one.tier.child_pid
            assert pid is not None
            one.post_write(1, KEYS)
            one.post_write(2, KEYS)
            assert one.tier._child is not None
            for task in one.tier._tasks:  # so that nobody on this side ends it
                task.cancel()
            await asyncio.gather(*one.tier._tasks, return_exceptions=True)
            one.tier._child.channel.shutdown(socket.SHUT_RDWR)
            assert await asyncio.wait_for(asyncio.to_thread(one.tier._child.process.wait), 10.0) == 0

    run(story)


@pytest.mark.parametrize(
    ("fault", "state", "reason", "writes_only"),
    [
        (DiskFault.OPEN_FAILS, "unavailable", Reason.DISK_UNAVAILABLE, False),
        (DiskFault.READ_ONLY, "read_only", Reason.DISK_UNAVAILABLE, True),
    ],
)
def test_a_disk_that_fails_is_a_state_with_a_reason_and_heals(
    tmp_path: Path, fault: DiskFault, state: str, reason: Reason, writes_only: bool
) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as one:
            assert (await one.write(1, KEYS)).refused is None
            await one.event(DiskState)
            one.tier.inject(fault, 10_000)
            assert (await one.write(2, KEYS)).refused is reason
            told = await one.event(DiskState)
            assert told == DiskState(None if writes_only else reason, reason)
            status = await one.state(state)
            assert status["reason"] == reason
            assert status["detail"]
            read = await one.read(1, KEYS)
            assert all(one.right(KEYS, read)) if writes_only else {r.refused for r in read.restored} == {reason}
            one.tier.inject(fault, 0)
            assert await one.event(DiskState) == DiskState(None, None)
            assert (await one.write(3, KEYS)).refused is None
            assert all(one.right(KEYS, await one.read(1, KEYS)))

    run(story)


@pytest.mark.parametrize("fault", [DiskFault.OPEN_FAILS, DiskFault.FULL, DiskFault.READ_ONLY])
def test_one_failure_that_the_disk_does_not_confirm_is_that_operations_alone(tmp_path: Path, fault: DiskFault) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as one:
            await one.event(DiskState)
            one.tier.inject(fault, 1)
            wrote = await one.write(1, KEYS)
            assert wrote.refused is (Reason.DISK_FULL if fault is DiskFault.FULL else Reason.DISK_UNAVAILABLE)
            assert (await one.write(2, KEYS)).refused is None
            assert not any(isinstance(e, DiskState) for e in one.events)

    run(story)


def test_the_free_space_floor_refuses_writing_and_lets_reading_go_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as one:
            assert (await one.write(1, KEYS)).refused is None
        free = shutil.disk_usage(tmp_path).free
        async with Stage(tmp_path, free_floor_bytes=2 * free) as two:
            number = (await two.event(DiskFound)).entries[0][0]
            status = await two.state("full")
            assert status["reason"] is Reason.DISK_FULL
            assert (await two.write(9, KEYS)).refused is Reason.DISK_FULL
            assert all(two.right(KEYS, await two.read(number, KEYS)))

    run(story)


def test_a_disk_that_lies_is_left_alone_until_it_tells_the_truth(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as one:
            for extent in range(4):
                assert (await one.write(extent, KEYS)).refused is None
            await one.event(DiskState)
            assert all(one.right(KEYS, await one.read(0, KEYS)))
            for path in extents(tmp_path):
                size = path.stat().st_size
                os.truncate(path, 4096)
                os.truncate(path, size)
            one.tier.inject(DiskFault.FLIPPED, 10_000)
            wrong = 0
            for extent in range(4):
                read = await one.read(extent, KEYS)
                right = one.right(KEYS, read)
                wrong += right.count(False)
                if read.restored[0].refused is Reason.DISK_UNAVAILABLE:
                    break
            status = await one.state("lying")
            assert status["reason"] is Reason.DISK_UNAVAILABLE
            assert status["wrong_blocks"] >= 16
            one.tier.inject(DiskFault.FLIPPED, 0)
            await one.state("ok")
            assert (await one.write(9, KEYS)).refused is None
            assert all(one.right(KEYS, await one.read(9, KEYS)))

    run(story)


def test_a_slow_disk_is_told_and_no_slot_is_given_back_before_it_answered(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as one:
            assert (await one.write(1, KEYS)).refused is None
            one.tier.inject(DiskFault.SLOW, 1)
            began = time.monotonic()
            read = await one.read(1, KEYS)
            assert time.monotonic() - began >= 0.25
            assert all(one.right(KEYS, read))

    run(story)


def test_a_disk_that_does_not_answer_is_called_slow_in_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvfabric.transport.disk import driver

    monkeypatch.setattr(driver, "SLOW_S", 0.2)
    monkeypatch.setattr(driver, "WATCH_S", 0.05)

    async def story() -> None:
        async with Stage(tmp_path, bytes_per_s=50_000.0) as one:
            one.post_write(1, KEYS)
            token, _ = one.post_write(2, KEYS)
            assert (await one.state("slow"))["reason"] is None
            assert (await one.event(DiskWritten, lambda e: e.token == token)).refused is None
            await one.state("ok")

    run(story)


def test_a_child_that_hangs_is_ended_and_what_it_owed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvfabric.transport.disk import driver

    monkeypatch.setattr(driver, "HUNG_S", 0.3)
    monkeypatch.setattr(driver, "WATCH_S", 0.05)

    async def story() -> None:
        async with Stage(tmp_path) as one:
            await one.event(DiskState)
            pid = one.tier.child_pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            token, _ = one.post_write(1, KEYS)
            assert (await one.event(DiskWritten, lambda e: e.token == token)).refused is Reason.DISK_UNAVAILABLE
            monkeypatch.setattr(driver, "HUNG_S", 60.0)
            await one.state("ok")
            assert (await one.write(2, KEYS)).refused is None

    run(story)


def test_a_folder_that_vanishes_is_lost_and_a_fresh_one_is_used(tmp_path: Path) -> None:
    async def story() -> None:
        root = tmp_path / "mount"
        async with Stage(root) as one:
            assert (await one.write(1, KEYS)).refused is None
            assert await one.event(DiskState) == DiskState(None, None)
            root.rename(tmp_path / "elsewhere")
            assert (await one.event(DiskState)).refused is Reason.DISK_UNAVAILABLE
            assert await one.event(DiskLost) == DiskLost((1,))
            assert await one.event(DiskState) == DiskState(None, None)
            assert (await one.write(2, KEYS)).refused is None
            assert all(one.right(KEYS, await one.read(2, KEYS)))
            assert len(extents(root)) == 1

    run(story)


def test_a_folder_that_comes_back_brings_its_extents(tmp_path: Path) -> None:
    async def story() -> None:
        root, away = tmp_path / "mount", tmp_path / "away"
        async with Stage(root) as one:
            assert (await one.write(1, KEYS)).refused is None
            await one.event(DiskState)
            root.rename(away)
            root.write_text("not a folder")
            status = await one.state("vanished", "unavailable")
            assert status["reason"] is Reason.DISK_UNAVAILABLE
            root.unlink()
            away.rename(root)
            await one.state("ok")
            assert not any(isinstance(e, DiskLost) for e in one.events)
            assert all(one.right(KEYS, await one.read(1, KEYS)))

    run(story)


def test_a_file_that_was_removed_behind_the_tiers_back_is_told_as_lost(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as one:
            assert (await one.write(1, KEYS)).refused is None
            assert (await one.write(2, KEYS)).refused is None
            before = set(extents(tmp_path))
            assert (await one.write(3, KEYS)).refused is None
            (third,) = set(extents(tmp_path)) - before
            third.unlink()
            assert {r.refused for r in (await one.read(3, KEYS)).restored} == {Reason.RESTORE_FAILED}
            assert await one.event(DiskLost) == DiskLost((3,))
            assert all(one.right(KEYS, await one.read(2, KEYS)))

    run(story)


def test_reads_and_writes_together_keep_the_byte_budget_and_reads_go_first(tmp_path: Path) -> None:
    async def story() -> None:
        rate = 200_000.0
        async with Stage(tmp_path, bytes_per_s=rate) as one:
            assert (await one.write(1, KEYS)).refused is None
            began = time.monotonic()
            writes = [one.post_write(10 + n, KEYS)[0] for n in range(6)]
            reading = one.post_read(1, KEYS)
            read = await one.event(DiskRead, lambda e: e.token == reading)
            assert all(one.right(KEYS, read))
            assert sum(isinstance(e, DiskWritten) for e in one.events) <= 3
            for token in writes:
                assert (await one.event(DiskWritten, lambda e, t=token: e.token == t)).refused is None  # type: ignore[misc]
            moved = one.tier.status()["written_bytes"] * 6 / 7 + one.tier.status()["read_bytes"]
            assert moved / (time.monotonic() - began) <= 1.35 * rate

    run(story)


def test_a_job_called_off_is_answered_and_leaves_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path, bytes_per_s=1000.0) as one:
            tokens = [one.post_write(n, KEYS)[0] for n in range(5)]
            for token in tokens:
                one.tier.cancel(token)
            for token in tokens:
                wrote = await one.event(DiskWritten, lambda e, t=token: e.token == t)  # type: ignore[misc]
                assert wrote.refused in (None, Reason.DISK_UNAVAILABLE)
            assert one.tier.status()["outstanding"] == 0
            written = sum(1 for _ in extents(tmp_path))
            assert written <= 1

    run(story)
    assert list(tmp_path.glob("0.*/*.tmp")) == []


# --- real file systems -------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mount], capture_output=True)
    if made.returncode:
        pytest.skip("mounting needs privileges")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def test_a_real_disk_that_fills_up_refuses_writing_and_heals_when_there_is_room(small_disk: Path) -> None:
    async def story() -> None:
        async with Stage(small_disk, free_floor_bytes=256 * 1024) as one:
            assert (await one.write(1, KEYS)).refused is None
            ballast = small_disk / "ballast"
            ballast.write_bytes(bytes(3_500_000))
            wrote: Any = None
            for extent in range(2, 40):
                wrote = await one.write(extent, KEYS)
                if wrote.refused is not None:
                    break
            assert wrote.refused is Reason.DISK_FULL
            await one.state("full")
            assert all(one.right(KEYS, await one.read(1, KEYS)))
            ballast.unlink()
            await one.state("ok")
            assert (await one.write(99, KEYS)).refused is None

    run(story)
