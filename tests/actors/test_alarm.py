"""The core's timer: in turn while others ask, late at the latest, never when stopped."""

from __future__ import annotations

import asyncio
import time

from kvfabric.actors.alarm import LATE_S_MAX, Alarm
from kvfabric.actors.clock import MONOTONIC
from kvfabric.transport.loop_share import LoopShare


def test_it_rings_in_turn_and_late_at_the_latest_however_much_stands_before_it() -> None:
    rung: list[float] = []

    async def main(*, crowded: bool) -> float:
        share = LoopShare()
        rung.clear()
        alarm = Alarm(MONOTONIC, lambda: rung.append(time.monotonic()), share)

        def work() -> None:
            time.sleep(0.01)

        for _ in range(1000 if crowded else 0):
            share.stand(work)
        due_s = time.monotonic() + 0.01
        alarm.set(due_s)
        while not rung:
            share.live("client")
            await asyncio.sleep(0.001)
        return rung[0] - due_s

    assert asyncio.run(main(crowded=False)) >= 0.0
    assert asyncio.run(main(crowded=True)) >= LATE_S_MAX / 2, "the line was not empty"


def test_stopped_it_never_rings_though_it_stood_in_line() -> None:
    rung: list[None] = []

    async def main() -> None:
        share = LoopShare()
        alarm = Alarm(MONOTONIC, lambda: rung.append(None), share)
        alarm.set(time.monotonic())
        over = asyncio.ensure_future(share.turn(lambda: None))
        share.stand(alarm.stop)
        await over
        await asyncio.sleep(2 * LATE_S_MAX)

    async def control() -> None:
        share = LoopShare()
        alarm = Alarm(MONOTONIC, lambda: rung.append(None), share)
        alarm.set(time.monotonic())
        await asyncio.sleep(2 * LATE_S_MAX)

    asyncio.run(main())
    stopped = len(rung)
    asyncio.run(control())
    assert (stopped, len(rung)) == (0, 1)
