"""What records speak of: prompts, objects, slots, and what a holder has and can free of them."""

from __future__ import annotations

from dataclasses import dataclass

from ..kinds import Reason
from ..passport import Abi
from ..wire import Bits, Indices, SlotColumn, VersionColumn, added


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the fabric sees it: its namespace and its digests, never its tokens.

    ``keys`` holds, for each object unit in tokens, the 32-byte digests at unit, 2 * unit, ... up to
    ``n`` tokens, concatenated. ``weights`` is the 16-byte digest of the namespace's weights revision.
    """

    namespace: bytes
    weights: bytes
    tenant: str
    n: int
    keys: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects of one group and shard by index, with their digests (32 bytes each).

    ``revision``: the one they are meant in, where the request's own revision of the group leaves it open.
    """

    group: int
    shard: int
    indices: tuple[int, ...]
    digests: bytes
    revision: int | None = None


@dataclass(frozen=True, slots=True)
class StoreItem:
    """Objects to store: ``length`` bytes each, under one revision and ABI."""

    objects: Objects
    revision: int
    length: int
    abi: Abi


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Slots of one group and shard: slot numbers (uint32) and versions (uint64), by index."""

    group: int
    shard: int
    indices: Indices
    slots: SlotColumn
    versions: VersionColumn


@dataclass(frozen=True, slots=True)
class Column:
    """What one holder has of one group and shard along one prompt.

    ``memory``: sealed in memory; ``tier``: only on a tier, restorable; ``bad``: there but never
    usable as it is, with the reason and whether a tier is to blame. ``revisions`` and ``abis``
    partition all three. ``versions``: a uint64 for each bit of memory, ascending.
    """

    holder: str
    incarnation: int
    group: int
    shard: int
    memory: Bits
    tier: Bits
    revisions: dict[int, Bits]
    abis: tuple[tuple[Abi, Bits], ...]
    bad: tuple[tuple[Reason, bool, Bits], ...] = ()
    versions: bytes = b""


@dataclass(frozen=True, slots=True)
class Room:
    """Slots of one group and shard a holder could free for one request.

    ``slots``: free or evictable; ``pool_slots``: the whole pool; ``pinned``: objects of the prompt
    that are pinned already and so need no room.
    """

    group: int
    shard: int
    slots: int
    pool_slots: int
    pinned: Bits


@dataclass(frozen=True, slots=True)
class CapShare:
    """Of a byte limit, one kind's groups: bytes they hold that cannot leave, and what is kept free for them."""

    groups: tuple[int, ...]
    pinned_bytes: int
    floor_bytes: int


@dataclass(frozen=True, slots=True)
class Cap:
    """What a byte limit of a holder leaves one tenant in some groups together.

    ``room_bytes``: not in use or evictable; ``bytes_max``: the whole limit; ``reason``: what a
    refusal by it is called.
    """

    groups: tuple[int, ...]
    room_bytes: int
    bytes_max: int
    reason: Reason
    shares: tuple[CapShare, ...] = added(2, ())


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a holder's own count of changes: a lookup that bears it sees everything up to there."""

    holder: str
    incarnation: int
    mark: int
