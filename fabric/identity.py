"""Identity: namespaces and the chained digests of token prefixes.

Every object is keyed by (namespace, digest of the token chain at its end, group, shard). The chain
is keyed BLAKE3 (256 bit): the key is the namespace's digest, each link hashes the previous link,
the tokens since it and the *extra* content (images, audio, prompt embeddings) that begins in them,
every field length-prefixed. Equal placeholder tokens with another image never match, and the same
tokens give the same digest in every process, host and Python version (test vectors are pinned).

A link spans ``link_tokens``: the model's finest cut, or the least multiple of it that is at least
64. Cuts inside a link hash (link before, tokens since, extra since) under another label, so fine
cuts are computed only where they are asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from .kinds import Digest, FabricError
from .messages import Prompt
from .model import ModelSpec

HASH_SCHEME = "kvfabric-blake3-v1"
DIGEST_BYTES = 32
LINK_TOKENS_MIN = 64

Tokens = npt.NDArray[np.uint32]

_LENGTH = struct.Struct("<Q")
_LINK = b"\x01"
_CUT = b"\x02"
_NAMED = b"\x03"


def _fields(*parts: bytes) -> bytes:
    """Length-prefix each part, so that no two lists of parts give the same bytes."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who may share state: everything besides the tokens that makes state equal.

    Weights and adapter revisions are part of it, so an update makes older state unreachable at
    once. ``hash_scheme`` names who computes block digests.

    Fields are length-prefixed and one more stands for approximate state, so its names meet no others.
    """

    model: str
    weights: str
    tenant: str = ""
    salt: bytes = b""
    adapter: tuple[str, str] | None = None
    hash_scheme: str = HASH_SCHEME
    approximate: bool = False
    """State computed from an approximate replay: never equal to any that is exact."""

    def digest(self) -> bytes:
        """32 bytes that key the token chain."""
        return _namespace_digest(self)


@lru_cache(256)
def _namespace_digest(of: Namespace) -> bytes:
    """Kept: an engine asks in a few namespaces, once for each of its small jobs."""
    adapter = [] if of.adapter is None else [part.encode() for part in of.adapter]
    return blake3(
        _fields(
            of.hash_scheme.encode(),
            of.model.encode(),
            of.weights.encode(),
            of.tenant.encode(),
            of.salt,
            _fields(*adapter),
            *([b"approximate"] if of.approximate else []),
        ),
        derive_key_context="kvfabric 2026 namespace",
    ).digest()


@lru_cache(256)
def weights_digest16(weights: str) -> bytes:
    """16 bytes that stand for a weights revision in arena headers."""
    return blake3(weights.encode(), derive_key_context="kvfabric 2026 weights revision").digest(16)


@dataclass(frozen=True, slots=True, order=True)
class Extra:
    """Content that placeholder tokens stand for: its digest and the token offset where it begins."""

    at: int
    digest: bytes


def as_tokens(tokens: Any) -> Tokens:
    """Token ids as little-endian uint32, shape (n,). Raises FabricError for ids that do not fit."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise FabricError(f"tokens: one dimension is expected, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise FabricError(f"tokens: integers are expected, got {array.dtype}")
    if array.size and (int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF):
        raise FabricError("tokens: ids must lie in 0..2^32-1")
    return np.ascontiguousarray(array, dtype="<u4")


def link_tokens(cut_tokens: int) -> int:
    """Tokens a chain link spans for a model whose finest cut is ``cut_tokens``."""
    return cut_tokens * -(-LINK_TOKENS_MIN // cut_tokens)


def chain(key: bytes, tokens: Tokens, step_tokens: int, extra: Sequence[Extra] = ()) -> list[bytes]:
    """Digests (32 bytes each) of all whole links of ``step_tokens`` over ``tokens``."""
    raw = memoryview(tokens.view(np.uint8).data)
    size = step_tokens * 4
    links = len(tokens) // step_tokens
    previous = bytes(DIGEST_BYTES)
    prefix = _LINK + _LENGTH.pack(DIGEST_BYTES)
    middle = _LENGTH.pack(size)
    out = []
    if not extra:
        end = _LENGTH.pack(0)
        for i in range(0, links * size, size):
            previous = blake3(b"".join((prefix, previous, middle, raw[i : i + size], end)), key=key).digest()
            out.append(previous)
        return out
    for i in range(links):
        content = _extra_bytes(extra, i * step_tokens, (i + 1) * step_tokens)
        previous = blake3(
            b"".join((prefix, previous, middle, raw[i * size : (i + 1) * size], _LENGTH.pack(len(content)), content)),
            key=key,
        ).digest()
        out.append(previous)
    return out


def _extra_bytes(extra: Iterable[Extra], start: int, end: int) -> bytes:
    return b"".join(_fields(_LENGTH.pack(e.at), e.digest) for e in extra if start <= e.at < end)


@dataclass(slots=True)
class PromptKeys:
    """The digests of one prompt under one namespace, computed once and where asked for.

    ``keys(unit)`` is the concatenation of the digests at unit, 2 * unit, ... up to the last whole
    one: the form requests carry.
    """

    model: ModelSpec
    namespace: Namespace
    tokens: Tokens
    extra: tuple[Extra, ...] = ()
    _key: bytes = field(init=False)
    _step: int = field(init=False)
    _links: list[bytes] = field(init=False)
    _by_unit: dict[int, bytes] = field(init=False, default_factory=dict)
    _prompt: Prompt | None = field(init=False, default=None, compare=False)

    def __post_init__(self) -> None:
        self._key = self.namespace.digest()
        self._step = link_tokens(self.model.cut_tokens)
        self.extra = tuple(sorted(self.extra))
        self._links = chain(self._key, self.tokens, self._step, self.extra)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def namespace_digest(self) -> bytes:
        """32 bytes that name the namespace."""
        return self._key

    def at(self, position: int) -> Digest:
        """Digest of the first ``position`` tokens, 0 < position <= n."""
        links, rest = divmod(position, self._step)
        before = self._links[links - 1] if links else bytes(DIGEST_BYTES)
        if not rest:
            return Digest(before)
        start = position - rest
        return Digest(
            blake3(
                _CUT
                + _fields(
                    before,
                    self.tokens[start:position].tobytes(),
                    _extra_bytes(self.extra, start, position),
                ),
                key=self._key,
            ).digest()
        )

    def _cuts(self, ends: range) -> Iterator[bytes]:
        """The digest at each end, as :meth:`at` gives it: most of them lie inside a link."""
        raw = memoryview(self.tokens.view(np.uint8).data)
        key, step, links = self._key, self._step, self._links
        prefix = _CUT + _LENGTH.pack(DIGEST_BYTES)
        lengths = [_LENGTH.pack(4 * rest) for rest in range(step)]
        nothing = _LENGTH.pack(0)
        for end in ends:
            whole, rest = divmod(end, step)
            if not rest:
                yield links[whole - 1]
            elif self.extra:
                yield self.at(end)
            else:
                before = links[whole - 1] if whole else bytes(DIGEST_BYTES)
                tokens = raw[4 * (end - rest) : 4 * end]
                yield blake3(b"".join((prefix, before, lengths[rest], tokens, nothing)), key=key).digest()

    @property
    def prompt(self) -> Prompt:
        """The prompt as requests carry it; always the same object, by which a request that comes again is known."""
        if self._prompt is None:
            units = tuple((unit, self.keys(unit)) for unit in self.model.units_tokens)
            weights, tenant = weights_digest16(self.namespace.weights), self.namespace.tenant
            self._prompt = Prompt(self._key, weights, tenant, len(self), units)
        return self._prompt

    def keys(self, unit_tokens: int) -> bytes:
        """Digests at every multiple of ``unit_tokens`` up to n, 32 bytes each, concatenated."""
        known = self._by_unit.get(unit_tokens)
        if known is None:
            ends = range(unit_tokens, len(self.tokens) + 1, unit_tokens)
            if unit_tokens % self._step == 0:
                stride = unit_tokens // self._step
                known = b"".join(self._links[stride - 1 :: stride])
            else:
                known = b"".join(self._cuts(ends))
            self._by_unit[unit_tokens] = known
        return known


@dataclass(slots=True)
class NamedKeys(PromptKeys):
    """Digests of blocks that an engine names by hashes of its own, for a model that is not ``chained``.

    A hash stands for its block and all before it; what it leaves out is the namespace's to say. The blocks are
    listed in any order; ``tokens`` stays empty, and the prompt counts one token more than its blocks have.
    """

    names: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        self._key = self.namespace.digest()
        self._step = self.model.groups[0].unit_tokens
        self._links = [blake3(_NAMED + _fields(name), key=self._key).digest() for name in self.names]
        self._by_unit = {self._step: b"".join(self._links)}

    def __len__(self) -> int:
        return len(self.names) * self._step + 1


TEST_VECTOR_TOKENS = tuple(range(1, 200))


def join_vector(model: ModelSpec) -> bytes:
    """32 bytes that every member of a fabric must compute equally before it may join.

    It runs the whole of the identity rules: namespace, links, an inner cut and extra content.
    """
    namespace = Namespace(model.name, model.weights, "tenant", b"salt", ("adapter", "r1"))
    keys = PromptKeys(model, namespace, as_tokens(TEST_VECTOR_TOKENS), (Extra(70, b"\x07" * 32),))
    cut = model.cut_tokens
    return blake3(keys.keys(cut) + keys.at(len(keys) // cut * cut or len(keys))).digest()
