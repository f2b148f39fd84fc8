"""The grant desk: leases on what is proven, and their ends.

Nothing is leased that a :class:`~.validation.Proof` does not name, and nothing while this holder may not grant.
"""

from __future__ import annotations

from .context import HolderContext
from .kinds import Reason
from .leases import LeaseRecord, grace_s
from .messages import PartCheck, PartGrant, Prompt
from .tally import Unreused
from .validation import Proof


class GrantDesk:
    """Every lease of one holder begins here."""

    def __init__(self, ctx: HolderContext) -> None:
        self.ctx = ctx

    def lease(
        self, leader: str, message: PartGrant, proof: Proof, prompt: Prompt, graph_number: int = 0
    ) -> LeaseRecord:
        """A lease on what is proven, its end watched. The caller asked whether this holder may grant."""
        ctx = self.ctx
        record = ctx.leases.grant(
            proof,
            leader=leader,
            client=message.client,
            now=ctx.now,
            lease_s=message.lease_s,
            weights=prompt.weights,
            tenant=prompt.tenant,
            graph=message.graph,
            graph_number=graph_number,
        )
        ctx.books.touch_slots(proof.claim.slots)
        self._watch(record)
        return record

    def _watch(self, record: LeaseRecord) -> None:
        """End the lease once its grace is over; a renewed one is looked at again then.

        An expired graph lease ends only by release, or with its reader's process, which may replay the
        graph at any time. Its leader is asked now and then, so that no lost release keeps it for ever.
        """
        ctx = self.ctx
        due_s = record.deadline_s + grace_s(record.lease_s)

        def over() -> None:
            if ctx.leases.live.get(record.lease) is not record:
                return
            if ctx.now < record.deadline_s + grace_s(record.lease_s):
                self._watch(record)
            elif record.graph:
                if record.leader != ctx.config.holder:
                    ctx.send(record.leader, PartCheck(record.lease))
                record.watch = ctx.wake_at(ctx.now + ctx.config.graph_check_s, over)
            else:
                ctx.counters["leases_expired"] += 1
                if record.leader == ctx.config.holder:
                    ctx.tally.unreused(Unreused.EXPIRED, record.proof.tokens, Reason.LEASE_EXPIRED)
                ctx.leases.end(record.lease, ctx.now)

        record.watch = ctx.wake_at(due_s, over)

    def refusal(self, prompt: Prompt) -> Reason | None:
        """Why this holder leases nothing of such a prompt now, whatever is proven."""
        ctx = self.ctx
        if ctx.draining:
            return Reason.DRAINING
        if not ctx.may_grant:
            return Reason.NOT_GRANTING
        if prompt.weights != ctx.weights:
            return Reason.WEIGHTS_MISMATCH
        return None if ctx.books.admission.may_lease(prompt.tenant) else Reason.QUOTA
