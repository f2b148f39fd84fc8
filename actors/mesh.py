"""The mesh: how the cores' records reach one another over the control sockets.

One connection a peer, one worker task, a bounded queue: records to one peer keep their order. What
cannot be delivered is told to the core at once (it decides what that means); what was sent and not
answered is the core's own time-out. Unix sockets on the same host, authenticated TCP elsewhere; the
first record on each connection proves who sends (``PeerHello``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from ..fabric import wire
from ..fabric.kinds import FabricError
from ..fabric.messages import Done, Member, Members, PeerHello
from ..transport.challenge import door_secret, peer_proof
from ..transport.control_client import AsyncClient
from ..transport.link import host_identity

logger = logging.getLogger(__name__)

QUEUE_MAX = 4096
SEND_TIMEOUT_S = 2.0


class Mesh:
    """Everyone this process may talk to. All methods run on the event loop."""

    def __init__(
        self,
        me: str,
        secret: bytes,
        undeliverable: Callable[[str, Any], None],
        replied: Callable[[str, Any], None] | None = None,
    ) -> None:
        self.me = me
        self._secret = secret
        self._undeliverable = undeliverable
        self._replied = replied or _log_reply
        self._host = host_identity()
        self._members: dict[str, Member] = {}
        self._number = -1
        self._peers: dict[str, _Peer] = {}
        self.unreachable: frozenset[str] = frozenset()
        """Addresses that a rehearsal has cut off."""

    @property
    def busy(self) -> bool:
        """Whether anything sent was not taken yet by the process it was sent to."""
        return any(peer.untaken for peer in self._peers.values())

    @property
    def members(self) -> dict[str, Member]:
        return self._members

    def update(self, message: Members) -> None:
        """Take the supervisor's newest list; connections to ended lives are dropped."""
        if message.number <= self._number:
            return
        before, self._members = self._members, {m.address: m for m in message.members}
        self._number = message.number
        changed = [a for a in self._peers if self._members.get(a) != before.get(a)]
        for peer in [self._peers.pop(address) for address in changed]:
            peer.stop()

    def send(self, to: str, record: Any) -> None:
        """Queue a record for a peer; an unknown peer or a full queue is told as undeliverable."""
        peer = None if to in self.unreachable else self._peer(to)
        if peer is None or not peer.put(record):
            asyncio.get_running_loop().call_soon(self._undeliverable, to, record)

    async def flushed(self, addresses: Iterable[str], timeout_s: float) -> list[str]:
        """Wait until all that was sent to these peers was taken; returns those that did not take it in time."""
        waiting = {a: asyncio.ensure_future(self._peers[a].flushed()) for a in addresses if a in self._peers}
        if waiting:
            await asyncio.wait(waiting.values(), timeout=timeout_s)
        late = [address for address, task in waiting.items() if not task.done()]
        for task in waiting.values():
            task.cancel()
        return late

    async def ask(self, to: str, record: Any, timeout_s: float) -> Any:
        """A request that the peer's process answers itself. Raises FabricError if it does not."""
        if to in self.unreachable:
            raise FabricError(f"{to} is cut off from {self.me}")
        peer = self._peer(to)
        if peer is None:
            raise FabricError(f"{to} is not a member of this fabric")
        client = await peer.client()
        answer = await client.request(peer.encode(record), timeout_s)
        return wire.decode(answer.payload)

    def _peer(self, to: str) -> _Peer | None:
        member = self._members.get(to)
        if member is None:
            return None
        peer = self._peers.get(to)
        if peer is None:
            endpoint = member.unix if member.host == self._host else member.tcp
            hello = PeerHello(self.me, peer_proof(self._secret, self.me, to, member.incarnation))
            peer = self._peers[to] = _Peer(
                to,
                endpoint,
                hello,
                schema=wire.spoken_with(member.schema),
                secret=self._secret,
                undeliverable=self._undeliverable,
                replied=self._replied,
            )
        return peer

    async def close(self) -> None:
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.stop()
        if _closing:
            await asyncio.wait(list(_closing), timeout=SEND_TIMEOUT_S)


def _log_reply(address: str, reply: Any) -> None:
    logger.warning("%s replied: %s", address, reply)


class _Peer:
    """One peer's connection and its queue."""

    def __init__(
        self,
        address: str,
        endpoint: str,
        hello: PeerHello,
        *,
        schema: int,
        secret: bytes,
        undeliverable: Callable[[str, Any], None],
        replied: Callable[[str, Any], None],
    ) -> None:
        self._replied = replied
        self.address = address
        self._endpoint = endpoint
        self._hello = hello
        self._schema = schema
        self._secret = secret
        self._undeliverable = undeliverable
        self._queue: asyncio.Queue[Any] = asyncio.Queue(QUEUE_MAX)
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()
        self._stopped = False
        self.untaken = 0
        self._worker = asyncio.get_running_loop().create_task(self._work())

    def put(self, record: Any) -> bool:
        if self._stopped:
            return False
        try:
            self._queue.put_nowait(record)
        except asyncio.QueueFull:
            return False
        self.untaken += 1
        return True

    async def flushed(self) -> None:
        await self._queue.join()

    def encode(self, record: Any) -> bytes:
        """The record as this peer reads it. Raises WireError for one that its schema has no words for."""
        return wire.encode(record, self._schema)

    async def client(self) -> AsyncClient:
        """The connection, made and proven when needed. Raises FabricError if the peer cannot be reached."""
        async with self._connecting:
            if self._client is None or not self._client.connected:
                if self._client is not None:
                    await self._client.close()
                    self._client = None
                secret = None if self._endpoint.startswith("unix:") else door_secret(self._secret)
                client = await AsyncClient.connect(self._endpoint, secret=secret, timeout_s=SEND_TIMEOUT_S)
                try:
                    answer = await client.request(self.encode(self._hello), SEND_TIMEOUT_S)
                    if not isinstance(wire.decode(answer.payload), Done):
                        raise FabricError("it takes us for no peer of its fabric")
                    if self._stopped:
                        raise FabricError("it is no member any more")
                except BaseException:
                    await client.close()
                    raise
                self._client = client
            return self._client

    async def _work(self) -> None:
        while True:
            record = await self._queue.get()
            try:
                client = await self.client()
                answer = await client.request(self.encode(record), SEND_TIMEOUT_S)
                if answer.payload:
                    self._replied(self.address, wire.decode(answer.payload))
            except FabricError as error:
                logger.info("%s cannot be reached: %s", self.address, error)
                self._undeliverable(self.address, record)
            except Exception:
                logger.exception("%s: a reply could not be taken", self.address)  # the next records go all the same
            except asyncio.CancelledError:
                asyncio.get_running_loop().call_soon(self._undeliverable, self.address, record)
                raise
            finally:
                self.untaken -= 1
                self._queue.task_done()

    def stop(self) -> None:
        """End the connection; what was queued or on its way is told as undeliverable, after this returns."""
        loop = asyncio.get_running_loop()
        self._stopped = True
        self._worker.cancel()
        while not self._queue.empty():
            loop.call_soon(self._undeliverable, self.address, self._queue.get_nowait())
            self.untaken -= 1
            self._queue.task_done()
        client, self._client = self._client, None
        if client is not None:
            task = loop.create_task(client.close())
            _closing.add(task)
            task.add_done_callback(_closing.discard)


_closing: set[asyncio.Task[None]] = set()
"""Connections being closed: the loop keeps only weak references to tasks."""
