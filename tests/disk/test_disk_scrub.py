"""The scrubber of the disk: what a disk lost is found before it is asked for, slowly and behind everything else."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from kvfabric.fabric.effects import DiskState, ExtentScrubbed, RemoteState, ScrubExtent
from kvfabric.fabric.kinds import ObjectKind, Reason, Status
from kvfabric.transport.digest import checksum
from kvfabric.transport.disk import format as extent_format
from kvfabric.transport.disk.faults import DiskFault

from .lives import Life, prompt
from .one_disk import BLOCK, BLOCKS, Disk
from .stage import LENGTHS, Stage, content

PROMPT_BYTES = 2 * BLOCKS * BLOCK


def scrubbing(**config: Any) -> Disk:
    return Disk(disk_scrub_bytes_per_s=PROMPT_BYTES, **config)


def extent_of(d: Disk) -> int:
    (extent,) = d.extents
    return extent


def found(d: Disk) -> int:
    return d.core.ctx.counters["disk_scrub_found"]


def asked(d: Disk, number: int) -> tuple[Status, int, Reason | None]:
    request = d.acquire(number)
    d.finish_all()
    answer = d.answer(request)
    assert answer is not None
    if answer.grant is not None:
        d.release(request)
    return answer.status, answer.tokens, None if answer.cause is None else answer.cause.reason


def test_a_flipped_bit_on_disk_is_found_before_it_is_asked_for_and_cuts_the_hit_there() -> None:
    d = scrubbing()
    d.on_disk(1)
    d.wait(10.0)
    assert (found(d), d.core.disk_scrubber.found.last) == (0, "")
    d.spoil(extent_of(d), 2)  # the third block of the history
    d.wait(10.0)
    scrub = d.core.disk_scrubber.found
    assert (found(d), scrub.wrong) == (1, 1)
    assert scrub.last == f"extent {extent_of(d)}, entry 2 (kv): checksum_mismatch"
    assert d.reads == []  # nobody had asked
    assert asked(d, 1) == (Status.PARTIAL_HIT, 32, Reason.CHECKSUM_MISMATCH)
    d.sound()


def test_without_the_scrubber_nobody_knows_until_it_is_asked_for() -> None:
    """The control."""
    d = Disk()
    d.on_disk(1)
    d.spoil(extent_of(d), 2)
    d.wait(10.0)
    assert (found(d), d.scrubs) == (0, [])
    assert asked(d, 1)[1] == 32


def test_a_wrong_copy_on_disk_is_given_up_where_memory_has_another() -> None:
    d = scrubbing()
    d.on_disk(1)
    assert asked(d, 1)[1] == 64  # in memory now, and on disk
    d.spoil(extent_of(d), 0)
    d.wait(10.0)
    assert found(d) == 1
    obj = next(d.core.ctx.books.find_all(d.objects(1)))
    assert (obj.on_disk, obj.bad) == (None, None)
    assert asked(d, 1) == (Status.FULL_HIT, 64, None)
    d.sound()


def test_a_wrong_extent_leaves_the_disk_where_the_store_has_it_too() -> None:
    d = scrubbing(remote=True)
    d.handle(RemoteState(None))
    d.on_disk(1)
    assert d.uploads == [extent_of(d)]
    d.spoil(extent_of(d), 5)
    d.wait(10.0)
    assert d.dropped == [extent_of(d)]
    request = d.acquire(1)
    assert all(read.remote for read in d.reads)
    assert len(d.reads) > 0
    assert d.answer(request) is None
    d.sound()


def test_the_rate_is_kept_and_every_extent_has_its_turn() -> None:
    d = scrubbing()
    d.on_disk(1, 2, 3)
    before = d.core.ctx.counters["disk_scrubbed_bytes"]
    d.wait(30.0)
    read = d.core.ctx.counters["disk_scrubbed_bytes"] - before
    assert 0.5 * 30 * PROMPT_BYTES <= read <= 31 * PROMPT_BYTES
    assert d.core.disk_scrubber.found.rounds >= 5
    assert {scrub.extent for scrub in d.scrubs} == set(d.extents)


def test_what_changed_while_it_was_read_says_nothing() -> None:
    d = scrubbing()
    d.on_disk(1)
    d.hold_scrubs = True
    d.wait(5.0)
    (scrub,) = d.scrubs  # one at a time, however long it takes
    d.core.ctx.books.forget(next(d.core.ctx.books.find_all(d.objects(1))), evicted=False)
    d.handle(ExtentScrubbed(scrub.token, tuple(bytes(16) for _ in scrub.entries)))
    assert found(d) == 2 * BLOCKS - 1


def test_a_disk_that_cannot_be_read_is_not_judged_and_tried_again() -> None:
    d = scrubbing()
    d.on_disk(1)
    d.handle(DiskState(Reason.DISK_UNAVAILABLE))
    kept, d.extents = d.extents, {}
    d.wait(5.0)
    assert (found(d), len(d.scrubs) > 1) == (0, True)
    d.handle(DiskState(None))
    d.extents = kept
    d.spoil(extent_of(d), 0)
    d.wait(5.0)
    assert found(d) == 1


# --- real files --------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_lies_in_the_file_is_what_is_told(tmp_path: Path, codec: str) -> None:
    async def main() -> None:
        async with Stage(tmp_path / "d", codec=codec) as stage:
            keys = list(range(9))
            assert (await stage.write(7, keys, packs=True)).refused is None
            right = [checksum(content(key, LENGTHS[key % len(LENGTHS)], packs=True)) for key in keys]

            async def scrub(token: int) -> tuple[bytes | None, ...]:
                stage.tier.scrub(ScrubExtent(token, 7, tuple(range(9)), 1))
                return (await stage.event(ExtentScrubbed, lambda e: e.token == token)).checksums

            assert list(await scrub(1001)) == right
            (path,) = (tmp_path / "d").glob("0*/*.kvx")
            raw = bytearray(path.read_bytes())
            place = extent_format.decode(bytes(raw), len(raw)).places[4]
            raw[place.offset + place.stored_bytes // 2] ^= 0x01
            path.write_bytes(raw)
            told = await scrub(1002)
            assert [n for n in range(9) if told[n] != right[n]] == [4]
            stage.tier.inject(DiskFault.READ_ERROR, 9)
            assert set(await scrub(1003)) == {None}
            stage.tier.inject(DiskFault.READ_ERROR, 0)
            path.unlink()
            assert await scrub(1004) == ()

    asyncio.run(main())


@pytest.mark.faults
def test_a_holder_says_in_its_status_what_its_scrubber_found(tmp_path: Path) -> None:
    tokens = prompt(31)
    life = Life({"path": str(tmp_path / "disk"), "free_floor_bytes": 0, "scrub_bytes_per_s": 1 << 20}, 1)
    try:
        life.store(tokens)
        assert life.swap_out(tokens).refused is None
        deadline = time.monotonic() + 20
        while life.status()["disk"]["scrub"]["rounds"] < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert life.status()["disk"]["scrub"]["wrong"] == 0
        (path,) = (tmp_path / "disk").glob("test*/0.*/*.kvx")
        raw = path.read_bytes()
        header = extent_format.decode(raw, len(raw))
        at = next(p for e, p in zip(header.entries, header.places, strict=True) if (e.group, e.position) == (0, 64))
        with path.open("r+b") as file:  # in place: a scrub may be reading
            file.seek(at.offset + 1234)
            file.write(bytes([raw[at.offset + 1234] ^ 0x10]))
        while (scrub := life.status()["disk"]["scrub"])["wrong"] < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert scrub["last"].endswith("(csa): checksum_mismatch")
        answer = life.session.acquire(tokens)
        assert (answer.status, answer.tokens) == (Status.PARTIAL_HIT, 48)
        assert answer.cause is not None
        assert (answer.cause.kind, answer.cause.reason) == (ObjectKind.DISK_PREFIX, Reason.CHECKSUM_MISMATCH)
        assert life.wrong(answer, tokens) == []
    finally:
        life.close()
