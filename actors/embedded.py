"""An embedded Ray cluster on this machine: for a laptop, the demo and the tests.

Its own temporary directory and ports, ended by the process that started it and with it: Ray's fate
sharing ends every process within seconds of a kill -9 of this one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

from ..transport.nixl_settings import nixl_environment
from . import ray_api

OBJECT_STORE_BYTES = 80 << 20


class EmbeddedCluster:
    """A running embedded cluster; this process is connected to it as a driver."""

    def __init__(self, cluster: Any, directory: str, node_ids: list[str]) -> None:
        self._cluster = cluster
        self._directory = directory
        self.node_ids = node_ids
        atexit.register(self.close)

    @classmethod
    def start(cls, nodes: int) -> EmbeddedCluster:
        """Start ``nodes`` nodes and connect. Must run on the main thread (Ray installs a signal handler)."""
        directory = tempfile.mkdtemp(prefix="kvf-", dir="/tmp")
        Path(directory, "ray").mkdir()
        for variable, value in {**ray_api.environment(directory), **nixl_environment()}.items():
            os.environ.setdefault(variable, value)
        os.environ["RAY_TMPDIR"] = directory
        with _signals_kept(), ray_api.quiet():
            from ray.cluster_utils import Cluster

            head = {
                "num_cpus": 2,
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "resources": {"kvfabric_node_0": 1},
            }
            cluster = Cluster(initialize_head=True, head_node_args=head)
            for number in range(1, nodes):
                cluster.add_node(
                    num_cpus=2,
                    object_store_memory=OBJECT_STORE_BYTES,
                    resources={f"kvfabric_node_{number}": 1},
                    wait=False,
                )
            cluster.wait_for_nodes()
            ray_api.ray().init(
                address=cluster.address,
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
        return cls(cluster, directory, [order[i] for i in sorted(order)])

    def close(self) -> None:
        """Disconnect and end every process of the cluster. Idempotent."""
        cluster, self._cluster = self._cluster, None
        if cluster is None:
            return
        atexit.unregister(self.close)
        with ray_api.quiet(), contextlib.suppress(OSError):
            ray_api.ray().shutdown()
            cluster.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)


@contextlib.contextmanager
def _signals_kept() -> Any:
    """Ray replaces the SIGTERM handler; a user's own is put back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, kept)
