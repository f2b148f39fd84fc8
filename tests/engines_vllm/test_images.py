"""The same placeholder tokens with another image are other blocks: by vLLM's hash under the tier, by ours in the connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfabric

from ..actors.stories import eventually
from ..engines_shared.test_adapters import write_adapter
from .conftest import Site, prompt

# vLLM, imported in this process, warns of what it uses itself.
pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

TOKENS = [*prompt("described", 40), *[999] * 16, *prompt("asked", 100)]
"""Sixteen placeholder tokens from 40 on: in the second block of 32."""


def request(image: str) -> Any:
    """vLLM's own request for these tokens with that image, hashed as its scheduler hashes it."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    position = PlaceholderRange(offset=40, length=16)
    return Request(
        request_id=f"r-{image}",
        prompt_token_ids=list(TOKENS),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[MultiModalFeatureSpec(None, "image", image, position)],
        block_hasher=get_request_block_hasher(32, sha256),
    )


def test_under_the_tier_another_image_is_a_miss_from_its_block_on(site: Site) -> None:
    from vllm.v1.kv_offload.base import make_offload_key

    from kvfabric.engines.shared.named_blocks import NamedBlocks

    site.fabric("images")
    names = {
        image: [bytes(make_offload_key(bytes(block), 0)) for block in request(image).block_hashes]
        for image in ("cat", "dog", "cat again")
    }
    names["cat again"] = [bytes(make_offload_key(bytes(block), 0)) for block in request("cat").block_hashes]
    assert len(names["cat"]) == 4
    rows = np.random.default_rng(1).integers(0, 256, (4, 131072), dtype=np.uint8)
    with kvfabric.connect("images") as session:
        blocks = NamedBlocks(session, scheme="vllm-kv-1", salt=b"images", block_bytes=131072)
        assert blocks.store(names["cat"], rows).ok
        assert blocks.present(names["cat again"]) == [True] * 4
        assert blocks.present(names["dog"]) == [True, False, False, False], "the block before the image is shared"


def test_in_the_connector_another_image_is_a_miss_from_its_block_on(site: Site) -> None:
    from kvfabric.engines.vllm_connector.asking import Asking

    group = {"name": "g0", "kind": "compressed_history", "block_tokens": 32, "block_bytes": 4096}
    with (
        kvfabric.launch({"model": {"groups": [group]}, "memory_bytes": 4 << 20}, name="pictures"),
        kvfabric.connect("pictures") as session,
    ):
        asking = Asking(session, b"salt")

        def keys(image: str, salt: str | None = None) -> Any:
            plain = request(image)
            plain.cache_salt = salt
            asking.finished(plain.request_id, 1)
            known = asking._known(plain)
            assert known is not None
            return known.keys

        objects = {"g0": {i: np.full(4096, i, np.uint8) for i in range(4)}}
        assert session.publish(keys("cat"), objects).ok
        assert session.probe(keys("cat")).tokens == 128
        assert session.probe(keys("dog")).tokens == 32
        assert session.probe(keys("cat", "another tenant")).tokens == 0
        asking.close()


def test_in_the_connector_an_adapter_counts_by_its_files_and_is_computed_until_they_are_digested(
    site: Site, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    from kvfabric.engines.vllm_connector.asking import Asking

    group = {"name": "g0", "kind": "compressed_history", "block_tokens": 32, "block_bytes": 4096}
    with (
        kvfabric.launch({"model": {"groups": [group]}, "memory_bytes": 4 << 20}, name="adapters"),
        kvfabric.connect("adapters") as session,
    ):
        asking = Asking(session, b"salt")

        def keys(lora: Any) -> Any:
            plain = request("cat")
            plain.lora_request = lora
            asking.finished(plain.request_id, 1)
            known = asking._known(plain)
            return None if known is None else known.keys

        write_adapter(tmp_path, 1.0)
        lora = LoRARequest("tuned", 1, str(tmp_path))
        assert keys(lora) is None, "nobody waits for its digest"
        tuned = eventually(lambda: keys(lora), bool)
        objects = {"g0": {i: np.full(4096, i, np.uint8) for i in range(4)}}
        assert session.publish(tuned, objects).ok
        assert session.probe(keys(lora)).tokens == 128
        assert session.probe(keys(None)).tokens == 0, "without the adapter it is another prompt"
        write_adapter(tmp_path, 2.0)
        again = LoRARequest("tuned", 1, str(tmp_path), load_inplace=True)
        assert keys(again) is None
        assert session.probe(eventually(lambda: keys(lora), bool)).tokens == 0, "trained on, under its name and path"
        asking.close()
