"""A write attempt in a writer's hands: slots mapped for writing until commit or abort.

    begun = session.begin(tokens, {"kv": [0, 1]})      # an Attempt, or a Stored with the reason
    begun.view("kv", 0)[:] = ...                       # in place, in shared memory
    begun.commit()                                     # digested here, visible at once
    begun.store([("kv", 0, [array])])                  # or whole, many in one pass, and committed

After a commit the views stay readable; after an abort, or for an attempt that was taken away, they
are private memory of this process: a copy still under way ends harmlessly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..fabric.kinds import FabricError, Reason
from ..fabric.messages import Done, StoreAbort, StoreBegun, StoreCommit, StoreQuiet
from ..fabric.model import ModelSpec
from ..transport.slot_files import Row, SlotWriter
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
        self,
        model: ModelSpec,
        client: HolderClient,
        begun: StoreBegun,
        writer: SlotWriter | None,
        stored: Callable[[Done], None] | None = None,
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
        self._writer = writer
        self._writable: Writable | None = None
        self._sums: dict[int, bytes] = {}
        """Digests of the slots that were written whole."""

    def __contains__(self, key: tuple[str, int]) -> bool:
        """Whether (group, index) is to be written: what was there already is not."""
        return key in self._slots

    @property
    def on_gpu(self) -> bool:
        """Whether views are tensors on the holder's GPU."""
        return self._client.on_gpu

    def view(self, group: str, index: int) -> Any:
        """The slot to write one object to: uint8 of shape (block_bytes,). Raises KeyError for another.

        A numpy array where readers' memory is host memory, a torch tensor where it is a GPU's.
        """
        if not self._order:
            raise KeyError(f"{group}[{index}]: this attempt writes nothing")
        return self._mapped().view(self._slots[group, index])

    def _mapped(self) -> Writable:
        if self._writable is None:
            slots = [slot for _, _, slot in self._order]
            self._writable = self._client.writable(self._number, slots, self._writer)
            self._writer = None
        return self._writable

    def write(self, objects: Iterable[tuple[str, int, Row]]) -> None:
        """Write objects (group, index, row) whole, many in one pass; behind a row's arrays the object has zeros.

        A row is contiguous uint8 arrays that follow each other. Raises KeyError for an object of another attempt,
        FabricError for a row longer than its object, OSError where the holder's memory cannot take it.
        """
        if self._client.on_gpu or self._writable is not None:
            for group, index, row in objects:
                target = self.view(group, index)
                copy_into(target, joined(row, int(target.nbytes)), f"objects.{group}[{index}]")
            return
        rows = [(self._slots[group, index], row) for group, index, row in objects]
        if not rows:
            return
        if self._writer is None:
            self._writer = self._client.writer(self._number)
        try:
            sums = self._writer.write(rows)
        except ValueError as error:
            raise FabricError(f"objects: {error}") from None
        self._sums.update((slot, summed) for (slot, _), summed in zip(rows, sums, strict=True))

    def store(self, objects: Iterable[tuple[str, int, Row]]) -> Stored:
        """:meth:`write` and :meth:`commit`; an attempt that cannot be written is aborted. Raises KeyError, FabricError."""
        try:
            self.write(objects)
        except HolderLost:
            return Stored(Reason.HOLDER_LOST)
        except OSError:
            self.abort()
            return Stored(Reason.ADMISSION_LIMIT)
        except BaseException:
            self.abort()
            raise
        return self.commit()

    def commit(self) -> Stored:
        """Digest what was written and make it visible; a late or outdated attempt is refused.

        From here on numpy refuses to write to the views (ValueError), and a write through a slice or tensor
        made of one is a fault: end every copy before.
        """
        slots = [slot for _, _, slot in self._order]
        if self._writable is None and self._sums.keys() >= set(slots):
            sums = [self._sums[slot] for slot in slots]
        else:
            self._mapped().seal()
            sums = self._mapped().checksums(slots)
        self._let_go()
        try:
            done = self._client.call(StoreCommit(request_id(), self._number, b"".join(sums)), Done)
        except HolderLost:
            return Stored(Reason.HOLDER_LOST)
        if self._stored is not None and done.refused is None:
            self._stored(done)
        return Stored(done.refused)

    def _let_go(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def abort(self) -> None:
        """Give up: the slots are cut off from this process first, so they are quiet at once."""
        self._let_go()
        if self._writable is not None:
            self._writable.revoke()
        try:
            self._client.call(StoreAbort(request_id(), self._number), Done)
            self._client.call(StoreQuiet(request_id(), self._number), Done)
        except HolderLost:
            return


def joined(row: Row, size_bytes: int) -> npt.NDArray[np.uint8]:
    """A row as one array, zeros behind it."""
    if len(row) == 1 and row[0].nbytes == size_bytes:
        return row[0]
    whole = np.zeros(max(size_bytes, sum(part.nbytes for part in row)), dtype=np.uint8)
    at = 0
    for part in row:
        whole[at : at + part.nbytes] = part
        at += part.nbytes
    return whole


def copy_into(target: Any, array: npt.NDArray[Any], where: str) -> None:
    """Copy an object's bytes into its slot, a numpy array or a tensor. Raises FabricError naming it if its size is another."""
    if not isinstance(target, np.ndarray):
        from ..transport.gpu import fill

        try:
            fill(target, array)
        except ValueError as error:
            raise FabricError(f"{where}: {error}") from None
        return
    np.copyto(target, bytes_of(array, target.nbytes, where))


def bytes_of(array: npt.NDArray[Any], size_bytes: int, where: str) -> npt.NDArray[np.uint8]:
    """An object's bytes as contiguous uint8, uncopied where they are. Raises FabricError naming it if its size is another."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if raw.nbytes != size_bytes:
        raise FabricError(f"{where}: {raw.nbytes} bytes given, an object of this group has {size_bytes}")
    return raw
