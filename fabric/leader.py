"""The leader: one acquire from the question to the lease, over every holder it takes.

    start -> own and mates' columns -> (all here) -> parts -> grant -> answer
                                    -> directory lookup -> plan -> parts ...
    plan  -> nothing usable, too little, pending: answer without a lease
          -> no room: wait in line (only with wait_s), or the largest position there is room for
    parts -> all ready: grant everywhere, or nowhere
          -> a refusal: learn its truth, erode again, a bounded number of rounds

Every way out is :meth:`Leader._finish`, which counts the acquire once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from .acquires import DONE, WAITING, WORKING, AcquireOp
from .answering import Answers, explained
from .at_hand import AtHand, longest
from .choosing import Choice, Terms, choose
from .context import HolderContext, Recent
from .disk import DiskDesk
from .found import Hints
from .journal import Answered
from .kinds import Reason, Status
from .messages import (
    Acquire,
    Answer,
    Cancel,
    Column,
    Done,
    Fetch,
    Found,
    LeaseGrant,
    LeasePart,
    MateColumns,
    MateLookup,
    PartAbort,
    PartGrant,
    PartGranted,
    PartOpen,
    PartRelease,
    PartReply,
    PinReply,
    PinRequest,
)
from .parts import PartDesk
from .planner import View
from .requests import gist, other_request
from .room_line import RoomLine, largest_with_room
from .rules import Resolution, usable_position
from .segments import Router
from .turns import TierTurns

FROM_HELD_SLOTS = frozenset({Reason.GRAPH_FROZEN, Reason.PINNED})
"""Refusals of a graph lease that no other position or source would lift: the engine runs eagerly."""

OF_ROOM = frozenset({Reason.ADMISSION_LIMIT, Reason.QUOTA})
"""Refusals for want of room: a registered graph's slots are given, so a shorter position frees none."""

ASKS_MAX = 1024
"""Questions to directory shards for one acquire, those to where segments moved included."""


class Leader:
    """All acquires that this holder leads."""

    def __init__(self, ctx: HolderContext, disk: DiskDesk, parts: PartDesk) -> None:
        self.ctx = ctx
        self.disk = disk
        self.at_hand = AtHand(ctx, parts)
        self.recovering: dict[str, AcquireOp] = {}
        """What is brought into memory without a reader, by the request that asked for it."""
        self.ops: dict[str, AcquireOp] = {}
        self.by_request: dict[str, AcquireOp] = {}
        self.answers = Answers(ctx, disk)
        self.room = RoomLine(ctx, self._plan)
        self.waiting = self.room.line
        self.turns = TierTurns(
            ctx, disk, plan=self._plan, pending=self._finish_pending, without_tiers=self._without_tiers
        )
        self.granted: Callable[[Acquire, int], None] = lambda _, __: None
        """Told of every lease that a reader got, and for how many tokens."""
        self._recent = Recent(ctx.config.answers_kept)

    # --- start ---------------------------------------------------------------------------------

    def start(self, client: str, message: Acquire) -> None:
        """Begin, resume or re-answer: one request id is one acquire, however often it is sent."""
        asked = gist(message)
        known = self._recent.get(message.request, asked)
        running = self.by_request.get(message.request)
        if known is None and running is not None and gist(running.request) != asked:
            known = other_request(message.request)
        if known is not None:
            self.ctx.send(client, known)
            return
        if running is not None:
            running.client, running.background = client, False
            return
        answer = self.at_hand.answer(client, message)
        if answer is not None:
            if not message.probe and client != self.ctx.config.holder:
                self.ctx.tally.answered(message.prompt.n, answer, answer.tokens)
                self.ctx.journal.add(Answered(self.ctx.now, message, answer))
                self.granted(message, answer.tokens)
            self._recent.put(message.request, answer, asked)
            self.ctx.send(client, answer)
            return
        op = self._new_op(client, message)
        if len(self.by_request) >= self.ctx.config.acquires_max:
            self._learn_self(op)
            self._finish(op, 0, refused=Reason.QUOTA)
            return
        self.by_request[message.request] = op
        if message.prompt.weights in self.ctx.retired:
            self._finish_miss(op)
            return
        op.refusal = self.refusal()
        if op.refusal is None and not message.probe and not self.ctx.books.admission.may_lease(message.prompt.tenant):
            op.refusal = Reason.QUOTA
        self._next_op(op)
        for mate in sorted(set(message.readers) - {self.ctx.config.holder}):
            op.asked.add(mate)
            self.ctx.send(mate, MateLookup(op.op, message.prompt))
        if op.asked:
            self._time_out(op, self._mates_silent)
        else:
            self._here_known(op)

    def _part_grant(self, op: str, client: str, message: Acquire) -> PartGrant:
        return PartGrant(op, min(message.lease_s, self.ctx.config.lease_s_max), message.graph, client)

    def client_gone(self, client: str) -> None:
        """Whoever asked is gone: what is under way runs to its end, and its lease ends as it begins."""
        for op in self.by_request.values():
            if op.client == client:
                op.background = True

    def refusal(self) -> Reason | None:
        """Why this holder grants nothing at all now."""
        if self.ctx.bypassed:
            return Reason.BYPASSED
        if self.ctx.draining:
            return Reason.DRAINING
        if not self.ctx.may_grant:
            return Reason.NOT_GRANTING
        return None

    def _new_op(self, client: str, message: Acquire) -> AcquireOp:
        view = View(self.ctx.model, message.prompt, message.abis, message.readers)
        return AcquireOp(message, client, view, self.ctx.now)

    def _next_op(self, op: AcquireOp) -> None:
        """A fresh exchange id: replies to an earlier round no longer count."""
        self.ops.pop(op.op, None)
        op.cancel_timers()
        op.op = self.ctx.op()
        self.ops[op.op] = op

    def _time_out(self, op: AcquireOp, late: object, after_s: float | None = None) -> None:
        name = op.op
        at = self.ctx.now + (self.ctx.config.request_timeout_s if after_s is None else after_s)

        def fire() -> None:
            if self.ops.get(name) is op and op.phase == WORKING:
                late(op)  # type: ignore[operator]

        op.timers.append(self.ctx.wake_at(at, fire))

    # --- what is here --------------------------------------------------------------------------

    def mate_columns(self, peer: str, message: MateColumns) -> None:
        op = self.ops.get(message.op)
        if op is None or peer not in op.asked:
            return
        op.asked.discard(peer)
        op.view.learn(peer, message.columns)
        op.view.learn_room(peer, message.room, message.caps)
        if op.asked:
            return
        if op.phase == WAITING:
            self.room.try_again()
        else:
            self._here_known(op)

    def _mates_silent(self, op: AcquireOp) -> None:
        """A rank that does not answer can serve nothing: none of the ranks gets a lease."""
        if op.asked:
            op.view.unreachable |= op.asked
            op.asked.clear()
            op.refusal = op.refusal or Reason.HOLDER_LOST
            self._here_known(op)

    def _learn_self(self, op: AcquireOp) -> None:
        """What this holder has, unless nothing changed here since it was last asked."""
        ctx = self.ctx
        if op.learned_at != ctx.books.generation:
            me = ctx.config.holder
            op.learned_at = ctx.books.generation
            op.view.learn(me, ctx.books.columns(me, ctx.incarnation, op.request.prompt, ctx.books.shards))

    def _learn_own_room(self, op: AcquireOp) -> None:
        books, prompt = self.ctx.books, op.request.prompt
        op.view.learn_room(self.ctx.config.holder, books.rooms(prompt), books.admission.caps(prompt.tenant))

    def _here_known(self, op: AcquireOp) -> None:
        """All ranks told what they have: enough here for the best there could be needs no directory."""
        self._learn_self(op)
        model, n, best = self.ctx.model, op.request.prompt.n, self._best(op)
        if op.refusal is None and best and not model.drop_last_blocks and not op.request.explain:
            evidence = op.view.of_readers().evidence(tiers=False)
            if usable_position(model, evidence, n) == best:
                self._plan(op)
                return
        self._ask_directory(op)

    def _best(self, op: AcquireOp) -> int:
        """The highest position that the grid allows."""
        return longest(self.ctx.model, op.request.prompt.n)

    def _ask_directory(self, op: AcquireOp) -> None:
        op.directory_asked = True
        self._next_op(op)
        op.view.hints = Hints()
        op.told.clear()
        self._ask_shards(op, self.ctx.router)
        self._time_out(op, self._directory_silent)

    def _ask_shards(self, op: AcquireOp, router: Router, only: Sequence[tuple[int, int]] | None = None) -> None:
        """Ask every shard that answers for a part of the prompt, all at once."""
        lookups = router.lookups(op.op, op.request.prompt, op.request.marks, only)
        for shard, lookup in lookups.items():
            op.asks += 1
            op.shards_awaited[op.asks] = shard
            self.ctx.send(shard, replace(lookup, ask=op.asks))
        if not op.shards_awaited:
            self._directory_known(op)

    # --- directory -----------------------------------------------------------------------------

    def for_a_tier(self, name: str) -> bool:
        """Whether an exchange is an acquire's, no mere question, of whose prompt something lies on this holder's own tiers."""
        op = self.ops.get(name)
        return op is not None and not op.request.probe and self.turns.own_tier(op)

    def found(self, peer: str, message: Found) -> None:
        """One shard's answer; what moved to another shard meanwhile is asked for there."""
        op = self.ops.get(message.op)
        if op is None or op.shards_awaited.get(message.ask) != peer:
            return
        del op.shards_awaited[message.ask]
        op.view.hints.learn(message)
        op.told.extend((peer, message.epoch, *edition) for edition in message.editions)
        for group, bits in message.evicted:
            op.view.evicted[group] = op.view.evicted.get(group, 0) | bits
        op.view.unreachable.update(set(message.stale).difference(op.view.readers))
        if message.map is not None and message.map.shards and op.asks < ASKS_MAX:
            self.ctx.send(self.ctx.config.holder, message.map)
            self._ask_shards(op, replace(self.ctx.router, map=message.map), message.moved)
        elif not op.shards_awaited:
            self._directory_known(op)

    def _directory_known(self, op: AcquireOp) -> None:
        """Every shard answered, or will not: learn what was said of other holders, and plan."""
        own = set(op.view.readers)
        by_holder: dict[str, list[Column]] = {}
        for column in op.view.hints.columns():
            if column.holder not in own:
                by_holder.setdefault(column.holder, []).append(column)
        for holder, columns in by_holder.items():
            op.view.learn(holder, columns)
        self._plan(op)

    def _directory_silent(self, op: AcquireOp, shard: str | None = None) -> None:
        """A shard (or every one that was awaited) does not answer: its segments are not known."""
        silent = [ask for ask, asked in op.shards_awaited.items() if shard in (None, asked)]
        for ask in silent:
            del op.shards_awaited[ask]
        if silent:
            op.view.directory_known = False
            if not op.shards_awaited:
                self._directory_known(op)

    # --- plan ----------------------------------------------------------------------------------

    def _plan(self, op: AcquireOp) -> None:
        """Erode what is known now; answer, wait, or open the shares."""
        op.rounds += 1
        op.phase = WORKING
        self._restores(op, now=False)
        self._next_op(op)
        if op.request.prompt.weights in self.ctx.retired:
            self._finish_miss(op)
            return
        self._learn_self(op)
        request, view = op.request, op.view
        found = view.found(tiers=op.late is None)
        if op.refusal is not None:
            self._finish(op, 0, refused=op.refusal)
            return
        if op.rounds > self.ctx.config.rounds_max:
            self._finish(op, 0, refused=Reason.DEADLINE_EXCEEDED)
            return
        if not op.directory_asked and found.tokens < self._best(op):
            self._ask_directory(op)  # what was here proved wrong: others may have it
            return
        if found.status in (Status.PARTIAL_HIT, Status.INVALID) and self._ask_the_unheard(op):
            return
        op.choice = self._choose(op, found)
        op.limited = op.late or op.choice.left_out
        found = op.chosen
        if not found.tokens:
            self._finish(op, 0)
            return
        op.looking = request.probe or found.tokens < request.min_tokens
        op.pending_restore = False
        if (op.looking or request.wait_s == 0) and not op.background:
            op.pending_restore = self._waits_for_a_tier(op, found)
        if op.looking or op.pending_restore:
            self._check_sources(op, found)
        else:
            self._admit(op, found)

    def _choose(self, op: AcquireOp, found: Resolution) -> Choice:
        """The position to resume at, by the plan of the model and what things cost."""
        terms = Terms(
            tiers=op.late is None,
            replays=not op.request.graph,
            min_tokens=op.request.min_tokens,
            queued_bytes=self.disk.bytes_before(self.turns.place_s(op)),
            explain=op.request.explain,
            replay_tokens=op.request.replay_tokens,
            in_host=partial(self.ctx.books.in_host, op.request.prompt),
        )
        return choose(op.view, found, self.ctx.planning, terms)

    def _waits_for_a_tier(self, op: AcquireOp, found: Resolution) -> bool:
        """Whether a recovery would lengthen the hit; of a position that was chosen, whether it takes one."""
        if op.replays or (op.choice is not None and op.choice.expected):
            return bool(op.using.on_tiers(found.tokens, found.revisions))
        return op.view.found(tiers=False).tokens < found.tokens

    def _admit(self, op: AcquireOp, found: Resolution) -> None:
        """State and room are one admission: the whole need of a position, or a shorter one."""
        view, tokens = op.using, found.tokens
        if view.held_by_readers(tokens, found.revisions):
            self._open_parts(op, tokens, found)
            return
        self._learn_own_room(op)
        lacking = view.lacking_room(tokens)
        if lacking is not None:
            possible = largest_with_room(op, tokens, whole_pool=True)
            ready = largest_with_room(op, tokens, whole_pool=False)
            if ready < possible and self.ctx.now < op.wait_until_s:
                self.room.wait(op)
                return
            op.limited = lacking
            tokens = ready
            self.ctx.counters["admission_refusals"] += 1
            self.ctx.tally.admission_refusals["acquire", lacking[1]] += 1
        elif self.waiting and op not in self.waiting and self.ctx.now < op.wait_until_s:
            self.room.wait(op)
            return
        if tokens < max(op.request.min_tokens, 1):
            self._finish(op, 0, refused=op.limited[1] if op.limited else None)
            return
        self._in_turn(op, tokens, found)

    # --- what must come from this holder's tier ------------------------------------------------

    def _in_turn(self, op: AcquireOp, tokens: int, found: Resolution) -> None:
        """Open the shares; what needs this holder's disk first gets its turn, or is given up where it would be late."""
        far = self.turns.far_tiers(op, tokens, found)
        if far is not None and self.ctx.now + far[1] > op.due_s:
            self.ctx.counters["restores_given_up"] += 1
            self._without_tiers(op, far[0], Reason.DEADLINE_EXCEEDED)
            return
        need, nbytes = self.turns.tier_need(op, tokens, found)
        tiers = self.turns.on_tiers(op, tokens, op.revisions_at(tokens, found))
        held = bool(tiers) and not self.turns.may_restore(op)
        if not need and not held:
            self._open_parts(op, tokens, found)
            return
        place_s = self.turns.place_s(op)
        group = next(iter(need))[0] if need else tiers[0]
        if self.ctx.now + self.disk.expected_s(nbytes, place_s) > op.due_s:
            self.ctx.counters["restores_given_up"] += 1
            self._without_tiers(op, group, Reason.DEADLINE_EXCEEDED)
        elif held or (op.turn is None and (len(self.disk.line) or not self.disk.line.admits(need))):
            self.turns.stand_in_line(op, need, place_s, group)
        else:
            op.turn = None
            self._open_parts(op, tokens, found)

    def _without_tiers(self, op: AcquireOp, group: int, reason: Reason) -> None:
        """Answer from what is in memory: the rest is computed sooner than it could be restored."""
        op.turn = None
        op.limited = op.late = (group, reason)
        self._plan(op)

    def _deadline_passed(self, op: AcquireOp) -> None:
        if not op.replies and not op.granted:
            need, _ = self.turns.tier_need(op, op.tokens, op.chosen)
            self._undo(op)
            if need:
                self._without_tiers(op, next(iter(need))[0], Reason.DEADLINE_EXCEEDED)
            else:
                self._finish(op, 0, refused=Reason.DEADLINE_EXCEEDED)

    def cancel(self, client: str, message: Cancel) -> None:
        """Stop working on a request: nobody waits for its answer, or for what it started."""
        for op in (self.by_request.get(message.of), self.recovering.get(message.of)):
            if op is not None and op.phase != DONE:
                self._cancel(op)
        self.ctx.send(client, Done(message.request, None, ""))

    def _cancel(self, op: AcquireOp) -> None:
        self.ctx.counters["acquires_cancelled"] += 1
        self._undo(op, cancel=True)
        self._finish(op, 0, refused=Reason.DEADLINE_EXCEEDED)

    # --- shares --------------------------------------------------------------------------------

    def _open_parts(self, op: AcquireOp, tokens: int, found: Resolution) -> None:
        revisions = op.revisions_at(tokens, found)
        op.tokens = tokens
        op.plans = op.using.plan(tokens, revisions)
        op.restores = bool(self.turns.on_tiers(op, tokens, revisions))
        self._restores(op, now=op.restores)
        op.replies = {}
        op.granted = {}
        ttl_s = self.ctx.config.recovery_wait_s + 2 * self.ctx.config.transfer_timeout_s
        if op.request.wait_s:
            self._time_out(op, self._recovery_too_slow, max(op.wait_until_s - self.ctx.now, 0.0))
        if op.due_s < self.ctx.now + ttl_s and op.late is None:
            self._time_out(op, self._deadline_passed, max(op.due_s - self.ctx.now, 0.0))
        self._time_out(op, self._parts_silent, ttl_s)
        for plan in op.plans:
            op.sources.update(fetch.source for fetch in plan.fetches)
            self.ctx.send(
                plan.holder,
                PartOpen(
                    op.op,
                    op.request.prompt,
                    op.request.abis,
                    tokens,
                    revisions,
                    plan.shards,
                    tuple(plan.local),
                    tuple(plan.fetches),
                    ttl_s,
                    dict(op.request.graphs).get(plan.holder, 0),
                    self.turns.place_s(op) - self.ctx.now,
                    op.replays,
                ),
            )

    def part_reply(self, peer: str, message: PartReply) -> None:
        op = self.ops.get(message.op)
        if op is None or op.phase == DONE:
            if message.refused is None:
                self.ctx.send(peer, PartAbort(message.op))
            return
        if peer in op.replies:
            return
        op.replies[peer] = message
        for group, moved in message.moved_bytes:
            op.moved[group] = op.moved.get(group, 0) + moved
        if len(op.replies) < len(op.plans):
            return
        if all(reply.refused is None for reply in op.replies.values()):
            for plan in op.plans:
                self.ctx.send(plan.holder, self._part_grant(op.op, op.client, op.request))
            self._time_out(op, self._parts_silent)
            return
        for holder, reply in op.replies.items():
            if reply.refused is None:
                self.ctx.send(holder, PartAbort(op.op))
            self._learn_refusal(op, holder, reply)
        if any(reply.refused is Reason.WEIGHTS_MISMATCH for reply in op.replies.values()):
            self._finish_miss(op)
            return
        final = FROM_HELD_SLOTS | OF_ROOM if op.request.graphs else FROM_HELD_SLOTS
        held = next((r for r in op.replies.values() if r.refused in final), None)
        if held is not None and held.refused is not None:
            op.limited = (held.group, held.refused)
            self._finish(op, 0, refused=held.refused)
            return
        self._plan(op)

    def _learn_refusal(self, op: AcquireOp, holder: str, reply: PartReply) -> None:
        view = op.view
        by_holder: dict[str, list[Column]] = {}
        for column in reply.stale:
            by_holder.setdefault(column.holder, []).append(column)
        for told, columns in by_holder.items():
            view.learn(told, columns)
        if reply.refused is not None:
            view.learn_room(holder, reply.room, reply.caps)
        view.unreachable.update(reply.lost)
        for bad in reply.bad:
            view.mark_bad(bad)

    def _parts_silent(self, op: AcquireOp) -> None:
        """A rank stopped answering between reserve and grant: none of the ranks gets a lease."""
        silent = [plan.holder for plan in op.plans if plan.holder not in (op.granted or op.replies)]
        op.view.unreachable.update(silent)
        self._undo(op)
        self._finish(op, 0, refused=Reason.HOLDER_LOST)

    def _recovery_too_slow(self, op: AcquireOp) -> None:
        if not op.replies and not op.granted:
            self._undo(op)
            self._finish_pending(op, op.chosen)

    def _undo(self, op: AcquireOp, *, cancel: bool = False) -> None:
        for plan in op.plans:
            granted = op.granted.get(plan.holder)
            if granted is not None and granted.refused is None:
                self.ctx.send(plan.holder, PartRelease(granted.lease))
            else:
                self.ctx.send(plan.holder, PartAbort(op.op, cancel))

    # --- grant ---------------------------------------------------------------------------------

    def part_granted(self, peer: str, message: PartGranted) -> None:
        op = self.ops.get(message.op)
        if op is None or op.phase == DONE or peer in op.granted:
            known = op is not None and peer in op.granted and op.granted[peer].lease == message.lease
            if message.refused is None and not known and not self.leads(peer, message.lease):
                self.ctx.send(peer, PartRelease(message.lease))
            return
        op.granted[peer] = message
        if len(op.granted) < len(op.plans):
            return
        refused = [g.refused for g in op.granted.values() if g.refused is not None]
        if refused:
            self._undo(op)
            if Reason.WEIGHTS_MISMATCH in refused:
                self._finish_miss(op)
            else:
                self._finish(op, 0, refused=refused[0])
            return
        own = op.granted[self.ctx.config.holder]
        record = self.ctx.leases.live.get(own.lease)
        if record is not None:
            record.mates = tuple((h, g.lease) for h, g in op.granted.items() if h != self.ctx.config.holder)
        parts: list[LeasePart] = [g.part for _, g in sorted(op.granted.items()) if g.part is not None]
        # This holder granted as it asked the others to, on its own clock; none of theirs ends before.
        weights = op.request.prompt.weights
        replay_from = self.answers.replay_from_of(op, op.tokens)
        grant = LeaseGrant(
            self.ctx.config.holder,
            own.lease,
            op.tokens,
            own.deadline_s,
            weights,
            tuple(parts),
            replay_from,
            self.answers.is_approximate(op.tokens, replay_from),
        )
        answer = self._finish(op, op.tokens, grant=grant)
        if record is not None and len(op.plans) == 1 and not op.sources and self._whole(op, answer):
            self.at_hand.standing.put(op.request, record.proof, answer.tokens_lost_to_alignment)

    def _whole(self, op: AcquireOp, answer: Answer) -> bool:
        """Whether nothing anywhere could give this request more, so that all of it is on its readers' own holders."""
        longest = answer.tokens == self._best(op) and not self.ctx.model.drop_last_blocks and not op.replays
        return longest and answer.status is Status.FULL_HIT and answer.cause is None

    # --- reachability, without a lease ---------------------------------------------------------

    def _check_sources(self, op: AcquireOp, found: Resolution) -> None:
        """A probe counts only holders that answer: ask each source of the plan for its truth."""
        op.plans = op.using.plan(found.tokens, found.revisions)
        by_source: dict[str, list[Fetch]] = {}
        for plan in op.plans:
            for fetch in plan.fetches:
                if fetch.source not in op.checked:
                    by_source.setdefault(fetch.source, []).append(fetch)
        if not by_source:
            if op.pending_restore:
                self._finish_pending(op, found)
            else:
                self._finish(op, found.tokens)
                if op.request.prefetch:
                    self._recover(op)
            return
        op.asked, op.hearing = set(by_source), False
        for source, fetches in by_source.items():
            self.ctx.send(
                source,
                PinRequest(
                    op.op,
                    fetches[0].incarnation,
                    op.request.prompt,
                    tuple(fetch.objects for fetch in fetches),
                    found.revisions,
                    op.request.abis,
                    True,
                    True,
                    0.0,
                ),
            )
        self._time_out(op, self._sources_silent)

    def _ask_the_unheard(self, op: AcquireOp) -> bool:
        """Ask for a sign of life from everyone who is said to have anything; False if all gave one."""
        incarnations = {column.holder: column.incarnation for column in op.view.columns.values()}
        unheard = set(incarnations) - set(op.request.readers) - op.heard - op.view.unreachable
        op.asked, op.hearing = unheard, True
        for holder in sorted(unheard):
            revisions = (None,) * len(self.ctx.model.groups)
            abis = op.request.abis
            self.ctx.send(
                holder,
                PinRequest(op.op, incarnations[holder], op.request.prompt, (), revisions, abis, True, False, 0.0),
            )
        if unheard:
            self._time_out(op, self._sources_silent)
        return bool(unheard)

    def pin_reply(self, peer: str, message: PinReply) -> bool:
        """The reply to a dry pin; False if it is none of this desk's."""
        op = self.ops.get(message.op)
        if op is None or not (op.looking or peer in op.asked):
            return False
        if peer in op.asked:
            op.asked.discard(peer)
            if op.hearing:
                op.heard.add(peer)
            else:
                op.checked.add(peer)
            if message.refused is Reason.WEIGHTS_MISMATCH:
                self._finish_miss(op)
                return True
            if message.refused is Reason.HOLDER_LOST:
                op.view.unreachable.add(peer)
            elif message.refused is not None:
                op.checked.discard(peer)
                op.view.learn(peer, message.truth)
            if not op.asked:
                self._plan(op)
        return True

    def _sources_silent(self, op: AcquireOp) -> None:
        if op.asked:
            op.view.unreachable |= op.asked
            op.asked.clear()
            self._plan(op)

    def unreachable(self, peer: str, name: str) -> None:
        """The driver says a peer of this exchange cannot be reached now."""
        op = self.ops.get(name)
        if op is None or op.phase == DONE:
            return
        if peer in self.ctx.router.shards:
            self._directory_silent(op, peer)
        elif op.phase == WAITING:
            if peer in op.asked:
                op.refusal = Reason.HOLDER_LOST
                op.view.unreachable.add(peer)
                self.waiting.leave(op)
                self._plan(op)
        elif peer in op.asked:
            if op.rounds:
                op.view.unreachable.add(peer)
                op.asked.discard(peer)
                if not op.asked:
                    self._plan(op)
            else:
                self._mates_silent(op)
        elif any(plan.holder == peer for plan in op.plans):
            op.view.unreachable.add(peer)
            self._undo(op)
            self._finish(op, 0, refused=Reason.HOLDER_LOST)

    def holder_gone(self, holder: str) -> None:
        """The supervisor says a holder died: every exchange that waits for it is told, as if it could not be reached."""
        for name in list(self.ops):
            self.unreachable(holder, name)

    # --- answers -------------------------------------------------------------------------------

    def _finish_miss(self, op: AcquireOp) -> None:
        self._answer(op, Answer(op.request.request, Status.MISS, 0, 0, 0, None, (), None, None, None))

    def _finish_pending(self, op: AcquireOp, found: Resolution) -> None:
        """Recovery would lengthen the hit and is not awaited; an acquire starts it all the same."""
        answer = self.answers.pending(op, found, self.turns.far_tiers(op, found.tokens, found))
        self._counted(op, answer, 0)
        request, in_line = op.request, op.turn is not None
        recover = request.prefetch or (not request.probe and (request.wait_s == 0 or in_line))
        self._answer(op, answer)
        if recover and not op.background:
            self._recover(op)

    def _recover(self, op: AcquireOp) -> None:
        """Bring the state into memory without a reader: its lease ends as it begins."""
        request = replace(op.request, probe=False, prefetch=False)
        again = AcquireOp(request, op.client, op.view, self.ctx.now, background=True)
        self.recovering[request.request] = again
        self._plan(again)

    def _finish(
        self, op: AcquireOp, tokens: int, *, grant: LeaseGrant | None = None, refused: Reason | None = None
    ) -> Answer:
        """The one way out: what was granted, what the rules allowed, what cut it."""
        answer = self.answers.finished(op, tokens, grant, refused)
        self._counted(op, answer, tokens if grant is not None else 0)
        self._answer(op, answer)
        return answer

    def _counted(self, op: AcquireOp, answer: Answer, granted: int) -> None:
        if op.background or op.request.probe or op.client == self.ctx.config.holder:
            return
        if op.restores and granted:
            self.ctx.recovery.add(self.ctx.now - op.started_s)
        self.ctx.tally.answered(op.request.prompt.n, answer, granted)
        if answer.cause is not None:
            self.ctx.books.losses.cut(answer.cause.group, op.request.prompt, answer.hash_tokens, granted)
        self.ctx.journal.add(Answered(self.ctx.now, op.request, answer))
        if granted:
            self.granted(op.request, granted)

    def _restores(self, op: AcquireOp, *, now: bool) -> None:
        """Whether a request waits for a tier now, in the books of its tenant."""
        if op.charged != now:
            op.charged = now
            self.ctx.books.admission.restoring(op.request.prompt.tenant, 1 if now else -1)

    def _answer(self, op: AcquireOp, answer: Answer) -> None:
        op.phase = DONE
        if answer.replay_from is not None:
            answer = replace(answer, approximate=self.answers.is_approximate(answer.tokens, answer.replay_from))
        self._restores(op, now=False)
        op.cancel_timers()
        if op.turn is not None:
            self.disk.line.leave(op.turn)
            op.turn = None
        self.ops.pop(op.op, None)
        self.by_request.pop(op.request.request, None)
        self.waiting.leave(op)
        if op.background:
            self.recovering.pop(op.request.request, None)
            if answer.grant is not None:
                self.release(answer.grant.lease)
            return
        self._recent.put(op.request.request, answer, gist(op.request))
        if op.request.explain:
            answer = explained(op, answer)
        self.ctx.send(op.client, answer)

    # --- leases of several holders -------------------------------------------------------------

    def leads(self, mate: str, lease: int) -> bool:
        """Whether a mate's share belongs to a live lease of this leader's, or may yet come to."""
        if any((mate, lease) in record.mates for record in self.ctx.leases.live.values()):
            return True
        return any(mate in op.replies for op in self.ops.values())

    def release(self, lease: int) -> None:
        """End a lease here and on its other ranks' holders."""
        record = self.ctx.leases.end(lease, self.ctx.now)
        if record is not None:
            for holder, theirs in record.mates:
                self.ctx.send(holder, PartRelease(theirs))
