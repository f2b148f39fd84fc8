"""A fabric whose nodes are upgraded one by one: run as a process of its own, prints what happened as JSON.

    python upgrade_story.py FOLDER      where a copy of this package lies that is its next version

The first node runs this version to the end; the second is emptied, taken away, and comes back with the next version,
which speaks a later schema of records and has settings that this one lacks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

TOKENS, LATER = list(range(65)), list(range(100, 165))
SPEC: dict[str, Any] = {
    "model": {
        "name": "upgraded",
        "groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 4096}],
    },
    "memory_bytes": 1 << 20,
    "metrics_every_s": 0,
}
NEXT = """
import json, sys, time
import ray
import kvfabric
from kvfabric.actors import fabric as doors, ray_api

ray.init(address=sys.argv[1], namespace=ray_api.NAMESPACE, log_to_driver=False, logging_level="CRITICAL")
spec = json.loads(sys.argv[2])
told = {}
with kvfabric.launch({**spec, "novel": 7}, name="next") as fabric:
    told["passed_over"] = sorted(map(tuple, (h["settings_passed_over"] for h in fabric.health().values())))
    told["novel"] = fabric.info().spec.novel
with kvfabric.connect("upgraded") as session:
    tokens = list(range(65))
    answer = session.acquire(tokens)
    told["beside_a_holder_of_the_version_before"] = [str(answer.status), answer.tokens]
    answer.lease.release()
running = doors.attach("upgraded")
for _ in range(100):
    if not running.leases():
        break
    time.sleep(0.05)
told["leases_left"] = len(running.leases())
try:
    kvfabric.launch({**spec, "vital": 1}, name="refused", timeout_s=20)
except kvfabric.FabricError as error:
    told["refused"] = str(error)
print(json.dumps(told))
"""
"""What a driver of the next version does."""


class Engine:
    """What runs a model on one node, of whatever version lies there."""

    def version(self) -> int:
        from kvfabric.fabric import wire

        return wire.SCHEMA

    def store(self, tokens: list[int]) -> bool:
        import numpy as np

        import kvfabric

        with kvfabric.connect("upgraded") as session:
            blocks = {i: np.full(4096, tokens[0] + i, np.uint8) for i in range(len(tokens) // 16)}
            return session.publish(tokens, {"kv": blocks}).ok

    def resume(self, tokens: list[int]) -> list[Any]:
        """Status, tokens, the first byte of each block."""
        import kvfabric

        with kvfabric.connect("upgraded") as session:
            end = time.monotonic() + 10.0
            while not session.probe(tokens).tokens and time.monotonic() < end:
                time.sleep(0.05)
            answer = session.acquire(tokens)
            if answer.lease is None:
                return [str(answer.status), 0, str(answer.cause)]
            with answer.lease as lease, lease.read("kv") as view:
                return [str(answer.status), answer.tokens, [int(view[i][0]) for i in range(len(tokens) // 16)]]


def story(later: str) -> dict[str, Any]:
    import ray

    import kvfabric

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    told: dict[str, Any] = {}
    with kvfabric.launch(SPEC, name="upgraded", nodes=2) as fabric:
        cluster = fabric.embedded
        assert cluster is not None

        def on(resource: str) -> Any:
            return ray.remote(Engine).options(num_cpus=0, resources={resource: 0.1}).remote()

        stays, goes = on("kvfabric_node_0"), on("kvfabric_node_1")
        told["stored"] = ray.get(goes.store.remote(TOKENS))
        leaving = cluster.node_ids[1]
        told["drained"] = fabric.drain(leaving, deadline_s=10.0)["dropped_objects"]
        ray.kill(goes)
        cluster.remove_node(leaving)
        before, os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"], later
        cluster.add_node("kvfabric_node_2")
        os.environ["PYTHONPATH"] = before
        upgraded = on("kvfabric_node_2")
        end = time.monotonic() + 60.0
        while len([m for m in fabric.info().members if m.shards]) < 2 and time.monotonic() < end:
            time.sleep(0.2)
        told["schemas"] = sorted(m.schema for m in fabric.info().members if m.shards)
        told["clients"] = ray.get([stays.version.remote(), upgraded.version.remote()])
        told["resumed_by_the_next"] = ray.get(upgraded.resume.remote(TOKENS), timeout=60)
        told["stored_by_the_next"] = ray.get(upgraded.store.remote(LATER), timeout=60)
        told["resumed_by_this"] = ray.get(stays.resume.remote(LATER), timeout=60)
        driver = [sys.executable, "-c", NEXT, ray.get_runtime_context().gcs_address, json.dumps(SPEC)]
        ran = subprocess.run(
            driver, env=os.environ | {"PYTHONPATH": later}, capture_output=True, text=True, timeout=120, check=False
        )
        told["next"] = json.loads(ran.stdout) if ran.returncode == 0 else ran.stderr[-2000:]
    return told


if __name__ == "__main__":
    sys.stdout.write(json.dumps(story(sys.argv[1])) + "\n")
