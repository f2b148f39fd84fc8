"""The secondary tier: vLLM's scheduler asks, background threads answer.

    thread            calls                              touches
    scheduler         every method of the tier           look-up verdicts, job queues; never the fabric
    look-ups (1)      which blocks are there             the session
    stores (1)        rows -> the fabric, in order       the session, rows that vLLM pins meanwhile
    loads (2)         the fabric -> rows                 the session, rows that vLLM keeps unreadable meanwhile

A look-up answers from what was heard, or RETRY; what a request once heard holds until it ends or a load fails, and a
block that failed is absent from then on, so nothing is asked for ever. vLLM itself keeps windows, null blocks and
preemption: it asks only for blocks that its hybrid cache manager can use, by hash and group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from ...actors.fabric import connect, connect_ray, launch
from ...actors.session import Session
from ...fabric.kinds import FabricError
from ..shared.audit import Audits
from ..shared.description import digest
from ..shared.named_blocks import Moved, NamedBlocks, blocks_model
from .described import SCHEME, described
from .workers import Workers

logger = init_logger(__name__)

STORES_QUEUED_MAX = 1024
LOADS_AT_ONCE = 2

REUSED_TOKENS = "vllm:kv_offload_kvfabric_reused_tokens"
LOADED_BLOCKS = "vllm:kv_offload_kvfabric_loaded_blocks"
STORED_BLOCKS = "vllm:kv_offload_kvfabric_stored_blocks"
REFUSED_BLOCKS = "vllm:kv_offload_kvfabric_refused_blocks"


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's own keeper of verdicts, asking the fabric."""

    def __init__(self, blocks: NamedBlocks, tier_type: str) -> None:
        self._blocks = blocks
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._blocks.present([bytes(key) for key in keys])


@dataclass(slots=True)
class _Done:
    """A job's end, on its way to the scheduler's thread."""

    job: TransferJob
    moved: Moved | None
    """None where it never ran."""
    seconds: float


class KvFabricTier(SecondaryTierManager):  # type: ignore[misc]
    """Blocks in a kvfabric fabric, shared by every engine of the cluster that computes the same.

    ``fabric``: its name. ``address``: of the Ray cluster, where this process is not connected to it and RAY_ADDRESS does
    not say. ``node``: the Ray id of this engine's node, where a host has several and vLLM runs its core in a process of
    its own. ``launch``: fields of a ``FabricSpec`` (without ``model``): start the fabric where none of that name runs.
    ``weights``: the weights' revision; by default the digest of the model's tensors. ``namespace``: whatever else decides
    about the bytes that vLLM's hash and configuration do not say. ``tenant``: whose room it takes. ``load_s``: what a load
    may take. Raises FabricError where no such fabric runs or it serves blocks of another size.
    """

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        fabric: str = "default",
        address: str = "",
        node: str = "",
        launch: dict[str, Any] | None = None,
        weights: str | None = None,
        namespace: str = "",
        tenant: str = "",
        load_s: float = 10.0,
        enable_kv_events: bool = False,
        locality: str | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        self._rows: Any = np.asarray(primary_kv_view).view(np.uint8)
        told = described(offloading_spec.config, self.block_size_bytes, weights=weights, namespace=namespace)
        if address:
            connect_ray(address)
        session = self._session(fabric, node, launch)
        try:
            self.blocks = NamedBlocks(
                session,
                scheme=SCHEME,
                salt=digest(told),
                block_bytes=self.block_size_bytes,
                tenant=tenant,
                load_s=load_s,
                kind_of=lambda name: int(get_offload_group_idx(OffloadKey(name))),
                audits=Audits(session, offloading_spec.config.model.dtype),
            )
        except FabricError:
            session.close()
            raise
        self.events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self.events = []
        elif enable_kv_events:
            logger.warning(
                "kvfabric: tier %s says enable_kv_events, but vLLM's own KV events are off: it tells none", tier_type
            )
        self._stats = OffloadingConnectorStats()
        self._lookup_manager = _Lookups(self.blocks, tier_type)
        self._storing = Workers(1, "kvfabric-store")
        self._loading = Workers(LOADS_AT_ONCE, "kvfabric-load")
        self._finished: deque[_Done] = deque()

    def _session(self, fabric: str, node: str, spec: dict[str, Any] | None) -> Session:
        if spec is not None:
            tokens = max(self._offloading_spec.tokens_per_block) * self._offloading_spec.blocks_per_chunk
            model = blocks_model(block_bytes=self.block_size_bytes, block_tokens=tokens)
            launch({"memory_bytes": 1 << 30, **spec, "model": model.model_dump(mode="json")}, name=fabric)
        return connect(fabric, node=node)

    # --- look-ups ------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookup_manager.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookup_manager.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookup_manager.cleanup(req_context.req_id)

    # --- transfers -----------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        if len(self._storing) >= STORES_QUEUED_MAX:
            self._finished.append(_Done(job_metadata, None, 0.0))
            return
        self._storing.submit(partial(self._run, job_metadata, self.blocks.store))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._loading.submit(partial(self._run, job_metadata, self.blocks.load))

    def _run(self, job: TransferJob, move: Callable[..., Moved]) -> None:
        began = time.monotonic()
        moved = None
        try:
            rows = [self._rows[chunk] for chunk in np.asarray(job.chunk_ids).tolist()]
            moved = move([bytes(key) for key in job.keys], rows)
        except FabricError as error:
            logger.warning("kvfabric: a job of %d blocks failed: %s", len(job.keys), error)
        except Exception:
            # An engine goes on without its cache, and a job that never ended would keep its chunks for ever.
            logger.exception("kvfabric: a job of %d blocks failed by a bug", len(job.keys))
        finally:
            self._finished.append(_Done(job, moved, time.monotonic() - began))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while self._finished:
            results.append(self._result(self._finished.popleft()))
        return results

    def _result(self, done: _Done) -> JobResult:
        job, moved = done.job, done.moved or Moved()
        keys = list(job.keys)
        arrived = [keys[place] for place in sorted(moved.done)]
        whole = len(arrived) == len(keys)
        if job.is_promotion:
            if not whole:
                there = set(arrived)
                self._lookup_manager.mark_miss([key for key in keys if key not in there])
            self._count(LOADED_BLOCKS, len(arrived))
            self._count(REUSED_TOKENS, self.blocks.tokens_of(map(bytes, arrived)))
        else:
            self._count(STORED_BLOCKS, len(arrived))
            self._stored(arrived)
        for reason in moved.refused.values():
            self._count(REFUSED_BLOCKS, 1, str(reason))
        nbytes = len(arrived) * self.block_size_bytes
        partly = tuple(arrived) if job.is_promotion and arrived and not whole else None
        return JobResult(job.job_id, whole, partly, done.seconds, nbytes or None)

    def has_pending_work(self) -> bool:
        return bool(self._finished)

    def drain_jobs(self) -> None:
        self._storing.drain()
        self._loading.drain()

    # --- what is told --------------------------------------------------------------------------

    def _stored(self, keys: list[OffloadKey]) -> None:
        if self.events is not None and keys:
            self.events.append(OffloadingEvent(keys, self.medium, removed=False, locality=self.locality))

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self.events:
            yield from self.events
            self.events.clear()

    def _count(self, name: str, value: int, *labels: str) -> None:
        if value:
            self._stats.increase_counter(name, value, (self.tier_type, *labels))

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        del extra_config
        return {
            REUSED_TOKENS: OffloadingCounterMetadata("Tokens whose state came from the fabric.", ("tier",)),
            LOADED_BLOCKS: OffloadingCounterMetadata("Blocks loaded from the fabric.", ("tier",)),
            STORED_BLOCKS: OffloadingCounterMetadata("Blocks handed to the fabric.", ("tier",)),
            REFUSED_BLOCKS: OffloadingCounterMetadata("Blocks that were not moved, and why.", ("tier", "reason")),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    # --- end -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Let every store end, then everything else."""
        self._lookup_manager.shutdown()
        self._storing.shutdown()
        self._loading.shutdown()
        self.blocks.close()
        self._rows = None  # vLLM unmaps the memory
