"""The plain TCP link's serving side: sends slots and slot headers of an arena to peers that know the secret.

::

    both prove the secret (challenge.py), then the server says whose arena this is: u64 incarnation, u32 slots
    request   u8 verb, u32 count, count x (u32 slot, u32 length in bytes)
    reply     u8 answer, then for SLOTS the bytes in the order asked, for HEADERS 64 bytes a slot

all little endian. Slots go from the arena to the socket without a copy in between. One thread a connection; the
number of connections, of items and of bytes a request are bounded, and a client that stops reading is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from enum import IntEnum

import numpy as np

from ..fabric.arena import Arena
from .budget import Budget
from .challenge import ANSWER_BYTES, HANDSHAKE_TIMEOUT_S, ChallengeFailed, ServerChallenge, check_secret
from .endpoints import tune_tcp

logger = logging.getLogger(__name__)

HELLO = struct.Struct("<QI")
REQUEST = struct.Struct("<BI")
ITEM = np.dtype([("slot", "<u4"), ("length", "<u4")])
ITEMS_MAX = 1024
"""Slots a request names. Requests ahead of their replies must fit the socket's buffers, or both sides wait to send."""
REQUEST_BYTES_MAX = 1 << 28
CONNECTIONS_MAX = 256

_SEND_TIMEOUT_S = 10.0
_ACCEPT_RETRY_S = 0.1
_VECTORS_MAX = 512


class Verb(IntEnum):
    """What a request asks for."""

    SLOTS = 1
    HEADERS = 2


class Answer(IntEnum):
    """How a reply begins."""

    GRANTED = 0
    REFUSED = 1


class BlockServer:
    """Serves ``arena`` on ``host`` and ``port`` (0: a free one) until closed. Raises OSError, SpecError.

    ``bytes_per_s``: what all its connections may send together, so that transfers leave room on the wire; None: no limit.
    """

    def __init__(
        self, arena: Arena, incarnation: int, host: str, port: int, secret: bytes, *, bytes_per_s: float | None = None
    ) -> None:
        self._arena = arena
        self._incarnation = incarnation
        self._secret = check_secret(secret)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        self._budget = Budget(bytes_per_s)
        self._ended = threading.Event()
        self.refused = 0
        self._thread = threading.Thread(target=self._accept, name="kvfabric-block-server", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                # Out of descriptors, for one: peers time out meanwhile, and are served again afterwards.
                logger.warning("%s: no connection accepted: %s", threading.current_thread().name, error)
                time.sleep(_ACCEPT_RETRY_S)
                continue
            with self._lock:
                if self._closing or len(self._connections) >= CONNECTIONS_MAX:
                    sock.close()
                    self.refused += 1
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(sock, f"{peer[0]}:{peer[1]}"), name="kvfabric-block-sender", daemon=True
                )
                self._connections[sock] = thread
                thread.start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            self._greet(sock)
            while self._answer_one(sock):
                pass
        except ChallengeFailed as error:
            self.refused += 1
            logger.info("block server: %s refused: %s", peer, error)
        except OSError as error:
            logger.debug("block server: the connection of %s ended: %s", peer, error)
        finally:
            with self._lock:
                self._connections.pop(sock, None)
            sock.close()

    def _greet(self, sock: socket.socket) -> None:
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        tune_tcp(sock)
        challenge = ServerChallenge(self._secret)
        sock.sendall(challenge.greeting)
        answer = receive_bytes(sock, ANSWER_BYTES)
        if answer is None:
            raise ChallengeFailed("it closed the connection during the challenge")
        sock.sendall(challenge.check(answer) + HELLO.pack(self._incarnation, self._arena.layout.slots))

    def _answer_one(self, sock: socket.socket) -> bool:
        """Serve one request; False when the connection is to end."""
        sock.settimeout(None)  # idle connections are kept; a dead peer is noticed by keepalive
        head = receive_bytes(sock, REQUEST.size)
        if head is None:
            return False
        sock.settimeout(_SEND_TIMEOUT_S)
        verb, count = REQUEST.unpack(head)
        if count > ITEMS_MAX or verb not in set(Verb):
            return self._refuse(sock)
        data = receive_bytes(sock, count * ITEM.itemsize)
        if data is None:
            return False
        items = np.frombuffer(data, dtype=ITEM)
        if count and int(items["slot"].max()) >= self._arena.layout.slots:
            return self._refuse(sock)
        if verb == Verb.HEADERS:
            rows = self._arena.table[items["slot"]]
            send_vectors(sock, [memoryview(bytes([Answer.GRANTED])), rows.view(np.uint8).data])
            return True
        return self._send_slots(sock, items)

    def _send_slots(self, sock: socket.socket, items: np.ndarray[tuple[int], np.dtype[np.void]]) -> bool:
        vectors = [memoryview(bytes([Answer.GRANTED]))]
        total = 0
        for slot, length in items.tolist():
            payload = self._arena.payload(slot)
            total += length
            if length > payload.nbytes or total > REQUEST_BYTES_MAX:
                return self._refuse(sock)
            if length:
                vectors.append(payload[:length].data)
        if not self._budget.take(total, self._ended):
            return False
        send_vectors(sock, vectors)
        return True

    def _refuse(self, sock: socket.socket) -> bool:
        self.refused += 1
        sock.sendall(bytes([Answer.REFUSED]))
        return False

    def close(self) -> None:
        """Stop listening and end every connection. Idempotent."""
        with self._lock:
            self._closing = True
            self._ended.set()
            connections = list(self._connections.items())
            for sock in (self._listener, *(sock for sock, _ in connections)):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # closing alone wakes no thread
        self._thread.join()
        for _, thread in connections:
            thread.join()
        self._listener.close()


def receive_bytes(sock: socket.socket, count: int) -> bytes | None:
    """Exactly ``count`` bytes; None if the peer closed before. Raises OSError (TimeoutError)."""
    got = bytearray(count)
    return bytes(got) if receive_into(sock, memoryview(got)) else None


def receive_into(sock: socket.socket, view: memoryview, deadline: float | None = None) -> bool:
    """Fill ``view``; False if the peer closed before. Raises OSError; TimeoutError past ``deadline`` (monotonic)."""
    position = 0
    while position < len(view):
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left)
        count = sock.recv_into(view[position:])
        if count == 0:
            return False
        position += count
    return True


def send_vectors(sock: socket.socket, vectors: list[memoryview]) -> None:
    """Send buffers in order without joining them. Raises OSError (TimeoutError)."""
    index = 0
    while index < len(vectors):
        sent = sock.sendmsg(vectors[index : index + _VECTORS_MAX])
        while sent:
            head = vectors[index]
            if sent < head.nbytes:
                vectors[index] = head[sent:]
                break
            sent -= head.nbytes
            index += 1
