"""What a session makes of tokens: digests under a namespace, and the records that bear them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..fabric.identity import Extra, NamedKeys, Namespace, PromptKeys, as_tokens
from ..fabric.kinds import FabricError
from ..fabric.messages import Objects
from ..fabric.model import ModelSpec

KEY = frozenset({"tenant", "salt", "adapter", "extra", "approximate"})
_WIDE = 32


class Prompts:
    """Prompts of one model under one weights revision."""

    def __init__(self, model: ModelSpec, weights: str) -> None:
        self.model = model
        self.weights = weights

    def keys(self, tokens: Any, key: Mapping[str, Any]) -> PromptKeys:
        """Digests of tokens under KEY, or those given. Raises FabricError for digests of another model, or a bad KEY."""
        if isinstance(tokens, PromptKeys):
            other = tokens.model is not self.model and tokens.model != self.model
            if key or other or tokens.namespace.weights != self.weights:
                raise FabricError("tokens: these digests are of another model or weights, or KEY is given twice")
            return tokens
        for name in key:
            if name not in KEY:
                raise FabricError(f"{name}: not a keyword of this call ({', '.join(sorted(KEY))})")
        salt = key.get("salt", b"")
        adapter = key.get("adapter")
        namespace = Namespace(
            self.model.name,
            self.weights,
            str(key.get("tenant", "")),
            salt.encode() if isinstance(salt, str) else bytes(salt),
            None if adapter is None else (str(adapter[0]), str(adapter[1])),
            approximate=bool(key.get("approximate", False)),
        )
        extra = tuple(e if isinstance(e, Extra) else Extra(int(e[0]), bytes(e[1])) for e in key.get("extra", ()))
        return PromptKeys(self.model, namespace, as_tokens(tokens), extra)

    def named(self, names: Sequence[bytes], scheme: str, key: Mapping[str, Any]) -> NamedKeys:
        """Digests of blocks by an engine's hashes of that scheme under KEY. Raises FabricError for a chained model."""
        if self.model.chained:
            raise FabricError(
                f"model {self.model.name!r}: only with chained: false are blocks named by an engine's hashes"
            )
        namespace = replace(self.keys((), key).namespace, hash_scheme=scheme)
        return NamedKeys(self.model, namespace, as_tokens(()), names=tuple(names))

    def exact(self, keys: PromptKeys) -> PromptKeys:
        """The same prompt in the exact namespace."""
        if not keys.namespace.approximate:
            return keys
        return PromptKeys(self.model, replace(keys.namespace, approximate=False), keys.tokens, keys.extra)

    def objects(self, keys: PromptKeys, group: int, shard: int, indices: Sequence[int]) -> Objects:
        """Objects of a prompt by index, with their digests."""
        blob = keys.keys(self.model.groups[group].unit_tokens)
        digests = b"".join(blob[i * _WIDE : (i + 1) * _WIDE] for i in indices)
        return Objects(group, shard, tuple(indices), digests)

    def group(self, name: str) -> int:
        """A group's number. Raises FabricError where the model has none of that name."""
        try:
            return self.model.index_of(name)
        except KeyError:
            known = ", ".join(g.name for g in self.model.groups)
            raise FabricError(f"objects.{name}: the model has no such group ({known})") from None
