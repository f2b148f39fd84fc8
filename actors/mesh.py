"""The mesh: how the cores' records reach one another over the control sockets.

One connection a peer, one worker task, a bounded queue: records to one peer keep their order. What
cannot be delivered is told to the core at once (it decides what that means); what was sent and not
answered is the core's own time-out. Unix sockets on the same host, authenticated TCP elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ..fabric import wire
from ..fabric.kinds import FabricError
from ..fabric.messages import Envelope, Member, Members
from ..transport.control_client import AsyncClient
from ..transport.link import host_identity

logger = logging.getLogger(__name__)

QUEUE_MAX = 4096
SEND_TIMEOUT_S = 2.0


class Mesh:
    """Everyone this process may talk to. All methods run on the event loop."""

    def __init__(self, me: str, secret: bytes, undeliverable: Callable[[str, Any], None]) -> None:
        self.me = me
        self._secret = secret
        self._undeliverable = undeliverable
        self._host = host_identity()
        self._members: dict[str, Member] = {}
        self._number = -1
        self._peers: dict[str, _Peer] = {}

    @property
    def members(self) -> dict[str, Member]:
        return self._members

    def update(self, message: Members) -> None:
        """Take the supervisor's newest list; connections to ended lives are dropped."""
        if message.number <= self._number:
            return
        self._number = message.number
        fresh = {m.address: m for m in message.members}
        for address, peer in list(self._peers.items()):
            if fresh.get(address) != self._members.get(address):
                peer.stop()
                del self._peers[address]
        self._members = fresh

    def send(self, to: str, record: Any) -> None:
        """Queue a record for a peer; an unknown peer or a full queue is told as undeliverable."""
        peer = self._peer(to)
        if peer is None or not peer.put(record):
            asyncio.get_running_loop().call_soon(self._undeliverable, to, record)

    async def ask(self, to: str, record: Any, timeout_s: float) -> Any:
        """A request that the peer's process answers itself. Raises FabricError if it does not."""
        peer = self._peer(to)
        if peer is None:
            raise FabricError(f"{to} is not a member of this fabric")
        client = await peer.client()
        answer = await client.request(wire.encode(record), timeout_s)
        return wire.decode(answer.payload)

    def _peer(self, to: str) -> _Peer | None:
        member = self._members.get(to)
        if member is None:
            return None
        peer = self._peers.get(to)
        if peer is None:
            endpoint = member.unix if member.host == self._host else member.tcp
            peer = self._peers[to] = _Peer(to, endpoint, self.me, self._secret, self._undeliverable)
        return peer

    async def close(self) -> None:
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.stop()


class _Peer:
    """One peer's connection and its queue."""

    def __init__(
        self, address: str, endpoint: str, me: str, secret: bytes, undeliverable: Callable[[str, Any], None]
    ) -> None:
        self.address = address
        self._endpoint = endpoint
        self._me = me
        self._secret = secret
        self._undeliverable = undeliverable
        self._queue: asyncio.Queue[Any] = asyncio.Queue(QUEUE_MAX)
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()
        self._worker = asyncio.get_running_loop().create_task(self._work())

    def put(self, record: Any) -> bool:
        try:
            self._queue.put_nowait(record)
        except asyncio.QueueFull:
            return False
        return True

    async def client(self) -> AsyncClient:
        """The connection, made when needed. Raises FabricError if the peer cannot be reached."""
        async with self._connecting:
            if self._client is None or not self._client.connected:
                secret = None if self._endpoint.startswith("unix:") else self._secret
                self._client = await AsyncClient.connect(self._endpoint, secret=secret, timeout_s=SEND_TIMEOUT_S)
            return self._client

    async def _work(self) -> None:
        while True:
            record = await self._queue.get()
            try:
                client = await self.client()
                envelope = Envelope(self._me, wire.encode(record))
                await client.request(wire.encode(envelope), SEND_TIMEOUT_S)
            except FabricError as error:
                logger.info("%s cannot be reached: %s", self.address, error)
                self._undeliverable(self.address, record)

    def stop(self) -> None:
        """End the connection; what was queued is told as undeliverable."""
        self._worker.cancel()
        while not self._queue.empty():
            self._undeliverable(self.address, self._queue.get_nowait())
        client, self._client = self._client, None
        if client is not None:
            task = asyncio.get_running_loop().create_task(client.close())
            _closing.add(task)
            task.add_done_callback(_closing.discard)


_closing: set[asyncio.Task[None]] = set()
"""Connections being closed: the loop keeps only weak references to tasks."""
