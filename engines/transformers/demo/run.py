"""The demo from start to end: two nodes, a fabric, a writer on A, a reader on B.

Torch and transformers are loaded in the workers' processes only; this one waits for them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from ....actors import ray_api
from ....actors.embedded import EmbeddedCluster
from ....actors.fabric import Fabric, launch
from ....actors.spec import FabricSpec
from ....fabric import wire
from ....fabric.messages import Done
from ....transport.disk.faults import DiskFault
from ..errors import EngineError, MissingExtra
from ..library import INSTALL
from .on_disk import DiskWriter
from .reader import Reader
from .records import FaultRun, Loaded, Outcome, Run
from .story import ALIGNED, DECODE_TOKENS, DISK_FAULTS, POSITIONS, RAGGED, TORN

NODES = 2
LINKS = ("nixl", "tcp")
"""NIXL moves the bytes; plain TCP only where NIXL cannot start. Not shared memory: the nodes stand for hosts."""
TRANSFORMERS_MIN = (5, 23)
LOAD_TIMEOUT_S = 180.0
STEP_TIMEOUT_S = 60.0
DISK_BYTES_MAX = 1 << 28

Say = Callable[[str], None]


def run(family: str, say: Say) -> Outcome:
    """Run the demo for one model family; ``say`` is told what goes on, a line at a time.

    Raises FabricError, in one line, where something is not there or does not start. Everything it
    started has ended when it returns or raises.
    """
    require_engine()
    say("starting a Ray cluster of two nodes on this machine")
    stage = _Stage(EmbeddedCluster.start(NODES))
    try:
        return _on_stage(family, stage, say)
    finally:
        with _deaf_to_interrupts():
            say("shutting down")
            stage.end()


@dataclass(slots=True)
class _Stage:
    """All that runs, as far as it has started."""

    cluster: EmbeddedCluster
    workers: list[Any] = field(default_factory=list)
    fabric: Fabric | None = None
    disk: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="kvfabric-demo-")
    )

    def end(self) -> None:
        """End it in this order: who reads and writes, the fabric, the cluster."""
        try:
            for worker in self.workers:
                ray_api.kill(worker)
            if self.fabric is not None:
                self.fabric.shutdown()
        finally:
            self.cluster.close()
            self.disk.cleanup()


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A second Ctrl-C does not break off the shutdown that the first one began: it ends in seconds and leaves nothing."""
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, kept)


def require_engine() -> None:
    """Raise MissingExtra, with the command that installs it, unless a transformers that is new enough is there."""
    if not _is_there("transformers"):
        raise MissingExtra(f"the demo needs transformers, which is not installed: {INSTALL}")
    found = metadata.version("transformers")
    if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < TRANSFORMERS_MIN:
        wanted = ".".join(map(str, TRANSFORMERS_MIN))
        raise MissingExtra(f"the demo needs transformers {wanted} or newer, {found} is installed: {INSTALL}")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # somebody blocked its import
        return False


@dataclass(frozen=True, slots=True)
class _Cast:
    """Who plays: the two workers, and what the writer says of the model."""

    family: str
    writer: Any
    reader: Any
    loaded: Loaded
    faults: list[str]
    node: str
    """The writer's."""


def _on_stage(family: str, stage: _Stage, say: Say) -> Outcome:
    say(f"loading {family} with random weights in a worker on each node")
    for cls, node in zip((DiskWriter, Reader), stage.cluster.node_ids, strict=True):
        name = f"demo/{cls.__name__}"
        stage.workers.append(ray_api.start_actor(cls, name, family, node=node, detached=False, concurrency=1))
    writer, reader = stage.workers
    loading = reader.load.remote()
    loaded: Loaded = _ask(writer.load.remote(), LOAD_TIMEOUT_S)
    cast = _Cast(family, writer, reader, loaded, _ask(writer.fault_names.remote()), stage.cluster.node_ids[0])
    say("starting the fabric: supervisor, directory, and on each node a holder with a NIXL agent")
    fabric = stage.fabric = launch(_spec(cast, stage.disk.name))
    same: Loaded = _ask(loading, LOAD_TIMEOUT_S)
    if same.weights != loaded.weights:
        raise EngineError(f"the workers' weights differ: {loaded.weights} and {same.weights}")
    outcome = _story(cast, fabric, say)
    for worker in stage.workers:
        _ask(worker.close.remote())
    return outcome


def _spec(cast: _Cast, disk: str) -> FabricSpec:
    return FabricSpec.load(
        {
            "model": cast.loaded.spec,
            "slots": _ask(cast.writer.slots.remote(len(cast.faults) + len(DISK_FAULTS))),
            # No scrubber: it might find the torn write before the reader does, and what it barred would not be restored.
            "disk": {"path": disk, "bytes_max": DISK_BYTES_MAX, "free_floor_bytes": 0, "scrub_bytes_per_s": None},
            "passports": _ask(cast.writer.passports.remote()),
            "transport": {"links": LINKS},
        }
    )


def _story(cast: _Cast, fabric: Fabric, say: Say) -> Outcome:
    writer, reader = cast.writer, cast.reader
    _ask(writer.publish_warm_up.remote())
    _ask(reader.warm_up.remote())
    say(f"A prefills and publishes {ALIGNED} and {RAGGED} tokens, B resumes longer prompts under leases")
    _ask(writer.publish.remote())
    runs: list[Run] = [_ask(reader.resume.remote(position)) for position in POSITIONS]
    faults: list[FaultRun] = []
    for name in cast.faults:
        say(f"breaking one thing: {name.replace('_', ' ')}")
        met: FaultRun = _ask(reader.meet.remote(writer.break_state.remote(name)))
        faults.append(met)
        _ask(writer.repair.remote(name))
        _ask(reader.confirm_repaired.remote(name, met.position))
    faults += _on_disk(cast, fabric, say)
    link = _link(fabric.status(), runs)
    return Outcome(cast.family, NODES, cast.loaded.kinds, tuple(runs), tuple(faults), link, DECODE_TOKENS)


def _on_disk(cast: _Cast, fabric: Fabric, say: Say) -> list[FaultRun]:
    """What lies on A's disk: each time the same state, met in another way."""
    writer, reader = cast.writer, cast.reader
    holder = fabric.holder(cast.node)
    found: list[FaultRun] = []
    for name in DISK_FAULTS:
        say(f"breaking one thing: {name.replace('_', ' ')}")
        _ask(writer.store_whole.remote(name))
        most, last = _ask(writer.swap_outs.remote(name))
        _swap_out(holder, most)
        if name == TORN:
            _ask(holder.inject_disk.remote(DiskFault.TORN_WRITE, 1))
        _swap_out(holder, last)
        met: FaultRun = _ask(reader.meet.remote(_ask(writer.on_disk.remote(name))))
        found.append(met)
        _ask(writer.repair_from_disk.remote(name))
        _ask(reader.confirm_repaired.remote(name, met.position))
    return found


def _swap_out(holder: Any, request: bytes) -> None:
    done = wire.decode(_ask(holder.request.remote(request)))
    if not isinstance(done, Done) or done.refused is not None:
        raise EngineError(f"the fabric refused to write to disk: {done}")


def _link(status: dict[str, Any], runs: list[Run]) -> str:
    """The link over which the reader's holder really fetched."""
    source = next((s for run in runs for s in run.sources), "")
    used = [holder["link_of"][source] for holder in status["holders"] if source in holder.get("link_of", {})]
    return str(used[0]) if used else "none"


def _ask(reference: Any, timeout_s: float = STEP_TIMEOUT_S) -> Any:
    return ray_api.call(reference, timeout_s)
