"""The store that all nodes share, on a real S3 server: who restores from it, and what its faults cost."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import obstore
import pytest
from obstore.store import S3Store

from kvfabric.actors.spec import FabricSpec
from kvfabric.fabric.kinds import ObjectKind, Reason, SpecError, Status
from kvfabric.transport.disk.protocol import RemoteSetup
from kvfabric.transport.disk.remote import ObjectStore, StoreFault

from .lives import MODEL, Life, prompt

pytestmark = pytest.mark.faults

BUCKET = "extents"
OTHER = "b" * 40


class S3:
    """moto's S3 server in a process of its own; what it holds ends with it."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [
            sys.executable,
            "-c",
            "from moto.server import main; main()",
            "-H",
            "127.0.0.1",
            "-p",
            str(self.port),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self._answers, lambda answers: answers)
        with urlopen(Request(f"{self.endpoint}/{BUCKET}", data=b"", method="PUT"), timeout=10):
            pass

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)

    def bucket(self, prefix: str) -> S3Store:
        options: dict[str, Any] = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "client_options": {"allow_http": True},
        }
        return S3Store(BUCKET, prefix=prefix, **options)


def eventually(look: Callable[[], Any], holds: Callable[[Any], bool], timeout_s: float = 30.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not holds(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        server = S3()
        yield server
        server.stop()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def nodes(s3: S3, prefix: str, tmp_path: Path) -> Iterator[Any]:
    """Starts holders by node; each has a disk of its own and shares the store."""
    running: list[Life] = []

    def start(node: str, incarnation: int = 1, timeout_s: float = 5.0, **disk: Any) -> Life:
        remote = {
            "url": f"s3://{BUCKET}/{prefix}",
            "options": {"endpoint": s3.endpoint, "region": "us-east-1"},
            "allow_http": True,
            "check_s": 0.3,
            "timeout_s": timeout_s,
        }
        path = {"path": str(tmp_path / node[:1]), "bytes_max": 1 << 28, "free_floor_bytes": 0, "remote": remote}
        life = Life(path | disk, incarnation, node=node)
        running.append(life)
        return life

    yield start
    for life in running:
        life.close()


def store_of(life: Life) -> dict[str, Any]:
    found: dict[str, Any] = life.status()["disk"]["store"]
    return found


def healthy(life: Life) -> None:
    eventually(lambda: store_of(life)["state"], lambda state: state == "ok")


def uploaded(life: Life, extents: int) -> None:
    """Wait until so many of this holder's extents are in the store."""
    eventually(lambda: life.status()["counters"].get("extents_uploaded", 0), lambda n: n >= extents)


def on_both(nodes: Any, tokens: list[int]) -> tuple[Life, Life]:
    """A prompt on one node's disk and in the store, and a holder of another node that found it there."""
    here = nodes("a" * 40)
    healthy(here)
    here.store(tokens)
    assert here.swap_out(tokens).refused is None
    uploaded(here, 1)
    there = nodes(OTHER)
    eventually(lambda: store_of(there)["known_here"], lambda n: n == 1)
    return here, there


def test_a_holder_of_another_node_restores_from_the_store_bit_for_bit(nodes: Any) -> None:
    tokens = prompt(1)
    here, there = on_both(nodes, tokens)
    assert there.session.probe(tokens).status is Status.PENDING
    here.kill()
    answer = there.session.acquire(tokens)
    assert (answer.status, answer.tokens) == (Status.FULL_HIT, 64)
    assert there.wrong(answer, tokens) == []
    assert there.status()["disk"]["extents"] == 0
    assert there.session.acquire(prompt(2)).status is Status.MISS


def test_a_purged_chain_is_gone_from_memory_disk_and_store_and_another_is_not(
    nodes: Any, s3: S3, prefix: str, tmp_path: Path
) -> None:
    purged, kept = prompt(1), prompt(2)
    here = nodes("a" * 40)
    healthy(here)
    for number, tokens in enumerate((purged, kept), 1):
        here.store(tokens)
        assert here.swap_out(tokens).refused is None
        uploaded(here, number)
    here.session.acquire(purged).cancel()  # in memory too

    def files() -> tuple[int, int]:
        names = [meta["path"] for page in s3.bucket(prefix).list() for meta in page]
        return len(list(tmp_path.rglob("*.kvx"))), sum(name.endswith(".kvx") for name in names)

    assert files() == (2, 2)
    here.purge(purged)
    eventually(files, lambda found: found == (1, 1))
    assert here.session.acquire(purged).status is Status.MISS
    there = nodes(OTHER)
    eventually(lambda: store_of(there)["known_here"], lambda n: n == 1)
    for life in (here, there):
        assert life.session.acquire(purged).status is Status.MISS
        answer = life.session.acquire(kept)
        assert (answer.status, life.wrong(answer, kept)) == (Status.FULL_HIT, [])


def test_what_makes_room_on_the_disk_is_restored_from_the_store(nodes: Any) -> None:
    here = nodes("a" * 40, bytes_max=400_000)
    healthy(here)
    for number in range(1, 5):
        here.store(prompt(number))
        assert here.swap_out(prompt(number)).refused is None
        uploaded(here, number)
    disk = here.status()["disk"]
    assert disk["extents"] < 4
    assert disk["used_bytes"] <= 400_000
    for number in range(1, 5):
        answer = here.session.acquire(prompt(number))
        assert (answer.status, answer.tokens) == (Status.FULL_HIT, 64), number
        assert here.wrong(answer, prompt(number)) == []
        answer.cancel()


def test_a_name_is_written_once(s3: S3, prefix: str) -> None:
    setup = RemoteSetup(
        f"s3://{BUCKET}/{prefix}", (("endpoint", s3.endpoint), ("region", "us-east-1")), True, 1 << 30, 5.0, 1.0
    )
    store = ObjectStore(setup)
    store.put("name", b"first")
    store.put("name", b"second")
    assert store.range("name", 0, 100).tobytes() == b"first"
    store.delete("name")
    store.delete("name")
    with pytest.raises(FileNotFoundError):
        store.range("name", 0, 100)


@pytest.mark.long
def test_a_flipped_byte_in_the_store_cuts_the_hit_there(nodes: Any, s3: S3, prefix: str) -> None:
    tokens = prompt(1)
    _, there = on_both(nodes, tokens)
    bucket = s3.bucket(prefix)
    (entry,) = [one for chunk in obstore.list(bucket) for one in chunk]
    content = bytearray(obstore.get(bucket, entry["path"]).bytes().to_bytes())
    content[-1] ^= 0xFF  # padding: nobody's
    obstore.put(bucket, entry["path"], bytes(content))
    before = there.session.acquire(tokens)
    assert before.status is Status.FULL_HIT
    before.cancel()
    third = nodes("c" * 40)
    eventually(lambda: store_of(third)["known_here"], lambda n: n == 1)
    for at in range(len(content) // 2, len(content), 4096):
        content[at + 40] ^= 0xFF
    obstore.put(bucket, entry["path"], bytes(content))
    answer = third.session.acquire(tokens)
    assert answer.tokens < 64
    assert answer.cause is not None
    assert (answer.cause.kind, answer.cause.reason) == (ObjectKind.DISK_PREFIX, Reason.CHECKSUM_MISMATCH)
    if answer.lease is not None:
        assert third.wrong(answer, tokens) == []


@pytest.mark.long
def test_an_object_that_went_from_the_store_is_a_shorter_hit_and_is_forgotten(nodes: Any, s3: S3, prefix: str) -> None:
    tokens = prompt(1)
    _, there = on_both(nodes, tokens)
    bucket = s3.bucket(prefix)
    obstore.delete(bucket, [one["path"] for chunk in obstore.list(bucket) for one in chunk])
    answer = there.session.acquire(tokens)
    assert (answer.tokens, answer.lease) == (0, None)
    eventually(lambda: there.session.probe(tokens).status, lambda status: status is Status.MISS)


def test_a_store_that_vanishes_costs_what_only_it_has_and_is_used_again_when_it_is_back(
    nodes: Any, s3: S3, prefix: str
) -> None:
    tokens, other = prompt(1), prompt(2)
    here, there = on_both(nodes, tokens)
    s3.stop()
    try:
        answer = there.session.acquire(tokens)
        assert (answer.tokens, answer.cause and answer.cause.reason) == (0, Reason.DISK_UNAVAILABLE)
        state = eventually(lambda: store_of(there), lambda store: store["state"] == "unavailable")
        assert state["reason"] == Reason.DISK_UNAVAILABLE
        said = rf"s3://{BUCKET}/{prefix}: .*Error performing \w+ {s3.endpoint}/{BUCKET}.* error sending request"
        assert re.fullmatch(said, state["detail"]), state["detail"]  # one line: which store, and what happened there
        assert there.status()["disk"]["state"] == "ok"
        there.store(other)
        assert there.swap_out(other).refused is None
        assert there.session.acquire(other).status is Status.FULL_HIT
        assert here.session.acquire(tokens).status is Status.FULL_HIT  # from its own disk
    finally:
        s3.start()
    for life in (here, there):
        healthy(life)
        uploaded(life, 1)
    third = nodes("c" * 40)
    eventually(lambda: store_of(third)["known_here"], lambda n: n == 2)
    for asked in (tokens, other):
        answer = third.session.acquire(asked)
        assert answer.status is Status.FULL_HIT
        assert third.wrong(answer, asked) == []


@pytest.mark.long
def test_a_store_that_does_not_answer_holds_up_neither_the_reader_for_ever_nor_the_disk(nodes: Any, s3: S3) -> None:
    tokens, other = prompt(1), prompt(2)
    on_both(nodes, tokens)
    there = nodes("c" * 40, timeout_s=1.0)
    eventually(lambda: store_of(there)["known_here"], lambda n: n == 1)
    there.store(other)
    assert there.swap_out(other).refused is None
    answers: list[Any] = []
    s3.signal(signal.SIGSTOP)
    try:
        asking = threading.Thread(target=lambda: answers.append(there.session.acquire(tokens)))
        asking.start()
        began = time.monotonic()
        assert there.session.acquire(other).status is Status.FULL_HIT
        assert time.monotonic() - began < 2.0
        asking.join(25.0)
        assert not asking.is_alive()
        assert (answers[0].tokens, answers[0].cause.reason) == (0, Reason.DISK_UNAVAILABLE)
        began = time.monotonic()
        assert there.session.acquire(tokens).tokens == 0  # known to be away: at once
        assert time.monotonic() - began < 1.0
    finally:
        s3.signal(signal.SIGCONT)
    healthy(there)
    assert there.session.acquire(tokens).status is Status.FULL_HIT


def disk_child(life: Life) -> int:
    """The process of a holder's disk."""
    for task in Path(f"/proc/{life.process.pid}/task").iterdir():
        for pid in (task / "children").read_text().split():
            if b"disk.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    raise AssertionError("the holder has no disk's process")


def test_an_upload_that_the_disks_process_did_not_live_to_answer_is_done_by_the_next(nodes: Any, s3: S3) -> None:
    here = nodes("a" * 40, timeout_s=30.0)
    healthy(here)
    s3.signal(signal.SIGSTOP)
    try:
        here.store(prompt(1))
        assert here.swap_out(prompt(1)).refused is None
        os.kill(disk_child(here), signal.SIGKILL)
        eventually(lambda: here.status()["counters"].get("uploads_failed", 0), lambda n: n == 1)
    finally:
        s3.signal(signal.SIGCONT)
    uploaded(here, 1)


@pytest.mark.long
def test_the_oldest_extents_go_when_the_store_is_full(nodes: Any, s3: S3, prefix: str) -> None:
    remote = {"url": f"s3://{BUCKET}/{prefix}", "options": {"endpoint": s3.endpoint, "region": "us-east-1"}}
    life = nodes("a" * 40, remote=remote | {"allow_http": True, "check_s": 0.3, "bytes_max": 600_000})
    healthy(life)
    for number in range(1, 7):
        life.store(prompt(number))
        assert life.swap_out(prompt(number)).refused is None
        uploaded(life, number)
        time.sleep(1.1)  # the store tells times in seconds
    sizes = [one["size"] for chunk in obstore.list(s3.bucket(prefix)) for one in chunk]
    assert 0 < sum(sizes) <= 600_000
    assert len(sizes) < 6
    for number in range(1, 7):
        assert life.session.acquire(prompt(number)).status is Status.FULL_HIT


def test_without_the_library_the_store_is_a_reason_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StoreFault, match=r"pip install 'kvfabric\[remote\]'"):
        ObjectStore(RemoteSetup("s3://bucket/x", (), False, 1 << 30, 1.0, 1.0))


@pytest.mark.parametrize(
    ("remote", "said"),
    [
        ({"url": "bucket/prefix"}, "disk.remote.url: 'bucket/prefix' is not an address"),
        ({"url": "s3://b/x", "options": {"secret_access_key": "hush"}}, "secret_access_key: credentials come from"),
        ({"url": "s3://b/x", "timeout_s": 0}, "disk.remote.timeout_s"),
    ],
)
def test_a_spec_of_a_store_names_what_is_wrong_with_it(tmp_path: Path, remote: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        FabricSpec.load({"model": MODEL, "disk": {"path": str(tmp_path), "remote": remote}})
    assert said in str(refused.value)
    assert "hush" not in str(refused.value)
