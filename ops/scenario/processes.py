"""The processes of one fabric under rehearsal: doors to each of them, and when all are at rest.

A record that one process sent another is in flight until the other has taken it, so work never hides
between two processes. All are at rest if two rounds of asking find none busy and none that did
anything in between.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...actors import ray_api
from ...actors.client import HolderClient
from ...actors.clock import Clock
from ...actors.info import INFO_SCHEMA, FabricInfo
from ...fabric import wire
from ...fabric.doors import AdvanceClock, Rest, RestRequest, RunDue
from ...fabric.kinds import FabricError
from ...fabric.messages import Member, Misuse, StatusRequest
from ...transport.control_client import AsyncClient
from .world import Hung

REPLY_TIMEOUT_S = 30.0
REST_TIMEOUT_S = 120.0
POLL_S = 0.0005


class Processes:
    """Every process that lives, by address. All coroutines run on one loop."""

    def __init__(self, supervisor: Any, clock: Clock) -> None:
        self._supervisor = supervisor
        self._clock = clock
        self._doors: dict[str, AsyncClient] = {}
        self._left: list[HolderClient] = []
        self.members: dict[str, Member] = {}
        self.clients: dict[str, HolderClient] = {}
        """A reader's way to each holder, as sessions have it: a connection and the mapped arena."""

    async def supervise(self, method: str, *args: Any) -> Any:
        """Call the supervisor. Raises FabricError in its words."""
        reference = getattr(self._supervisor, method).remote(*args)
        return await asyncio.to_thread(ray_api.call, reference, 2 * REST_TIMEOUT_S)

    async def find(self) -> None:
        """Learn who lives now, and open a door to each."""
        info = FabricInfo.decode(await self.supervise("describe", INFO_SCHEMA), "")
        for member in info.members:
            if self.members.get(member.address) == member:
                continue
            await self.forget([member.address])
            self._doors[member.address] = await AsyncClient.connect(member.unix)
            if member.shards:
                self.clients[member.address] = await asyncio.to_thread(HolderClient, member, self._clock)
            self.members[member.address] = member

    async def forget(self, addresses: Iterable[str]) -> None:
        """These are dead."""
        for address in addresses:
            self.members.pop(address, None)
            door = self._doors.pop(address, None)
            if door is not None:
                await door.close()
            client = self.clients.pop(address, None)
            if client is not None:
                self._left.append(client)  # a request may still be on its way out of it

    async def ask(self, address: str, record: Any) -> Any:
        """Send a record through a process's door. Raises FabricError if it is refused or lost."""
        answer = await self._doors[address].request(wire.encode(record), REPLY_TIMEOUT_S)
        reply = wire.decode(answer.payload)
        if isinstance(reply, Misuse):
            raise FabricError(f"{address}: {reply.text}")
        return reply

    async def ask_all(self, record: Any, addresses: Iterable[str] | None = None) -> dict[str, Any]:
        """The reply of each process."""
        asked = list(self._doors if addresses is None else addresses)
        replies = await asyncio.gather(*(self.ask(address, record) for address in asked))
        return dict(zip(asked, replies, strict=True))

    async def status(self, addresses: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What processes say of themselves."""
        replies = await self.ask_all(StatusRequest("status"), addresses)
        return {address: dict(json.loads(reply.status)) for address, reply in replies.items()}

    async def taken(self, asked: Mapping[str, str]) -> None:
        """Wait until every request has reached its core or is answered. Raises Hung after two minutes."""
        until = time.monotonic() + REST_TIMEOUT_S
        while asked:
            rests: dict[str, Rest] = await self.ask_all(RestRequest("rest"), set(asked.values()) & set(self._doors))
            lacking = [name for name, address in asked.items() if not _waits(rests.get(address), name)]
            if not lacking:
                return
            if time.monotonic() > until:
                raise Hung(f"not taken after {REST_TIMEOUT_S:.0f} s: {lacking}")
            await asyncio.sleep(POLL_S)

    async def at_rest(self, asked: Mapping[str, str], early: Callable[[], bool]) -> dict[str, Rest] | None:
        """Wait until nothing is in flight anywhere; what each process then waits for, None if ``early`` came true first.

        ``asked``: the requests still without a reply, and whom they were sent to: each must have reached
        its core. Raises Hung after two minutes.
        """
        until = time.monotonic() + REST_TIMEOUT_S
        before: dict[str, tuple[int, int]] | None = None
        while not early():
            rests: dict[str, Rest] = await self.ask_all(RestRequest("rest"))
            steps = {address: (rest.incarnation, rest.steps) for address, rest in rests.items()}
            lacking = [name for name, address in asked.items() if not _waits(rests.get(address), name)]
            quiet = not lacking and not any(rest.busy for rest in rests.values())
            if quiet and steps == before:
                return rests
            before = steps if quiet else None
            if not quiet:
                if time.monotonic() > until:
                    busy = [address for address, rest in rests.items() if rest.busy]
                    raise Hung(f"no rest after {REST_TIMEOUT_S:.0f} s: busy {busy}, not taken {lacking}")
                await asyncio.sleep(POLL_S)
        return None

    async def move(self, to_s: float) -> None:
        """Set every clock but the supervisor's; nothing that is due runs yet."""
        self._clock.move(to_s)
        await self.ask_all(AdvanceClock("clock", to_s))

    async def run_due(self, addresses: Iterable[str]) -> None:
        """Wake these for what is due."""
        await self.ask_all(RunDue("due"), addresses)

    async def close(self) -> None:
        await self.forget(list(self.members))
        for client in self._left:
            client.close()
        self._left.clear()


def _waits(rest: Rest | None, name: str) -> bool:
    return rest is not None and name in rest.waiting
