"""What a rehearsal asks of the supervisor: to hold the time, to leave the dead away, to cut nodes off.

Mixed into the supervisor; each method is refused unless the spec says ``testing``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..fabric.doors import Partition
from ..fabric.kinds import FabricError
from ..fabric.supervisor import Life, Tick

if TYPE_CHECKING:
    from ..fabric.supervisor import SupervisorCore, SupervisorEvent
    from .clock import Clock
    from .mesh import Mesh
    from .spec import FabricSpec

NO_REHEARSAL: dict[str, Any] = {"clock_s": None, "unreachable": ()}
"""What :func:`door_setup` tells a process of a fabric that serves."""
STEP_TIMEOUT_S = 60.0
POLL_S = 0.02


class Rehearsed:
    """The supervisor's test doors."""

    if TYPE_CHECKING:
        spec: FabricSpec
        core: SupervisorCore
        clock: Clock
        mesh: Mesh | None

        def _feed(self, event: SupervisorEvent) -> None: ...
        def _ask_for(self, address: str, incarnation: int) -> None: ...
        async def _look(self) -> None: ...
        async def _told(self) -> None: ...

    def __init__(self) -> None:
        self.kept_away: set[str] = set()
        """Processes that are not started again until a rehearsal says so."""
        self.unreachable: dict[str, tuple[str, ...]] = {}
        """What each process is cut off from, in this life and the next."""

    def _only_testing(self, what: str) -> None:
        if not self.spec.testing:
            raise FabricError(f"{what}: only a fabric launched with testing: true takes it")

    async def advance_clock(self, to_s: float) -> None:
        """Move the supervisor's own clock; rights to grant that are due for renewal are renewed before this returns."""
        self._only_testing("advance_clock")
        self.clock.move(to_s)
        self._feed(Tick())
        await self._told()

    async def keep_away(self, addresses: Sequence[str]) -> None:
        """From now on these processes are not started again when they end."""
        self._only_testing("keep_away")
        self.kept_away.update(addresses)

    async def await_gone(self, addresses: Sequence[str]) -> None:
        """Wait until the exit of each is proven and everyone else was told. Raises FabricError after a minute."""
        self._only_testing("await_gone")

        def gone() -> bool:
            left = [a for a in addresses if a in self.core.processes]
            for address in left:
                member = self.core.processes[address].member
                if member is not None:
                    self._ask_for(address, member.incarnation)
            return not left

        await self._until(gone, f"{', '.join(addresses)}: not known to have ended")
        await self._told()

    async def bring(self, addresses: Sequence[str]) -> None:
        """Start these processes again, under new incarnations. Raises FabricError if one is not up after a minute."""
        self._only_testing("bring")
        self.kept_away.difference_update(addresses)
        await self._look()

        def up() -> bool:
            processes = self.core.processes
            return all(a in processes and processes[a].life is Life.UP for a in addresses)

        await self._until(up, f"{', '.join(addresses)}: not up")
        await self._told()

    async def cut(self, unreachable: Mapping[str, Sequence[str]]) -> None:
        """Cut processes off from others: address -> all addresses it cannot reach. Lasts over restarts."""
        self._only_testing("cut")
        assert self.mesh is not None
        self.unreachable = {address: tuple(others) for address, others in unreachable.items()}
        for member in self.core.members().members:
            record = Partition("partition", self.unreachable.get(member.address, ()))
            await self.mesh.ask(member.address, record, STEP_TIMEOUT_S)

    async def _until(self, done: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while not done():
            if time.monotonic() > deadline:
                raise FabricError(otherwise)
            await asyncio.sleep(POLL_S)


def door_setup(supervisor: Rehearsed, address: str) -> dict[str, Any]:
    """What a process is started with for a rehearsal's sake."""
    held = supervisor.clock.now() if supervisor.spec.testing else None
    return {"clock_s": held, "unreachable": list(supervisor.unreachable.get(address, ()))}
