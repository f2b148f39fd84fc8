"""Laws of the plain TCP link's server: only peers that know the secret are served, and nothing unbounded is asked of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvfabric.fabric.arena import ArenaLayout, PoolLayout, heap_arena
from kvfabric.fabric.kinds import SpecError
from kvfabric.transport.block_server import ITEMS_MAX, REQUEST, Answer, Verb, receive_bytes
from kvfabric.transport.control_client import connect_blocking
from kvfabric.transport.endpoints import Endpoint
from kvfabric.transport.link import LinkError, LinkFailure, Pair
from kvfabric.transport.tcp_link import TcpLink

LAYOUT = ArenaLayout([PoolLayout(0, 0, 8, 3 << 20)])
SECRET = b"0123456789abcdef"
Open = Callable[..., TcpLink]


@pytest.fixture
def links() -> Iterator[Open]:
    made: list[TcpLink] = []

    def start(holder: str, secret: bytes = SECRET) -> TcpLink:
        arena = heap_arena(LAYOUT, 1)
        for slot in range(LAYOUT.slots):
            arena.payload(slot)[:] = slot + 1
        link = TcpLink.start(arena, holder=holder, incarnation=1, host="127.0.0.1", secret=secret)
        assert isinstance(link, TcpLink)
        made.append(link)
        return link

    yield start
    for link in made:
        link.close()


def dial(link: TcpLink) -> socket.socket:
    """A proven connection, past the server's hello."""
    sock = connect_blocking(Endpoint(host="127.0.0.1", port=link._server.port), SECRET, 5)
    assert receive_bytes(sock, 12) is not None
    return sock


def reads_until_closed(sock: socket.socket) -> bytes:
    got = b""
    while True:
        try:
            data = sock.recv(65536)
        except ConnectionResetError:
            return got
        if not data:
            return got
        got += data


def items(*pairs: tuple[int, int]) -> bytes:
    return np.array(pairs, dtype="<u4").tobytes()


def test_a_peer_with_another_secret_is_refused(links: Open) -> None:
    source, stranger, reader = links("a"), links("b", b"x" * 16), links("c")
    results = stranger.fetch(source.region(), [Pair(0, 0, 100)], 5)
    assert results[0].failure is LinkFailure.REFUSED
    assert not reader.fetch(source.region(), [Pair(3, 0, 100)], 5)[0].failure
    assert reader._arena.payload(0)[:100].tolist() == [4] * 100
    with pytest.raises(SpecError, match="secret"):
        TcpLink.start(heap_arena(LAYOUT, 1), holder="x", incarnation=1, host="127.0.0.1", secret=b"short")


def test_a_strangers_bytes_cost_one_connection(links: Open) -> None:
    source, reader = links("a"), links("b")
    sock = socket.create_connection(("127.0.0.1", source._server.port), 5)
    sock.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n" * 4)
    assert len(reads_until_closed(sock)) <= 40  # the challenge, and not a byte of the arena
    sock.close()
    assert not reader.fetch(source.region(), [Pair(0, 0, 100)], 5)[0].failure


@pytest.mark.parametrize(
    "request_bytes",
    [
        REQUEST.pack(Verb.SLOTS, ITEMS_MAX + 1),
        REQUEST.pack(9, 0),
        REQUEST.pack(Verb.SLOTS, 1) + items((8, 1)),
        REQUEST.pack(Verb.SLOTS, 1) + items((0, (3 << 20) + 1)),
        REQUEST.pack(Verb.SLOTS, 100) + items(*[(0, 3 << 20)] * 100),
        REQUEST.pack(Verb.HEADERS, 1) + items((8, 0)),
    ],
    ids=["items", "verb", "slot", "length", "bytes", "header"],
)
def test_a_request_beyond_its_bounds_is_refused(links: Open, request_bytes: bytes) -> None:
    source = links("a")
    sock = dial(source)
    sock.sendall(REQUEST.pack(Verb.SLOTS, 1) + items((0, 5)))
    assert receive_bytes(sock, 6) == bytes([Answer.GRANTED]) + b"\x01" * 5
    sock.sendall(request_bytes)
    assert reads_until_closed(sock) in {bytes([Answer.REFUSED]), b""}
    sock.close()
    assert source._server.refused == 1


def test_a_peer_that_is_not_there_is_lost_at_once(links: Open) -> None:
    source, reader = links("a"), links("b")
    region = source.region()
    assert reader.connect(region, 5) is None
    source.close()
    began = time.monotonic()
    error = reader.connect(region, 5)
    assert isinstance(error, LinkError)
    assert error.failure is LinkFailure.PEER_LOST
    assert reader.fetch(region, [Pair(0, 0, 100)], 5)[0].failure is LinkFailure.PEER_LOST
    assert time.monotonic() - began < 2


def test_a_listener_that_never_answers_is_a_time_out(links: Open) -> None:
    import dataclasses

    reader = links("b")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = {"host": "127.0.0.1", "port": mute.getsockname()[1]}
        region = dataclasses.replace(links("a").region(), address=address)
        began = time.monotonic()
        result = reader.fetch(region, [Pair(0, 0, 100)], 0.2)[0]
        assert result.failure is LinkFailure.TIMED_OUT
        assert time.monotonic() - began < 2


def test_an_address_that_cannot_be_bound_is_a_reason() -> None:
    error = TcpLink.start(heap_arena(LAYOUT, 1), holder="x", incarnation=1, host="192.0.2.1", secret=SECRET)
    assert isinstance(error, LinkError)
    assert error.failure is LinkFailure.UNAVAILABLE
    assert "192.0.2.1" in error.detail
