"""Sessions: what an engine's worker holds. Blocking and asyncio forms of the same verbs.

A session speaks to the holders of its own node over their Unix sockets; it computes digests, maps
arenas, and repeats a request under its own id when a holder was replaced. Where there is no holder
to ask, the answer is a recompute with the reason: a session never shows a user a socket error.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..fabric.expected import Work
from ..fabric.explanation import Explanation
from ..fabric.identity import PromptKeys
from ..fabric.kinds import FabricError, Reason, SpecError, Status, WireError, cause_of
from ..fabric.memo import Remembered
from ..fabric.messages import (
    Acquire,
    Audited,
    Cancel,
    Computed,
    Done,
    Generated,
    LeaseGrant,
    Mark,
    Park,
    Retain,
)
from ..fabric.messages import Answer as WireAnswer
from ..fabric.model import ModelSpec
from ..fabric.passport import Abi, AbiPassport
from ..fabric.planner import View
from ..fabric.ranking import NodeRank, rank_nodes
from ..fabric.replay import shortest_replay_tokens
from ..fabric.requests import refusal_of
from ..fabric.room import RETAIN_S_MAX, RETAIN_WEIGHT_MAX
from ..fabric.supervisor import SUPERVISOR
from ..fabric.tally import AuditOutcome
from . import ray_api
from .addresses import actor_name
from .answer import Answer, Parked
from .approximate import Approximations, better
from .attempt import Stored
from .checkpoints import Checkpoints
from .client import HolderClient, HolderLost, request_id
from .clock import MONOTONIC, Clock
from .graph import Graph
from .holders import Holders
from .info import FabricInfo
from .lease import Lease
from .lookahead import Lookahead, in_turn
from .prompts import Prompts
from .storing import Storing
from .tracing import traced, tracer

Bytes = npt.NDArray[np.uint8]

ACQUIRE_TIMEOUT_S = 150.0
RANK_TIMEOUT_S = 10.0


class Session(Storing):
    """A worker's session with the fabric. Thread-safe; may be passed to Ray tasks, where it reconnects."""

    def __init__(
        self,
        resolve: Callable[[], FabricInfo],
        *,
        name: str,
        weights_revision: str | None = None,
        passport: AbiPassport | Mapping[str, AbiPassport] | None = None,
        gpu: int | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        self._clock = clock
        self.name = name
        self._passport = passport
        self._gpu = gpu
        self._lock = threading.Lock()
        self._holders = Holders(name, resolve, self._forget, clock)
        # What this process runs does not change because the fabric's weights do: it would publish old state as new.
        self._prompts = Prompts(self.model, weights_revision or self._holders.info.weights)
        if not isinstance(self._passport, AbiPassport):
            for group in self._passport or ():
                self._prompts.group(group, field="passport")
        self._abis = tuple(self._passport_of(group.name).abi() for group in self.model.groups)
        self._marks: dict[str, tuple[float, Mark]] = {}
        """By holder: how far its changes had got with this session's last write, and until when that matters."""
        self._approximations = Approximations(self.model)
        self._checkpoints = Checkpoints(self.model, self._holders.info.spec.checkpoint)
        self._spans = tracer()
        self._lookahead = Lookahead(self.model, lambda question: self._ask(question, ACQUIRE_TIMEOUT_S))

    # --- where ---------------------------------------------------------------------------------

    @property
    def model(self) -> ModelSpec:
        return self._holders.model

    @property
    def weights_revision(self) -> str:
        """The weights this session's reader runs: as told to ``connect``, else the fabric's at that time.

        After the fabric's weights were updated nothing matches any more: load the new ones, connect anew.
        """
        return self._prompts.weights

    @property
    def abis(self) -> tuple[Abi, ...]:
        """The ABI this session reads and writes, a group."""
        return self._abis

    def _passport_of(self, group: str) -> AbiPassport:
        if isinstance(self._passport, AbiPassport):
            return self._passport
        if self._passport is not None and group in self._passport:
            return self._passport[group]
        return self._holders.info.spec.passport(self.model.group(group))

    # --- prompts -------------------------------------------------------------------------------

    def keys(self, tokens: Any, **key: Any) -> PromptKeys:
        """A prompt's digests, computed once: every call takes them in the place of tokens and of KEY."""
        return self._prompts.keys(tokens, key)

    def named(self, names: Sequence[bytes], *, scheme: str, **key: Any) -> PromptKeys:
        """Blocks that an engine names by hashes of its own, each of which stands for all before it: for every call, in
        the place of tokens. ``scheme`` is the hashes' name and version; KEY must say what they leave out.

        Raises FabricError for a fabric whose model is chained.
        """
        return self._prompts.named(names, scheme, key)

    def refresh(self) -> None:
        """Ask the fabric anew who runs where. Raises FabricError where none of this name and model runs."""
        self._holders.refresh()

    def _forget(self) -> None:
        self._lookahead.forget()

    # --- leases in use ------------------------------------------------------------------------

    def audit_due(self, lease: Lease) -> bool:
        """Whether this lease is one of the ``audit_fraction`` whose state the reader recomputes and compares."""
        share = (lease.grant.lease * 0x9E3779B97F4A7C15 % (1 << 64)) / (1 << 64)
        return share < self._holders.info.spec.audit_fraction

    def audited(self, tokens: Any, lease: Lease, outcome: str, **key: Any) -> Reason | None:
        """Tell what an audit found, before the lease is released: ``equal``, ``close`` (within the stated tolerance where
        the chunk schedule differs) or ``mismatch``, which bars the prompt's chain everywhere until it is stored anew.
        ``late``: nothing was compared in time; so counts all but a mismatch that is told after the lease has ended.

        Why it was not counted, if not. Raises FabricError for another word, Unavailable where the fabric cannot be told.
        """
        keys = self._prompts.keys(tokens, key)
        refused: Reason | None = Reason.HOLDER_LOST
        with contextlib.suppress(HolderLost):  # others may have the same state: a mismatch is told all the same
            client = self._holders.client(lease.grant.leader)
            refused = client.call(Audited(request_id(), lease.grant.lease, outcome), Done).refused
        if refused in (None, Reason.HOLDER_LOST) and outcome == AuditOutcome.MISMATCH:
            self._lookahead.forget()
            prompt = keys.prompt
            supervisor = ray_api.find_actor(actor_name(self.name, SUPERVISOR))
            if supervisor is None:
                raise ray_api.Unavailable(f"fabric {self.name!r} has no supervisor: other holders were not told")
            barred = supervisor.purge.remote(None, prompt.namespace, list(prompt.keys), quarantine=True)
            ray_api.call(barred)
        return refused

    def register_graph(self, lease: Lease) -> Graph | Stored:
        """Register a lease's slots, as they are baked into a graph being captured.

        A refusal says that a slot is not resident any more: capture is not allowed.
        """
        try:
            return Graph.register(lease.grant, self._clients_of(lease.grant))
        except HolderLost:
            return Stored(Reason.HOLDER_LOST)

    # --- asking --------------------------------------------------------------------------------

    def acquire(
        self,
        tokens: Any,
        *,
        lease_s: float = 30.0,
        wait_s: float | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        graph: Graph | bool = False,
        min_tokens: int = 0,
        parked: Parked | None = None,
        **key: Any,
    ) -> Answer:
        """Ask for a lease on the longest prefix that every group can resume at.

        ``wait_s``: how long to wait for room and recovery; None waits for recovery but not for
        room, 0 for nothing. Less than ``min_tokens`` binds no lease. Never raises for what may
        happen to a cache: without a usable prefix the answer is a recompute with its cause.

        ``priority`` and ``deadline_s``: whose restore goes first; what cannot be here by its deadline is
        left out at once. ``parked``: resume a request that was parked, as old as it was.

        ``graph``: a registered graph, whose slots the lease will lie in and freeze until it is
        released; True freezes them wherever they lie.

        With ``approximate=True`` in KEY, state of an approximate replay will do (``Answer.approximate``).
        """
        if not 0 < lease_s <= self._holders.info.spec.lease_s_max:
            raise FabricError(f"lease_s: {lease_s} is not within 0..{self._holders.info.spec.lease_s_max}")
        if wait_s is not None and not 0 <= wait_s < math.inf:
            raise FabricError(f"wait_s: {wait_s} is no time in seconds")
        keys = self._prompts.keys(tokens, key)
        message = self._acquire(
            keys,
            lease_s=lease_s,
            wait_s=wait_s,
            min_tokens=min_tokens,
            graph=graph is not False,
            priority=priority,
            deadline_s=deadline_s,
        )
        if isinstance(graph, Graph):
            message = replace(message, graphs=tuple(graph.numbers.items()))
        asked_s = time.monotonic()
        if parked is not None:
            message = replace(message, age_s=max(asked_s - parked.asked_s, 0.0))
            asked_s = parked.asked_s
        timeout_s = ACQUIRE_TIMEOUT_S + (wait_s or 0.0)
        reply = traced(self._spans, message, lambda: self._ask(message, timeout_s))
        self._lookahead.granted(message, reply)
        self._checkpoints.heard(keys, reply.hash_tokens)
        answer = self._answer(reply, message.request)
        exact = self._prompts.exact(keys)
        if keys.namespace.approximate:
            answer.approximate = answer.tokens > 0
            answer = better(self._by_short_replay(exact, message, timeout_s), answer)
        self._approximations.answered(exact, answer)
        if answer.lease is not None:
            answer.lease.asked_s = asked_s
        return answer

    def _by_short_replay(self, exact: PromptKeys, asked: Acquire, timeout_s: float) -> Answer:
        """The same request to exact state, where a replay of one window will do."""
        message = replace(
            asked,
            request=request_id(),
            prompt=exact.prompt,
            replay_tokens=shortest_replay_tokens(self.model),
        )
        return self._answer(self._ask(message, timeout_s), message.request)

    def prefetch(self, tokens: Any, *, by_s: float | None = None, priority: int = 0, **key: Any) -> Answer:
        """Have the longest prefix brought into this node's memory, without a lease; returns at once.

        ``by_s``: seconds from now within which it will be asked for. What is PENDING can be cancelled.
        """
        probed = self._acquire(self._prompts.keys(tokens, key), probe=True, priority=priority, deadline_s=by_s)
        message = replace(probed, prefetch=True)
        return self._answer(self._ask(message, ACQUIRE_TIMEOUT_S), message.request)

    def retain(self, tokens: Any, *, ttl_s: float, weight: float = 1.0, **key: Any) -> bool:
        """Let what this node holds of a prompt make room later than its use alone would have it, for ``ttl_s`` seconds.

        ``weight`` 1 puts it behind everything else, and fades to nothing over that time; a later call replaces
        an earlier one. It pins nothing: where room has to be made of it, it is. False where a holder did not answer.
        Raises SpecError for a weight outside 0..4 or a time outside 0..86,400 s.
        """
        if not 0 < ttl_s <= RETAIN_S_MAX:
            raise SpecError(f"ttl_s: {ttl_s} is not within 0..{RETAIN_S_MAX:g}")
        if not 0 <= weight <= RETAIN_WEIGHT_MAX:
            raise SpecError(f"weight: {weight} is not within 0..{RETAIN_WEIGHT_MAX:g}")
        prompt, readers = self._prompts.keys(tokens, key).prompt, self._holders.readers
        reached = "" not in readers
        for holder in sorted(set(readers) - {""}):
            try:
                self._holders.client(holder).call(Retain(request_id(), prompt, ttl_s, weight), Done)
            except HolderLost:
                reached = False
        return reached

    def generated(self, tokens: Any, output_tokens: int, **key: Any) -> None:
        """Tell how long the output of a prompt became, once it ended; returns at once.

        The default eviction policy learns from it which prompts come back. ``key`` as in the prompt's ``acquire``; keys
        of the prompt (``session.keys``) will do. Raises FabricError for a number of tokens that is none.
        """
        keys = self._prompts.keys(tokens, key)
        message = Generated(request_id(), keys.prompt, output_tokens)
        if (refusal := refusal_of(message, self.model)) is not None:
            raise FabricError(refusal)
        for holder in sorted(set(self._holders.readers) - {""}):
            # A successor learns anew, and a holder of the version before learns nothing.
            with contextlib.suppress(HolderLost, WireError):
                self._holders.client(holder).tell(message)

    def computed(self, tokens: int, seconds: float, *, replay: bool = False) -> None:
        """Tell how long computing so many tokens took: by prefill, or by a replay of windows and tails.

        A fabric whose model says ``plan: cost`` weighs transfers and restores against it.
        """
        work = Work.REPLAY if replay else Work.PREFILL
        with contextlib.suppress(HolderLost):  # its successor learns anew
            self._holders.client(self._holders.all_here()[0]).call(Computed(request_id(), work, tokens, seconds), Done)

    def park(self, lease: Lease) -> Parked:
        """End the lease of a preempted request and put on disk what nobody else holds of it.

        Its state becomes restorable: ``acquire(..., parked=...)`` resumes it with its age. Where
        nothing can be written, the state stays in memory, evictable.
        """
        asked_s = time.monotonic() if lease.asked_s is None else lease.asked_s
        grant = lease.grant
        try:
            done = self._holders.client(grant.leader).call(Park(request_id(), grant.lease), Done, ACQUIRE_TIMEOUT_S)
        except HolderLost:
            return Parked(asked_s, Reason.HOLDER_LOST)
        lease.release()
        return Parked(asked_s, done.refused)

    def _stop(self, request: str) -> None:
        """Tell the leader that nobody waits for a request any more."""
        with contextlib.suppress(HolderLost):
            self._holders.client(self._holders.readers[0]).call(Cancel(request_id(), request), Done)

    def probe(self, tokens: Any, **key: Any) -> Answer:
        """What an acquire would find; pins and starts nothing. State only on disk is PENDING."""
        return self._answer(self._probe(self._prompts.keys(tokens, key)))

    def _probe(self, keys: PromptKeys) -> WireAnswer:
        return self._ask(self._acquire(keys, probe=True), ACQUIRE_TIMEOUT_S)

    def probe_nowait(self, tokens: Any, **key: Any) -> Remembered | None:
        """What was heard of this prompt's segments in the last two seconds, at once; None where that does not tell.

        Then it is asked in the background, so that the next call knows, of any prompt that begins alike. A hint: only
        a lease promises, and an acquire that finds it wrong makes it forgotten.
        """
        question = self._acquire(self._prompts.keys(tokens, key), probe=True, explain=True)
        return self._lookahead.recall(replace(question, versions=False))

    def match_many(self, prompts: Iterable[Any], **key: Any) -> list[Answer]:
        """:meth:`probe` for a whole batch in one round trip; the answers in the prompts' order.

        A prompt may be tokens or what :meth:`keys` made of them; KEY holds for those given as tokens.
        """
        batch = [p if isinstance(p, PromptKeys) else self._prompts.keys(p, key) for p in prompts]
        messages = [self._acquire(keys, probe=True) for keys in batch]

        def ask() -> list[WireAnswer]:
            readers = self._holders.all_here()
            to_them = [replace(message, readers=readers) for message in messages]
            return self._holders.client(readers[0]).call_many(to_them, WireAnswer, ACQUIRE_TIMEOUT_S)

        try:
            replies = self._holders.again(ask) if messages else []
        except HolderLost:
            replies = in_turn(self._probe, batch)
        return [self._answer(reply) for reply in replies]

    def present(self, tokens: Any, **key: Any) -> dict[str, int]:
        """Which objects of a prompt this reader could use, wherever they lie: a bitmap by group. A hint, no promise."""
        question = replace(self._acquire(self._prompts.keys(tokens, key), probe=True, explain=True), versions=False)
        found = self._view(question, self._ask(question, ACQUIRE_TIMEOUT_S)).evidence()
        return {g.name: reduce(or_, e.usable.values(), 0) for g, e in zip(self.model.groups, found, strict=True)}

    def _view(self, asked: Acquire, reply: WireAnswer, readers: tuple[str, ...] | None = None) -> View:
        """All that an explained answer says of a prompt."""
        view = View(self.model, asked.prompt, asked.abis, readers or asked.readers)
        view.columns = {(c.holder, c.group, c.shard): c for c in reply.columns}
        view.unreachable, view.evicted = set(reply.unreachable), dict(reply.evicted)
        return view

    def rank(self, tokens: Any, **key: Any) -> list[NodeRank]:
        """Every node that has a holder for each shard, best first: how far it could resume, what must be moved to it.

        Any node's holder can be asked, so a router needs none on its own. Where none answers, all have 0 tokens.
        """
        message = self._acquire(self._prompts.keys(tokens, key), probe=True, explain=True)

        def asked(readers: tuple[str, ...]) -> Acquire:
            return replace(message, readers=readers, request=request_id(), versions=False)

        try:
            reply, readers = self._holders.anyone(asked, WireAnswer, RANK_TIMEOUT_S)
        except HolderLost:
            reply, readers = self._nobody(message.request), message.readers
        return rank_nodes(self._view(message, reply, readers), self._holders.by_node())

    def explain(self, tokens: Any, **key: Any) -> Explanation:
        """Per group, up to where it could serve, what cut the hit, and what would lengthen it."""
        keys = self._prompts.keys(tokens, key)
        message = self._acquire(keys, probe=True, explain=True)
        reply = self._ask(message, ACQUIRE_TIMEOUT_S)
        return Explanation.of_answer(self.model, message, reply)

    def request(self, tokens: Any, **key: Any) -> Acquire:
        """The record of a plain acquire, for those who speak to a holder's handle or socket themselves."""
        return self._acquire(self._prompts.keys(tokens, key))

    def _acquire(
        self,
        keys: PromptKeys,
        *,
        lease_s: float = 30.0,
        wait_s: float | None = None,
        min_tokens: int = 0,
        graph: bool = False,
        probe: bool = False,
        explain: bool = False,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Acquire:
        return Acquire(
            request_id(),
            keys.prompt,
            self.abis,
            self._holders.readers,
            lease_s,
            wait_s,
            min_tokens,
            probe,
            graph,
            priority,
            deadline_s,
            explain,
            marks=self._fresh_marks(),
        )

    def _ask(self, message: Acquire, timeout_s: float) -> WireAnswer:
        def ask() -> WireAnswer:
            readers = self._holders.all_here()
            to_them = message if message.readers == readers else replace(message, readers=readers)
            leader = self._holders.client(readers[0])
            if message.graph:  # its connection's end is the proof that this process replays no graph any more
                return leader.call(to_them, WireAnswer, timeout_s)
            return leader.call_apart(to_them, WireAnswer, timeout_s)

        try:
            return self._holders.again(ask)
        except HolderLost:
            return self._nobody(message.request)

    def _nobody(self, request: str) -> WireAnswer:
        """The answer where there is no holder to ask."""
        group = self.model.groups[0]
        cause = cause_of(group.name, group.kind, Reason.HOLDER_LOST)
        return WireAnswer(request, Status.MISS, 0, 0, 0, cause, (), None, None, None)

    def _answer(self, reply: WireAnswer, request: str = "") -> Answer:
        try:
            lease = None if reply.grant is None else self._lease(reply.grant)
        except HolderLost:  # it granted, and died
            reply, lease = self._nobody(request), None
        pending = bool(request) and reply.status is Status.PENDING
        return Answer(
            reply.status,
            reply.tokens,
            reply.hash_tokens,
            reply.usable_tokens,
            reply.cause,
            reply.also,
            reply.replay_from,
            reply.expected_s,
            lease,
            reply.tokens_lost_to_alignment,
            dict(reply.moved_bytes),
            reply.sources,
            reply.approximate,
            partial(self._stop, request) if pending else None,
        )

    def _lease(self, grant: LeaseGrant) -> Lease:
        return Lease(self.model, grant, self._clients_of(grant), self._holders.info.node, clock=self._clock)

    def _clients_of(self, grant: LeaseGrant) -> dict[str, HolderClient]:
        """A connection to each holder of a lease. Raises HolderLost."""
        return {part.holder: self._holders.client(part.holder) for part in grant.parts}

    # --- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connections. Open attempts are given up; leases run to their deadlines."""
        self._lookahead.close()
        self._holders.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reconnect, (self.name, self._prompts.weights, self._passport, self._gpu))


def _reconnect(name: str, weights: str | None, passport: Any, gpu: int | None) -> Session:
    from .fabric import connect

    return connect(name, weights_revision=weights, passport=passport, gpu=gpu)
