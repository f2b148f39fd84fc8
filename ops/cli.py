"""The command line: ``kvfabric COMMAND ...``.

Each subpackage of ``ops`` that has commands has a ``command.py`` with ``register(app)``; packages
that ``ops`` may not import (engines, plug-ins) name such a function by entry point, in the group
``kvfabric.commands``. Only what the first word asks for is imported; help imports everything.

Exit statuses: 0 done, 1 what was asked did not hold, 2 a bad argument or file, 3 no such cluster or fabric is
reached, 130 interrupted.
Errors are lines on stderr that say what to do, never a traceback for a user's mistake.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import typer

from ..fabric.kinds import FabricError

GROUP = "kvfabric.commands"
COMMANDS = {
    **{
        name: name
        for name in (
            "scenario",
            "simulate",
            "spec",
            "explain",
            "bench",
            "report",
            "replay",
            "config",
            "dashboards",
            "doctor",
            "record",
            "plan",
        )
    },
    **dict.fromkeys(("up", "down", "status", "top", "leases", "bypass", "weights", "drain", "purge"), "operate"),
}
"""Command to the subpackage of ``ops`` that has it."""
DONE, FAILED, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130

# Typer brings its own copy of click from some release on; its public names lead to the right classes.
UsageError: Any = typer.BadParameter.__bases__[0]
ClickError: Any = UsageError.__bases__[0]

Register = Callable[[typer.Typer], None]


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.exit(_run(arguments))


def _run(arguments: list[str]) -> int:
    word = next((a for a in arguments if not a.startswith("-")), "")
    try:
        result = build(word)(args=arguments, prog_name="kvfabric", standalone_mode=False)
    except ClickError as error:
        message = error.format_message()
        if isinstance(error, UsageError) and error.ctx is not None and "\n" not in message:
            message = f"{error.ctx.command_path}: {message}"
        if error.format_message():  # without arguments, help was printed and there is nothing to say
            complain(message)
        return int(error.exit_code)
    except FabricError as error:
        complain(str(error))
        return UNREACHABLE if isinstance(error, ConnectionError) else USAGE
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return result if isinstance(result, int) else DONE


def complain(message: str) -> None:
    """One error, on stderr, without a traceback."""
    typer.echo(f"error: {message}", err=True)


def build(word: str) -> Any:
    """The command tree with the commands that ``word`` may mean; all of them where it names none."""
    app = typer.Typer(
        name="kvfabric",
        help="A KV-cache fabric for LLM inference on Ray clusters.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    mine = [COMMANDS[word]] if word in COMMANDS else list(dict.fromkeys(COMMANDS.values()))
    for name in mine:
        module = f"{__package__}.{name}.command"
        if find_spec(f"{__package__}.{name}") is not None and find_spec(module) is not None:
            import_module(module).register(app)
    for register in _plugged(word, everything=len(mine) > 1):
        register(app)
    return typer.main.get_command(app)


def _plugged(word: str, *, everything: bool) -> Iterator[Register]:
    """Commands of other packages: all where help or an unknown word asks, else those of that name."""
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda e: e.name):
        if entry.name.split("-")[0] != word and not everything:
            continue
        try:
            register: Register = entry.load()
        except (ImportError, AttributeError) as error:
            complain(f"the command {entry.name} of {entry.value} cannot be loaded: {error}")
        else:
            yield register


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvfabric {metadata.version('kvfabric')}")
        raise typer.Exit


def _root(
    _: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
) -> None:
    """A KV-cache fabric for LLM inference on Ray clusters."""


if __name__ == "__main__":
    main()
