"""How a fabric's holders are called."""

from __future__ import annotations


def holder_address(node: str, place: int) -> str:
    """The address of the holder at ``place`` of a node, by its Ray id."""
    return f"holder:{node[:16]}:{place}"


def place_of(address: str) -> int:
    """The place of a holder on its node, by its address."""
    return int(address.rpartition(":")[2])
