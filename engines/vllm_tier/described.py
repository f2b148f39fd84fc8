"""What vLLM's block hash leaves out, as plain data.

The hash covers tokens, images and audio (by their content's hash), LoRA names and paths, and cache salts. Three models hash one
prompt equally. So whatever else decides about a block's bytes is said here and digested into the blocks' namespace.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import Any

from ...fabric.kinds import FabricError
from ..shared.description import config_digest
from ..transformers.weights import weights_revision

SCHEME = "vllm-kv-1"
"""Names what is described, and how. Another number is another namespace."""


def model_folder(name: str) -> Path | None:
    """Where the model's files are: ``name`` itself, or the hub's local cache of it; None where neither is."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


@functools.lru_cache(8)
def weights_of(name: str, given: str | None) -> str:
    """The weights' revision as given, else the digest of the tensors that ``name`` leads to.

    Once a process: an engine reads its weights once. Raises FabricError where they are not on this machine: names prove nothing.
    """
    if given:
        return given
    folder = model_folder(name)
    if folder is None:
        raise FabricError(
            f"model {name!r}: its files are not on this machine, so its weights cannot be digested;"
            ' say which they are in the tier\'s configuration: "weights": REVISION'
        )
    return weights_revision(folder)


def kernel_of_machine() -> str:
    """What decides how a kernel packs a block's inside: the device, and for a CPU its instruction set."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return f"{current_platform.device_name}:{current_platform.get_device_name()}"
    wide = ""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].partition("\n")[0].split()
        wide = "+".join(sorted(flag for flag in flags if flag.startswith(("avx512", "amx", "avx2"))))
    except OSError:
        wide = "unknown"
    return f"cpu:{platform.machine()}:{wide}"


def described(config: Any, row_bytes: int, *, weights: str | None, namespace: str) -> dict[str, Any]:
    """Of an ``OffloadingConfig``: everything that makes two engines' blocks of one hash different or equal.

    ``row_bytes``: one chunk of all workers. ``namespace``: what a user knows besides (``hf_overrides``, a kernel chosen by
    hand). Engines of one vLLM minor release share; its interior layouts have no number of their own.
    """
    from vllm.version import __version_tuple__

    folder = model_folder(config.model.name)
    parallel = config.parallel
    return {
        "scheme": SCHEME,
        "vllm": [int(part) for part in __version_tuple__[:2]],
        "weights": weights_of(config.model.name, weights),
        "config": config_digest(folder) if folder is not None else "",
        "dtype": config.model.dtype,
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "machine": kernel_of_machine(),
        "backend": os.environ.get("VLLM_ATTENTION_BACKEND", ""),
        "hash_tokens": config.cache.tokens_per_hash,
        "chunk_blocks": config.cache.blocks_per_chunk,
        "groups": [[g.group_id, g.tokens_per_block, list(g.layer_names)] for g in config.groups],
        "block_bytes": config.worker_kv_bytes_per_block,
        "row_bytes": row_bytes,
        "parallel": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "rank": parallel.rank,
        "namespace": namespace,
    }
