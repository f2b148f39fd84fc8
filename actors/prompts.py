"""What a session makes of tokens: digests under a namespace, and the records that bear them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..fabric.identity import HASH_SCHEME, Extra, NamedKeys, Namespace, PromptKeys, as_tokens
from ..fabric.kinds import FabricError
from ..fabric.messages import Objects
from ..fabric.model import ModelSpec

KEY = frozenset({"tenant", "salt", "adapter", "extra", "approximate"})
_WIDE = 32
_NO_TOKENS = as_tokens(())


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
        namespace = self._namespace(key, HASH_SCHEME)
        return PromptKeys(self.model, namespace, as_tokens(tokens), _extra(key.get("extra", ())))

    def named(self, names: Sequence[bytes], scheme: str, key: Mapping[str, Any]) -> NamedKeys:
        """Digests of blocks by an engine's hashes of that scheme under KEY. Raises FabricError for a chained model."""
        if self.model.chained:
            raise FabricError(
                f"model {self.model.name!r}: only with chained: false are blocks named by an engine's hashes"
            )
        return NamedKeys(self.model, self._namespace(key, scheme), _NO_TOKENS, names=tuple(names))

    def _namespace(self, key: Mapping[str, Any], scheme: str) -> Namespace:
        """Raises FabricError for a bad KEY."""
        for name in key:
            if name not in KEY:
                raise FabricError(f"{name}: not a keyword of this call ({', '.join(sorted(KEY))})")
        return Namespace(
            self.model.name,
            self.weights,
            _tenant(key.get("tenant", "")),
            _salt(key.get("salt", b"")),
            _adapter(key.get("adapter")),
            scheme,
            bool(key.get("approximate", False)),
        )

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

    def group(self, name: str, *, field: str = "objects") -> int:
        """A group's number. Raises FabricError where the model has none of that name."""
        try:
            return self.model.index_of(name)
        except KeyError:
            known = ", ".join(g.name for g in self.model.groups)
            raise FabricError(f"{field}.{name}: the model has no such group ({known})") from None


# KEY decides who shares state, so nothing is made to fit: "lora" would be the adapter ("l", "o"), a salt of 8 eight zeros.


def _tenant(given: Any) -> str:
    if not isinstance(given, str):
        raise FabricError(f"tenant: a string is expected, got {type(given).__name__}")
    return given


def _salt(given: Any) -> bytes:
    if isinstance(given, str):
        return given.encode()
    if not isinstance(given, bytes | bytearray | memoryview):
        raise FabricError(f"salt: bytes or a string are expected, got {type(given).__name__}")
    return bytes(given)


def _adapter(given: Any) -> tuple[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, tuple | list) or len(given) != 2 or not all(isinstance(part, str) for part in given):
        raise FabricError(f"adapter: (name, revision), two strings, are expected, got {given!r}")
    return given[0], given[1]


def _extra(given: Any) -> tuple[Extra, ...]:
    try:
        found = tuple(e if isinstance(e, Extra) else Extra(*e) for e in given)
    except TypeError:
        raise FabricError("extra: pairs of an offset in tokens and a digest are expected") from None
    for extra in found:
        if type(extra.at) is not int or extra.at < 0:
            raise FabricError(f"extra: {extra.at!r} is no offset in tokens, from 0")
        if not isinstance(extra.digest, bytes) or not extra.digest:
            raise FabricError(f"extra: at {extra.at} a digest of bytes is expected, got {type(extra.digest).__name__}")
    return found
