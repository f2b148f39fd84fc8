"""Replacing named predicates and steps of the core from outside, and putting them back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

PACKAGE = __package__.rsplit(".", 2)[0]


def call(owner: Any, step: str, *args: Any) -> Any:
    """Take one named step of the core, be it an inner one."""
    return getattr(owner, step)(*args)


class Patches(AbstractContextManager["Patches"]):
    """Attributes replaced until the block ends, in whatever way it ends."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def put(self, owner: Any, name: str, value: Any) -> Any:
        """Replace ``owner.name``; returns what it was. Raises AttributeError where there is no such thing."""
        before = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
        self._stack.callback(setattr, owner, name, before)
        setattr(owner, name, value)
        return before

    def everywhere(self, function: Callable[..., Any], value: Callable[..., Any]) -> None:
        """Replace a function of the core in every module that has it under its name."""
        name = function.__name__
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(f"{PACKAGE}.") and vars(module).get(name) is function:
                self.put(module, name, value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
