"""Two replicas of a language model on two nodes share one fabric, behind a router that knows where state lies.

Run it with ``python examples/serve_llm/app.py`` (it needs the extras ``engines`` and ``serve``). The model is tiny and
random, of a family with sliding windows; the engine is Hugging Face transformers with kvfabric's adapter. Conversations
grow turn by turn: each turn goes to the node that computed the one before. Then a burst of requests with one system
prompt overflows to the other node, which resumes from the state that is fetched there. Every token is compared with a
run that knows no fabric.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

import kvfabric

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

FAMILY = "gpt_oss"
REPLICAS = 2
CHUNK_TOKENS = 64
"""A prefill is cut here, and what the cache holds then is published: the same chunks give the same bits everywhere."""
DECODE_TOKENS = 16
TURN_TOKENS = 96
TURNS = 3
CONVERSATIONS = 2
BURST = 6


def load() -> tuple[Any, Any]:
    """The model and how its cache is cut into groups; the same weights in every process."""
    import torch

    from kvfabric.engines.transformers.geometry import geometry_of
    from kvfabric.engines.transformers.tiny_models import build

    torch.set_num_threads(1)  # how many threads share a product may decide how it rounds
    model, _ = build(FAMILY)
    return model, geometry_of(model)


def cuts(tokens: list[int]) -> range:
    """Where the prefill's chunks end."""
    return range(CHUNK_TOKENS, len(tokens), CHUNK_TOKENS)


class LanguageModel:
    """One replica: resumes what a lease covers, computes the rest, publishes it chunk by chunk."""

    def __init__(self, fabric: str) -> None:
        from kvfabric.engines.transformers.adapter import connect

        self.model, self.geometry = load()
        self.session = connect(self.model, self.geometry, fabric)

    def __call__(self, tokens: list[int]) -> dict[str, Any]:
        """Greedy tokens behind the prompt; where they were computed, and from which token on."""
        from kvfabric.engines.transformers.adapter import publish, resume
        from kvfabric.engines.transformers.generate import generate

        resumed = resume(self.session, self.model, self.geometry, tokens)
        stored = resumed.tokens

        def keep(position: int, cache: Any) -> None:
            nonlocal stored
            if position % CHUNK_TOKENS == 0:  # a full fabric refuses by value, and nothing else changes
                publish(self.session, self.model, self.geometry, cache, tokens, position, from_token=stored)
                stored = position

        run = generate(
            self.model,
            tokens,
            cuts=cuts(tokens),
            decode_tokens=DECODE_TOKENS,
            cache=resumed.cache,
            start=resumed.tokens,
            after_chunk=keep,
        )
        return {
            "tokens": list(run.tokens),
            "node": ray.get_runtime_context().get_node_id(),
            "resumed": resumed.tokens,
            "moved": sum((resumed.answer.moved_bytes or {}).values()),
        }


class Told:
    """What the requests were answered, beside what a run without a fabric says."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.asked = self.right = self.resumed = self.moved = 0

    def add(self, tokens: list[int], answer: dict[str, Any]) -> None:
        """Count one answer; compute the same without a fabric and compare."""
        from kvfabric.engines.transformers.generate import generate

        alone = generate(self.model, tokens, cuts=cuts(tokens), decode_tokens=DECODE_TOKENS)
        self.asked += 1
        self.right += list(alone.tokens) == answer["tokens"]
        self.resumed += answer["resumed"]
        self.moved += answer["moved"]

    def __str__(self) -> str:
        return f"{self.right} of {self.asked} answers right, {self.resumed} tokens resumed, {self.moved} bytes moved"


def converse(app: DeploymentHandle[Any], told: Told) -> int:
    """Conversations turn by turn; how many turns went where the one before was computed."""
    from kvfabric.engines.transformers.tiny_models import prompt

    stayed = 0
    for conversation in range(CONVERSATIONS):
        tokens: list[int] = []
        home = ""
        for turn in range(TURNS):
            tokens += prompt(100 * conversation + turn, TURN_TOKENS)
            answer = app.remote(tokens).result(timeout_s=60.0)
            told.add(tokens, answer)
            stayed += turn > 0 and answer["node"] == home
            home = answer["node"]
            tokens += answer["tokens"]
    return stayed


def burst(app: DeploymentHandle[Any], told: Told) -> int:
    """Requests with one system prompt, all at once; how many nodes served them."""
    from kvfabric.engines.transformers.tiny_models import prompt

    system = prompt(7, 4 * CHUNK_TOKENS)
    told.add(system, app.remote(system).result(timeout_s=60.0))
    time.sleep(0.2)  # the directory hears of a commit milliseconds later
    asked = [system + prompt(1000 + user, TURN_TOKENS) for user in range(BURST)]
    answers = [reply.result(timeout_s=60.0) for reply in [app.remote(tokens) for tokens in asked]]
    for tokens, answer in zip(asked, answers, strict=True):
        told.add(tokens, answer)
    return len({answer["node"] for answer in answers})


def state_router() -> type[Any]:
    """The router of ``serve_router.py`` beside this folder; it travels by value, the replicas need not have the file."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    module = importlib.import_module("serve_router")
    ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    router: type[Any] = module.StateRouter
    return router


def deployment(fabric: str) -> serve.Application:
    """The application for ``serve.run``: replicas on nodes of their own, and the router between them."""
    router: dict[str, Any] = {"request_router_class": state_router(), "request_router_kwargs": {"fabric": fabric}}
    served: Any = serve.deployment(
        num_replicas=REPLICAS,
        max_replicas_per_node=1,
        max_ongoing_requests=1,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(**router),
    )(LanguageModel)
    application: serve.Application = served.bind(fabric)
    return application


def main() -> None:
    """Two nodes on this machine, from the fabric to the last comparison."""
    from kvfabric.engines.transformers.passport import passports
    from kvfabric.engines.transformers.weights import weights_revision

    model, geometry = load()
    spec = {
        "model": geometry.model_spec(weights=weights_revision(model)).model_dump(mode="json", exclude_defaults=True),
        "passports": {name: dataclasses.asdict(of) for name, of in passports(model.config, geometry).items()},
        "memory_bytes": 64 << 20,
    }
    with kvfabric.launch(spec, nodes=REPLICAS) as fabric:
        print(f"launched: {len(fabric.status()['holders'])} holders for {fabric.spec.model.name}")
        serve.start(proxy_location="Disabled", logging_config=LoggingConfig(log_level="ERROR"))
        try:
            app = serve.run(deployment(fabric.name), name="llm", route_prefix=None)
            told = Told(model)
            stayed = converse(app, told)
            print(f"conversations: {stayed} of {CONVERSATIONS * (TURNS - 1)} turns stayed on their node; {told}")
            told = Told(model)
            nodes = burst(app, told)
            print(f"burst: {nodes} nodes served one system prompt; {told}")
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
    print("shut down")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
