"""One embedded cluster of two nodes, a fabric a model, engines on demand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric
from kvfabric.actors.fabric import attach

from ..engines_shared.processes import Running, reused_tokens
from . import engines

START_S = 300.0


def prompt(name: str, tokens: int = 220) -> list[int]:
    """A prompt of its own for each name."""
    rng = random.Random(name)
    return [rng.randrange(3, 1000) for _ in range(tokens)]


class Site:
    """The cluster and what runs on it."""

    def __init__(self, folder: Path, ray: Any) -> None:
        self._folder, self._ray = folder, ray
        self._fabrics: dict[str, Fabric] = {}

    def model(self, family: str, seed: int = 0) -> Path:
        """The folder of a tiny model."""
        from kvfabric.engines.vllm_tier.trial import Family, write_model

        folder = self._folder / f"{family}-{seed}"
        return folder if folder.exists() else write_model(folder, Family(family), seed)

    def fabric(self, name: str, row_bytes: int = 131072, **spec: Any) -> Fabric:
        """The fabric of that name, started where it does not run yet."""
        from kvfabric.engines.shared.named_blocks import blocks_model

        if name not in self._fabrics:
            model = blocks_model(block_bytes=row_bytes, block_tokens=32)
            self._fabrics[name] = kvfabric.launch({"model": model, "memory_bytes": 64 << 20, **spec}, name=name)
        return self._fabrics[name]

    def engine(
        self,
        family: str,
        node: int,
        fabric: str | None,
        *,
        seed: int = 0,
        tier: dict[str, Any] | None = None,
        connector: bool = False,
        launch: bool = True,
        spec: dict[str, Any] | None = None,
        **options: Any,
    ) -> Running:
        """An engine on a node, its blocks in that fabric; None: an engine as it is without one.

        ``spec``: of the fabric that a connector launches.
        """
        from kvfabric.engines.vllm_tier.trial import actor_on, connector_config, transfer_config

        transfer = None if fabric is None else transfer_config(fabric, **(tier or {}))
        if connector and fabric is not None:
            transfer = connector_config(
                fabric, **({"launch": {"memory_bytes": 64 << 20, **(spec or {})}} if launch else {})
            )
        handle = actor_on(node, engines.Engine).remote(str(self.model(family, seed)), transfer, options)
        running = Running(handle, self._ray, START_S)
        running.generate([[5] * 20], 1)  # less than a block: it leaves nothing
        if connector and fabric is not None and fabric not in self._fabrics:
            self._fabrics[fabric] = attach(fabric)
        return running

    def end(self, engine: Running) -> None:
        """End an engine in order, then its process."""
        engine.end()

    def alone(self, family: str, prompts: list[list[int]], *, seed: int = 0, tokens: int = 16, **options: Any) -> Any:
        """What an engine without a fabric generates."""
        engine = self.engine(family, 0, None, seed=seed, **options)
        try:
            return engine.generate(prompts, tokens)
        finally:
            self.end(engine)

    def reused_tokens(self, fabric: str) -> int:
        """Tokens that readers said they reused, over all holders: the fabric's own count."""
        return reused_tokens(self._fabrics[fabric])

    def stored(self, fabric: str) -> int:
        """Blocks in memory, over all holders."""
        holders = self._fabrics[fabric].status()["holders"]
        return sum(pool["slots"] - pool["free"] for holder in holders for pool in holder.get("pools", ()))

    def close(self) -> None:
        for fabric in reversed(self._fabrics.values()):
            fabric.shutdown()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    import ray

    ray.cloudpickle.register_pickle_by_value(engines)
    first = kvfabric.launch(
        {
            "model": {"groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 4}]},
            "memory_bytes": 1 << 20,
        },
        name="site",
        nodes=2,
    )
    running = Site(tmp_path_factory.mktemp("models"), ray)
    with first:
        try:
            yield running
        finally:
            running.close()
