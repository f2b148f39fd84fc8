"""Ways in which bytes go wrong, for tests and rehearsals."""

from __future__ import annotations


def damage(data: bytes, how: str) -> bytes:
    """Bytes of the same length that differ: one flipped (``flip``), the last lost (``truncate``), or nothing after the middle.

    Nothing can be done to no bytes.
    """
    if not data:
        return data
    if how == "flip":
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
    start = len(data) - 1 if how == "truncate" else len(data) // 2
    lost = bytes(len(data) - start)
    return data[:start] + (lost if data[start:] != lost else b"\xff" * len(lost))
