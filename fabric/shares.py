"""One holder's share of an acquire while it is in progress: what it holds, what it waits for, why it fails."""

from __future__ import annotations

from dataclasses import dataclass, field

from .kinds import Reason
from .messages import BadCopy, Column, Fetch, Objects, PartOpen, PartReply
from .objects import Obj
from .passport import abi_refusal
from .validation import Held, HeldRun, Proof
from .wakes import Wake


@dataclass(slots=True)
class Arriving:
    """One object on its way from a source: the hidden local object and what was promised of it."""

    index: int
    obj: Obj
    revision: int | None = None
    """The one it is wanted in; None: any."""
    source_slot: int = -1
    version: bytes = b""
    checksum: bytes = b""
    landed: bytes | None = None
    fault: Reason | None = None
    tries: int = 0


@dataclass(slots=True)
class Source:
    """One source of a share: its pin, its objects, its transfer."""

    holder: str
    incarnation: int
    fetches: list[Fetch]
    arriving: list[Arriving]
    asked_s: float = 0.0
    """When it was asked to pin them."""
    transferring: int = 0
    ended: bool = False


@dataclass(slots=True)
class Part:
    """One share in progress."""

    leader: str
    request: PartOpen
    wanted_s: float
    """By when its request wants the bytes."""
    held: Held = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    awaited: int = 0
    digests: dict[int, bytes] = field(default_factory=dict)
    refused: Reason | None = None
    group: int = 0
    bad: list[BadCopy] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    truth: list[Column] = field(default_factory=list)
    moved_bytes: dict[int, int] = field(default_factory=dict)
    proof: Proof | None = None
    replied: PartReply | None = None
    let_go: bool = False
    placing: bool = False
    """Objects are being copied to a graph's slots, from those that are held."""
    expiry: Wake | None = None

    def hold(self, index: int, obj: Obj) -> None:
        """This object, pinned for the share, is one that it is to be proven from."""
        self.held.setdefault((obj.group, obj.shard), HeldRun()).add(index, obj.slot)

    def usable(self, obj: Obj | None, revision: int | None) -> bool:
        """Whether an object is what the share asks for."""
        if obj is None or obj.bad is not None:
            return False
        if revision is not None and obj.revision != revision:
            return False
        return abi_refusal(obj.abi, self.request.abis[obj.group]) is None

    def revision_of(self, objects: Objects) -> int | None:
        """The revision that objects are wanted in; None: any."""
        return objects.revision if objects.revision is not None else self.request.revisions[objects.group]

    def refuse(self, reason: Reason, group: int) -> None:
        """It will not be proven; the first reason stands."""
        if self.refused is None:
            self.refused, self.group = reason, group

    def bad_at(self, holder: str, obj: Obj, index: int, reason: Reason, *, from_tier: bool) -> None:
        """The copy at that holder cannot serve, and why."""
        self.bad.append(BadCopy(holder, obj.group, obj.shard, index, reason, from_tier))
