"""What every process of a fabric has in common: its sockets, its clients, the mesh, its handle.

A client's request comes over the Unix socket, over TCP, or through the Ray actor handle; all three
run the same code and take and return bytes. A connection whose first record proves knowledge of the
fabric's secret is a peer's: what follows on it are that peer's records, which clients cannot send.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import logging
import os
import socket
from collections.abc import Awaitable
from typing import Any

from ..fabric import wire
from ..fabric.doors import AdvanceClock, Partition, Rest, RestRequest, RunDue, is_door
from ..fabric.identity import join_vector
from ..fabric.kinds import FabricError, WireError
from ..fabric.messages import (
    Acquire,
    Answer,
    Birth,
    Done,
    Member,
    Members,
    Misuse,
    PeerHello,
    StatusReply,
    StatusRequest,
)
from ..fabric.model import ModelSpec
from ..fabric.repeats import ACQUIRES, ANSWERS, Repeats
from ..fabric.requests import CLIENT_RECORDS, other_request, refusal_of
from ..fabric.supervisor import SUPERVISOR, is_supervisor_message
from ..transport.challenge import door_secret, peer_proof
from ..transport.control_socket import ConnectionInfo, ControlServer, Reply, serve_tcp, serve_unix
from ..transport.link import host_identity
from ..transport.loop_share import LoopShare
from ..transport.vigil import LoopVigil
from .clock import MONOTONIC, Clock
from .mesh import Mesh

logger = logging.getLogger(__name__)

HANDLE_TIMEOUT_S = 120.0
ORPHAN_POLL_S = 1.0
ORPHANED = 70
"""Exit status of a process whose parent died."""
UNIX_CLIENT, TCP_CLIENT, HANDLE_CLIENT = "client:unix", "client:tcp", "client:handle"
"""What clients are called by the way they came, the connection's number behind it; all that use the handle are one."""


def _name_of(record: Any) -> str:
    """The name by which a reply finds its request."""
    return str(getattr(record, "request", None) or getattr(record, "op", ""))


async def _end_with_parent(parent: int) -> None:
    """End this process once its parent died: it would keep its memory for ever, and nobody would find it.

    A raylet that is killed does not take its actors along (Ray 2.60), and the cluster takes them for dead.
    """
    while os.getppid() == parent:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(ORPHAN_POLL_S)
    logger.warning("the process that started this one is gone: it ends too")
    os._exit(ORPHANED)


def _client_of(conn: ConnectionInfo) -> str:
    return f"{TCP_CLIENT if conn.pid is None else UNIX_CLIENT}{conn.connection_id}"


def older(reply: bytes, schema: int) -> bytes:
    """A reply as an older schema has it; where that has no words for it, a Misuse that says so."""
    if not reply:
        return reply
    record = wire.decode(reply)
    try:
        return wire.encode(record, schema)
    except WireError as error:
        return wire.encode(Misuse(_name_of(record), str(error)), schema)


def _in_schema(reply: Reply | Awaitable[Reply], schema: int) -> Reply | Awaitable[Reply]:
    if isinstance(reply, bytes):
        return older(reply, schema)
    if isinstance(reply, tuple):
        return older(reply[0], schema), reply[1]

    async def later() -> Reply:
        ready = await reply
        return older(ready, schema) if isinstance(ready, bytes) else (older(ready[0], schema), ready[1])

    return later()


class _Awaited:
    """The reply that a client's request waits for; a future only where it does not come at once."""

    __slots__ = ("_future", "asked", "record")

    def __init__(self, asked: Any) -> None:
        self.asked = asked
        self.record: Any = None
        self._future: asyncio.Future[Any] | None = None

    @property
    def future(self) -> asyncio.Future[Any]:
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        return self._future

    def set(self, record: Any) -> None:
        self.record = record
        if self._future is not None and not self._future.done():
            self._future.set_result(record)

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()


class Service:
    """A process around a core. Subclasses feed the core and carry out its effects."""

    def __init__(
        self,
        *,
        fabric: str,
        address: str,
        incarnation: int,
        node: str,
        host: str,
        secret: bytes,
        model: ModelSpec,
        clock: Clock = MONOTONIC,
        testing: bool = False,
    ) -> None:
        self.clock = clock
        self.testing = testing
        self.steps = 0
        self.fabric = fabric
        self.model = model
        self.address = address
        self.incarnation = incarnation
        self.node = node
        self.host = host
        self._secret = secret
        self.share = LoopShare()
        """Who asks this process, so that nobody's work keeps the others waiting."""
        self.vigil: LoopVigil | None = None
        """Keeps this process awake for its clients' next requests."""
        self.mesh = Mesh(address, secret, self._undeliverable)
        self._servers: list[ControlServer] = []
        self._waiting: dict[tuple[str, str], _Awaited] = {}
        self._acquires, self._answers = Repeats(ACQUIRES), Repeats(ANSWERS)
        self._peers: dict[int, str] = {}
        self._watch: asyncio.Task[None] | None = None
        self.requests_refused = 0
        self.member: Member | None = None
        """Where this process listens, once it does."""

    # --- for subclasses ------------------------------------------------------------------------

    def received(self, sender: str, record: Any) -> None:
        """A record for the core."""
        raise AssertionError(f"{type(self).__name__} does not take {type(record).__name__} from {sender}")

    def reply_to_peer(self, record: Any) -> bytes:
        """What goes back for a peer's record that the core took; mostly nothing."""
        del record
        return b""

    def told_members(self, record: Members) -> None:
        """The supervisor's list of who is up."""

    def undelivered(self, to: str, record: Any) -> None:
        """The core's record could not be delivered."""

    def client_closed(self, client: str) -> None:
        """A client's connection ended."""

    def status(self) -> str:
        """The status as one JSON object."""
        return "{}"

    def status_of(self, of: str) -> str:
        """What is asked of this process, as one JSON value; ``null`` for what it knows nothing of."""
        return "null" if of else self.status()

    def own_request(self, client: str, record: Any) -> Reply | Awaitable[Reply] | None:
        """Answer a request that is this process's and not the core's; None if it is the core's."""
        if isinstance(record, StatusRequest):
            return wire.encode(StatusReply(record.request, self.status_of(record.of)))
        if is_door(record):
            if not self.testing:
                raise FabricError(f"{type(record).__name__}: only a fabric launched with testing: true takes it")
            return wire.encode(self.through_door(record))
        return None

    # --- rehearsals ----------------------------------------------------------------------------

    def through_door(self, record: Any) -> Any:
        """The reply to a record of a rehearsal. Raises FabricError for one that means nothing here."""
        match record:
            case RestRequest():
                return self.rest(record.request)
            case AdvanceClock():
                self.clock.move(record.to_s)
            case RunDue():
                self.run_due()
            case Partition():
                self.mesh.unreachable = frozenset(record.unreachable)
            case _:
                raise FabricError(f"{type(record).__name__}: {self.address} has nothing to do it to")
        return Done(record.request, None, "")

    def rest(self, request: str) -> Rest:
        """What this process does and waits for, at this moment."""
        waiting = tuple(name for _, name in self._waiting)
        return Rest(request, self.incarnation, self.steps, self.mesh.busy, waiting, None, (), ())

    def run_due(self) -> None:
        """Wake the core for what is due."""

    # --- life ----------------------------------------------------------------------------------

    async def listen(self, shards: tuple[int, ...] = ()) -> Member:
        """Open the sockets and say where they are."""
        name = f"@kvfabric/{self.fabric}/{self.address}/{self.incarnation}/{self.node[:12]}"
        unix = await serve_unix(
            name, self._serve, closed=self._closed, share=self.share, vigil=self.vigil, asks=self._asks
        )
        host = self.host or socket.gethostbyname(socket.gethostname())
        tcp = await serve_tcp(
            host, 0, door_secret(self._secret), self._serve, closed=self._closed, share=self.share, asks=self._asks
        )
        self._servers = [unix, tcp]
        gc.freeze()  # what was imported stays: going over it again held up every request for 60 to 90 ms
        self._watch = asyncio.get_running_loop().create_task(_end_with_parent(os.getppid()))
        self.member = Member(
            self.address,
            self.incarnation,
            self.node,
            host_identity(),
            unix.endpoint,
            tcp.endpoint,
            shards,
            wire.SCHEMA,
        )
        return self.member

    async def birth(self, schema: int = wire.SCHEMA) -> bytes:
        """A Birth record as of now, for a supervisor that reads ``schema``; nothing before :meth:`start`."""
        if self.member is None:
            return b""
        told = Birth(self.member, self.clock.now(), join_vector(self.model))
        return wire.encode_plain(told, wire.spoken_with(schema))

    async def close(self) -> None:
        """Stop listening and let every connection go."""
        if self._watch is not None:
            self._watch.cancel()
        await self.mesh.close()
        for server in self._servers:
            await server.close()
        for awaited in self._waiting.values():
            awaited.cancel()
        self._waiting.clear()

    # --- requests ------------------------------------------------------------------------------

    def _asks(self, conn: ConnectionInfo) -> bool:
        """Whether whoever waits for an answer is behind a connection: peers mostly tell what was asked of them."""
        return conn.connection_id not in self._peers

    def _closed(self, conn: ConnectionInfo) -> None:
        if self._peers.pop(conn.connection_id, None) is None:
            self._client_closed(_client_of(conn))

    def _client_closed(self, client: str) -> None:
        for key in [key for key in self._waiting if key[0] == client]:
            self._waiting.pop(key).cancel()
        self.client_closed(client)

    def _serve(self, conn: ConnectionInfo, frame: bytes) -> Reply | Awaitable[Reply]:
        """Answer a frame in the schema it came in."""
        repeated = self._acquires.read(frame)
        if repeated is not None:
            return self._answer(conn, repeated)
        try:
            schema, record = wire.read(frame)
        except WireError as error:
            return self._refuse("", str(error))
        if type(record) is Acquire and schema == wire.SCHEMA:
            self._acquires.learn(frame, record)
        reply = self._answer(conn, record)
        return reply if schema == wire.SCHEMA else _in_schema(reply, schema)

    def _answer(self, conn: ConnectionInfo, record: Any) -> Reply | Awaitable[Reply]:
        peer = self._peers.get(conn.connection_id)
        if peer is not None:
            return self._from_peer(peer, record)
        if isinstance(record, PeerHello):
            return self._hello(conn, record)
        return self._take(_client_of(conn), record)

    def _take(self, client: str, record: Any) -> Reply | Awaitable[Reply]:
        """A client's request: answered here, refused, or given to the core."""
        name = _name_of(record)
        if type(record) not in CLIENT_RECORDS:
            try:
                own = self.own_request(client, record)
            except FabricError as error:
                return self._refuse(name, str(error))
            if own is not None:
                return own
        refusal = refusal_of(record, self.model)
        if refusal is not None:
            return self._refuse(name, refusal)
        key = (client, name)
        awaited = self._waiting.get(key)
        if awaited is None:
            awaited = self._waiting[key] = _Awaited(record)
        elif awaited.asked != record:
            self.requests_refused += 1
            return wire.encode(other_request(name))
        self.steps += 1
        try:
            self.received(client, record)
        except BaseException:
            self._waiting.pop(key, None)
            raise
        if awaited.record is not None:
            return self.answered(client, awaited.record)
        return self._reply(awaited.future)

    def answered(self, client: str, record: Any) -> Reply:
        """The core's reply to a request that it answered at once."""
        del client
        return self._encoded(record)

    def _encoded(self, record: Any) -> bytes:
        return self._answers.encode(record) if type(record) is Answer else wire.encode(record)

    def _refuse(self, name: str, text: str) -> bytes:
        self.requests_refused += 1
        return wire.encode(Misuse(name, text))

    async def _reply(self, future: asyncio.Future[Any]) -> bytes:
        return self._encoded(await asyncio.shield(future))

    # --- peers ---------------------------------------------------------------------------------

    def _hello(self, conn: ConnectionInfo, hello: PeerHello) -> bytes:
        proof = peer_proof(self._secret, hello.sender, self.address, self.incarnation)
        if not hmac.compare_digest(hello.proof, proof):
            return self._refuse("", "this is no peer of the fabric")
        self._peers[conn.connection_id] = hello.sender
        return wire.encode(Done("", None, ""))

    def _from_peer(self, peer: str, record: Any) -> Reply | Awaitable[Reply]:
        if peer in self.mesh.unreachable:
            raise FabricError(f"{self.address} hears nothing from {peer}")
        if is_supervisor_message(record) and peer != SUPERVISOR:
            logger.warning("%s: %s sent a %s, which only the supervisor may", self.address, peer, type(record).__name__)
            return self._refuse("", f"{type(record).__name__} is the supervisor's to send")
        if isinstance(record, Members):
            self.mesh.update(record)
            self.told_members(record)
            return b""
        own = self.own_request(peer, record)
        if own is not None:
            return own
        self.steps += 1
        self.received(peer, record)
        return self.reply_to_peer(record)

    def _undeliverable(self, to: str, record: Any) -> None:
        self.undelivered(to, record)

    def deliver(self, to: str, record: Any) -> None:
        """Carry out a core's Send: to a waiting client, or to a peer over the mesh."""
        if not to.startswith("client:"):
            self.mesh.send(to, record)
            return
        name = _name_of(record)
        awaited = self._waiting.pop((to, name), None)
        if awaited is not None:
            awaited.set(record)

    async def request(self, frame: bytes) -> bytes:
        """One wire record in, its reply out: the Ray actor handle's way in.

        Raises FabricError if no reply comes within two minutes.
        """
        try:
            schema, record = wire.read(frame)
        except WireError as error:
            return self._refuse("", str(error))
        self.share.live(HANDLE_CLIENT)
        taken = self._take(HANDLE_CLIENT, record)
        if not isinstance(taken, bytes | tuple):
            try:
                taken = await asyncio.wait_for(taken, HANDLE_TIMEOUT_S)
            except TimeoutError:
                self._waiting.pop((HANDLE_CLIENT, _name_of(record)), None)
                raise FabricError(f"{self.address}: no reply within {HANDLE_TIMEOUT_S:.0f} s") from None
        reply = taken if isinstance(taken, bytes) else taken[0]
        return reply if schema == wire.SCHEMA else older(reply, schema)
