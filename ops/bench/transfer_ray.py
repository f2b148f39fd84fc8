"""Ray's own way between two nodes, beside a link: torch tensors put on one node, got on the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...actors.embedded import EmbeddedCluster

OBJECT_STORE_BYTES = 320 << 20
"""A few rounds' worth a node: what a round put is let go of behind its back."""
GET_TIMEOUT_S = 60.0

Bytes = npt.NDArray[np.uint8]


def rounds_beside_ray(link: Callable[[], None], rounds: int, blocks: list[Bytes]) -> list[dict[str, float]]:
    """Seconds of ``ray_get`` and ``link``, a round: one after the other.

    ``ray_get`` is the faster of two: one object that holds all tensors, and an object a tensor.
    Raises RuntimeError where other bytes arrive than were put.
    """
    cluster = EmbeddedCluster.start(2, object_store_bytes=OBJECT_STORE_BYTES)
    try:
        put = _source(blocks)
        spent = []
        for number in range(rounds + 1):
            together, each = _get(put(True), blocks), _get(put(False), blocks)
            began = time.perf_counter()
            link()
            took = {"ray_get": min(together, each), "link": time.perf_counter() - began}
            if number:  # the first connects the nodes
                spent.append(took)
        return spent
    finally:
        cluster.close()


def _source(blocks: list[Bytes]) -> Callable[[bool], list[Any]]:
    """An actor on the other node; it puts the tensors there and tells the references."""
    import ray

    class Source:
        def __init__(self, blocks: list[Bytes]) -> None:
            import torch

            self.tensors = [torch.from_numpy(block.copy()) for block in blocks]

        def put(self, together: bool) -> list[Any]:
            return [ray.put(self.tensors)] if together else [ray.put(tensor) for tensor in self.tensors]

    handle: Any = ray.remote(Source).options(num_cpus=0, resources={"kvfabric_node_1": 0.01}).remote(blocks)

    def put(together: bool) -> list[Any]:
        references: list[Any] = ray.get(handle.put.remote(together), timeout=GET_TIMEOUT_S)
        return references

    return put


def _get(references: list[Any], blocks: list[Bytes]) -> float:
    import ray

    began = time.perf_counter()
    got = ray.get(references, timeout=GET_TIMEOUT_S)
    took = time.perf_counter() - began
    tensors = got if len(got) > 1 else got[0]
    if not all(np.array_equal(tensor.numpy(), block) for tensor, block in zip(tensors, blocks, strict=True)):
        raise RuntimeError("ray.get: other bytes arrived than were put")
    return took
