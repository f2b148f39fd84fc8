"""A model's worker and the fabric: publish what a cache holds, resume from what a lease covers.

    session = connect(model, geometry)                    # says which weights and layout this reader runs
    publish(session, model, geometry, cache, tokens, p)   # the cache stands at p; its first p tokens are published
    resumed = resume(session, model, geometry, tokens)
    run = generate(model, tokens, cache=resumed.cache, start=resumed.tokens)

Whatever goes wrong with cached state ends in a recompute that says why: ``resumed.cache`` is None,
``resumed.tokens`` 0 and ``resumed.refused`` one of the closed vocabulary. Exceptions are for misuse.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...actors.answer import Answer
from ...actors.attempt import Stored
from ...actors.fabric import connect as connect_session
from ...actors.lease import Lease, LeaseRefused
from ...actors.session import Session
from ...fabric.kinds import FabricError, Reason
from ...fabric.passport import AbiPassport
from ...fabric.tally import AuditOutcome
from .audit import audit
from .capture import capture
from .errors import GeometryMismatch, UnsupportedCache
from .geometry import Geometry, replayable_groups
from .passport import check_written, passports
from .proof import prove_complete
from .restore import NewCache, State, check_model, copied, fill
from .tensors import in_host_memory
from .weights import weights_revision

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


logger = logging.getLogger(__name__)

KEY = ("tenant", "salt", "adapter", "extra")
"""Which options of an acquire say whose state it is."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a prompt goes on. ``cache`` holds the first ``tokens`` tokens, or is None at 0.

    ``answer`` is the fabric's; its lease is released. ``refused``: why state that was granted is
    not used after all (None: it is used, or nothing was granted, and ``answer.cause`` tells why).
    ``detail``: the same in words.
    """

    cache: Cache | None
    tokens: int
    answer: Answer
    refused: Reason | None = None
    detail: str = ""


def connect(
    model: PreTrainedModel,
    geometry: Geometry,
    name: str = "default",
    *,
    weights: str | None = None,
    passport: Mapping[str, AbiPassport] | None = None,
) -> Session:
    """A session with the fabric ``name`` that says what this model runs.

    ``weights``: a revision known already (default: digest the tensors); ``passport``: by group name,
    where a kernel lays its bytes out in another way than :func:`passports` says. The model is run over a
    few tokens to see that its cache holds all its state. Raises FabricError where no such fabric runs,
    GeometryMismatch where it serves another model, UnsupportedCache for a model that keeps state elsewhere.
    """
    check_model(model, geometry)
    prove_complete(model, geometry)
    with connect_session(name) as served:  # first: passports of groups that it does not have say less
        check_session(served, geometry)
    session = connect_session(
        name,
        weights_revision=weights_revision(model) if weights is None else weights,
        passport=passports(model.config, geometry) if passport is None else passport,
    )
    try:
        check_session(session, geometry)
    except GeometryMismatch:
        session.close()
        raise
    return session


def check_session(session: Session, geometry: Geometry) -> None:
    """Raise GeometryMismatch, naming the field, unless the fabric serves this geometry's groups."""
    served = session.model
    if served.name != geometry.model:
        raise GeometryMismatch(
            f"model: the fabric {session.name!r} serves {served.name}, the geometry is of {geometry.model}"
        )
    own = geometry.model_spec(weights=served.weights)
    for mine, theirs in zip(own.groups, served.groups, strict=False):
        if mine != theirs:
            raise GeometryMismatch(f"groups.{mine.name}: this geometry has {mine}, the fabric {theirs}")
    if len(own.groups) != len(served.groups):
        raise GeometryMismatch(f"groups: this geometry has {len(own.groups)}, the fabric {len(served.groups)}")
    if served.shards != 1:
        raise GeometryMismatch(f"shards: {served.shards}; this adapter captures a whole model in one process")


def publish(  # noqa: PLR0917 - whose, of what, up to where: none has a default
    session: Session,
    model: PreTrainedModel,
    geometry: Geometry,
    cache: Cache,
    tokens: Sequence[int],
    position: int,
    *,
    from_token: int = 0,
    revision: int = 0,
    **key: Any,
) -> Stored:
    """Publish what ``cache``, standing at ``position``, holds of ``tokens``; call it before the next step.

    ``from_token``: what lies before it was published already. ``key``: tenant, salt, adapter, extra.
    A full or draining fabric refuses by value. Raises GeometryMismatch and UnsupportedCache as
    ``capture`` does, and GeometryMismatch for a session that does not say what this model runs.
    """
    check_model(model, geometry)
    check_session(session, geometry)
    _check_passports(session, model, geometry)
    objects = capture(cache, geometry, position, from_token=from_token)
    return session.publish(tokens[:position], objects, revision=revision, **key)


def resume(
    session: Session,
    model: PreTrainedModel,
    geometry: Geometry,
    tokens: Sequence[int],
    *,
    new_cache: NewCache | None = None,
    audit_cuts: Iterable[int] | None = None,
    **options: Any,
) -> Resumed:
    """Acquire a lease on the longest prefix of ``tokens``, fill a cache under it, and release it.

    ``new_cache``: makes the cache to fill (default: the one the model itself would make). Every byte is
    copied before the lease's last check; only a clean check makes the cache usable. A lease that leaves
    windows to be computed again is completed by running the model over them (``replay``), where this adapter
    can; what it leaves is what a prefill would have left, or near to it if ``answer.approximate``.
    Of ``audit_fraction`` of the leases the state is computed too and compared (:mod:`.audit`): bit for bit if
    ``audit_cuts`` says where the writer's chunks ended. A mismatch is told, which bars the chain everywhere, and not used.
    ``options`` are those of ``Session.acquire``. Raises GeometryMismatch if the geometry is not this
    model's or the new cache is too small, UnsupportedCache for a cache class that cannot be filled,
    FabricError for misuse; never for what may happen to cached state.
    """
    check_model(model, geometry)
    answer = session.acquire(tokens, **options)
    lease = answer.lease
    if lease is None:
        return Resumed(None, 0, answer)
    reused = 0
    try:
        state = _completed_state(session, model, geometry, tokens, answer, lease)
        if isinstance(state, Resumed):
            return state
        cache = fill(model, geometry, lease.tokens, state, new_cache=new_cache)
        if session.audit_due(lease) and not answer.approximate:
            outcome = audit(model, geometry, tokens[: lease.tokens], cache, audit_cuts)
            _tell(session, tokens[: lease.tokens], lease, outcome, options)
            if outcome is AuditOutcome.MISMATCH:
                detail = f"the {lease.tokens} tokens' state is not what computing them gives"
                return Resumed(None, 0, answer, Reason.QUARANTINED, detail)
        reused = lease.tokens
    finally:
        lease.release(reused_tokens=reused)
    return Resumed(cache, reused, answer)


def _tell(
    session: Session, tokens: Sequence[int], lease: Lease, outcome: AuditOutcome, options: Mapping[str, Any]
) -> None:
    """Count an audit; who cannot be told loses the count, never the request."""
    key = {name: value for name, value in options.items() if name in KEY}
    try:
        refused = session.audited(tokens, lease, str(outcome), **key)
    except FabricError as error:
        logger.warning("the audit of lease %s found %s and could not be told: %s", lease.grant.lease, outcome, error)
        return
    if refused is not None:
        logger.warning("the audit of lease %s found %s and was refused: %s", lease.grant.lease, outcome, refused)


def _completed_state(  # noqa: PLR0917 - what resume has at hand
    session: Session,
    model: PreTrainedModel,
    geometry: Geometry,
    tokens: Sequence[int],
    answer: Answer,
    lease: Lease,
) -> State | Resumed:
    """The whole state at the lease's position, replayed where it has to be, or why it cannot be used."""
    try:
        rebuilt: frozenset[str] = frozenset() if lease.replay_from is None else replayable_groups(geometry)
        state = _leased_state(session, model, geometry, lease, rebuilt)
    except LeaseRefused as error:
        return Resumed(None, 0, answer, error.reason, str(error))
    except UnsupportedCache as error:
        detail = f"windows from {lease.replay_from} on are to be computed again: {error}"
        return Resumed(None, 0, answer, Reason.WINDOW_INCOMPLETE, detail)
    except GeometryMismatch as error:
        return Resumed(None, 0, answer, lease.check() or Reason.ABI_MISMATCH, str(error))
    if lease.replay_from is None:
        return state
    from .replay import replay  # loads transformers

    began = time.perf_counter()
    completed = replay(model, geometry, tokens[: lease.tokens], lease.replay_from, state)
    session.computed(lease.tokens - lease.replay_from, time.perf_counter() - began, replay=True)
    return completed


def _leased_state(
    session: Session, model: PreTrainedModel, geometry: Geometry, lease: Lease, rebuilt: frozenset[str]
) -> State:
    """The state at the lease's position, copied from its views, proven afterwards; ``rebuilt`` groups are zeros.

    Raises LeaseRefused if the views changed meanwhile, GeometryMismatch if they do not fit.
    """
    check_session(session, geometry)
    _check_passports(session, model, geometry)
    refused = lease.check()
    if refused is not None:
        raise LeaseRefused(refused)
    views = {name: in_host_memory(lease.views[name]) for name in lease.views}
    state = copied(model, geometry, lease.tokens, views, without=rebuilt)
    refused = lease.check()  # after the last byte was copied: the copies are the leased bytes
    if refused is not None:
        raise LeaseRefused(refused)
    return state


def _check_passports(session: Session, model: PreTrainedModel, geometry: Geometry) -> None:
    """The fabric grants and records what this session's passports say; they must be this model's."""
    said = dict(zip((group.name for group in session.model.groups), session.abis, strict=True))
    check_written(passports(model.config, geometry), said)
