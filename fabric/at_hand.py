"""What this holder can be asked for and grant at once: the longest possible prefix, all of it here and in memory.

The common case of a warm node, and the one that must be fast. It needs no plan: the position is the
highest there is, so no other holder, tier or revision could give more. Whether it may be leased the
four layers decide, as always; where they do not agree, or anything is missing, the whole path asks on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from .books import Books
from .context import HolderContext
from .kinds import Status
from .leases import part_of
from .messages import Acquire, Answer, LeaseGrant, PartGrant, Prompt
from .model import ModelSpec
from .needs import needs, rules_of
from .objects import split
from .parts import PartDesk
from .run_encoding import span
from .standing import StandingProofs
from .stored_runs import StoredRuns
from .validation import Held, HeldRun, Proof, SealedRun, prove, prove_stored


def longest(model: ModelSpec, n: int) -> int:
    """The highest position on the grid that leaves a token of ``n`` to compute."""
    return max(n - 1, 0) // model.grid_tokens * model.grid_tokens


def only_grid_forbids_more(model: ModelSpec, n: int) -> bool:
    """Whether a resume behind the longest position, off the grid, could be thought of: then its loss is counted."""
    return n - 1 - longest(model, n) >= rules_of(model).finest


def held_at_hand(model: ModelSpec, books: Books, prompt: Prompt, tokens: int) -> Held | None:
    """Everything a resume at ``tokens`` needs, on every shard, from memory and usable; None if anything is not."""
    digests = {unit: split(blob) for unit, blob in prompt.keys}
    held: Held = {}
    for group, ranges in enumerate(needs(model, tokens)):
        if not ranges:
            continue
        keys = digests.get(model.groups[group].unit_tokens, ())
        if ranges[-1].stop > len(keys):
            return None
        wanted = keys[ranges[0].start : ranges[0].stop]
        for more in ranges[1:]:
            wanted = wanted + keys[more.start : more.stop]
        for shard in range(model.shards):
            slots = books.locate_all(group, shard, wanted)
            if slots is None:
                return None
            held[group, shard] = HeldRun(list(chain.from_iterable(ranges)), slots)
    return held


def stored_at_hand(
    model: ModelSpec, stored: StoredRuns, prompt: Prompt, tokens: int
) -> list[tuple[tuple[int, ...], Sequence[SealedRun]]] | None:
    """The same as the runs in which it was stored; None where it is not made of such."""
    chains = dict(prompt.keys)
    found: list[tuple[tuple[int, ...], Sequence[SealedRun]]] = []
    for group, ranges in enumerate(needs(model, tokens)):
        if not ranges:
            continue
        chain_of_group = chains.get(model.groups[group].unit_tokens, b"")
        one = span(ranges[0].start, len(ranges[0]))
        indices = one if len(ranges) == 1 else tuple(chain.from_iterable(ranges))
        for shard in range(model.shards):
            runs: list[SealedRun] = []
            for wanted in ranges:
                of_range = stored.along(group, shard, chain_of_group, wanted)
                if of_range is None:
                    return None
                runs += of_range
            found.append((indices, runs))
    return found


def revisions_at_hand(model: ModelSpec, books: Books, held: Held) -> Sequence[int | None]:
    """The revision of each family as its first object bears it: all must bear it, and what is here has no other."""
    revisions: list[int | None] = [None] * len(model.groups)
    for family in model.families:
        first = next((held[group, 0].slots[0] for group in family if (group, 0) in held), None)
        for group in family:
            if first is not None and (group, 0) in held:
                revisions[group] = int(books.revisions[first])
    return revisions


class AtHand:
    """Answers without a plan: by a proof that still stands, or by one made on the spot."""

    def __init__(self, ctx: HolderContext, parts: PartDesk) -> None:
        self.ctx = ctx
        self.parts = parts
        self.standing = StandingProofs()

    def answer(self, client: str, message: Acquire) -> Answer | None:
        """The answer, its lease granted; None where the question takes the whole path. Changes nothing then."""
        ctx, prompt = self.ctx, message.prompt
        plain = not (message.graph or message.explain or message.prefetch or ctx.config.verify_always)
        if not plain or ctx.bypassed or self.parts.grants.refusal(prompt) is not None:
            return None
        standing = self.standing.find(message, ctx.books)
        if standing is None:
            proof = self._proof(message)
            if proof is None:
                return None
            standing = self.standing.put(message, proof)
        tokens = standing.proof.tokens
        if tokens < message.min_tokens:
            return None
        grant = None
        if not message.probe:
            here = ctx.config.holder
            asked = PartGrant("", min(message.lease_s, ctx.config.lease_s_max), message.graph, client)
            record = self.parts.grants.lease(here, asked, standing.proof, prompt)
            part = part_of(record, here, ctx.incarnation)
            grant = LeaseGrant(here, record.lease, tokens, record.deadline_s, prompt.weights, (part,))
        lost = standing.tokens_lost_to_alignment
        return Answer(message.request, Status.FULL_HIT, tokens, tokens, tokens, None, (), None, None, grant, lost)

    def _proof(self, message: Acquire) -> Proof | None:
        """The proof of the longest prefix, where all of it is at hand."""
        ctx, prompt, model = self.ctx, message.prompt, self.ctx.model
        tokens = longest(model, prompt.n)
        alone = message.readers == (ctx.config.holder,) * model.shards
        if not tokens or not alone or model.drop_last_blocks or only_grid_forbids_more(model, prompt.n):
            return None
        runs = stored_at_hand(model, ctx.stored_runs, prompt, tokens)
        if runs is not None:
            stored = prove_stored(model, tokens=tokens, n=prompt.n, abis=message.abis, runs=runs, books=ctx.books)
            if stored is not None:
                return stored
        held = held_at_hand(model, ctx.books, prompt, tokens)
        if held is None:
            return None
        proof = prove(
            model,
            tokens=tokens,
            n=prompt.n,
            shards=tuple(range(model.shards)),
            revisions=revisions_at_hand(model, ctx.books, held),
            abis=message.abis,
            held=held,
            books=ctx.books,
            digests={},
        )
        return proof if isinstance(proof, Proof) else None
