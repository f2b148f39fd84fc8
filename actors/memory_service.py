"""What clients are handed of a holder's memory: the mapping on its node, the bytes themselves elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import numpy as np

from ..fabric import wire
from ..fabric.holder import HolderCore
from ..fabric.kinds import FabricError, Reason
from ..fabric.messages import (
    ArenaReply,
    ArenaRequest,
    Done,
    GpuReply,
    GpuRequest,
    Payload,
    ReadSlots,
    SlotsRequest,
    StoreBegun,
    WriteSlots,
)
from ..transport.control_socket import Reply
from ..transport.memfd import ArenaMemory
from ..transport.payloads import Payloads
from .service import UNIX_CLIENT, Service

READ_BYTES_MAX = 8 << 20


class MemoryService(Service):
    """The part of a holder that hands its memory out."""

    core: HolderCore
    memory: ArenaMemory
    payloads: Payloads
    gpu: Any
    _for_readers: int
    _for_writers: int
    _sessions: set[str]
    """Clients that mapped the memory and are still there."""

    def own_request(self, client: str, record: Any) -> Reply | Awaitable[Reply] | None:
        match record:
            case ArenaRequest():
                self._maps_memory(client)
                return self._arena_reply(record), [self._for_readers]
            case GpuRequest():
                self._maps_memory(client)
                if self.gpu is None:
                    raise FabricError("this holder's memory is no GPU's: ask for its arena")
                return wire.encode(GpuReply(record.request, self.gpu.export()))
            case SlotsRequest():
                self._maps_memory(client)
                return self._slots_reply(client, record)
            case WriteSlots():
                return wire.encode(self._write_slots(client, record))
            case ReadSlots():
                return wire.encode(self._read_slots(record))
        return super().own_request(client, record)

    def _maps_memory(self, client: str) -> None:
        """Raises FabricError for a client that cannot be handed descriptors."""
        if not client.startswith(UNIX_CLIENT):
            raise FabricError("memory is handed out over the holder's Unix socket only: use WriteSlots and ReadSlots")
        self._sessions.add(client)

    def _arena_reply(self, record: ArenaRequest) -> bytes:
        layout, weights = self.memory.layout, self.core.ctx.weights
        pools, places = layout.pools_plain(), layout.places_plain()
        reply = ArenaReply(record.request, self.address, self.incarnation, weights, pools, places, layout.slab_bytes)
        return wire.encode(reply)

    def answered(self, client: str, record: Any) -> Reply:
        """An attempt's slots come with the descriptor to write them by, where the client can be handed one.

        Who has no use for it closes it. In GPU memory slots are opened another way.
        """
        reply = super().answered(client, record)
        if not isinstance(record, StoreBegun) or self.gpu is not None or not any(run.indices for run in record.slots):
            return reply
        if not client.startswith(UNIX_CLIENT) or not isinstance(reply, bytes):
            return reply
        self._maps_memory(client)
        return reply, [self._for_writers]

    def _slots_reply(self, client: str, record: SlotsRequest) -> Reply:
        attempt = self.core.stores.attempts.get(record.attempt)
        if attempt is None or attempt.client != client:
            return wire.encode(Done(record.request, Reason.ATTEMPT_SUPERSEDED, "the attempt is not open"))
        return wire.encode(Done(record.request, None, "")), [self._for_writers]

    def _write_slots(self, client: str, record: WriteSlots) -> Done:
        attempt = self.core.stores.attempts.get(record.attempt)
        if attempt is None or attempt.client != client:
            return Done(record.request, Reason.ATTEMPT_SUPERSEDED, "the attempt is not open to this client")
        own = {obj.slot: obj for obj in attempt.objects}
        for slot, payload in record.writes:
            obj = own.get(slot)
            if obj is None or len(payload) != obj.length:
                raise FabricError(f"slot {slot}: not one of the attempt's, or not its length")
            self.payloads.write(slot, np.frombuffer(payload, dtype=np.uint8))
        return Done(record.request, None, "")

    def _read_slots(self, record: ReadSlots) -> Payload:
        lease = self.core.ctx.leases.live.get(record.lease)
        if lease is None or self.clock.now() >= lease.deadline_s:
            return Payload(record.request, Reason.LEASE_EXPIRED, ())
        if lease.weights != self.core.ctx.weights:
            return Payload(record.request, Reason.WEIGHTS_MISMATCH, ())
        slots = {
            (run.group, run.shard, index): slot
            for run in lease.proof.runs
            for index, slot in zip(run.indices, run.slots.tolist(), strict=True)
        }
        payload = []
        for index in record.indices:
            slot = slots.get((record.group, record.shard, index))
            if slot is None:
                raise FabricError(f"group {record.group}, index {index}: not part of the lease")
            payload.append(self.payloads.read(slot, int(self.memory.arena.lengths[slot])).tobytes())
            if sum(map(len, payload)) > READ_BYTES_MAX:
                raise FabricError(f"more than {READ_BYTES_MAX} bytes at once: ask for fewer indices")
        return Payload(record.request, None, tuple(payload))
