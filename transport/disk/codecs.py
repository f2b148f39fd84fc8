"""How the bytes of a block are packed on disk. Digests are always of the unpacked bytes.

What lies on a disk is data from a stranger: the length that the index declares is checked against
the slot before anything is unpacked, and no codec unpacks more than that.
"""

from __future__ import annotations

from enum import IntEnum

import lz4.block
import zstandard

from ...fabric.arena import Bytes

ZSTD_LEVEL = 1
ZSTD_WINDOW_BYTES_MAX = 8 << 20


class Codec(IntEnum):
    """The packing of one block, as the number in the extent's index."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


CODECS = {"none": Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}


class CannotUnpack(ValueError):
    """Stored bytes are not what the codec packs, or would unpack to another length than declared."""


def pack(codec: Codec, content: Bytes) -> bytes:
    """The packed bytes; they may be longer than the content, which is then better kept plain."""
    if codec is Codec.LZ4:
        return bytes(lz4.block.compress(content.data, store_size=False))
    if codec is Codec.ZSTD:
        return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(content.data)
    return content.tobytes()


def unpack(codec: Codec, stored: Bytes, length: int) -> bytes:
    """Exactly ``length`` bytes. Raises CannotUnpack, having allocated no more than ``length``."""
    try:
        if codec is Codec.LZ4:
            unpacked = bytes(lz4.block.decompress(stored.data, uncompressed_size=length))
        elif codec is Codec.ZSTD:
            declared = zstandard.get_frame_parameters(stored.data).content_size
            if declared != length:
                raise CannotUnpack(f"{declared} bytes are declared in the frame, {length} in the index")
            unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
            unpacked = unpacker.decompress(stored.data, allow_extra_data=False)
        else:
            unpacked = stored.tobytes()
    except (zstandard.ZstdError, lz4.block.LZ4BlockError) as error:
        raise CannotUnpack(str(error)) from None
    if len(unpacked) != length:
        raise CannotUnpack(f"{len(unpacked)} bytes came out, {length} are declared")
    return unpacked
