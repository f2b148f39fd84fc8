"""Laws of NIXL's start and end: a reason where it cannot start, quiet exits, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvfabric.transport import nixl_settings
from kvfabric.transport.nixl_settings import NixlSettings, child_environment, nixl_environment, rdma_devices

PRELUDE = """
import json, os, sys
from kvfabric.fabric.arena import ArenaLayout, PoolLayout
from kvfabric.transport.link import LinkError
from kvfabric.transport.memfd import ArenaMemory
from kvfabric.transport.nixl_settings import NixlSettings, child_environment, nixl_environment
for name, value in nixl_environment().items():
    os.environ.setdefault(name, value)
from kvfabric.transport.nixl_link import NixlLink
memory = ArenaMemory.create(ArenaLayout([PoolLayout(0, 0, 4, 4096)]), 1)

def start(**settings):
    return NixlLink.start(memory.arena, holder="h", incarnation=1, suffix="s", settings=NixlSettings(**settings))

def tell(**what):
    print(json.dumps(what), flush=True)
"""


def run(script: str, **environment: str) -> tuple[Any, str]:
    """What a child told, and what it wrote to stderr; it must end with status 0."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_an_agent_is_named_by_its_incarnation_and_ends_without_noise() -> None:
    told, noise = run("""
link = start()
tell(agent=link.region().address["agent"], torch="torch" in sys.modules)
link.close()
os._exit(0)
""")
    assert told["agent"] == "h@1@s"
    assert noise == ""
    # The meta package asks torch for the CUDA version; where there is no GPU it is not asked.
    assert told["torch"] is Path("/dev/nvidiactl").exists()


@pytest.mark.skipif(
    bool(rdma_devices()), reason="where there is RDMA its library stays loaded, and exits are by os._exit"
)
def test_a_process_with_an_agent_exits_normally_in_the_environment_given() -> None:
    _, noise = run("link = start()\ntell(ok=not isinstance(link, LinkError))\n")
    assert noise == ""


def test_a_backend_that_is_not_there_is_a_reason_not_a_crash() -> None:
    told, _ = run("""
error = start(backend="CARRIER_PIGEON")
tell(failure=error.failure, detail=error.detail)
os._exit(0)
""")
    assert told["failure"] == "unavailable"
    assert "CARRIER_PIGEON" in told["detail"]


def test_a_device_that_is_not_there_is_a_reason_not_a_crash() -> None:
    told, _ = run(
        "error = start()\ntell(failure=error.failure, detail=error.detail)\nos._exit(0)\n",
        UCX_TLS="tcp",
        UCX_NET_DEVICES="nosuch0",
    )
    assert told["failure"] == "unavailable"
    assert "does not start" in told["detail"]


def test_a_missing_library_is_a_reason_that_names_what_was_tried() -> None:
    told, _ = run("""
for name in ("nixl", "nixl_cu12", "nixl_cu13"):
    sys.modules[name] = None
error = start()
tell(failure=error.failure, detail=error.detail)
""")
    assert told["failure"] == "unavailable"
    for name in ("nixl:", "nixl_cu12:", "nixl_cu13:"):
        assert name in told["detail"]


def test_kill_9_of_a_process_with_an_agent_leaves_no_shared_memory(tmp_path: Path) -> None:
    script = PRELUDE + "link = start()\ntell(ok=not isinstance(link, LinkError))\nsys.stdin.read()\n"
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "UCX_POSIX_DIR": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    with child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline()) == {"ok": True}
        child.kill()
    creators = [line.split()[4] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    assert str(child.pid) not in creators
    assert not list(tmp_path.iterdir())


def test_the_environment_bounds_waits_and_keeps_rdma_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_settings, "INFINIBAND", tmp_path / "infiniband")
    environment = nixl_environment(NixlSettings(transports="tcp", devices="eth0"))
    assert environment["UCX_MODULES"] == "^ib"
    assert environment["UCX_TLS"] == "tcp"
    assert environment["UCX_NET_DEVICES"] == "eth0"
    assert nixl_settings.TIMEOUTS.items() <= environment.items()
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    environment = nixl_environment()
    assert rdma_devices() == ["mlx5_0"]
    assert environment.keys().isdisjoint({"UCX_MODULES", "UCX_TLS", "UCX_NET_DEVICES"})


def test_what_the_settings_name_wins_over_the_environment_and_that_over_the_defaults() -> None:
    inherited = {"UCX_TLS": "shm", "UCX_TCP_KEEPCNT": "9", "PATH": "p"}
    named = child_environment(NixlSettings(transports="tcp", devices="lo"), inherited)
    assert {name: named[name] for name in ("UCX_TLS", "UCX_NET_DEVICES", "UCX_TCP_KEEPCNT", "PATH")} == {
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "lo",
        "UCX_TCP_KEEPCNT": "9",
        "PATH": "p",
    }
    unnamed = child_environment(NixlSettings(), inherited)
    assert unnamed["UCX_TLS"] == "shm"
    assert "UCX_NET_DEVICES" not in unnamed
    assert unnamed["UCX_TCP_KEEPIDLE"] == "1s"
