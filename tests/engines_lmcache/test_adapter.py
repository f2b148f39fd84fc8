"""LMCache's own check of an L2 adapter, run against the plugin on an embedded fabric."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import warnings

import pytest

import kvfabric
from kvfabric.engines.shared.named_blocks import blocks_model

pytestmark = [pytest.mark.engines]

PLUGIN = {"type": "plugin", "module_path": "kvfabric.engines.lmcache_l2.adapter", "class_name": "KvFabricL2"}


@pytest.mark.parametrize("block_bytes", [65536, 1000])
def test_lmcaches_own_check_finds_no_fault(block_bytes: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lmcache.v1.check.check_mode_test_l2_adapter import run_test_mode

        model = blocks_model(block_bytes=block_bytes, block_tokens=256)
        with kvfabric.launch({"model": model, "memory_bytes": 16 << 20}, name="lmcache"):
            plugin = {**PLUGIN, "adapter_params": {"fabric": "lmcache", "weights": "w1"}}
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                asyncio.run(run_test_mode("tiny", l2_adapter=[json.dumps(plugin)], num_keys=5))
    told = printed.getvalue()
    assert "Testing L2 adapter #0 (KvFabricL2)" in told
    for line in (
        "Validation: 5/5 correctly absent",
        "Batch store OK",
        "Validation: 5/5 found",
        "Validation (loaded): 5/5",
        "Validation (content): 5/5",
    ):
        assert line in told, told
    assert "Failed" not in told
    assert "FAIL" not in told
