"""One run: a seed, so many steps, then everything is healed and must come to rest."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ...fabric.bands import IN_MEMORY
from ...fabric.invariants import accounting
from ...fabric.kinds import Status
from ...fabric.lifecycle import State
from ...fabric.messages import Acquire, Answer
from ...fabric.objects import Obj
from .clients import Call
from .faults import Faults
from .machine import digest
from .models import PROMPT_TOKENS_MAX, TENANTS, Text
from .queue import where
from .shared_store import LOOK_S, OBJECTS_MAX, StoreDriver
from .world import Failure, Life, World

REST_S = 45.0
"""Longer than any lease, attempt, pin or exchange of these worlds lives."""

GRANTS_PER_1000_MIN = 20
RESTORES_PER_1000_MIN = 5


@dataclass(frozen=True, slots=True)
class Report:
    """What one run showed."""

    seed: int
    steps: int
    virtual_s: float
    wall_s: float
    granted: int
    restores: int
    wrong_reads: int
    slots_lost: int
    hangs: int
    failure: Failure | None
    counts: Counter[str]

    @property
    def clean(self) -> bool:
        return self.failure is None

    def plain(self) -> dict[str, Any]:
        """One JSON object."""
        steps = max(self.steps, 1)
        return {
            "seed": self.seed,
            "steps": self.steps,
            "clean": self.clean,
            "virtual_s": round(self.virtual_s, 3),
            "steps_per_s": round(self.steps / max(self.wall_s, 1e-9)),
            "granted_per_1000_steps": round(1000 * self.granted / steps, 1),
            "restores_per_1000_steps": round(1000 * self.restores / steps, 1),
            "wrong_reads": self.wrong_reads,
            "slots_lost": self.slots_lost,
            "hangs": self.hangs,
            "failure": None
            if self.failure is None
            else {"law": self.failure.law, "detail": self.failure.detail, "step": self.failure.step},
            "trace": [] if self.failure is None else list(self.failure.trace),
            "counts": dict(sorted(self.counts.items())),
        }


class Run:
    """Drives one world to its end."""

    def __init__(self, seed: int, steps: int, *, rest: bool = True) -> None:
        self.rest = rest
        self.world = World(seed)
        self.faults = Faults(self.world)
        self.steps = steps

    def run(self) -> Report:
        """The whole run. Time is only measured, never used."""
        started = time.perf_counter()
        world = self.world
        world.begin()
        self.faults.begin()
        while world.failure is None and world.steps < self.steps:
            self._next(float("inf"))
        busy_s, busy_steps = time.perf_counter() - started, world.steps
        if world.failure is None and self.rest:
            self._rest()
        return Report(
            seed=world.seed,
            steps=busy_steps,
            virtual_s=world.queue.now,
            wall_s=busy_s,
            granted=world.counts["granted"],
            restores=world.restores,
            wrong_reads=world.wrong_reads,
            slots_lost=sum(accounting(life.core).lost for life in world.lives.values()),
            hangs=int(world.failure is not None and world.failure.law == "hang"),
            failure=world.failure,
            counts=world.counts,
        )

    # --- coming to rest ------------------------------------------------------------------------

    def _rest(self) -> None:
        """Heal everything, let every promise run out, and look at what is left."""
        world = self.world
        world.calm = True
        world.cut.clear()
        for life in [*world.lives.values(), *world.zombies]:
            life.machine.calm = True
            if life.paused:
                self.faults.wake(life)
        for name in world.lives:
            self.faults.disk_up(name)
        if world.extras.scrub_bytes_per_s is not None:
            self.faults.rot_disks()
        if world.store is not None:  # away until every node saw it: what was lost meanwhile is put there again
            world.store.down, world.store.slow = True, False
            world.queue.after(2 * LOOK_S, self.faults.store_up)
        for node in list(world.supervisor.drains):
            world.leave(node)
        self._until(world.queue.now + 12.0)
        for client in list(world.clients.values()):
            client.die()
        for life in list(world.zombies):
            world.bury(life)
        self._until(world.queue.now + REST_S)
        if world.failure is None:
            self._at_rest()
        if world.failure is None:
            self._converged()
        if world.failure is None:
            self._answers_all()

    def _until(self, at_s: float) -> None:
        while self.world.failure is None and self._next(at_s):
            pass

    def _next(self, until_s: float) -> bool:
        """One event. What a driver cannot carry out is a finding like what a core raises."""
        try:
            return self.world.queue.run_next(until_s)
        except Exception as error:  # noqa: BLE001 - an effect without sense shows as any error here
            self.world.fail("effect", f"{type(error).__name__}: {error}{where(error)}")
            return False

    def _at_rest(self) -> None:
        """Nothing is pinned, reserved, quarantined, lost, waited for or forgotten on disk."""
        world = self.world
        for life in world.lives.values():
            core, books = life.core, accounting(life.core)
            left = {
                "pins": books.pins,
                "lost slots": books.lost,
                "reserved slots": books.reserved,
                "quarantined slots": books.quarantined,
                "leases": len(core.ctx.leases.live),
                "write attempts": len(core.stores.attempts) + len(core.stores.aborted),
                "shares": len(core.parts.open_parts),
                "pins for others": len(core.pins.open),
                "acquires": len(core.leader.ops) + len(core.leader.by_request) + len(core.leader.waiting),
                "fetches": len(core.ctx.inflight),
                "waiters": len(core.ctx.waiters),
                "objects on their way down": core.disk.host.at_work,
                "lost host slots": core.disk.host.pools.lost(),
                "effects that wait for their bytes' turn": len(core.flow),
                "uploads": core.disk.remote.uploading,
            }
            for what, count in left.items():
                if count:
                    world.fail("rest", f"{life}: {count} {what} are left", life.name)
            self._disk_at_rest(life.name)

    def _disk_at_rest(self, name: str) -> None:
        """What lies on a disk is served, what is served lies there or in the store, and what rotted is known."""
        world, life = self.world, self.world.lives[name]
        core, there = life.core, world.disks[name].extents
        objects = [obj for table in core.ctx.books.table.values() for obj in table.values()]
        referred = {obj.on_disk[0] for obj in objects if obj.on_disk is not None}
        book = core.disk.extents
        served = {extent for extent in referred if not book.only_remote(extent)}
        if set(there) != served:
            odd = sorted(set(there) ^ served)
            world.fail("rest", f"{name}: extents {odd} are not both on disk and referred to", name)
        if life.machine.store is not None:
            self._store_at_rest(life, life.machine.store, referred)
        if world.extras.scrub_bytes_per_s is not None:
            self._scrubbed_at_rest(life)

    def _store_at_rest(self, life: Life, driver: StoreDriver, referred: set[int]) -> None:
        """What is said to be in the store is there, and what lies on the disk is, as far as there is room."""
        book, objects = life.core.disk.extents, driver.store.objects
        said = {extent for extent in referred if book.is_remote(extent)}
        wrong = [extent for extent in said if driver.uid(extent) not in objects]
        if wrong:
            self.world.fail("store", f"{life}: extents {sorted(wrong)} are said to be in the store", life.name)
        if len(objects) < OBJECTS_MAX and set(book.local()) - said:
            late = sorted(set(book.local()) - said)
            self.world.fail("store", f"{life}: extents {late} were never copied to the store", life.name)

    def _scrubbed_at_rest(self, life: Life) -> None:
        """Whatever rotted on the disk was found without a reader."""
        book, there = life.core.disk.extents, self.world.disks[life.name].extents
        for extent in book.local():
            for number, obj in book.live(extent).items():
                if obj.bad is None and digest(there[extent][number][1]) != obj.checksum:
                    self.world.fail("scrub", f"{life}: entry {number} of extent {extent} rots unseen", life.name)

    def _converged(self) -> None:
        """The directory knows exactly what the holders have."""
        world = self.world
        told = {
            (
                holder,
                lane.group,
                lane.shard,
                digest,
                lane.state == IN_MEMORY,
                lane.revision,
                version.to_bytes(8, "little"),
            )
            for directory in world.directories.alive()
            for holder, lane, digest, version in directory.index.entries()
        }
        true = {
            (
                life.name,
                group,
                shard,
                digest[:16],
                _in_memory(obj),
                obj.revision,
                obj.version.to_bytes(8, "little") if _in_memory(obj) else bytes(8),
            )
            for life in world.lives.values()
            for (group, shard), table in life.core.ctx.books.table.items()
            for digest, obj in table.items()
        }
        if told != true:
            first = min(told ^ true, key=lambda entry: (entry[3], entry[0]))
            detail = (
                f"{len(told ^ true)} entries differ; told only {_named(told - true)}, true only {_named(true - told)}"
            )
            world.fail("convergence", f"directory: {detail}", first[0], first[3][:4].hex())

    def _answers_all(self) -> None:
        """At rest, a look-up at any node finds what is there, however it is spread."""
        world = self.world
        for node in world.nodes:
            for name in world.library.names:
                for tenant in TENANTS:
                    self._probe(node, name, tenant)
                    if world.failure is not None:
                        return

    def _probe(self, node: str, name: int, tenant: str) -> None:
        world = self.world
        text = world.library.text(name, PROMPT_TOKENS_MAX, world.weights[-1], tenant)
        client = self.faults.new_client(node)
        lives = client.lives()
        assert lives is not None
        answers: list[Any] = []
        readers = tuple(
            next(life.name for life in lives if s in world.holders[life.name][1]) for s in range(world.model.shards)
        )
        message = Acquire(client.request(), text.prompt, world.layouts.first, readers, 1.0, None, 0, True)

        def ask() -> Any:
            answers.append((yield Call(lives[0], message)))

        client.script(ask())
        self._until(world.queue.now + 8.0)
        client.die()
        if world.failure is not None or not answers or not isinstance(answers[0], Answer):
            world.fail("hang", f"a probe at {node} was not answered", lives[0].name)
            return
        found = answers[0]
        best = self._best(text, found.hash_tokens)
        if found.tokens not in best or (found.status is Status.FULL_HIT and not found.tokens):
            detail = f"a probe of prompt {name} at {node} found {found.tokens} tokens, there are {best} ({found.cause})"
            world.fail("convergence", detail, lives[0].name, client.name)

    def _best(self, text: Text, promised: int) -> list[int]:
        """Where a probe may resume: at the longest position, or behind a replay that begins later; by cost, anywhere."""
        judge, there, n = self.world.judge, self._there(text.digests), len(text)
        direct = judge.best(n, there)
        far = judge.best(n, there, replays=True, most=promised) if judge.replay_tokens else 0
        if self.world.model.plan == "cost":
            grid = range(judge.grid, n, judge.grid)
            ways = (False, True) if judge.replay_tokens else (False,)
            return [0, *(p for p in grid if any(judge.serves(p, n, there, replays=way) for way in ways))]
        return [far if far - judge.replay_tokens > direct else direct]

    def _there(self, digests: dict[int, list[bytes]]) -> dict[tuple[int, int], dict[int, set[int]]]:
        """What all holders have of a prompt, usable in the first layout."""
        world = self.world
        there: dict[tuple[int, int], dict[int, set[int]]] = {}
        for life in world.lives.values():
            for (group, shard), table in life.core.ctx.books.table.items():
                abi = world.layouts.first[group]
                for index, key in enumerate(digests[world.model.groups[group].unit_tokens]):
                    obj = table.get(key)
                    if obj is None or obj.bad is not None or obj.abi != abi:
                        continue
                    there.setdefault((group, shard), {}).setdefault(index, set()).add(obj.revision)
        return there


def _named(entries: set[tuple[str, int, int, bytes, bool, int, bytes]]) -> list[str]:
    """The first few entries of a directory, in one word each."""
    return [
        f"{holder}:{group}/{shard}:{digest[:4].hex()}:{'memory' if in_memory else 'tier'}:r{revision}:v{version[0]}"
        for holder, group, shard, digest, in_memory, revision, version in sorted(entries)[:4]
    ]


def _in_memory(obj: Obj) -> bool:
    return obj.state in (State.SEALED, State.DEMOTING)


def simulate(seed: int, steps: int, *, rest: bool = True) -> Report:
    """Run one seed for so many steps, then to rest (which is not counted)."""
    return Run(seed, steps, rest=rest).run()
