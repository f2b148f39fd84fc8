"""What an engine's own block hash leaves out, said once and digested: the salt of its blocks' namespace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from ...fabric.kinds import FabricError

_PASSING = frozenset({"_name_or_path", "transformers_version", "architectures_source"})
"""Fields of a model's config.json that say nothing of what it computes."""


def digest(described: Mapping[str, Any]) -> bytes:
    """32 bytes over plain data (str, numbers, bool, None, lists, mappings): equal data, equal bytes.

    Raises FabricError, naming the field, for anything else: what has no plain form could differ unseen.
    """
    for field, value in described.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise FabricError(f"{field}: {value!r} is no plain data ({error})") from None
    plain = json.dumps(dict(described), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return blake3(plain.encode(), derive_key_context="kvfabric 2026 engine namespace").digest()


def config_digest(folder: Path) -> str:
    """Of a model folder's config.json, less what says nothing of its computation; "" where there is none."""
    file = folder / "config.json"
    if not file.is_file():
        return ""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FabricError(f"{file}: not JSON ({error})") from None
    return digest({"config": {name: value for name, value in config.items() if name not in _PASSING}}).hex()
