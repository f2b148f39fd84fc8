"""What an engine tells a router is enough to name a prompt's blocks as the engine does, and nobody else's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvfabric

from .conftest import Site, prompt

# vLLM, imported in this process, warns of what it uses itself.
pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

ROW_BYTES = 8192
TOKENS = prompt("named by a router", 150)


def hashed(algorithm: str, cache_salt: str | None = None) -> list[bytes]:
    """The blocks' hashes as vLLM's scheduler makes them."""
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hashes = get_hash_fn_by_name(algorithm)
    init_none_hash(hashes)
    hasher = get_request_block_hasher(32, hashes)
    sampling = SamplingParams(max_tokens=1)
    asked = Request("r", list(TOKENS), sampling, None, cache_salt=cache_salt, block_hasher=hasher)
    return [bytes(block) for block in asked.block_hashes]


def test_a_routers_names_are_those_under_which_the_tier_stores(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.kv_offload.base import make_offload_key

    from kvfabric.engines.vllm_tier import bench
    from kvfabric.engines.vllm_tier.host import HostTieringSpec
    from kvfabric.engines.vllm_tier.naming import Naming, naming_of

    fabric = f"bench-{ROW_BYTES}"
    site.fabric(fabric, ROW_BYTES)
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(sliding_window=None))])
    with bench.tiers(ROW_BYTES, 8, tmp_path) as both:
        config = both.fabric._offloading_spec.config
        extra: dict[str, Any] = {"cpu_bytes_to_use": 8 * ROW_BYTES}
        tiers = [{"type": "KvFabricTier", "fabric": fabric, "weights": "bench"}]
        plain = HostTieringSpec(dataclasses.replace(config, extra_config=extra))
        spec = HostTieringSpec(dataclasses.replace(config, extra_config={**extra, "secondary_tiers": tiers}))
        assert naming_of(plain, caches, "sha256") is None, "an engine without the tier has nothing to tell"
        for algorithm in ("sha256", "sha256_cbor"):
            naming = naming_of(spec, caches, algorithm)
            assert naming is not None
            assert Naming.of(naming.told()) == naming
            assert naming.names(TOKENS) == [bytes(make_offload_key(block, 0)) for block in hashed(algorithm)]
        naming = naming_of(spec, caches, "sha256")
        assert naming is not None
        salt = "one tenant"
        expected = [bytes(make_offload_key(block, 0)) for block in hashed("sha256", salt)]
        assert naming.names(TOKENS, salt) == expected
        assert len(expected) == 4
        stored = np.random.default_rng(2).integers(0, 256, (4, ROW_BYTES), dtype=np.uint8)
        assert both.fabric.blocks.store(expected, stored).ok
        with kvfabric.connect(fabric) as session:
            assert session.present(naming.keys(session, TOKENS, salt)) == {"blocks": 0b1111}
            assert session.present(naming.keys(session, TOKENS)) == {"blocks": 0}, "without the cache salt"
            other = dataclasses.replace(naming, salt="00" * 32)
            assert session.present(other.keys(session, TOKENS, salt)) == {"blocks": 0}, "another engine's"
        assert naming_of(spec, caches, "xxhash") is None, "seeded for one process alone"
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        seeded = naming_of(spec, caches, "xxhash")
        assert seeded is not None
        assert seeded.names(TOKENS) == [bytes(make_offload_key(block, 0)) for block in hashed("xxhash")]
