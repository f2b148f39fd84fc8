"""The scrubber of memory: digests what lies sealed, slowly, round and round, so that damage is found before it is asked for.

A handful of slots at a time, never more than ``scrub_bytes_per_s``; the digests are computed by the driver off
its event loop. What was rewritten meanwhile says nothing. A wrong copy leaves for the one below it, or is marked.
"""

from __future__ import annotations

from dataclasses import dataclass

from .context import HolderContext
from .effects import DigestSlots
from .kinds import Reason
from .lifecycle import State
from .objects import Obj

BATCH_BYTES = 4 << 20
BATCH_SLOTS = 64
LOOK_SLOTS = 4096
"""Slots looked at in one step at most, full or not."""
IDLE_S = 1.0
"""When to look again where there was nothing to digest."""


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """One slot that is being digested, and what lay there when that began."""

    obj: Obj
    version: int


class Scrubber:
    """One holder's rounds over its memory. ``scrub_bytes_per_s`` None: none."""

    def __init__(self, ctx: HolderContext) -> None:
        self.ctx = ctx
        self._at = 0
        self._running: dict[int, list[Scrubbed]] = {}
        self.rounds = 0

    def start(self) -> None:
        """Begin the rounds, where the configuration wants any."""
        if self.ctx.config.scrub_bytes_per_s is not None:
            self.ctx.wake_at(self.ctx.now + IDLE_S, self._next)

    def _next(self) -> None:
        """Have the next few slots digested; the next after them as late as their bytes are worth."""
        ctx, chosen, size = self.ctx, list[Scrubbed](), 0
        owner = ctx.books.owner
        for _ in range(min(LOOK_SLOTS, len(owner))):
            if len(chosen) >= BATCH_SLOTS or size >= BATCH_BYTES:
                break
            obj = owner[self._at]
            self._at += 1
            if self._at == len(owner):
                self._at = 0
                self.rounds += 1
            if obj is not None and obj.visible and obj.state is State.SEALED and obj.bad is None:
                chosen.append(Scrubbed(obj, obj.version))
                size += obj.length
        if chosen:
            token = ctx.number()
            self._running[token] = chosen
            ctx.do(DigestSlots(token, tuple(one.obj.slot for one in chosen)))
        rate = ctx.config.scrub_bytes_per_s
        assert rate is not None
        ctx.wake_at(ctx.now + max(size / rate, IDLE_S if not chosen else 0.0), self._next)

    def digested(self, token: int, checksums: tuple[bytes, ...]) -> bool:
        """Judge what was digested; False if that was not asked for here."""
        chosen = self._running.pop(token, None)
        if chosen is None:
            return False
        for one, checksum in zip(chosen, checksums, strict=True):
            obj = one.obj
            if obj.version != one.version or obj.state is not State.SEALED or not obj.visible:
                continue
            self.ctx.counters["scrubbed_bytes"] += obj.length
            if checksum != obj.checksum:
                self.ctx.counters["scrub_found"] += 1
                self.ctx.books.mark_bad(obj, Reason.CHECKSUM_MISMATCH)
        return True
