"""What Ray starts: a shell around a process's object, with its public methods.

Ray wraps every method of an actor's class for its tracing, those included that nobody calls from afar; a
request over the socket passes through a dozen of them. The object in the shell has its methods as written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def shell_of(cls: type) -> type:
    """A class of the same name and public methods that makes a ``cls`` and passes every call on to it."""
    inside: Any = cls

    def __new__(shell: Any, *_: Any) -> Any:  # noqa: N807 - it becomes the shell's
        self: Any = object.__new__(shell)
        # Ray makes an actor on its process's main thread and begins it on another: so is what lies inside. Whoever
        # starts the actor makes a description of its class, which derives from it and has `remote`: nothing lies in that.
        self._inside = None if hasattr(shell, "remote") else inside.__new__(inside)
        return self

    def __init__(self: Any, *args: Any) -> None:  # noqa: N807 - as above
        self._inside.__init__(*args)

    methods: dict[str, Any] = {
        name: _passing(name, method)
        for name, method in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }
    made = {"__new__": __new__, "__init__": __init__, "__doc__": cls.__doc__, "__module__": cls.__module__}
    return type(cls.__name__, (), {**methods, **made})


def _passing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self._inside, name)(*args, **kwargs)

        return _named_as(call_async, method)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inside, name)(*args, **kwargs)

    return _named_as(call, method)


def _named_as(call: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """With the method's name and signature, but not as its wrapper: Ray would unwrap it and change the method."""
    call.__name__, call.__qualname__, call.__doc__ = method.__name__, method.__qualname__, method.__doc__
    call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined] # functions may bear one
    return call
