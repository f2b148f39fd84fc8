"""Damage to extents on a disk, done as a stranger would: to the file, behind the fabric's back."""

from __future__ import annotations

import os
from pathlib import Path

from ...fabric.kinds import WireError
from ...transport.damage import damage
from ...transport.disk.folders import OWNER
from ...transport.disk.format import PROLOGUE_BYTES, decode, index_bytes
from ...transport.disk.store import SUFFIX


def damage_extents(root: Path, owner: str, group: int, digest: bytes, how: str) -> int:
    """Damage every copy of an object in the extents of one node's holders; how many there were.

    ``root``: the fabric's folder on the disk; ``owner``: the node's Ray id.
    """
    found = 0
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        mark = folder / OWNER
        if mark.is_file() and mark.read_text(encoding="utf-8") == owner:
            found += sum(_damage(path, group, digest, how) for path in sorted(folder.glob(f"*{SUFFIX}")))
    return found


def _damage(path: Path, group: int, digest: bytes, how: str) -> int:
    found = 0
    with path.open("r+b") as file:
        size = path.stat().st_size
        try:
            front, _ = index_bytes(file.read(PROLOGUE_BYTES), size)
            file.seek(0)
            header = decode(file.read(front), size)
        except WireError:
            return 0  # nothing in it can be damaged further
        for entry, place in zip(header.entries, header.places, strict=True):
            if entry.group == group and entry.digest == digest:
                file.seek(place.offset)
                content = file.read(place.stored_bytes)
                file.seek(place.offset)
                file.write(damage(content, how))
                found += 1
        file.flush()
        os.fsync(file.fileno())
    return found
