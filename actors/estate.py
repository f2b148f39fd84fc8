"""What outlives a supervisor: kept in Ray's internal KV, so that its successor goes on where it ended.

The secret lies there as openly as the arguments of any actor do: whoever may read Ray's control store may
run code on the cluster anyway.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Any

import msgpack

from ..fabric.kinds import WireError
from . import ray_api
from .addresses import prefix_of

SCHEMA = 1


@dataclass(slots=True)
class Estate:
    """One fabric as its supervisor was told to run it."""

    spec: str
    secret: bytes = field(repr=False)
    weights: str = ""
    known_weights: list[str] = field(default_factory=list)
    bypassed: bool = False
    directory_shards: int = 1
    drains: list[tuple[str, float, str, bool]] = field(default_factory=list)
    """(node, unix time of its end, why, whether its holders end then)"""

    def encode(self) -> bytes:
        return bytes(msgpack.packb([SCHEMA, {f.name: getattr(self, f.name) for f in fields(self)}]))

    @classmethod
    def decode(cls, raw: bytes) -> Estate:
        """Raises WireError for what another schema wrote. What a newer version kept besides is left out."""
        try:
            schema, plain = msgpack.unpackb(raw, raw=False)
            known: dict[str, Any] = dict(plain)
        except (ValueError, TypeError, msgpack.UnpackException):
            raise WireError("what a supervisor left: not a record") from None
        if schema != SCHEMA:
            raise WireError(f"what a supervisor left: schema {schema} found, this version reads {SCHEMA}")
        mine = {f.name for f in fields(cls)}
        estate = cls(**{name: value for name, value in known.items() if name in mine})
        estate.drains = [(str(n), float(at), str(why), bool(retire)) for n, at, why, retire in estate.drains]
        return estate


def key_of(fabric: str) -> str:
    """Where a fabric's estate lies."""
    return f"{prefix_of(fabric)}estate"


def inherit(fabric: str) -> Estate | None:
    """What an earlier supervisor of this fabric left; None where none ran, or it shut the fabric down."""
    raw = ray_api.kept(key_of(fabric))
    return None if raw is None else Estate.decode(raw)


def until_unix_s(within_s: float) -> float:
    """The unix time so many seconds from now: what a successor on another machine can read."""
    return time.time() + within_s


def left_s(until_unix_s: float) -> float:
    """Seconds until a unix time, 0 once it is past."""
    return max(until_unix_s - time.time(), 0.0)
