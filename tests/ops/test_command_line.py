"""Every command has the same flags, ends with documented statuses, and the shell can complete them."""

from __future__ import annotations

import inspect
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfabric.ops import cli

ROOT = Path(__file__).resolve().parents[2]
KVFABRIC = [sys.executable, "-m", "kvfabric.ops.cli"]


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    inside = getattr(command, "commands", {})
    for name, one in inside.items():
        yield from leaves(one, (*path, name))
    if not inside:
        yield " ".join(path), command


COMMANDS = dict(leaves(cli.build("")))


def options(command: Any) -> set[str]:
    return {word for parameter in command.params for word in parameter.opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_what_it_has_to_tell_as_json(name: str) -> None:
    assert "--json" in options(COMMANDS[name])


def test_who_names_a_fabric_can_name_its_cluster() -> None:
    with_fabric = {name for name, command in COMMANDS.items() if "--fabric" in options(command)}
    assert {"status", "top", "drain", "purge", "weights advance", "doctor", "record", "explain"} <= with_fabric
    assert {name for name in with_fabric if "--address" not in options(COMMANDS[name])} == set()


def test_the_exit_statuses_are_those_of_the_page_of_operations() -> None:
    table = re.findall(r"^\| (\d+) \| ", (ROOT / "docs" / "operations.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(status) for status in table} == {cli.DONE, cli.FAILED, cli.USAGE, cli.UNREACHABLE, cli.INTERRUPTED}


def completed(words: str) -> list[str]:
    """What bash offers for the last of these words."""
    asked = {"_KVFABRIC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    ran = subprocess.run(KVFABRIC, env=os.environ | asked, capture_output=True, text=True, timeout=60, check=False)
    return ran.stdout.split()


def test_the_shell_completes_commands_subcommands_and_options() -> None:
    assert {"status", "top", "drain", "doctor"} <= set(completed("kvfabric "))
    assert completed("kvfabric weights a") == ["advance"]
    assert "--json" in completed("kvfabric top --")
    assert completed("kvfabric nothing-like-it x") == []


def test_no_number_on_the_command_line_is_endless() -> None:
    numbers = {
        f"{name} {option.opts[0]}": option.max
        for name, command in COMMANDS.items()
        for option in command.params
        if "float" in str(inspect.signature(command.callback).parameters[option.name].annotation)
    }
    assert {"plan --qps", "replay --disk-gib", "top --every", "drain --deadline-s"} <= set(numbers)
    assert {option: most for option, most in numbers.items() if most is None or not math.isfinite(most)} == {}


WRONG = {
    "config show {binary}": "{binary}: not UTF-8 text",
    "config show {broken}": "{broken}:2: ",
    "config show {absent}": "{absent}: cannot be read: No such file",
    "config show {typo}": "{typo}: memory_byte: unknown field",
    "up {typo}": "{typo}: memory_byte: unknown field",
    "config show {endless}": "{endless}: grant_s: Input should be a finite number",
    "spec show {typo} --tokens 0": "--tokens",
    "plan --preset full_attention --memory-gib inf": "--memory-gib",
    "replay --requests 2 --disk-gib inf": "--disk-gib",
    "replay --model absent": "absent: neither a file nor one of the presets",
    "replay --trace {deep}": "{deep}:1: not one JSON object",
    "replay --requests 1000000 --series /dev/null/series": "/dev/null/series: cannot be written",
    "spec from-hf {deep}": "{deep}: not JSON",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_is_told_in_one_line_that_names_it(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("absent", "binary", "broken", "deep", "endless", "typo")}
    model = "model: {groups: [{name: kv, kind: compressed_history, block_tokens: 16, block_bytes: 4096}]}\n"
    files["binary"].write_bytes(b"\xff\xfe")
    files["broken"].write_text("model: [\n")
    files["deep"].write_text("[" * 100_000)
    files["endless"].write_text(model + "grant_s: .inf\n")
    files["typo"].write_text(model + "memory_byte: 65536\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(line.format(**files).split())
    said = capsys.readouterr().err
    assert ended.value.code == cli.USAGE
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert WRONG[line].format(**files) in said


def test_an_address_at_which_no_cluster_listens_is_told_in_one_line() -> None:
    # In a process of its own: one that is connected to a cluster stays with it.
    ran = subprocess.run(
        [*KVFABRIC, "status", "--address", "127.0.0.1:1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == cli.UNREACHABLE
    assert ran.stderr.startswith("error: no Ray cluster is reached at '127.0.0.1:1'")
    assert ran.stderr.count("\n") == 1


def test_a_models_commands_take_the_spec_of_a_fabric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = "{name: kv, kind: compressed_history, block_tokens: 16, block_bytes: 4096}"
    (tmp_path / "fabric.yaml").write_text(f"model: {{groups: [{group}]}}\nmemory_bytes: 65536\n")
    (tmp_path / "model.yaml").write_text(f"groups: [{group}]\n")
    told = []
    for file in ("fabric.yaml", "model.yaml"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["spec", "show", str(tmp_path / file), "--json"])
        assert ended.value.code == cli.DONE
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert "grid_tokens" in told[0]
