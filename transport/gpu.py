"""GPU memory of an arena: pools in one tensor, exported to workers by CUDA IPC, digested by torch kernels.

The only modules that import torch for it are this one and its callers', lazily. Everything but the
export works on a tensor in host memory as well, which is how it is tested where there is no GPU.

Who has what::

    holder    allocates the tensor (GpuPools.allocate), never frees it while it lives
    worker    opens it (GpuPools.open) from bytes the holder sends over its private Unix socket

What a worker opens is torch's own CUDA IPC reduction (``torch.multiprocessing.reductions``), its fields
as msgpack: nothing is unpickled. CUDA knows no read-only mapping, so a worker could write to what it
should only read; what was leased is proven by versions and digests, as everywhere. A holder's end
frees the memory only when no worker maps it any more, and torch keeps an exported allocation until then.

The order of things (the promise of ``payloads``): work is queued on a stream of this module's own, and
``synchronize`` has returned before any call here does. A reader's kernels run on the reader's streams:
it synchronises them before it checks its lease for the last time (``settle``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
import torch
import torch.multiprocessing.reductions

from ..fabric.arena import Arena, ArenaLayout, Bytes, Memory
from ..fabric.kinds import SpecError, WireError
from .gpu_digest import gpu_checksums
from .memfd import Access
from .payloads import HostPayloads, SlotCopy

# What torch leaves untyped.
_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
_reduce: Callable[[torch.Tensor], tuple[Any, tuple[Any, ...]]] = torch.multiprocessing.reductions.reduce_tensor
_rebuild: Callable[..., torch.Tensor] = torch.multiprocessing.reductions.rebuild_cuda_tensor

GPU_SCHEMA = 1
SPARE_BYTES = 256 << 20
"""What an arena leaves free on a GPU: torch's own context and the temporaries of digests need it."""


class GpuPools:
    """The payload of an arena's pools in GPU memory: ``memory`` is uint8 of shape (layout.cuda_bytes,)."""

    def __init__(self, layout: ArenaLayout, memory: torch.Tensor) -> None:
        if memory.dtype is not torch.uint8 or tuple(memory.shape) != (layout.cuda_bytes,):
            raise WireError(f"GPU memory: {memory.dtype} of {tuple(memory.shape)} is not the layout's")
        self.layout = layout
        self.memory = memory
        self.stream = _stream(memory.device) if memory.is_cuda else None

    # --- whose it is ---------------------------------------------------------------------------

    @classmethod
    def allocate(cls, layout: ArenaLayout, device: int) -> GpuPools:
        """Take the memory on a GPU (by its number among those this process sees).

        Raises SpecError where there is no such GPU, or not as much free memory on it.
        """
        if device >= torch.cuda.device_count():
            raise SpecError(f"device: cuda needs GPU {device}, this process sees {torch.cuda.device_count()}")
        free, _ = torch.cuda.mem_get_info(device)
        if layout.cuda_bytes + SPARE_BYTES > free:
            raise SpecError(
                f"memory_bytes, slots: {layout.cuda_bytes} bytes do not fit the {free} free bytes of GPU {device}"
            )
        memory = torch.zeros(layout.cuda_bytes, dtype=torch.uint8, device=torch.device("cuda", device))
        torch.cuda.synchronize(device)
        return cls(layout, memory)

    def export(self) -> bytes:
        """What a process of this machine opens the memory by; each export is for one opening."""
        _, arguments = _reduce(self.memory)
        handle, size, offset = arguments[7:10]
        counter_handle, counter_offset, event_handle, event_sync = arguments[11:15]
        plain = [handle, size, offset, counter_handle, counter_offset, event_handle, event_sync]
        return bytes(msgpack.packb([GPU_SCHEMA, uuid_of(self.memory.device.index), *plain]))

    @classmethod
    def open(cls, raw: bytes, layout: ArenaLayout) -> GpuPools:
        """Map a holder's GPU memory. Raises WireError for what :meth:`export` did not make, or of no GPU seen here."""
        schema, uuid, arguments = _fields(raw)
        if schema != GPU_SCHEMA:
            raise WireError(f"GPU memory: schema {schema} found, this version reads {GPU_SCHEMA}")
        seen = [index for index in range(torch.cuda.device_count()) if uuid_of(index) == uuid]
        if not seen:
            raise WireError(f"GPU memory: this process does not see the GPU {uuid} (CUDA_VISIBLE_DEVICES)")
        handle, size, offset, counter_handle, counter_offset, event_handle, event_sync = arguments
        memory = _rebuild(
            torch.Tensor,
            torch.Size([layout.cuda_bytes]),
            (1,),
            0,
            torch.UntypedStorage,
            torch.uint8,
            seen[0],
            handle,
            size,
            offset,
            False,
            counter_handle,
            counter_offset,
            event_handle,
            event_sync,
        )
        return cls(layout, memory)

    # --- slots ---------------------------------------------------------------------------------

    def slot(self, slot: int) -> torch.Tensor:
        """The slot's whole payload, uint8 of shape (slot_bytes,), no copy. Raises WireError for a slot elsewhere."""
        pool = self.layout.pools[self.layout.pool_of(slot)]
        if pool.memory is not Memory.CUDA:
            raise WireError(f"slot {slot} does not lie in GPU memory")
        start = self.layout.offset_of(slot)
        return self.memory[start : start + pool.slot_bytes]

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Queue work on this module's stream; all of it is over when the block ends."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield
            self.stream.synchronize()

    def checksums(self, slots: Sequence[tuple[int, int]]) -> list[bytes]:
        """The ``lanes_128`` of the first bytes of slots (slot, length), in order."""
        with self.working():
            return gpu_checksums([self.slot(slot)[:length] for slot, length in slots])

    def settle(self) -> None:
        """Wait until everything that this process queued on the GPU is over."""
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)


class GpuPayloads:
    """:class:`~kvfabric.transport.payloads.Payloads` of an arena with pools in GPU memory."""

    def __init__(self, arena: Arena, pools: GpuPools) -> None:
        self._arena = arena
        self._pools = pools
        self._host = HostPayloads(arena)

    def _on_gpu(self, slot: int) -> bool:
        return self._arena.layout.memory_of(slot) is Memory.CUDA

    def _tensor(self, slot: int, length: int) -> torch.Tensor:
        if self._on_gpu(slot):
            return self._pools.slot(slot)[:length]
        return torch.from_numpy(self._arena.payload(slot)[:length])

    def copy(self, copies: Sequence[SlotCopy]) -> list[bytes]:
        """The digest is taken of what lies in the target, in the target's memory."""
        with self._pools.working():
            for copy in copies:
                source, target = (self._tensor(slot, copy.length_bytes) for slot in (copy.source, copy.target))
                target.copy_(source)
        return self.checksums([(copy.target, copy.length_bytes) for copy in copies])

    def checksums(self, slots: Sequence[tuple[int, int]]) -> list[bytes]:
        on_gpu = [entry for entry in slots if self._on_gpu(entry[0])]
        found = dict(zip(on_gpu, self._pools.checksums(on_gpu), strict=True))
        for entry in slots:
            if entry not in found:
                (found[entry],) = self._host.checksums([entry])
        return [found[entry] for entry in slots]

    def write(self, slot: int, payload: Bytes) -> None:
        with self._pools.working():
            self._tensor(slot, payload.nbytes).copy_(torch.from_numpy(np.array(payload)))

    def read(self, slot: int, length: int) -> Bytes:
        with self._pools.working():
            return self._tensor(slot, length).cpu().numpy()


class WritableGpuSlots:
    """What a writer holds of GPU pools while its attempt is open: as :class:`~.memfd.WritableSlots`, but for one thing.

    CUDA maps the whole allocation and takes no part of it back: a view handed out stays writable. So ``seal`` and
    ``revoke`` wait for what this process has queued, which ends the copies it knows of, and a slot that was taken
    away stays quarantined until this process says that it is quiet, or ends.
    """

    def __init__(self, pools: GpuPools, slots: Sequence[int]) -> None:
        self._pools = pools
        self._views = {slot: pools.slot(slot) for slot in slots}
        self.access = Access.OPEN

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(self._views)

    def view(self, slot: int) -> torch.Tensor:
        """The slot's payload, uint8 of shape (slot_bytes,). Raises KeyError for a slot of another attempt."""
        return self._views[slot]

    def checksums(self, slots: Sequence[int]) -> list[bytes]:
        """The digests of whole slots, in order."""
        return self._pools.checksums([(slot, self._views[slot].numel()) for slot in slots])

    def seal(self) -> None:
        """End writing once everything queued here is over. Idempotent; a revoked attempt stays revoked."""
        if self.access is Access.OPEN:
            self._pools.settle()
            self.access = Access.SEALED

    def revoke(self) -> None:
        """Wait for everything queued here. Idempotent."""
        if self.access is not Access.REVOKED:
            self._pools.settle()
            self.access = Access.REVOKED


def fill(target: torch.Tensor, values: Any) -> None:
    """Copy an array or tensor, on any device, into a view of a slot. Raises ValueError if its bytes are not as many."""
    raw = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
    raw = raw.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() != target.numel():
        raise ValueError(f"{raw.numel()} bytes given, an object of this group has {target.numel()}")
    target.copy_(raw)


def uuid_of(index: int) -> str:
    """What a GPU is called on every process of its machine, whatever they see of it."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _fields(raw: bytes) -> tuple[int, str, tuple[Any, ...]]:
    """Schema, GPU, and the arguments of an opening. Raises WireError."""
    try:
        schema, uuid, *rest = msgpack.unpackb(raw, raw=False)
    except (ValueError, TypeError, msgpack.UnpackException):
        raise WireError("GPU memory: not an export") from None
    kinds = (bytes, int, int, bytes, int, bytes, bool)
    if not isinstance(uuid, str) or len(rest) != len(kinds):
        raise WireError("GPU memory: not an export")
    for value, kind in zip(rest, kinds, strict=True):
        if not isinstance(value, kind):
            raise WireError("GPU memory: not an export")
    return schema, uuid, tuple(rest)
