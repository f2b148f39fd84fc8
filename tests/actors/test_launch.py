"""Launching: on a user's own Ray cluster, and what is said where something cannot start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvfabric
from kvfabric import Fabric, FabricError, SpecError
from kvfabric.actors import ray_api
from kvfabric.actors.addresses import actor_name, prefix_of
from kvfabric.actors.fabric import fabrics

from .stories import spec

OWN_CLUSTER = """
import numpy as np
import ray

import kvfabric

GROUPS = [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 4096}]

ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
spec = {"model": {"groups": GROUPS}, "memory_bytes": 1 << 20,
        "transport": {"links": ["nixl", "tcp"], "nixl_backend": "NO_SUCH_BACKEND"}}
with kvfabric.launch(spec) as fabric, kvfabric.connect() as session:
    tokens = list(range(40))
    assert session.publish(tokens, {"kv": {i: np.full(4096, i, np.uint8) for i in range(2)}}).ok
    answer = session.acquire(tokens)
    print(answer.status, answer.tokens, fabric.status()["holders"][0]["links"])
    answer.cancel()
assert ray.is_initialized()  # the cluster is the user's
print(len(ray.util.list_named_actors(all_namespaces=True)), "actors are left")
answer = session.acquire(tokens)
print(answer.status, answer.cause.reason)
"""


def test_on_a_users_own_cluster_a_fabric_comes_and_goes_and_a_dead_link_is_named_once(tmp_path: Path) -> None:
    script = tmp_path / "own_cluster.py"
    script.write_text(OWN_CLUSTER)
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["FULL_HIT 32 ['tcp']", "0 actors are left", "MISS holder_lost"]
    assert re.fullmatch(r"fabric default: link nixl is not used: unavailable: NIXL.*NO_SUCH_BACKEND.*\n", ran.stderr), (
        ran.stderr
    )


def test_a_spec_that_no_node_can_hold_is_refused_in_one_line_and_leaves_nothing(fabric: Fabric) -> None:
    greedy = spec(memory_bytes=1 << 42, node_resource="kvfabric_node_0")
    with pytest.raises(
        FabricError, match=r"fabric 'greedy': not up after .* memory_bytes, host_memory_bytes, slots: an arena of"
    ) as said:
        kvfabric.launch(greedy, name="greedy", timeout_s=60.0)
    assert "\n" not in str(said.value)
    with pytest.raises(FabricError, match="no fabric 'greedy' runs"):
        kvfabric.connect("greedy")


def test_a_fabric_that_finds_no_node_says_so(fabric: Fabric) -> None:
    with pytest.raises(FabricError, match="'nowhere': not up after 2 s: no node takes a holder"):
        kvfabric.launch(spec(node_resource="no_such_resource"), name="nowhere", timeout_s=2.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_bytes": 1}, "memory_bytes"),
        ({"slots": {"kv": 3}}, "slots.kv: the model has no such group"),
        ({"transport": {"links": ["carrier_pigeon"]}}, "links"),
        ({"transport": {"nixl_backend": "UCX, POSIX"}}, "transport.nixl_backend"),
        ({"transport": {"nixl_transports": "tcp lo"}}, "transport.nixl_transports"),
        ({"transport": {"network_devices": "eth0;reboot"}}, "transport.network_devices"),
        ({"transport": {"numa_node": -1}}, "transport.numa_node"),
        ({"transport": {"numa_node": [0, 1]}}, "transport.numa_node: 2 are named for 1 holders a node"),
        ({"holders_per_node": 3}, "holders_per_node"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_bad_spec_is_refused_before_anything_starts(change: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        kvfabric.launch(spec(**change), name="bad")


def test_a_spec_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no_such\.yaml"):
        kvfabric.launch(tmp_path / "no_such.yaml")


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-a", "a/b", "a/supervisor", "a b", "ü", "a" * 65, "a\n"])
def test_a_name_that_could_be_taken_for_another_fabrics_process_or_folder_is_refused_everywhere(name: str) -> None:
    with pytest.raises(SpecError, match="name: "):
        kvfabric.launch(spec(), name=name)
    with pytest.raises(SpecError, match="name: "):
        actor_name(name, "supervisor")


def test_no_fabrics_processes_are_among_anothers_however_their_names_begin() -> None:
    names = ["a", "a-b", "a.b", "a_supervisor", "a-supervisor", "A", "supervisor", "a-directory", "0"]
    processes = {n: [actor_name(n, "supervisor"), actor_name(n, "directory:0", 1)] for n in names}
    for name in names:
        found = [p for of_one in processes.values() for p in of_one if p.startswith(prefix_of(name))]
        assert found == processes[name]


def test_a_fabric_beside_one_whose_name_begins_like_its_own_comes_and_goes_alone(fabric: Fabric) -> None:
    before = {h["address"]: h["pid"] for h in fabric.status()["holders"]}
    beside = kvfabric.launch(spec(memory_bytes=1 << 20, node_resource="kvfabric_node_0"), name="default-b")
    assert {"default", "default-b"} <= set(fabrics())
    assert len(beside.status()["holders"]) == 1
    assert not {h["pid"] for h in beside.status()["holders"]} & set(before.values())
    ray_api.kill(beside._supervisor)  # so that what it left is found by its names
    beside.shutdown()
    assert "default-b" not in fabrics()
    assert ray_api.named_actors(prefix_of("default-b")) == {}
    assert {h["address"]: h["pid"] for h in fabric.status()["holders"]} == before
