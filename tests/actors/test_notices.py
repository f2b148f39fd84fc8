"""Who hears that a node goes, and how long it then has."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvfabric.actors.notices import FILE, SPOT, Notices
from kvfabric.actors.spec import FabricSpec
from kvfabric.actors.spec_sections import NoticeSpec
from kvfabric.fabric.kinds import SpecError

from . import stories


@pytest.fixture
def cloud() -> Iterator[list[tuple[int, bytes]]]:
    """What the metadata service answers from here on: status and body."""
    answers: list[tuple[int, bytes]] = [(404, b"")]

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[-1] if self.headers["Metadata-Flavor"] == "Google" else (403, b"")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Metadata)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    answers.append((404, f"http://127.0.0.1:{server.server_port}/preempted".encode()))
    yield answers
    server.shutdown()
    server.server_close()
    serving.join()


def watched(spec: NoticeSpec, then: list[tuple[int, bytes]] | None, answer: tuple[int, bytes]) -> Notices:
    notices = Notices(lambda: 100.0)
    notices.spec = spec

    async def run() -> None:
        watching = asyncio.create_task(notices.watch())
        await asyncio.sleep(0.2)
        assert notices.leaves_in_s() is None
        if then is not None:
            then.append(answer)
        elif spec.file:
            await asyncio.to_thread(Path(spec.file).touch)
        await asyncio.wait_for(watching, 5.0)

    asyncio.run(run())
    return notices


@pytest.mark.parametrize("stays", [(404, b""), (200, b"FALSE")])
def test_a_spot_notice_is_heard_once_the_cloud_publishes_it(
    cloud: list[tuple[int, bytes]], stays: tuple[int, bytes]
) -> None:
    url = cloud[-1][1].decode()
    cloud.append(stays)
    spec = NoticeSpec(url=url, headers={"Metadata-Flavor": "Google"}, look_every_s=0.05, notice_s=30.0)
    notices = watched(spec, cloud, (200, b"TRUE"))
    assert (notices.heard, notices.leaves_in_s()) == (SPOT, 30.0)


def test_a_file_that_appears_is_a_notice_and_the_first_one_counts(tmp_path: Path) -> None:
    spec = NoticeSpec(file=str(tmp_path / "leaving"), look_every_s=0.05, notice_s=12.0)
    notices = watched(spec, None, (0, b""))
    notices.hear(SPOT, 1.0)
    assert (notices.heard, notices.leaves_in_s()) == (FILE, 12.0)


def test_an_address_that_is_none_is_refused_by_its_field() -> None:
    with pytest.raises(SpecError, match=r"notices\.url"):
        FabricSpec.load(stories.spec(notices={"url": "file:///etc/passwd"}))


def test_a_node_gets_a_holder_only_with_all_labels_asked_for() -> None:
    spec = FabricSpec.load(stories.spec(node_labels={"zone": "a", "kind": "gpu"}))
    assert spec.takes({}, {"zone": "a", "kind": "gpu", "more": "x"})
    assert not spec.takes({}, {"zone": "a"})
    assert not spec.takes({})
