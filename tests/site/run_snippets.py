"""Runs the documentation's blocks on one embedded cluster of two nodes: ``python run_snippets.py RESULTS.json PAGE...``.

Each page has a folder and a namespace of its own. The `kvfabric` command runs in this process, which is connected to
the cluster already; other commands go through bash. A page that begins while no fabric is up finds the quick start's,
and a fabric that a page leaves behind is the next one's.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvfabric.actors.embedded import EmbeddedCluster
from kvfabric.actors.fabric import fabrics, launch
from kvfabric.actors.spec import FabricSpec
from kvfabric.fabric.metrics import exported_series
from kvfabric.ops.cli import main

if TYPE_CHECKING:
    from .snippets import Block, agrees, blocks
else:  # a script has no package
    sys.path.insert(0, str(Path(__file__).parent))
    from snippets import Block, agrees, blocks

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "docs" / "quickstart.md"
SPEC = "spec.yaml"
SELF_STARTING = ("README.md", "docs/quickstart.md")
COMMAND_TIMEOUT_S = 60.0


class Page:
    """One page's blocks, run in order."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.folder = folder
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.printed = ""
        self.blocks = list(blocks(path, ROOT if path.is_relative_to(ROOT) else path.parent))

    def run(self) -> list[dict[str, Any]]:
        os.chdir(self.folder)
        results = []
        for block in self.blocks:
            told = {"where": block.where, "page": block.page, "language": block.language, "marks": block.marks}
            problem = None
            if "not run" not in block.marks:
                try:
                    problem = self.perform(block)
                except BaseException:  # noqa: BLE001 - whatever a snippet raises is its result
                    problem = traceback.format_exc()
            results.append(told | {"problem": problem, "printed": self.printed})
        return results

    def perform(self, block: Block) -> str | None:
        """What is wrong with the block, None if nothing is."""
        if "file" in block.marks:
            (self.folder / block.marks["file"]).write_text(block.body, encoding="utf-8")
            return None
        if block.language == "python":
            return self.python(block)
        if block.language == "console":
            return self.console(block)
        if block.language == "yaml":
            return settings(block)
        if block.language == "json":
            json.loads(block.body)
        if block.language == "promql":
            return series(block)
        if "prints" in block.marks and not agrees(block.body, self.printed):
            return f"printed:\n{self.printed}\nand not:\n{block.body}"
        return None

    def python(self, block: Block) -> str | None:
        out = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.body, block.page, "exec")
        with contextlib.redirect_stdout(out):
            exec(code, self.namespace)
        self.printed = out.getvalue()
        return None

    def console(self, block: Block) -> str | None:
        commands = block.commands()
        for number, (command, expected) in enumerate(commands, 1):
            status, out, err = run_command(command)
            self.printed = out
            wanted = int(block.marks.get("exit", "0")) if number == len(commands) else 0
            if status != wanted:
                return f"$ {command}\nended with {status}, not {wanted}:\n{out}{err}"
            if expected.strip() and not agrees(expected, out + err):
                return f"$ {command}\nprinted:\n{out}{err}\nand not:\n{expected}"
        return None


def run_command(command: str) -> tuple[int, str, str]:
    """Exit status, output and errors of one line; of a pipe that begins with `kvfabric` the first part runs here, too."""
    first, pipe, rest = command.partition(" | ")
    if shlex.split(first)[0] != "kvfabric":
        return in_bash(command, "")
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(shlex.split(first)[1:])
        except SystemExit as ended:
            status = ended.code or 0
    if status or not pipe:
        return int(status), out.getvalue(), err.getvalue()
    return in_bash(rest, out.getvalue())


def in_bash(command: str, stdin: str) -> tuple[int, str, str]:
    """The same of a line that is given some input."""
    ran = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    return ran.returncode, ran.stdout, ran.stderr


def settings(block: Block) -> str | None:
    """YAML without a file's name is a part of a fabric's spec: with the quick start's model it must load."""
    FabricSpec.load(base() | yaml.safe_load(block.body))
    return None


def series(block: Block) -> str | None:
    """A query names series that are exported, and labels that they have."""
    known = {name: set(labels) for name, _, labels in exported_series()}
    for name, labels in re.findall(r"ray_(kvfabric_\w+)(?:\{([^}]*)\})?", block.body):
        if name not in known:
            return f"{name} is not exported"
        unknown = set(re.findall(r"(\w+)=", labels)) - known[name]
        if unknown:
            return f"{name} has no label {', '.join(sorted(unknown))}"
    return None


def base() -> dict[str, Any]:
    """The quick start's spec."""
    (text,) = (b.body for b in blocks(QUICKSTART, ROOT) if b.marks.get("file") == SPEC)
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def run(pages: list[Path]) -> list[dict[str, Any]]:
    """The results of every block of every page."""
    results = []
    for path in pages:
        with tempfile.TemporaryDirectory() as folder:
            name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
            if name not in SELF_STARTING:
                Path(folder, SPEC).write_text(yaml.safe_dump(base()), encoding="utf-8")
                if "default" not in fabrics():
                    launch(base())
            results += Page(path, Path(folder)).run()
            os.chdir("/")
    return results


if __name__ == "__main__":
    os.environ["COLUMNS"] = "110"
    results, *pages = (Path(argument).resolve() for argument in sys.argv[1:])
    cluster = EmbeddedCluster.start(2)
    cluster.users += 1  # a snippet that ends its fabric does not end the cluster
    try:
        found = run(pages)
        results.write_text(json.dumps(found), encoding="utf-8")
    finally:
        cluster.close()
