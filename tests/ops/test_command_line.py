"""Every command has the same flags, ends with documented statuses, and the shell can complete them."""

from __future__ import annotations

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
