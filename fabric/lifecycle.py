"""The life of one object, as a table per kind: (state, verb) -> state.

    ABSENT -> RESERVED -> FILLING -> SEALED -> (DEMOTING -> ON_TIER -> RESTORING -> SEALED)
                                            -> EVICTING -> ABSENT | ON_TIER
    QUARANTINED from any state in which foreign bytes may still arrive

Verbs that every kind shares move bytes and room. Each kind adds its own: a history is
``compress``-ed (replaced under another revision), a tail is ``fold``-ed into it, a window
``slide``-s, an indexer is ``sync_index``-ed. Using another kind's verb is refused.
"""

from __future__ import annotations

from enum import StrEnum

from .kinds import ObjectKind, ProtocolError


class State(StrEnum):
    """Where an object is in its life."""

    ABSENT = "absent"
    RESERVED = "reserved"
    FILLING = "filling"
    SEALED = "sealed"
    DEMOTING = "demoting"
    ON_TIER = "on_tier"
    RESTORING = "restoring"
    EVICTING = "evicting"
    QUARANTINED = "quarantined"


class Verb(StrEnum):
    """What may happen to an object."""

    RESERVE = "reserve"
    FILL = "fill"
    SEAL = "seal"
    GIVE_UP = "give_up"
    QUARANTINE = "quarantine"
    QUIET = "quiet"
    SWAP_OUT = "swap_out"
    SWAPPED_OUT = "swapped_out"
    SWAP_FAILED = "swap_failed"
    SWAP_IN = "swap_in"
    SWAPPED_IN = "swapped_in"
    RESTORE_FAILED = "restore_failed"
    FIND = "find"
    EVICT = "evict"
    VACATE = "vacate"
    FALL_BACK = "fall_back"
    LOSE = "lose"
    COMPRESS = "compress"
    FOLD = "fold"
    SLIDE = "slide"
    SYNC_INDEX = "sync_index"


_SHARED: dict[tuple[State, Verb], State] = {
    (State.ABSENT, Verb.RESERVE): State.RESERVED,
    (State.ABSENT, Verb.FIND): State.ON_TIER,
    (State.RESERVED, Verb.FILL): State.FILLING,
    (State.RESERVED, Verb.GIVE_UP): State.ABSENT,
    (State.RESERVED, Verb.QUARANTINE): State.QUARANTINED,
    (State.FILLING, Verb.SEAL): State.SEALED,
    (State.FILLING, Verb.GIVE_UP): State.ABSENT,
    (State.FILLING, Verb.QUARANTINE): State.QUARANTINED,
    (State.QUARANTINED, Verb.QUIET): State.ABSENT,
    (State.SEALED, Verb.SWAP_OUT): State.DEMOTING,
    (State.DEMOTING, Verb.SWAPPED_OUT): State.ON_TIER,
    (State.DEMOTING, Verb.SWAP_FAILED): State.SEALED,
    (State.ON_TIER, Verb.SWAP_IN): State.RESTORING,
    (State.RESTORING, Verb.SWAPPED_IN): State.SEALED,
    (State.RESTORING, Verb.RESTORE_FAILED): State.ON_TIER,
    (State.RESTORING, Verb.QUARANTINE): State.QUARANTINED,
    (State.SEALED, Verb.EVICT): State.EVICTING,
    (State.EVICTING, Verb.VACATE): State.ABSENT,
    (State.EVICTING, Verb.FALL_BACK): State.ON_TIER,
    (State.ON_TIER, Verb.LOSE): State.ABSENT,
}

REPLACE_VERB: dict[ObjectKind, Verb] = {
    ObjectKind.COMPRESSED_HISTORY: Verb.COMPRESS,
    ObjectKind.UNCOMPRESSED_TAIL: Verb.FOLD,
    ObjectKind.SLIDING_WINDOW: Verb.SLIDE,
    ObjectKind.INDEXER: Verb.SYNC_INDEX,
}
"""How an object of each kind leaves when a commit replaces or outdates it."""

TRANSITIONS: dict[ObjectKind, dict[tuple[State, Verb], State]] = {
    kind: {
        **_SHARED,
        (State.SEALED, verb): State.EVICTING,
        (State.DEMOTING, verb): State.EVICTING,
        (State.ON_TIER, verb): State.ABSENT,
    }
    for kind, verb in REPLACE_VERB.items()
}


def advance(kind: ObjectKind, state: State, verb: Verb) -> State:
    """The state after ``verb``. Raises ProtocolError for what the kind's table does not have."""
    following = TRANSITIONS[kind].get((state, verb))
    if following is None:
        raise ProtocolError(f"a {kind} object that is {state} cannot {verb}")
    return following
