"""A pytest plugin that puts KvFabricTier in the place of vLLM's file tier, in vLLM's own tests of it.

``scripts/judge-vllm-tier`` runs them with it. Where a test asks whether a block's file exists, it is answered whether the
fabric has the block. What is judged by damaging files, or by vLLM's own file functions, is deselected there by name.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest

from kvfabric import Fabric

FABRIC = "judged"
ROW_BYTES = 128 * 4096 * 4
_running: list[Fabric] = []


def pytest_configure(config: pytest.Config) -> None:
    from vllm.v1.kv_offload.base import Medium
    from vllm.v1.kv_offload.tiering.fs import manager

    import kvfabric
    from kvfabric.engines.shared.named_blocks import blocks_model
    from kvfabric.engines.vllm_tier.tier import KvFabricTier

    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    model = blocks_model(block_bytes=ROW_BYTES, block_tokens=16)
    _running.append(kvfabric.launch({"model": model, "memory_bytes": 128 << 20}, name=FABRIC))

    class Swapped(KvFabricTier):
        """The file tier's arguments; a root folder is a namespace."""

        medium: ClassVar[Medium] = Medium.STORAGE
        _store_job_keys: ClassVar[dict[int, Any]] = {}

        def __init__(self, *args: Any, root_dir: str, n_read_threads: int = 0, n_write_threads: int = 0, **more: Any):
            super().__init__(*args, fabric=FABRIC, weights="judged", namespace=root_dir, **more)
            self.file_mapper = _Files(self)

    manager.FileSystemTierManager = Swapped


class _Files:
    """Names of files that exist where the fabric has the block."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier

    def get_file_name(self, key: bytes) -> str:
        there = self._tier.blocks.present([bytes(key)])[0]
        return "/proc/self/stat" if there else f"/nowhere/{key.hex()}"


def pytest_unconfigure() -> None:
    while _running:
        _running.pop().shutdown()
