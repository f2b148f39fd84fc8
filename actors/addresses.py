"""How a fabric and its processes are called.

A process's name in Ray begins with its fabric's and a slash, which no fabric's name has: so no fabric's processes are
taken for another's, however their names begin or end. The name is a folder's on disk too.
"""

from __future__ import annotations

import re

from ..fabric.kinds import SpecError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def checked_name(fabric: str) -> str:
    """The name of a fabric. Raises SpecError for one that is none."""
    if not NAME.fullmatch(fabric):
        raise SpecError(
            f"name: {fabric!r} is not a letter or digit and up to 63 letters, digits, '.', '_' and '-' behind it"
        )
    return fabric


def prefix_of(fabric: str) -> str:
    """How the names of all processes of a fabric begin, and what it keeps in Ray's KV: theirs and nobody else's."""
    return f"{checked_name(fabric)}/"


def holder_address(node: str, place: int) -> str:
    """The address of the holder at ``place`` of a node, by its Ray id."""
    return f"holder:{node[:16]}:{place}"


def place_of(address: str) -> int:
    """The place of a holder on its node, by its address."""
    return int(address.rpartition(":")[2])


def actor_name(fabric: str, address: str, incarnation: int | None = None) -> str:
    """The name a process has in Ray. A life's number is part of it, so that lives never mix."""
    name = f"{prefix_of(fabric)}{address}"
    return name if incarnation is None else f"{name}/{incarnation}"
