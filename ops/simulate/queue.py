"""The clock and the queue of everything that will happen, and what did happen lately."""

from __future__ import annotations

import heapq
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

TRACE_KEPT = 3000
NOISE = ("Heartbeat", "EventsSeen", "GrantUntil", "GrantSeen", "Tick")
"""Records and events that say that time goes by, and nothing else."""


class Queue:
    """Virtual time: calls in the order of their moment, ties in the order of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._count, call, args))

    def run_next(self, until_s: float) -> bool:
        """Run the next call due before ``until_s``; False where there is none (time is then there)."""
        if not self._heap or self._heap[0][0] > until_s:
            self.now = max(self.now, until_s)
            return False
        self.now, _, call, args = heapq.heappop(self._heap)
        call(*args)
        return True


class Trace:
    """The last events, cheap to note and told only when something went wrong."""

    def __init__(self) -> None:
        self._notes: deque[tuple[float, str, str, Any]] = deque(maxlen=TRACE_KEPT)

    def note(self, at_s: float, who: str, what: str, about: Any = None) -> None:
        self._notes.append((at_s, who, what, about))

    def last(self, count: int, *about: str) -> list[str]:
        """The last events of those concerned (all, where none are named), oldest first."""
        picked: list[str] = []
        for at_s, who, what, detail in reversed(self._notes):
            if type(detail).__name__ in NOISE:
                continue
            text = "" if detail is None else brief(detail)
            line = f"{at_s:9.4f} {who:<22} {what} {text}".rstrip()
            if not about or any(word in line for word in about):
                picked.append(line)
                if len(picked) >= count:
                    break
        return picked[::-1]


def brief(value: Any) -> str:
    """A record in one line: long byte strings by their length and first bytes."""
    if isinstance(value, bytes):
        return value.hex() if len(value) <= 8 else f"<{len(value)}B {value[:4].hex()}>"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(brief(v) for v in value[:12])
        return f"({inner}{', ...' if len(value) > 12 else ''})"
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        skipped = {"prompt"}
        inner = ", ".join(f"{name}={brief(getattr(value, name))}" for name in fields if name not in skipped)
        return f"{type(value).__name__}({inner})"
    return str(value)


def where(error: BaseException) -> str:
    """The innermost lines that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return "".join(f" <- {f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in reversed(frames[-5:]))
