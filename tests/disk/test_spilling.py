"""Eviction from what readers map: what fits host memory is found there, and nothing worth more leaves for it."""

from __future__ import annotations

import pytest

from kvfabric.fabric.effects import DiskState
from kvfabric.fabric.kinds import Reason, Status
from kvfabric.fabric.lifecycle import State

from .one_disk import BLOCKS, Disk

SHARE = 0.25


def evicting(spill_share: float, *, host_slots: int = 64, prompts: int = 8, slots: int = 16) -> Disk:
    """A holder with room for four prompts, to which more were given."""
    d = Disk(slots, host_slots=host_slots, spill_share=spill_share)
    for number in range(prompts):
        assert d.store(number) is None
    return d


def found(d: Disk, number: int) -> int:
    """Tokens of a prompt that an acquire gets, once everything that comes back is back."""
    request = d.acquire(number)
    d.finish_all()
    d.wait(1.0)
    answer = d.answer(request)
    assert answer is not None
    if answer.grant is not None:
        d.release(request)
    return answer.tokens


@pytest.mark.parametrize(("share", "tokens"), [(SHARE, 64), (0.0, 0)])
def test_what_makes_room_is_found_in_host_memory_only_where_it_was_copied_ahead(share: float, tokens: int) -> None:
    d = evicting(share)
    assert d.core.ctx.books.victims >= 16
    assert found(d, 0) == tokens
    assert found(d, 7) == 64
    d.sound()


def test_what_is_copied_ahead_stays_in_memory_until_its_slot_is_wanted() -> None:
    d = evicting(SHARE, prompts=4)
    books = d.core.ctx.books
    copies = d.core.disk.host.pools.copies().values()
    assert copies
    assert all(obj.state is State.SEALED for obj in copies)
    assert books.victims == 0
    assert {found(d, number) for number in range(4)} == {64}
    assert d.core.ctx.counters["restored_objects"] == 0
    d.sound()


def test_only_a_share_of_a_pool_is_copied_ahead_and_only_of_one_that_is_nearly_full() -> None:
    assert not evicting(SHARE, prompts=2).core.disk.host.pools.copies()
    d = evicting(SHARE, prompts=4)
    assert 0 < len(d.core.disk.host.pools.copies()) <= 2 * 2 * SHARE * 16


def test_host_memory_that_is_full_keeps_what_was_put_there_by_request() -> None:
    d = Disk(16, host_slots=BLOCKS, spill_share=SHARE)
    assert d.store(100) is None
    assert d.swap_out(100).refused is None  # a parked request's state, say
    for number in range(8):
        assert d.store(number) is None
    assert d.core.ctx.counters["spilled_objects"] == 0
    assert found(d, 100) == 64
    d.sound()


@pytest.mark.parametrize(("disk", "tokens"), [(True, 64), (False, 0)])
def test_what_leaves_full_host_memory_for_it_goes_on_to_the_disk_if_there_is_one(disk: bool, tokens: int) -> None:
    d = Disk(16, host_slots=2 * BLOCKS, spill_share=SHARE)
    if not disk:
        d.handle(DiskState(Reason.DISK_UNAVAILABLE))
    for number in range(12):
        assert d.store(number) is None
    assert len(d.core.disk.host.pools.copies()) <= 2 * 2 * BLOCKS
    assert found(d, 0) == tokens
    d.sound()


def test_copies_ahead_never_hold_a_live_request_up() -> None:
    d = Disk(16, host_slots=64, spill_share=SHARE)
    d.hold_copies = True
    for number in range(8):
        assert d.store(number) is None
    request = d.acquire(7)
    answer = d.answer(request)
    assert answer is not None
    assert answer.status is Status.FULL_HIT
    for copy in list(d.copies):
        d.copy(copy)
    d.sound()
