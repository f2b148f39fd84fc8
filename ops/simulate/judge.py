"""What a read must find, worked out apart from the rule engine: loops over positions, nothing shared.

The bytes of an object are a function of its identity (the digest of its token chain, which holds
tenant and weights), its revision and its layout. So any mix-up of objects, revisions or layouts, any
torn or stale byte, shows when a leased read is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from ...fabric.messages import LeaseGrant
from ...fabric.model import GroupSpec, ModelSpec
from ...fabric.passport import Abi

REVISIONS = 6
"""Revisions 0 .. REVISIONS - 1 are all that writers ever stamp."""

Key = tuple[bytes, int, int, int, Abi]


class Content:
    """The bytes of every object there can be."""

    def __init__(self) -> None:
        self._known: dict[Key, bytes] = {}

    def of(self, digest: bytes, group: int, shard: int, *, revision: int, abi: Abi, length: int) -> bytes:
        """``length`` bytes that stand for exactly this content."""
        key = (digest, group, shard, revision, abi)
        known = self._known.get(key)
        if known is None or len(known) < length:
            seed = (
                digest + bytes((group, shard, revision)) + abi.fingerprint + abi.alignment_bytes.to_bytes(4, "little")
            )
            known = self._known[key] = blake3(seed).digest(length)
        return known[:length]

    def forget(self) -> None:
        """Keep nothing: every content is worked out again where it is asked for."""
        self._known.clear()

    def revision_of(self, digest: bytes, group: int, shard: int, *, abi: Abi, found: bytes) -> int | None:
        """The revision whose bytes these are; None if they are none of this object's in this layout."""
        for revision in range(REVISIONS):
            if self.of(digest, group, shard, revision=revision, abi=abi, length=len(found)) == found:
                return revision
        return None


@dataclass(frozen=True, slots=True)
class Held:
    """One leased slot as a reader sees it."""

    group: int
    shard: int
    index: int
    found: bytes


class Judge:
    """The rules of one model, naively."""

    def __init__(self, model: ModelSpec, content: Content) -> None:
        self.model = model
        self.content = content
        self.grid = 1
        while any(self.grid % (g.endpoint_tokens or g.block_tokens or g.grid_tokens or 1) for g in model.groups):
            self.grid += 1
        self._needed: dict[tuple[int, bool], list[frozenset[int]]] = {}
        self._by_name = {g.name: g for g in model.groups}

    def needed(self, p: int, *, replays: bool = False) -> list[frozenset[int]]:
        """Per group, the indices of the objects that a resume at p reads; with a replay, but for what it computes."""
        known = self._needed.get((p, replays))
        if known is None:
            known = [frozenset(self._indices(g, p)) for g in self.model.groups]
            if replays:
                known = [self._not_replayed(g, i) for g, i in zip(self.model.groups, known, strict=True)]
            self._needed[p, replays] = known
        return known

    def _not_replayed(self, group: GroupSpec, indices: frozenset[int]) -> frozenset[int]:
        kind = group.kind.value
        if kind == "sliding_window":
            return frozenset(i for i in indices if i * group.unit_tokens < group.sink_tokens)
        return frozenset() if kind == "uncompressed_tail" else indices

    @property
    def replay_tokens(self) -> int:
        """How far back a replay must begin for these models, whose groups share one layer; 0 where none may be."""
        backs = [0]
        for group in self.model.groups:
            kind, root = group.kind.value, self.root(group)
            if kind == "sliding_window":
                backs.append(group.window_tokens or 0)
            elif kind == "uncompressed_tail":
                backs.append(root.ratio + root.lag_tokens + group.overlap_tokens - 1)
        snapshots = any(g.grid_tokens is not None for g in self.model.groups)
        return max(backs) if self.model.replay and not snapshots else 0

    def root(self, group: GroupSpec) -> GroupSpec:
        """The history group that decides ratio, lag and revision."""
        while group.of is not None:
            group = self._by_name[group.of]
        return group

    def _compressed(self, group: GroupSpec, p: int) -> int:
        root = self.root(group)
        c = 0
        while c + root.ratio <= p - root.lag_tokens:
            c += root.ratio
        return c

    def _indices(self, group: GroupSpec, p: int) -> Iterable[int]:
        if group.grid_tokens is not None:
            return [p // group.grid_tokens - 1]
        unit = group.block_tokens or 1
        kind = group.kind.value
        if kind == "sliding_window":
            window = group.window_tokens or 1
            tokens = [t for t in range(p) if t >= p - window + 1 or t < group.sink_tokens]
        elif kind == "uncompressed_tail":
            overlap = group.overlap_tokens if p >= self.root(group).ratio else 0
            tokens = [t for t in range(p) if t >= self._compressed(group, p) - overlap]
        else:
            tokens = list(range(self._compressed(group, p)))
        return {t // unit for t in tokens}

    def family(self, group: int) -> str | None:
        """What binds a group's revision: its history's name; None for windows."""
        spec = self.model.groups[group]
        return None if spec.kind.value == "sliding_window" else self.root(spec).name

    def verdict(
        self,
        n: int,
        grant: LeaseGrant,
        digests: dict[int, list[bytes]],
        abis: Sequence[Abi],
        held: Iterable[Held],
    ) -> str | None:
        """What is wrong with a leased read; None if every byte is what was published, and all are there."""
        tokens, replays = grant.tokens, grant.replay_from is not None
        if replays and (not self.replay_tokens or grant.replay_from != max(0, tokens - self.replay_tokens)):
            return f"a replay from {grant.replay_from} to {tokens}, where {self.replay_tokens} tokens are exact"
        if tokens <= 0 or tokens > n - 1 or tokens % self.grid:
            return f"position {tokens} of a prompt of {n} tokens is not on the grid {self.grid}"
        have: set[tuple[int, int, int]] = set()
        revisions: dict[str, int] = {}
        for item in held:
            spec = self.model.groups[item.group]
            where = f"{spec.name}[{item.index}] of shard {item.shard}"
            if len(item.found) != spec.block_bytes:
                return f"{where}: {len(item.found)} bytes, a whole object has {spec.block_bytes}"
            digest = digests[spec.unit_tokens][item.index]
            revision = self.content.revision_of(digest, item.group, item.shard, abi=abis[item.group], found=item.found)
            if revision is None:
                return f"{where}: its bytes were never published in this layout"
            family = self.family(item.group)
            if family is not None and revisions.setdefault(family, revision) != revision:
                return f"{where}: revision {revision} beside revision {revisions[family]} of {family}"
            have.add((item.group, item.shard, item.index))
        for group, indices in enumerate(self.needed(tokens, replays=replays)):
            for shard in range(self.model.shards):
                for index in indices:
                    if (group, shard, index) not in have:
                        return f"{self.model.groups[group].name}[{index}] of shard {shard} is needed and not leased"
        return None

    def best(
        self,
        n: int,
        there: dict[tuple[int, int], dict[int, set[int]]],
        *,
        replays: bool = False,
        most: int | None = None,
    ) -> int:
        """The longest resume over ``there``: (group, shard) -> object index -> usable revisions.

        ``most``: what the hashes promise; a replay may need nothing of what lies behind that.
        """
        last = n - 1 if most is None else min(n - 1, most)
        positions = range(last // self.grid * self.grid, 0, -self.grid)
        return next((p for p in positions if self.serves(p, n, there, replays=replays)), 0)

    def serves(
        self, p: int, n: int, there: dict[tuple[int, int], dict[int, set[int]]], *, replays: bool = False
    ) -> bool:
        """Whether a resume at p > 0, with or without a replay, finds all that it reads."""
        past = self.model.drop_last_blocks * self.grid
        if p + past > n - 1:
            return False
        possible: dict[str, set[int]] = {}
        for group, indices in enumerate(self.needed(p, replays=replays)):
            spec = self.model.groups[group]
            wanted = set(indices)
            if spec.grid_tokens is None:
                wanted |= {t // spec.unit_tokens for t in range(p, p + past)}
            family = self.family(group)
            for index in wanted:
                usable = set(range(REVISIONS))
                for shard in range(self.model.shards):
                    usable &= there.get((group, shard), {}).get(index, set())
                if family is not None:
                    usable = possible.setdefault(family, set(range(REVISIONS))) & usable
                    possible[family] = usable
                if not usable:
                    return False
        return True


def parts_sound(grant: LeaseGrant, shards: int) -> str | None:
    """A lease's parts are one a holder, with a fence each, and bear every shard they should."""
    holders = [part.holder for part in grant.parts]
    if len(set(holders)) != len(holders) or not holders:
        return f"lease {grant.lease}: parts of {holders}"
    if any(part.fence <= 0 for part in grant.parts):
        return f"lease {grant.lease}: a part without a fence"
    if any(not 0 <= run.shard < shards for part in grant.parts for run in part.slots):
        return f"lease {grant.lease}: a shard that the model does not have"
    return None
