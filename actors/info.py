"""What a process learns of a fabric when it connects: the spec, the weights, who runs where."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from ..fabric import wire
from ..fabric.kinds import WireError
from ..fabric.messages import Member
from .spec import FabricSpec

INFO_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class FabricInfo:
    """One fabric as of now, as seen from ``node`` (the Ray node of who asks)."""

    name: str
    spec: FabricSpec
    weights: str
    members: tuple[Member, ...]
    node: str

    def encode(self) -> bytes:
        members = [wire.encode_plain(member) for member in self.members]
        plain = [INFO_SCHEMA, self.name, self.spec.model_dump_json(), self.weights, members]
        return bytes(msgpack.packb(plain))

    @classmethod
    def decode(cls, raw: bytes, node: str) -> FabricInfo:
        """Raises WireError for anything :meth:`encode` of a known schema did not make."""
        try:
            schema, name, spec, weights, members = msgpack.unpackb(raw, raw=False)
        except (ValueError, TypeError, msgpack.UnpackException):
            raise WireError("fabric info: not a record") from None
        if schema != INFO_SCHEMA:
            raise WireError(f"fabric info: schema {schema} found, this version reads {INFO_SCHEMA}")
        known = tuple(wire.decode_plain(Member, m) for m in members)
        return cls(name, FabricSpec.model_validate_json(spec), weights, known, node)
