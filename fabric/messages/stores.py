"""Sessions to holders: write attempts, evictions, swaps."""

from __future__ import annotations

from dataclasses import dataclass

from ..kinds import Reason
from ..wire import record
from .objects import Objects, Prompt, SlotRun, StoreItem


@record(1)
@dataclass(frozen=True, slots=True)
class StoreBegin:
    """Reserve slots for a write attempt, all or nothing. ``retire``: what the commit replaces.

    With ``replace`` false, objects that are there already in this revision and ABI are left alone
    and get no slot.
    """

    request: str
    prompt: Prompt
    items: tuple[StoreItem, ...]
    retire: tuple[Objects, ...]
    replace: bool


@record(2)
@dataclass(frozen=True, slots=True)
class StoreBegun:
    """The attempt's id and its own slots, open for writing; or why there are none."""

    request: str
    attempt: int
    slots: tuple[SlotRun, ...]
    refused: Reason | None
    group: str


@record(3)
@dataclass(frozen=True, slots=True)
class StoreCommit:
    """Make the attempt visible. ``checksums``: xxh3-128 of each slot's bytes, in the order begun."""

    request: str
    attempt: int
    checksums: bytes


@record(4)
@dataclass(frozen=True, slots=True)
class StoreAbort:
    """Give the attempt up; its slots are quarantined until :class:`StoreQuiet`."""

    request: str
    attempt: int


@record(5)
@dataclass(frozen=True, slots=True)
class StoreQuiet:
    """Nothing can write to this attempt's slots any more."""

    request: str
    attempt: int


@record(6)
@dataclass(frozen=True, slots=True)
class Done:
    """The plain reply: ``refused`` is None where all went well.

    ``mark``: the holder's count of changes once this is done; a lookup that bears it sees them.
    """

    request: str
    refused: Reason | None
    detail: str
    mark: int = 0


@record(7)
@dataclass(frozen=True, slots=True)
class Drop:
    """Evict these objects from memory; what is not there is ok, what is pinned refuses all."""

    request: str
    objects: tuple[Objects, ...]


@record(8)
@dataclass(frozen=True, slots=True)
class SwapOut:
    """Write these objects to disk as one extent and free their slots."""

    request: str
    objects: tuple[Objects, ...]


@record(9)
@dataclass(frozen=True, slots=True)
class SwapIn:
    """Bring these objects back from disk."""

    request: str
    objects: tuple[Objects, ...]
