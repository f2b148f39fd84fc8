"""The reader on node B: resumes under a lease, and compares with runs that never used a cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..errors import EngineError
from .records import Broken, FaultRun, Run
from .story import (
    CHUNK_TOKENS,
    CUTS,
    DECODE_TOKENS,
    NOT_RESTORED,
    STALE_PAGE_TABLE,
    reader_prompt,
    salt_of,
    warm_up_prompt,
)
from .words import in_words
from .worker import Worker

if TYPE_CHECKING:
    from ....actors.answer import Answer
    from ....actors.session import Session
    from ..generate import Generation

VISIBLE_TIMEOUT_S = 20.0
POLL_S = 0.002


class Reader(Worker):
    """Ray actor; see :class:`Worker`."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self._references: dict[tuple[int, tuple[int, ...]], Generation] = {}

    def _reference(self, position: int, resumed_at: int) -> Generation:
        """A run of the reader's prompt for ``position`` without any cache, cut at ``resumed_at`` too."""
        from ..generate import generate

        cuts = tuple(sorted({*CUTS, resumed_at}))
        if (position, cuts) not in self._references:
            run = generate(self.model, reader_prompt(position), cuts=cuts, decode_tokens=DECODE_TOKENS)
            self._references[position, cuts] = run
        return self._references[position, cuts]

    def _wait_for(self, session: Session, tokens: list[int], wanted: int, **key: Any) -> Answer:
        """Probe until ``wanted`` tokens are usable: what another node published is seen in a moment."""
        deadline = time.monotonic() + VISIBLE_TIMEOUT_S
        while True:
            answer = session.probe(tokens, **key)
            if answer.tokens >= wanted or time.monotonic() >= deadline:
                return answer
            time.sleep(POLL_S)

    # --- the main job --------------------------------------------------------------------------

    def warm_up(self) -> None:
        """The first transfer between two holders sets their link up; that is not timed."""
        from ..adapter import resume

        tokens = warm_up_prompt()
        self._wait_for(self.session, [*tokens, 0], len(tokens))
        resume(self.session, self.model, self.geometry, [*tokens, 0])

    def resume(self, position: int) -> Run:
        """Resume a prompt that shares ``position`` tokens with the writer's, and go on from there."""
        from ..adapter import resume
        from ..generate import generate, same_logits

        tokens = reader_prompt(position)
        plain = generate(self.model, tokens, cuts=range(CHUNK_TOKENS, len(tokens), CHUNK_TOKENS), decode_tokens=1)
        self._wait_for(self.session, tokens, position)
        began = time.perf_counter()
        resumed = resume(self.session, self.model, self.geometry, tokens)
        ready_s = time.perf_counter() - began
        lease = resumed.answer.lease
        left_s = 0.0 if lease is None else lease.deadline_s - time.monotonic()
        run = generate(
            self.model, tokens, cuts=CUTS, decode_tokens=DECODE_TOKENS, cache=resumed.cache, start=resumed.tokens
        )
        reference = self._reference(position, resumed.tokens)
        return Run(
            prefix_tokens=position,
            resume_tokens=resumed.tokens,
            computed_tokens=len(tokens) - resumed.tokens,
            logits_equal=same_logits(run.logits, reference.logits_from(resumed.tokens)),
            status=str(resumed.answer.status),
            cause=resumed.detail or in_words(self.session.model, resumed.answer.status, resumed.answer.cause),
            recompute_s=plain.first_token_s,
            reuse_s=ready_s + run.first_token_s,
            moved_bytes=dict(resumed.answer.moved_bytes or {}),
            sources=resumed.answer.sources,
            fence=0 if lease is None else lease.fence,
            lease_left_s=left_s,
        )

    # --- faults --------------------------------------------------------------------------------

    def meet(self, broken: Broken) -> FaultRun:
        """Go on from what the fabric grants of broken state, and from that state itself, blindly."""
        from ..adapter import resume
        from ..faults import reuse_blindly
        from ..generate import generate, same_logits, tokens_wrong

        tokens, salt = reader_prompt(broken.position), salt_of(broken.fault)
        self._wait_for(self.session, tokens, broken.base, salt=salt)
        promised = self._promised(tokens, broken)
        wait_s = 0.0 if broken.fault == NOT_RESTORED else None
        resumed = resume(self.session, self.model, self.geometry, tokens, salt=salt, wait_s=wait_s)
        run = generate(
            self.model, tokens, cuts=CUTS, decode_tokens=DECODE_TOKENS, cache=resumed.cache, start=resumed.tokens
        )
        reference = self._reference(broken.position, resumed.tokens)
        blind = generate(
            self.model,
            tokens,
            cuts=CUTS,
            decode_tokens=DECODE_TOKENS,
            cache=reuse_blindly(self.model, self.geometry, broken.position, broken.objects),
            start=broken.position,
        )
        answer = resumed.answer
        cause = resumed.detail or in_words(self.session.model, answer.status, answer.cause)
        if broken.fault == STALE_PAGE_TABLE and not cause:
            cause = "restored to other slots: those that the lease names"
        if broken.other_weights:
            cause = f"{cause} under these weights, only under {broken.other_weights[:8]}"
        return FaultRun(
            fault=broken.fault,
            kind=broken.kind,
            group=broken.group,
            words=broken.words,
            position=broken.position,
            hash_tokens=promised,
            granted_tokens=resumed.tokens,
            status=str(answer.status),
            cause=cause,
            logits_equal=same_logits(run.logits, reference.logits_from(resumed.tokens)),
            tokens_wrong=tokens_wrong(reference.tokens, blind.tokens),
        )

    def _promised(self, tokens: list[int], broken: Broken) -> int:
        """What the tokens alone promise: the longest match in any namespace that bears them."""
        from ..adapter import connect

        salt = salt_of(broken.fault)
        promised = self.session.probe(tokens, salt=salt).hash_tokens
        if broken.other_weights:
            with connect(self.model, self.geometry, weights=broken.other_weights) as session:
                promised = max(promised, session.probe(tokens, salt=salt).hash_tokens)
        return promised

    def confirm_repaired(self, fault: str, position: int) -> None:
        """The control: with complete state in the same namespace the whole prefix is a full hit.

        Raises EngineError if it is not.
        """
        answer = self._wait_for(self.session, reader_prompt(position), position, salt=salt_of(fault))
        if answer.tokens != position or answer.status != "FULL_HIT":
            why = in_words(self.session.model, answer.status, answer.cause)
            raise EngineError(
                f"{fault}: complete state gives {answer.status} at {answer.tokens} tokens, not a full hit at"
                f" {position} ({why})"
            )
