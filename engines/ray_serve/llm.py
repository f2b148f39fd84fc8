"""Ray Serve LLM over a fabric: vLLM replicas that share what they computed, and a router that knows who holds what.

    LLMConfig(
        server_cls=FabricLLMServer,
        engine_kwargs={"kv_transfer_config": ..., "worker_extension_cls": kvfabric.engines.vllm_tier.naming.EXTENSION, ...},
        deployment_config={
            "request_router_config": RequestRouterConfig(
                request_router_class=PromptRouter,
                request_router_kwargs={"tokenizer": FOLDER},
                request_routing_stats_period_s=1.0,
            ),
            ...
        },
        ...
    )

Its vLLM has the tier of :mod:`..vllm_tier.tier` in ``kv_transfer_config``. Each replica tells Serve how its engine names
blocks (Serve's routing stats); the router names a request's the same way and asks the fabric. Not with direct
streaming (``RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING``), where Serve LLM's own router sees no request.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import ray
from ray.serve.llm import LLMServer
from ray.serve.request_router import PendingRequest, RunningReplica

from ...fabric.ranking import NodeRank
from ..vllm_tier.naming import TIER, Naming
from .router import StateRouter

STATS = "kvfabric"
"""Where routing stats bear a replica's naming."""
ASK_S = 30.0


class FabricLLMServer(LLMServer):
    """One replica. vLLM's core, a process of its own, joins the fabric on the replica's node."""

    async def start(self) -> None:
        """Start the engine, and learn how it names blocks."""
        _at_home(self._llm_config)
        await super().start()  # type: ignore[no-untyped-call]
        told = await self.collective_rpc("kvfabric_naming", timeout=ASK_S)
        self._naming: dict[str, Any] = told[0] if told else {}

    async def record_routing_stats(self) -> dict[str, Any]:
        """What Serve tells the routers of this replica."""
        return {**await super().record_routing_stats(), STATS: self._naming}


def _at_home(config: Any) -> None:
    """Let the tiers of this replica's engine join this cluster, on this node."""
    here = ray.get_runtime_context()
    transfer = copy.deepcopy(config.engine_kwargs["kv_transfer_config"])
    for tier in transfer["kv_connector_extra_config"]["secondary_tiers"]:
        if tier.get("type") == TIER:
            tier.setdefault("address", here.gcs_address)
            tier.setdefault("node", here.get_node_id())
    config.engine_kwargs["kv_transfer_config"] = transfer
    config.get_engine_config().engine_kwargs["kv_transfer_config"] = transfer


class PromptRouter(StateRouter):
    """Sends completions and chats where the state of their prompt is; embeddings and all else by Serve's queues.

    ``tokenizer``, in ``request_router_kwargs``: the model's folder or name. Without one, only prompts that are given as token ids are
    ranked. A tokenizer that cuts otherwise than the engine's costs the order, never an answer.
    """

    def initialize_state(self, *, tokenizer: str = "", **kwargs: Any) -> None:
        super().initialize_state(**kwargs)
        self._tokenizer_name = tokenizer
        self._tokenizer: Any = None

    async def ranks(self, request: PendingRequest, replicas: Sequence[RunningReplica]) -> list[NodeRank]:
        told = next((stats for r in replicas if (stats := r.routing_stats.get(STATS))), None)
        body = request.args[0] if request.args else None
        tokens = None if told is None else await asyncio.to_thread(self.tokens, body)
        if told is None or not tokens:
            return []
        naming = Naming.of(told)
        self.fabric = naming.fabric
        session = await self.session()
        return await session.rank(naming.keys(session.session, tokens, getattr(body, "cache_salt", None)))

    def tokens(self, body: Any) -> list[int] | None:
        """The token ids of a request's prompt as vLLM will see them; None where that cannot be told here."""
        prompt, messages = getattr(body, "prompt", None), getattr(body, "messages", None)
        if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            return prompt
        if not self._tokenizer_name or (not isinstance(prompt, str) and not messages):
            return None
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_name)
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens))
        told = [m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in messages or ()]
        text = self._tokenizer.apply_chat_template(
            told, tokenize=False, add_generation_prompt=body.add_generation_prompt
        )
        return list(self._tokenizer.encode(text, add_special_tokens=body.add_special_tokens))
