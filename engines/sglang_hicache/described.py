"""What HiCache's page hash leaves out, as plain data.

The hash chains token ids alone: three models hash one prompt equally. Whatever else decides about a page's
bytes is said here and digested into the pages' namespace. The rank is in a page's name instead, so that
one rank can ask for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...fabric.kinds import FabricError
from ..shared.description import config_digest
from ..transformers.weights import weights_revision
from .pages import PoolPages

SCHEME = "sglang-hicache-1"
"""Names what is described, and how. Another number is another namespace."""

_GEOMETRY = ("layout", "layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")
_GEOMETRY_MORE = ("start_layer", "end_layer", "head_group_num", "storage_format_tag", "indexer_page_stride_size")


def weights_of(config: Any, given: str | None, model_path: str | None) -> tuple[str, str]:
    """The weights' revision, and the digest of the model's config.json ("" where it is not known).

    ``given``: a revision known already; else the tensors at ``model_path`` (or the model's name, if it is a folder) are
    digested. Raises FabricError where there are none: names prove nothing.
    """
    folder = Path(model_path or config.model_name or "")
    known = config_digest(folder) if folder.is_dir() else ""
    if given:
        return given, known
    if not folder.is_dir():
        raise FabricError(
            f"model {config.model_name!r}: its files are not at hand, so its weights cannot be digested; say where they are or"
            ' which they are in hicache-storage-backend-extra-config: "model_path": FOLDER or "weights": REVISION'
        )
    return weights_revision(folder), known


def geometry(pool: Any, pages: PoolPages) -> dict[str, Any]:
    """What a pool's page is made of, as far as the pool says it."""
    told = {name: getattr(pool, name, None) for name in (*_GEOMETRY, *_GEOMETRY_MORE)}
    plain = {name: value for name, value in told.items() if isinstance(value, (int, str))}
    dtypes = (getattr(pool, name, None) for name in ("dtype", "temporal_dtype", "conv_dtype", "indexer_dtype"))
    return {
        **plain,
        "class": type(pool).__name__,
        "dtypes": [str(dtype) for dtype in dtypes if dtype is not None],
        "form": str(pages.form),
        "page_bytes": pages.page_bytes,
        "page_indices": pages.page_indices,
    }


def described(config: Any, *, weights: str, model_config: str, namespace: str) -> dict[str, Any]:
    """Of a ``HiCacheStorageConfig``: what makes two engines' pages of one hash different or equal.

    ``namespace``: what a user knows besides. Engines of one SGLang minor release share; its layouts have no number.
    """
    import sglang

    return {
        "scheme": SCHEME,
        "sglang": ".".join(str(sglang.__version__).split(".")[:2]),
        "model": config.model_name or "",
        "weights": weights,
        "config": model_config,
        "tp_size": config.tp_size,
        "pp_size": config.pp_size,
        "cp_size": config.attn_cp_size,
        "dcp_size": config.dcp_size,
        "replicated": bool(config.is_mla_model),
        "namespace": namespace,
    }
