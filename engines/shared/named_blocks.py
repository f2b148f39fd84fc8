"""Blocks that an engine names by its own hashes, in a fabric: looked up, stored from and loaded into the engine's rows.

    blocks = NamedBlocks(session, scheme="vllm-1", salt=digest(described))
    blocks.present(names)            # [bool]: hints
    blocks.store(names, rows)        # Moved: which are in the fabric now, and why the others are not
    blocks.load(names, rows)         # Moved: which rows hold proven bytes, and why the others do not

Every call blocks, so an engine makes them off its scheduler's thread. None raises for what may happen to a cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...actors.attempt import Stored, joined
from ...actors.client import in_host_memory
from ...actors.lease import Lease
from ...actors.session import Session
from ...fabric.identity import PromptKeys
from ...fabric.kinds import FabricError, ObjectKind, Reason
from ...fabric.model import GroupSpec, ModelSpec
from .audit import Audit, Audits

Bytes = npt.NDArray[np.uint8]
"""One row of an engine's host memory, shape (block_bytes,)."""
Row = Bytes | Sequence[Bytes]
"""A row, or the parts of one that follow each other in a block; what the block has behind them is zeros."""
Rows = Sequence[Row] | Bytes
"""Rows, or an array of them of shape (rows, block_bytes)."""

GROUP = "blocks"
BATCH_OBJECTS = 256
BATCH_BYTES = 32 << 20
ROUNDS = 3
"""Acquires for one batch, each without what the one before it lacked."""
LEASE_S = 30.0


def blocks_model(*, block_bytes: int, block_tokens: int, name: str = "engine-blocks", weights: str = "v1") -> ModelSpec:
    """The model of a fabric for blocks that engines name themselves.

    ``block_bytes``: an engine's row; ``block_tokens``: tokens a row stands for.
    """
    group = GroupSpec(
        name=GROUP, kind=ObjectKind.COMPRESSED_HISTORY, block_tokens=block_tokens, block_bytes=block_bytes
    )
    return ModelSpec(name=name, weights=weights, groups=(group,), chained=False)


@dataclass(slots=True)
class Moved:
    """Places in the lists that were given, by what became of them."""

    done: list[int] = field(default_factory=list)
    refused: dict[int, Reason] = field(default_factory=dict)
    reused_tokens: int = 0

    def refuse(self, places: Sequence[int], reason: Reason) -> None:
        self.refused.update(dict.fromkeys(places, reason))

    @property
    def ok(self) -> bool:
        return not self.refused


class NamedBlocks:
    """One engine's blocks in one fabric. Thread-safe.

    ``salt``: says what the names leave out (:mod:`.description`). ``kind_of``: tells blocks of the same tokens apart (a
    hybrid model has one a cache group), so that tokens are counted once; None for one that counts as none. ``audits``: judges recomputed blocks; without it, none
    is audited. Raises FabricError where the fabric's model is chained or its blocks have another size.
    """

    def __init__(
        self,
        session: Session,
        *,
        scheme: str,
        salt: bytes,
        block_bytes: int,
        tenant: str = "",
        load_s: float = 10.0,
        kind_of: Callable[[bytes], int | None] = lambda _: 0,
        audits: Audits | None = None,
    ) -> None:
        spec = session.model.groups[0]
        if session.model.chained or spec.block_bytes != block_bytes or session.model.shards != 1:
            raise FabricError(
                f"fabric {session.name!r} serves {session.model.name!r} with blocks of {spec.block_bytes} bytes; this engine"
                f" names its own blocks, of {block_bytes} bytes: launch a fabric with the model"
                f" kvfabric.engines.shared.named_blocks.blocks_model(block_bytes={block_bytes}, block_tokens=...)"
            )
        self.session = session
        self.block_bytes = block_bytes
        self.block_tokens = spec.unit_tokens
        self._group = spec.name
        self._scheme = scheme
        self._key: dict[str, Any] = {"salt": salt, **({"tenant": tenant} if tenant else {})}
        self._load_s = load_s
        self._kind_of = kind_of
        self._audits = audits

    def keys(self, names: Sequence[bytes]) -> PromptKeys:
        """What stands for these blocks in every call of the session."""
        return self.session.named(names, scheme=self._scheme, **self._key)

    def tokens_of(self, names: Iterable[bytes]) -> int:
        """Tokens that these blocks stand for together."""
        kinds = Counter(kind for kind in map(self._kind_of, names) if kind is not None)
        return max(kinds.values(), default=0) * self.block_tokens

    def present(self, names: Sequence[bytes]) -> list[bool]:
        """Which of them this engine could load now, as far as the directory knows."""
        found: list[bool] = []
        for batch in _batches(len(names), self.block_bytes):
            keys = self.keys([names[i] for i in batch])
            bits = self.session.present(keys)[self._group]
            found.extend(bool(bits >> place & 1) for place in range(len(batch)))
        return found

    # --- store ---------------------------------------------------------------------------------

    def store(self, names: Sequence[bytes], rows: Rows) -> Moved:
        """Copy rows into the fabric's memory; what is there already stays. A batch is visible as a whole or not at all."""
        moved = Moved()
        if self._audits is not None:
            self._audits.recomputed(names, [joined(_parts(row), self.block_bytes) for row in rows])
        for batch in _batches(len(names), self.block_bytes):
            stored = self._store(self.keys([names[i] for i in batch]), [rows[i] for i in batch])
            if stored.refused is None:
                moved.done.extend(batch)
            else:
                moved.refuse(batch, stored.refused)
        return moved

    def _store(self, keys: PromptKeys, rows: Rows) -> Stored:
        begun = self.session.begin(keys, {self._group: range(len(rows))})
        if isinstance(begun, Stored):
            return begun
        return begun.store(
            [(self._group, place, _parts(row)) for place, row in enumerate(rows) if (self._group, place) in begun]
        )

    # --- load ----------------------------------------------------------------------------------

    def load(self, names: Sequence[bytes], rows: Rows) -> Moved:
        """Fill rows from the fabric, from whatever node. A row that is not ``done`` may hold anything."""
        moved = Moved()
        for batch in _batches(len(names), self.block_bytes):
            self._load(batch, names, rows, moved)
        return moved

    def _load(self, batch: Sequence[int], names: Sequence[bytes], rows: Rows, moved: Moved) -> None:
        rest = list(batch)
        reason = Reason.NOT_STORED
        for turn in range(ROUNDS):
            keys = self.keys([names[i] for i in rest])
            answer = self.session.acquire(keys, lease_s=LEASE_S, deadline_s=self._load_s)
            reason = reason if answer.cause is None else answer.cause.reason
            lease = answer.lease
            if lease is not None:
                covered = rest[: lease.tokens // self.block_tokens]
                if not self._withhold_for_audit(keys, lease, [names[i] for i in covered], moved, covered):
                    self._take(lease, names, rows, covered, moved)
                rest = rest[len(covered) :]
            if not rest or turn + 1 == ROUNDS:
                break
            there = self.present([names[i] for i in rest])
            moved.refuse([i for i, held in zip(rest, there, strict=True) if not held], reason)
            rest = [i for i, held in zip(rest, there, strict=True) if held]
            if not rest:
                break
        moved.refuse(rest, reason)

    def _take(self, lease: Lease, names: Sequence[bytes], rows: Rows, places: Sequence[int], moved: Moved) -> None:
        """Copy what is leased, and let it count only if it was the leased bytes to the end."""
        reused = 0
        try:
            lease.views[self._group].fill((index, _parts(rows[place])) for index, place in enumerate(places))
            refused = lease.check()  # after the last read: that is what proves all of them
            if refused is None:
                moved.done.extend(places)
                reused = self.tokens_of(names[i] for i in places)
                moved.reused_tokens += reused
            else:
                moved.refuse(places, refused)
        finally:
            lease.release(reused_tokens=reused)

    def _withhold_for_audit(
        self, keys: PromptKeys, lease: Lease, names: Sequence[bytes], moved: Moved, places: Sequence[int]
    ) -> bool:
        """Keep these blocks from the engine, so that it computes them and the two can be compared."""
        if self._audits is None or not names or not self.session.audit_due(lease):
            return False
        view = lease.views[self._group]
        held = {name: in_host_memory(view[place]).copy() for place, name in enumerate(names)}
        if lease.check() is not None or not self._audits.open(Audit(keys, lease, held)):
            return False
        moved.refuse(places, Reason.BYPASSED)
        return True

    def close(self) -> None:
        """End what is being audited, and the session."""
        if self._audits is not None:
            self._audits.close()
        self.session.close()


def _parts(row: Row) -> Sequence[Bytes]:
    return (row,) if isinstance(row, np.ndarray) else row


def _batches(count: int, block_bytes: int) -> Iterator[range]:
    size = max(1, min(BATCH_OBJECTS, BATCH_BYTES // block_bytes))
    return (range(at, min(at + size, count)) for at in range(0, count, size))
