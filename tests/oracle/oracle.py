"""The usable position of one prompt, computed as naively as the rules are worded.

Nothing here is shared with the engine: a world is a dictionary of stored copies, keyed by the tuple
of tokens up to the object's end, the group's name and the shard; every answer is a loop over
positions, groups, objects, shards and revisions. Counterfactuals ("if this group's constraint were
lifted") run the whole computation again.

Where the wording of the scenario format leaves room, this file decides as follows.

* A block [s, e) holds the positions s < p <= e: at e it has just been filled, at s it is not needed.
* Objects whose end lies behind the prompt's last token bear a digest of tokens that the prompt does
  not have, so they are absent, however long the prompt they were stored under.
* A group with its constraint lifted still has its digests: no counterfactual exceeds ``hash_tokens``.
* Lifting a history group lifts its own rule only. An indexer or tail that needs something goes on
  comparing itself with those blocks of the history that are there (of all that it needs, past p too
  for a speculative reader), so a revision that such a block lacks stays excluded. Otherwise a stale
  indexer could never be told from a history that is all there in another revision, although nothing
  of that history is missing.
* Only revisions that some object of the family bears on every shard are choices. At p = 0, where all
  choices are equal, the higher one is the choice.
* The cut of a single lifted group is judged at the position that lifting it reaches, in the revision
  of the answer if the others can serve that position in it, else in the highest in which they can.
  Without such a group, everything is judged at the next grid position, in the revision of the answer.
  The reason is that of the first needed object, in token order, that fails there.
* The reason of one object: the trouble of a copy whatever its revision; else incomplete shards (of a
  block); else evicted (history blocks); else another revision; else the word for missing. A missing
  snapshot is ``snapshot_absent`` for every kind; one of another revision is
  ``index_stale`` for an indexer and ``tail_gap`` for a tail.
* ``off_grid`` with nothing on the grid names the groups that fail at the first grid position, if the
  prompt reaches it; otherwise, and where only ``drop_last_blocks`` cuts, the first group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from math import gcd, lcm

HISTORY, TAIL, WINDOW, INDEXER = "compressed_history", "uncompressed_tail", "sliding_window", "indexer"

LAYERS = {
    "off_grid": "whole_block",
    "abi_mismatch": "abi",
    "misaligned": "alignment",
    "checksum_mismatch": "alignment",
    "restore_pending": "transport",
    "restore_failed": "transport",
    "disk_unavailable": "transport",
    "disk_full": "transport",
    "transfer_failed": "transport",
    "holder_lost": "transport",
    "directory_unavailable": "transport",
    "quarantined": "admission",
    "not_stored": "intersection",
    "evicted": "intersection",
    "block_incomplete": "intersection",
    "window_incomplete": "intersection",
    "snapshot_absent": "intersection",
    "tail_gap": "intersection",
    "index_absent": "intersection",
    "index_stale": "intersection",
}
OF_DISK = {"restore_pending", "restore_failed", "disk_unavailable", "disk_full"}
OF_BYTES_OR_LAYOUT = {"abi_mismatch", "misaligned", "checksum_mismatch"}


@dataclass(frozen=True)
class Group:
    """One group in the words of the scenario format; ``unit`` is its block or its snapshot grid, in tokens."""

    name: str
    kind: str
    unit: int
    state: bool = False
    endpoint: int | None = None
    ratio: int = 1
    lag: int = 0
    of: str | None = None
    overlap: int = 0
    window: int = 1
    sink: int = 0


@dataclass(frozen=True, order=True)
class Copy:
    """One stored copy of one shard of one object; ``trouble`` says why it may not be used."""

    revision: int
    trouble: str = ""
    on_disk: bool = False


Key = tuple[tuple[int, ...], str, int]
"""Tokens up to the object's end, group, shard."""


@dataclass
class World:
    """What is stored, and of which objects the last copy was evicted."""

    copies: dict[Key, set[Copy]] = field(default_factory=dict)
    evicted: set[tuple[tuple[int, ...], str]] = field(default_factory=set)


@dataclass(frozen=True)
class Cut:
    """The one check that cut a hit, and what would have to be restored where."""

    group: str
    kind: str
    layer: str
    reason: str
    also: tuple[str, ...] = ()
    target: int = 0
    revisions: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a request gets: positions in tokens."""

    tokens: int
    hash_tokens: int
    status: str
    cut: Cut | None


class Oracle:
    """All answers for one model, one world and one prompt (a tuple of tokens)."""

    def __init__(
        self, groups: Iterable[Group], world: World, prompt: tuple[int, ...], *, shards: int = 1, drop_last: int = 0
    ) -> None:
        self.groups = tuple(groups)
        self.by_name = {g.name: g for g in self.groups}
        self.world = world
        self.prompt = prompt
        self.shards = shards
        self.grid = lcm(*(g.endpoint or g.unit for g in self.groups))
        self.drop = drop_last * self.grid
        # The same question is asked for every position and every counterfactual.
        self.bears = cache(self._bears)
        self.owes = cache(self._owes)
        self.choices = cache(self._choices)
        self.hash_tokens = cache(self._hash_tokens)

    # what the rules need

    def history(self, g: Group) -> Group:
        """The history group that decides ratio, lag and revision of this one."""
        while g.of is not None:
            g = self.by_name[g.of]
        return g

    def compressed(self, g: Group, p: int) -> int:
        """c: how many tokens are compressed at p."""
        root = self.history(g)
        c = 0
        while c + root.ratio <= p - root.lag:
            c += root.ratio
        return c

    def _owes(self, g: Group, p: int) -> tuple[int, ...]:
        """Ends of the objects that a resume at p needs of this group, ascending."""
        if g.state:
            return (p,)
        if g.kind == WINDOW:
            wanted = set(range(max(0, p - g.window + 1), p)) | set(range(min(g.sink, p)))
        elif g.kind == TAIL:
            overlap = 0 if p < self.history(g).ratio else g.overlap
            wanted = set(range(max(0, self.compressed(g, p) - overlap), p))
        else:
            wanted = set(range(self.compressed(g, p)))
        wanted |= set(range(p, p + self.drop))
        return tuple(sorted({token - token % g.unit + g.unit for token in wanted}))

    # what is there

    def copies(self, g: Group, end: int) -> list[set[Copy]]:
        """The copies of one object, a set a shard."""
        if not 0 < end <= len(self.prompt):
            return [set() for _ in range(self.shards)]
        return [self.world.copies.get((self.prompt[:end], g.name, s), set()) for s in range(self.shards)]

    def _bears(self, g: Group, end: int) -> frozenset[int]:
        """Revisions in which every shard of the object is usable."""
        usable = [{c.revision for c in copies if not c.trouble} for copies in self.copies(g, end)]
        return frozenset(r for r in usable[0] if all(r in shard for shard in usable))

    def matches(self, g: Group, end: int) -> bool:
        """Whether any shard holds anything under the digest of the object."""
        return any(self.copies(g, end))

    # what can be served

    def failing(self, g: Group, p: int, revision: int) -> list[int]:
        """Ends of the needed objects that are not usable at p; a window takes any revision."""
        if g.kind == WINDOW:
            return [end for end in self.owes(g, p) if not self.bears(g, end)]
        return [end for end in self.owes(g, p) if revision not in self.bears(g, end)]

    def family(self, root: Group) -> list[Group]:
        """A history group with everything `of` it."""
        return [g for g in self.groups if g.kind != WINDOW and self.history(g) is root]

    def roots(self) -> list[Group]:
        """The history groups."""
        return [g for g in self.groups if g.kind == HISTORY]

    def _choices(self, root: Group) -> list[int]:
        """Revisions to choose from, the highest first."""
        borne: set[int] = set()
        for g in self.family(root):
            for end in range(g.unit, len(self.prompt) + 1, g.unit):
                borne |= self.bears(g, end)
        return sorted(borne, reverse=True) or [0]

    def contradicted(self, root: Group, p: int, revision: int, lifted: str) -> bool:
        """Whether dependents of a lifted history would stand beside blocks of it in other revisions only."""
        dependents = [g for g in self.family(root) if g.name not in {root.name, lifted}]
        if root.name != lifted or not any(self.owes(g, p) for g in dependents):
            return False
        return any(self.bears(root, end) and revision not in self.bears(root, end) for end in self.owes(root, p))

    def revisions(self, root: Group, p: int, lifted: str = "") -> list[int]:
        """Revisions in which the whole family serves p, the highest first."""
        return [
            r
            for r in self.choices(root)
            if not any(self.failing(g, p, r) for g in self.family(root) if g.name != lifted)
            and not self.contradicted(root, p, r, lifted)
        ]

    def serves(self, p: int, lifted: str = "") -> bool:
        """Whether every group, but for the lifted one, serves p."""
        windows = [g for g in self.groups if g.kind == WINDOW and g.name != lifted]
        return not any(self.failing(g, p, 0) for g in windows) and all(
            self.revisions(root, p, lifted) for root in self.roots()
        )

    def promised(self, p: int) -> bool:
        """Whether a position lies in a matching block or at a matching snapshot of any group."""
        return any(
            self.matches(g, p if p % g.unit == 0 else p - p % g.unit + g.unit)
            for g in self.groups
            if p % g.unit == 0 or not g.state
        )

    def _hash_tokens(self) -> int:
        """The largest grid position that the hashes alone promise."""
        return max((p for p in range(self.grid, len(self.prompt), self.grid) if self.promised(p)), default=0)

    def positions(self, lifted: str = "") -> list[int]:
        """The grid positions that can be resumed at, ascending, without 0."""
        return [
            p
            for p in range(self.grid, self.hash_tokens() + 1, self.grid)
            if p + self.drop < len(self.prompt) and self.serves(p, lifted)
        ]

    def hit(self, lifted: str = "") -> int:
        """The largest position that can be resumed at, 0 where there is none."""
        return max(self.positions(lifted), default=0)

    def alone(self, g: Group) -> int:
        """The largest grid position that one group would allow, whatever the others and the hashes say."""
        revisions = [0] if g.kind == WINDOW else self.choices(self.history(g))
        grid = range(self.grid, len(self.prompt) - self.drop, self.grid)
        return max((p for p in grid if any(not self.failing(g, p, r) for r in revisions)), default=0)

    def lost_to_alignment(self) -> int:
        """How far past the hit, short of the next grid position, objects that match could be used but for the grid.

        Tokens are told apart at the ends and endpoints of objects only.
        """
        hit, cut = self.hit(), gcd(*(g.unit for g in self.groups), *(g.endpoint or g.unit for g in self.groups))
        promised = max((p for p in range(cut, len(self.prompt), cut) if self.promised(p)), default=0)
        best = hit
        for p in range(hit + cut, min(hit + self.grid, promised + 1), cut):
            at_snapshots = all(p % g.unit == 0 for g in self.groups if g.state)
            if at_snapshots and p + self.drop < len(self.prompt) and self.serves(p):
                best = p
        return best - hit

    # what is said about it

    def anything_matches(self) -> bool:
        """Whether any object bears a digest of a prefix of at most n - 1 tokens."""
        return any(self.matches(g, end) for g in self.groups for end in range(g.unit, len(self.prompt), g.unit))

    def answer(self) -> Answer:
        """Tokens, hash_tokens, status and the cut."""
        tokens, promised = self.hit(), self.hash_tokens()
        if promised == 0 and not self.anything_matches():
            return Answer(0, 0, "MISS", None)
        if tokens == promised > 0:
            return Answer(tokens, promised, "FULL_HIT", None)
        cut = self.cut(tokens, promised)
        invalid = tokens == 0 and cut.reason in OF_BYTES_OR_LAYOUT
        return Answer(tokens, promised, "INVALID" if invalid else "PARTIAL_HIT", cut)

    def cut(self, tokens: int, promised: int) -> Cut:
        """The check that cut a hit of ``tokens`` out of ``promised``."""
        above = tokens + self.grid
        chosen = {root.name: self.chosen(root, tokens) for root in self.roots()}
        if above + self.drop >= len(self.prompt):
            return self.off_grid(self.groups[:1], above, chosen)
        failing = [g for g in self.groups if self.failing(g, above, chosen.get(self.history(g).name, 0))]
        if promised == 0:
            return self.off_grid(failing or self.groups[:1], above, chosen)
        reached = {g.name: self.hit(lifted=g.name) for g in self.groups}
        furthest = max(reached.values())
        if furthest == tokens:
            grid = range(above, min(promised + 1, len(self.prompt) - self.drop), self.grid)
            barred = (p for p in grid if all(self.matches(g, end) for g in self.groups for end in self.owes(g, p)))
            at = next(barred, above)
            failing = [g for g in self.groups if self.failing(g, at, chosen.get(self.history(g).name, 0))]
            return self.cut_by(failing, at, chosen)
        group = next(g for g in self.groups if reached[g.name] == furthest)
        revisions = {}
        for root in self.roots():
            possible = self.revisions(root, furthest, lifted=group.name)
            revisions[root.name] = chosen[root.name] if chosen[root.name] in possible else possible[0]
        return self.cut_by([group], furthest, revisions)

    def chosen(self, root: Group, tokens: int) -> int:
        """The revision of a family in the answer."""
        return self.choices(root)[0] if tokens == 0 else self.revisions(root, tokens)[0]

    def granted_revisions(self, p: int) -> tuple[int | None, ...]:
        """Per group the revision to resume with at p; None where any will do or nothing is needed."""
        bound = [g.kind != WINDOW and p > 0 and bool(self.owes(g, p)) for g in self.groups]
        return tuple(self.chosen(self.history(g), p) if b else None for g, b in zip(self.groups, bound, strict=True))

    def off_grid(self, groups: Iterable[Group], target: int, revisions: dict[str, int]) -> Cut:
        first, *others = groups
        also = tuple(g.name for g in others)
        return Cut(first.name, first.kind, "whole_block", "off_grid", also, target, tuple(revisions.items()))

    def cut_by(self, groups: Iterable[Group], target: int, revisions: dict[str, int]) -> Cut:
        first, *others = groups
        revision = revisions.get(self.history(first).name, 0)
        reason, on_disk = self.reason(first, self.failing(first, target, revision)[0])
        kind = "disk_prefix" if on_disk or reason in OF_DISK else first.kind
        also = tuple(g.name for g in others)
        return Cut(first.name, kind, LAYERS[reason], reason, also, target, tuple(revisions.items()))

    def reason(self, g: Group, end: int) -> tuple[str, bool]:
        """Why one needed object is not usable, and whether a tier below memory is to blame."""
        for shard in self.copies(g, end):
            for copy in sorted(shard):
                if copy.trouble:
                    return copy.trouble, copy.on_disk
        if not self.bears(g, end) and self.matches(g, end) and not g.state:
            return "block_incomplete", False
        if (self.prompt[:end], g.name) in self.world.evicted and end <= len(self.prompt):
            return "evicted", False
        if self.bears(g, end) and g.kind in {INDEXER, TAIL}:
            return {INDEXER: "index_stale", TAIL: "tail_gap"}[g.kind], False
        if g.state:
            return "snapshot_absent", False
        words = {HISTORY: "not_stored", TAIL: "tail_gap", WINDOW: "window_incomplete", INDEXER: "index_absent"}
        return words[g.kind], False
