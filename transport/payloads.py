"""The payload of an arena's slots, whichever memory it lies in.

Headers are always in host memory. What is done to payload is done here, and is over when a call
returns: only then may a header change. So a slot in GPU memory keeps the same promise as one beside its header.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..fabric.arena import Arena, Bytes
from .digest import digester


class SlotCopy(NamedTuple):
    """``length_bytes`` from the start of one slot to the start of another of the same arena."""

    source: int
    target: int
    length_bytes: int


class Payloads(Protocol):
    """What a holder does to the payload of its slots. Calls block and may come from any thread."""

    def copy(self, copies: Sequence[SlotCopy]) -> list[bytes]:
        """Copy slot to slot; the digests of what then lies in the targets, in order."""

    def checksums(self, slots: Sequence[tuple[int, int]]) -> list[bytes]:
        """The digests of the first bytes of slots (slot, length), in order."""

    def write(self, slot: int, payload: Bytes) -> None:
        """Put bytes at the start of a slot."""

    def read(self, slot: int, length: int) -> Bytes:
        """The first bytes of a slot, in host memory: a view where they lie there, else a copy."""


class HostPayloads:
    """:class:`Payloads` of an arena that lies in host memory as a whole."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._digester = digester(arena.layout.checksum)

    def copy(self, copies: Sequence[SlotCopy]) -> list[bytes]:
        payload, copied = self._arena.payload, self._digester.copy
        return [copied(payload(c.target)[: c.length_bytes], payload(c.source)[: c.length_bytes]) for c in copies]

    def checksums(self, slots: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self._digester.checksum(self._arena.payload(slot)[:length]) for slot, length in slots]

    def write(self, slot: int, payload: Bytes) -> None:
        np.copyto(self._arena.payload(slot)[: payload.nbytes], payload)

    def read(self, slot: int, length: int) -> Bytes:
        return self._arena.payload(slot)[:length]
