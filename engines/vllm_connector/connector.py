"""The connector: vLLM's interface around the scheduler's half and a worker's half."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker

from ...actors.fabric import connect, connect_ray, launch
from ...actors.session import Session
from ...fabric.kinds import FabricError
from ...fabric.model import ModelSpec
from ..shared.audit import Audits
from .asking import Asking
from .groups import model_of, salt_of
from .moving import DeviceBlocks, Moving
from .steps import Step


class KvFabricConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefixes in a kvfabric fabric: saved as they are computed, loaded without holding up other requests.

    Of ``kv_connector_extra_config``: ``fabric`` (its name), ``address`` (of the Ray cluster), ``launch`` (fields of a
    FabricSpec without ``model``: start it where none runs), ``weights``, ``namespace`` as the tier has them.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._fabric = str(extra.get("fabric", "default"))
        self._launch: dict[str, Any] | None = extra.get("launch")
        self._salt = salt_of(
            vllm_config, kv_cache_config, weights=extra.get("weights"), namespace=str(extra.get("namespace", ""))
        )
        if extra.get("address"):
            connect_ray(str(extra["address"]))
        self._session: Session | None = None
        self._asking: Asking | None = None
        self._moving: Moving | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._session = connect(self._fabric)
            self._asking = Asking(self._session, self._salt)

    @property
    def asking(self) -> Asking:
        assert self._asking is not None, "only the scheduler's connector asks"
        return self._asking

    @property
    def moving(self) -> Moving:
        assert self._moving is not None, "only a worker's connector moves, once its caches are registered"
        return self._moving

    @property
    def requires_kv_delivery(self) -> bool:
        """What is not saved is computed again."""
        return False

    # --- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = _blocks_of(self._vllm_config, self._kv_cache_config, kv_caches)
        model = model_of(self._vllm_config, self._kv_cache_config, blocks.block_bytes)
        if self._launch is not None:
            spec = {"memory_bytes": 1 << 30, **self._launch, "model": model.model_dump(mode="json")}
            launch(spec, name=self._fabric)
        self._session = connect(self._fabric)
        _check(self._session, model)
        config = self._vllm_config
        audits = None
        if (
            config.kv_transfer_config.kv_load_failure_policy == "recompute"
        ):  # otherwise what is withheld fails the request
            audits = Audits(self._session, str(config.model_config.dtype).removeprefix("torch."))
        self._moving = Moving(self._session, blocks, config.parallel_config.rank, audits)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        for load in step.loads:
            self.moving.load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are not of the step's requests."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, behind the step."""

    def wait_for_save(self) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        for save in step.saves:
            self.moving.save(save)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended, failed = self.moving.ended()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    # --- scheduler -----------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.asking.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.asking.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self.asking.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.asking.failed(connector_output.failed_recving or set())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.asking.finished(request.request_id, request.num_output_tokens)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.asking.finished(request.request_id, request.num_output_tokens)
        return False, None  # what it computed was copied in the step that computed it

    def shutdown(self) -> None:
        if self._moving is not None:
            self._moving.close()
        if self._asking is not None:
            self._asking.close()
        if self._session is not None:
            self._session.close()


def _check(session: Session, model: ModelSpec) -> None:
    served = session.model
    if served.groups != model.groups or served.shards != model.shards or not served.chained:
        raise FabricError(
            f"fabric {session.name!r} serves {served.name!r} with the groups {list(served.groups)}; this engine has"
            f' {list(model.groups)} and {model.shards} ranks: launch one with them, or say "launch" in the connector\'s configuration'
        )


def _blocks_of(vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, torch.Tensor]) -> DeviceBlocks:
    """Each group's blocks as vLLM's own offloading finds them, packed and aliased layouts included."""
    found: list[Any] = []
    config = SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0))
    spec = SimpleNamespace(replicated_layout=False, config=config, get_worker=found.append)
    OffloadingConnectorWorker(spec, vllm_config, kv_cache_config).register_kv_caches(kv_caches)
    (canonical,) = found
    tensors = [t.tensor.view(torch.int8) for t in canonical.tensors]
    return DeviceBlocks(
        [[(tensors[ref.tensor_idx], ref.page_size_bytes) for ref in refs] for refs in canonical.group_data_refs]
    )
