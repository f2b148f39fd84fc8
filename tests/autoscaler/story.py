"""A cluster whose nodes Ray's autoscaler adds and takes: run as a process of its own, prints what happened as JSON.

    python story.py VERSION     1 or 2: the autoscaler's

An engine needs a node: one comes, a holder runs on it within seconds and serves. The engine goes: what is worth
keeping moves off, the holder ends, the autoscaler takes the node, and what the engine stored is served elsewhere.
Then stores are refused for want of room: the fabric asks for a node. Ray is told that it will be preempted: its state
moves off in time, and what was asked for is withdrawn once it is calm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HEAD_ID = hashlib.sha256(b"head").hexdigest()[:56]
IDLE_S = 4.0
NODE_IDLE_MINUTES = 0.05
TIMEOUT_S = 90.0
TOKENS, LATER = list(range(65)), list(range(1000, 1065))
TOO_LARGE = list(range(16 * 400))
LISTS = (
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
"""What the autoscaler's schema asks for and these nodes need not."""


def config_of(gcs: str, version: int) -> dict[str, Any]:
    provider = {
        "type": "external",
        "module": "fake_provider.FakeNodes",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "gcs_address": gcs,
        "head_node_id": HEAD_ID,
        **({"launch_multiple": True} if version == 2 else {}),
    }
    worker = {"CPU": 1, "kvf": 1, "object_store_memory": 80 << 20}
    return {
        "cluster_name": "kvfabric-test",
        "max_workers": 2,
        "idle_timeout_minutes": NODE_IDLE_MINUTES,
        "upscaling_speed": 1.0,
        "provider": provider,
        "auth": {},
        "docker": {},
        "available_node_types": {
            "ray.head.default": {"resources": {"kvf": 1}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        "head_node_type": "ray.head.default",
        "file_mounts": {},
        **dict.fromkeys(LISTS, ()),
    }


@contextlib.contextmanager
def cluster(version: int) -> Iterator[str]:
    """A head with an autoscaler; its address. Ends every process of it, and removes its folder."""
    from kvfabric.actors import ray_api, sweeper
    from kvfabric.transport.nixl_settings import nixl_environment

    folder = tempfile.mkdtemp(prefix="kva-", dir="/tmp")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    host = ray_host()
    config = Path(folder, "autoscaler.json")
    config.write_text(json.dumps(config_of(f"{host}:{port}", version)))
    Path(folder, "ray").mkdir()
    os.environ.update({**nixl_environment(), **ray_api.environment(), "RAY_TMPDIR": folder})
    env = {
        **os.environ,
        sweeper.MARK: folder,
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **({"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID} if version == 2 else {}),
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--num-cpus=0", '--resources={"kvf": 1}', f"--autoscaling-config={config}", "--include-dashboard=false"]
    command += [f"--object-store-memory={80 << 20}", f"--node-ip-address={host}"]
    with Path(folder, "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        until("the head listens", lambda: listens(host, port))
        yield f"{host}:{port}"
    finally:
        if os.environ.get("KEEP"):
            shutil.copytree(
                folder, os.environ["KEEP"], dirs_exist_ok=True, ignore=shutil.ignore_patterns("sockets", "*.sock")
            )
        head.kill()
        head.wait()
        sweeper.sweep(folder, 0.0)


def ray_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 0.5):
        return True
    return False


def until(what: str, look: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    end = time.monotonic() + timeout_s
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() >= end:
            raise TimeoutError(f"not so after {timeout_s:.0f} s: {what}")
        time.sleep(0.05)


SPEC = {
    "model": {
        "name": "scaled",
        "groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 4096}],
    },
    "memory_bytes": 1 << 20,
    "node_resource": "kvf",
    "scale": {
        "idle_s": IDLE_S,
        "drain_s": 5.0,
        "up": True,
        "bundle": {"kvf": 1.0},
        "refused_per_s": 0.5,
        "step_s": 1.0,
        "calm_s": 3.0,
        "nodes_max": 2,
    },
}


class Engine:
    """What runs a model on a node of its own, reduced to its session."""

    def serve(self, tokens: list[int]) -> tuple[str, str, int]:
        """Store a prompt and resume from it: this node, the status, tokens."""
        import numpy as np

        import kvfabric
        from kvfabric.actors import ray_api

        with kvfabric.connect("scaled") as session:
            blocks = {i: np.full(4096, i + 1, np.uint8) for i in range(len(tokens) // 16)}
            until("its holder takes a prompt", lambda: session.publish(tokens, {"kv": blocks}).ok)
            answer = session.acquire(tokens)
            assert answer.lease is not None
            with answer.lease:
                return ray_api.my_node(), str(answer.status), answer.tokens


def story(address: str) -> dict[str, Any]:
    import ray

    import kvfabric
    from kvfabric.actors import ray_api

    ray.init(address=address, namespace=ray_api.NAMESPACE, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    told: dict[str, Any] = {}
    with kvfabric.launch(SPEC, name="scaled") as fabric:
        alone = {n.node for n in ray_api.nodes()}
        asked_s = time.monotonic()
        engine: Any = ray.remote(Engine).options(num_cpus=1).remote()
        served = engine.serve.remote(TOKENS)
        node = until("a node comes", lambda: {n.node for n in ray_api.nodes()} - alone).pop()
        alive_s = time.monotonic()
        told["node_up_s"] = alive_s - asked_s
        until(
            "its holder grants", lambda: any(h.get("node") == node and h["grants"] for h in fabric.status()["holders"])
        )
        told["holder_serves_s"] = time.monotonic() - alive_s
        told["served"] = ray.get(served, timeout=TIMEOUT_S)
        told["on_the_new_node"] = told["served"][0] == node
        ray.kill(engine)
        gone_s = time.monotonic()
        until("the node is drained", lambda: node in fabric.status()["scaling"]["retired_nodes"])
        told["drain"] = next(d for d in fabric.status()["drains"] if d["node"] == node)
        until("the node is taken", lambda: node not in {n.node for n in ray_api.nodes()})
        told["node_gone_s"] = time.monotonic() - gone_s
        with kvfabric.connect("scaled") as session:
            answer = session.acquire(TOKENS)
            told["kept"] = [str(answer.status), answer.tokens]
            if answer.lease is not None:
                with answer.lease as lease, lease.read("kv") as view:
                    told["bytes"] = [int(view[i][0]) for i in range(len(TOKENS) // 16)]
        told["holders_left"] = len(fabric.status()["holders"])
        told |= under_pressure(fabric, address, alone)
    ray.shutdown()
    return told


def drained(fabric: Any, node: str) -> dict[str, Any] | None:
    """The report of a node's drain once it is over."""
    return next((d for d in fabric.status()["drains"] if d["node"] == node and d["over"]), None)


def under_pressure(fabric: Any, address: str, alone: set[str]) -> dict[str, Any]:
    """A node that the fabric asked for, and that is then preempted."""
    import numpy as np
    import ray

    import kvfabric
    from kvfabric.actors import ray_api

    told: dict[str, Any] = {}
    blocks = {i: np.zeros(4096, np.uint8) for i in range(len(TOO_LARGE) // 16)}
    with kvfabric.connect("scaled") as session:

        def refused() -> set[str]:
            told["refused"] = str(session.publish(TOO_LARGE, {"kv": blocks}).refused)
            return {n.node for n in ray_api.nodes()} - alone

        began_s = time.monotonic()
        node = until("a node comes under pressure", refused).pop()
        told["asked_node_up_s"] = time.monotonic() - began_s
        told["requested_nodes"] = fabric.status()["scaling"]["requested_nodes"]
        here = {"num_cpus": 1, "label_selector": {"ray.io/node-id": node}}
        engine: Any = ray.remote(Engine).options(**here).remote()
        told["served_there"] = ray.get(engine.serve.remote(LATER), timeout=TIMEOUT_S)[0] == node
        preempt = ["drain-node", f"--address={address}", f"--node-id={node}", "--reason=DRAIN_NODE_REASON_PREEMPTION"]
        preempt += ["--reason-message=spot", "--deadline-remaining-seconds=20"]
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *preempt], check=True, capture_output=True)
        told["preempted"] = until("the node is drained", lambda: drained(fabric, node))
        ray.kill(engine)
        answer = session.acquire(LATER)
        told["kept_of_preempted"] = [str(answer.status), answer.tokens, answer.moved_bytes]
        answer.cancel()
    until("what was asked for is withdrawn", lambda: fabric.status()["scaling"]["requested_nodes"] == 0)
    return told


if __name__ == "__main__":
    with cluster(int(sys.argv[1])) as at:
        try:
            sys.stdout.write(json.dumps(story(at)) + "\n")
        except BaseException:
            traceback.print_exc()  # at once: Ray ends this process where it finds its cluster gone
            raise
