"""The directory's process: its core behind a socket, nothing else."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from ..fabric import wire
from ..fabric.directory import DirectoryCore
from ..fabric.doors import Rest
from ..fabric.effects import Effect, Event, Received, Send, Tick
from ..fabric.messages import GrantSeen, GrantUntil, SetMode, SetWeights, ShardMap
from .alarm import Alarm
from .clock import Clock
from .rehearsal import NO_REHEARSAL
from .service import Service
from .spec import FabricSpec


class Directory(Service):
    """Ray actor. Documented methods: ``start``, ``request``, ``close``, ``ping``.

    ``request(frame: bytes) -> bytes`` takes a ``Lookup`` or ``StatusRequest`` record.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        setup = NO_REHEARSAL | setup
        spec = FabricSpec.read(setup["spec"])
        super().__init__(
            fabric=setup["fabric"],
            address=setup["address"],
            incarnation=setup["incarnation"],
            node=setup["node"],
            host=setup["host"],
            secret=setup["secret"],
            model=spec.model,
            clock=Clock(setup["clock_s"]),
            testing=spec.testing,
        )
        self.mesh.unreachable = frozenset(setup["unreachable"])
        shards = ShardMap(*setup["shard_map"]) if "shard_map" in setup else None
        self.core = DirectoryCore(self.address, spec.model, self.incarnation, shards=shards)
        self._alarm = Alarm(self.clock, lambda: self._feed(Tick()))
        self._weights_number = self._mode_number = 0
        """What the supervisor told, which only holders act on: answered so that it need not say it again."""

    async def start(self, schema: int = wire.SCHEMA) -> bytes:
        """Listen; returns a Birth record, as ``schema`` has it."""
        await self.listen()
        return await self.birth(schema)

    async def ping(self) -> int:
        return self.incarnation

    async def close(self) -> None:
        self._alarm.stop()
        await super().close()

    def received(self, sender: str, record: Any) -> None:
        match record:
            case SetWeights():
                self._weights_number = record.number
            case SetMode():
                self._mode_number = record.number
        self._feed(Received(sender, record))

    def reply_to_peer(self, record: Any) -> bytes:
        if isinstance(record, GrantUntil):
            known = (self._weights_number, self._mode_number, self.core.router.map.epoch)
            return wire.encode(GrantSeen(self.incarnation, self.clock.now(), *known))
        return b""

    def _feed(self, event: Event) -> None:
        self._carry_out(self.core.handle(event, self.clock.now()))
        self._alarm.set(self.core.next_deadline_s)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.deliver(effect.to, effect.message)

    def rest(self, request: str) -> Rest:
        seen = tuple((h, s.incarnation, s.seq) for h, s in self.core.streams.items())
        return replace(super().rest(request), seen=seen, due_s=self.core.next_deadline_s)

    def run_due(self) -> None:
        due = self.core.next_deadline_s
        if due is not None and due <= self.clock.now():
            self._feed(Tick())

    def status(self) -> str:
        streams = self.core.streams
        return json.dumps(
            {
                "address": self.address,
                "pid": os.getpid(),
                "epoch": self.core.epoch,
                "shards": list(self.core.router.shards),
                "requests_refused": self.requests_refused,
                "holders": {
                    h: {"incarnation": s.incarnation, "seq": s.seq, "behind": s.behind_since_s is not None}
                    for h, s in streams.items()
                },
                "segments": sum(len(table) for table in self.core.index.tables.values()),
                "index_bytes": self.core.index.bytes_used,
                "forgotten_segments": self.core.index.forgotten_segments,
            }
        )
