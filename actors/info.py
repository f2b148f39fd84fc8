"""What a process learns of a fabric when it connects: the spec, the weights, who runs where."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgpack

from ..fabric import wire
from ..fabric.identity import HASH_SCHEME, join_vector
from ..fabric.kinds import FabricError, WireError
from ..fabric.messages import Member
from ..fabric.model import ModelSpec
from .spec import FabricSpec

INFO_SCHEMA = 2
"""1: without the door's secret, members as wire schema 1 has them."""


@dataclass(frozen=True, slots=True)
class FabricInfo:
    """One fabric as of now, as seen from ``node`` (the Ray node of who asks)."""

    name: str
    spec: FabricSpec
    weights: str
    members: tuple[Member, ...]
    node: str
    door_secret: bytes = field(default=b"", repr=False)
    """What a holder's TCP door asks proof of; empty where the fabric is of an older schema."""

    def encode(self, schema: int = INFO_SCHEMA) -> bytes:
        """Bytes for another process that reads ``schema``, with this one's join vector. Raises WireError for another."""
        _check(schema)
        members = [wire.encode_plain(member, schema) for member in self.members]
        vector = join_vector(self.spec.model)
        plain = [schema, self.name, self.spec.text, self.weights, members, vector]
        return bytes(msgpack.packb(plain if schema == 1 else [*plain, self.door_secret]))

    @classmethod
    def decode(cls, raw: bytes, node: str) -> FabricInfo:
        """Raises WireError for anything :meth:`encode` of a known schema did not make.

        Raises FabricError where this process computes other digests than the fabric.
        """
        try:
            schema, name, spec, weights, members, vector, *more = msgpack.unpackb(raw, raw=False)
        except (ValueError, TypeError, msgpack.UnpackException):
            raise WireError("fabric info: not a record") from None
        _check(schema)
        known = tuple(wire.decode_plain(Member, m) for m in members)
        known_spec = FabricSpec.read(spec)
        check_vector(vector, known_spec.model, "this process")
        return cls(name, known_spec, weights, known, node, bytes(more[0]) if more else b"")


def _check(schema: int) -> None:
    if schema not in (INFO_SCHEMA - 1, INFO_SCHEMA):
        raise WireError(f"fabric info: schema {schema} found, this version reads {INFO_SCHEMA - 1}, {INFO_SCHEMA}")


def check_vector(vector: bytes, model: ModelSpec, who: str) -> None:
    """Refuse whoever computes other digests than this process: it would share wrongly or never.

    Raises FabricError that says so.
    """
    if vector != join_vector(model):
        raise FabricError(
            f"{who} computes other digests than the fabric it joins (scheme {HASH_SCHEME}): install the same kvfabric"
        )
