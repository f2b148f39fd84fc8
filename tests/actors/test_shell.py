"""The shell that Ray starts: the same methods, made where Ray makes it, and nothing of it in the way."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any, Self

from kvfabric.actors.holder import Holder
from kvfabric.actors.shell import shell_of


class Inside:
    """Counts."""

    made_on: threading.Thread

    def __new__(cls) -> Self:
        self = super().__new__(cls)
        self.made_on = threading.current_thread()
        return self

    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, step: int, *, times: int = 1) -> int:
        """Count on."""
        for _ in range(times):
            self._step(step)
        return self.count

    async def later(self, step: int) -> int:
        return self.add(step)

    def thread(self) -> threading.Thread:
        return self.made_on

    def _step(self, step: int) -> None:
        self.count += step


def test_a_shell_passes_calls_on() -> None:
    shell: Any = shell_of(Inside)(5)
    assert shell.add(2, times=3) == 11
    assert asyncio.run(shell.later(1)) == 12


def test_a_shell_has_the_public_methods_alone_under_their_names() -> None:
    shell = shell_of(Inside)
    assert {name for name, _ in inspect.getmembers(shell, inspect.isfunction)} >= {"add", "later", "thread"}
    assert not hasattr(shell, "_step")
    assert (shell.__name__, shell.__module__) == (Inside.__name__, Inside.__module__)
    assert inspect.signature(shell.add) == inspect.signature(Inside.add)  # type: ignore[attr-defined]
    assert inspect.iscoroutinefunction(shell.later)  # type: ignore[attr-defined]
    assert not inspect.iscoroutinefunction(shell.add)  # type: ignore[attr-defined]


def test_what_is_inside_is_made_where_the_shell_is_and_begun_where_it_is_begun() -> None:
    shell = shell_of(Inside)
    made: list[Any] = []
    maker = threading.Thread(target=lambda: made.append(shell.__new__(shell, 1)))
    maker.start()
    maker.join()
    (one,) = made
    one.__init__(1)
    assert one.thread() is maker
    assert one.add(1) == 2


def test_ray_is_given_every_method_that_a_holder_documents() -> None:
    assert all(hasattr(shell_of(Holder), name) for name in ("start", "request", "ping", "close"))
