"""Copies: hot prefixes are brought to another node before one is a bottleneck, cold copies go.

    granted --policy.used--> more copies wanted --survey--> fewer there --Replicate--> a node without one
    replicate --room, survey--> an acquire of its own --> kept, evictable, looked at every ``keep_s``
    looked at --cold, or too many, and another has it--> what was not used since leaves

A survey is a probe that asks why: the directory says who has the prefix in memory. Every copy is
brought by the one path that brings anything, with its pins and proofs, and is an ordinary evictable
copy afterwards; all that is special is that somebody counts it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from .context import HolderContext
from .messages import Acquire, Answer, Members, Prompt, Replicate
from .objects import Obj, split
from .planner import View

LEASE_S = 5.0
"""How long what was brought is leased at most: the lease is released as it is granted."""
SENT_MAX = 1024
"""Prefixes of which is remembered where they were placed."""


class Placement(Protocol):
    """Which prefixes deserve more copies, and where. Keeps what it saw; bounded; reads no clock."""

    keep_s: float
    """How often a copy is looked at."""
    copies_max: int
    """Copies a prefix may have by this policy, the first included."""
    share: float
    """Part of a holder's memory that placed copies may take."""
    placing_max: int
    """Prefixes one holder places, or takes, at a time."""

    def used(self, key: bytes, now: float) -> int:
        """A prefix was granted here: how many copies it should have."""
        ...

    def wanted(self, key: bytes, now: float) -> int:
        """How many copies it should have by how it was used here of late."""
        ...

    def choose(self, key: bytes, nodes: Sequence[str]) -> str:
        """Of nodes without a copy, the one that gets it. The same everywhere, whoever asks."""
        ...


@dataclass(slots=True, eq=False)
class Copy:
    """One prefix that was placed here."""

    key: bytes
    request: Acquire
    objects: list[Obj]
    tick: int
    nbytes: int
    asked_s: float
    """When somebody last asked for it."""


Surveyed = Callable[[list[str], list[str]], None]
"""The nodes with a whole copy in memory, and those without."""


class CopyDesk:
    """Placed copies of one holder, and the prefixes it places elsewhere."""

    def __init__(self, ctx: HolderContext, placement: Placement | None, release: Callable[[int], None]) -> None:
        self.ctx = ctx
        self.placement = placement
        self.release = release
        self.nodes: dict[str, tuple[str, ...]] = {}
        """The holder of each shard, on every node that has them all."""
        self.copies: dict[bytes, Copy] = {}
        self._members = -1
        self._surveys: dict[str, tuple[Acquire, Surveyed]] = {}
        self._bringing: dict[str, tuple[bytes, Acquire, frozenset[bytes]]] = {}
        """Copies on their way, with what of them was here before."""
        self._quiet_until: dict[bytes, float] = {}
        """Prefixes lately placed, until when they are left alone."""
        self._sent: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        """Where the last ones were placed: as long as they are hot, these copies are asked for again."""

    @property
    def placed_bytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies.values())

    def told_members(self, message: Members) -> None:
        """Who is up: the nodes that could hold a copy."""
        if message.number <= self._members:
            return
        self._members = message.number
        by_node: dict[str, dict[int, str]] = {}
        for member in sorted(message.members, key=lambda m: m.address, reverse=True):
            for shard in member.shards:
                by_node.setdefault(member.node, {})[shard] = member.address
        every = range(self.ctx.model.shards)
        self.nodes = {n: tuple(by[s] for s in every) for n, by in by_node.items() if all(s in by for s in every)}

    # --- where it is hot -----------------------------------------------------------------------

    def granted(self, request: Acquire, tokens: int) -> None:
        """A prefix was leased to a reader here."""
        placement, now = self.placement, self.ctx.now
        if placement is None or request.graph:
            return
        key = self._key(request.prompt, tokens)
        wanted = placement.used(key, now)
        if wanted < 2 or len(self.nodes) < 2 or self._quiet_until.get(key, now) > now:
            return
        self._quiet_until = {k: until for k, until in self._quiet_until.items() if until > now}
        if len(self._quiet_until) >= placement.placing_max:
            return
        self._quiet_until[key] = now + placement.keep_s
        asked = replace(request, prompt=cut(request.prompt, tokens))
        readers = self._sent.get(key)
        if readers is not None and readers in self.nodes.values():
            self._send(key, asked, readers, tokens)
            return

        def known(having: list[str], lacking: list[str]) -> None:
            if lacking and 0 < len(having) < wanted:
                self._send(key, asked, self.nodes[placement.choose(key, lacking)], tokens)

        self._survey(asked, known)

    def _send(self, key: bytes, asked: Acquire, readers: tuple[str, ...], tokens: int) -> None:
        self._sent[key] = readers
        self._sent.move_to_end(key)
        while len(self._sent) > SENT_MAX:
            self._sent.popitem(last=False)
        self.ctx.counters["copies_asked_for"] += 1
        self.ctx.send(readers[0], Replicate(self.ctx.op(), asked.prompt, asked.abis, readers, tokens))

    def _key(self, prompt: Prompt, tokens: int) -> bytes:
        """What a prefix is known by: the digest at its end."""
        unit, digests = next((u, d) for u, d in prompt.keys if tokens % u == 0)
        return digests[(tokens // unit - 1) * 32 : tokens // unit * 32]

    def _survey(self, request: Acquire, then: Surveyed) -> None:
        """Ask the directory who has a prefix in memory."""
        name = self.ctx.op()
        tokens = request.prompt.n - 1
        asked = Acquire(name, request.prompt, request.abis, request.readers, LEASE_S, None, tokens, True, explain=True)
        self._surveys[name] = (asked, then)
        self.ctx.send(self.ctx.config.holder, asked)

    def answered(self, sender: str, answer: Answer) -> None:
        """What this holder asked itself: a survey, or the copy it brings."""
        if sender != self.ctx.config.holder:
            return
        survey = self._surveys.pop(answer.request, None)
        if survey is not None:
            request, then = survey
            having, lacking = self._who_has(request, answer)
            then(having, lacking)
            return
        bringing = self._bringing.pop(answer.request, None)
        if answer.grant is not None:
            if bringing is not None:
                self._brought(*bringing, answer)
            self.release(answer.grant.lease)

    def _who_has(self, request: Acquire, answer: Answer) -> tuple[list[str], list[str]]:
        """The nodes that have all of it in memory, and those that do not."""
        having, lacking = list[str](), list[str]()
        for node, readers in sorted(self.nodes.items()):
            view = View(self.ctx.model, request.prompt, request.abis, readers)
            view.columns = {(c.holder, c.group, c.shard): c for c in answer.columns}
            there = set(readers).isdisjoint(answer.unreachable)
            whole = there and view.of_readers().found(tiers=False).tokens == request.prompt.n - 1
            (having if whole else lacking).append(node)
        return having, lacking

    # --- where the copy goes -------------------------------------------------------------------

    def replicate(self, message: Replicate) -> None:
        """Bring a copy here, if there is room for it among placed copies."""
        placement, ctx = self.placement, self.ctx
        key = self._key(message.prompt, message.tokens)
        known_copy = self.copies.get(key)
        if known_copy is not None:
            known_copy.asked_s = ctx.now
            return
        if placement is None or len(self._bringing) >= placement.placing_max:
            return
        if self.placed_bytes + self._size(message.prompt) > placement.share * ctx.arena.layout.size_bytes:
            ctx.counters["copies_refused"] += 1
            return
        request = Acquire(
            ctx.op(), message.prompt, message.abis, message.readers, LEASE_S, None, message.tokens, probe=False
        )

        def known(having: list[str], _: list[str]) -> None:
            if ctx.config.node in having or len(having) >= placement.copies_max:
                return
            self._bringing[request.request] = (key, request, self._here(message.prompt))
            ctx.send(ctx.config.holder, request)

        self._survey(request, known)

    def _here(self, prompt: Prompt) -> frozenset[bytes]:
        """The digests along a prompt of which anything is in memory here."""
        digests = {digest for _, blob in prompt.keys for digest in split(blob)}
        return frozenset(d for ready in self.ctx.books.ready.values() for d in digests if d in ready)

    def _size(self, prompt: Prompt) -> int:
        """About what a prefix takes here: its blocks, all of them."""
        return sum(prompt.n // g.unit_tokens * g.block_bytes for g in self.ctx.model.groups) * len(
            self.ctx.books.shards
        )

    def _brought(self, key: bytes, request: Acquire, before: frozenset[bytes], answer: Answer) -> None:
        """It is here: remember what came, so that it goes again when it is cold."""
        assert answer.grant is not None
        ctx = self.ctx
        lease = ctx.leases.live.get(answer.grant.lease)
        owners = [] if lease is None else [ctx.books.owner[s] for run in lease.proof.runs for s in run.slots.tolist()]
        came = [obj for obj in owners if obj is not None and obj.digest not in before]
        nbytes = sum(obj.length for obj in came)
        copy = self.copies[key] = Copy(key, request, came, ctx.books.tick, nbytes, ctx.now)
        ctx.counters["copies_placed"] += 1
        self._watch(copy)

    # --- where it goes cold --------------------------------------------------------------------

    def _watch(self, copy: Copy) -> None:
        assert self.placement is not None
        self.ctx.wake_at(self.ctx.now + self.placement.keep_s, lambda: self._look(copy))

    def _look(self, copy: Copy) -> None:
        """A cold copy goes, and one too many, if another node has the prefix."""
        placement = self.placement
        if placement is None or self.copies.get(copy.key) is not copy:
            return
        copy.objects = [obj for obj in copy.objects if obj.slot >= 0 and obj.visible]
        copy.nbytes = sum(obj.length for obj in copy.objects)
        if not copy.objects:
            del self.copies[copy.key]
            return
        asked_for = self.ctx.now < copy.asked_s + 2 * placement.keep_s
        if asked_for or placement.wanted(copy.key, self.ctx.now) > 1:
            self._watch(copy)
            return

        def known(having: list[str], _: list[str]) -> None:
            if self.copies.get(copy.key) is not copy:
                return
            if any(node != self.ctx.config.node for node in having):
                self._drop(copy)
            else:
                self._watch(copy)

        self._survey(copy.request, known)

    def _drop(self, copy: Copy) -> None:
        books = self.ctx.books
        del self.copies[copy.key]
        for obj in copy.objects:
            if obj.evictable and not obj.frozen and obj.last_use <= copy.tick:
                books.evict(obj)
        self.ctx.counters["copies_dropped"] += 1


def cut(prompt: Prompt, tokens: int) -> Prompt:
    """The same prompt, ending so that it can be resumed at ``tokens`` at most."""
    n = tokens + 1
    return replace(prompt, n=n, keys=tuple((unit, digests[: n // unit * 32]) for unit, digests in prompt.keys))
