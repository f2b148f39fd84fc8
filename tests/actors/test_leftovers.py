"""Whatever ends a driver, nothing of it stays: no process, no file, no shared memory; and the terminal stays clean.

Clusters of their own, each a driver's in a child process.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from kvfabric.actors.sweeper import marked

from .stories import eventually

pytestmark = pytest.mark.faults

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY_TOLERANCE_KB = 4096

DRIVER = """
import subprocess, sys
import numpy as np
import kvfabric

GROUPS = [
    {"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 1 << 20},
    {"name": "swa", "kind": "sliding_window", "block_tokens": 16, "window_tokens": 32, "block_bytes": 4096},
]
spec = {"model": {"name": "m", "groups": GROUPS}, "memory_bytes": 32 << 20, "transport": {"links": ["nixl", "tcp"]}}
fabric = kvfabric.launch(spec, nodes=int(sys.argv[1]))
session = kvfabric.connect()
tokens = list(range(300))
objects = {g.name: {i: np.full(g.block_bytes, i, np.uint8) for i in range(18)} for g in session.model.groups}
assert session.publish(tokens, objects).ok
lease = session.acquire(tokens).lease
attempt = session.begin(tokens, {"kv": [0]}, replace=True)
child = subprocess.run(["env"], capture_output=True, text=True).stdout
print("folder", fabric._embedded.folder)
print("holders", *(h["pid"] for h in fabric.status()["holders"]))
print("marked", child.count(fabric._embedded.folder))  # a user's own processes know nothing of the cluster
print("ready", lease.tokens, flush=True)
sys.stdin.readline()
"""


def shared_memory_kb() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))


def arenas(pids: Iterable[int] | None = None) -> set[str]:
    """Which arenas these processes (default: all) have mapped or open, by the inode of the memory file."""
    everybody = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    found = set()
    for pid in everybody if pids is None else pids:
        process = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):  # it ended meanwhile
            for line in (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
                if "kvfabric-arena" in line:
                    found.add(line.split()[4])
            for descriptor in (process / "fd").iterdir():
                if "kvfabric-arena" in str(descriptor.readlink()):
                    found.add(str(descriptor.stat().st_ino))
    return found


@dataclass
class Before:
    """The machine before a driver started."""

    shm: set[str] = field(default_factory=lambda: {p.name for p in Path("/dev/shm").iterdir()})
    arenas: set[str] = field(default_factory=arenas)
    shared_kb: int = field(default_factory=shared_memory_kb)


@dataclass
class Driver:
    """A child that launched a fabric and waits."""

    process: subprocess.Popen[str]
    folder: str
    holders: list[int]
    before: Before
    arenas: set[str] = field(default_factory=set)

    def nothing_is_left(self, within_s: float = 20.0) -> None:
        eventually(lambda: marked(self.folder), lambda pids: not pids, within_s)
        eventually(lambda: Path(self.folder).exists(), lambda there: not there, within_s)
        eventually(lambda: arenas() & self.arenas, lambda left: not left, within_s)
        eventually(lambda: {p.name for p in Path("/dev/shm").iterdir()} - self.before.shm, lambda new: not new)
        if not self.before.arenas and not arenas():  # nobody else runs a fabric on this machine
            eventually(shared_memory_kb, lambda kb: kb <= self.before.shared_kb + SHARED_MEMORY_TOLERANCE_KB)


def _lines(stream: IO[str], until: str) -> dict[str, list[str]]:
    told: dict[str, list[str]] = {}
    for line in stream:
        key, *rest = line.split()
        told[key] = rest
        if key == until:
            return told
    raise AssertionError(f"the driver ended early: {told}")


@pytest.fixture
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    before = Before()
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    process = subprocess.Popen(
        [sys.executable, script, str(getattr(request, "param", 1))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its own group, as at a terminal: a Ctrl-C reaches all of it
    )
    assert process.stdout is not None
    told = _lines(process.stdout, "ready")
    assert told["marked"] == ["0"]
    holders = [int(pid) for pid in told["holders"]]
    yield Driver(process, told["folder"][0], holders, before, arenas([*holders, process.pid]))
    process.kill()
    process.communicate()


@pytest.mark.parametrize("driver", [2], indirect=True)
def test_nothing_is_left_after_kill_9_of_holders_and_of_the_driver(driver: Driver) -> None:
    assert len(driver.holders) == 2
    assert set(driver.holders) <= set(marked(driver.folder))
    assert len(driver.arenas) == 2
    assert driver.arenas <= arenas()  # there is something that could be left
    for pid in driver.holders:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)  # their successors may be starting: the driver dies in the middle of that
    driver.process.kill()
    driver.process.communicate(timeout=20)
    driver.nothing_is_left()


def test_sigterm_ends_everything_in_silence(driver: Driver) -> None:
    driver.process.terminate()
    _, errors = driver.process.communicate(timeout=20)
    assert (driver.process.returncode, errors) == (-signal.SIGTERM, "")
    driver.nothing_is_left()


def test_a_driver_that_just_ends_leaves_nothing_and_says_nothing(driver: Driver) -> None:
    out, errors = driver.process.communicate("\n", timeout=30)
    assert (driver.process.returncode, out, errors) == (0, "", "")
    driver.nothing_is_left(within_s=2.0)


@pytest.mark.parametrize(
    "moment", [pytest.param("while the cluster starts", marks=pytest.mark.long), "while it is used"]
)
def test_ctrl_c_of_the_quickstart_is_silent_and_leaves_nothing(moment: str, tmp_path: Path) -> None:
    before = Before()
    process = subprocess.Popen(
        [sys.executable, ROOT / "examples" / "quickstart.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    folder = eventually(lambda: _folder_of(process.pid), bool, within_s=30.0)
    if moment == "while it is used":
        assert process.stdout.readline().startswith("launched")
        assert process.stdout.readline().startswith("node 0 has a prompt")
    else:
        eventually(lambda: marked(folder), lambda pids: len(pids) >= 2)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    Driver(process, folder, [], before).nothing_is_left()


def _folder_of(driver_pid: int) -> str:
    """The folder of the cluster a process starts: its sweeper was told of it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if re.search(rf"^PPid:\s+{driver_pid}$", (entry / "status").read_text(), re.MULTILINE):
                    arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                    if any(a.endswith("sweeper.py") for a in arguments):
                        return arguments[-2]
    return ""
