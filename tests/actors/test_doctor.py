"""``kvfabric doctor --json`` on set-ups that are really sick, each found by its own check with what to do about it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfabric
from kvfabric import Fabric
from kvfabric.actors import health
from kvfabric.ops.cli import main

from . import stories

NAME = "sick"


@pytest.fixture(scope="module")
def sick(fabric: Fabric, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    """A fabric of one holder, with a NIXL that cannot start and a file where its disk's folder should be."""
    in_the_way = tmp_path_factory.mktemp("sick") / "file"
    in_the_way.write_text("")
    spec = stories.spec(
        memory_bytes=1 << 20,
        node_resource="kvfabric_node_0",
        transport={"links": ["nixl", "tcp"], "nixl_backend": "NO_SUCH_BACKEND"},
        disk={"path": str(in_the_way), "free_floor_bytes": 0},
    )
    with kvfabric.launch(spec, name=NAME) as running:
        yield running


def told(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit status, and by check what is not in order."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json", "--fabric", NAME])
    found = json.loads(capsys.readouterr().out)
    status = int(ended.value.code or 0)
    assert found["healthy"] == (status == 0)
    return status, {finding["check"]: finding for finding in found["findings"] if finding["level"] != "ok"}


@pytest.fixture
def bypassed(sick: Fabric) -> Iterator[None]:
    sick.bypass(True)
    yield
    sick.bypass(False)


@pytest.fixture
def clock_wrong(sick: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() - 60)


@pytest.fixture
def nice(sick: Fabric) -> None:
    """For good: who may not be less nice again cannot put it back."""
    pid = sick.status()["holders"][0]["pid"]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), 5)


@pytest.fixture
def other_release(sick: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = health.versions()
    monkeypatch.setattr(health, "versions", lambda: mine | {"ray": "1.0"})


@pytest.fixture
def as_it_is(sick: Fabric) -> None:
    """Its link and its disk are always sick."""


SET_UPS = [
    ("as_it_is", ("links", "warn", "nixl is not used", "pip show nixl")),
    ("as_it_is", ("disk", "fail", "Not a directory", "mount and permissions")),
    ("bypassed", ("grants", "warn", "answers recompute", "bypass off")),
    ("clock_wrong", ("clocks", "warn", "60 s apart", "NTP")),
    ("other_release", ("versions", "fail", "(here 1.0)", "same releases")),
    ("nice", ("ray_settings", "warn", "nice 5", "RAY_worker_niceness=0")),
]
"""What makes it so, and what is told: check, level, words of the detail and of the remedy."""


@pytest.mark.parametrize(("set_up", "expected"), SET_UPS, ids=[check for _, (check, *_) in SET_UPS])
def test_a_sick_set_up_is_found_by_its_check_and_no_other_with_a_remedy(
    set_up: str,
    expected: tuple[str, str, str, str],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request.getfixturevalue(set_up)
    check, level, detail, remedy = expected
    status, found = told(capsys)
    assert found.keys() == {"links", "disk", check}
    assert (found[check]["level"], status) == (level, 1), "its disk fails in any case"
    assert detail in found[check]["detail"]
    assert remedy in found[check]["remedy"]
