"""The holders of a fabric as one process sees them: who runs where, and a connection to each on this node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..fabric.kinds import FabricError
from ..fabric.model import ModelSpec
from .client import FarHolder, HolderClient, HolderLost
from .clock import Clock
from .info import FabricInfo

T = TypeVar("T")

REFRESH_S = 0.5
FAR_TRIED_MAX = 3


class Holders:
    """What the fabric told of its processes, asked anew where one is gone. Thread-safe.

    ``resolve`` asks the fabric; ``moved`` is called after it told of other processes. Raises FabricError
    where no fabric of this name runs.
    """

    def __init__(self, name: str, resolve: Callable[[], FabricInfo], moved: Callable[[], None], clock: Clock) -> None:
        self.name = name
        self._resolve = resolve
        self._moved = moved
        self._clock = clock
        self._lock = threading.RLock()
        self._clients: dict[str, HolderClient] = {}
        self._current: dict[str, HolderClient] = {}
        """Of these, those that were compared with what the fabric last told."""
        self._far: dict[str, FarHolder] = {}
        self.info = resolve()
        self._resolved_s = time.monotonic()
        self.readers = self._of_this_node()
        """The holder of each shard on this node; "" where there is none."""

    @property
    def model(self) -> ModelSpec:
        return self.info.spec.model

    def _of_this_node(self) -> tuple[str, ...]:
        here = [m for m in self.info.members if m.shards and m.node == self.info.node]
        by_shard = {shard: m.address for m in sorted(here, key=lambda m: m.address) for shard in m.shards}
        return tuple(by_shard.get(s, "") for s in range(self.model.shards))

    def by_node(self) -> dict[str, tuple[str, ...]]:
        """The holder of each shard on every node that has them all."""
        nodes: dict[str, dict[int, str]] = {}
        for member in sorted(self.info.members, key=lambda m: m.address, reverse=True):
            for shard in member.shards:
                nodes.setdefault(member.node, {})[shard] = member.address
        every = range(self.model.shards)
        return {node: tuple(by[s] for s in every) for node, by in nodes.items() if all(s in by for s in every)}

    def of_shard(self, shard: int) -> str:
        """The holder of a shard on this node; "" where there is none. Raises FabricError for no shard of the model."""
        if not 0 <= shard < self.model.shards:
            raise FabricError(f"shard: {shard} is not within 0..{self.model.shards - 1}")
        return self.readers[shard]

    def all_here(self) -> tuple[str, ...]:
        """The holder of each shard on this node, the leader first. Raises HolderLost where one is missing."""
        if "" in self.readers:
            raise HolderLost(f"no holder runs on this node for shard {self.readers.index('')}")
        return self.readers

    def client(self, address: str) -> HolderClient:
        """A connection to a holder's present life. Raises HolderLost."""
        with self._lock:
            client = self._clients.get(address)
            if client is not None and self._current.get(address) is client and client.alive:
                return client
            member = next((m for m in self.info.members if m.address == address), None)
            if member is None:
                raise HolderLost(f"no holder {address!r} runs on this node")
            if client is None or client.member != member or not client.alive:
                if client is not None:
                    client.close()
                client = self._clients[address] = HolderClient(member, self._clock, self.info.spec.transport.awake_s)
            self._current[address] = client
            return client

    def anyone(
        self, question: Callable[[tuple[str, ...]], Any], expect: type[T], timeout_s: float
    ) -> tuple[T, tuple[str, ...]]:
        """Ask the leader of this node, or else of another that has a holder for each shard. Raises HolderLost.

        ``question`` is made for the holders of the node asked, the leader first; they come back with the reply.
        """
        lost: HolderLost | None = None
        if "" not in self.readers:
            try:
                return self.again(
                    lambda: (
                        self.client(self.readers[0]).call_apart(question(self.readers), expect, timeout_s),
                        self.readers,
                    )
                )
            except HolderLost as error:
                lost = error
        nodes = self.by_node()
        for node in sorted(set(nodes) - {self.info.node})[:FAR_TRIED_MAX]:
            try:
                return self.far(nodes[node][0]).call(question(nodes[node]), expect, timeout_s), nodes[node]
            except HolderLost as error:
                lost = error
        raise lost or HolderLost("no node of the fabric has a holder for each shard")

    def far(self, address: str) -> FarHolder:
        """A connection to a holder of another node. Raises HolderLost."""
        with self._lock:
            member = next((m for m in self.info.members if m.address == address), None)
            if member is None or not self.info.door_secret:
                raise HolderLost(f"holder {address!r} is not to be reached from this node")
            far = self._far.get(address)
            if far is None or far.member != member or not far.alive:
                if far is not None:
                    far.close()
                far = self._far[address] = FarHolder(member, self.info.door_secret)
            return far

    def again(self, work: Callable[[], T]) -> T:
        """Run, and once more after asking where the holders are now. Raises HolderLost in the end.

        The fabric is asked at most once in REFRESH_S: while a holder is away, a session answers at once.
        """
        try:
            return work()
        except HolderLost:
            if time.monotonic() < self._resolved_s + REFRESH_S:
                raise
            try:
                self.refresh()
            except FabricError as error:
                raise HolderLost(f"the fabric is not there: {error}") from None
            return work()

    def refresh(self) -> None:
        """Ask the fabric anew who runs where. Raises FabricError where none of this name and model runs."""
        with self._lock:
            self._resolved_s = time.monotonic()
            info = self._resolve()
            if info.spec.model != self.model:
                raise FabricError(f"fabric {self.name!r} runs another model now: connect anew")
            self.info = info
            self._current.clear()
            self.readers = self._of_this_node()
        self._moved()

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            for far in self._far.values():
                far.close()
            self._clients.clear()
            self._current.clear()
            self._far.clear()
