"""Which folder of a disk is this holder's: one process at a time, the same one after a restart.

Under the path of the spec lies a folder a fabric, in it one a place of a holder on its node. A
node's name changes when its raylet is restarted, so the folder only remembers who used it last: a
holder prefers the one its node used, waits for it while another life still has it, and otherwise
takes over one that nobody uses.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

FOLDERS_MAX = 64
LOCK = "lock"
OWNER = "owner"


class FolderBusy(OSError):
    """Another process has the folder that is this holder's."""


@dataclass(slots=True)
class Folder:
    """A locked folder. ``handle`` is its open descriptor; closing it gives the folder up."""

    path: Path
    handle: int
    lock: int

    def moved(self) -> bool:
        """Whether the path no longer leads to the folder that was opened: unmounted, removed, replaced."""
        try:
            there, here = self.path.stat(), os.fstat(self.handle)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) or here.st_nlink == 0

    def close(self) -> None:
        os.close(self.handle)
        os.close(self.lock)


def take(root: Path, place: str, owner: str) -> Folder:
    """Lock the folder of one holder's place. Raises FolderBusy, or OSError where the disk refuses.

    ``root``: the fabric's folder; ``place``: which of the node's holders; ``owner``: the node.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    names = sorted(p.name for p in root.iterdir() if p.name.startswith(f"{place}.") and p.is_dir())
    owners = {name: _owner(root / name) for name in names}
    mine = next((name for name in names if owners[name] == owner), None)
    if mine is not None:
        found = _lock(root / mine, owner)
        if found is None:
            raise FolderBusy(f"{root / mine}: another life of this holder has it")
        return found
    fresh = [f"{place}.{number}" for number in range(FOLDERS_MAX)]
    for name in [*names, *(name for name in fresh if name not in owners)]:
        found = _lock(root / name, owner)
        if found is not None:
            return found
    raise FolderBusy(f"{root}: all {FOLDERS_MAX} folders are in use")


def _owner(path: Path) -> str:
    try:
        return (path / OWNER).read_text(encoding="utf-8")
    except OSError:
        return ""


def _lock(path: Path, owner: str) -> Folder | None:
    path.mkdir(exist_ok=True, mode=0o700)
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    if _owner(path) != owner:
        fresh = path / f"{OWNER}.tmp"
        with contextlib.suppress(OSError):  # a disk that can only be read still serves what it holds
            fresh.write_text(owner, encoding="utf-8")
            fresh.replace(path / OWNER)
    return Folder(path, handle, lock)
