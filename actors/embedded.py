"""An embedded Ray cluster on this machine: for a laptop, the demo and the tests.

Its own temporary folder and ports, ended by the process that started it and with it: Ray's fate sharing
ends every process within seconds of a kill -9 of this one, and a sweeper (:mod:`.sweeper`) sees to it that
neither processes nor the folder stay behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..fabric.kinds import FabricError
from ..transport.nixl_settings import nixl_environment
from . import ray_api, sweeper

OBJECT_STORE_BYTES = 80 << 20
SWEEP_TIMEOUT_S = 20.0
START_TIMEOUT_S = 120.0

_HEAD = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
"""No dashboard, no autoscaler, nobody who tails logs for a driver that asks for none: two processes fewer."""


class EmbeddedCluster:
    """A running embedded cluster; this process is connected to it as a driver.

    A process has one at a time, as it has one connection to Ray; the fabrics launched on it share it
    (``users``), and the last one that is shut down ends it.
    """

    current: EmbeddedCluster | None = None

    def __init__(self, object_store_bytes: int = OBJECT_STORE_BYTES) -> None:
        self._object_store_bytes = object_store_bytes
        self.users = 0
        self.node_ids: list[str] = []
        self._cluster: Any = None
        self.folder = tempfile.mkdtemp(prefix="kvf-", dir="/tmp")
        """The cluster's own; whatever lies in it goes with the cluster."""
        self._sweeper = subprocess.Popen(
            [sys.executable, "-I", "-S", sweeper.__file__, self.folder],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is not meant for it
        )
        atexit.register(self.close)

    @classmethod
    def start(cls, nodes: int, *, object_store_bytes: int = OBJECT_STORE_BYTES) -> EmbeddedCluster:
        """Start ``nodes`` nodes, each with so large an object store, and connect. Must run on the main thread (Ray installs a signal handler).

        Raises FabricError if Ray does not bring them up, as on a machine that is too busy for its 30 s a node.
        """
        made = cls(object_store_bytes)
        try:
            made._start(nodes)
        except BaseException as error:
            made.close()
            if isinstance(error, Exception):  # Ray raises bare ones here
                text = str(error).strip() or type(error).__name__
                raise FabricError(f"the embedded cluster did not start: {text.splitlines()[0]}") from error
            raise
        EmbeddedCluster.current = made
        return made

    def _start(self, nodes: int) -> None:
        Path(self.folder, "ray").mkdir()
        with self._environment(), _signals_kept(), ray_api.quiet():
            from ray.cluster_utils import Cluster

            self._cluster = Cluster()
            for number in range(nodes):
                self._start_node(f"kvfabric_node_{number}", **(_HEAD if number == 0 else {"wait": False}))
            self._cluster.wait_for_nodes(START_TIMEOUT_S)
            ray_api.ray().init(
                address=self._cluster.address,
                namespace=ray_api.NAMESPACE,
                log_to_driver=False,
                logging_level="CRITICAL",
            )
        order = {
            int(name.removeprefix("kvfabric_node_")): n.node
            for n in ray_api.nodes()
            for name in n.resources
            if name.startswith("kvfabric_node_")
        }
        self.node_ids = [order[i] for i in sorted(order)]

    def _start_node(self, resource: str, **options: Any) -> Any:
        return self._cluster.add_node(
            num_cpus=2, object_store_memory=self._object_store_bytes, resources={resource: 1}, **options
        )

    def add_node(self, resource: str) -> str:
        """Let another node join, which offers ``resource``; its Ray id."""
        with self._environment(), _signals_kept(), ray_api.quiet():
            return str(self._start_node(resource).node_id)

    def remove_node(self, node_id: str) -> None:
        """End a node that joined, and all its processes."""
        with self._environment(), ray_api.quiet():
            self._cluster.remove_node(next(n for n in self._cluster.worker_nodes if n.node_id == node_id))

    def close(self) -> None:
        """Disconnect, end every process of the cluster, remove its folder. Idempotent."""
        if EmbeddedCluster.current is self:
            EmbeddedCluster.current = None
        atexit.unregister(self.close)
        if self._sweeper.stdin is None or self._sweeper.stdin.closed:
            return
        try:
            with self._environment(), ray_api.quiet(), contextlib.suppress(OSError):
                if self._cluster is not None:
                    ray_api.ray().shutdown()
                    self._cluster.shutdown()
        finally:
            with contextlib.suppress(BrokenPipeError):  # somebody killed it
                self._sweeper.stdin.write(b"shut down")
                self._sweeper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on without us
                self._sweeper.wait(SWEEP_TIMEOUT_S)

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        """What the cluster's processes inherit, and Ray reads here, while they are started and ended.

        At no other time: a child of the user's would find this cluster where it means to start its own, and
        bear the mark by which the sweeper knows the cluster's processes.
        """
        wanted = {**nixl_environment(), **ray_api.environment()}
        wanted = {k: v for k, v in wanted.items() if k not in os.environ}
        wanted |= {"RAY_TMPDIR": self.folder, sweeper.MARK: self.folder}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray replaces the SIGTERM handler; a user's own is put back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, kept)
