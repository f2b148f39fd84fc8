"""A worker's half: blocks out of and into the device's memory, whole and as bytes.

    engine's thread    copies what is saved into host memory, in the step that computed it, and looks what has ended
    saving (1)         publishes it, in order
    loading (2)        acquires, copies under the lease, checks it, reports

How a block is packed inside is the kernel's affair. Groups of a hybrid model lie over one another in one storage, so a block
is only ever the one group's that the scheduler says.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from vllm.logger import init_logger

from ...actors.client import in_host_memory
from ...actors.lease import Lease
from ...actors.session import Session
from ...fabric.identity import PromptKeys
from ...fabric.kinds import FabricError
from ..shared.audit import Audit, Audits
from ..shared.named_blocks import Bytes
from .steps import Load, Save

logger = init_logger(__name__)

STAGED_BYTES_MAX = 256 << 20
"""Saved blocks in host memory that are not published yet; what does not fit is not kept."""
LOADS_AT_ONCE = 2
LOAD_S = 10.0
_DIGEST = 32


class DeviceBlocks:
    """The blocks of one rank by cache group: for each, (tensor of shape [blocks, page], bytes of a block in it)."""

    def __init__(self, groups: Sequence[Sequence[tuple[torch.Tensor, int]]]) -> None:
        self._groups = groups
        self.block_bytes = [sum(size for _, size in group) for group in groups]

    def _parts(self, group: int, block: int, row: Bytes) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        host, at = torch.from_numpy(row).view(torch.int8), 0
        for tensor, size in self._groups[group]:
            yield tensor[block].reshape(-1)[:size], host[at : at + size]
            at += size

    def read(self, group: int, block: int) -> Bytes:
        """A copy of one block."""
        row = np.empty(self.block_bytes[group], np.uint8)
        for device, host in self._parts(group, block, row):
            host.copy_(device)
        return row

    def write(self, group: int, block: int, row: Bytes) -> None:
        """Fill one block."""
        for device, host in self._parts(group, block, row):
            device.copy_(host)


class Moving:
    """Loads and saves of one rank."""

    def __init__(self, session: Session, blocks: DeviceBlocks, rank: int, audits: Audits | None) -> None:
        self._session = session
        self._blocks = blocks
        self._rank = rank
        self._audits = audits
        self._names = [group.name for group in session.model.groups]
        self._units = [group.unit_tokens for group in session.model.groups]
        self._loading = ThreadPoolExecutor(LOADS_AT_ONCE, thread_name_prefix="kvfabric-load")
        self._saving = ThreadPoolExecutor(1, thread_name_prefix="kvfabric-save")
        self._ended: deque[tuple[str, bool]] = deque()
        self._lock = threading.Lock()
        self._staged_bytes = 0
        self.dropped = 0
        """Saves that were not kept: too many were on their way."""

    # --- loads ---------------------------------------------------------------------------------

    def load(self, load: Load) -> Future[None]:
        """Begin a load; :meth:`ended` tells how it went."""
        return self._loading.submit(self._run, load)

    def ended(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last call, and those of them that failed."""
        ended, failed = set(), set()
        while self._ended:
            request, arrived = self._ended.popleft()
            ended.add(request)
            if not arrived:
                failed.add(request)
        return ended, failed

    def _run(self, load: Load) -> None:
        arrived = False
        try:
            arrived = self._load(load)
        except FabricError as error:
            logger.warning("kvfabric: a load of %d tokens failed: %s", load.position - load.first, error)
        except Exception:
            # An engine goes on without its cache, and a load that never ended would keep its request for ever.
            logger.exception("kvfabric: a load of %d tokens failed by a bug", load.position - load.first)
        finally:
            self._ended.append((load.request, arrived))

    def _load(self, load: Load) -> bool:
        keys = self._session.keys(load.tokens, **load.key)
        answer = self._session.acquire(keys, min_tokens=load.position, deadline_s=LOAD_S)
        lease = answer.lease
        if lease is None:
            logger.info("kvfabric: %d tokens are not there any more: %s", load.position, answer.cause)
            return False
        if self._withheld(keys, lease):
            return False
        reused = 0
        try:
            if lease.replay_from is None and self._fill(load, lease):
                reused = load.position - load.first
        finally:
            lease.release(reused_tokens=reused)
        return reused > 0

    def _fill(self, load: Load, lease: Lease) -> bool:
        """Write every block of [first, position) that vLLM allocated; all of them, from a lease that held, or none counts.

        vLLM puts what was loaded into its prefix cache: a block that nobody filled must fail the load.
        """
        if lease.check() is not None:
            return False
        for group, (name, unit) in enumerate(zip(self._names, self._units, strict=True)):
            ids = load.blocks[group]
            wanted = [i for i in range(load.first // unit, min(load.position // unit, len(ids))) if ids[i]]
            view = lease.views.of(name, self._rank) if wanted else {}
            if any(i not in view for i in wanted):
                return False
            for i in wanted:
                self._blocks.write(group, ids[i], in_host_memory(view[i]).copy())
        return lease.check() is None

    def _withheld(self, keys: PromptKeys, lease: Lease) -> bool:
        """Whether this lease is audited: its blocks are computed anew, saved, and compared."""
        if self._audits is None or not self._session.audit_due(lease):
            return False
        held = {}
        for group, name in enumerate(self._names):
            if name in lease.views:
                for index, view in lease.views.of(name, self._rank).items():
                    held[self._named(keys, group, index)] = in_host_memory(view).copy()
        return lease.check() is None and self._audits.open(Audit(keys, lease, held))

    def _named(self, keys: PromptKeys, group: int, index: int) -> bytes:
        blob = keys.keys(self._units[group])
        return bytes([group]) + blob[index * _DIGEST : (index + 1) * _DIGEST]

    # --- saves ---------------------------------------------------------------------------------

    def save(self, save: Save) -> None:
        """Copy what this step computed; it is published behind."""
        size = sum(len(held) * self._blocks.block_bytes[group] for group, held in enumerate(save.blocks))
        with self._lock:
            if self._staged_bytes + size > STAGED_BYTES_MAX:
                self.dropped += 1
                return
            self._staged_bytes += size
        rows = {
            (group, index): self._blocks.read(group, block)
            for group, held in enumerate(save.blocks)
            for index, block in held
        }
        self._saving.submit(self._publish, save, rows, size)

    def _publish(self, save: Save, rows: dict[tuple[int, int], Bytes], size: int) -> None:
        try:
            keys = self._session.keys(save.tokens, **save.key)
            if self._audits is not None:
                self._audits.recomputed([self._named(keys, *place) for place in rows], list(rows.values()))
            objects: dict[str, dict[int, Bytes]] = {}
            for (group, index), row in rows.items():
                objects.setdefault(self._names[group], {})[index] = row
            stored = self._session.publish(keys, objects, shard=self._rank)
            if stored.refused is not None:
                logger.debug("kvfabric: %d blocks were not kept: %s", len(rows), stored.refused)
        except FabricError as error:
            logger.warning("kvfabric: %d blocks were not kept: %s", len(rows), error)
        except Exception:
            # What was not kept is computed again.
            logger.exception("kvfabric: %d blocks were not kept, by a bug", len(rows))
        finally:
            with self._lock:
                self._staged_bytes -= size

    def close(self) -> None:
        """Let every save end."""
        self._loading.shutdown(wait=True)
        self._saving.shutdown(wait=True)
        if self._audits is not None:
            self._audits.close()
