"""A real holder whose readers' pools and host memory are two tiers of its arena: bytes go down, on and back unchanged."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvfabric.actors.spec import FabricSpec
from kvfabric.fabric.arena import Checksum, Memory
from kvfabric.fabric.kinds import ObjectKind, Reason, SpecError, Status, Tier

from .lives import MODEL, Life, content, prompt

SLOTS = {"csa": 8, "tail": 40, "idx": 8, "swa": 40}
"""Readers' slots: two prompts."""
HOST_SLOTS = {"csa": 4, "tail": 17, "idx": 4, "swa": 17}
"""Host slots: one prompt."""
TIERS: dict[str, Any] = {
    "slots": SLOTS,
    "memory_bytes": 1 << 20,
    "host_memory_bytes": 1 << 20,
    "host_slots": HOST_SLOTS,
}
OBJECTS = 4 + 4 + 17 + 17


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Any]:
    running: list[Life] = []
    disk = {"path": str(tmp_path / "disk"), "bytes_max": 1 << 28, "free_floor_bytes": 0}

    def start(incarnation: int = 1, **more: Any) -> Life:
        life = Life(disk, incarnation, **TIERS, **more)
        running.append(life)
        return life

    yield start
    for life in running:
        life.close()


def in_host_memory(life: Life) -> int:
    return int(life.status()["host_memory"]["objects"])


def flip_in_arena(life: Life, right: np.ndarray) -> int:
    """Turn a byte of every place in the holder's arena that holds these bytes; how many there were."""
    folder = Path(f"/proc/{life.process.pid}/fd")
    path = next(p for p in folder.iterdir() if "kvfabric-arena" in str(p.readlink()))
    fd = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(fd, 0) as arena:
            found, at = 0, arena.find(right.tobytes())
            while at >= 0:
                arena[at + 3] ^= 0x10
                found, at = found + 1, arena.find(right.tobytes())
            return found
    finally:
        os.close(fd)


def test_a_spec_with_host_memory_lays_out_two_tiers_and_one_without_it_one() -> None:
    spec = FabricSpec.load({"model": MODEL, **TIERS})
    pools = spec.layout((0,), {}).pools
    assert [(p.tier, p.group) for p in pools] == [*((Tier.G1, g) for g in range(4)), *((Tier.G2, g) for g in range(4))]
    assert [p.slots for p in pools[4:]] == list(HOST_SLOTS.values())
    plain = FabricSpec.load({"model": MODEL}).layout((0,))
    assert {p.tier for p in plain.pools} == {Tier.G2}
    assert {plain.below_readers(slot) for slot in range(plain.slots)} == {False}
    with pytest.raises(SpecError, match=r"host_slots.*host_memory_bytes"):
        FabricSpec.load({"model": MODEL, "host_slots": {"csa": 4}})
    with pytest.raises(SpecError, match=r"host_slots\.nope"):
        FabricSpec.load({"model": MODEL, "host_memory_bytes": 1 << 20, "host_slots": {"nope": 4}})


def test_what_goes_down_to_host_memory_is_pending_and_comes_back_bit_for_bit(lives: Any) -> None:
    life, tokens = lives(), prompt(1)
    life.store(tokens)
    assert life.swap_out(tokens).refused is None
    assert in_host_memory(life) == OBJECTS
    assert life.status()["disk"]["extents"] == 0
    probed = life.session.probe(tokens)
    assert (probed.status, probed.tokens) == (Status.PENDING, 64)
    assert probed.expected_s is not None
    assert probed.expected_s > 0
    assert probed.cause is not None
    assert (probed.cause.kind, probed.cause.reason) == (ObjectKind.DISK_PREFIX, Reason.RESTORE_PENDING)
    answer = life.session.acquire(tokens)
    assert (answer.status, answer.tokens) == (Status.FULL_HIT, 64)
    assert life.wrong(answer, tokens) == []
    assert answer.lease is not None
    assert answer.lease.check() is None
    answer.lease.release()
    assert life.status()["slots_lost"] == 0


def test_what_host_memory_has_no_room_for_goes_on_to_disk_and_comes_back_through_it(lives: Any) -> None:
    life, prompts = lives(), [prompt(n) for n in (1, 2, 3)]
    for tokens in prompts:
        life.store(tokens)
        assert life.swap_out(tokens).refused is None
    assert in_host_memory(life) == OBJECTS
    assert life.status()["disk"]["extents"] > 0
    for tokens in (*prompts, prompts[0]):
        answer = life.session.acquire(tokens)
        assert (answer.status, answer.tokens) == (Status.FULL_HIT, 64)
        assert life.wrong(answer, tokens) == []
        assert answer.lease is not None
        answer.lease.release()
        assert life.swap_out(tokens).refused is None
    assert life.status()["slots_lost"] == 0


def test_a_byte_that_turned_in_host_memory_cuts_the_hit_and_is_never_delivered(lives: Any) -> None:
    life, tokens = lives(), prompt(1)
    life.store(tokens)
    assert life.swap_out(tokens).refused is None
    block = life.spec.model.groups[0].block_bytes
    assert flip_in_arena(life, content(tokens, 0, 2, block)) >= 1
    answer = life.session.acquire(tokens)
    assert (answer.status, answer.tokens) == (Status.PARTIAL_HIT, 32)
    assert answer.cause is not None
    assert (answer.cause.group, answer.cause.kind) == ("csa", ObjectKind.DISK_PREFIX)
    assert answer.cause.reason is Reason.CHECKSUM_MISMATCH
    assert life.wrong(answer, tokens) == []
    life.store(tokens)
    again = life.session.acquire(tokens)
    assert (again.status, again.tokens) == (Status.FULL_HIT, 64)
    assert life.wrong(again, tokens) == []


def test_what_is_digested_another_way_goes_down_on_and_back_as_well(lives: Any) -> None:
    """What a GPU needs, on host memory: the writer, the holder and its disk process digest alike."""
    life, prompts = lives(checksum="lanes_128"), [prompt(n) for n in (1, 2)]
    for tokens in prompts:
        life.store(tokens)
        assert life.swap_out(tokens).refused is None
    assert life.status()["disk"]["extents"] > 0
    for tokens in prompts:
        answer = life.session.acquire(tokens)
        assert (answer.status, answer.tokens) == (Status.FULL_HIT, 64)
        assert life.wrong(answer, tokens) == []
        assert answer.lease is not None
        answer.lease.release()


def test_a_record_names_the_way_it_was_digested(lives: Any) -> None:
    """A life that digests another way judges no older record by it: to this reader they are another layout's."""
    first, tokens = lives(checksum="lanes_128"), prompt(1)
    first.store(tokens)
    assert first.swap_out(tokens).refused is None
    first.store(prompt(2))
    assert first.swap_out(prompt(2)).refused is None  # so that the first goes on to the disk
    first.close()
    second = lives(2)
    answer = second.session.acquire(tokens)
    assert (answer.status, answer.tokens) == (Status.INVALID, 0)
    assert answer.cause is not None
    assert answer.cause.reason is Reason.ABI_MISMATCH


def test_a_spec_puts_what_readers_map_on_a_gpu_and_refuses_what_that_excludes() -> None:
    on_gpu = FabricSpec.load({"model": MODEL, **TIERS, "device": "cuda"})
    layout = on_gpu.layout((0,), {})
    assert [p.memory for p in layout.pools] == [*[Memory.CUDA] * 4, *[Memory.HOST] * 4]
    assert layout.checksum is on_gpu.digested is Checksum.LANES_128
    assert on_gpu.passport(on_gpu.model.groups[0]).extent_format.endswith("lanes_128")
    disk = {"path": "/tmp/kvfabric-disk"}
    for more, match in (
        ({"disk": disk}, "host_memory_bytes"),
        ({"checksum": "xxh3_128"}, "checksum"),
        ({"testing": True}, "testing"),
    ):
        with pytest.raises(SpecError, match=match):
            FabricSpec.load({"model": MODEL, "device": "cuda", **more})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda sees none here")
def test_a_gpus_pools_go_down_to_host_memory_on_to_disk_and_back(lives: Any) -> None:
    life, prompts = lives(device="cuda"), [prompt(n) for n in (1, 2, 3)]
    for tokens in prompts:
        life.store(tokens)
        assert life.swap_out(tokens).refused is None
    assert life.status()["disk"]["extents"] > 0
    for tokens in prompts:
        answer = life.session.acquire(tokens)
        assert (answer.status, answer.tokens) == (Status.FULL_HIT, 64)
        assert answer.lease is not None
        for number, group in enumerate(life.spec.model.groups):
            with answer.lease.read(group.name) as views:
                for index, view in views.items():
                    assert view.is_cuda
                    right = content(tokens, number, index, group.block_bytes)
                    assert np.array_equal(view.cpu().numpy(), right), f"{group.name}[{index}]"
        answer.lease.release()
        assert life.swap_out(tokens).refused is None


@pytest.mark.faults
def test_a_killed_holder_loses_its_host_memory_and_keeps_its_disk(lives: Any) -> None:
    first, prompts = lives(), [prompt(n) for n in (1, 2)]
    for tokens in prompts:
        first.store(tokens)
        assert first.swap_out(tokens).refused is None
    first.kill()
    second = lives(2)
    assert in_host_memory(second) == 0
    answers = [second.session.acquire(tokens) for tokens in prompts]
    assert [(a.status, a.tokens) for a in answers] == [(Status.FULL_HIT, 64), (Status.MISS, 0)]
    assert second.wrong(answers[0], prompts[0]) == []
