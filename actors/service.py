"""What every process of a fabric has in common: its sockets, its clients, the mesh, its handle.

A request comes over the Unix socket, over TCP, or through the Ray actor handle; all three run the
same code and take and return bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable
from typing import Any

from ..fabric import wire
from ..fabric.kinds import FabricError, WireError
from ..fabric.messages import CLIENT_RECORDS, Envelope, Member, Members, Misuse, StatusReply, StatusRequest
from ..transport.control_socket import ConnectionInfo, ControlServer, Reply, serve_tcp, serve_unix
from ..transport.link import host_identity
from .mesh import Mesh

logger = logging.getLogger(__name__)

HANDLE_TIMEOUT_S = 120.0


def _name_of(record: Any) -> str:
    """The name by which a reply finds its request."""
    return str(getattr(record, "request", None) or getattr(record, "op", ""))


class Service:
    """A process around a core. Subclasses feed the core and carry out its effects."""

    def __init__(self, *, fabric: str, address: str, incarnation: int, node: str, host: str, secret: bytes) -> None:
        self.fabric = fabric
        self.address = address
        self.incarnation = incarnation
        self.node = node
        self.host = host
        self._secret = secret
        self.mesh = Mesh(address, secret, self._undeliverable)
        self._servers: list[ControlServer] = []
        self._waiting: dict[tuple[str, str], asyncio.Future[Any]] = {}
        self._handle_calls = itertools.count(1)

    # --- for subclasses ------------------------------------------------------------------------

    def received(self, sender: str, record: Any) -> None:
        """A record for the core."""
        raise AssertionError(f"{type(self).__name__} does not take {type(record).__name__} from {sender}")

    def undelivered(self, to: str, record: Any) -> None:
        """The core's record could not be delivered."""

    def client_closed(self, client: str) -> None:
        """A client's connection ended."""

    def status(self) -> str:
        """The status as one JSON object."""
        return "{}"

    def own_request(self, client: str, record: Any) -> Reply | None:
        """Answer a request that is this process's and not the core's; None if it is the core's."""
        if isinstance(record, StatusRequest):
            return wire.encode(StatusReply(record.request, self.status()))
        return None

    # --- life ----------------------------------------------------------------------------------

    async def listen(self, shards: tuple[int, ...] = ()) -> Member:
        """Open the sockets and say where they are."""
        name = f"@kvfabric/{self.fabric}/{self.address}/{self.incarnation}/{self.node[:12]}"
        unix = await serve_unix(name, self._serve, closed=self._closed)
        host = self.host or socket.gethostbyname(socket.gethostname())
        tcp = await serve_tcp(host, 0, self._secret, self._serve, closed=self._closed)
        self._servers = [unix, tcp]
        return Member(self.address, self.incarnation, self.node, host_identity(), unix.endpoint, tcp.endpoint, shards)

    async def close(self) -> None:
        """Stop listening and let every connection go."""
        await self.mesh.close()
        for server in self._servers:
            await server.close()
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()

    # --- requests ------------------------------------------------------------------------------

    def _closed(self, conn: ConnectionInfo) -> None:
        client = f"client:{conn.connection_id}"
        for key in [key for key in self._waiting if key[0] == client]:
            self._waiting.pop(key).cancel()
        self.client_closed(client)

    def _serve(self, conn: ConnectionInfo, frame: bytes) -> Reply | Awaitable[Reply]:
        return self._take(f"client:{conn.connection_id}", frame)

    def _take(self, client: str, frame: bytes) -> Reply | Awaitable[Reply]:
        try:
            record = wire.decode(frame)
            if isinstance(record, Envelope):
                self._from_peer(record)
                return b""
        except WireError as error:
            return wire.encode(Misuse("", str(error)))
        try:
            own = self.own_request(client, record)
        except FabricError as error:
            return wire.encode(Misuse(getattr(record, "request", ""), str(error)))
        if own is not None:
            return own
        if type(record) not in CLIENT_RECORDS:
            return wire.encode(Misuse("", f"{type(record).__name__} is not a client's request"))
        name = _name_of(record)
        key = (client, name)
        future = self._waiting.get(key)
        if future is None:
            future = self._waiting[key] = asyncio.get_running_loop().create_future()
        self.received(client, record)
        if future.done():
            self._waiting.pop(key, None)
            return wire.encode(future.result())
        return self._reply(future)

    async def _reply(self, future: asyncio.Future[Any]) -> bytes:
        return wire.encode(await asyncio.shield(future))

    def _from_peer(self, envelope: Envelope) -> None:
        record = wire.decode(envelope.record)
        if isinstance(record, Members):
            self.mesh.update(record)
        else:
            self.received(envelope.sender, record)

    def _undeliverable(self, to: str, record: Any) -> None:
        self.undelivered(to, record)

    def deliver(self, to: str, record: Any) -> None:
        """Carry out a core's Send: to a waiting client, or to a peer over the mesh."""
        if not to.startswith("client:"):
            self.mesh.send(to, record)
            return
        name = _name_of(record)
        future = self._waiting.pop((to, name), None)
        if future is not None and not future.done():
            future.set_result(record)

    async def request(self, frame: bytes) -> bytes:
        """One wire record in, its reply out: the Ray actor handle's way in.

        Raises FabricError if no reply comes within two minutes.
        """
        client = f"client:handle{next(self._handle_calls)}"
        taken = self._take(client, frame)
        if not isinstance(taken, bytes | tuple):
            try:
                taken = await asyncio.wait_for(taken, HANDLE_TIMEOUT_S)
            except TimeoutError:
                raise FabricError(f"{self.address}: no reply within {HANDLE_TIMEOUT_S:.0f} s") from None
        return taken if isinstance(taken, bytes) else taken[0]
