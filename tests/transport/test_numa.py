"""Laws of the NUMA setting: the memory prefers the node for whoever touches it, threads stay there, and errors are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfabric.fabric.arena import ArenaLayout, PoolLayout
from kvfabric.fabric.kinds import SpecError
from kvfabric.transport import numa
from kvfabric.transport.memfd import ArenaMemory, map_read_only
from kvfabric.transport.numa import cpus_of, numa_nodes, stay_on

LAYOUT = ArenaLayout([PoolLayout(0, 0, 4, 4096)])

needs_numa = pytest.mark.skipif(not numa_nodes(), reason="this kernel tells of no NUMA node")


def policies(pid: int | str = "self") -> set[str]:
    """The memory policy of each mapping of an arena in a process."""
    lines = Path(f"/proc/{pid}/numa_maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[1] for line in lines if "kvfabric-arena" in line}


STAY = """
import os, sys, threading
from kvfabric.fabric.arena import ArenaLayout, PoolLayout
from kvfabric.transport.memfd import ArenaMemory
from kvfabric.transport.numa import stay_on
over = threading.Event()
threading.Thread(target=over.wait).start()
memory = ArenaMemory.create(ArenaLayout([PoolLayout(0, 0, 4, 4096)]), 1)
stay_on(int(sys.argv[1]), memory)
memory.arena.payload(0)[:] = 1
print({frozenset(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")} == {frozenset(eval(sys.argv[2]))})
print([l.split()[1] for l in open("/proc/self/numa_maps") if "kvfabric-arena" in l])
over.set()
"""


@needs_numa
def test_an_arena_prefers_the_node_and_every_thread_stays_there() -> None:
    node = numa_nodes()[-1]
    cpus = (cpus_of(node) or os.sched_getaffinity(0)) & os.sched_getaffinity(0)
    if not cpus:
        pytest.skip(f"this process may not run on any CPU of node {node}")
    ran = subprocess.run(
        [sys.executable, "-c", STAY, str(node), repr(cpus)], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"True\n['prefer:{node}']\n"


@needs_numa
def test_the_wish_is_the_memorys_own_and_holds_in_every_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    before = policies()
    memory = ArenaMemory.create(LAYOUT, 1)
    stay_on(numa_nodes()[0], memory)
    reader = map_read_only(memory.read_only_fd(), LAYOUT)
    lines = Path("/proc/self/numa_maps").read_text(encoding="utf-8").splitlines()
    mine = [line for line in lines if "kvfabric-arena" in line and f"prefer:{numa_nodes()[0]}" in line]
    assert len(mine) == 2
    assert before <= {"default", f"prefer:{numa_nodes()[0]}"}
    assert reader.incarnation == 1


@needs_numa
def test_a_node_that_is_not_there_is_named_with_those_that_are() -> None:
    memory = ArenaMemory.create(LAYOUT, 1)
    listed = ", ".join(map(str, numa_nodes()))
    with pytest.raises(SpecError, match=rf"transport\.numa_node: 1000 is no NUMA node .*\(there are: {listed}\)"):
        stay_on(1000, memory)


@needs_numa
def test_a_node_whose_cpus_are_not_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "cpus_of", lambda _: {9999})
    with pytest.raises(SpecError, match=r"transport\.numa_node: this process may not run on any CPU"):
        stay_on(numa_nodes()[0], ArenaMemory.create(LAYOUT, 1))


def test_lists_of_the_kernel_are_read() -> None:
    assert numa._numbers("0-3,8\n") == {0, 1, 2, 3, 8}
    assert numa._numbers("\n") == set()
