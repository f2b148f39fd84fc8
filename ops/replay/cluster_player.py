"""One node's part of a replay on real actors: ask, read every leased byte, store what was computed.

What an object holds follows from its digest, so every reader knows every byte that it must find. Tokens follow
from the trace's block ids; those of a partial last block are of one request alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ...actors.answer import Answer
from ...actors.client import HolderClient, request_id
from ...actors.lease import LeaseRefused
from ...actors.session import Session
from ...fabric.identity import DIGEST_BYTES, PromptKeys
from ...fabric.kinds import ObjectKind, Reason
from ...fabric.messages import Done, Member, Objects, SwapOut
from .trace import BLOCK_TOKENS

LEASE_S = 60.0
Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.uint32]
_OF_ONE_REQUEST = 1 << 31
"""From here on tokens are of one request; below, of blocks."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a trace. ``blocks``: numbers from 0 up, in the place of the trace's ids."""

    number: int
    blocks: tuple[int, ...]
    input_tokens: int
    output_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Played:
    """How it went. ``reason``, ``kind``: why hashes promised more than was granted; ``wrong_reads``: leased objects with
    another byte than the only right one.
    """

    hash_tokens: int
    usable_tokens: int
    tokens: int
    reason: Reason | None = None
    kind: ObjectKind | None = None
    wrong_reads: int = 0
    reads_refused: int = 0
    """Leases that were over before all of their bytes were read: nothing of them was used."""
    stores_refused: int = 0


def tokens_of(asked: Asked) -> Tokens:
    """The request's prompt, of ``input_tokens`` tokens."""
    blocks = np.array(asked.blocks, dtype=np.uint32)[:, None] * BLOCK_TOKENS
    whole = (blocks + np.arange(BLOCK_TOKENS, dtype=np.uint32)).reshape(-1)
    rest = asked.input_tokens - len(whole)
    own = _OF_ONE_REQUEST + asked.number * BLOCK_TOKENS % _OF_ONE_REQUEST + np.arange(max(rest, 0))
    return np.concatenate([whole, own.astype(np.uint32)])[: asked.input_tokens]


def content(digest: bytes, group: int, shard: int, nbytes: int) -> Bytes:
    """The only right bytes of an object, shape (nbytes,)."""
    name = digest + group.to_bytes(2, "little") + shard.to_bytes(2, "little")
    return np.frombuffer(blake3(name).digest(length=nbytes), dtype=np.uint8)


class Contents(Mapping[int, Bytes]):
    """A group's objects of a prompt from one index to another, made as they are asked for."""

    def __init__(self, digests: bytes, group: int, shard: int, nbytes: int, indices: range) -> None:
        self._digests = digests
        self._of = (group, shard, nbytes)
        self._indices = indices

    def __getitem__(self, index: int) -> Bytes:
        if index not in self._indices:
            raise KeyError(index)
        return content(self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES], *self._of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


class Player:
    """Plays requests at one node over a session of its own."""

    def __init__(self, session: Session, members: Iterable[Member] = ()) -> None:
        """``members``: the holders of its node."""
        self._session = session
        self._holders = [HolderClient(member) for member in members]
        self._model = session.model
        self._stored: dict[int, Asked] = {}
        """Prompts that were stored here and not put on disk since, the oldest first."""

    def play(self, asked: Asked) -> Played:
        """One request: acquire, read, store the rest, release."""
        session = self._session
        keys = session.keys(tokens_of(asked))
        answer = session.acquire(keys, lease_s=LEASE_S)
        wrong, refused = 0, 0
        if answer.lease is not None:
            try:
                wrong = self._wrong_in(answer, keys)
            except LeaseRefused:
                refused = 1
        stores_refused = self._store(asked, keys, 0 if refused else answer.tokens)
        if answer.lease is not None:
            answer.lease.release(0 if refused else answer.tokens)
        session.generated(keys, asked.output_tokens)
        self._stored.pop(asked.number, None)
        self._stored[asked.number] = asked
        cause = answer.cause
        return Played(
            answer.hash_tokens,
            answer.usable_tokens,
            0 if refused else answer.tokens,
            Reason.LEASE_EXPIRED if refused else None if cause is None else cause.reason,
            None if refused or cause is None else cause.kind,
            wrong,
            refused,
            stores_refused,
        )

    def _wrong_in(self, answer: Answer, keys: PromptKeys) -> int:
        """Leased objects whose bytes are not the right ones, every byte read. Raises LeaseRefused where it is over."""
        lease, wrong = answer.lease, 0
        assert lease is not None
        for group, shard in sorted({(run.group, run.shard) for part in lease.grant.parts for run in part.slots}):
            spec = self._model.groups[group]
            digests = keys.keys(spec.unit_tokens)
            right = Contents(digests, group, shard, spec.block_bytes, range(len(digests) // DIGEST_BYTES))
            with lease.read(spec.name, shard) as views:
                found = sum(not np.array_equal(view, right[index]) for index, view in views.items())
            wrong += found  # after the second check: what changed under the reader was refused
        return wrong

    def _store(self, asked: Asked, keys: PromptKeys, resumed: int) -> int:
        """Publish what was computed behind the resume position; how many shards were refused."""
        whole = len(asked.blocks) * BLOCK_TOKENS
        refused = 0
        for shard in range(self._model.shards):
            objects: dict[str, Mapping[int, Any]] = {}
            for group, spec in enumerate(self._model.groups):
                indices = range(resumed // spec.unit_tokens, whole // spec.unit_tokens)
                if indices:
                    of = (group, shard, spec.block_bytes, indices)
                    objects[spec.name] = Contents(keys.keys(spec.unit_tokens), *of)
            if objects:
                refused += not self._session.publish(keys, objects, shard=shard).ok
        return refused

    def spill(self, prompts: int) -> int:
        """Put the oldest prompts that lie in memory only on disk, so many at most; how many were.

        Swapped out by name: an acquire and a park of it would be a request more in what the holders did over time.
        """
        spilled = 0
        for number in list(self._stored)[:prompts]:
            asked = self._stored.pop(number)
            objects = self._objects(self._session.keys(tokens_of(asked)))
            done = [holder.call(SwapOut(request_id(), objects), Done) for holder in self._holders]
            spilled += all(each.refused is None for each in done)
        return spilled

    def _objects(self, keys: PromptKeys) -> tuple[Objects, ...]:
        """All that there could be of a prompt, of every group and shard."""
        found = []
        for group, spec in enumerate(self._model.groups):
            digests = keys.keys(spec.unit_tokens)
            indices = tuple(range(len(digests) // DIGEST_BYTES))
            found += [Objects(group, shard, indices, digests) for shard in range(self._model.shards) if indices]
        return tuple(found)


class NodePlayer:
    """A player in an actor on its node."""

    def __init__(self, fabric: str, members: Sequence[Member]) -> None:
        from ...actors.fabric import connect

        self._player = Player(connect(fabric), members)

    def play(self, asked: Asked) -> Played:
        return self._player.play(asked)

    def spill(self, prompts: int) -> int:
        return self._player.spill(prompts)
