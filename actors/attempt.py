"""A write attempt in a writer's hands: slots mapped for writing until commit or abort.

    begun = session.begin(tokens, {"kv": [0, 1]})      # an Attempt, or a Stored with the reason
    begun.view("kv", 0)[:] = ...                       # in place, in shared memory
    begun.commit()                                     # digested here, visible at once

After a commit the views stay readable; after an abort, or for an attempt that was taken away, they
are private memory of this process: a copy still under way ends harmlessly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..fabric.kinds import FabricError, Reason
from ..fabric.messages import Done, StoreAbort, StoreBegun, StoreCommit, StoreQuiet
from ..fabric.model import ModelSpec
from .client import HolderClient, HolderLost, Writable, request_id


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a publish: visible, or why not and in which group."""

    refused: Reason | None = None
    group: str = ""

    @property
    def ok(self) -> bool:
        return self.refused is None


class Attempt:
    """An open write attempt: its slots are writable, by this process only, until commit or abort.

    Dropping it without either quarantines its slots until this process's connection ends.
    """

    def __init__(
        self, model: ModelSpec, client: HolderClient, begun: StoreBegun, stored: Callable[[Done], None] | None = None
    ) -> None:
        self._client = client
        self._stored = stored
        self._number = begun.attempt
        self._order: list[tuple[str, int, int]] = []
        for run in begun.slots:
            name = model.groups[run.group].name
            slots = np.frombuffer(run.slots, dtype="<u4").tolist()
            self._order.extend((name, index, slot) for index, slot in zip(run.indices, slots, strict=True))
        self._slots = {(group, index): slot for group, index, slot in self._order}
        self._writable: Writable | None = None
        if self._order:
            self._writable = client.writable(begun.attempt, [slot for _, _, slot in self._order])

    def __contains__(self, key: tuple[str, int]) -> bool:
        """Whether (group, index) is to be written: what was there already is not."""
        return key in self._slots

    def view(self, group: str, index: int) -> Any:
        """The slot to write one object to: uint8 of shape (block_bytes,). Raises KeyError for another.

        A numpy array where readers' memory is host memory, a torch tensor where it is a GPU's.
        """
        if self._writable is None:
            raise KeyError(f"{group}[{index}]: this attempt writes nothing")
        return self._writable.view(self._slots[group, index])

    def commit(self) -> Stored:
        """Digest what was written and make it visible; a late or outdated attempt is refused.

        From here on numpy refuses to write to the views (ValueError), and a write through a slice or tensor
        made of one is a fault: end every copy before.
        """
        sums = []
        if self._writable is not None:
            self._writable.seal()
            sums = self._writable.checksums([slot for _, _, slot in self._order])
        try:
            done = self._client.call(StoreCommit(request_id(), self._number, b"".join(sums)), Done)
        except HolderLost:
            return Stored(Reason.HOLDER_LOST)
        if self._stored is not None and done.refused is None:
            self._stored(done)
        return Stored(done.refused)

    def abort(self) -> None:
        """Give up: the slots are cut off from this process first, so they are quiet at once."""
        if self._writable is not None:
            self._writable.revoke()
        try:
            self._client.call(StoreAbort(request_id(), self._number), Done)
            self._client.call(StoreQuiet(request_id(), self._number), Done)
        except HolderLost:
            return


def copy_into(target: Any, array: npt.NDArray[Any], where: str) -> None:
    """Copy an object's bytes into its slot, a numpy array or a tensor. Raises FabricError naming it if its size is another."""
    if not isinstance(target, np.ndarray):
        from ..transport.gpu import fill

        try:
            fill(target, array)
        except ValueError as error:
            raise FabricError(f"{where}: {error}") from None
        return
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if raw.nbytes != target.nbytes:
        raise FabricError(f"{where}: {raw.nbytes} bytes given, an object of this group has {target.nbytes}")
    np.copyto(target, raw)
