"""Pages are cut into blocks of host memory without a copy, and put together again."""

from __future__ import annotations

import numpy as np
import pytest

from kvfabric.engines.shared.parts import block_count, blocks_of, memory


@pytest.mark.parametrize("block_bytes", [1, 3, 7, 10, 16, 64])
@pytest.mark.parametrize("sizes", [[], [10], [4, 4, 4], [1, 9, 2, 30], [16, 16]])
def test_the_blocks_of_a_page_are_its_bytes_in_order(sizes: list[int], block_bytes: int) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint8)
    ends = np.cumsum(sizes, dtype=int)
    parts = [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    blocks = blocks_of(parts, block_bytes)
    assert len(blocks) == block_count(whole.nbytes, block_bytes)
    lengths = [sum(part.nbytes for part in block) for block in blocks]
    assert all(length == block_bytes for length in lengths[:-1])
    joined = [part for block in blocks for part in block]
    assert all(np.shares_memory(part, whole) for part in joined)
    assert np.array_equal(np.concatenate([np.zeros(0, np.uint8), *joined]), whole)


def test_memory_is_shared_not_copied() -> None:
    owner = np.zeros(32, dtype=np.uint8)
    memory(owner.ctypes.data + 8, 4)[:] = 7
    assert owner.tolist() == [0] * 8 + [7] * 4 + [0] * 20
