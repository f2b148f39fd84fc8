"""The scripts for `ray start` hosts, and the command line in a Ray job: on a cluster of its own, as an operator would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfabric.actors import ray_api, sweeper
from kvfabric.transport.nixl_settings import nixl_environment

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ROOT / "examples" / "hosts"
KVFABRIC = [sys.executable, "-m", "kvfabric.ops.cli"]
SMALL = [f"--object-store-memory={80 << 20}", "--num-cpus=2"]
UP_WITHIN_S = 90.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Site:
    """Hosts on this machine, each a raylet that one of the scripts started."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.port, self.dashboard = free_port(), free_port()
        import ray

        self.host = str(ray.util.get_node_ip_address())
        self.env = {
            **os.environ,
            **nixl_environment(),
            **ray_api.environment(),
            "RAY_TMPDIR": folder,
            "RAY_PORT": str(self.port),
            sweeper.MARK: folder,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT.parent),
        }

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self, script: str, *options: str) -> subprocess.Popen[bytes]:
        command = [str(HOSTS / script), *options, *SMALL, f"--dashboard-agent-listen-port={free_port()}"]
        with Path(self.folder, f"{script}.log").open("wb") as log:
            return subprocess.Popen(command, env=self.env, stdout=log, stderr=log, start_new_session=True)

    def run(self, *command: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False)

    def kvfabric(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(*KVFABRIC, *words, "--address", self.address)

    def status(self) -> dict[str, Any]:
        ran = self.kvfabric("status", "--json")
        return dict(json.loads(ran.stdout)) if ran.returncode == 0 else {"holders": [], "drains": []}

    def job(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One command of ours as a job of the cluster."""
        submit = ["-m", "ray.scripts.scripts", "job", "submit", f"--address=http://127.0.0.1:{self.dashboard}", "--"]
        return self.run(sys.executable, *submit, *KVFABRIC, *words)


def until(what: str, look: Callable[[], Any]) -> Any:
    end = time.monotonic() + UP_WITHIN_S
    while not (seen := look()):
        assert time.monotonic() < end, what
        time.sleep(0.5)
    return seen


@pytest.fixture
def site() -> Iterator[Site]:
    folder = tempfile.mkdtemp(prefix="kvh-", dir="/tmp")
    Path(folder, "ray").mkdir()
    made = Site(folder)
    hosts: list[subprocess.Popen[bytes]] = []
    try:
        hosts.append(made.start("head.sh", f"--dashboard-port={made.dashboard}", f"--node-ip-address={made.host}"))
        until("the dashboard answers", lambda: _listens(made.dashboard))
        yield made
    finally:
        for host in hosts:
            host.kill()
            host.wait()
        sweeper.sweep(folder, 0.0)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
        return True
    return False


@pytest.mark.long
def test_hosts_join_serve_the_command_line_by_hand_and_by_job_and_leave(site: Site) -> None:
    missing = site.kvfabric("status", "--json")
    assert (missing.returncode, missing.stdout) == (3, ""), "no fabric yet"
    assert missing.stderr.count("\n") == 1
    up = site.kvfabric("up", str(ROOT / "examples" / "fabric.yaml"), "--json")
    assert up.returncode == 0, up.stderr
    assert len(json.loads(up.stdout)["holders"]) == 1
    worker = site.start("worker.sh", site.address)
    try:
        until("the second host's holder is up", lambda: len(site.status()["holders"]) == 2)
        told = site.job("status", "--json")
        assert told.returncode == 0, told.stdout + told.stderr
        found = [json.loads(line) for line in told.stdout.splitlines() if line.startswith('{"fabric"')]
        assert [len(one["holders"]) for one in found] == [2]
        absent = site.job("status", "--json", "--fabric", "nobody")
        assert absent.returncode != 0
        assert "error: no fabric 'nobody' runs on this cluster" in absent.stdout
        worker.send_signal(signal.SIGTERM)
        until(
            "the fabric hears of it",
            lambda: [d["why"] for d in site.status()["drains"]] or len(site.status()["holders"]) == 1,
        )
    finally:
        worker.kill()
        worker.wait()
    down = site.kvfabric("down", "--json")
    assert (down.returncode, json.loads(down.stdout)["down"]) == (0, True)
