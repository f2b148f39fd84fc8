"""A lease in a reader's hands: zero-copy views, and proof without a call that they are still right.

    lease = answer.lease
    with lease.read("kv") as view:      # checks before and after; raises LeaseRefused
        engine.load(view[0])            # uint8, read-only, in shared memory
    lease.release(reused_tokens=lease.tokens)

Dropping a lease without releasing it leaves its slots pinned until its deadline and grace are over.
A process that opened a lease by its token only lets go of it (``close``); whoever was granted it
releases it, for all its readers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgpack
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from ..fabric import wire
from ..fabric.arena import Arena
from ..fabric.kinds import FabricError, Reason, SpecError, WireError
from ..fabric.leases import LeasedSlots, read_refusal
from ..fabric.messages import LeaseGrant, LeasePart, Member, Release, Renew, Renewed, SlotRun
from ..fabric.model import ModelSpec
from ..fabric.requests import refusal_of
from ..fabric.settings import read, written
from ..transport.link import host_identity
from ..transport.slot_files import Row
from .client import HolderClient, HolderLost, request_id
from .clock import MONOTONIC, Clock

Bytes = npt.NDArray[np.uint8]

TOKEN_SCHEMA = 2
TOKEN_FIELDS = 6
BARE_TOKEN_SCHEMA = 1
"""Its tokens bear no checksum."""
ANOTHER_VERSION = "open it with the version that made it, or acquire here"


class LeaseRefused(FabricError):
    """The leased bytes may no longer be trusted: throw away what was read and recompute.

    ``reason`` is one of the closed vocabulary.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"{reason}: what was read under this lease must not be used; recompute")
        self.reason = reason


class GroupView(Mapping[int, Any]):
    """One group's leased objects of one shard: index -> uint8 array of shape (length,), read-only.

    Where readers' memory is a GPU's, a tensor on that GPU; CUDA cannot make it read-only: do not write to it.
    """

    def __init__(self, client: HolderClient, run: SlotRun) -> None:
        self._client = client
        self._run = run

    @functools.cached_property
    def _slots(self) -> dict[int, int]:
        return dict(zip(self._run.indices, np.frombuffer(self._run.slots, dtype="<u4").tolist(), strict=True))

    def __getitem__(self, index: int) -> Any:
        return self._client.content(self._slots[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._run.indices)

    def __len__(self) -> int:
        return len(self._run.indices)

    def fill(self, rows: Iterable[tuple[int, Row]]) -> None:
        """Copy objects (index, row) into rows of host memory, each from its start, many in one pass.

        A row is contiguous uint8 arrays that follow each other. Trust it after the lease's next check. Raises KeyError for
        an index that is not leased, ValueError for a row longer than an object.
        """
        slots = self._slots
        self._client.fill([(slots[index], row) for index, row in rows])

    def slot(self, index: int) -> int:
        """The slot that bears an object: constant over the whole lease."""
        return self._slots[index]


class Views(Mapping[str, GroupView]):
    """All leased groups. A model of several shards: :meth:`of` names the shard."""

    def __init__(self, model: ModelSpec, parts: Sequence[tuple[LeasePart, HolderClient]]) -> None:
        self._views: dict[tuple[str, int], GroupView] = {}
        for part, client in parts:
            for run in part.slots:
                self._views[model.groups[run.group].name, run.shard] = GroupView(client, run)

    def of(self, group: str, shard: int) -> GroupView:
        """Raises KeyError for a group that nothing is leased of."""
        return self._views[group, shard]

    def __getitem__(self, group: str) -> GroupView:
        shards = [key for key in self._views if key[0] == group]
        if len(shards) > 1:
            raise KeyError(f"{group} has {len(shards)} shards here: views.of(group, shard)")
        return self._views[group, shards[0][1]] if shards else self._views[group, 0]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(group for group, _ in self._views))

    def __len__(self) -> int:
        return len(dict.fromkeys(group for group, _ in self._views))


class Lease:
    """A granted lease. A context manager: made by a session it releases, made by :meth:`open` it closes."""

    def __init__(
        self,
        model: ModelSpec,
        grant: LeaseGrant,
        clients: Mapping[str, HolderClient],
        node: str,
        *,
        opened: bool = False,
        clock: Clock = MONOTONIC,
    ) -> None:
        self._opened = opened
        self._model = model
        self._clock = clock
        self.grant = grant
        self._clients = dict(clients)
        self._node = node
        self._released = False
        self._refused: Reason | None = None
        """What the last check found."""
        self._slots: dict[str, LeasedSlots] = {}
        self.deadline_s = grant.deadline_s
        self.asked_s: float | None = None
        """When its request came, on this process's monotonic clock; None where it was opened."""

    @functools.cached_property
    def views(self) -> Views:
        """All leased groups, in shared memory."""
        return Views(self._model, [(part, self._clients[part.holder]) for part in self.grant.parts])

    @property
    def tokens(self) -> int:
        """Tokens the lease covers: the position to resume at."""
        return self.grant.tokens

    @property
    def replay_from(self) -> int | None:
        """From where windows and tails must be computed again before anything resumes; None where all are leased."""
        return self.grant.replay_from

    @property
    def fence(self) -> int:
        """The leader's fence: grows with every lease of a holder's life."""
        return self._leader_part.fence

    @property
    def fences(self) -> dict[str, int]:
        """The fence of each holder (one a group of ranks)."""
        return {part.holder: part.fence for part in self.grant.parts}

    @property
    def _leader_part(self) -> LeasePart:
        return next(part for part in self.grant.parts if part.holder == self.grant.leader)

    # --- checking ------------------------------------------------------------------------------

    def check(self) -> Reason | None:
        """Why the leased bytes may not be trusted now; None if they may. No call is made.

        Checked after the last read, None proves that what was read were the leased bytes.
        """
        if self._released:
            return Reason.LEASE_EXPIRED
        grant = self.grant
        parts = []
        for part in grant.parts:
            client = self._clients[part.holder]
            parts.append((part, client.arena if client.alive else None))
        self._refused = read_refusal(grant, self.deadline_s, parts, self._clock.now(), self._unchanged)
        return self._refused

    def _unchanged(self, part: LeasePart, arena: Arena) -> bool:
        slots = self._slots.get(part.holder)
        if slots is None:
            slots = self._slots[part.holder] = LeasedSlots(part)
        return slots.unchanged(arena)

    @contextlib.contextmanager
    def read(self, group: str, shard: int | None = None) -> Iterator[GroupView]:
        """A group's views, checked before and after. Raises LeaseRefused; KeyError for an unknown group.

        On a GPU what the block has queued is waited for before the second check.
        """
        self._must_hold()
        yield self.views[group] if shard is None else self.views.of(group, shard)
        for client in self._clients.values():
            client.settle()
        self._must_hold()

    def _must_hold(self) -> None:
        refused = self.check()
        if refused is not None:
            raise LeaseRefused(refused)

    # --- life ----------------------------------------------------------------------------------

    def renew(self, lease_s: float = 30.0) -> Reason | None:
        """Extend to ``lease_s`` from now; why not, if not."""
        try:
            client = self._leader()
            reply = client.call(Renew(request_id(), self.grant.lease, lease_s), Renewed)
        except HolderLost:
            return Reason.HOLDER_LOST
        if reply.refused is None:
            self.deadline_s = reply.deadline_s
        return reply.refused

    def release(self, reused_tokens: int | None = None) -> None:
        """End the lease; returns at once. ``reused_tokens``: what was really used after a clean check. Idempotent.

        Raises FabricError for a number of tokens that is none.
        """
        if self._released:
            return
        message = Release(request_id(), self.grant.lease, reused_tokens, self._refused)
        refusal = refusal_of(message, self._model)
        if refusal is not None:
            raise FabricError(refusal)
        with contextlib.suppress(HolderLost):  # a holder that is gone keeps no pins
            self._leader().tell(message)
        self.close()

    def close(self) -> None:
        """Let go of the lease here; nothing changes for its other readers. Idempotent."""
        self._released = True
        if self._opened:
            _close_all(self._clients)

    def _leader(self) -> HolderClient:
        return self._clients[self.grant.leader]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._opened:
            self.close()
        else:
            self.release()

    # --- handing over --------------------------------------------------------------------------

    def token(self) -> bytes:
        """Bytes with which another process of this node can open the lease. They grant access: keep them private."""
        members = [wire.encode_plain(self._clients[part.holder].member) for part in self.grant.parts]
        grant, model = wire.encode_plain(self.grant), written(self._model)
        body = bytes(msgpack.packb([host_identity(), self._node, self.deadline_s, grant, members, model]))
        return bytes(msgpack.packb([TOKEN_SCHEMA, xxh3_128_digest(body), body]))

    @classmethod
    def open(cls, token: bytes) -> Lease:
        """The lease behind a token, as of when the token was made: who renews it makes a new one.

        Raises LeaseRefused where it is over, FabricError on another node, WireError for what is no token.
        """
        host, node, deadline_s, grant, members, model = _fields_of(token)
        here = node_here()
        if host != host_identity() or (here is not None and here != node):
            raise FabricError("this lease is of another node: ask a session here for one of its own")
        try:
            (spec, _), known = read(ModelSpec, model, "lease token: model"), wire.decode_plain(LeaseGrant, grant)
            places, deadline_s = [wire.decode_plain(Member, raw) for raw in members], float(deadline_s)
            if [part.holder for part in known.parts] != [m.address for m in places] or known.leader not in [
                m.address for m in places
            ]:
                raise WireError("its holders are not those of its lease")
        except (SpecError, WireError) as error:
            raise WireError(f"lease token: {error}; {ANOTHER_VERSION}") from None
        except (ValueError, TypeError):
            raise WireError("not a lease token") from None
        clients: dict[str, HolderClient] = {}
        try:
            for member in places:
                clients[member.address] = HolderClient(member)
        except HolderLost:
            _close_all(clients)
            raise LeaseRefused(Reason.HOLDER_LOST) from None
        lease = cls(spec, known, clients, node, opened=True)
        lease.deadline_s = deadline_s
        refused = lease.check()
        if refused is not None:
            lease.close()
            raise LeaseRefused(refused)
        return lease


def _fields_of(token: bytes) -> list[Any]:
    """What a token bears: host, node, deadline, grant, members, model. Raises WireError for what is no token, or damaged."""
    try:
        schema, *rest = msgpack.unpackb(token, raw=False)
        if schema == BARE_TOKEN_SCHEMA:
            fields = rest
        elif schema != TOKEN_SCHEMA:
            known = f"{BARE_TOKEN_SCHEMA}, {TOKEN_SCHEMA}"
            raise WireError(f"lease token: schema {schema} found, this version reads {known}; {ANOTHER_VERSION}")
        else:
            checksum, body = rest
            if checksum != xxh3_128_digest(body):
                raise WireError("not a lease token: it was damaged")
            fields = msgpack.unpackb(body, raw=False)
        if len(fields) != TOKEN_FIELDS:
            raise WireError("not a lease token")
    except WireError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException):
        raise WireError("not a lease token") from None
    return list(fields)


def _close_all(clients: Mapping[str, HolderClient]) -> None:
    for client in clients.values():
        client.close()


def node_here() -> str | None:
    """The Ray node this process runs on; None outside Ray. Ray is not loaded for it."""
    module = sys.modules.get("ray")
    if module is None or not module.is_initialized():
        return None
    return str(module.get_runtime_context().get_node_id())
