"""How an engine names its blocks, told to those who send requests to it.

A router must know the names of a prompt's blocks before an engine has seen it. vLLM's hashes it can compute; what the
tier's names bear besides (:mod:`.described`) only the engine knows, so a worker tells it:

    LLM(..., worker_extension_cls="kvfabric.engines.vllm_tier.naming.TellsNaming")
    naming = Naming.of(llm.collective_rpc("kvfabric_naming")[0])
    session.rank(naming.keys(session, tokens))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from ...actors.session import Session
from ...fabric.identity import PromptKeys
from ..shared.description import digest
from .described import SCHEME, described

EXTENSION = "kvfabric.engines.vllm_tier.naming.TellsNaming"
"""vLLM's ``worker_extension_cls``."""
TIER = "KvFabricTier"


@dataclass(frozen=True, slots=True)
class Naming:
    """``salt``: the digest of all that vLLM's hash leaves out, as hexadecimal digits. ``algorithm``: vLLM's name of the hash;
    ``first``: what stands before the first block, as hexadecimal digits. A block of ``group``, whose blocks are all needed for
    a resume, covers ``block_tokens`` tokens, a hash ``hash_tokens``.
    """

    fabric: str
    scheme: str
    salt: str
    tenant: str
    algorithm: str
    first: str
    hash_tokens: int
    block_tokens: int
    group: int

    @classmethod
    def of(cls, told: dict[str, Any]) -> Self:
        """From what :meth:`told` made. Raises TypeError for anything else."""
        return cls(**told)

    def told(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def names(self, tokens: Sequence[int], cache_salt: str | None = None) -> list[bytes]:
        """The names of a prompt's whole blocks, without images or adapters. Needs vLLM in this process."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import hash_block_tokens
        from vllm.v1.kv_offload.base import make_offload_key

        hashed = get_hash_fn_by_name(self.algorithm)
        parent: Any = bytes.fromhex(self.first)
        extra: Any = (("cache_salt", cache_salt),) if cache_salt else None
        names = []
        for end in range(self.hash_tokens, len(tokens) + 1, self.hash_tokens):
            parent = hash_block_tokens(hashed, parent, tokens[end - self.hash_tokens : end], extra)
            extra = None
            if end % self.block_tokens == 0:
                names.append(bytes(make_offload_key(parent, self.group)))
        return names

    def keys(self, session: Session, tokens: Sequence[int], cache_salt: str | None = None) -> PromptKeys:
        """What stands for a prompt's blocks in every call of a session with :attr:`fabric`."""
        tenant = {"tenant": self.tenant} if self.tenant else {}
        return session.named(
            self.names(tokens, cache_salt), scheme=self.scheme, salt=bytes.fromhex(self.salt), **tenant
        )


class TellsNaming:
    """A vLLM worker that tells how its engine's tier names blocks: for ``collective_rpc("kvfabric_naming")``."""

    def kvfabric_naming(self) -> dict[str, Any]:
        """A :class:`Naming` as plain data, empty where nobody else can compute the names or the engine has no such tier."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        worker = getattr(get_kv_transfer_group(), "connector_worker", None) if has_kv_transfer_group() else None
        if worker is None:
            return {}
        naming = naming_of(
            worker.spec, worker.kv_cache_config, worker.vllm_config.cache_config.prefix_caching_hash_algo
        )
        return {} if naming is None else naming.told()


def naming_of(spec: Any, kv_cache_config: Any, algorithm: str) -> Naming | None:
    """Of an engine's TieringOffloadingSpec; None where it has no such tier, or the hash is seeded for one process alone."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    tiers = [tier for tier in spec.extra_config.get("secondary_tiers", ()) if tier.get("type") == TIER]
    hashed = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(hashed)
    if not tiers or seed != resolve_none_hash_seed(hashed):  # a seed of a process's own is drawn anew each time
        return None
    tier = tiers[0]
    config = spec.config
    told = described(config, spec.kv_bytes_per_chunk, weights=tier.get("weights"), namespace=tier.get("namespace", ""))
    group = next(
        (g for g in config.groups if not _slides(kv_cache_config.kv_cache_groups[g.group_id])), config.groups[0]
    )
    return Naming(
        fabric=tier.get("fabric", "default"),
        scheme=SCHEME,
        salt=digest(told).hex(),
        tenant=tier.get("tenant", ""),
        algorithm=algorithm,
        first=hashed(seed).hex(),
        hash_tokens=config.cache.tokens_per_hash,
        block_tokens=group.tokens_per_block * config.cache.blocks_per_chunk,
        group=group.group_id,
    )


def _slides(group: Any) -> bool:
    """Whether a group's layers need a window alone."""
    return getattr(group.kv_cache_spec, "sliding_window", None) is not None
