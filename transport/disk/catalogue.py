"""The catalogue of one disk folder: which extent files there should be, and which are on their way out.

SQLite in WAL mode. Every change that must survive a crash of the process is committed before the
file operation it announces (``begin`` before a file is written, ``doom`` before one is unlinked) or
after the one it records (``stands`` after the rename). What the last moments before a power cut
lost, reconciling with the files brings back: the catalogue never is the only witness.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

FILE = "catalogue.sqlite"
SCHEMA = 1


class Stage(StrEnum):
    """Where a file is in its life."""

    WRITING = "writing"
    STANDS = "stands"
    DOOMED = "doomed"


@dataclass(frozen=True, slots=True)
class Row:
    """One extent file. ``number`` grows with each file of a catalogue and is never reused."""

    number: int
    uid: bytes
    stage: Stage
    file_bytes: int


class Catalogue:
    """An open catalogue. Thread-safe; raises sqlite3.Error or OSError where the disk refuses."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = threading.Lock()
        self._db = sqlite3.connect(self.path, timeout=5.0, isolation_level=None, check_same_thread=False)
        try:
            self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
        db = self._db
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA journal_size_limit=1048576")
        schema = db.execute("PRAGMA user_version").fetchone()[0]
        if schema not in (0, SCHEMA):
            raise sqlite3.DatabaseError(f"schema {schema} found, this version reads {SCHEMA}")
        if db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("its pages do not fit together")
        db.execute(
            "CREATE TABLE IF NOT EXISTS extents (number INTEGER PRIMARY KEY AUTOINCREMENT, uid BLOB NOT NULL UNIQUE,"
            " stage TEXT NOT NULL, file_bytes INTEGER NOT NULL)"
        )
        db.execute(f"PRAGMA user_version={SCHEMA}")

    @classmethod
    def open(cls, folder: Path) -> tuple[Catalogue, str]:
        """The folder's catalogue, and why an earlier one was given up ("" where it was not).

        One that is damaged or of another schema is removed: the files themselves tell what they are.
        """
        try:
            return cls(folder), ""
        except sqlite3.OperationalError:
            raise  # the disk refuses: that is no damage
        except sqlite3.DatabaseError as error:
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    (folder / (FILE + suffix)).unlink()
            return cls(folder), str(error)

    def rows(self) -> list[Row]:
        with self._lock:
            found = self._db.execute("SELECT number, uid, stage, file_bytes FROM extents ORDER BY number").fetchall()
        return [Row(number, bytes(uid), Stage(stage), size) for number, uid, stage, size in found]

    def begin(self, uid: bytes, file_bytes: int) -> None:
        """A file of at most that size will be written."""
        self._put(uid, Stage.WRITING, file_bytes)

    def stands(self, uid: bytes, file_bytes: int) -> None:
        """The file is whole and under its name."""
        self._put(uid, Stage.STANDS, file_bytes)

    def doom(self, uid: bytes) -> None:
        """The file will be removed, whatever happens."""
        self._do("UPDATE extents SET stage=? WHERE uid=?", (Stage.DOOMED, uid))

    def forget(self, uid: bytes) -> None:
        """The file is gone."""
        self._do("DELETE FROM extents WHERE uid=?", (uid,))

    def _put(self, uid: bytes, stage: Stage, file_bytes: int) -> None:
        self._do(
            "INSERT INTO extents (uid, stage, file_bytes) VALUES (?, ?, ?)"
            " ON CONFLICT (uid) DO UPDATE SET stage=excluded.stage, file_bytes=excluded.file_bytes",
            (uid, stage, file_bytes),
        )

    def _do(self, statement: str, values: tuple[object, ...]) -> None:
        with self._lock:
            self._db.execute(statement, values)

    def close(self) -> None:
        with self._lock:
            self._db.close()
