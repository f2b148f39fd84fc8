"""What an acquire is answered: how far, and what cut it."""

from __future__ import annotations

from dataclasses import replace

from .acquires import AcquireOp
from .cause import absent_reason
from .context import HolderContext
from .disk import DiskDesk
from .kinds import Cause, Form, Reason, Status, cause_of
from .messages import Answer, LeaseGrant
from .replay import replay_of
from .rules import Resolution


class Answers:
    """Words every answer of one holder; changes nothing."""

    def __init__(self, ctx: HolderContext, disk: DiskDesk) -> None:
        self.ctx = ctx
        self.disk = disk

    def pending(self, op: AcquireOp, found: Resolution, far: tuple[int, float] | None) -> Answer:
        """Recovery would lengthen the hit and is not awaited. ``far``: what other holders' tiers bring last, and when."""
        cause, also = self._pending_cause(op, found)
        nbytes = 0.0
        for plan in op.using.plan(found.tokens, found.revisions):
            for run in plan.local if plan.holder == self.ctx.config.holder else ():
                column = op.view.columns.get((plan.holder, run.group, run.shard))
                if column is not None:
                    nbytes += self.disk.weight_bytes(run, column.tier)
        return Answer(
            op.request.request,
            Status.PENDING,
            found.tokens,
            found.hash_tokens,
            self._usable_tokens(op),
            cause,
            also,
            self.replay_from_of(op, found.tokens),
            max(self.disk.expected_s(nbytes) if nbytes or far is None else 0.0, 0.0 if far is None else far[1]),
            None,
            found.tokens_lost_to_alignment,
        )

    def finished(self, op: AcquireOp, tokens: int, grant: LeaseGrant | None, refused: Reason | None) -> Answer:
        """What was granted, what the rules allowed, what cut it."""
        model, request = self.ctx.model, op.request
        found = op.using.found()
        status, cause, also = found.status, found.cause, found.also
        if tokens < found.tokens:
            status = Status.PARTIAL_HIT
            cause, also = self._refused_cause(op, refused), ()
        elif refused is not None and found.status is not Status.MISS:
            if status is Status.FULL_HIT:
                status = Status.PARTIAL_HIT
            cause, also = self._refused_cause(op, refused), ()
        return Answer(
            request.request,
            status,
            tokens,
            found.hash_tokens,
            self._usable_tokens(op),
            cause,
            also,
            self.replay_from_of(op, tokens),
            None,
            grant,
            found.tokens_lost_to_alignment,
            tuple((model.groups[g].name, n) for g, n in sorted(op.moved.items())),
            tuple(sorted(op.sources)) if grant is not None else (),
        )

    def _pending_cause(self, op: AcquireOp, found: Resolution) -> tuple[Cause | None, tuple[str, ...]]:
        """The group on a tier that cuts the hit in memory; else the first that lies there, and also the others."""
        in_memory = op.using.found(tiers=False)
        cause = in_memory.cause
        if in_memory.tokens < found.tokens and cause is not None and cause.reason is Reason.RESTORE_PENDING:
            return cause, in_memory.also
        waiting = [self.ctx.model.groups[g] for g in op.using.on_tiers(found.tokens, found.revisions)]
        if not waiting:
            return found.cause, found.also
        also = tuple(group.name for group in waiting[1:])
        return cause_of(waiting[0].name, waiting[0].kind, Reason.RESTORE_PENDING), also

    def _usable_tokens(self, op: AcquireOp) -> int:
        return op.using.found(transport=False).tokens

    def replay_from_of(self, op: AcquireOp, tokens: int) -> int | None:
        """From where its reader computes windows and tails again for a position; None where they are kept."""
        replay = replay_of(self.ctx.model) if op.replays and tokens else None
        return None if replay is None else replay.start(tokens, op.request.replay_tokens)

    def is_approximate(self, tokens: int, replay_from: int | None) -> bool:
        """Whether a replay begins too late to be exact."""
        replay = replay_of(self.ctx.model) if replay_from is not None else None
        return replay is not None and replay_from is not None and not replay.is_exact(tokens, replay_from)

    def _refused_cause(self, op: AcquireOp, refused: Reason | None) -> Cause | None:
        if op.limited is not None:
            group, reason = op.limited
        elif refused is not None:
            group, reason = self.ctx.suspect if refused is Reason.BYPASSED else 0, refused
        else:
            first = self.ctx.model.groups[0]
            group, reason = 0, absent_reason(first.kind, state=first.form is Form.STATE)
        spec = self.ctx.model.groups[group]
        left_out = op.choice is not None and op.choice.from_tier and op.limited == op.choice.left_out
        from_tier = left_out or (op.limited is not None and op.limited == op.late)
        return cause_of(spec.name, spec.kind, reason, from_tier=from_tier)


def explained(op: AcquireOp, answer: Answer) -> Answer:
    """With everything that is known of the prompt."""
    view = op.view
    return replace(
        answer,
        columns=tuple(view.told_columns() if op.request.versions else view.columns.values()),
        evicted=tuple(view.evicted.items()),
        unreachable=tuple(sorted(view.unreachable)),
        plan=() if op.choice is None else op.choice.expected,
        told=tuple(op.told),
    )
