"""vLLM's cache groups as a fabric's model: full attention is history, a sliding window a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...fabric.kinds import FabricError, ObjectKind
from ...fabric.model import GroupSpec, ModelSpec
from ..shared.description import config_digest, digest
from ..vllm_tier.described import kernel_of_machine, model_folder, weights_of

SCHEME = "vllm-connector-1"


def model_of(vllm_config: Any, kv_cache_config: Any, block_bytes: Sequence[int]) -> ModelSpec:
    """The model that a fabric must serve for this engine; ``block_bytes`` a group: one block of one rank.

    Raises FabricError for a group whose rule, or a parallelism whose layout, this connector does not know.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    parallel = vllm_config.parallel_config
    if (
        parallel.pipeline_parallel_size * parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
        > 1
    ):
        raise FabricError("parallelism: this connector moves blocks of tensor-parallel ranks only")
    groups = []
    for number, (group, nbytes) in enumerate(zip(kv_cache_config.kv_cache_groups, block_bytes, strict=True)):
        spec = group.kv_cache_spec
        common: dict[str, Any] = {"name": f"g{number}", "block_tokens": spec.block_size, "block_bytes": nbytes}
        if isinstance(spec, FullAttentionSpec):
            groups.append(GroupSpec(kind=ObjectKind.COMPRESSED_HISTORY, **common))
        elif isinstance(spec, SlidingWindowSpec):
            window = spec.sliding_window + spec.extra_retained_tokens
            groups.append(GroupSpec(kind=ObjectKind.SLIDING_WINDOW, window_tokens=window, **common))
        else:
            raise FabricError(
                f"cache group {number}: {type(spec).__name__} is neither full attention nor a sliding window;"
                " use the tier (kvfabric.engines.vllm_tier), which leaves rules to vLLM"
            )
    return ModelSpec(name="vllm", groups=tuple(groups), shards=parallel.tensor_parallel_size)


def salt_of(vllm_config: Any, kv_cache_config: Any, *, weights: str | None, namespace: str) -> bytes:
    """What tokens, images, adapters and cache salts leave out, digested (see ``vllm_tier.described``)."""
    from vllm.version import __version_tuple__

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    folder = model_folder(model.model)
    return digest(
        {
            "scheme": SCHEME,
            "vllm": [int(part) for part in __version_tuple__[:2]],
            "weights": weights_of(model.model, weights),
            "config": config_digest(folder) if folder is not None else "",
            "dtype": str(model.dtype),
            "cache_dtype": str(cache.cache_dtype),
            "layout": cache.kv_cache_layout,
            "machine": kernel_of_machine(),
            "backend": str(getattr(getattr(vllm_config, "attention_config", None), "backend", "")),
            "groups": [
                [repr(group.kv_cache_spec), list(group.layer_names)] for group in kv_cache_config.kv_cache_groups
            ],
            "tensor_parallel": parallel.tensor_parallel_size,
            "namespace": namespace,
        }
    )
