"""The planner: what a leader knows of a prompt, eroded over all holders, and where to fetch from.

Columns are hints until a holder has pinned: every refusal brings fresh columns, which replace the
stale ones here, and the same erosion runs again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from .evidence import Blocked, GroupEvidence
from .found import Hints
from .kinds import Form, ObjectKind, Reason
from .messages import BadCopy, Cap, Column, Fetch, Objects, Prompt, Room
from .model import ModelSpec
from .objects import split
from .passport import Abi, abi_refusal
from .replay import replay_of
from .rules import Resolution, needs, resolve

TRANSPORT_FAULTS = frozenset({Reason.TRANSFER_FAILED, Reason.RESTORE_FAILED})
"""Reasons a copy gets from trying to move it: the rules allowed it, the transport did not."""


T = TypeVar("T")

Known = tuple[bool, bool, int, int, int, bool]
"""What an answer depends on: tiers, transport, and how much is known."""


@dataclass(slots=True)
class PartPlan:
    """One reader holder's share of a plan: objects it has, and objects to fetch by source."""

    holder: str
    shards: tuple[int, ...]
    local: list[Objects] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)


@dataclass(slots=True)
class View:
    """All a leader knows of one prompt. ``readers``: the holder of each shard (rank)."""

    model: ModelSpec
    prompt: Prompt
    abis: tuple[Abi, ...]
    readers: tuple[str, ...]
    columns: dict[tuple[str, int, int], Column] = field(default_factory=dict)
    rooms: dict[tuple[str, int, int], Room] = field(default_factory=dict)
    caps: dict[str, tuple[Cap, ...]] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)
    bad: dict[tuple[str, int, int], dict[tuple[Reason, bool], int]] = field(default_factory=dict)
    evicted: dict[int, int] = field(default_factory=dict)
    directory_known: bool = True
    hints: Hints = field(default_factory=Hints)
    """What the directory said, with the versions it expects."""
    _learned: int = 0
    _evidence: dict[Known, list[GroupEvidence]] = field(default_factory=dict)
    _found: dict[Known, Resolution] = field(default_factory=dict)

    def learn(self, holder: str, columns: Iterable[Column]) -> None:
        """Replace everything known of one holder by what it says itself."""
        self._learned += 1
        for key in [k for k in self.columns if k[0] == holder]:
            del self.columns[key]
        for column in columns:
            self.columns[holder, column.group, column.shard] = column

    def mark_bad(self, bad: BadCopy) -> None:
        """One copy cannot be used for this request."""
        self._learned += 1
        reasons = self.bad.setdefault((bad.holder, bad.group, bad.shard), {})
        key = (bad.reason, bad.from_tier)
        reasons[key] = reasons.get(key, 0) | 1 << bad.index

    def learn_room(self, holder: str, rooms: Iterable[Room], caps: tuple[Cap, ...]) -> None:
        self.caps[holder] = caps
        for room in rooms:
            self.rooms[holder, room.group, room.shard] = room

    # --- evidence ------------------------------------------------------------------------------

    def evidence(self, *, tiers: bool = True, transport: bool = True) -> list[GroupEvidence]:
        """What the rule engine erodes. Without ``tiers``, what lies on a tier only is pending;
        without ``transport``, failures to move bytes are left out of account.
        """
        state = self._state(tiers, transport)
        known = self._evidence.get(state)
        if known is None:
            known = [self._group_evidence(g, tiers, transport) for g in range(len(self.model.groups))]
            self._evidence = {**self._of_now(self._evidence), state: known}
        return known

    def found(self, *, tiers: bool = True, transport: bool = True) -> Resolution:
        """The rules' answer over :meth:`evidence`."""
        state = self._state(tiers, transport)
        known = self._found.get(state)
        if known is None:
            known = resolve(self.model, self.evidence(tiers=tiers, transport=transport), self.prompt.n)
            self._found = {**self._of_now(self._found), state: known}
        return known

    def _state(self, tiers: bool, transport: bool) -> Known:
        """What evidence depends on: two questions are the same one where nothing could tell them apart."""
        tiers = tiers or not any(column.tier for column in self.columns.values())
        transport = transport or not self.bad
        return tiers, transport, self._learned, len(self.unreachable), len(self.evicted), self.directory_known

    def _of_now(self, cache: dict[Known, T]) -> dict[Known, T]:
        now = self._state(True, True)[2:]
        return {state: value for state, value in cache.items() if state[2:] == now}

    def of_readers(self) -> View:
        """The same prompt, with nothing but what the readers themselves have."""
        here = {key: column for key, column in self.columns.items() if key[0] == self.readers[key[2]]}
        if (
            len(here) == len(self.columns)
            and self.directory_known
            and not (self.unreachable or self.bad or self.evicted)
        ):
            return self  # nothing else is known yet
        return View(self.model, self.prompt, self.abis, self.readers, columns=here)

    def _group_evidence(self, group: int, tiers: bool, transport: bool) -> GroupEvidence:
        spec = self.model.groups[group]
        blocked: dict[tuple[Reason, bool], int] = {}
        matched = 0
        by_shard: list[dict[int, int]] = []
        for shard in range(self.model.shards):
            usable: dict[int, int] = {}
            for column in self._columns_of(group, shard):
                matched |= column.memory | column.tier
                for _, _, bits in column.bad:
                    matched |= bits
                for revision, bits in self._usable_copy(column, blocked, tiers, transport).items():
                    usable[revision] = usable.get(revision, 0) | bits
            by_shard.append(usable)
        everywhere = by_shard[0]
        if self.model.shards > 1:
            everywhere, partly = _on_all_shards(by_shard)
            if spec.form is Form.BLOCKS and partly:
                blocked[Reason.BLOCK_INCOMPLETE, False] = partly
        entries = [Blocked(reason, bits, from_tier) for (reason, from_tier), bits in blocked.items() if bits]
        if spec.kind is ObjectKind.COMPRESSED_HISTORY and spec.form is Form.BLOCKS and self.evicted.get(group):
            entries.append(Blocked(Reason.EVICTED, self.evicted[group] & ~matched))
        if not self.directory_known:
            every = (1 << (self.prompt.n // spec.unit_tokens)) - 1
            entries.append(Blocked(Reason.DIRECTORY_UNAVAILABLE, every & ~matched))
        entries.sort(key=lambda entry: _PRECEDENCE.get(entry.reason, len(_PRECEDENCE)))
        return GroupEvidence({r: b for r, b in everywhere.items() if b}, matched, tuple(entries))

    def _columns_of(self, group: int, shard: int) -> Iterator[Column]:
        for (_, g, s), column in self.columns.items():
            if g == group and s == shard:
                yield column

    def _usable_copy(
        self, column: Column, blocked: dict[tuple[Reason, bool], int], tiers: bool, transport: bool
    ) -> dict[int, int]:
        """Usable bits of one copy by revision; adds why the rest is not to ``blocked``."""

        def block(reason: Reason, bits: int) -> None:
            for from_tier, part in ((True, bits & column.tier), (False, bits & ~column.tier)):
                if part:
                    blocked[reason, from_tier] = blocked.get((reason, from_tier), 0) | part

        ok = column.memory | column.tier
        for reason, from_tier, bits in column.bad:
            blocked[reason, from_tier] = blocked.get((reason, from_tier), 0) | bits
        for (reason, from_tier), bits in self.bad.get((column.holder, column.group, column.shard), {}).items():
            if not transport and reason in TRANSPORT_FAULTS:
                continue
            blocked[reason, from_tier] = blocked.get((reason, from_tier), 0) | bits
            ok &= ~bits
        reader = self.abis[column.group]
        for abi, bits in column.abis:
            refusal = abi_refusal(abi, reader)
            if refusal is not None:
                block(refusal, bits & ok)
                ok &= ~bits
        if column.holder in self.unreachable:
            block(Reason.HOLDER_LOST, ok)
            return {}
        if not tiers:
            block(Reason.RESTORE_PENDING, ok & column.tier)
            ok &= ~column.tier
        return {revision: bits & ok for revision, bits in column.revisions.items() if bits & ok}

    # --- other rules ---------------------------------------------------------------------------

    def replaying(self) -> View:
        """The same knowledge under the rules of a reader that replays. Raises ValueError for a model that cannot."""
        replay = replay_of(self.model)
        if replay is None:
            raise ValueError(f"model {self.model.name}: replays nothing")
        return View(
            replay.model,
            self.prompt,
            self.abis,
            self.readers,
            columns=self.columns,
            rooms=self.rooms,
            caps=self.caps,
            unreachable=self.unreachable,
            bad=self.bad,
            evicted=self.evicted,
            directory_known=self.directory_known,
            hints=self.hints,
        )

    # --- sources -------------------------------------------------------------------------------

    def copies(self, group: int, shard: int, *, tiers: bool = True) -> Iterator[tuple[str, bool, int]]:
        """Objects that must be brought to their reader, each once: from which source, from a tier there, which.

        In the order in which a plan takes them: other memory, the reader's own tier (no source), other tiers.
        """
        reader = self.readers[shard]
        columns = sorted(self._columns_of(group, shard), key=lambda column: (column.holder != reader, column.holder))
        covered = 0
        for memory in (True, False) if tiers else (True,):
            for column in columns:
                bits = self._bits_of(column, None, memory=memory) & ~covered
                covered |= bits
                here = column.holder == reader
                if bits and not (here and memory):
                    yield "" if here else column.holder, not memory, bits

    def wanted(self, tokens: int) -> dict[int, int]:
        """Per group, the bits of the objects a resume at ``tokens`` needs."""
        wanted = {}
        for group, ranges in enumerate(needs(self.model, tokens)):
            bits = 0
            for r in ranges:
                bits |= ((1 << len(r)) - 1) << r.start
            if bits:
                wanted[group] = bits
        return wanted

    def held_by_readers(self, tokens: int, revisions: Sequence[int | None]) -> bool:
        """Whether the readers have all of a position in memory already, so that it needs no slots."""
        for (group, revision), bits in self._needs(tokens, revisions).items():
            for shard, reader in enumerate(self.readers):
                column = self.columns.get((reader, group, shard))
                if column is None or bits & ~self._bits_of(column, revision, memory=True):
                    return False
        return True

    def on_tiers(self, tokens: int, revisions: Sequence[int | None]) -> list[int]:
        """The groups, in model order, of which a resume at ``tokens`` takes something from a tier."""
        waiting = set()
        for (group, revision), bits in self._needs(tokens, revisions).items():
            for shard in range(self.model.shards):
                held = 0
                for column in self._columns_of(group, shard):
                    held |= self._bits_of(column, revision, memory=True)
                if bits & ~held:
                    waiting.add(group)
        return sorted(waiting)

    def first_brought(self, tokens: int, revisions: Sequence[int | None]) -> tuple[int, bool] | None:
        """The first group of which a resume at ``tokens`` must bring something to a reader, and whether from a tier."""
        tiers = self.on_tiers(tokens, revisions)
        for (group, revision), bits in sorted(self._needs(tokens, revisions).items(), key=lambda need: need[0][0]):
            for shard, reader in enumerate(self.readers):
                column = self.columns.get((reader, group, shard))
                if column is None or bits & ~self._bits_of(column, revision, memory=True):
                    return group, group in tiers
        return None

    def _needs(self, tokens: int, revisions: Sequence[int | None]) -> dict[tuple[int, int | None], int]:
        """What a resume at ``tokens`` takes, by group and revision; None: each object in any."""
        needs: dict[tuple[int, int | None], int] = {}
        for group, bits in self.wanted(tokens).items():
            if revisions[group] is None and self.model.shards > 1:
                needs.update({(group, r): part for r, part in self._in_one_revision(group, bits).items()})
            else:
                needs[group, revisions[group]] = bits
        return needs

    def _in_one_revision(self, group: int, bits: int) -> dict[int | None, int]:
        """A revision for each of these objects that all shards can be had in; rather what the readers have."""
        usable, in_memory = self.evidence()[group].usable, self.evidence(tiers=False)[group].usable

        def nearness(revision: int) -> tuple[int, int, int]:
            here = bits
            for shard, reader in enumerate(self.readers):
                column = self.columns.get((reader, group, shard))
                here &= 0 if column is None else self._bits_of(column, revision, memory=True)
            return here.bit_count(), (bits & in_memory.get(revision, 0)).bit_count(), revision

        chosen: dict[int | None, int] = {}
        for revision in sorted(usable, key=nearness, reverse=True):
            take = bits & usable[revision]
            if take:
                chosen[revision] = take
                bits &= ~take
        return chosen

    def lacking_room(self, tokens: int, *, whole_pool: bool = False) -> tuple[int, Reason] | None:
        """The first group that has no room for ``tokens`` in its pool at some reader or under a limit
        there, and what that is called; None if all have.

        ``whole_pool``: whether pool and limit could ever hold it, however long one waits.
        """
        needs_bytes: dict[tuple[str, int], int] = {}
        for group, bits in self.wanted(tokens).items():
            for shard in range(self.model.shards):
                holder = self.readers[shard]
                room = self.rooms.get((holder, group, shard))
                if room is None:
                    return group, Reason.ADMISSION_LIMIT
                count = bits.bit_count() if whole_pool else (bits & ~room.pinned).bit_count()
                if count > (room.pool_slots if whole_pool else room.slots):
                    return group, Reason.ADMISSION_LIMIT
                size = count * self.model.groups[group].block_bytes
                needs_bytes[holder, group] = needs_bytes.get((holder, group), 0) + size
        for holder, caps in self.caps.items():
            for cap in caps:
                if not _fits(cap, {g: needs_bytes.get((holder, g), 0) for g in cap.groups}, whole=whole_pool):
                    return next(g for g in cap.groups if needs_bytes.get((holder, g))), cap.reason
        return None

    def plan(self, tokens: int, revisions: Sequence[int | None]) -> list[PartPlan]:
        """Where each reader takes each object from: its own memory, other memory, tiers last.

        Raises KeyError for nothing: callers plan only positions that :meth:`evidence` can serve.
        """
        digests = {unit: split(blob) for unit, blob in self.prompt.keys}
        needs = self._needs(tokens, revisions)
        parts = []
        for holder in sorted(set(self.readers)):
            shards = tuple(s for s in range(self.model.shards) if self.readers[s] == holder)
            part = PartPlan(holder, shards)
            open_bits = {(g, s, revision): bits for (g, revision), bits in needs.items() for s in shards}
            self._take_local(part, open_bits, digests, memory=True)
            self._take_remote(part, open_bits, digests, memory=True)
            self._take_local(part, open_bits, digests, memory=False)
            self._take_remote(part, open_bits, digests, memory=False)
            parts.append(part)
        return parts

    def _bits_of(self, column: Column, revision: int | None, *, memory: bool) -> int:
        usable = self._usable_copy(column, {}, True, True)
        bits = 0
        for r, b in usable.items():
            if revision is None or r == revision:
                bits |= b
        return bits & (column.memory if memory else column.tier)

    def _take_local(
        self,
        part: PartPlan,
        open_bits: dict[tuple[int, int, int | None], int],
        digests: dict[int, tuple[bytes, ...]],
        *,
        memory: bool,
    ) -> None:
        for (group, shard, revision), bits in open_bits.items():
            column = self.columns.get((part.holder, group, shard))
            if column is None or not bits:
                continue
            take = bits & self._bits_of(column, revision, memory=memory)
            if take:
                open_bits[group, shard, revision] = bits & ~take
                part.local.append(self._objects(group, shard, revision, take, digests))

    def _take_remote(
        self,
        part: PartPlan,
        open_bits: dict[tuple[int, int, int | None], int],
        digests: dict[int, tuple[bytes, ...]],
        *,
        memory: bool,
    ) -> None:
        offers: dict[str, dict[tuple[int, int, int | None], int]] = {}
        for key, bits in open_bits.items():
            group, shard, revision = key
            for column in self._columns_of(group, shard) if bits else ():
                take = bits & self._bits_of(column, revision, memory=memory)
                if take and column.holder != part.holder:
                    offers.setdefault(column.holder, {})[key] = take
        ranked = sorted(offers, key=lambda h: (-sum(b.bit_count() for b in offers[h].values()), h))
        for holder in ranked:
            for key, offered in offers[holder].items():
                group, shard, revision = key
                take = offered & open_bits[key]
                if not take:
                    continue
                open_bits[key] &= ~take
                column = self.columns[holder, group, shard]
                part.fetches.append(
                    Fetch(
                        holder,
                        column.incarnation,
                        self._objects(group, shard, revision, take, digests),
                        self.expected_versions(column, take),
                    )
                )

    def expected_versions(self, column: Column, bits: int) -> bytes:
        """Versions (uint64 each) of ``bits`` of a column: as its holder told them, else as the directory did."""
        if column.versions or not column.memory & bits:
            return versions_of(column, bits)
        return self.hints.versions((column.holder, column.group, column.shard), indices_of(bits))

    def told_columns(self) -> Iterator[Column]:
        """Every column, the directory's with the versions that it expects."""
        for column in self.columns.values():
            yield column if column.versions else replace(column, versions=self.expected_versions(column, column.memory))

    def _objects(
        self, group: int, shard: int, revision: int | None, bits: int, digests: dict[int, tuple[bytes, ...]]
    ) -> Objects:
        keys = digests[self.model.groups[group].unit_tokens]
        first = (bits & -bits).bit_length() - 1
        run = bits >> first
        if not run & (run + 1):
            last = first + run.bit_length()
            return Objects(group, shard, tuple(range(first, last)), b"".join(keys[first:last]), revision)
        indices = tuple(indices_of(bits))
        return Objects(group, shard, indices, b"".join(keys[i] for i in indices), revision)


def _fits(cap: Cap, need: Mapping[int, int], *, whole: bool) -> bool:
    """Whether bytes by group fit a limit beside what cannot leave; ``whole``: beside nothing but floors."""
    if not cap.shares:  # a peer that knows no floors
        return sum(need.values()) <= (cap.bytes_max if whole else cap.room_bytes)
    total = 0
    for share in cap.shares:
        held = 0 if whole else share.pinned_bytes
        total += max(share.floor_bytes, held + sum(need.get(g, 0) for g in share.groups))
    return total <= cap.bytes_max


_PRECEDENCE = {
    reason: place
    for place, reason in enumerate(
        (
            Reason.RESTORE_PENDING,
            Reason.CHECKSUM_MISMATCH,
            Reason.MISALIGNED,
            Reason.TRANSFER_FAILED,
            Reason.RESTORE_FAILED,
            Reason.DISK_UNAVAILABLE,
            Reason.DISK_FULL,
            Reason.QUARANTINED,
            Reason.ABI_MISMATCH,
            Reason.HOLDER_LOST,
            Reason.BLOCK_INCOMPLETE,
            Reason.EVICTED,
            Reason.DIRECTORY_UNAVAILABLE,
        )
    )
}
"""Where several reasons hold of one object, the most particular one speaks."""


def indices_of(bits: int) -> Iterator[int]:
    """The set bits of a bitmap, ascending."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def versions_of(column: Column, bits: int) -> bytes:
    """Versions (uint64 each) of ``bits`` of a column's memory; zero where it lies on a tier."""
    out = []
    at = {index: place for place, index in enumerate(indices_of(column.memory))}
    for index in indices_of(bits):
        place = at.get(index)
        out.append(bytes(8) if place is None else column.versions[place * 8 : place * 8 + 8])
    return b"".join(out)


def _on_all_shards(by_shard: list[dict[int, int]]) -> tuple[dict[int, int], int]:
    """Bits usable on every shard by revision, and bits usable on some shards but not together."""
    revisions = set(by_shard[0]).intersection(*by_shard[1:])
    everywhere = {}
    for revision in revisions:
        bits = by_shard[0][revision]
        for usable in by_shard[1:]:
            bits &= usable[revision]
        everywhere[revision] = bits
    somewhere = together = 0
    for usable in by_shard:
        for bits in usable.values():
            somewhere |= bits
    for bits in everywhere.values():
        together |= bits
    return everywhere, somewhere & ~together
