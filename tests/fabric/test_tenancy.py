"""What one tenant left in a slot is not what another is handed there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvfabric.actors.spec import FabricSpec
from kvfabric.fabric.kinds import SpecError
from kvfabric.fabric.messages import Objects, StoreBegin, StoreBegun, StoreItem
from kvfabric.fabric.model import ModelSpec

from .one_holder import ABI, OneHolder

MODEL = ModelSpec.model_validate(
    {"groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 64}]}
)
SLOTS = 4


def begun(one: OneHolder, tokens: range, tenant: str) -> list[int]:
    """The slots that a store of a prompt is handed."""
    keys = one.keys(tokens)
    items = (StoreItem(Objects(0, 0, tuple(range(SLOTS)), keys.keys(16)), 0, 64, ABI),)
    reply = one.ask(StoreBegin(one.name(), replace(one.prompt(keys), tenant=tenant), items, (), replace=True))
    assert isinstance(reply, StoreBegun)
    assert reply.refused is None
    return [slot for run in reply.slots for slot in np.frombuffer(run.slots, "<u4").tolist()]


@pytest.mark.parametrize(
    ("zero", "tenant", "left"), [(True, "other", False), (True, "", True), (False, "other", True)], ids=str
)
def test_a_slot_is_overwritten_before_another_tenant_has_it_where_that_is_asked_for(
    zero: bool, tenant: str, left: bool
) -> None:
    one = OneHolder(MODEL, slots=SLOTS, zero_between_tenants=zero)
    assert one.store(range(64), seed=1).refused is None
    slots = begun(one, range(1000, 1064), tenant)
    assert len(slots) == SLOTS
    assert {bool(one.arena.payload(slot).any()) for slot in slots} == {left}


def test_what_cannot_be_overwritten_is_not_promised() -> None:
    with pytest.raises(SpecError, match="zero_between_tenants: slots in a GPU's memory"):
        FabricSpec.load({"model": MODEL.model_dump(), "device": "cuda", "zero_between_tenants": True})
