"""Two vLLM engines on two nodes share what they computed, through a fabric under vLLM's own offloading.

Run it with ``python examples/vllm_two_nodes.py`` in an environment with vLLM (``scripts/install-engines vllm`` makes one without a
GPU). The model is tiny and random; with your own, name its folder and leave ``spec_name`` as vLLM's TieringOffloadingSpec.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray

import kvfabric
from kvfabric.engines.shared.named_blocks import blocks_model
from kvfabric.engines.vllm_tier.trial import BLOCK_TOKENS, Family, actor_on, transfer_config, write_model

ROW_BYTES = 4 * 2 * 2 * 64 * 4 * BLOCK_TOKENS
"""Layers, keys and values, heads, channels, bytes of a float32, tokens: one block of the tiny model."""


def main() -> None:
    """The second engine's first token needs 20 tokens of prefill, not 532."""
    rng = random.Random(0)
    prompt = [rng.randrange(3, 1000) for _ in range(532)]
    model = blocks_model(block_bytes=ROW_BYTES, block_tokens=BLOCK_TOKENS)
    with tempfile.TemporaryDirectory() as folder, kvfabric.launch({"model": model}, nodes=2) as fabric:
        weights = str(write_model(Path(folder) / "model", Family.LLAMA))
        config = transfer_config("default")
        first: Any = actor_on(0).remote(weights, config)
        print("node 0 computed:", ray.get(first.generate.remote([prompt], 8)))
        ray.get(first.settle.remote())
        second: Any = actor_on(1).remote(weights, config)
        print("node 1 answers: ", ray.get(second.generate.remote([prompt], 8)))
        for holder in fabric.status()["holders"]:
            counters = holder["counters"]
            told = {
                name: counters.get(name, 0) for name in ("stored_objects", "fetched_objects", "reused_hit_tokens_total")
            }
            print(f"{holder['address']}: {told}")
        for engine in (first, second):
            ray.get(engine.close.remote())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
