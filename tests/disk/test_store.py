"""The extents of one folder: whole or not there, found again, judged block by block."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from kvfabric.fabric.kinds import Reason
from kvfabric.transport.disk.blocks import Cancelled
from kvfabric.transport.disk.codecs import Codec
from kvfabric.transport.disk.faults import DiskFault, DiskFaults
from kvfabric.transport.disk.folders import FolderBusy
from kvfabric.transport.disk.store import ExtentStore, NoRoom

from . import stage

KEYS = list(range(20))


def files(root: Path) -> list[Path]:
    return sorted((root / "0.0").glob("*.kvx"))


def temporary(root: Path) -> list[Path]:
    return sorted((root / "0.0").glob("*.tmp"))


def lost_bytes(root: Path) -> int:
    """Bytes of extent files and temporary ones that no row of the catalogue accounts for."""
    with sqlite3.connect(root / "0.0" / "catalogue.sqlite") as db:
        rows = dict(db.execute("SELECT uid, file_bytes FROM extents WHERE stage='stands'").fetchall())
    there = {bytes.fromhex(p.stem): p.stat().st_size for p in files(root)}
    return sum(size for uid, size in there.items() if rows.get(uid) != size) + sum(
        p.stat().st_size for p in temporary(root)
    )


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("packs", [True, False])
def test_what_is_written_is_read_again_bit_for_bit_by_a_later_life(tmp_path: Path, codec: Codec, packs: bool) -> None:
    arena = stage.arena()
    store, found = stage.open_store(tmp_path, arena)
    assert found.headers == []
    drafted = stage.draft(stage.uid_of(1), arena, KEYS, codec=codec, packs=packs)
    size = store.write(drafted, stage.at_once)
    assert store.used_bytes == size == files(tmp_path)[0].stat().st_size
    store.close()

    store, found = stage.open_store(tmp_path)
    assert [h.entries for h in found.headers] == [tuple(drafted.entries)]
    assert list(found.headers[0].passports.values()) == [stage.PASSPORT]
    got = stage.read_back(store, drafted.uid, list(drafted.entries))
    assert [g for g in got if g.refused is not None or g.wrong] == []
    for g, key in zip(got, KEYS, strict=True):
        right = stage.content(key, stage.LENGTHS[key % 4], packs=packs)
        assert np.array_equal(store.arena.payload(g.slot), right)
    packed = any(p.codec is codec for p in found.headers[0].places)
    assert packed == (codec is Codec.NONE or packs)
    store.close()


def test_a_blocks_padding_bears_nobody_elses_bytes(tmp_path: Path) -> None:
    arena = stage.arena()
    arena.bytes[arena.layout.pool_offset[0] :] = 0xAA
    store, _ = stage.open_store(tmp_path, arena)
    drafted = stage.draft(stage.uid_of(1), arena, [1, 2])
    store.write(drafted, stage.at_once)
    raw = files(tmp_path)[0].read_bytes()
    assert b"\xaa" * 64 not in raw[-3 * 4096 :]
    store.close()


@pytest.mark.faults
@pytest.mark.parametrize("fault", [DiskFault.OPEN_FAILS, DiskFault.FULL, DiskFault.READ_ONLY])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, fault: DiskFault) -> None:
    faults, arena = DiskFaults(), stage.arena()
    store, _ = stage.open_store(tmp_path, arena, faults=faults)
    faults.inject(fault, 1)
    with pytest.raises(OSError, match=r"Input/output error|No space|Read-only"):
        store.write(stage.draft(stage.uid_of(1), arena, KEYS), stage.at_once)
    assert files(tmp_path) == temporary(tmp_path) == []
    assert store.used_bytes == 0
    store.write(stage.draft(stage.uid_of(2), arena, KEYS), stage.at_once)
    assert len(files(tmp_path)) == 1
    store.close()


def test_a_write_called_off_half_way_leaves_nothing(tmp_path: Path) -> None:
    arena = stage.arena()
    store, _ = stage.open_store(tmp_path, arena)

    def call_off(_: int) -> None:
        assert len(temporary(tmp_path)) == 1
        raise Cancelled

    with pytest.raises(Cancelled):
        store.write(stage.draft(stage.uid_of(1), arena, KEYS), call_off)
    assert files(tmp_path) == temporary(tmp_path) == []
    assert store.used_bytes == 0
    store.close()


def test_the_byte_cap_is_kept_exactly(tmp_path: Path) -> None:
    arena = stage.arena()
    store, _ = stage.open_store(tmp_path, arena)
    size = store.write(stage.draft(stage.uid_of(1), arena, KEYS), stage.at_once)
    store.close()
    store, _ = stage.open_store(tmp_path, arena, bytes_max=2 * size)
    store.write(stage.draft(stage.uid_of(2), arena, KEYS), stage.at_once)
    assert store.used_bytes == 2 * size == sum(p.stat().st_size for p in files(tmp_path))
    with pytest.raises(NoRoom, match="cap"):
        store.write(stage.draft(stage.uid_of(3), arena, [0]), stage.at_once)
    store.delete(stage.uid_of(1))
    store.write(stage.draft(stage.uid_of(3), arena, KEYS), stage.at_once)
    assert store.used_bytes == 2 * size == sum(p.stat().st_size for p in files(tmp_path))
    store.close()


def test_the_free_space_floor_is_kept(tmp_path: Path) -> None:
    arena = stage.arena()
    store, _ = stage.open_store(tmp_path, arena)
    free = store.free_bytes()
    store.close()
    store, _ = stage.open_store(tmp_path, arena, free_floor_bytes=2 * free)
    with pytest.raises(NoRoom, match="free"):
        store.write(stage.draft(stage.uid_of(1), arena, KEYS), stage.at_once)
    store.close()
    store, _ = stage.open_store(tmp_path, arena, free_floor_bytes=free // 2)
    store.write(stage.draft(stage.uid_of(1), arena, KEYS), stage.at_once)
    store.close()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("how", "refused"),
    [
        (DiskFault.FLIPPED, None),
        (DiskFault.SHORT_READ, None),
        (DiskFault.READ_ERROR, Reason.RESTORE_FAILED),
        (DiskFault.OPEN_FAILS, Reason.DISK_UNAVAILABLE),
    ],
)
def test_a_lying_or_failing_read_never_passes_for_the_stored_bytes(
    tmp_path: Path, how: DiskFault, refused: Reason | None
) -> None:
    faults, arena = DiskFaults(), stage.arena()
    store, _ = stage.open_store(tmp_path, arena, faults=faults)
    drafted = stage.draft(stage.uid_of(1), arena, KEYS)
    store.write(drafted, stage.at_once)
    faults.inject(how, 1)
    got = stage.read_back(store, drafted.uid, list(drafted.entries))
    bad = [g for g in got if g.wrong or g.refused is not None]
    assert bad
    assert {g.refused for g in bad} == {refused}
    if refused is None:
        assert len(bad) == 1
        wrong = {g.slot: g.checksum for g in bad}
        assert all(wrong.get(g.slot) != e.checksum for g, e in zip(got, drafted.entries, strict=True) if g in bad)
    assert not any(g.wrong or g.refused for g in stage.read_back(store, drafted.uid, list(drafted.entries)))
    store.close()


@pytest.mark.faults
def test_a_torn_write_is_found_out_block_by_block(tmp_path: Path) -> None:
    faults, arena = DiskFaults(), stage.arena()
    store, _ = stage.open_store(tmp_path, arena, faults=faults)
    faults.inject(DiskFault.TORN_WRITE, 1)
    drafted = stage.draft(stage.uid_of(1), arena, KEYS)
    store.write(drafted, stage.at_once)
    store.close()
    store, found = stage.open_store(tmp_path)
    assert len(found.headers) == 1
    assert all(g.wrong for g in stage.read_back(store, drafted.uid, list(drafted.entries)))
    store.close()


@pytest.mark.faults
def test_a_flipped_or_missing_byte_on_disk_condemns_its_own_block_only(tmp_path: Path) -> None:
    arena = stage.arena()
    store, found = stage.open_store(tmp_path, arena)
    drafted = stage.draft(stage.uid_of(1), arena, KEYS)
    store.write(drafted, stage.at_once)
    path = files(tmp_path)[0]
    store.close()
    store, found = stage.open_store(tmp_path)
    place = found.headers[0].places[7]
    with path.open("r+b") as file:
        file.seek(place.offset + place.length // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    last = found.headers[0].places[-1]
    os.truncate(path, last.offset + last.length - 1)
    got = stage.read_back(store, drafted.uid, list(drafted.entries))
    assert [n for n, g in enumerate(got) if g.wrong] == [7, len(KEYS) - 1]
    store.close()


# --- reconciling -------------------------------------------------------------------------------


def two_extents(root: Path) -> None:
    arena = stage.arena()
    store, _ = stage.open_store(root, arena)
    store.write(stage.draft(stage.uid_of(1), arena, KEYS), stage.at_once)
    store.write(stage.draft(stage.uid_of(2), arena, [5, 6]), stage.at_once)
    store.close()


def reopened(root: Path) -> set[bytes]:
    store, found = stage.open_store(root)
    store.close()
    assert lost_bytes(root) == 0
    return {h.uid for h in found.headers}


def test_a_catalogue_that_is_gone_or_rubbish_is_made_again_from_the_files(tmp_path: Path) -> None:
    two_extents(tmp_path)
    both = {stage.uid_of(1), stage.uid_of(2)}
    folder = tmp_path / "0.0"
    (folder / "catalogue.sqlite").write_bytes(b"rubbish" * 1000)
    assert reopened(tmp_path) == both
    (folder / "catalogue.sqlite").unlink()
    assert reopened(tmp_path) == both


def test_rows_without_files_go_and_files_without_rows_are_kept_if_they_verify(tmp_path: Path) -> None:
    two_extents(tmp_path)
    folder = tmp_path / "0.0"
    with sqlite3.connect(folder / "catalogue.sqlite") as db:
        db.execute("DELETE FROM extents WHERE uid=?", (stage.uid_of(2),))
    (folder / f"{stage.uid_of(1).hex()}.kvx").unlink()
    assert reopened(tmp_path) == {stage.uid_of(2)}


def test_temporary_files_and_damaged_headers_go_and_strangers_files_stay(tmp_path: Path) -> None:
    two_extents(tmp_path)
    folder = tmp_path / "0.0"
    (folder / f"{stage.uid_of(9).hex()}.tmp").write_bytes(b"half")
    (folder / f"{stage.uid_of(8).hex()}.kvx").write_bytes(b"no header" * 1000)
    (folder / f"{stage.uid_of(7).hex()}.kvx").write_bytes((folder / f"{stage.uid_of(1).hex()}.kvx").read_bytes())
    (folder / "notes.txt").write_text("mine")
    with (folder / f"{stage.uid_of(2).hex()}.kvx").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\x00\xff")
    assert reopened(tmp_path) == {stage.uid_of(1)}
    assert [p.name for p in files(tmp_path)] == [f"{stage.uid_of(1).hex()}.kvx"]
    assert temporary(tmp_path) == []
    assert (folder / "notes.txt").read_text() == "mine"


def test_what_was_doomed_before_a_crash_goes_and_its_successor_stays(tmp_path: Path) -> None:
    """The same content written again has a name of its own, so no clean-up can meet it."""
    two_extents(tmp_path)
    with sqlite3.connect(tmp_path / "0.0" / "catalogue.sqlite") as db:
        db.execute("UPDATE extents SET stage='doomed' WHERE uid=?", (stage.uid_of(1),))
    arena = stage.arena()
    store, found = stage.open_store(tmp_path, arena)
    assert found.doomed == 1
    successor = stage.draft(stage.uid_of(3), arena, KEYS)
    store.write(successor, stage.at_once)
    store.delete(stage.uid_of(1))
    assert not any(g.wrong or g.refused for g in stage.read_back(store, successor.uid, list(successor.entries)))
    store.close()
    assert reopened(tmp_path) == {stage.uid_of(2), stage.uid_of(3)}


# --- folders -----------------------------------------------------------------------------------


def test_one_process_at_a_time_has_a_folder_and_a_later_life_gets_it_back(tmp_path: Path) -> None:
    first, _ = stage.open_store(tmp_path)
    with pytest.raises(FolderBusy):
        stage.open_store(tmp_path)
    other, _ = ExtentStore.open(tmp_path, "0", "another node", stage.arena(), bytes_max=1 << 30, free_floor_bytes=0)
    assert other.folder.path != first.folder.path
    mine = first.folder.path
    first.close()
    again, _ = stage.open_store(tmp_path)
    assert again.folder.path == mine
    again.close()
    other.close()


def test_a_node_under_a_new_name_takes_over_the_folder_that_nobody_uses(tmp_path: Path) -> None:
    two_extents(tmp_path)
    store, found = ExtentStore.open(tmp_path, "0", "renamed", stage.arena(), bytes_max=1 << 30, free_floor_bytes=0)
    assert len(found.headers) == 2
    store.close()


def test_holders_of_one_node_have_folders_of_their_own(tmp_path: Path) -> None:
    one, _ = stage.open_store(tmp_path)
    two, _ = ExtentStore.open(tmp_path, "1", "node", stage.arena(), bytes_max=1 << 30, free_floor_bytes=0)
    assert one.folder.path != two.folder.path
    one.close()
    two.close()
