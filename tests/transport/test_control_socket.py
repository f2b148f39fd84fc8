"""Laws of the control socket: who is served, what is refused, and that nothing waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfabric.fabric.kinds import SpecError
from kvfabric.transport import control_socket
from kvfabric.transport.challenge import ChallengeFailed
from kvfabric.transport.control_client import (
    Answer,
    AsyncClient,
    BlockingClient,
    ConnectionLost,
    RequestFailed,
    RequestTimedOut,
)
from kvfabric.transport.control_socket import ConnectionInfo, ControlServer, Reply, serve_tcp, serve_unix
from kvfabric.transport.frames import HEADER, Frame, FrameDecoder, FrameStatus, encode

SECRET = b"0123456789abcdef"


class Service:
    """A server of its own thread: verbs are the first bytes of a request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.gate = asyncio.Event()
        self.seen: list[ConnectionInfo] = []
        self.gone: list[ConnectionInfo] = []
        self.closings = threading.Semaphore(0)
        self.serving = 0
        self.serving_most = 0
        self.servers: list[ControlServer] = []
        self.descriptor = os.memfd_create("passed")
        os.write(self.descriptor, b"content")

    def call(self, awaitable: Awaitable[object]) -> object:
        async def run() -> object:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def serve(self, where: str | int, **settings: Any) -> ControlServer:
        if isinstance(where, int):
            starting = serve_tcp("127.0.0.1", where, SECRET, self.handle, closed=self.closed, **settings)
        else:
            starting = serve_unix(where, self.handle, closed=self.closed, **settings)
        server = self.call(starting)
        assert isinstance(server, ControlServer)
        self.servers.append(server)
        return server

    def handle(self, who: ConnectionInfo, frame: bytes) -> Reply | Awaitable[Reply]:
        self.seen.append(who)
        if frame.startswith(b"wait"):
            return self.wait(frame)
        if frame == b"fd":
            return b"here", [self.descriptor]
        if frame == b"bug":
            raise ZeroDivisionError
        if frame == b"late bug":
            return self.bug()
        if frame.startswith(b"size"):
            return bytes(int(frame[4:]))
        return b"echo " + frame

    async def wait(self, frame: bytes) -> Reply:
        self.serving += 1
        self.serving_most = max(self.serving_most, self.serving)
        await self.gate.wait()
        self.serving -= 1
        return frame

    async def bug(self) -> Reply:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    def closed(self, who: ConnectionInfo) -> None:
        self.gone.append(who)
        self.closings.release()

    def open_gate(self) -> None:
        self.loop.call_soon_threadsafe(self.gate.set)

    def stop(self) -> None:
        for server in self.servers:
            self.call(server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        os.close(self.descriptor)


LOOPS = [name for name in ("asyncio", "uvloop") if importlib.util.find_spec(name) is not None]
"""Ray's actors run on uvloop wherever it is installed, which vLLM brings along."""


@pytest.fixture(params=LOOPS)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    service = Service(importlib.import_module(request.param).new_event_loop())
    yield service
    service.stop()


@pytest.fixture(params=["path", "abstract", "tcp"])
def endpoint(request: pytest.FixtureRequest, service: Service, tmp_path: Path) -> str:
    where = {"path": str(tmp_path / "run" / "s.sock"), "abstract": f"@kvf-test-{os.getpid()}-{id(service)}", "tcp": 0}
    return service.serve(where[request.param]).endpoint  # type: ignore[arg-type]


@pytest.fixture
def unix(service: Service, tmp_path: Path) -> str:
    return service.serve(str(tmp_path / "run" / "s.sock")).endpoint


def dial(endpoint: str, **settings: float) -> BlockingClient:
    return BlockingClient.connect(endpoint, secret=SECRET, **settings)  # type: ignore[arg-type]


def raw(endpoint: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(endpoint.removeprefix("unix:"))
    return sock


def test_a_request_is_answered(endpoint: str) -> None:
    with dial(endpoint) as client:
        assert client.request(b"x" * 100, 5) == Answer(b"echo " + b"x" * 100, ())
        assert client.request(b"", 5).payload == b"echo "
        big = b"y" * 3_000_000
        assert client.request(big, 5).payload == b"echo " + big


def test_who_connects_while_others_wait_to_be_accepted_waits_as_well(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as crowded:
        crowded.bind(str(tmp_path / "crowded"))
        crowded.listen(0)
        waiting = raw(f"unix:{tmp_path}/crowded")
        began = time.monotonic()
        with pytest.raises(ConnectionLost):
            dial(f"unix:{tmp_path}/crowded", timeout_s=0.3)
        assert time.monotonic() - began >= 0.3

        def accept() -> None:
            crowded.accept()[0].close()

        timer = threading.Timer(0.2, accept)
        timer.start()
        dial(f"unix:{tmp_path}/crowded").close()
        timer.join()
        waiting.close()


def test_many_threads_may_look_whether_the_server_is_there(service: Service, unix: str) -> None:
    with contextlib.closing(dial(unix)) as client:
        wrong: list[BaseException] = []

        def look() -> None:
            try:
                assert all(client.alive for _ in range(4_000))
            except BaseException as error:  # noqa: BLE001 - told by the thread that looks for it
                wrong.append(error)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_an_async_client_pipelines_and_replies_may_overtake(service: Service, endpoint: str) -> None:
    async def main() -> list[bytes]:
        order: list[bytes] = []
        async with await AsyncClient.connect(endpoint, secret=SECRET) as client:

            async def ask(text: bytes) -> None:
                order.append((await client.request(text, 5)).payload)

            slow = [asyncio.create_task(ask(b"wait %d" % i)) for i in range(20)]
            await asyncio.sleep(0)
            await asyncio.gather(*(ask(b"%d" % i) for i in range(20)))
            service.open_gate()
            await asyncio.gather(*slow)
        return order

    order = asyncio.run(main())
    assert [text[:4] for text in order] == [b"echo"] * 20 + [b"wait"] * 20
    assert len(set(order)) == 40


def test_a_blocking_client_pipelines_in_the_order_asked(service: Service, endpoint: str) -> None:
    with dial(endpoint) as client:
        service.open_gate()
        answers = client.request_many([b"wait 1", b"2", b"wait 3", b"4"], 5)
    assert [answer.payload for answer in answers] == [b"wait 1", b"echo 2", b"wait 3", b"echo 4"]


def test_what_is_told_is_taken_before_what_is_asked_next(service: Service, endpoint: str) -> None:
    with dial(endpoint) as client:
        for _ in range(3):
            client.tell(b"told", 5)
        assert client.request(b"asked", 5).payload == b"echo asked"
        assert len(service.seen) == 4
        client.tell(b"bug", 5)  # its failure is the server's to log
        assert client.request(b"after", 5).payload == b"echo after"


def test_what_is_told_gets_no_reply(service: Service, unix: str) -> None:
    sock = raw(unix)
    sock.sendall(encode(1, FrameStatus.TOLD, b"told") + encode(2, FrameStatus.TOLD, b"bug"))
    sock.sendall(encode(3, FrameStatus.REQUEST, b"asked"))
    with sock:
        (frame,) = FrameDecoder().feed(sock.recv(4096))
    assert (frame.request_id, frame.payload) == (3, b"echo asked")
    assert len(service.seen) == 3


def test_what_was_told_is_taken_though_the_client_closes_at_once(service: Service, unix: str) -> None:
    client = dial(unix)
    for _ in range(20):
        client.tell(b"told", 5)
    client.close()
    assert service.closings.acquire(timeout=5)
    assert len(service.seen) == 20
    with pytest.raises(ConnectionLost):
        client.tell(b"late", 5)


def test_telling_a_server_that_ended_says_so(service: Service, unix: str) -> None:
    with dial(unix) as client:
        client.tell(b"told", 5)
        service.call(service.servers[-1].close())
        until = time.monotonic() + 5
        while client.alive and time.monotonic() < until:
            time.sleep(0.001)
        with pytest.raises(ConnectionLost):
            client.tell(b"told", 5)


def test_requests_beyond_the_bound_wait_unread(service: Service, unix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "IN_FLIGHT_MAX", 8)
    with dial(unix) as client:
        asking = threading.Thread(target=client.request_many, args=([b"wait %d" % i for i in range(100)], 10))
        asking.start()
        deadline = time.monotonic() + 5
        while service.serving < 8 and time.monotonic() < deadline:
            time.sleep(0.001)
        with dial(unix) as other:  # the bound is one connection's
            assert other.request(b"x", 5).payload == b"echo x"
        service.open_gate()
        asking.join(10)
        assert not asking.is_alive()
    assert service.serving_most == 8


def test_descriptors_pass_with_their_reply_only(service: Service, unix: str) -> None:
    service.open_gate()
    with dial(unix) as client:
        answers = client.request_many([b"size200000", b"fd", b"1", b"fd", b"wait", b"fd"], 5)
        passed = [answer.descriptors for answer in answers]
        assert [len(descriptors) for descriptors in passed] == [0, 1, 0, 1, 0, 1]
        for descriptors in passed:
            for descriptor in descriptors:
                assert os.pread(descriptor, 7, 0) == b"content"
                assert not os.get_inheritable(descriptor)
                os.close(descriptor)


def test_descriptors_wait_behind_what_the_client_has_not_read(service: Service, unix: str) -> None:
    sock = raw(unix)
    sock.sendall(b"".join(encode(i, FrameStatus.REQUEST, b"size900000" if i == 1 else b"fd") for i in (1, 2, 3)))
    time.sleep(0.2)  # the first reply does not fit the socket's buffer, so the others queue
    decoder = FrameDecoder()
    frames: list[Frame] = []
    descriptors: list[int] = []
    while len(frames) < 3:
        data, passed, _, _ = socket.recv_fds(sock, 65536, 16)
        descriptors += passed
        frames += decoder.feed(data)
    assert [(frame.request_id, frame.descriptors) for frame in frames] == [(1, 0), (2, 1), (3, 1)]
    assert [os.pread(descriptor, 7, 0) for descriptor in descriptors] == [b"content"] * 2
    for descriptor in descriptors:
        os.close(descriptor)
    sock.close()


def test_an_async_client_receives_descriptors(service: Service, unix: str) -> None:
    async def main() -> bytes:
        async with await AsyncClient.connect(unix) as client:
            answer = await client.request(b"fd", 5)
            content = os.pread(answer.descriptors[0], 7, 0)
            os.close(answer.descriptors[0])
            return content

    assert asyncio.run(main()) == b"content"


def test_descriptors_over_tcp_are_a_failed_request(service: Service) -> None:
    with dial(service.serve(0).endpoint) as client:
        with pytest.raises(RequestFailed):
            client.request(b"fd", 5)
        assert client.request(b"x", 5).payload == b"echo x"


@pytest.mark.parametrize("verb", [b"bug", b"late bug", b"size20000000"])
def test_a_failing_request_fails_alone(endpoint: str, verb: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with dial(endpoint) as client, caplog.at_level(logging.CRITICAL):
        with pytest.raises(RequestFailed, match="log"):
            client.request(verb, 5)
        assert client.request(b"x", 5).payload == b"echo x"


def test_a_failed_request_among_others_keeps_no_descriptor_of_theirs(
    service: Service, unix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with dial(unix) as client, caplog.at_level(logging.CRITICAL):
        kept = client.request(b"fd", 5).descriptors
        assert wait_for_copies(2)  # the service's own and this one
        with pytest.raises(RequestFailed):
            client.request_many([b"fd", b"bug", b"fd"], 5)
        assert wait_for_copies(2)
        os.close(kept[0])
        assert client.request(b"x", 5).payload == b"echo x"


FORKS = """
import os, sys
from kvfabric.transport.control_client import BlockingClient, ConnectionLost
client = BlockingClient.connect(sys.argv[1])
child = os.fork()
wrong = [] if client.alive is bool(child) else ["alive"]
for _ in range(200):
    try:
        wrong += [got] if (got := client.request(b"%d" % child, 5).payload) != b"echo %d" % child else []
        wrong += [] if child else ["answered"]
    except ConnectionLost:
        wrong += ["lost"] if child else []
if not child:
    with BlockingClient.connect(sys.argv[1]) as own:
        wrong += [] if own.request(b"own", 5).payload == b"echo own" else ["own"]
    os._exit(len(wrong))
sys.exit(len(wrong) or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_connection_is_not_shared_with_a_child_that_is_forked(unix: str) -> None:
    subprocess.run([sys.executable, "-c", FORKS, unix], check=True, timeout=30)


def test_a_request_that_times_out_leaves_the_connection_usable(service: Service, endpoint: str) -> None:
    with dial(endpoint) as client:
        began = time.monotonic()
        with pytest.raises(RequestTimedOut):
            client.request(b"wait", 0.05)
        assert time.monotonic() - began < 2
        service.open_gate()
        assert [client.request(b"%d" % i, 5).payload for i in range(3)] == [b"echo 0", b"echo 1", b"echo 2"]


def test_an_async_request_that_times_out_leaves_the_connection_usable(service: Service, endpoint: str) -> None:
    async def main() -> None:
        async with await AsyncClient.connect(endpoint, secret=SECRET) as client:
            with pytest.raises(RequestTimedOut):
                await client.request(b"wait", 0.05)
            service.open_gate()
            assert (await client.request(b"x", 5)).payload == b"echo x"

    asyncio.run(main())


def test_the_late_descriptor_of_a_timed_out_request_is_closed(service: Service, unix: str) -> None:
    with dial(unix) as client:
        client.request(b"x", 5)
        stopped = threading.Event()

        def stop_for_a_while() -> None:
            stopped.set()
            time.sleep(0.2)

        service.loop.call_soon_threadsafe(stop_for_a_while)
        stopped.wait()
        with pytest.raises(RequestTimedOut):
            client.request(b"fd", 0.05)
        client.request(b"x", 5)
        assert wait_for_copies(1)


def test_an_oversize_request_is_refused_on_both_sides(service: Service, tmp_path: Path) -> None:
    endpoint = service.serve(str(tmp_path / "run" / "small.sock"), frame_bytes_max=1000).endpoint
    with dial(endpoint, frame_bytes_max=1000) as client:
        with pytest.raises(SpecError, match="1001 bytes"):
            client.request(b"x" * 1001, 5)
        assert client.request(b"x" * 900, 5).payload == b"echo " + b"x" * 900
    with dial(endpoint) as client, pytest.raises(ConnectionLost):
        client.request(b"x" * 1001, 5)


def wait_for_copies(count: int) -> bool:
    """Whether this process soon has so many descriptors of the file that services pass: senders close theirs later."""

    def copies() -> int:
        links = []
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                links.append(str(path.readlink()))
        return sum("memfd:passed" in link for link in links)

    deadline = time.monotonic() + 5
    while copies() != count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(65536) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 64, HEADER.pack(0, 1, 1, 0), HEADER.pack(0, 1, 0, 3)],
    ids=["http", "ones", "reply", "descriptors"],
)
def test_garbage_costs_one_refused_connection(service: Service, unix: str, garbage: bytes) -> None:
    with dial(unix) as client:
        stranger = raw(unix)
        stranger.sendall(garbage)
        assert ended(stranger)
        stranger.close()
        assert client.request(b"x", 5).payload == b"echo x"
    assert service.servers[0].counters.refused == 1
    assert all(who.connection_id == service.seen[0].connection_id for who in service.seen)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: somewhere.example\r\nUser-Agent: curl\r\n\r\n", b"\0" * 64])
def test_a_stranger_over_tcp_gets_no_request_read(service: Service, data: bytes) -> None:
    server = service.serve(0)
    _, host, port = server.endpoint.split(":")
    stranger = socket.create_connection((host, int(port)), 5)
    assert len(stranger.recv(100)) == 40
    stranger.sendall(data + encode(1, FrameStatus.REQUEST, b"x"))
    assert ended(stranger)
    stranger.close()
    assert service.seen == []
    assert server.counters.refused == 1
    with dial(server.endpoint) as client:
        assert client.request(b"x", 5).payload == b"echo x"


def test_a_client_with_another_secret_is_told_so(service: Service) -> None:
    endpoint = service.serve(0).endpoint
    with pytest.raises(ChallengeFailed, match="another secret"):
        BlockingClient.connect(endpoint, secret=b"x" * 16)
    with pytest.raises(SpecError, match="secret"):
        BlockingClient.connect(endpoint)
    assert service.seen == []


def test_a_client_refuses_a_tcp_server_without_the_secret() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        sock, _ = listener.accept()
        sock.sendall(b"KVFABRC1" + bytes(32))
        sock.recv(64)
        sock.sendall(bytes(32))
        sock.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(ChallengeFailed, match="server does not know"):
        BlockingClient.connect(f"tcp:127.0.0.1:{listener.getsockname()[1]}", secret=SECRET)
    thread.join()
    listener.close()


def test_silence_over_tcp_is_not_awaited_for_ever(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "HANDSHAKE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(control_socket, "UNPROVEN_MAX", 2)
    server = service.serve(0)
    _, host, port = server.endpoint.split(":")
    silent = [socket.create_connection((host, int(port)), 5) for _ in range(4)]
    for sock in silent:
        sock.settimeout(5)
        while not ended(sock):
            pass
        sock.close()
    assert server.counters.refused == 4
    with dial(server.endpoint) as client:
        assert client.request(b"x", 5).payload == b"echo x"


def test_unfinished_frames_of_all_clients_together_are_bounded(
    service: Service, unix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "KEPT_BYTES_MAX", 1_500_000)
    half = HEADER.pack(700_000, 1, FrameStatus.REQUEST, 0) + bytes(600_000)
    with dial(unix) as client, contextlib.ExitStack() as stack:
        vandals = [stack.enter_context(raw(unix)) for _ in range(3)]
        for vandal in vandals[:2]:
            vandal.sendall(half)
        assert client.request(b"x" * 200_000, 5).payload == b"echo " + b"x" * 200_000
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            vandals[2].sendall(half)
            assert vandals[2].recv(1) == b""
        assert client.request(b"x", 5).payload == b"echo x"
        vandals[0].sendall(bytes(100_000))
        assert vandals[0].recv(1)  # who finishes is answered
    assert all(service.closings.acquire(timeout=5) for _ in range(4))
    assert service.servers[0].kept_bytes == 0


def test_a_client_that_never_reads_is_dropped(service: Service, unix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "UNREAD_TIMEOUT_S", 0.1)
    sock = raw(unix)
    for i in range(40):
        sock.sendall(encode(i, FrameStatus.REQUEST, b"size1000000"))
    assert service.closings.acquire(timeout=5)
    sock.close()
    with dial(unix) as client:
        assert client.request(b"x", 5).payload == b"echo x"


CLIENT = """
import sys
from kvfabric.transport.control_client import BlockingClient
client = BlockingClient.connect(sys.argv[1])
print(client.request(b"x", 5).payload.decode(), flush=True)
sys.stdin.read()
"""


def test_a_killed_client_is_noticed_by_its_connection(service: Service, unix: str) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, unix], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with client:
        assert client.stdout is not None
        assert client.stdout.readline() == "echo x\n"
        assert (service.seen[0].pid, service.seen[0].uid) == (client.pid, os.geteuid())
        assert not service.gone
        client.kill()
    assert service.closings.acquire(timeout=5)
    assert service.gone == [service.seen[0]]


def test_a_closed_client_is_noticed_and_ids_are_unique(service: Service, endpoint: str) -> None:
    client = dial(endpoint)
    client.close()
    assert service.closings.acquire(timeout=5)
    for _ in range(2):
        with dial(endpoint) as other:
            other.request(b"x", 5)
        assert service.closings.acquire(timeout=5)
    assert len({who.connection_id for who in service.gone}) == 3
    with pytest.raises(ConnectionLost, match="closed"):
        client.request(b"x", 5)


def test_the_end_of_a_server_is_told_to_waiting_requests(service: Service, endpoint: str) -> None:
    failures: list[Exception] = []

    def ask(client: BlockingClient) -> None:
        try:
            client.request(b"wait", 10)
        except ConnectionLost as error:
            failures.append(error)

    client = dial(endpoint)
    thread = threading.Thread(target=ask, args=(client,))
    thread.start()
    while not service.serving:
        time.sleep(0.001)
    service.call(service.servers[0].close())
    thread.join(5)
    assert len(failures) == 1
    assert len(service.gone) == 1
    with pytest.raises(ConnectionLost):
        dial(endpoint)
    service.open_gate()


def test_an_async_client_tells_the_end_of_its_server(service: Service, endpoint: str) -> None:
    async def main() -> None:
        client = await AsyncClient.connect(endpoint, secret=SECRET)
        asking = asyncio.create_task(client.request(b"wait", 10))
        while not service.serving:  # noqa: ASYNC110 - the server lives in another thread
            await asyncio.sleep(0.001)
        await asyncio.to_thread(service.call, service.servers[0].close())
        with pytest.raises(ConnectionLost):
            await asking
        assert not client.connected
        with pytest.raises(ConnectionLost):
            await client.request(b"x", 1)

    asyncio.run(main())
    service.open_gate()


def test_a_closed_server_leaves_no_socket_file_and_a_dead_ones_is_replaced(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "run" / "s.sock"
    server = service.serve(str(path))
    assert path.is_socket()
    with pytest.raises(OSError, match="in use"):
        service.serve(str(path))
    service.call(server.close())
    assert not path.exists()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    assert path.is_socket()
    endpoint = service.serve(str(path)).endpoint
    with dial(endpoint) as client:
        assert client.request(b"x", 5).payload == b"echo x"


def test_a_directory_that_others_may_enter_is_refused(service: Service, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with pytest.raises(SpecError, match="0700"):
        service.serve(str(shared / "s.sock"))
    shared.chmod(0o700)
    service.serve(str(shared / "s.sock"))


FOREIGNER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + sys.argv[1][6:])
sock.settimeout(5)
try:
    sock.sendall(bytes.fromhex(sys.argv[2]))
    got = sock.recv(100)
except ConnectionError:
    got = b""
print(len(got))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_refused(service: Service) -> None:
    endpoint = service.serve(f"@kvf-foreign-{os.getpid()}").endpoint
    request = encode(1, FrameStatus.REQUEST, b"x").hex()
    ours = [sys.executable, "-c", FOREIGNER.replace("65534", "0"), endpoint, request]
    theirs = [sys.executable, "-c", FOREIGNER, endpoint, request]
    assert subprocess.run(ours, capture_output=True, text=True, check=True).stdout.strip() != "0"
    assert len(service.seen) == 1
    assert subprocess.run(theirs, capture_output=True, text=True, check=True).stdout.strip() == "0"
    assert len(service.seen) == 1


def test_a_transport_of_another_kind_of_loop_is_served(service: Service, tmp_path: Path) -> None:
    """uvloop's are no subclass of asyncio's; this one is none either."""

    class Foreign:
        def __init__(self, transport: asyncio.Transport) -> None:
            self._transport = transport

        def __getattr__(self, name: str) -> object:
            return getattr(self._transport, name)

    class Wrapping(asyncio.BufferedProtocol):
        def __init__(self, inner: asyncio.BufferedProtocol) -> None:
            self.inner = inner

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.inner.connection_made(Foreign(transport))  # type: ignore[arg-type]

        def get_buffer(self, sizehint: int) -> memoryview:
            return self.inner.get_buffer(sizehint)  # type: ignore[return-value] # any buffer, say the stubs

        def buffer_updated(self, nbytes: int) -> None:
            self.inner.buffer_updated(nbytes)

        def connection_lost(self, exc: Exception | None) -> None:
            self.inner.connection_lost(exc)

    server = service.serve(str(tmp_path / "s.sock"))
    path = str(tmp_path / "foreign.sock")
    served = service.call(service.loop.create_unix_server(lambda: Wrapping(control_socket._Connection(server)), path))
    with dial(f"unix:{path}") as client:
        assert client.request(b"x", 5).payload == b"echo x"
    service.loop.call_soon_threadsafe(served.close)  # type: ignore[attr-defined]
