"""``kvfabric scenario``: what it prints and how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "cases"
GOOD = CASES / "a05-lease-outlives-its-time.yaml"
PARALLEL = CASES / "a11-two-loads-one-pool.yaml"


def kvfabric(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvfabric.ops.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def spoilt(tmp_path: Path, old: str, new: str) -> Path:
    path = tmp_path / "spoilt.yaml"
    text = GOOD.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


def test_a_run_prints_one_json_line_a_file() -> None:
    ran = kvfabric("scenario", "run", "--json", GOOD, PARALLEL)
    assert ran.returncode == 0
    assert not ran.stderr
    first, second = map(json.loads, ran.stdout.splitlines())
    assert list(first) == ["scenario", "passed", "cluster", "steps"]
    assert first["scenario"] == "a reader comes back after its lease ended and the slots were reused"
    assert first["passed"] is True
    assert first["cluster"] is None
    assert [step["step"] for step in first["steps"]] == list(range(1, 9))
    assert first["steps"][2] == {
        "step": 3,
        "verb": "store",
        "expected": {"refused": "admission_limit"},
        "got": {"refused": "admission_limit"},
        "passed": True,
    }
    assert first["steps"][0] == {"step": 1, "verb": "store", "expected": None, "got": {"ok": True}, "passed": True}
    both = second["steps"][2]
    assert both["verb"] == "parallel"
    assert both["expected"] == [{"tokens": 80}, {"tokens": 64}]
    assert [got["tokens"] for got in both["got"]] == [80, 64]


def test_a_wrong_expectation_exits_1(tmp_path: Path) -> None:
    bad = spoilt(tmp_path, "{refused: admission_limit}", "{ok: true}")
    ran = kvfabric("scenario", "run", "--json", GOOD, bad)
    assert ran.returncode == 1
    good, failed = map(json.loads, ran.stdout.splitlines())
    assert good["passed"] is True
    assert failed["passed"] is False
    assert [step["step"] for step in failed["steps"] if not step["passed"]] == [3]
    told = kvfabric("scenario", "run", GOOD, bad)
    assert told.returncode == 1
    assert "admission_limit" in told.stdout


def test_an_invalid_file_exits_2_and_does_not_hide_the_others(tmp_path: Path) -> None:
    bad = spoilt(tmp_path, "store: {at: n0, prompt: P", "store: {at: n7, prompt: P")
    ran = kvfabric("scenario", "run", "--json", bad, GOOD)
    assert ran.returncode == 2
    assert json.loads(ran.stdout)["passed"] is True
    assert ran.stderr == f"error: {bad}:8: steps[0].store.at: there is no node 'n7'\n"


def test_check_validates_and_runs_nothing(tmp_path: Path) -> None:
    wrong = spoilt(tmp_path, "{refused: admission_limit}", "{ok: true}")
    assert kvfabric("scenario", "check", GOOD, wrong).returncode == 0
    bad = spoilt(tmp_path, "advance:", "advances:")
    checked = kvfabric("scenario", "check", GOOD, bad)
    assert checked.returncode == 2
    assert f"{bad}:13: steps[3].advances: unknown verb" in checked.stderr
    assert f"{GOOD}: valid, 8 steps" in checked.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["scenario", "run"], "Missing argument"),
        (["scenario", "run", "--bogus", "x"], "No such option"),
        (["bogus"], "No such command"),
        (["scenario", "run", "nowhere.yaml"], "nowhere.yaml:1: cannot be read"),
        (["spec", "preset", "bogus"], "there is no 'bogus'"),
        (["spec", "show", "nowhere.yaml"], "nowhere.yaml: neither a file nor one of the presets"),
    ],
)
def test_a_users_mistake_is_one_line_and_exits_2(arguments: list[str], says: str) -> None:
    ran = kvfabric(*arguments)
    assert ran.returncode == 2
    assert says in ran.stderr
    lines = [line for line in ran.stderr.splitlines() if "cannot be loaded" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")


def test_help_and_version() -> None:
    assert kvfabric("--version").stdout.startswith("kvfabric 0.")
    assert "scenario" in kvfabric("--help").stdout
    assert kvfabric("scenario", "--help").returncode == 0
    assert kvfabric().returncode == 2


def test_scenarios_load_neither_ray_nor_torch_nor_nixl() -> None:
    code = (
        "import sys; from kvfabric.ops.cli import main\n"
        f"try: main(['scenario', 'run', {str(GOOD)!r}])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'ray', 'torch', 'nixl', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_a_spec_from_a_preset_is_a_model_that_loads(tmp_path: Path) -> None:
    printed = kvfabric("spec", "preset", "gemma3_270m", "--scale", "64")
    assert printed.returncode == 0
    path = tmp_path / "spec.yaml"
    path.write_text(printed.stdout)
    shown = kvfabric("spec", "show", path, "--json", "--tokens", "4096")
    assert shown.returncode == 0
    assert json.loads(shown.stdout)["bytes_at"]["tokens"] == 4096
