"""Who has the loop next: what can wait pauses for those who ask, and for nobody where nobody else does."""

from __future__ import annotations

import asyncio
import socket
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


def test_what_can_wait_pauses_as_often_as_long_as_it_worked_while_somebody_asks() -> None:
    watch = Watch()
    share = LoopShare(watch)
    share.used(0.001)
    assert share.pause_s() == 0.0  # nobody ever asked
    share.live("a")
    watch.now += 0.001
    share.used(0.001)
    assert share.pause_s() == pytest.approx(PAUSES * 0.001)
    watch.now += 2 * LIVE_S
    assert share.pause_s() == 0.0  # nobody asks any more


def test_no_pause_is_longer_than_its_bound() -> None:
    watch = Watch()
    share = LoopShare(watch)
    share.live("a")
    share.used(10.0)
    assert share.pause_s() == pytest.approx(PAUSE_S_MAX)


def test_whoever_asks_alone_is_not_held_up_for_itself() -> None:
    watch = Watch()
    share = LoopShare(watch)

    def pauses(who: str) -> bool:
        share.used(0.001)
        return share.pause_s(who) > 0.0

    share.live("a")
    assert not pauses("a")
    assert pauses("b")
    share.live("b")
    assert pauses("a")
    assert pauses("b")  # "a" asked a moment ago
    watch.now += 2 * LIVE_S
    share.live("b")
    assert not pauses("b")


def test_all_that_can_wait_has_one_share_between_them() -> None:
    """Two that stand in line take turns, one pause behind each: not a share each."""
    watch, order = Watch(), list[str]()
    share = LoopShare(watch)

    def work(who: str, left: int) -> None:
        assert not share.pause_s(), "a turn came before the pause was over"
        order.append(who)
        watch.now += 0.001
        if left:
            share.stand(lambda: work(who, left - 1))

    async def main() -> None:
        share.stand(lambda: work("disk", 3))
        share.stand(lambda: work("timer", 3))
        for _ in range(400):
            share.live("client")
            await asyncio.sleep(0.0005)
            watch.now += 0.0005
            if len(order) == 8:
                return

    began_s = watch.now
    asyncio.run(main())
    assert order == ["disk", "timer"] * 4
    assert watch.now - began_s >= 8 * 0.001 + 7 * PAUSES * 0.001 - 0.001


def test_who_asked_during_a_turn_is_served_before_the_next() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    share, order = LoopShare(), list[str]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def asked() -> None:
            ours.recv(1)
            order.append("asked")
            share.live("client")

        def first() -> None:
            order.append("first")
            theirs.send(b"?")

        def second() -> None:
            order.append("second")
            over.set()

        loop.add_reader(ours, asked)
        share.stand(first)
        share.stand(second)
        await asyncio.wait_for(over.wait(), 5.0)
        loop.remove_reader(ours)

    asyncio.run(main())
    ours.close()
    theirs.close()
    assert order == ["first", "asked", "second"]


def test_a_turn_that_fails_fails_where_it_is_awaited_and_the_line_goes_on() -> None:
    share, ran = LoopShare(), list[int]()

    async def main() -> None:
        failing = asyncio.ensure_future(share.turn(lambda: ran.append(1 // 0)))
        following = asyncio.ensure_future(share.turn(lambda: ran.append(2)))
        with pytest.raises(ZeroDivisionError):
            await failing
        await following

    asyncio.run(main())
    assert ran == [2]


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
