"""What stands behind the names of a story: tokens, bytes, passports.

All are fixed functions of the story's words, so that every world stores and expects the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from blake3 import blake3

from ...fabric.identity import Extra, Namespace, PromptKeys, Tokens, as_tokens, weights_digest16
from ...fabric.messages import Prompt
from ...fabric.model import GroupSpec, ModelSpec
from ...fabric.passport import AbiPassport
from .story import AbiFields, Branch, Keyed

VOCABULARY = 1 << 17


def tokens_of(prompt: str | Branch, n: int) -> Tokens:
    """The first ``n`` tokens of a prompt, shape (n,)."""
    if isinstance(prompt, Branch):
        own = tokens_of(prompt.then, n)
        shared = min(prompt.share, n)
        return np.concatenate([tokens_of(prompt.like, shared), own[shared:]])
    raw = blake3(prompt.encode(), derive_key_context="kvfabric 2026 scenario prompt").digest(4 * n)
    return as_tokens(np.frombuffer(raw, dtype="<u4") % VOCABULARY)


def namespace_of(model: ModelSpec, key: Keyed, weights: str) -> Namespace:
    """Who may share what a step names, under a weights revision."""
    adapter = None if key.adapter is None else (key.adapter.name, key.adapter.revision)
    return Namespace(model.name, weights, key.tenant, key.salt.encode(), adapter)


def keys_of(model: ModelSpec, key: Keyed, n: int, weights: str) -> PromptKeys:
    """The digests of the first ``n`` tokens of what a step names."""
    extra = tuple(Extra(e.at, e.digest.encode()) for e in key.extra)
    return PromptKeys(model, namespace_of(model, key, weights), tokens_of(key.prompt, n), extra)


def prompt_of(keys: PromptKeys) -> Prompt:
    """The record a request carries: digests, never tokens."""
    namespace = keys.namespace
    return Prompt(
        namespace.digest(),
        weights_digest16(namespace.weights),
        namespace.tenant,
        len(keys),
        tuple((unit, keys.keys(unit)) for unit in keys.model.units_tokens),
    )


Stamp = tuple[int, bytes]
"""What a producer puts on content besides its name: its revision and the layout's fingerprint."""


def content_of(digest: bytes, group: int, shard: int, stamp: Stamp, *, length: int) -> bytes:
    """The ``length`` bytes that a story's producer stores for the object whose chain digest (32 bytes) this is."""
    revision, fingerprint = stamp
    seed = b"%s%d/%d/%d/%s" % (digest, group, shard, revision, fingerprint)
    return blake3(seed, derive_key_context="kvfabric 2026 scenario content").digest(length)


def default_passport(group: GroupSpec) -> AbiPassport:
    """What every node's kernel reads and writes until ``set_abi``."""
    return AbiPassport(alignment_bytes=group.alignment_bytes)


def changed_passport(passport: AbiPassport, fields: AbiFields) -> AbiPassport:
    """The passport after ``set_abi``: what is not named stays."""
    changes: Mapping[str, object] = {
        name: value
        for name, value in (
            ("layout", fields.layout),
            ("dtype", fields.dtype),
            ("kernel", fields.kernel),
            ("strides", None if fields.strides is None else tuple(fields.strides)),
            ("alignment_bytes", fields.alignment),
        )
        if value is not None
    }
    return replace(passport, **changes)  # type: ignore[arg-type]
