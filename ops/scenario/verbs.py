"""The verbs of a scenario, as a client of the fabric: the same for every world.

A verb answers a plain dictionary in the format's words: ``{"ok": True}``, ``{"refused": reason}``,
or the answer to an ``acquire`` or ``probe``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from ...fabric.explanation import Explanation
from ...fabric.identity import PromptKeys
from ...fabric.kinds import Cause, FabricError, Reason, Status, cause_of
from ...fabric.messages import (
    Acquire,
    Answer,
    Drop,
    Objects,
    Release,
    Renew,
    StoreAbort,
    StoreBegin,
    StoreBegun,
    StoreCommit,
    StoreItem,
    StoreQuiet,
    SwapIn,
    SwapOut,
)
from ...fabric.objects import split
from ...fabric.passport import Abi, AbiPassport
from . import story as words
from .content import changed_passport, content_of, default_passport, keys_of, prompt_of
from .ledger import HeldLease, Ledger, digest_of, slots_of
from .objects import Picked, extended, selected, stored
from .story import Step, Story
from .world import Seat, Victim, World

Got = dict[str, Any]
OK: Got = {"ok": True}
PROBE_LEASE_S = 30.0
"""What a probe says it would lease for: it binds none."""


@dataclass(slots=True)
class OpenAttempt:
    """One store attempt: a share at each holder, and what to write into its slots."""

    shares: list[tuple[Seat, StoreBegun]]
    keys: PromptKeys
    revisions: dict[int, int]
    fingerprints: tuple[bytes, ...]
    ended: bool = False


@dataclass(slots=True)
class Verbs:
    """One story's client: what it named, and the verbs by name."""

    story: Story
    world: World
    weights: str = ""
    retired: list[str] = field(default_factory=list)
    passports: dict[tuple[str, int], AbiPassport] = field(default_factory=dict)
    leases: dict[str, HeldLease] = field(default_factory=dict)
    attempts: dict[str, OpenAttempt] = field(default_factory=dict)
    ledger: Ledger = field(init=False)
    tokens_max: int = 0
    _requests: int = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.world.model)
        self.weights = self.story.model.weights
        for step in self.story.each_step():
            tokens = getattr(step.args, "tokens", None)
            self.tokens_max = max(self.tokens_max, _last(tokens))

    def perform(self, step: Step) -> Coroutine[Any, Any, Got]:
        """The coroutine of one step; not of ``parallel``."""
        verb: Callable[[Any], Coroutine[Any, Any, Got]] = getattr(self, step.verb)
        return verb(step.args)

    # --- writing -------------------------------------------------------------------------------

    async def store(self, args: words.Store) -> Got:
        attempt = await self._begin_store(args)
        return await self._commit(attempt) if isinstance(attempt, OpenAttempt) else attempt

    async def extend(self, args: words.Extend) -> Got:
        start, end = args.tokens
        growth = extended(self.world.model, start, end, args.revision)
        keys = keys_of(self.world.model, args, end, self.weights)
        attempt = await self._begin(args.at, keys, growth.publish, growth.retire, None, replace=False)
        return await self._commit(attempt) if isinstance(attempt, OpenAttempt) else attempt

    async def begin(self, args: words.Begin) -> Got:
        attempt = await self._begin_store(args)
        if not isinstance(attempt, OpenAttempt):
            return attempt
        self.attempts[args.name] = attempt
        return OK

    async def commit(self, args: words.Attempt) -> Got:
        attempt = self.attempts.get(args.name)
        return _refused(Reason.ATTEMPT_SUPERSEDED) if attempt is None else await self._commit(attempt)

    async def abort(self, args: words.Attempt) -> Got:
        return await self._each_share(args.name, StoreAbort)

    async def quiesce(self, args: words.Attempt) -> Got:
        return await self._each_share(args.name, StoreQuiet)

    async def _each_share(self, name: str, record: type[StoreAbort | StoreQuiet]) -> Got:
        attempt = self.attempts.get(name)
        refusals = []
        if attempt is not None:
            attempt.ended = True
        for seat, begun in attempt.shares if attempt is not None else ():
            refused = await self._done(seat.holder, record(self._request(), begun.attempt))
            refusals.append(None if refused is Reason.HOLDER_LOST else refused)  # an attempt ends with its holder
        return _first(refusals)

    async def _begin_store(self, args: words.Store) -> OpenAttempt | Got:
        model = self.world.model
        keys = keys_of(model, args, args.tokens, args.weights or self.weights)
        return await self._begin(args.at, keys, stored(model, args.tokens, args.groups), [], args.shards, replace=True)

    async def _begin(
        self,
        at: str,
        keys: PromptKeys,
        publish: Sequence[Picked],
        retire: Sequence[Picked],
        shards: Sequence[int] | None,
        *,
        replace: bool,
    ) -> OpenAttempt | Got:
        """Begin at every holder of the node, all or nothing."""
        passports = [self._passport(at, g) for g in range(len(self.world.model.groups))]
        abis = tuple(passport.abi() for passport in passports)
        attempt = OpenAttempt([], keys, {p.group: p.revision for p in publish}, tuple(a.fingerprint for a in abis))
        refused: Got | None = None
        for seat in self.world.seats(at):
            wanted = [s for s in seat.shards if shards is None or s in shards]
            if not wanted or refused is not None:
                continue
            message = StoreBegin(
                self._request(),
                prompt_of(keys),
                tuple(self._items(keys, publish, wanted, abis)),
                tuple(self._objects(keys, retire, wanted)),
                replace,
            )
            begun = await self.world.ask(seat.holder, message)
            if begun is None or begun.refused is not None:
                refused = _refused(Reason.HOLDER_LOST if begun is None else begun.refused)
            else:
                attempt.shares.append((seat, begun))
        if refused is None:
            return attempt
        for seat, begun in attempt.shares:
            await self._done(seat.holder, StoreAbort(self._request(), begun.attempt))
            await self._done(seat.holder, StoreQuiet(self._request(), begun.attempt))
        return refused

    async def _commit(self, attempt: OpenAttempt) -> Got:
        refusals = []
        ended, attempt.ended = attempt.ended, True
        for seat, begun in attempt.shares:
            contents = self._contents(attempt, begun)
            if ended:  # its slots may be another's by now
                checksums = b"".join(xxhash.xxh3_128_digest(content) for content in contents)
            else:
                checksums = await self.world.fill(seat.holder, begun, contents)
            refused = await self._done(seat.holder, StoreCommit(self._request(), begun.attempt, checksums))
            refusals.append(refused)
            if refused is None:
                self._note_published(attempt, begun)
        return _first(refusals)

    def _contents(self, attempt: OpenAttempt, begun: StoreBegun) -> Iterator[bytes]:
        for run, index, _ in slots_of(begun.slots):
            group = self.world.model.groups[run.group]
            yield content_of(
                digest_of(attempt.keys, group.unit_tokens, index),
                run.group,
                run.shard,
                (attempt.revisions[run.group], attempt.fingerprints[run.group]),
                length=group.block_bytes,
            )

    def _note_published(self, attempt: OpenAttempt, begun: StoreBegun) -> None:
        for run, index, _ in slots_of(begun.slots):
            stamp = (attempt.revisions[run.group], attempt.fingerprints[run.group])
            self.ledger.note(attempt.keys, run, index, stamp)

    # --- memory and disk -----------------------------------------------------------------------

    async def drop(self, args: words.Drop) -> Got:
        g = self.world.model.index_of(args.group)
        picked = [Picked(g, selected(self.world.model.groups[g], args, self._reach(args)))]
        return await self._at_each_seat(args.at, args, picked, Drop)

    async def swap_out(self, args: words.Swap) -> Got:
        return await self._at_each_seat(args.at, args, self._swapped(args), SwapOut)

    async def swap_in(self, args: words.Swap) -> Got:
        return await self._at_each_seat(args.at, args, self._swapped(args), SwapIn)

    def _swapped(self, args: words.Swap) -> list[Picked]:
        model = self.world.model
        names = [g.name for g in model.groups] if args.groups is None else list(args.groups)
        tokens = args.tokens
        span = [0, tokens] if isinstance(tokens, int) else [0, self.tokens_max] if tokens is None else tokens
        picked = []
        for name in names:
            how = args.groups[name] if isinstance(args.groups, dict) else words.Selected()
            group = model.group(name)
            indices = set(selected(group, how, self.tokens_max))
            indices &= set(selected(group, words.Selected(tokens=span), self.tokens_max))
            picked.append(Picked(model.index_of(name), tuple(sorted(indices))))
        return picked

    async def _at_each_seat(
        self, at: str, key: words.Keyed, picked: Sequence[Picked], record: type[Drop | SwapOut | SwapIn]
    ) -> Got:
        keys = keys_of(self.world.model, key, self._reach(key), self.weights)
        refusals = []
        for seat in self.world.seats(at):
            objects = tuple(self._objects(keys, picked, seat.shards))
            refusals.append(await self._done(seat.holder, record(self._request(), objects)))
        return _first(refusals)

    def _reach(self, key: words.Keyed) -> int:
        """How far a step may look along its prompt: as far as the story goes, and what it names itself."""
        unit = max(self.world.model.units_tokens)
        named = [*(getattr(key, "blocks", None) or ()), getattr(key, "block", None) or 0]
        last: int = max((i + 1) * unit for i in named)
        return max(self.tokens_max, min(last, words.TOKENS_MAX), _last(getattr(key, "tokens", None)))

    async def corrupt(self, args: words.Corrupt) -> Got:
        group = self.world.model.group(args.group)
        index = args.block if args.block is not None else (args.position or 0) // group.unit_tokens - 1
        keys = keys_of(self.world.model, args, (index + 1) * group.unit_tokens, self.weights)
        victim = Victim(self.world.model.index_of(args.group), index, digest_of(keys, group.unit_tokens, index))
        await self.world.corrupt(args.at, victim, args.how, args.where)
        return OK

    # --- reading -------------------------------------------------------------------------------

    async def acquire(self, args: words.Acquire) -> Got:
        return await self._ask_for(args, args)

    async def probe(self, args: words.Probe) -> Got:
        return await self._ask_for(args, None)

    async def explain(self, args: words.Probe) -> Explanation:
        """Why a probe of this prompt would answer as it does, and what would lengthen the hit."""
        _, message = self._question(args, None)
        message = replace(message, explain=True)
        answer: Answer | None = await self.world.ask(message.readers[0], message)
        if answer is None:
            raise FabricError(f"at: the holder of {args.at} is dead in this story, it explains nothing")
        return Explanation.of_answer(self.world.model, message, answer)

    def _question(self, args: words.Probe, acquire: words.Acquire | None) -> tuple[PromptKeys, Acquire]:
        """What a session at the node would send its leader; without ``acquire``, a probe."""
        model = self.world.model
        keys = keys_of(model, args, args.tokens, self.weights)
        seats = self.world.seats(args.at)
        readers = {shard: seat.holder for seat in seats for shard in seat.shards}
        message = Acquire(
            self._request(),
            prompt_of(keys),
            tuple(self._passport(args.at, g).abi() for g in range(len(model.groups))),
            tuple(readers[s] for s in range(model.shards)),
            acquire.lease_s if acquire is not None else PROBE_LEASE_S,
            acquire.waits_s if acquire is not None else None,
            acquire.min_tokens if acquire is not None else 0,
            acquire is None,
            acquire is not None and acquire.graph,
        )
        return keys, message

    async def _ask_for(self, args: words.Probe, acquire: words.Acquire | None) -> Got:
        model = self.world.model
        keys, message = self._question(args, acquire)
        leader = message.readers[0]
        answer: Answer | None = await self.world.ask(leader, message)
        if answer is None:
            group = model.groups[0]
            return _answered(Status.PARTIAL_HIT, 0, 0, cause_of(group.name, group.kind, Reason.HOLDER_LOST), ())
        if answer.grant is not None and acquire is not None:
            lease = HeldLease(args.at, leader, keys, answer.grant, acquire.lease_s, answer.grant.deadline_s)
            if acquire.name is None:
                await self._done(leader, Release(self._request(), answer.grant.lease, None))
            else:
                self.leases[acquire.name] = lease
        got = _answered(answer.status, answer.tokens, answer.hash_tokens, answer.cause, answer.also)
        return got if answer.replay_from is None else {**got, "replay_from": answer.replay_from}

    async def read(self, args: words.Read) -> Got:
        lease = self.leases.get(args.lease)
        if lease is None or lease.released:
            return _refused(Reason.LEASE_EXPIRED)
        arenas = {part.holder: self.world.arena(part.holder) for part in lease.grant.parts}
        only = None if args.group is None else self.world.model.index_of(args.group)
        refused = self.ledger.read(lease, arenas, self.world.now(lease.node), only)
        return OK if refused is None else _refused(refused)

    async def renew(self, args: words.Renew) -> Got:
        lease = self.leases.get(args.lease)
        if lease is None or lease.released or self.world.now(lease.node) >= lease.deadline_s:
            return _refused(Reason.LEASE_EXPIRED)
        lease_s = args.lease_s or lease.lease_s
        renewed = await self.world.ask(lease.leader, Renew(self._request(), lease.grant.lease, lease_s))
        if renewed is None:
            return _refused(Reason.HOLDER_LOST)
        if renewed.refused is not None:
            return _refused(renewed.refused)
        lease.lease_s, lease.deadline_s = lease_s, renewed.deadline_s
        return OK

    async def release(self, args: words.Release) -> Got:
        lease = self.leases.get(args.lease)
        if lease is not None and not lease.released:
            lease.released = True
            await self._done(lease.leader, Release(self._request(), lease.grant.lease, None))
        return OK

    # --- the world around ----------------------------------------------------------------------

    async def update_weights(self, args: words.UpdateWeights) -> Got:
        if args.to != self.weights:
            self.retired = [w for w in (*self.retired, self.weights) if w != args.to]
            self.weights = args.to
            await self.world.set_weights(self.weights, self.retired)
        return OK

    async def set_abi(self, args: words.SetAbi) -> Got:
        g = self.world.model.index_of(args.group)
        self.passports[args.at, g] = changed_passport(self._passport(args.at, g), args)
        return OK

    async def advance(self, args: words.Advance) -> Got:
        await self.world.advance(args.seconds)
        return OK

    async def kill(self, args: words.Member) -> Got:
        await self.world.kill(args.node)
        return OK

    async def restart(self, args: words.Member) -> Got:
        await self.world.restart(args.node)
        return OK

    async def partition(self, args: words.Between) -> Got:
        await self.world.partition(*args.between)
        return OK

    async def heal(self, args: words.Between) -> Got:
        await self.world.heal(*args.between)
        return OK

    async def inject(self, args: words.Inject) -> Got:
        victim = None
        if args.group is not None:
            group = self.world.model.group(args.group)
            index = args.block if args.block is not None else (args.position or 0) // group.unit_tokens - 1
            victim = Victim(self.world.model.index_of(args.group), index)
        await self.world.inject(args.at, args.fault, args.times, victim)
        return OK

    async def check(self, args: words.Check) -> Got:
        books = await self.world.books()
        got: Got = {}
        if args.pins is not None:
            got["pins"] = books.pins
        if args.slots_lost is not None:
            got["slots_lost"] = books.slots_lost
        if args.metric is not None:
            got["metric"] = {name: books.metrics.get(name, 0) for name in args.metric.model_dump(exclude_none=True)}
        return got

    # --- records -------------------------------------------------------------------------------

    def _request(self) -> str:
        self._requests += 1
        return f"step/{self._requests}"

    async def _done(self, holder: str, message: Any) -> Reason | None:
        done = await self.world.ask(holder, message)
        if done is None:
            return Reason.HOLDER_LOST
        refused: Reason | None = done.refused
        return refused

    def _passport(self, node: str, group: int) -> AbiPassport:
        return self.passports.get((node, group)) or default_passport(self.world.model.groups[group])

    def _items(
        self, keys: PromptKeys, picked: Sequence[Picked], shards: Sequence[int], abis: Sequence[Abi]
    ) -> Iterator[StoreItem]:
        revisions = {p.group: p.revision for p in picked}
        for objects in self._objects(keys, picked, shards):
            length = self.world.model.groups[objects.group].block_bytes
            yield StoreItem(objects, revisions[objects.group], length, abis[objects.group])

    def _objects(self, keys: PromptKeys, picked: Sequence[Picked], shards: Sequence[int]) -> Iterator[Objects]:
        for p in picked:
            digests = split(keys.keys(self.world.model.groups[p.group].unit_tokens))
            indices = tuple(i for i in p.indices if i < len(digests))
            blob = b"".join(digests[i] for i in indices)
            for shard in shards if indices else ():
                yield Objects(p.group, shard, indices, blob)


def _last(tokens: Any) -> int:
    if isinstance(tokens, list):
        return int(tokens[1])
    return tokens if isinstance(tokens, int) else 0


def _refused(reason: Reason) -> Got:
    return {"refused": str(reason)}


def _first(refusals: Sequence[Reason | None]) -> Got:
    return next((_refused(r) for r in refusals if r is not None), OK)


def _answered(status: Status, tokens: int, hash_tokens: int, cause: Cause | None, also: Sequence[str]) -> Got:
    named = None
    if cause is not None:
        named = {
            "group": cause.group,
            "kind": str(cause.kind),
            "layer": str(cause.layer),
            "reason": str(cause.reason),
        }
    return {
        "status": str(status),
        "tokens": tokens,
        "hash_tokens": hash_tokens,
        "cause": named,
        "also": list(also),
    }
