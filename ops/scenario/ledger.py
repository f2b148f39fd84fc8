"""The ledger: what a story stored, against which every leased byte is read.

Bytes that a granted lease shows and nobody stored raise :class:`WrongBytes`: that is never an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from ...fabric.arena import Arena
from ...fabric.identity import PromptKeys
from ...fabric.kinds import Reason
from ...fabric.leases import read_refusal, slots_unchanged
from ...fabric.messages import LeaseGrant, LeasePart, SlotRun
from ...fabric.model import ModelSpec
from ...fabric.replay import replay_of
from ...fabric.rules import needs
from .content import Stamp, content_of


class WrongBytes(Exception):
    """A granted lease shows bytes that were not stored under its name, or lacks some it owes."""


@dataclass(slots=True)
class HeldLease:
    """One named lease, as its reader holds it."""

    node: str
    leader: str
    keys: PromptKeys
    grant: LeaseGrant
    lease_s: float
    deadline_s: float
    released: bool = False


@dataclass(slots=True)
class Ledger:
    """Everything ever committed: (group, shard, chain digest) -> stamps."""

    model: ModelSpec
    published: dict[tuple[int, int, bytes], set[Stamp]] = field(default_factory=dict)

    def note(self, keys: PromptKeys, run: SlotRun, index: int, stamp: Stamp) -> None:
        """An object was committed."""
        digest = digest_of(keys, self.model.groups[run.group].unit_tokens, index)
        self.published.setdefault((run.group, run.shard, digest), set()).add(stamp)

    def read(self, lease: HeldLease, arenas: Mapping[str, Arena | None], now: float, only: int | None) -> Reason | None:
        """Read every leased byte (of group ``only``); why the reader may not use them, None if it may.

        ``arenas``: each holder's, None where it is dead. Raises WrongBytes.
        """
        parts = [(part, arenas[part.holder]) for part in lease.grant.parts]
        refused = read_refusal(lease.grant, lease.deadline_s, parts, now)
        if refused is not None:
            return refused
        shown = [(part, arena) for part, arena in parts if arena is not None]
        damaged = [self._read_part(lease, part, arena, only) for part, arena in shown]
        if not all(slots_unchanged(part, arena) for part, arena in shown):
            return Reason.VERSION_CHANGED
        self._covers(lease)
        self._is_of_one_revision(shown)
        return Reason.CHECKSUM_MISMATCH if any(damaged) else None

    def _read_part(self, lease: HeldLease, part: LeasePart, arena: Arena, only: int | None) -> bool:
        """Read one holder's share; True where some bytes are not what their header says."""
        damaged = False
        for run, index, slot in slots_of(part.slots):
            if only is not None and run.group != only:
                continue
            content = arena.content(slot)
            if xxhash.xxh3_128_digest(content.data) != arena.checksum(slot):
                damaged = True
                continue
            group = self.model.groups[run.group]
            digest = digest_of(lease.keys, group.unit_tokens, index)
            revision = int(arena.table[slot]["revision"])
            stamps = {s for s in self.published.get((run.group, run.shard, digest), ()) if s[0] == revision}
            stored_so = (content_of(digest, run.group, run.shard, s, length=group.block_bytes) for s in stamps)
            if not any(content.tobytes() == stored for stored in stored_so):
                place = f"group {group.name}, shard {run.shard}, object {index}, slot {slot} of {part.holder}"
                raise WrongBytes(f"{place}: these bytes were not stored")
        return damaged

    def _is_of_one_revision(self, shown: Sequence[tuple[LeasePart, Arena]]) -> None:
        """A family is leased in one revision, and all shards of one object are."""
        families = {g: family for family in self.model.families for g in family}
        seen: dict[tuple[int, ...], int] = {}
        for part, arena in shown:
            for run, index, slot in slots_of(part.slots):
                revision = int(arena.table[slot]["revision"])
                together = families.get(run.group, (run.group, index))
                if seen.setdefault(together, revision) != revision:
                    name = self.model.groups[run.group].name
                    raise WrongBytes(f"group {name}, object {index}: leased under more than one revision")

    def _covers(self, lease: HeldLease) -> None:
        """A lease shows everything that the rules need at its position, on every shard."""
        shown = {(run.group, run.shard, i) for part in lease.grant.parts for run, i, _ in slots_of(part.slots)}
        replay = None if lease.grant.replay_from is None else replay_of(self.model)
        rules = self.model if replay is None else replay.model
        for g, ranges in enumerate(needs(rules, lease.grant.tokens)):
            for shard in range(self.model.shards):
                lacking = [i for needed in ranges for i in needed if (g, shard, i) not in shown]
                if lacking:
                    name = self.model.groups[g].name
                    raise WrongBytes(f"group {name}, shard {shard}: the lease lacks object {lacking[0]}")


def slots_of(runs: Sequence[SlotRun]) -> Iterator[tuple[SlotRun, int, int]]:
    """(run, object index, slot) of every slot, in order."""
    for run in runs:
        for index, slot in zip(run.indices, np.frombuffer(run.slots, dtype="<u4").tolist(), strict=True):
            yield run, index, slot


def digest_of(keys: PromptKeys, unit_tokens: int, index: int) -> bytes:
    """The chain digest (32 bytes) at the end of one object."""
    return keys.keys(unit_tokens)[index * 32 : index * 32 + 32]
