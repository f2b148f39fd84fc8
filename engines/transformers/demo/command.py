"""``kvfabric demo``: progress while it works, then the tables; or one JSON object."""

from __future__ import annotations

import json
import sys
import time

from rich.console import Console

from .report import WIDTH, plain, show
from .run import run


def run_and_show(family: str, *, as_json: bool) -> bool:
    """Run the demo and print its outcome to stdout; whether every comparison held.

    Raises FabricError, in one line, where the demo cannot run.
    """
    if as_json:
        return _run_as_json(family)
    console = Console(width=WIDTH, highlight=False) if not sys.stdout.isatty() else Console(highlight=False)
    began = time.monotonic()
    outcome = run(family, lambda line: console.print(f"[dim]{time.monotonic() - began:5.1f} s[/dim]  {line}"))
    show(outcome, console)
    return outcome.logits_equal


def _run_as_json(family: str) -> bool:
    outcome = run(family, lambda _: None)
    sys.stdout.write(json.dumps(plain(outcome)) + "\n")
    return outcome.logits_equal
