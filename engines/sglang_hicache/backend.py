"""The ``HiCacheStorage`` itself. SGLang calls it from its prefetch and backup threads, so every call may block."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)

from ...actors.fabric import attach, connect, connect_ray, launch
from ...fabric.kinds import FabricError
from ..shared.audit import Audits
from ..shared.description import digest
from ..shared.named_blocks import Moved, NamedBlocks, blocks_model
from ..shared.parts import Parts, block_count, blocks_of
from .described import SCHEME, described, geometry, weights_of
from .hits import KV, STATE_POOLS, HitPolicy, Hits, PoolRule, hits
from .pages import Form, Page, PoolPages, as_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")

BLOCK_BYTES = 256 << 10
"""Of a fabric that this backend launches for a pool without bytes of its own (DeepSeek-V4's anchor)."""
_OWN_FIELDS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})


@dataclass(frozen=True, slots=True)
class Options:
    """What ``--hicache-storage-backend-extra-config`` may say to this backend.

    ``fabric``: its name. ``address``: of the Ray cluster, where this process is not connected to it and RAY_ADDRESS does
    not say. ``launch``: fields of a ``FabricSpec`` (without ``model``): start the fabric where none of that name runs.
    ``weights``: the weights' revision; by default the digest of the tensors at ``model_path``. ``namespace``: whatever else
    decides about the bytes. ``tenant``: whose room it takes. ``load_s``: what a load may take.
    """

    fabric: str = "default"
    address: str = ""
    launch: dict[str, Any] | None = None
    weights: str | None = None
    model_path: str | None = None
    namespace: str = ""
    tenant: str = ""
    load_s: float = 10.0

    @classmethod
    def of(cls, given: dict[str, Any] | None) -> Options:
        """Raises FabricError, naming the field, for one there is not."""
        fields = {name: value for name, value in (given or {}).items() if name not in _OWN_FIELDS}
        unknown = sorted(fields.keys() - cls.__slots__)
        if unknown:
            raise FabricError(
                f"hicache-storage-backend-extra-config: {unknown[0]} is not one of {', '.join(sorted(cls.__slots__))}"
            )
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class _Pool:
    """A registered host pool: its pages, and how they are named."""

    name: str
    pool: Any
    pages: PoolPages
    geometry: str
    """Digest of what its pages are made of: pages of another make have other names."""
    blocks: int
    """Fabric blocks of one page."""
    dtype: str
    """Of its numbers, by name; "" where they are of several."""


def _counted(name: bytes) -> int | None:
    """Which block of its page a block of the KV pool is: a page counts once, and one of a side pool not at all."""
    return int(name.rpartition(b"\n")[2].partition(b"/")[0]) if _pool_named_in(name) == KV else None


def _pool_named_in(name: bytes) -> str:
    """The pool that a block is of."""
    return name.partition(b"\n")[0].decode()


class KvFabricHiCache(HiCacheStorage):  # type: ignore[misc]
    """Pages in a kvfabric fabric, shared by every engine of the cluster that computes the same.

    A page counts as there only if every tensor-parallel and context-parallel rank has its part, so ranks never
    disagree by more than what has not been told yet; pipeline stages are compared by SGLang. The connection is
    made when the first host pool is registered. Raises FabricError where no such fabric runs.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._options = Options.of(storage_config.extra_config)
        self._weights = weights_of(storage_config, self._options.weights, self._options.model_path)
        self._pools: dict[str, _Pool] = {}
        self._blocks: NamedBlocks | None = None

    # --- pools ---------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        pages = PoolPages(mem_pool_host)
        if self._blocks is None:
            self._blocks = self._connected(pages)
        self._add(KV, mem_pool_host, pages)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(str(host_pool_name), host_pool, PoolPages(host_pool))

    def _add(self, name: str, pool: Any, pages: PoolPages) -> None:
        made = digest(geometry(pool, pages)).hex()[:16]
        blocks = block_count(pages.page_bytes, self.blocks.block_bytes)
        dtype = str(getattr(pool, "dtype", "")).removeprefix("torch.")
        self._pools[name] = _Pool(name, pool, pages, made, blocks, "" if name in STATE_POOLS else dtype)

    def _connected(self, pages: PoolPages) -> NamedBlocks:
        options = self._options
        if options.address:
            connect_ray(options.address)
        if options.launch is not None:
            model = blocks_model(block_bytes=pages.page_bytes or BLOCK_BYTES, block_tokens=pages.page_indices)
            launch(
                {"memory_bytes": 1 << 30, **options.launch, "model": model.model_dump(mode="json")}, name=options.fabric
            )
        session = connect(options.fabric)
        weights, model_config = self._weights
        try:
            return NamedBlocks(
                session,
                scheme=SCHEME,
                salt=digest(
                    described(self._config, weights=weights, model_config=model_config, namespace=options.namespace)
                ),
                block_bytes=session.model.groups[0].block_bytes,
                tenant=options.tenant,
                load_s=options.load_s,
                kind_of=_counted,
                audits=Audits(session, lambda name: self._pools[_pool_named_in(name)].dtype),
            )
        except FabricError:
            session.close()
            raise

    @property
    def blocks(self) -> NamedBlocks:
        """The fabric's side. Raises FabricError before a host pool was registered."""
        if self._blocks is None:
            raise FabricError("no host pool is registered yet: register_mem_pool_host comes first")
        return self._blocks

    # --- names ---------------------------------------------------------------------------------

    def _rank(self, pool: str, tp_rank: int, cp_rank: int) -> str:
        """Which part of a page this is: a replicated pool has one for all tensor-parallel ranks, a state pool never."""
        replicated = self._config.is_mla_model and pool not in STATE_POOLS
        return f"cp{cp_rank} dcp{self._config.dcp_rank}" + ("" if replicated else f" tp{tp_rank}")

    def _own_rank(self, pool: str) -> str:
        return self._rank(pool, self._config.tp_rank, self._config.attn_cp_rank)

    def _all_ranks(self, pool: str) -> list[str]:
        config = self._config
        ranks = (self._rank(pool, tp, cp) for cp in range(config.attn_cp_size) for tp in range(max(1, config.tp_size)))
        return list(dict.fromkeys(ranks))

    @staticmethod
    def _names(pool: _Pool, form: Form, rank: str, key: str) -> list[bytes]:
        """A page's blocks, in order. The page hash stands for the page and all before it."""
        head = f"{pool.name}\n{pool.geometry}\n{form}\n{rank}\n{key}"
        return [f"{head}\n{block}/{pool.blocks}".encode() for block in range(pool.blocks)]

    # --- what is there -------------------------------------------------------------------------

    def _present(self, pool: _Pool, form: Form, keys: Sequence[str]) -> int:
        """Bitmap of the pages that every rank could load."""
        ranks = self._all_ranks(pool.name)
        names = [name for key in keys for rank in ranks for name in self._names(pool, form, rank, key)]
        there = self.blocks.present(names)
        width = len(ranks) * pool.blocks
        return sum(1 << i for i in range(len(keys)) if all(there[i * width : (i + 1) * width]))

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages from the first on are there, on all ranks."""
        pool = self._pools[KV]
        form = pool.pages.form if self._zero_copy else Form.FLAT
        return self._or(lambda: hits(len(keys), self._present(pool, form, keys)).pages, 0)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """From which pages a request can go on with every pool it needs, and how far each pool reaches."""
        found: Hits = self._or(lambda: self._hits(keys, pool_transfers or ()), Hits((), {}))
        return PoolTransferResult(found.pages, dict(found.pool_pages), list(found.positions))

    def _hits(self, keys: list[str], transfers: Iterable[PoolTransfer]) -> Hits:
        kv = self._pools[KV]
        present = self._present(kv, kv.pages.form if self._zero_copy else Form.FLAT, keys)
        if not present & 1:
            return Hits((), {})
        asked = []
        for transfer in transfers:
            pool = self._pools.get(str(transfer.name))
            if pool is None:
                raise FabricError(f"pool {transfer.name} was never registered")
            asked.append(self._asked(pool, transfer, keys))
        return hits(len(keys), present, asked)

    def _asked(self, pool: _Pool, transfer: PoolTransfer, keys: list[str]) -> tuple[PoolRule, int]:
        policy = HitPolicy(str(transfer.hit_policy.value))
        if policy is not HitPolicy.BLOCK_GROUPS:
            bits = self._present(pool, pool.pages.form, keys)
            return PoolRule(pool.name, policy, trailing_pages=max(1, len(transfer.keys or ()))), bits
        rule = PoolRule(pool.name, policy, block_pages=transfer.block_pages)
        group, named = transfer.group_pages, list(transfer.keys or ())
        if group < 1:
            raise FabricError(f"pool {pool.name}: block_groups of {group} pages a group")
        bits = self._present(pool, pool.pages.form, named)
        whole = (1 << group) - 1
        return rule, sum(1 << g for g in range(len(named) // group) if bits >> g * group & whole == whole)

    # --- moving --------------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill pages of the host pool. True: the page holds proven bytes."""
        return self._get(self._pools[KV], keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the host pool. True: the page is in the fabric."""
        return self._set(self._pools[KV], keys, host_indices)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """The same for pages of several pools."""
        return {t.name: self._moved_v2(t, self._get) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """The same for pages of several pools."""
        return {t.name: self._moved_v2(t, self._set) for t in transfers}

    def _moved_v2(self, transfer: PoolTransfer, move: Callable[[_Pool, list[str], Any], list[bool]]) -> list[bool]:
        keys = list(transfer.keys or ())
        pool = self._pools.get(str(transfer.name))
        if pool is None or transfer.host_indices is None:
            logger.warning("kvfabric: pool %s has no host memory to move %d pages", transfer.name, len(keys))
            return [False] * len(keys)
        return move(pool, keys, transfer.host_indices)

    def _get(self, pool: _Pool, keys: list[str], host_indices: Any) -> list[bool]:
        pages = self._pages(pool, keys, host_indices, reading=False)
        if pages is None:
            return [False] * len(keys)
        done = self._move(pool, keys, pages, self.blocks.load)
        pool.pages.landed(page for page, ok in zip(pages, done, strict=True) if ok)
        return done

    def _set(self, pool: _Pool, keys: list[str], host_indices: Any) -> list[bool]:
        pages = self._pages(pool, keys, host_indices, reading=True)
        if pages is None:
            return [False] * len(keys)
        return self._move(pool, keys, pages, self.blocks.store)

    def _pages(self, pool: _Pool, keys: list[str], host_indices: Any, *, reading: bool) -> list[Page] | None:
        indices = host_indices.tolist()
        if len(indices) != len(keys) * pool.pages.page_indices:
            logger.warning("kvfabric: pool %s: %d host indices for %d pages", pool.name, len(indices), len(keys))
            return None
        return pool.pages.at(indices, reading=reading)

    def _move(
        self, pool: _Pool, keys: list[str], pages: list[Page], move: Callable[[list[bytes], list[Parts]], Moved]
    ) -> list[bool]:
        """Which pages were moved whole."""
        rank = self._own_rank(pool.name)
        names = [n for key, page in zip(keys, pages, strict=True) for n in self._names(pool, page.form, rank, key)]
        rows = [row for page in pages for row in blocks_of(page.parts, self.blocks.block_bytes)]
        moved: Moved = self._or(lambda: move(names, rows), Moved())
        done = set(moved.done)
        return [all(i * pool.blocks + b in done for b in range(pool.blocks)) for i in range(len(keys))]

    def _or(self, ask: Callable[[], T], otherwise: T) -> T:
        """What the fabric says, or what stands for nothing where it is not there: SGLang recomputes."""
        try:
            return ask()
        except FabricError as error:
            logger.warning("kvfabric: %s", error)
            return otherwise

    # --- one flat page at a time (``interface_v1`` off) ---------------------------------------

    @property
    def _zero_copy(self) -> bool:
        return bool((self._config.extra_config or {}).get("interface_v1", 0))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Fill a flat page; None where its bytes are not to be had."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """The same for several."""
        targets = list(target_locations or [None] * len(keys))
        if any(target is None for target in targets):
            return [None] * len(keys)
        pool = self._flat_pool(targets)
        pages = [Page([as_bytes(target)], Form.FLAT, 0) for target in targets]
        done = self._move(pool, keys, pages, self.blocks.load)
        return [target if ok else None for target, ok in zip(targets, done, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a flat page."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """The same for several; True if all are in the fabric."""
        held = [value.contiguous() for value in values or ()]
        if len(held) != len(keys):
            return False
        pages = [Page([as_bytes(value)], Form.FLAT, 0) for value in held]
        return all(self._move(self._flat_pool(held), keys, pages, self.blocks.store))

    def _flat_pool(self, tensors: Sequence[Any]) -> _Pool:
        """The KV pool with as many blocks a page as these flat pages have."""
        pool = self._pools[KV]
        blocks = block_count(tensors[0].nbytes if tensors else 0, self.blocks.block_bytes)
        return replace(pool, blocks=blocks)

    def exists(self, key: str) -> bool:
        """Whether a page is there, on all ranks."""
        return self.batch_exists([key]) == 1

    # --- end -----------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Take everything of this model out of the fabric, from every tier. True: proven gone."""
        keys = self.blocks.keys([])
        nothing: dict[str, Any] = {}
        told = self._or(lambda: attach(self._options.fabric).purge(namespace=keys.namespace_digest), nothing)
        return bool(told) and not told["left"] and not told["unanswered"]

    def close(self) -> None:
        """End the session; stored pages stay."""
        if self._blocks is not None:
            self._blocks.close()
