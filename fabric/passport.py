"""The ABI passport: how a group's bytes are laid out, persisted with the bytes.

Two passports join when their layout fingerprints are equal or a declared transform leads from one
to the other, and when the alignment the bytes were written under is a multiple of the one their
reader needs. Not the engine's release number: an upgrade that keeps the ABI keeps the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from blake3 import blake3

from .kinds import Reason

FINGERPRINT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Abi:
    """What records and requests carry of a passport: its fingerprint and its byte alignment."""

    fingerprint: bytes = b"\x00" * FINGERPRINT_BYTES
    alignment_bytes: int = 1

    def __hash__(self) -> int:
        return hash(self.fingerprint)  # which bytes keep, once computed


@dataclass(frozen=True, slots=True)
class AbiPassport:
    """All that decides whether a kernel reads these bytes as they were meant.

    ``strides`` are bytes, ``token_alignment_tokens`` the tokens an object must be a multiple of,
    ``metadata`` names scales, padding and table entries, ``extent_format`` the form on disk.
    """

    engine: str = "any"
    kernel: str = "any"
    kernel_abi: int = 1
    layout: str = "rows"
    metadata: str = ""
    dtype: str = "uint8"
    byte_order: str = "little"
    rotary: str = ""
    strides: tuple[int, ...] = ()
    alignment_bytes: int = 1
    token_alignment_tokens: int = 1
    extent_format: str = "kvx1"
    shard: str = ""
    fields: tuple[str, ...] = field(default=())

    def layout_fingerprint(self) -> bytes:
        """8 bytes over every field but the byte alignment, which need not be equal but satisfied."""
        parts = [
            self.engine,
            self.kernel,
            str(self.kernel_abi),
            self.layout,
            self.metadata,
            self.dtype,
            self.byte_order,
            self.rotary,
            ",".join(map(str, self.strides)),
            str(self.token_alignment_tokens),
            self.extent_format,
            self.shard,
            *self.fields,
        ]
        raw = b"".join(len(p.encode()).to_bytes(4, "little") + p.encode() for p in parts)
        return blake3(raw, derive_key_context="kvfabric 2026 abi passport").digest(FINGERPRINT_BYTES)

    def abi(self) -> Abi:
        return Abi(self.layout_fingerprint(), self.alignment_bytes)


TRANSFORMS: frozenset[tuple[bytes, bytes]] = frozenset()
"""Declared transforms: (written fingerprint, read fingerprint). There are none."""


def abi_refusal(written: Abi, reader: Abi) -> Reason | None:
    """Why bytes written under one ABI may not be read under another; None if they may."""
    if written.fingerprint != reader.fingerprint and (written.fingerprint, reader.fingerprint) not in TRANSFORMS:
        return Reason.ABI_MISMATCH
    if written.alignment_bytes % reader.alignment_bytes:
        return Reason.MISALIGNED
    return None
