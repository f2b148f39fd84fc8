"""Bring a share's objects to the slots a captured graph has baked in, before the share is proven.

Each object that lies elsewhere is copied to its registered slot, digested, and becomes the visible
one; the old copy leaves once nobody pins it. What sits in a registered slot makes room if it may; if
it may not (a lease or another graph holds it), the share is refused and the engine runs eagerly.
Several rounds: a slot that another object of the share must leave first is free in the next. Objects that only
wait for each other's slots go round by one spare slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .context import HolderContext
from .effects import Pair, StartTransfer, TransferDone
from .graphs import GraphDesk
from .kinds import Reason
from .objects import Obj
from .restores import PATIENCE_S
from .validation import Held, HeldRun

Refuse = Callable[[Reason, int], None]


@dataclass(frozen=True, slots=True)
class Move:
    """One object on its way to its registered slot. ``place``: its place in the run."""

    run: HeldRun
    place: int
    old: Obj
    new: Obj


@dataclass(slots=True)
class Placing:
    """One round of moves of one share."""

    moves: dict[int, Move]
    digests: dict[int, bytes]
    refuse: Refuse
    then: Callable[[], None]


class Placer:
    """All shares of one holder whose objects are being brought into place."""

    def __init__(self, ctx: HolderContext, graphs: GraphDesk) -> None:
        self.ctx = ctx
        self.graphs = graphs
        self._rounds: dict[int, Placing] = {}
        self._restless: dict[int, list[Obj]] = {}
        """By transfer: objects whose slots its bytes may still reach."""

    def place(
        self, number: int, held: Held, digests: dict[int, bytes], *, refuse: Refuse, then: Callable[[], None]
    ) -> bool:
        """Whether all lies where the graph has it (or ``refuse`` was called); else ``then`` follows a round."""
        graph = self.graphs.graphs.get(number)
        if graph is None:
            refuse(Reason.GRAPH_FROZEN, 0)
            return True
        moves: dict[int, Move] = {}
        held_up: list[tuple[int, int]] = []
        for (group, shard), run in held.items():
            baked_in = graph.slots.get((group, shard), {})
            for place, (index, slot) in enumerate(zip(run.indices, run.slots, strict=True)):
                wanted = baked_in.get(index)
                if wanted is None:
                    refuse(Reason.GRAPH_FROZEN, group)
                    return True
                if wanted == slot:
                    continue
                if self._can_leave(wanted):
                    moves[wanted] = self._move(run, place, slot)
                else:
                    held_up.append((group, wanted))
        if not moves and not held_up:
            return True
        detour = None if moves else self._detour(held, {slot for _, slot in held_up})
        if detour is not None:
            lacking = self.ctx.books.lacking([detour.new])
        elif moves:
            lacking = self.ctx.books.admission.lacking(move.new for move in moves.values())
        else:
            refuse(Reason.PINNED, held_up[0][0])
            return True
        if lacking is not None:
            refuse(lacking.reason, lacking.group)
            return True
        for slot, move in moves.items():
            self.ctx.books.reserve_at(move.new, slot)
        if detour is not None:
            self.ctx.books.reserve(detour.new)
            moves[detour.new.slot] = detour
        self._start(Placing(moves, digests, refuse, then))
        return False

    def _detour(self, held: Held, wanted: set[int]) -> Move | None:
        """The move out of the way of one of the share's own objects, which nobody else holds; None: others hold all.

        No slot that is free or may be freed is wanted here, or its object would have moved there. So this one goes
        to a slot that nobody waits for, and every such round lets one more object reach its place.
        """
        for run in held.values():
            for place, slot in enumerate(run.slots):
                occupant = self.ctx.books.owner[slot]
                if slot in wanted and occupant is not None and occupant.pins == 1:
                    return self._move(run, place, slot)
        return None

    def _can_leave(self, slot: int) -> bool:
        """Whether a registered slot is free, or what sits there may be evicted."""
        occupant = self.ctx.books.owner[slot]
        return occupant is None or occupant.evictable

    def _move(self, run: HeldRun, place: int, slot: int) -> Move:
        old = self.ctx.books.owner[slot]
        assert old is not None, "a held slot has an owner"
        return Move(run, place, old, old.elsewhere())

    def _start(self, placing: Placing) -> None:
        ctx = self.ctx
        token = ctx.number()
        pairs = []
        for slot, move in placing.moves.items():
            pairs.append(Pair(move.old.slot, slot, move.old.length))
        self._rounds[token] = placing
        deadline_s, wanted_s = ctx.now + ctx.config.transfer_timeout_s, ctx.now + PATIENCE_S
        ctx.do(StartTransfer(token, ctx.config.holder, ctx.incarnation, tuple(pairs), deadline_s, wanted_s))

    def moved(self, event: TransferDone) -> bool:
        """A round ended; False if the transfer is none of this desk's."""
        placing = self._rounds.pop(event.token, None)
        if placing is None:
            return False
        for moved in event.moved:
            move = placing.moves[moved.slot]
            if not moved.quiet:
                self.ctx.books.quarantine(move.new)
                self._restless.setdefault(event.token, []).append(move.new)
                placing.refuse(Reason.TRANSFER_FAILED, move.old.group)
                continue
            if moved.checksum == move.old.checksum and self.ctx.books.is_current(move.old):
                self._swap(move, placing.digests)
                continue
            self.ctx.books.give_up(move.new)
            stale = moved.checksum == move.old.checksum
            placing.refuse(Reason.VERSION_CHANGED if stale else Reason.CHECKSUM_MISMATCH, move.old.group)
        placing.then()
        return True

    def quiet(self, token: int) -> None:
        """Proven: no byte of this round can still arrive."""
        for obj in self._restless.pop(token, ()):
            self.ctx.books.quiet(obj)

    def _swap(self, move: Move, digests: dict[int, bytes]) -> None:
        books = self.ctx.books
        books.moved(move.old, move.new)
        books.pin(move.new)
        move.run.replace(move.place, move.new.slot)
        digests[move.new.slot] = move.new.checksum
        books.unpin(move.old)

    def in_hand(self) -> Iterator[Obj]:
        """Every object whose slot a round answers for."""
        for placing in self._rounds.values():
            for move in placing.moves.values():
                yield move.new
        for objects in self._restless.values():
            yield from objects
