"""Two vLLM replicas of Ray Serve LLM on two nodes share one fabric, behind a router that knows where state lies.

Run it with ``python examples/serve_llm/app.py`` in an environment with vLLM (README.md beside this file). Conversations
grow turn by turn: each turn goes to the node that computed the one before; sent as batches, which no router ranks, they
go by Serve's queues, and blocks move between the nodes. Then a burst of requests with one system prompt overflows to the
other node, which loads from the fabric what the first computed. Every answer is compared with one of an engine that
knows no fabric.
"""

from __future__ import annotations

import random
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from openai import OpenAI
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMConfig, build_openai_app
from ray.serve.schema import LoggingConfig

import kvfabric
from kvfabric.engines.ray_serve.llm import FabricLLMServer, PromptRouter
from kvfabric.engines.shared.named_blocks import blocks_model
from kvfabric.engines.vllm_tier import trial
from kvfabric.engines.vllm_tier.naming import EXTENSION

MODEL = "tiny"
ROW_BYTES = 4 * 2 * 2 * 64 * 4 * trial.BLOCK_TOKENS
"""Layers, keys and values, heads, channels, bytes of a float32, tokens: one block of the tiny model."""
NODES = 2
NODE_CPUS = 2
CONVERSATIONS = 4
TURNS = 4
LATER_TURNS = CONVERSATIONS * (TURNS - 1)
TURN_TOKENS = 96
SYSTEM_TOKENS = 8 * trial.BLOCK_TOKENS
BURST = 6
ANSWER_TOKENS = 16
EVERY_TOKEN = {"ignore_eos": True, "skip_special_tokens": False}
"""vLLM's own fields of a request: a random model may well say a padding token."""
PAUSE_S = 0.5
"""Between turns: the directory hears of what was stored milliseconds later, and people type more slowly."""


class Replica(FabricLLMServer):
    """One replica, which says in each answer where it was computed."""

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return _stamped(await super().completions(request, raw_request_info))

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return _stamped(await super().chat(request, raw_request_info))


async def _stamped(parts: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Answers whose fingerprint, which tells OpenAI's clients of the server's configuration, is the node's id."""
    async for part in parts:
        if hasattr(part, "system_fingerprint"):
            part.system_fingerprint = ray.get_runtime_context().get_node_id()
        yield part


def application(weights: str, fabric: str) -> serve.Application:
    """Serve LLM's OpenAI application: replicas with a fabric under vLLM's offloading, one a node, and the router."""
    router: dict[str, Any] = {
        "request_router_class": PromptRouter,
        "request_router_kwargs": {"tokenizer": weights},
        "request_routing_stats_period_s": 1.0,
    }
    config = LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": weights},
        server_cls=Replica,
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundle_per_worker": {"CPU": NODE_CPUS}},  # a whole node: no two replicas share one
        deployment_config={
            "num_replicas": NODES,
            "max_ongoing_requests": 1,  # so that a burst overflows
            "ray_actor_options": {"num_cpus": 0},
            "request_router_config": RequestRouterConfig(**router),
        },
        engine_kwargs={
            **trial.options(),
            "distributed_executor_backend": "uni",
            "kv_transfer_config": trial.transfer_config(fabric),
            "worker_extension_cls": EXTENSION,
        },
        runtime_env={"env_vars": trial.settings()},
        log_engine_metrics=False,
    )
    ingress = {"num_replicas": 1, "autoscaling_config": None, "ray_actor_options": {"num_cpus": 0}}
    app: serve.Application = build_openai_app({"llm_configs": [config], "ingress_deployment_config": ingress})
    return app


@contextmanager
def served(app: serve.Application) -> Iterator[OpenAI]:
    """The application behind HTTP on a free port of this machine, and a client of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port},
        logging_config=LoggingConfig(log_level="ERROR"),
    )
    try:
        serve.run(app, name="llm")
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120.0)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]


def some_tokens(rng: random.Random, count: int) -> list[int]:
    """A prompt, or a turn of one."""
    return [rng.randrange(3, 1000) for _ in range(count)]


class Asked:
    """What was asked, what was answered, and what an engine without a fabric says."""

    def __init__(self, client: OpenAI, alone: Any) -> None:
        self.client, self.alone = client, alone
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []
        self.nodes: list[str] = []

    def complete(self, prompt: list[int], *, ranked: bool = True) -> tuple[list[int], str]:
        """The greedy continuation of a prompt, and the node that computed it; not ``ranked``: asked for as a batch."""
        asked: Any = trial.text_of(prompt) if ranked else [trial.text_of(prompt)]
        told = self.client.completions.create(
            model=MODEL, prompt=asked, max_tokens=ANSWER_TOKENS, temperature=0, extra_body=EVERY_TOKEN
        )
        return self._keep(prompt, told.choices[0].text, told)

    def chat(self, prompt: list[int]) -> tuple[list[int], str]:
        """The same of a chat of one message, whose template adds a word."""
        told = self.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": trial.text_of(prompt)}],
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            extra_body=EVERY_TOKEN,
        )
        return self._keep([*prompt, 3], told.choices[0].message.content or "", told)

    def _keep(self, prompt: list[int], text: str, told: Any) -> tuple[list[int], str]:
        answer, node = trial.tokens_of(text), str(told.system_fingerprint)
        self.prompts.append(list(prompt))
        self.answers.append(answer)
        self.nodes.append(node)
        return answer, node

    def judged(self) -> str:
        """How many answers are those of an engine without a fabric."""
        expected = ray.get(self.alone.generate.remote(self.prompts, ANSWER_TOKENS))
        right = sum(answer == said for answer, said in zip(self.answers, expected, strict=True))
        return f"{right} of {len(expected)} answers right"


class Told:
    """What the fabric counted since this was last asked."""

    def __init__(self, fabric: kvfabric.Fabric) -> None:
        self.fabric = fabric
        self.before = {"fetched_objects": 0, "reused_hit_tokens_total": 0}

    def __str__(self) -> str:
        holders = self.fabric.status()["holders"]
        counted = {name: sum(int(holder["counters"].get(name, 0)) for holder in holders) for name in self.before}
        moved, reused = (counted[name] - before for name, before in self.before.items())
        self.before = counted
        return f"{moved} blocks moved, {reused} tokens reused from the fabric"


def converse(asked: Asked, rng: random.Random, *, ranked: bool = True) -> tuple[int, list[tuple[list[int], str]]]:
    """Conversations turn by turn; how many turns went where the one before did, and where each conversation ended."""
    stayed = 0
    ended = []
    for _ in range(CONVERSATIONS):
        tokens: list[int] = []
        home = ""
        for turn in range(TURNS):
            tokens += some_tokens(rng, TURN_TOKENS)
            answer, node = asked.complete(tokens, ranked=ranked)
            stayed += turn > 0 and node == home
            home = node
            tokens += answer
            time.sleep(PAUSE_S)
        ended.append((tokens, home))
    return stayed, ended


def burst(asked: Asked, rng: random.Random) -> int:
    """Requests with one system prompt, all at once; how many nodes served them."""
    system = some_tokens(rng, SYSTEM_TOKENS)
    asked.complete(system)
    time.sleep(PAUSE_S)
    prompts = [system + some_tokens(rng, TURN_TOKENS) for _ in range(BURST)]
    with ThreadPoolExecutor(BURST) as users:
        return len({node for _, node in users.map(asked.complete, prompts)})


def main() -> None:
    """Two nodes on this machine, from the fabric to the last comparison."""
    rng = random.Random(0)
    model = blocks_model(block_bytes=ROW_BYTES, block_tokens=trial.BLOCK_TOKENS)
    with (
        tempfile.TemporaryDirectory() as folder,
        kvfabric.launch({"model": model, "memory_bytes": 64 << 20}, nodes=NODES) as fabric,
    ):
        weights = str(trial.write_tokenizer(trial.write_model(Path(folder) / MODEL, trial.Family.LLAMA)))
        with served(application(weights, fabric.name)) as client:
            alone: Any = trial.actor_on(0).remote(weights)
            asked = Asked(client, alone)
            told = Told(fabric)
            stayed, ended = converse(asked, rng)
            chats = sum(asked.chat(tokens)[1] == home for tokens, home in ended)
            print(
                f"by state: {stayed} of {LATER_TURNS} turns and {chats} of {CONVERSATIONS} chats went where their state was"
            )
            print(f"  {told}; {asked.judged()}")
            asked = Asked(client, alone)
            stayed, _ = converse(asked, rng, ranked=False)
            print(f"by queues: {stayed} of {LATER_TURNS} turns stayed on their node")
            print(f"  {told}; {asked.judged()}")
            asked = Asked(client, alone)
            print(f"burst: {burst(asked, rng)} nodes served one system prompt")
            print(f"  {told}; {asked.judged()}")
            ray.kill(alone)
    print("shut down")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
