"""A session's way to one holder: its control connections and the mapped arena, one of these a holder's life."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ..fabric import messages, wire
from ..fabric.arena import Arena, ArenaLayout, Bytes, Memory
from ..fabric.kinds import FabricError
from ..fabric.messages import (
    Acquire,
    ArenaReply,
    ArenaRequest,
    Done,
    GpuReply,
    GpuRequest,
    Member,
    Misuse,
    SlotsRequest,
    StoreBegin,
    StoreBegun,
)
from ..fabric.repeats import ACQUIRES, ANSWERS, Repeats
from ..transport.control_client import Answer, BlockingClient, ConnectionLost, RequestFailed, RequestTimedOut
from ..transport.memfd import WritableSlots, map_read_only
from ..transport.slot_files import Row, SlotReader, SlotWriter
from ..transport.vigil import AWAKE_S, Vigil
from .clock import MONOTONIC, Clock

if TYPE_CHECKING:
    from ..transport.gpu import GpuPools

R = TypeVar("R")

REQUEST_TIMEOUT_S = 10.0
PATIENCE_S = 2.0
IDLE_CLIENTS_MAX = 16
TOLD_MAX = 16
"""So many unconfirmed messages to a holder; the next waits for its reply."""


class HolderLost(FabricError, ConnectionError):
    """The holder's process is gone or cannot be reached; ask again, or go without the cache."""


class HolderSilent(HolderLost):
    """The holder did not answer in time, whether or not it serves the request later."""


class Writable(Protocol):
    """An open attempt's own slots, in whichever memory (``WritableSlots``, ``WritableGpuSlots``)."""

    def view(self, slot: int) -> Any:
        """The slot to write to. Raises KeyError for a slot of another attempt."""

    def checksums(self, slots: Sequence[int]) -> list[bytes]:
        """The digests of whole slots, in order."""

    def seal(self) -> None:
        """End writing."""

    def revoke(self) -> None:
        """Cut the writer off, as far as its memory lets that be done."""


def request_id() -> str:
    """A name that no other request bears, so that a retry is answered and not run twice."""
    return os.urandom(16).hex()


class _Line:
    """A way to one life of one holder: asks it in the newest schema that both know."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self._schema = wire.spoken_with(member.schema)

    def _connect_to(self, endpoint: str, secret: bytes | None = None, vigil: Vigil | None = None) -> BlockingClient:
        try:
            return BlockingClient.connect(endpoint, secret=secret, vigil=vigil)
        except FabricError as error:
            raise HolderLost(f"holder {self.member.address}: {error}") from None

    def _encoded(self, record: Any) -> bytes:
        return wire.encode(record, self._schema)

    def _request_many(self, client: BlockingClient, records: Sequence[Any], timeout_s: float) -> list[Answer]:
        try:
            if len(records) == 1:
                return [client.request(self._encoded(records[0]), timeout_s)]
            return client.request_many([self._encoded(record) for record in records], timeout_s)
        except ConnectionLost as error:
            raise HolderLost(f"holder {self.member.address}: {error}") from None
        except RequestTimedOut as error:
            raise HolderSilent(f"holder {self.member.address}: {error}") from None

    def _request(self, client: BlockingClient, record: Any, timeout_s: float) -> Answer:
        return self._request_many(client, [record], timeout_s)[0]


class FarHolder(_Line):
    """A connection to one life of a holder of another node, over TCP: it answers questions, its memory is not mapped."""

    def __init__(self, member: Member, door_secret: bytes) -> None:
        super().__init__(member)
        self._client = self._connect_to(member.tcp, door_secret)

    def call(self, record: Any, expect: type[R], timeout_s: float = REQUEST_TIMEOUT_S) -> R:
        """Ask and wait. Raises HolderLost, or FabricError where the request makes no sense."""
        return expect_reply(wire.decode(self._request(self._client, record, timeout_s).payload), expect)

    @property
    def alive(self) -> bool:
        """Whether the connection still stands; no call is made."""
        return self._client.alive

    def close(self) -> None:
        """End the connection."""
        self._client.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """A message without a reply, until a later reply shows that the holder took it."""

    client: BlockingClient
    record: Any


class HolderClient(_Line):
    """Connections to one life of one holder on this node. Thread-safe.

    Two connections have no order between them. So what was told over one goes, until it is confirmed, ahead of what is
    asked over any other: only messages that may be taken twice are told.
    """

    def __init__(self, member: Member, clock: Clock = MONOTONIC, awake_s: float = AWAKE_S) -> None:
        super().__init__(member)
        self._clock = clock
        self._vigil = Vigil(awake_s)
        self._lock = threading.Lock()
        self._idle: list[BlockingClient] = []
        self._acquires, self._answers = Repeats(ACQUIRES), Repeats(ANSWERS)
        self._told: list[_Told] = []
        self._closed = False
        self._main = self._connect()
        try:
            self.arena, self.incarnation, self._reader = self._map()
        except BaseException:
            self._main.close()
            raise

    def _encoded(self, record: Any) -> bytes:
        if type(record) is Acquire and self._schema == wire.SCHEMA:
            with self._lock:
                return self._acquires.encode(record)
        return super()._encoded(record)

    def _decoded(self, frame: bytes) -> Any:
        with self._lock:
            repeated = self._answers.read(frame)
        if repeated is not None:
            return repeated
        record = wire.decode(frame)
        if type(record) is messages.Answer:
            with self._lock:
                self._answers.learn(frame, record)
        return record

    def _connect(self) -> BlockingClient:
        return self._connect_to(self.member.unix, vigil=self._vigil)

    def _map(self) -> tuple[Arena, int, SlotReader]:
        answer = self._request(self._main, ArenaRequest("arena"), REQUEST_TIMEOUT_S)
        reply = wire.decode(answer.payload)
        if not isinstance(reply, ArenaReply) or len(answer.descriptors) != 1:
            for fd in answer.descriptors:
                os.close(fd)
            raise FabricError(f"holder {self.member.address}: its arena was not handed over: {reply}")
        layout = ArenaLayout.of_plain(reply.pools, reply.places, reply.slab_bytes)
        reader = SlotReader(os.dup(answer.descriptors[0]), layout)
        return map_read_only(answer.descriptors[0], layout), reply.incarnation, reader

    def call(self, record: Any, expect: type[R], timeout_s: float = REQUEST_TIMEOUT_S) -> R:
        """Ask and wait. Raises HolderLost, or FabricError where the request makes no sense.

        An attempt belongs to the connection that began it, so stores use the main one.
        """
        return self._exchange(self._main, record, expect, timeout_s)

    def call_apart(self, record: Any, expect: type[R], timeout_s: float) -> R:
        """As ``call``, over a connection of its own: for requests that may wait long and that a retry repeats.

        A holder that stays silent and whose right to grant has run out counts as lost at once.
        """
        with self._lock:
            client = self._idle.pop() if self._idle else None
        if client is None:
            client = self._connect()
        try:
            reply = self._patiently(client, record, expect, time.monotonic() + timeout_s)
        except BaseException:
            client.close()
            raise
        self._put_back(client)
        return reply

    def tell(self, record: Any, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Say what needs no reply and may be taken twice; taken before whatever is asked after it.

        Raises HolderLost, and WireError for what the holder's version has no words for.
        """
        encoded = self._encoded(record)  # before it is put down to be said again
        with self._lock:
            client = self._idle.pop() if self._idle else None
            crowded = len(self._told) >= TOLD_MAX
        if client is None:
            client = self._connect()
        try:
            if crowded:
                self._exchange(client, record, Done, timeout_s)
            else:
                with self._lock:
                    self._told.append(_Told(client, record))
                client.tell(encoded, timeout_s)
        except (ConnectionLost, RequestTimedOut) as error:
            client.close()
            raise HolderLost(f"holder {self.member.address}: {error}") from None
        except BaseException:
            client.close()
            raise
        self._put_back(client)

    def _put_back(self, client: BlockingClient) -> None:
        with self._lock:
            if len(self._idle) < IDLE_CLIENTS_MAX and not self._closed:
                self._idle.append(client)
                return
        client.close()

    def call_many(self, records: Sequence[Any], expect: type[R], timeout_s: float) -> list[R]:
        """All requests at once over a connection of its own, their replies in order. Raises HolderLost."""
        client = self._connect()
        try:
            answers = self._request_in_order(client, records, timeout_s)
        finally:
            client.close()
        return [expect_reply(wire.decode(answer.payload), expect) for answer in answers]

    def _patiently(self, client: BlockingClient, record: Any, expect: type[R], deadline: float) -> R:
        while True:
            left = deadline - time.monotonic()
            try:
                return self._exchange(client, record, expect, min(left, PATIENCE_S))
            except HolderSilent:
                if left <= PATIENCE_S or self._clock.now_ns() > self.arena.grants_until_ns:
                    raise

    def _exchange(self, client: BlockingClient, record: Any, expect: type[R], timeout_s: float) -> R:
        (answer,) = self._request_in_order(client, [record], timeout_s)
        for fd in answer.descriptors:
            os.close(fd)
        return expect_reply(self._decoded(answer.payload), expect)

    def _request_in_order(self, client: BlockingClient, records: Sequence[Any], timeout_s: float) -> list[Answer]:
        """Ask after all that was told, over whichever connection."""
        if not self._told:
            return self._request_many(client, records, timeout_s)
        with self._lock:
            told = list(self._told)
        ahead = [message.record for message in told if message.client is not client]
        try:
            answers = self._request_many(client, [*ahead, *records], timeout_s)
        except RequestFailed:
            self._confirm(told)
            raise
        self._confirm(told)
        return answers[len(ahead) :]

    def _confirm(self, told: Sequence[_Told]) -> None:
        with self._lock:
            self._told = [message for message in self._told if message not in told]

    def begin(self, record: StoreBegin, timeout_s: float = REQUEST_TIMEOUT_S) -> tuple[StoreBegun, SlotWriter | None]:
        """Begin an attempt, over the main connection; with its slots' descriptor where they lie in host memory."""
        (answer,) = self._request_in_order(self._main, [record], timeout_s)
        writers = [SlotWriter(fd, self.arena.layout) for fd in answer.descriptors]
        begun = expect_reply(self._decoded(answer.payload), StoreBegun)
        if self.on_gpu or not any(run.indices for run in begun.slots):
            return begun, None
        return begun, writers[0] if writers else self.writer(begun.attempt)

    def writer(self, attempt: int) -> SlotWriter:
        """What the attempt's own slots are written by. Raises FabricError for an attempt that is not open."""
        answer = self._request(self._main, SlotsRequest("slots", attempt), REQUEST_TIMEOUT_S)
        writers = [SlotWriter(fd, self.arena.layout) for fd in answer.descriptors]
        done = expect_reply(wire.decode(answer.payload), Done)
        if done.refused is not None or len(writers) != 1:
            raise FabricError(f"attempt {attempt}: {done.detail}")
        return writers[0]

    def writable(self, attempt: int, slots: list[int], writer: SlotWriter | None = None) -> Writable:
        """The attempt's own slots, mapped for writing; ``writer`` is taken over. Raises as :meth:`writer`."""
        if self.on_gpu:
            from ..transport.gpu import WritableGpuSlots

            return WritableGpuSlots(self.gpu, slots)
        return WritableSlots.map((writer or self.writer(attempt)).take(), self.arena.layout, slots)

    @property
    def on_gpu(self) -> bool:
        """Whether what readers map lies in a GPU's memory."""
        return bool(self.arena.layout.cuda_bytes)

    @functools.cached_property
    def gpu(self) -> GpuPools:
        """The holder's GPU memory, mapped when it is first needed: who only asks where state lies needs no GPU.

        Raises FabricError where this process does not see the holder's GPU, or the holder has none.
        """
        from ..transport.gpu import GpuPools

        reply = self.call(GpuRequest(request_id()), GpuReply)
        return GpuPools.open(reply.export, self.arena.layout)

    def content(self, slot: int) -> Any:
        """The bytes that a slot's header says were sealed: a read-only numpy array, or a tensor on the holder's GPU."""
        if not self.arena.layout.cuda_bytes or self.arena.layout.memory_of(slot) is Memory.HOST:
            return self.arena.content(slot)
        return self.gpu.slot(slot)[: int(self.arena.lengths[slot])]

    def fill(self, rows: Sequence[tuple[int, Row]]) -> None:
        """Copy slots (number, row) into rows, each from its slot's start, many in one pass. Raises ValueError for a row too long."""
        if not self.on_gpu:
            self._reader.read(rows)
            return
        for slot, row in rows:
            content, at = in_host_memory(self.content(slot)), 0
            for part in row:
                np.copyto(part, content[at : at + part.nbytes])
                at += part.nbytes

    def settle(self) -> None:
        """Wait for what this process has queued on the holder's GPU: only then does a check judge what was read."""
        if "gpu" in vars(self):
            self.gpu.settle()

    @property
    def alive(self) -> bool:
        """Whether the holder's process still holds its end of the connection; no call is made."""
        return self._main.alive

    def close(self) -> None:
        """End the connections; the mapping lives as long as views into it."""
        self._main.close()
        with self._lock:
            self._closed = True
            for client in self._idle:
                client.close()
            self._idle.clear()


def in_host_memory(view: Any) -> Bytes:
    """A view as an array: one of a holder's GPU is copied, others stay as they are."""
    return view if isinstance(view, np.ndarray) else view.cpu().numpy()


def expect_reply(reply: Any, expect: type[R]) -> R:
    """The reply as the class expected. Raises FabricError with the holder's own words otherwise."""
    if isinstance(reply, expect):
        return reply
    if isinstance(reply, Misuse):
        raise FabricError(reply.text)
    raise FabricError(f"{expect.__name__} was expected, the holder said {type(reply).__name__}")
