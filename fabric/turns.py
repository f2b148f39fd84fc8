"""Turns: what an acquire takes from this holder's tier, and its place in line for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from .acquires import IN_LINE, AcquireOp
from .admission import PRIORITY_MAX
from .context import HolderContext
from .disk import DiskDesk
from .far_tiers import tolls_of
from .kinds import Reason
from .restores import BACKGROUND_S, PATIENCE_S, Need, Turn
from .rules import Resolution


class TierTurns:
    """Acquires in line to restore.

    ``plan``: goes on with one whose turn it is; ``pending``: answers one that waits no longer; ``without_tiers``:
    goes on with one that is to take nothing from a tier, as of a group and for a reason.
    """

    def __init__(
        self,
        ctx: HolderContext,
        disk: DiskDesk,
        *,
        plan: Callable[[AcquireOp], None],
        pending: Callable[[AcquireOp, Resolution], None],
        without_tiers: Callable[[AcquireOp, int, Reason], None],
    ) -> None:
        self.ctx = ctx
        self.disk = disk
        self._plan = plan
        self._pending = pending
        self._without_tiers = without_tiers

    def on_tiers(self, op: AcquireOp, tokens: int, revisions: Sequence[int | None]) -> list[int]:
        """The groups of which a position takes something from a tier, anybody's."""
        if not any(column.tier for column in op.view.columns.values()):
            return []
        return op.using.on_tiers(tokens, revisions)

    def may_restore(self, op: AcquireOp) -> bool:
        return self.ctx.books.admission.may_restore(op.request.prompt.tenant)

    def own_tier(self, op: AcquireOp) -> bool:
        """Whether anything that is known of a prompt lies on this holder's own tier."""
        me = self.ctx.config.holder
        return any(column.tier for (holder, _, _), column in op.view.columns.items() if holder == me)

    def tier_need(self, op: AcquireOp, tokens: int, found: Resolution) -> tuple[Counter[tuple[int, int]], float]:
        """Slots by group and shard, and bytes, that a position takes from this holder's own tier."""
        me, view = self.ctx.config.holder, op.view
        need: Counter[tuple[int, int]] = Counter()
        nbytes = 0.0
        if self.own_tier(op):
            for plan in op.using.plan(tokens, op.revisions_at(tokens, found)):
                for run in plan.local if plan.holder == me else ():
                    tier = view.columns[me, run.group, run.shard].tier
                    count = sum(tier >> i & 1 for i in run.indices)
                    if count:
                        need[run.group, run.shard] += count
                        nbytes += self.disk.weight_bytes(run, tier)
        return need, nbytes

    def far_tiers(self, op: AcquireOp, tokens: int, found: Resolution) -> tuple[int, float] | None:
        """The group that other holders' tiers bring last to a position, and in how many seconds; None where they bring none."""
        me, columns = self.ctx.config.holder, op.view.columns
        if not any(column.tier for (holder, _, _), column in columns.items() if holder != me):
            return None
        runs = [
            (holder, run)
            for plan in op.using.plan(tokens, op.revisions_at(tokens, found))
            for holder, run in (
                *((plan.holder, run) for run in plan.local),
                *((fetch.source, fetch.objects) for fetch in plan.fetches),
            )
            if holder != me
        ]
        tolls = tolls_of(runs, columns, self.ctx.model)
        return self.ctx.far_tiers.slowest(tolls, self.ctx.now, self.disk.rate)

    def place_s(self, op: AcquireOp) -> float:
        """Its place in line to restore: the earlier, the sooner; nobody is overtaken for ever."""
        request = op.request
        priority = max(-PRIORITY_MAX, min(PRIORITY_MAX, request.priority))
        patience_s = PATIENCE_S if request.deadline_s is None else request.deadline_s
        behind_s = BACKGROUND_S if op.background else 0.0
        return op.came_s + patience_s + behind_s - priority * self.ctx.config.ageing_s

    def stand_in_line(self, op: AcquireOp, need: Need, place_s: float, group: int) -> None:
        """Wait until this holder may reserve more slots to restore into, for as long as the request waits."""
        op.phase = IN_LINE
        since_s, kind = self.ctx.now, self.ctx.model.groups[group].kind

        def start() -> None:
            self.ctx.tally.restore_wait_s[kind].add(self.ctx.now - since_s)
            self._plan(op)

        turn = op.turn = Turn(need, place_s, start, lambda: self.may_restore(op))
        self.disk.line.stand(turn)
        self.ctx.counters["restore_waits"] += 1
        until_s = min(self.ctx.now + self.ctx.config.recovery_wait_s, op.due_s)
        if op.request.wait_s:
            until_s = min(until_s, op.wait_until_s)

        def over() -> None:
            if op.turn is not turn or op.phase != IN_LINE:
                return
            self.disk.line.leave(turn)
            if op.request.wait_s and self.ctx.now >= op.wait_until_s:
                self._pending(op, op.chosen)
            else:
                late = Reason.DEADLINE_EXCEEDED if self.ctx.now >= op.due_s else None
                held = Reason.RESTORE_PENDING if self.may_restore(op) else Reason.QUOTA
                self._without_tiers(op, group, late or held)

        self.ctx.wake_at(until_s, over)
