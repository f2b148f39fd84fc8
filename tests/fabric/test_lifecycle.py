"""The life of an object: a table per kind, and nothing that the table does not have."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvfabric.fabric.kinds import ObjectKind, ProtocolError
from kvfabric.fabric.lifecycle import REPLACE_VERB, TRANSITIONS, State, Verb, advance

KINDS = sorted(REPLACE_VERB)

LIVES = (
    (Verb.RESERVE, Verb.FILL, Verb.SEAL, Verb.EVICT, Verb.VACATE),
    (Verb.RESERVE, Verb.FILL, Verb.GIVE_UP),
    (Verb.RESERVE, Verb.FILL, Verb.QUARANTINE, Verb.QUIET),
    (
        Verb.RESERVE,
        Verb.FILL,
        Verb.SEAL,
        Verb.SWAP_OUT,
        Verb.SWAPPED_OUT,
        Verb.SWAP_IN,
        Verb.SWAPPED_IN,
        Verb.EVICT,
        Verb.FALL_BACK,
    ),
    (Verb.FIND, Verb.SWAP_IN, Verb.RESTORE_FAILED, Verb.LOSE),
    (Verb.FIND, Verb.SWAP_IN, Verb.QUARANTINE, Verb.QUIET),
    (Verb.RESERVE, Verb.FILL, Verb.SEAL, Verb.SWAP_OUT, Verb.SWAP_FAILED),
)


def test_every_declared_kind_has_its_own_verb_and_the_disk_prefix_has_no_life_of_its_own() -> None:
    assert set(KINDS) == set(ObjectKind) - {ObjectKind.DISK_PREFIX}
    assert len(set(REPLACE_VERB.values())) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("life", LIVES, ids="-".join)
def test_a_life_goes_by_the_table(kind: ObjectKind, life: tuple[Verb, ...]) -> None:
    state = State.ABSENT
    for verb in life:
        following = advance(kind, state, verb)
        assert following is not state
        state = following


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [State.SEALED, State.DEMOTING, State.ON_TIER])
def test_a_verb_of_another_kind_is_refused(kind: ObjectKind, state: State) -> None:
    for owner, verb in REPLACE_VERB.items():
        if owner is kind:
            assert advance(kind, state, verb) in (State.EVICTING, State.ABSENT)
        else:
            with pytest.raises(ProtocolError, match=f"a {kind} object that is {state} cannot {verb}"):
                advance(kind, state, verb)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_table_does_not_have_is_refused(kind: ObjectKind) -> None:
    for state in State:
        for verb in Verb:
            known = TRANSITIONS[kind].get((state, verb))
            if known is None:
                with pytest.raises(ProtocolError):
                    advance(kind, state, verb)
            else:
                assert advance(kind, state, verb) is known


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_is_reached_and_leads_back_to_absent(kind: ObjectKind) -> None:
    steps = {(before, after) for (before, _), after in TRANSITIONS[kind].items()}

    def reach(start: State, edges: set[tuple[State, State]]) -> set[State]:
        reached, before = {start}, 0
        while len(reached) > before:
            before = len(reached)
            reached |= {b for a, b in edges if a in reached}
        return reached

    assert reach(State.ABSENT, steps) == set(State)
    assert reach(State.ABSENT, {(b, a) for a, b in steps}) == set(State)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_may_still_arrive_end_in_quarantine_and_never_in_a_free_slot(kind: ObjectKind) -> None:
    for arriving in (State.RESERVED, State.FILLING, State.RESTORING):
        assert advance(kind, arriving, Verb.QUARANTINE) is State.QUARANTINED
    leaving = {verb for (state, verb) in TRANSITIONS[kind] if state is State.QUARANTINED}
    assert leaving == {Verb.QUIET}


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_between_any_two_steps_of_a_swap_leaves_a_state_that_the_table_knows(kind: ObjectKind) -> None:
    out = [State.SEALED, State.DEMOTING, State.ON_TIER, State.RESTORING, State.SEALED]
    verbs = [Verb.SWAP_OUT, Verb.SWAPPED_OUT, Verb.SWAP_IN, Verb.SWAPPED_IN]
    for (before, after), verb in zip(pairwise(out), verbs, strict=True):
        assert advance(kind, before, verb) is after
    # After a crash only the disk is left, and what is found there is on its tier again.
    assert advance(kind, State.ABSENT, Verb.FIND) is State.ON_TIER
