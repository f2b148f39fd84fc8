"""One SGLang rank in a process of its own: real host pools, and HiCache's controller above the backend."""

from __future__ import annotations

import sys
import time
from typing import Any

PAGE = 16
LAYERS, HEADS, HEAD_DIM = 3, 2, 32
POOL_TOKENS = 64 * PAGE
PAGE_BYTES = 2 * LAYERS * PAGE * HEADS * HEAD_DIM * 2


class Rank:
    """Pools of one layout and a dynamic storage backend. Everything returned is plain data."""

    def __init__(
        self, stub: str, extra: dict[str, Any], layout: str, parallel: dict[str, int], env: dict[str, str]
    ) -> None:
        import os
        import threading
        import warnings

        sys.path.insert(0, stub)
        os.environ.update(env)
        warnings.simplefilter("ignore")
        import torch
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
        from sglang.srt.runtime_context import get_parallel

        self.torch = torch
        set_of = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
        get_parallel().override_permanently(**{**set_of, **parallel})
        device = MHATokenToKVPool(
            size=16 * PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.make = lambda label: MHATokenToKVPoolHost(
            device._mha_buffer_info(),
            host_to_device_ratio=4.0,
            host_size=0,
            page_size=PAGE,
            layout=layout,
            pin_memory=False,
            device="cpu",
            device_capacity_tokens=16 * PAGE,
            start_layer=0,
            end_layer=LAYERS - 1,
            pool_label=label,
        )
        self.pools: dict[str, Any] = {"kv": self.make("kv")}
        self.controller = HiCacheController(
            PagedTokenToKVPoolAllocator(16 * PAGE, PAGE, torch.bfloat16, "cpu", device, False),
            self.pools["kv"],
            PAGE,
            None,
            threading.Event(),
            write_policy="write_through",
            io_backend="direct",
            storage_backend="dynamic",
            model_name=extra.pop("model_name", "tiny"),
            storage_backend_extra_config=extra,
            prefetch_threshold=PAGE,
        )

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def add_pool(self, name: str, kind: str = "mha") -> None:
        """A side pool of that name, as HiCache's hybrid controller registers it."""
        from sglang.srt.mem_cache.hicache_storage import PoolName

        made = self.make(name) if kind == "mha" else self._mamba(side_state=kind == "mamba_with_side_state")
        self.pools[name] = made
        self.backend.register_mem_host_pool_v2(self.pools[name], PoolName(name))

    def _mamba(self, *, side_state: bool) -> Any:
        from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
        from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

        zeros = self.torch.zeros
        more = {"extra_checkpoint_buffers": (zeros(9, 5),)} if side_state else {}
        info = MambaStateBufferInfo(temporal=zeros(2, 9, 4, 8, 8), conv=(zeros(2, 9, 24, 3),), **more)
        return MambaPoolHost(info, 4.0, 0, device_capacity=8, pin_memory=False, layout="page_first")

    # --- pages with content that their key decides ---------------------------------------------

    def _content(self, pool: str, key: str, seed: int) -> Any:
        import zlib

        torch = self.torch
        like = self.pools[pool].get_dummy_flat_data_page()
        generator = torch.Generator().manual_seed(zlib.crc32(f"{pool} {key} {seed}".encode()))
        raw = torch.randint(0, 256, (like.nbytes,), dtype=torch.uint8, generator=generator)
        return raw.view(like.dtype)

    def keys(self, tokens: list[int]) -> list[str]:
        """SGLang's own page hashes."""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        return list(get_storage_hash_str(tokens, None, page_size=PAGE))

    def _indices(self, pool: str, pages: int) -> Any:
        indices = self.pools[pool].alloc(pages * (self.pools[pool].page_size or 1))
        assert indices is not None
        return indices

    def _starts(self, pool: str, indices: Any) -> list[int]:
        return [int(i) for i in indices[:: self.pools[pool].page_size]]

    def write(self, pool: str, keys: list[str], seed: int = 0) -> Any:
        """Host indices of new pages with the keys' content."""
        indices = self._indices(pool, len(keys))
        for start, key in zip(self._starts(pool, indices), keys, strict=True):
            self.pools[pool].set_from_flat_data_page(start, self._content(pool, key, seed))
        return indices

    def right(self, pool: str, keys: list[str], indices: Any, seed: int = 0) -> list[bool]:
        """Which pages hold the keys' content, byte for byte."""
        as_bytes = lambda tensor: tensor.contiguous().view(self.torch.uint8)  # noqa: E731
        return [
            bool(
                self.torch.equal(
                    as_bytes(self.pools[pool].get_data_page(start)).flatten(),
                    as_bytes(self._content(pool, key, seed)).flatten(),
                )
            )
            for start, key in zip(self._starts(pool, indices), keys, strict=True)
        ]

    # --- the calls of HiCache ------------------------------------------------------------------

    def store(self, keys: list[str], seed: int = 0) -> list[bool]:
        indices = self.write("kv", keys, seed)
        done = self.backend.batch_set_v1(keys, indices)
        self.pools["kv"].free(indices)
        return list(done)

    def load(self, keys: list[str], seed: int = 0) -> tuple[list[bool], list[bool]]:
        """What the backend says it loaded, and which pages hold the right bytes."""
        indices = self._indices("kv", len(keys))
        done = self.backend.batch_get_v1(keys, indices)
        right = self.right("kv", keys, indices, seed)
        self.pools["kv"].free(indices)
        return list(done), right

    def note_audits(self) -> None:
        """From here on remember what audits found."""
        session = self.backend.blocks.session
        self.found: list[str] = []
        tell = session.audited

        def audited(tokens: Any, lease: Any, outcome: Any) -> Any:
            self.found.append(str(outcome))
            return tell(tokens, lease, outcome)

        session.audited = audited

    def audits(self) -> list[str]:
        return self.found

    def exists(self, keys: list[str]) -> int:
        return int(self.backend.batch_exists(keys))

    def _transfer(self, name: str, policy: str, keys: list[str], indices: Any = None, **more: int) -> Any:
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        return PoolTransfer(
            name=PoolName(name), host_indices=indices, keys=keys, hit_policy=PoolHitPolicy(policy), **more
        )

    def exists_v2(
        self, keys: list[str], asked: list[tuple[str, str, list[str], dict[str, int]]]
    ) -> tuple[int, dict[str, int], list[int]]:
        transfers = [self._transfer(name, policy, held, **more) for name, policy, held, more in asked]
        found = self.backend.batch_exists_v2(keys, transfers)
        pools = {str(name): pages for name, pages in found.extra_pool_hit_pages.items()}
        return found.kv_hit_pages, pools, list(found.restorable_prefix_pages or ())

    def store_v2(self, pool: str, keys: list[str], policy: str = "all_pages") -> list[bool]:
        transfer = self._transfer(pool, policy, keys, self.write(pool, keys))
        told = self.backend.batch_set_v2([transfer])
        return list(told[transfer.name])

    def load_v2(self, pool: str, keys: list[str], policy: str = "all_pages") -> tuple[list[bool], list[bool]]:
        indices = self._indices(pool, len(keys))
        transfer = self._transfer(pool, policy, keys, indices)
        told = self.backend.batch_get_v2([transfer])
        return list(told[transfer.name]), self.right(pool, keys, indices)

    # --- HiCache's controller, by its own threads ----------------------------------------------

    def back_up(self, tokens: list[int]) -> int:
        """Tokens that the controller's backup thread says it stored."""
        keys = self.keys(tokens)
        indices = self.write("kv", keys)
        self.controller.write_storage(indices, tokens, hash_value=keys)
        operation = self.controller.ack_backup_queue.get(timeout=60)
        self.pools["kv"].free(indices)
        return int(operation.completed_tokens)

    def prefetch(self, tokens: list[int]) -> tuple[int, int, list[bool]]:
        """As the scheduler does it: tokens that the query hit and that arrived, and which pages are right."""
        keys = self.keys(tokens)
        operation = self.controller.prefetch("request", tokens)
        assert self.controller.prefetch_hit_queue.get(timeout=60) is operation
        hit = operation.storage_hit_count
        if hit == 0:
            return 0, 0, []
        operation.host_indices = self.controller.alloc_prefetch_host_buffers(operation, hit)
        self.controller.prefetch_buffer.put(operation)
        arrived, deadline = 0, time.monotonic() + 60
        while time.monotonic() < deadline:
            ack = self.controller.ack_prefetch_queue.get(timeout=60)
            arrived = arrived if ack.completed_tokens is None else ack.completed_tokens
            if ack.completed_req:
                break
        indices = operation.host_indices[:arrived]
        right = self.right("kv", keys[: arrived // PAGE], indices)
        self.pools["kv"].free(operation.host_indices)
        return hit, arrived, right

    def clear(self) -> bool:
        return bool(self.backend.clear())

    def flat(self, keys: list[str]) -> tuple[bool, list[bool]]:
        """Through the calls that copy whole pages (``interface_v1`` off)."""
        values = [self._content("kv", key, 0) for key in keys]
        stored = bool(self.backend.batch_set(keys, values))
        targets = [self.pools["kv"].get_dummy_flat_data_page() for _ in keys]
        told = self.backend.batch_get(keys, targets)
        as_bytes = lambda tensor: tensor.view(self.torch.uint8)  # noqa: E731
        return stored, [
            got is not None and bool(self.torch.equal(as_bytes(got), as_bytes(value)))
            for got, value in zip(told, values, strict=True)
        ]

    def close(self) -> None:
        self.controller.detach_storage_backend()
