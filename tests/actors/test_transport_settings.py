"""The settings of transport reach the processes that they are for, and ``status`` tells what was chosen for each pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric, FabricError, Status
from kvfabric.transport.numa import numa_nodes

from .conftest import Away, holders
from .stories import eventually, objects, prompt, spec
from .test_supervision import resumed

NODES = ("kvfabric_node_0", "kvfabric_node_1")


def environment(pid: int) -> dict[str, str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)


def link_process(holder: dict[str, Any]) -> int:
    """The process that NIXL runs in; threads start it, so it may be a child of any."""
    tasks = Path(f"/proc/{holder['pid']}/task").glob("*/children")
    found = [int(child) for task in tasks for child in task.read_text().split()]
    return next(pid for pid in found if b"link_process" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.skipif(not numa_nodes(), reason="this kernel tells of no NUMA node")
def test_what_the_spec_names_is_what_the_holders_processes_have(fabric: Fabric, away: Away) -> None:
    node = numa_nodes()[0]
    transport = {
        "links": ["nixl", "tcp"],
        "nixl_backend": "UCX",
        "nixl_transports": "tcp",
        "network_devices": "lo",
        "numa_node": node,
    }
    with kvfabric.launch(spec(transport=transport, node_resource=NODES, memory_bytes=1 << 20), name="set") as running:
        for holder in holders(running):
            assert holder["link_problems"] == {}
            told = environment(link_process(holder))
            assert (told["UCX_TLS"], told["UCX_NET_DEVICES"]) == ("tcp", "lo")
            maps = Path(f"/proc/{holder['pid']}/numa_maps").read_text().splitlines()
            assert {line.split()[1] for line in maps if "kvfabric-arena" in line} == {f"prefer:{node}"}
        tokens = prompt("settings")
        with kvfabric.connect("set") as session:
            assert session.publish(tokens, objects(session.model, tokens)).ok
            told_there = eventually(lambda: away.do(resumed, tokens, "set"), lambda told: told[0] is not Status.MISS)
        assert told_there == (Status.FULL_HIT, 64, [])
        here, there = holders(running)
        assert there["link_of"] == {here["address"]: "nixl"}
        assert here["link_of"] == {}
    plain = environment(link_process(holders(fabric)[0]))
    assert "UCX_TLS" not in plain  # the control: nothing is set that nobody named


def test_a_network_device_that_is_not_there_is_a_problem_told_and_another_link_serves(fabric: Fabric) -> None:
    transport = {"links": ["nixl", "tcp"], "network_devices": "no_such_device"}
    brief = spec(transport=transport, node_resource=NODES[0], memory_bytes=1 << 20)
    with kvfabric.launch(brief, name="unset") as running:
        (holder,) = holders(running)
        assert holder["links"] == ["tcp"]
        assert list(holder["link_problems"]) == ["nixl"]


def test_a_numa_node_that_is_not_there_is_one_line_that_names_it(fabric: Fabric) -> None:
    far = spec(transport={"links": ["tcp"], "numa_node": 1000}, node_resource=NODES[0], memory_bytes=1 << 20)
    with pytest.raises(FabricError, match=r"transport\.numa_node: 1000 is no NUMA node") as said:
        kvfabric.launch(far, name="far", timeout_s=60.0)
    assert "\n" not in str(said.value)
