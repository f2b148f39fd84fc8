"""The ``L2AdapterInterface``: every call returns at once, work runs on threads, an event tells of its end.

Nothing is locked between a look-up and a load: a load takes a lease of its own, and proves its bytes or says no.

    Source: ``lmcache/v1/distributed/l2_adapters/base.py`` of LMCache 0.5.6.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform.event_notifier import create_event_notifier

from ...actors.fabric import connect, connect_ray
from ...fabric.kinds import FabricError
from ..shared.description import digest
from ..shared.named_blocks import Moved, NamedBlocks
from ..shared.parts import Bytes, Parts, blocks_of, memory

logger = logging.getLogger(__name__)

SCHEME = "lmcache-l2-1"
_FIELDS = frozenset({"fabric", "address", "weights", "namespace", "tenant", "load_s"})


def _counted(name: bytes) -> int | None:
    """An object counts once, with its first block."""
    return 0 if name.endswith(b"\n0") else None


class KvFabricL2(L2AdapterInterface):  # type: ignore[misc]
    """Objects in a kvfabric fabric whose blocks are named singly (``engines.shared.named_blocks.blocks_model``).

    ``params``: ``weights`` (the revision: LMCache's keys name a model, and names prove nothing), ``fabric``, ``address`` of
    the Ray cluster, ``namespace``, ``tenant``, ``load_s``. Raises FabricError for another field or none of these weights,
    or where no such fabric runs.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        unknown = sorted(params.keys() - _FIELDS)
        if unknown:
            raise FabricError(f"adapter_params: {unknown[0]} is not one of {', '.join(sorted(_FIELDS))}")
        if not params.get("weights"):
            raise FabricError(
                'adapter_params: "weights" is missing: the revision of the weights that these objects are of'
            )
        if params.get("address"):
            connect_ray(params["address"])
        session = connect(params.get("fabric", "default"))
        salt = digest({"scheme": SCHEME, "weights": params["weights"], "namespace": params.get("namespace", "")})
        try:
            self._blocks = NamedBlocks(
                session,
                scheme=SCHEME,
                salt=salt,
                block_bytes=session.model.groups[0].block_bytes,
                tenant=params.get("tenant", ""),
                load_s=float(params.get("load_s", 10.0)),
                kind_of=_counted,
            )
        except FabricError:
            session.close()
            raise
        self._events = {kind: create_event_notifier() for kind in ("store", "lookup", "load")}
        self._threads = {kind: ThreadPoolExecutor(1, thread_name_prefix=f"kvfabric-{kind}") for kind in self._events}
        self._lock = threading.Lock()
        self._tasks = 0
        self._ended: dict[str, dict[int, Any]] = {kind: {} for kind in self._events}

    def get_store_event_fd(self) -> int:
        return int(self._events["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events["load"].fileno())

    # --- tasks ---------------------------------------------------------------------------------

    def _submit(self, kind: str, work: Callable[[], Any], otherwise: Any) -> int:
        with self._lock:
            self._tasks += 1
            task = self._tasks
        self._threads[kind].submit(self._run, kind, task, work, otherwise)
        return task

    def _run(self, kind: str, task: int, work: Callable[[], Any], otherwise: Any) -> None:
        result = otherwise
        try:
            result = work()
        except FabricError as error:
            logger.warning("kvfabric: a %s failed: %s", kind, error)
        finally:  # whatever it was: a task that never ends would keep its buffers
            with self._lock:
                self._ended[kind][task] = result
            self._events[kind].notify()

    def _result(self, kind: str, task: int) -> Any:
        with self._lock:
            return self._ended[kind].pop(task, None)

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Store a batch of objects; all of them or a failure."""
        return self._submit("store", lambda: self._store(list(keys), list(objects)), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """What became of the stores that ended since the last call."""
        with self._lock:
            ended, self._ended["store"] = self._ended["store"], {}
        return ended

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Any) -> int:
        """Ask which objects are there."""
        return self._submit("lookup", lambda: self._lookup(list(keys)), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """A bitmap, once; None before."""
        return self._result("lookup", task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Nothing is locked."""

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Fill buffers."""
        return self._submit("load", lambda: self._load(list(keys), list(objects)), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        """A bitmap of the buffers that hold proven bytes, once; None before."""
        return self._result("load", task_id)

    # --- work ----------------------------------------------------------------------------------

    @staticmethod
    def _name(key: Any, block: int) -> bytes:
        fields = (key.model_name, f"{key.kv_rank}", f"{key.object_group_id}", key.cache_salt, key.chunk_hash.hex())
        return "\n".join((*fields, str(block))).encode()

    def _cut(
        self, keys: list[Any], objects: list[Any], heads: list[Bytes]
    ) -> tuple[list[bytes], list[Parts], list[range]]:
        """Names and rows of all blocks, and each object's places among them. An object's size goes before its bytes."""
        names: list[bytes] = []
        rows: list[Parts] = []
        places = []
        for key, held, head in zip(keys, objects, heads, strict=True):
            blocks = blocks_of([head, memory(held.data_ptr, held.get_size())], self._blocks.block_bytes)
            places.append(range(len(rows), len(rows) + len(blocks)))
            names.extend(self._name(key, block) for block in range(len(blocks)))
            rows.extend(blocks)
        return names, rows, places

    def _store(self, keys: list[Any], objects: list[Any]) -> L2StoreResult:
        names, rows, _ = self._cut(keys, objects, [_head(held.get_size()) for held in objects])
        moved: Moved = self._blocks.store(names, rows)
        sizes = [held.get_size() for held in objects]
        if moved.ok:
            self._notify_keys_stored(keys, sizes)
        return L2StoreResult(moved.ok, sum(sizes) if moved.ok else 0)

    def _lookup(self, keys: list[Any]) -> Any:
        return _bitmap(self._blocks.present([self._name(key, 0) for key in keys]))

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        heads = [_head(0) for _ in objects]
        names, rows, places = self._cut(keys, objects, heads)
        done = set(self._blocks.load(names, rows).done)
        return _bitmap(
            [
                all(place in done for place in of) and np.array_equal(head, _head(held.get_size()))
                for of, head, held in zip(places, heads, objects, strict=True)
            ]
        )

    def close(self) -> None:
        """Let every task end, then everything else."""
        for threads in self._threads.values():
            threads.shutdown(wait=True)
        self._blocks.close()
        for event in self._events.values():
            event.close()


def _head(size_bytes: int) -> Bytes:
    head: Bytes = np.array([size_bytes], dtype="<i8").view(np.uint8)
    return head


def _bitmap(flags: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(flags))
    for place, flag in enumerate(flags):
        if flag:
            bitmap.set(place)
    return bitmap
