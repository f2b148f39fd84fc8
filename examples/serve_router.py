"""Ray Serve with kvfabric's request router, which sends each request to the node where its state is.

Run it with ``python examples/serve_router.py`` (it needs ``ray[serve]``, the package's extra ``serve``). Two replicas,
each on a node of its own; conversations grow turn by turn, and every turn goes where the one before was computed.
A replica holds a session: it resumes under a lease, computes the rest and publishes it. The state is made up; an
engine's adapter would bring its cache's. ``serve_router:build`` is what a RayService imports (kuberay/service.yaml).
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np
import ray
from pydantic import BaseModel
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.requests import Request

import kvfabric
from kvfabric.engines.ray_serve.router import StateRouter

MODEL = {
    "name": "tiny",
    "groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 16384}],
}
REPLICAS = 2
TURN_TOKENS = 64
logger = logging.getLogger("ray.serve")


def state_of(tokens: list[int], index: int, block_tokens: int, block_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A block's state, which depends on every token up to its end, as a prefill's does."""
    seed = sum(token * (place + 1) for place, token in enumerate(tokens[: (index + 1) * block_tokens]))
    return np.full(block_bytes, seed % 251, dtype=np.uint8)


class Engine:
    """An inference engine's stand-in: resumes what it can, "computes" the rest and publishes it."""

    def __init__(self, fabric: str = "default") -> None:
        self.session = kvfabric.connect(fabric)

    def __call__(self, tokens: list[int]) -> dict[str, Any]:
        """All of a prompt's state: from the fabric as far as a lease covers it, computed from there on.

        Returns where the request ran, how far it resumed and what was moved for that.
        """
        (group,) = self.session.model.groups
        size = (group.unit_tokens, group.block_bytes)
        answer = self.session.acquire(tokens)
        resumed, right = 0, True
        if answer.lease is not None:
            with answer.lease as lease:
                try:
                    with lease.read(group.name) as views:  # checked before and after: else it computes
                        right = all(np.array_equal(view, state_of(tokens, i, *size)) for i, view in views.items())
                    resumed = lease.tokens
                except kvfabric.LeaseRefused as error:
                    logger.warning("computes what it could not read: %s", error)
                lease.release(reused_tokens=resumed)
            if not right:
                raise AssertionError("the state is another prompt's")
        missing = range(resumed // group.unit_tokens, len(tokens) // group.unit_tokens)
        self.session.publish(tokens, {group.name: {index: state_of(tokens, index, *size) for index in missing}})
        moved = sum((answer.moved_bytes or {}).values())
        return {"node": ray.get_runtime_context().get_node_id(), "resumed": resumed, "moved": moved}


class Door:
    """Takes requests over HTTP, ``{"tokens": [...]}``, and hands them to the replicas: the router sees the tokens."""

    def __init__(self, engine: DeploymentHandle[Any]) -> None:
        self.engine = engine

    async def __call__(self, request: Request | list[int]) -> dict[str, Any]:
        """What a replica returns."""
        tokens = list((await request.json())["tokens"]) if isinstance(request, Request) else request
        return dict(await self.engine.remote(tokens))


class Settings(BaseModel):
    """What ``build`` takes, from a RayService's ``args`` too."""

    fabric: str = "default"
    replicas: int = REPLICAS
    by_state: bool = True
    memory_bytes: int = 64 << 20


def build(settings: Settings) -> Application:
    """The application; launches the fabric, or attaches to it where it runs already."""
    kvfabric.launch({"model": MODEL, "memory_bytes": settings.memory_bytes}, name=settings.fabric)
    served: Any = serve.deployment(
        num_replicas=settings.replicas,
        max_replicas_per_node=1,
        max_ongoing_requests=4,
        ray_actor_options={"num_cpus": 0},
    )(Engine)
    if settings.by_state:
        kwargs: dict[str, Any] = {"fabric": settings.fabric}
        router: dict[str, Any] = {"request_router_class": StateRouter, "request_router_kwargs": kwargs}
        served = served.options(request_router_config=RequestRouterConfig(**router))
    door: Any = serve.deployment(ray_actor_options={"num_cpus": 0})(Door)
    return door.bind(served.bind(settings.fabric))  # type: ignore[no-any-return]


def converse(engine: DeploymentHandle[Any], first: int) -> str:
    """Four conversations of four turns each; what became of them."""
    stayed = moved = resumed = 0
    for conversation in range(first, first + 4):
        tokens: list[int] = []
        home = ""
        for turn in range(4):
            tokens += [(conversation * 1009 + turn * 101 + i) % 32_000 for i in range(TURN_TOKENS)]
            told = engine.remote([*tokens, 1]).result(timeout_s=30.0)
            stayed += turn > 0 and told["node"] == home
            home = told["node"]
            moved += told["moved"]
            resumed += told["resumed"]
    return f"{stayed} of 12 turns went where the one before was computed, {resumed} tokens resumed, {moved} bytes moved"


def main() -> None:
    """The same conversations by this router and by Serve's own."""
    with kvfabric.launch({"model": MODEL, "memory_bytes": Settings().memory_bytes}, nodes=REPLICAS) as fabric:
        print(f"launched: {len(fabric.status()['holders'])} holders")
        serve.start(proxy_location="Disabled", logging_config=LoggingConfig(log_level="ERROR"))
        try:
            engine = serve.run(build(Settings()), name="state", route_prefix=None)
            print(f"by state: {converse(engine, 0)}")
            engine = serve.run(build(Settings(by_state=False)), name="queues", route_prefix=None)
            print(f"by queues: {converse(engine, 4)}")
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
    print("shut down")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
