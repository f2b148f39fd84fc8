"""A model's worker and the fabric: publish what a cache holds, resume from what a lease covers.

    session = connect(model, geometry)                    # says which weights and layout this reader runs
    publish(session, model, geometry, cache, tokens, p)   # the cache stands at p; its first p tokens are published
    resumed = resume(session, model, geometry, tokens)
    run = generate(model, tokens, cache=resumed.cache, start=resumed.tokens)

Whatever goes wrong with cached state ends in a recompute that says why: ``resumed.cache`` is None,
``resumed.tokens`` 0 and ``resumed.refused`` one of the closed vocabulary. Exceptions are for misuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...actors.answer import Answer
from ...actors.attempt import Stored
from ...actors.fabric import connect as connect_session
from ...actors.lease import Lease, LeaseRefused
from ...actors.session import Session
from ...fabric.kinds import Reason
from ...fabric.passport import AbiPassport
from .capture import capture
from .errors import GeometryMismatch
from .geometry import Geometry
from .passport import check_written, passports
from .restore import check_model, restore
from .tensors import in_host_memory
from .weights import weights_revision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


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
    where a kernel lays its bytes out in another way than :func:`passports` says. Raises FabricError
    where no such fabric runs, GeometryMismatch where it serves another model.
    """
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
    session: Session, model: PreTrainedModel, geometry: Geometry, tokens: Sequence[int], **options: Any
) -> Resumed:
    """Acquire a lease on the longest prefix of ``tokens``, fill a cache under it, and release it.

    Every byte is copied before the lease's last check; only a clean check makes the cache usable.
    ``options`` are those of ``Session.acquire``. Raises GeometryMismatch if the geometry is not this
    model's, FabricError for misuse; never for what may happen to cached state.
    """
    check_model(model, geometry)
    answer = session.acquire(tokens, **options)
    lease = answer.lease
    if lease is None:
        return Resumed(None, 0, answer)
    if lease.replay_from is not None:
        lease.release(reused_tokens=0)
        detail = f"windows from {lease.replay_from} on are to be computed again: this adapter replays nothing"
        return Resumed(None, 0, answer, Reason.WINDOW_INCOMPLETE, detail)
    reused = 0
    try:
        cache = _restored(session, model, geometry, lease)
        reused = lease.tokens
    except LeaseRefused as error:
        return Resumed(None, 0, answer, error.reason, str(error))
    except GeometryMismatch as error:
        return Resumed(None, 0, answer, lease.check() or Reason.ABI_MISMATCH, str(error))
    finally:
        lease.release(reused_tokens=reused)
    return Resumed(cache, reused, answer)


def _restored(session: Session, model: PreTrainedModel, geometry: Geometry, lease: Lease) -> Cache:
    """A cache copied from the leased views, proven afterwards.

    Raises LeaseRefused if they changed meanwhile, GeometryMismatch if they do not fit.
    """
    check_session(session, geometry)
    _check_passports(session, model, geometry)
    refused = lease.check()
    if refused is not None:
        raise LeaseRefused(refused)
    cache = restore(model, geometry, lease.tokens, {name: in_host_memory(lease.views[name]) for name in lease.views})
    refused = lease.check()  # after the last byte was copied: the copies are the leased bytes
    if refused is not None:
        raise LeaseRefused(refused)
    return cache


def _check_passports(session: Session, model: PreTrainedModel, geometry: Geometry) -> None:
    """The fabric grants and records what this session's passports say; they must be this model's."""
    said = dict(zip((group.name for group in session.model.groups), session.abis, strict=True))
    check_written(passports(model.config, geometry), said)
