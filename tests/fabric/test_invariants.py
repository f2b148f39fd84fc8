"""Each invariant holds over living books and notices what must never be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvfabric.fabric import invariants
from kvfabric.fabric.admission import ByteLimit
from kvfabric.fabric.holder import HolderCore
from kvfabric.fabric.invariants import INVARIANTS, accounting, check, check_in_slices
from kvfabric.fabric.kinds import Layer, Reason
from kvfabric.fabric.lifecycle import State
from kvfabric.fabric.messages import StoreAbort, StoreQuiet
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.validation import Verdict

from .many_holders import Holders

MODEL = ModelSpec.load(
    {
        "groups": [
            {"name": "kv", "kind": "compressed_history", "block_tokens": 4, "block_bytes": 64},
            {"name": "swa", "kind": "sliding_window", "block_tokens": 4, "window_tokens": 6, "block_bytes": 64},
        ]
    }
)
P, Q = range(17), range(100, 117)


def _use_a_slab_given_away(core: HolderCore) -> None:
    """Both pools' memory is one slab each; the second pool's is the first one's too."""
    books = core.ctx.books
    books.slabs.owner = [(0, 0), (0, 0)]


@pytest.fixture
def core() -> HolderCore:
    """A holder in the middle of everything: leases, a graph lease, open and aborted attempts, a copy on disk."""
    world = Holders(MODEL, {"n0": (0,)}, slots=24, limits=(ByteLimit(1 << 20, each_tenant=True),))
    assert world.store("n0", P).refused is None
    assert world.store("n0", Q).refused is None
    world.granted("n0", P)
    world.granted("n0", P, graph=True)
    assert world.swap_out("n0", Q).refused is None
    assert world.begin("n0", world.keys(range(200, 217))).refused is None
    aborted = world.begin("n0", world.keys(range(300, 317)))
    world.ask("n0", StoreAbort("a", aborted.attempt))
    return world.cores["n0"]


def test_all_hold_in_the_middle_of_everything(core: HolderCore) -> None:
    assert check(core) == []
    books = accounting(core)
    assert (books.pool_slots, books.lost) == (48, 0)
    assert all((books.free, books.reserved, books.sealed, books.pinned, books.quarantined, books.on_tier, books.pins))


def _owned(core: HolderCore, state: State) -> int:
    return next(s for s, o in enumerate(core.ctx.books.owner) if o is not None and o.state is state)


def _lose_a_slot(core: HolderCore) -> None:
    core.ctx.books.pools[0, 0].free.pop()


def _free_a_slot_twice(core: HolderCore) -> None:
    free = core.ctx.books.pools[0, 0].free
    free.append(free[0])


def _forget_an_owner(core: HolderCore) -> None:
    core.ctx.books.owner[_owned(core, State.FILLING)] = None


def _forget_an_attempt(core: HolderCore) -> None:
    core.stores.attempts.clear()


def _forget_an_abort(core: HolderCore) -> None:
    core.stores.aborted.clear()


def _pin_for_nobody(core: HolderCore) -> None:
    core.ctx.books.pins[_owned(core, State.SEALED)] += 1


def _hide_a_sealed_object(core: HolderCore) -> None:
    core.ctx.books.table[0, 0].clear()


def _swap_two_slots(core: HolderCore) -> None:
    owner = core.ctx.books.owner
    first, second = _owned(core, State.SEALED), _owned(core, State.FILLING)
    owner[first], owner[second] = owner[second], owner[first]


def _share_a_free_list(core: HolderCore) -> None:
    pools = core.ctx.books.pools
    pools[0, 0].free.append(pools[1, 0].free.pop())


def _own_another_pools_slot(core: HolderCore) -> None:
    obj = core.ctx.books.owner[_owned(core, State.FILLING)]
    assert obj is not None
    obj.group = 1 - obj.group


def _rewrite_a_leased_slot(core: HolderCore) -> None:
    record = next(iter(core.ctx.leases.live.values()))
    core.ctx.arena.begin_write(int(record.proof.runs[0].slots[0]))


def _unseal_a_leased_slot(core: HolderCore) -> None:
    record = next(iter(core.ctx.leases.live.values()))
    core.ctx.arena.states[record.proof.runs[0].slots[0]] = 0


def _thaw(core: HolderCore) -> None:
    core.ctx.books.frozen[:] = 0


def _freeze_for_nobody(core: HolderCore) -> None:
    core.ctx.books.frozen[_owned(core, State.FILLING)] += 1


def _move_under_a_graph(core: HolderCore) -> None:
    record = next(r for r in core.ctx.leases.live.values() if r.graph)
    obj = core.ctx.books.owner[int(record.proof.runs[0].slots[0])]
    assert obj is not None
    obj.slot = 23


def _grant_on_a_failed_layer(core: HolderCore) -> None:
    record = next(iter(core.ctx.leases.live.values()))
    refused = Verdict(Layer.ALIGNMENT, Reason.CHECKSUM_MISMATCH)
    record.proof.verdicts = (*record.proof.verdicts[:3], refused)


def _grant_without_a_layer(core: HolderCore) -> None:
    record = next(iter(core.ctx.leases.live.values()))
    record.proof.verdicts = record.proof.verdicts[:3]


def _grant_without_proof(core: HolderCore) -> None:
    record = next(iter(core.ctx.leases.live.values()))
    record.proof = type("Believed", (), {"runs": record.proof.runs})()


def _fence_of_the_future(core: HolderCore) -> None:
    core.ctx.leases.fence = 0


def _charge_too_little(core: HolderCore) -> None:
    admission = core.ctx.books.admission
    next(admission.scopes(MODEL.groups[0].kind, "")).used[MODEL.groups[0].kind] -= 64


def _open_too_many(core: HolderCore) -> None:
    object.__setattr__(core.ctx.config, "attempts_max", 0)


MISDEEDS: tuple[tuple[str, Callable[[HolderCore], None]], ...] = (
    ("nothing_is_lost", _lose_a_slot),
    ("nothing_is_lost", _free_a_slot_twice),
    ("nothing_is_lost", _forget_an_owner),
    ("nothing_is_lost", _forget_an_attempt),
    ("nothing_is_lost", _forget_an_abort),
    ("nothing_is_lost", _pin_for_nobody),
    ("nothing_is_lost", _hide_a_sealed_object),
    ("nothing_is_lost", _swap_two_slots),
    ("kinds_stay_separate", _share_a_free_list),
    ("kinds_stay_separate", _own_another_pools_slot),
    ("slabs_have_one_owner", _use_a_slab_given_away),
    ("validated_is_what_is_used", _rewrite_a_leased_slot),
    ("validated_is_what_is_used", _unseal_a_leased_slot),
    ("graph_topology_is_static", _thaw),
    ("graph_topology_is_static", _freeze_for_nobody),
    ("graph_topology_is_static", _move_under_a_graph),
    ("granted_after_proof", _grant_on_a_failed_layer),
    ("granted_after_proof", _grant_without_a_layer),
    ("granted_after_proof", _grant_without_proof),
    ("granted_after_proof", _fence_of_the_future),
    ("admission_limits_hold", _charge_too_little),
    ("admission_limits_hold", _open_too_many),
)


@pytest.mark.parametrize(("name", "misdeed"), MISDEEDS, ids=lambda value: getattr(value, "__name__", value))
def test_what_must_never_be_is_named(core: HolderCore, name: str, misdeed: Callable[[HolderCore], None]) -> None:
    misdeed(core)
    found = {violation.invariant for violation in check(core)}
    assert name in found
    assert all(violation.detail for violation in check(core))


def test_every_invariant_of_the_design_is_there_and_each_has_a_misdeed() -> None:
    names = [invariant.__name__ for invariant in INVARIANTS]
    assert names == [
        "admission_limits_hold",
        "kinds_stay_separate",
        "slabs_have_one_owner",
        "validated_is_what_is_used",
        "graph_topology_is_static",
        "granted_after_proof",
        "nothing_is_lost",
    ]
    assert {name for name, _ in MISDEEDS} == set(names)


def test_a_lost_slot_is_counted(core: HolderCore) -> None:
    _lose_a_slot(core)
    assert accounting(core).lost == 1


def _request(world: Holders, turn: int) -> None:
    """One of the things that clients ask for, in turn; some evict, some are refused."""
    tokens = range(1000 * (turn % 9), 1000 * (turn % 9) + 17)
    match turn % 5:
        case 0 | 1:
            world.store("n0", tokens)
        case 2:
            world.acquire("n0", tokens, lease_s=1.0)
        case 3:
            begun = world.begin("n0", world.keys(tokens))
            world.ask("n0", StoreAbort(f"a{turn}", begun.attempt))
        case _:
            for attempt in list(world.cores["n0"].stores.aborted):
                world.ask("n0", StoreQuiet(f"q{turn}", attempt))
            world.pass_time(0.5)


@pytest.mark.parametrize("misdeed", [None, _lose_a_slot], ids=["all is well", "a slot is lost"])
def test_what_happens_between_slices_is_no_violation_and_what_is_one_is_found_all_the_same(
    misdeed: Callable[[HolderCore], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariants, "SLICE_SLOTS", 3)
    monkeypatch.setattr(invariants, "SLICE_LEASES", 1)
    world = Holders(MODEL, {"n0": (0,)}, slots=24, limits=(ByteLimit(1 << 20, each_tenant=True),))
    core = world.cores["n0"]
    if misdeed is not None:
        misdeed(core)
    found, turn = [], 0
    for _ in range(8):
        for violation in check_in_slices(core):
            if violation is not None:
                found.append(violation.invariant)
            else:
                _request(world, turn)
                turn += 1
    assert turn > 400
    assert core.ctx.books.victims > 100, "many made room for others"
    assert core.ctx.leases.fence > 100
    assert set(found) == (set() if misdeed is None else {"nothing_is_lost"})
