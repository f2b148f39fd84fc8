"""What a reader compares of an arena: one look at the header, one at its slots, each as the dtypes lay them out."""

from __future__ import annotations

import numpy as np
import pytest

from kvfabric.fabric.arena import Arena, ArenaLayout, PoolLayout, SlotState, heap_arena
from kvfabric.fabric.kinds import Reason
from kvfabric.fabric.leases import LeasedSlots, read_refusal, slots_stand, slots_unchanged
from kvfabric.fabric.messages import LeaseGrant, LeasePart, SlotRun

LAYOUT = ArenaLayout([PoolLayout(0, 0, 4, 100), PoolLayout(1, 0, 4, 50)])
WEIGHTS = bytes(range(16))


def story() -> tuple[Arena, LeasePart, LeaseGrant]:
    """An arena with slots 1, 2 and 5 sealed, and a lease over them."""
    arena = heap_arena(LAYOUT, 7)
    arena.set_weights(WEIGHTS)
    arena.set_grants_until(2_000_000_000)
    versions = {}
    for slot in (1, 2, 5):
        arena.begin_write(slot)
        versions[slot] = arena.begin_write(slot)
        arena.seal(slot, 10, bytes(16), bytes(16), 0)

    def run(group: int, *slots: int) -> SlotRun:
        packed = b"".join(s.to_bytes(4, "little") for s in slots)
        return SlotRun(group, 0, slots, packed, b"".join(versions[s].to_bytes(8, "little") for s in slots))

    part = LeasePart("h", 7, 1, (run(0, 1, 2), run(1, 5)))
    return arena, part, LeaseGrant("h", 1, 8, 100.0, WEIGHTS, (part,))


def refusal(arena: Arena, part: LeasePart, grant: LeaseGrant, now: float = 1.0) -> Reason | None:
    plain = read_refusal(grant, 100.0, [(part, arena)], now)
    kept = LeasedSlots(part)
    assert read_refusal(grant, 100.0, [(part, arena)], now, lambda _, a: kept.unchanged(a)) is plain
    return plain


def test_the_header_read_at_once_is_the_header_written_field_by_field() -> None:
    arena, _, _ = story()
    assert arena.life() == (7, 2_000_000_000, WEIGHTS)
    assert arena.life() == (arena.incarnation, arena.grants_until_ns, arena.weights)


def test_an_untouched_lease_stands() -> None:
    arena, part, grant = story()
    assert slots_unchanged(part, arena)
    assert refusal(arena, part, grant) is None


@pytest.mark.parametrize("slot", [1, 2, 5])
@pytest.mark.parametrize("state", [SlotState.FREE, SlotState.WRITING, SlotState.QUARANTINED])
def test_any_slot_rewritten_freed_or_not_sealed_ends_it(slot: int, state: SlotState) -> None:
    arena, part, grant = story()
    arena.states[slot] = state
    assert refusal(arena, part, grant) is Reason.VERSION_CHANGED
    arena.states[slot] = SlotState.SEALED
    assert refusal(arena, part, grant) is None
    arena.versions[slot] += 1
    assert refusal(arena, part, grant) is Reason.VERSION_CHANGED


@pytest.mark.parametrize("slot", [0, 3, 4, 6, 7])
def test_what_happens_to_other_slots_does_not_matter(slot: int) -> None:
    arena, part, grant = story()
    arena.begin_write(slot)
    assert refusal(arena, part, grant) is None


def test_refusals_come_in_their_order() -> None:
    arena, part, grant = story()
    arena.versions[1] += 1
    assert refusal(arena, part, grant) is Reason.VERSION_CHANGED
    arena.set_weights(bytes(16))
    assert refusal(arena, part, grant) is Reason.WEIGHTS_MISMATCH
    assert refusal(arena, part, grant, now=2.1) is Reason.HOLDER_LOST
    assert refusal(arena, LeasePart("h", 6, 1, part.slots), grant) is Reason.HOLDER_LOST
    assert refusal(arena, part, grant, now=100.0) is Reason.LEASE_EXPIRED
    assert read_refusal(grant, 100.0, [(part, None)], 1.0) is Reason.HOLDER_LOST


def test_slots_stand_only_in_the_order_of_their_versions() -> None:
    arena, _, _ = story()
    arena.versions[2] = 9
    two = (2).to_bytes(8, "little") + (9).to_bytes(8, "little")
    assert slots_stand(np.array([1, 2]), two, arena)
    assert not slots_stand(np.array([2, 1]), two, arena)
