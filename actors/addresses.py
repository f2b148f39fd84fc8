"""How a fabric's processes are called."""

from __future__ import annotations


def holder_address(node: str, place: int) -> str:
    """The address of the holder at ``place`` of a node, by its Ray id."""
    return f"holder:{node[:16]}:{place}"


def place_of(address: str) -> int:
    """The place of a holder on its node, by its address."""
    return int(address.rpartition(":")[2])


def actor_name(fabric: str, address: str, incarnation: int | None = None) -> str:
    """The name a process has in Ray. A life's number is part of it, so that lives never mix."""
    return f"{fabric}/{address}" if incarnation is None else f"{fabric}/{address}/{incarnation}"
