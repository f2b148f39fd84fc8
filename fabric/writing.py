"""What is worth writing to disk: the question a disk desk asks before it writes on its own account."""

from __future__ import annotations

from typing import Protocol


class DiskAdmission(Protocol):
    """Which objects may go to disk. May keep what it saw; bounded."""

    def admits(self, digest: bytes, uses: int) -> bool:
        """Whether an object that was used so often in this life of its slot (stored, leased) may be written."""
        ...

    def left(self, digest: bytes) -> None:
        """An object left memory without having been written."""
        ...
