"""GPU pools: the same bytes and digests in either memory. What needs a GPU says so where it is skipped."""

from __future__ import annotations

import subprocess
import sys

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.arena import ArenaLayout, Checksum, Memory, PoolLayout, heap_arena
from kvfabric.fabric.kinds import ProtocolError, SpecError, Tier, WireError
from kvfabric.transport.digest import (
    GAMMA,
    LANE_KEYS,
    STEP_BYTES,
    checksum,
    copy_and_lanes_checksum,
    digester,
    lanes_checksum,
    lanes_end,
    mixed,
)
from kvfabric.transport.gpu import GpuPayloads, GpuPools
from kvfabric.transport.gpu_digest import gpu_checksums
from kvfabric.transport.payloads import HostPayloads, SlotCopy

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda sees none here")
ON = [pytest.param("cpu"), pytest.param("cuda", marks=needs_gpu)]
LAYOUT = ArenaLayout(
    [
        PoolLayout(0, 0, 3, 5000, Tier.G1, Memory.CUDA),
        PoolLayout(1, 0, 2, 96, Tier.G1, Memory.CUDA),
        PoolLayout(0, 0, 4, 5000, Tier.G2),
        PoolLayout(1, 0, 2, 96, Tier.G2),
    ],
    Checksum.LANES_128,
)


def noise(nbytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng([nbytes, seed]).integers(0, 256, nbytes, dtype=np.uint8)


def by_hand(content: bytes) -> bytes:
    """``lanes_128`` word by word, in Python's own integers."""
    padded = content + bytes(-len(content) % 8)
    sums = [0, 0]
    for place in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * place : 8 * place + 8], "little")
        for lane, key in enumerate(LANE_KEYS):
            keyed = (key + (place + 1) * GAMMA) % 2**64
            sums[lane] = (sums[lane] + mixed(keyed ^ word)) % 2**64
    return lanes_end((sums[0], sums[1]), len(content))


# --- digests -----------------------------------------------------------------------------------


def test_the_lanes_digest_of_known_bytes_is_pinned() -> None:
    assert lanes_checksum(np.arange(100, dtype=np.uint8)).hex() == "b3079a0ace589d13be881b9c3f9d03b3"
    assert lanes_checksum(np.zeros(0, dtype=np.uint8)).hex() == "afcd1d7b39a820e2afcd1d7b39a820e2"


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 96, 4096, 5000, STEP_BYTES - 1, STEP_BYTES + 5, 3 * STEP_BYTES])
def test_a_torch_kernel_numpy_and_plain_integers_digest_alike(nbytes: int, device: str) -> None:
    content = noise(nbytes)
    expected = lanes_checksum(content)
    assert gpu_checksums([torch.from_numpy(content).to(device)]) == [expected]
    if nbytes <= 5000:
        assert by_hand(content.tobytes()) == expected
    target = np.empty_like(content)
    assert copy_and_lanes_checksum(target, content) == expected
    assert np.array_equal(target, content)


@pytest.mark.parametrize("device", ON)
def test_parts_of_a_long_tensor_make_one_digest(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = noise(50_003)
    monkeypatch.setattr("kvfabric.transport.gpu_digest.PART_WORDS", 1000)
    assert gpu_checksums([torch.from_numpy(content).to(device)]) == [lanes_checksum(content)]


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_change_of_one_byte_and_any_swap_of_words_changes_both_lanes(content: bytes, data: st.DataObject) -> None:
    before = lanes_checksum(np.frombuffer(content, dtype=np.uint8))
    place = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= data.draw(st.integers(1, 255))
    after = lanes_checksum(np.frombuffer(bytes(changed), dtype=np.uint8))
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]
    words = [content[i : i + 8] for i in range(0, len(content) // 8 * 8, 8)]
    if len(set(words)) > 1:
        one = data.draw(st.integers(0, len(words) - 1))
        other = next(i for i, word in enumerate(words) if word != words[one])
        swapped = list(words)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        rest = content[8 * len(words) :]
        swapped_sum = lanes_checksum(np.frombuffer(b"".join(swapped) + rest, dtype=np.uint8))
        assert swapped_sum[:8] != before[:8]
        assert swapped_sum[8:] != before[8:]


def test_zeros_of_different_lengths_differ() -> None:
    assert len({lanes_checksum(np.zeros(n, dtype=np.uint8)) for n in range(40)}) == 40


def test_a_layout_names_how_its_payload_is_digested() -> None:
    content = noise(64)
    assert digester(Checksum.XXH3_128).checksum(content) == checksum(content)
    assert digester(Checksum.LANES_128).checksum(content) == lanes_checksum(content)
    assert ArenaLayout.from_plain(LAYOUT.to_plain()).checksum is Checksum.LANES_128
    rows = LAYOUT.to_plain()
    mixed_rows = [*rows[:1], [*rows[1][:6], "xxh3_128"], *rows[2:]]
    with pytest.raises(WireError, match="arena layout"):
        ArenaLayout.from_plain(mixed_rows)


# --- where slots lie ---------------------------------------------------------------------------


def test_gpu_pools_take_no_host_memory_but_their_headers() -> None:
    host_only = ArenaLayout([*LAYOUT.pools[2:]])
    assert LAYOUT.size_bytes == host_only.size_bytes  # both have their headers in one page
    assert LAYOUT.cuda_bytes == 3 * 8192 + 2 * 4096
    assert [LAYOUT.offset_of(slot) for slot in (0, 1, 3)] == [0, 8192, 3 * 8192]
    assert [LAYOUT.memory_of(slot) for slot in (0, 4, 5)] == [Memory.CUDA, Memory.CUDA, Memory.HOST]
    back = ArenaLayout.from_plain(LAYOUT.to_plain())
    assert (back.pools, back.size_bytes, back.cuda_bytes) == (LAYOUT.pools, LAYOUT.size_bytes, LAYOUT.cuda_bytes)


def test_an_arena_gives_no_view_of_what_it_does_not_hold() -> None:
    arena = heap_arena(LAYOUT, 1)
    assert arena.payload(5).shape == (5000,)
    with pytest.raises(ProtocolError, match="slot 0 lies in GPU memory"):
        arena.payload(0)
    assert arena.begin_write(0) == 1  # its header is here all the same


@pytest.fixture(params=ON)
def two(request: pytest.FixtureRequest) -> tuple[GpuPayloads, GpuPools]:
    """Payload in both memories; without a GPU a tensor in host memory stands where the GPU's would."""
    memory = torch.zeros(LAYOUT.cuda_bytes, dtype=torch.uint8, device=request.param)
    pools = GpuPools(LAYOUT, memory)
    return GpuPayloads(heap_arena(LAYOUT, 1), pools), pools


def test_bytes_go_from_any_memory_to_any_and_are_digested_where_they_land(two: tuple[GpuPayloads, GpuPools]) -> None:
    payloads, pools = two
    content = noise(5000)
    payloads.write(0, content)
    way = [SlotCopy(0, 1, 5000), SlotCopy(1, 5, 5000), SlotCopy(5, 6, 5000), SlotCopy(6, 2, 5000)]
    for copy in way:  # GPU to GPU, to host, to host, back to GPU
        assert payloads.copy([copy]) == [lanes_checksum(content)]
        assert np.array_equal(payloads.read(copy.target, 5000), content)
    assert np.array_equal(pools.slot(2).cpu().numpy(), content)
    pools.slot(2)[17] ^= 1
    assert payloads.checksums([(2, 5000), (6, 5000), (2, 10)]) == [
        lanes_checksum(payloads.read(2, 5000)),
        lanes_checksum(content),
        lanes_checksum(content[:10]),
    ]


def test_a_slot_is_written_within_its_bounds(two: tuple[GpuPayloads, GpuPools]) -> None:
    payloads, pools = two
    payloads.write(3, noise(96))
    assert int(pools.memory[: 3 * 8192].sum()) == 0
    assert int(pools.memory[3 * 8192 + 96 :].sum()) == 0
    with pytest.raises(WireError, match="slot 5"):
        pools.slot(5)


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(WireError, match="not the layout's"):
        GpuPools(LAYOUT, torch.zeros(LAYOUT.cuda_bytes - 1, dtype=torch.uint8))


def test_host_payloads_do_the_same_to_slots_in_host_memory() -> None:
    layout = ArenaLayout([PoolLayout(0, 0, 3, 5000)])
    payloads, content = HostPayloads(heap_arena(layout, 1)), noise(5000)
    payloads.write(0, content)
    assert payloads.copy([SlotCopy(0, 2, 4000)]) == [checksum(content[:4000])]
    assert payloads.checksums([(0, 5000), (2, 4000)]) == [checksum(content), checksum(content[:4000])]
    assert np.array_equal(payloads.read(2, 4000), content[:4000])


# --- from process to process -------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xc1", msgpack.packb([1]), msgpack.packb([1, "u", 1, 2, 3, 4, 5, 6, 7]), msgpack.packb([1, 2, *[b""] * 7])],
)
def test_what_is_no_export_is_refused_unopened(raw: bytes) -> None:
    with pytest.raises(WireError, match="not an export"):
        GpuPools.open(raw, LAYOUT)


def test_an_export_of_another_schema_or_of_a_gpu_not_seen_is_refused() -> None:
    fields = ["GPU-none", b"h", LAYOUT.cuda_bytes, 0, b"c", 0, b"e", True]
    with pytest.raises(WireError, match="schema 9"):
        GpuPools.open(msgpack.packb([9, *fields]), LAYOUT)
    with pytest.raises(WireError, match=r"does not see the GPU GPU-none"):
        GpuPools.open(msgpack.packb([1, *fields]), LAYOUT)


def test_a_gpu_that_is_not_there_is_a_spec_error_that_says_so() -> None:
    with pytest.raises(SpecError, match=r"device: cuda needs GPU 99"):
        GpuPools.allocate(LAYOUT, 99)


@needs_gpu
def test_a_layout_larger_than_the_gpu_is_refused_before_it_is_taken() -> None:
    huge = ArenaLayout([PoolLayout(0, 0, 1 << 20, 1 << 30, Tier.G1, Memory.CUDA)])
    with pytest.raises(SpecError, match="do not fit"):
        GpuPools.allocate(huge, 0)


OTHER = """
import sys
from kvfabric.fabric.arena import ArenaLayout
from kvfabric.transport.gpu import GpuPools
import msgpack
raw, rows = msgpack.unpackb(sys.stdin.buffer.read(), raw=False, use_list=False)
pools = GpuPools.open(raw, ArenaLayout.from_plain(rows))
sys.stdout.write(pools.checksums([(0, 5000)])[0].hex())
pools.slot(1)[:] = 7
pools.settle()
"""


@needs_gpu
def test_another_process_sees_the_same_gpu_memory() -> None:
    pools = GpuPools.allocate(LAYOUT, 0)
    payloads, content = GpuPayloads(heap_arena(LAYOUT, 1), pools), noise(5000)
    payloads.write(0, content)
    given_bytes = msgpack.packb([pools.export(), LAYOUT.to_plain()])
    done = subprocess.run([sys.executable, "-c", OTHER], input=given_bytes, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == lanes_checksum(content).hex()
    assert (payloads.read(1, 5000) == 7).all()
