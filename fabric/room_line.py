"""The line for room: acquires that wait until every pool they need has slots for them."""

from __future__ import annotations

from collections.abc import Callable

from .acquires import WAITING, AcquireOp
from .admission import WaitingLine
from .context import HolderContext
from .messages import MateLookup
from .rules import servable


class RoomLine:
    """Acquires in line for room; ``plan`` goes on with one that may try again."""

    def __init__(self, ctx: HolderContext, plan: Callable[[AcquireOp], None]) -> None:
        self.ctx = ctx
        self.line: WaitingLine[AcquireOp] = WaitingLine(ctx.config.ageing_s)
        self._plan = plan
        self._room_seen = 0

    def wait(self, op: AcquireOp) -> None:
        """Stand in line for room, in order of coming and priority, until wait_s runs out."""
        op.phase = WAITING
        if op not in self.line:
            self.line.join(op, since_s=op.came_s, priority=op.request.priority)
            self.ctx.counters["admission_waits"] += 1
            self._look_again(op)

        def over() -> None:
            if op in self.line:
                self.line.leave(op)
                self._plan(op)

        self.ctx.wake_at(op.wait_until_s, over)

    def room_gained(self) -> None:
        """Let those in line try again, in order, as long as each gets what it waits for."""
        if self._room_seen == self.ctx.books.room_gained:
            return
        self._room_seen = self.ctx.books.room_gained
        self.try_again()

    def _look_again(self, op: AcquireOp) -> None:
        """Ask the other ranks' holders from time to time while this one is first in line: their room is not seen here."""
        mates = set(op.request.readers) - {self.ctx.config.holder}
        if not mates:
            return

        def again() -> None:
            if op not in self.line:
                return
            if next(iter(self.line)) is op and not op.asked:
                op.asked = set(mates)
                for mate in sorted(mates):
                    self.ctx.send(mate, MateLookup(op.op, op.request.prompt))
            else:
                op.asked.clear()
            self.ctx.wake_at(self.ctx.now + self.ctx.config.room_poll_s, again)

        self.ctx.wake_at(self.ctx.now + self.ctx.config.room_poll_s, again)

    def try_again(self) -> None:
        """Plan those in line again, until one of them has to wait on."""
        for op in self.line:
            if op not in self.line:
                continue
            op.rounds = min(op.rounds, 1)
            self._plan(op)
            if op.phase == WAITING:
                return
            self.line.leave(op)


def largest_with_room(op: AcquireOp, below: int, *, whole_pool: bool) -> int:
    """The highest position up to ``below`` for which every reader has room; ``whole_pool``: were all pools empty."""
    using, grid = op.using, op.view.model.grid_tokens
    bits = servable(using.model, using.evidence(), op.request.prompt.n) & ((1 << (below // grid + 1)) - 1)
    while bits > 1:
        top = bits.bit_length() - 1
        if using.lacking_room(top * grid, whole_pool=whole_pool) is None:
            return top * grid
        bits ^= 1 << top
    return 0
