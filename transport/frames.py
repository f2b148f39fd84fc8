"""Frames of the control socket: 16 bytes of header, then an opaque payload (msgpack of a layer above).

::

    u32 payload length | u64 request id | u16 status | u16 descriptors | payload

all little endian. A reply bears its request's id, so requests may be pipelined and replies may overtake.
The decoder is the only reader of bytes from strangers: it holds at most one frame's worth beyond a read.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from ..fabric.kinds import WireError

HEADER = struct.Struct("<IQHH")
FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Longest payload either side accepts unless told otherwise."""
DESCRIPTORS_MAX = 16
"""Most file descriptors one reply carries."""


class FrameStatus(IntEnum):
    """What a frame is."""

    REQUEST = 0
    REPLY = 1
    FAILED = 2
    """The handler failed; the payload is one line of UTF-8."""
    TOLD = 3
    """A request that gets no reply."""

    @property
    def asks(self) -> bool:
        """Whether a client sends it, and not a server."""
        return self is FrameStatus.REQUEST or self is FrameStatus.TOLD


_STATUSES = tuple(FrameStatus)


class Frame(NamedTuple):
    """One frame as decoded. ``descriptors`` counts those that travel beside it."""

    request_id: int
    status: FrameStatus
    descriptors: int
    payload: bytes


def encode(request_id: int, status: FrameStatus, payload: bytes, descriptors: int = 0) -> bytes:
    """Header and payload as one bytes."""
    return HEADER.pack(len(payload), request_id, status, descriptors) + payload


class FrameDecoder:
    """Bytes in, frames out; raises WireError for what no peer of ours sends, and is then of no use."""

    def __init__(self, payload_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._kept = bytearray()
        self._needed = HEADER.size

    @property
    def kept_bytes(self) -> int:
        """What is held of a frame that is not whole yet."""
        return len(self._kept)

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Frames completed by ``data``, in order."""
        kept = self._kept
        if kept:
            kept += data
            if len(kept) < self._needed:
                return []
            with memoryview(kept) as view:
                frames, start = self._frames(view)
            del kept[:start]
            return frames
        frames, start = self._frames(data)
        kept += data[start:]
        return frames

    def _frames(self, data: bytes | memoryview) -> tuple[list[Frame], int]:
        """The whole frames in ``data``, and where the rest begins."""
        frames: list[Frame] = []
        start, available = 0, len(data)
        self._needed = HEADER.size
        while available - start >= HEADER.size:
            length, request_id, status, descriptors = HEADER.unpack_from(data, start)
            self._check(length, status, descriptors)
            begin = start + HEADER.size
            end = begin + length
            if end > available:
                self._needed = end - start
                break
            frames.append(Frame(request_id, _STATUSES[status], descriptors, bytes(data[begin:end])))
            start = end
        return frames, start

    def _check(self, length: int, status: int, descriptors: int) -> None:
        if length > self._payload_bytes_max:
            raise WireError(f"frame: {length} bytes announced, {self._payload_bytes_max} accepted")
        if status >= len(_STATUSES):
            raise WireError(f"frame: unknown status {status}")
        if descriptors > DESCRIPTORS_MAX:
            raise WireError(f"frame: {descriptors} descriptors announced, {DESCRIPTORS_MAX} accepted")
