"""vLLM's tiering on its CPU backend, where device memory is host memory and blocks are copied by memmove.

vLLM copies between device and host on CUDA and XPU only. With ``"spec_name": "HostTieringSpec", "spec_module_path":
"kvfabric.engines.vllm_tier.host"`` the rest of its offloading, and any secondary tier, runs on a machine without one.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """TieringOffloadingSpec with a copier for host memory."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks at once: a transfer has ended when it was submitted."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._pages = [t.page_size_bytes for t in kv_caches.tensors]
        self._device = [t.tensor.view(torch.int8) for t in kv_caches.tensors]
        self._host = [region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages]
        self._groups = kv_caches.group_data_refs
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, blocks: GPULoadStoreSpec, chunks: Any, *, store: bool) -> bool:
        assert isinstance(chunks, CPULoadStoreSpec)
        began = time.monotonic()
        ids, places = blocks.block_ids.tolist(), chunks.block_ids.tolist()
        at = chunk_at = nbytes = 0
        for group, (count, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            skipped = first % self._blocks_per_chunk
            for number in range(count):
                chunk, part = divmod(skipped + number, self._blocks_per_chunk)
                nbytes += self._copy_block(group, ids[at + number], places[chunk_at + chunk], part, store=store)
            at += count
            if count:
                chunk_at += -(-(skipped + count) // self._blocks_per_chunk)
        self._finished.append(TransferResult(job_id, True, nbytes, time.monotonic() - began))
        return True

    def _copy_block(self, group: int, block: int, chunk: int, part: int, *, store: bool) -> int:
        copied = 0
        for ref in self._groups[group]:
            size = ref.page_size_bytes
            start = part * self._pages[ref.tensor_idx]
            device = self._device[ref.tensor_idx][block].reshape(-1)[:size]
            host = self._host[ref.tensor_idx][chunk, start : start + size]
            if store:
                host.copy_(device)
            else:
                device.copy_(host)
            copied += size
        return copied

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._device.clear()
        self._host.clear()
        self._region.cleanup()
