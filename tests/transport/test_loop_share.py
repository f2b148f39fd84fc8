"""Who has the loop next: bursts pause for others, and for nobody where nobody else asks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvfabric.transport.control_client import AsyncClient
from kvfabric.transport.control_socket import ConnectionInfo, Reply, serve_unix
from kvfabric.transport.loop_share import LIVE_S, PAUSE_S_MAX, PAUSES, LoopShare


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_background_pauses_three_times_as_long_as_it_worked_while_somebody_asks() -> None:
    watch = Watch()
    share = LoopShare(watch)
    share.used(0.001)
    assert share.pause_s == 0.0  # nobody ever asked
    share.live("a")
    watch.now += 0.001
    share.used(0.001)
    assert share.pause_s == pytest.approx(PAUSES * 0.001)
    watch.now += 2 * LIVE_S
    assert share.pause_s == 0.0  # nobody asks any more


def test_no_pause_is_longer_than_its_bound() -> None:
    watch = Watch()
    share = LoopShare(watch)
    share.live("a")
    assert share.pause_after(10.0) == PAUSE_S_MAX


def test_whoever_asks_alone_is_not_held_up_for_itself() -> None:
    watch = Watch()
    share = LoopShare(watch)
    share.live("a")
    assert share.pause_after(0.001, "a") == 0.0
    assert share.pause_after(0.001, "b") > 0.0
    share.live("b")
    assert share.pause_after(0.001, "a") > 0.0
    assert share.pause_after(0.001, "b") > 0.0  # "a" asked a moment ago
    watch.now += 2 * LIVE_S
    share.live("b")
    assert share.pause_after(0.001, "b") == 0.0


def test_other_requests_come_between_those_of_a_burst(tmp_path: Path) -> None:
    order: list[bytes] = []

    def slowly(_: ConnectionInfo, frame: bytes) -> Reply:
        order.append(frame)
        if frame != b"live":
            time.sleep(0.001)
        return frame

    async def main() -> None:
        server = await serve_unix(str(tmp_path / "run" / "s"), slowly)
        burst = await AsyncClient.connect(server.endpoint, timeout_s=5.0)
        live = await AsyncClient.connect(server.endpoint, timeout_s=5.0)
        asked = [asyncio.ensure_future(burst.request(b"burst %d" % i, 5.0)) for i in range(60)]
        while len(order) < 5:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0)
        for _ in range(5):
            await live.request(b"live", 5.0)
        assert len(order) < 50
        await asyncio.gather(*asked)
        assert [frame for frame in order if frame != b"live"] == [b"burst %d" % i for i in range(60)]
        await burst.close()
        await live.close()
        await server.close()

    asyncio.run(main())
