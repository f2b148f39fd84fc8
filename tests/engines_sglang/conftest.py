"""One embedded cluster of two nodes and one fabric; ranks of SGLang as processes on either node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric

from ..engines_shared.processes import Running, reused_tokens
from . import rank

STUB = str(Path(__file__).parent / "stub")
CALL_S = 120.0


class Site:
    """The cluster, its fabric, and what runs on it."""

    def __init__(self, fabric: Fabric, ray: Any) -> None:
        self.fabric, self._ray = fabric, ray
        self._running: dict[str, Running] = {}

    def rank(
        self,
        node: int = 0,
        *,
        layout: str = "page_first",
        parallel: dict[str, int] | None = None,
        env: dict[str, str] | None = None,
        **extra: Any,
    ) -> Running:
        """A rank on a node, the same for equal arguments; ``extra``: fields of the backend's config, and ``model_name``."""
        asked = repr((node, layout, parallel, env, sorted(extra.items())))
        if asked in self._running:
            return self._running[asked]
        config = {
            "backend_name": "kvfabric",
            "module_path": "kvfabric.engines.sglang_hicache.backend",
            "class_name": "KvFabricHiCache",
            "interface_v1": 1,
            "fabric": self.fabric.name,
            "weights": "w1",
            **extra,
        }
        actor: Any = self._ray.remote(rank.Rank)
        handle = actor.options(num_cpus=0, resources={f"kvfabric_node_{node}": 0.01}).remote(
            STUB, config, layout, parallel or {}, env or {}
        )
        self._running[asked] = Running(handle, self._ray, CALL_S)
        return self._running[asked]

    def reused_tokens(self) -> int:
        """Tokens that readers said they reused, over all holders: the fabric's own count."""
        return reused_tokens(self.fabric)

    def end(self) -> None:
        """End every rank."""
        for running in self._running.values():
            running.end()


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    import ray

    from kvfabric.engines.shared.named_blocks import blocks_model

    ray.cloudpickle.register_pickle_by_value(rank)
    model = blocks_model(block_bytes=rank.PAGE_BYTES, block_tokens=rank.PAGE)
    with kvfabric.launch({"model": model, "memory_bytes": 64 << 20}, name="hicache", nodes=2) as fabric:
        running = Site(fabric, ray)
        yield running
        running.end()
