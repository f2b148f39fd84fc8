"""Which GPU a holder takes: by UUID, the same one in every life."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvfabric.actors import ray_api
from kvfabric.actors.gpu import gpu_of, gpu_uuids
from kvfabric.fabric.kinds import SpecError


class Driver:
    """What nvidia-smi tells on this node, and what Ray keeps."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._program = folder / "nvidia-smi"
        self.kept: dict[str, bytes] = {}
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(ray_api, "kept", self.kept.get)
        monkeypatch.setattr(ray_api, "keep", self.kept.__setitem__)

    def tells(self, *uuids: str, status: int = 0) -> None:
        lines = "".join(f"echo {uuid}\n" for uuid in uuids)
        self._program.write_text(f"#!/bin/sh\n{lines}exit {status}\n")
        self._program.chmod(0o755)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(tmp_path, monkeypatch)


def test_a_holder_keeps_its_gpu_when_another_drops_off_the_bus(driver: Driver) -> None:
    driver.tells("GPU-a", "GPU-b", "GPU-c")
    assert [gpu_of("f", f"holder:n:{place}") for place in range(3)] == ["GPU-a", "GPU-b", "GPU-c"]
    driver.tells("GPU-b", "GPU-c")
    assert gpu_of("f", "holder:n:1") == "GPU-b"
    with pytest.raises(SpecError, match="bound to GPU-a, which this node has no more"):
        gpu_of("f", "holder:n:0")
    assert gpu_of("other", "holder:n:0") == "GPU-b", "another fabric binds anew"


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_a_place_without_a_gpu_is_told_and_where_the_tool_fails_cuda_is_asked(driver: Driver) -> None:
    driver.tells("GPU-a")
    with pytest.raises(SpecError, match="needs GPU number 1, this node has 1"):
        gpu_of("f", "holder:n:1")
    driver.tells(status=9)
    assert gpu_uuids() == [], "CUDA is asked where the driver's tool fails; there is none here"
