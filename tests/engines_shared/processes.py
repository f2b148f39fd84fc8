"""Engines in processes of their own, and what the fabric counted of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvfabric import Fabric

SETTLED_S = 0.5


class Running:
    """An engine's process, called as if it were here."""

    def __init__(self, handle: Any, ray: Any, timeout_s: float) -> None:
        self.handle, self._ray, self._timeout_s = handle, ray, timeout_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self.begin(name, *args)()

    def begin(self, name: str, *args: Any) -> Callable[[], Any]:
        """Call without waiting; what is returned waits."""
        told = getattr(self.handle, name).remote(*args)
        return lambda: self._ray.get(told, timeout=self._timeout_s)

    def end(self) -> None:
        """End the engine in order, then its process."""
        self.close()
        self._ray.kill(self.handle)


def reused_tokens(fabric: Fabric) -> int:
    """Tokens that readers said they reused, over all holders: the fabric's own count, once no more comes.

    A release is told without a reply, so an engine's answer may be here before it.
    """

    def told() -> int:
        holders = fabric.status()["holders"]
        return sum(int(holder.get("counters", {}).get("reused_hit_tokens_total", 0)) for holder in holders)

    before, count = -1, told()
    while count != before:
        time.sleep(SETTLED_S)
        before, count = count, told()
    return count
