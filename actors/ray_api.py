"""Every call to Ray, typed, with a time-out: the one place where its stubs and habits are known.

Ray finds, places and starts processes; nothing hot goes through it.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..fabric.kinds import FabricError
from .shell import shell_of

NAMESPACE = "kvfabric"
KV_NAMESPACE = b"kvfabric"
CALL_TIMEOUT_S = 30.0
START_TIMEOUT_S = 120.0
REACH_TIMEOUT_S = 5.0
HEAD = "node:__internal_head__"
"""What the head alone offers."""


class Unavailable(FabricError, ConnectionError):
    """Ray cannot reach what was asked for, or this process is not connected to a cluster any more."""


def ray() -> Any:
    """The ray module, imported when first needed."""
    import ray as module

    return module


@dataclass(frozen=True, slots=True)
class Node:
    """An alive node: its Ray id, its address, what it offers, its labels."""

    node: str
    host: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def is_initialized() -> bool:
    """Whether this process is connected to a cluster."""
    return bool(ray().is_initialized())


def _connected() -> Any:
    """The module, of a process that is connected: Ray would start a cluster of its own where it is not."""
    module = ray()
    if not module.is_initialized():
        raise Unavailable("this process is not connected to a Ray cluster")
    return module


def nodes() -> list[Node]:
    """All alive nodes of the cluster. Raises Unavailable."""
    return [
        Node(n["NodeID"], n["NodeManagerAddress"], dict(n.get("Resources", {})), dict(n.get("Labels") or {}))
        for n in _connected().nodes()
        if n["Alive"]
    ]


def my_node() -> str:
    """Ray id of the node this process runs on. Raises Unavailable."""
    return str(_connected().get_runtime_context().get_node_id())


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of this short block: a handle that was only half made tells so when it is dropped."""
    kept = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or kept is None:
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, kept)
        if came:
            signal.raise_signal(signal.SIGINT)


def start_actor(
    cls: type,
    name: str,
    *args: Any,
    node: str | None = None,
    detached: bool = True,
    comes_back: bool = False,
    concurrency: int = 1000,
) -> Any:
    """Start a named async actor without resources; hard-bound to ``node`` where given.

    ``comes_back``: Ray starts it anew wherever it can when it dies, with the same arguments, on the head where there
    is one: so it keeps no other node from being taken away.
    """
    module = ray()
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "num_cpus": 0,
        "num_gpus": 0,
        "max_restarts": -1 if comes_back else 0,
        "max_task_retries": 0,
        "max_concurrency": concurrency,
    }
    if detached:
        options["lifetime"] = "detached"
    if comes_back and any(HEAD in n.resources for n in nodes()):
        options["resources"] = {HEAD: 0.001}
    if node is not None:
        options["label_selector"] = {"ray.io/node-id": node}
    with _uninterrupted():
        return module.remote(shell_of(cls)).options(**options).remote(*args)


def find_actor(name: str) -> Any | None:
    """The actor of that name, or None. Raises Unavailable."""
    module = _connected()
    try:
        with _uninterrupted():
            return module.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
    except module.exceptions.RayError as error:
        raise Unavailable(_first_line(error)) from None


def named_actors(prefix: str, *, but: str = "") -> dict[str, Any]:
    """Handles of the live actors of our namespace whose names begin so, by name, save one."""
    module = _connected()
    known = module.util.list_named_actors(all_namespaces=True)
    names = [a["name"] for a in known if a["namespace"] == NAMESPACE and a["name"].startswith(prefix)]
    return {name: handle for name in names if name != but and (handle := find_actor(name)) is not None}


def comes_back_to() -> Any | None:
    """This actor's own handle where Ray started it anew after its death; None in its first life."""
    context = _connected().get_runtime_context()
    with warnings.catch_warnings():
        # Ray asks itself by a name that it has deprecated, and says so to the user.
        warnings.filterwarnings("ignore", message="This API is deprecated")
        return context.current_actor if context.was_current_actor_reconstructed else None


def names_ending(suffix: str) -> list[str]:
    """What stands before the suffix in the names of our namespace's live actors, sorted."""
    known = _connected().util.list_named_actors(all_namespaces=True)
    names = (a["name"] for a in known if a["namespace"] == NAMESPACE)
    return sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))


def call(reference: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """The result of a remote call. Raises Unavailable, or what the method itself raised."""
    module = _connected()
    try:
        return module.get(reference, timeout=timeout_s)
    except module.exceptions.RayTaskError as error:
        if isinstance(error.cause, FabricError):
            raise error.cause from None
        raise
    except module.exceptions.RayError as error:
        raise Unavailable(reason_of(error)) from None


def logs_folder() -> Path | None:
    """Where this node's Ray processes log, of a process that Ray started; None where there is none."""
    from ray._private.worker import global_worker

    node = getattr(global_worker, "node", None)
    return None if node is None else Path(node.get_logs_dir_path())


def leave() -> None:
    """End this process's connection to the cluster, without noise. The cluster goes on."""
    with quiet():
        ray().shutdown()


def unreachable(address: str) -> str:
    """Why no Ray can be at an address of the form HOST:PORT, as a connection tells within seconds; "" where one may be.

    Ray itself tries for minutes, and writes lines of its own meanwhile.
    """
    if "://" in address:
        return "kvfabric runs on a node of the cluster; from elsewhere: ray job submit --address http://HOST:8265 -- kvfabric ..."
    if address == "local":
        return "Ray would start a cluster that ends with this process"
    host, colon, port = address.rpartition(":")
    if not colon:
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        return str(error)
    return ""


def reason_of(error: BaseException) -> str:
    """Why a remote call failed, in one line: what the method or the actor's constructor raised, without Ray's frame."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, FabricError):
        return _first_line(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = next((line for line in reversed(lines) if line.startswith("kvfabric.")), None)
    if raised is not None:
        return raised.partition(": ")[2] or raised
    return lines[0] if lines else repr(error)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def kill(handle: Any) -> None:
    """End an actor at once and without noise. It was closed before."""
    with contextlib.suppress(Exception):  # an actor, or a cluster, that is gone already is what was asked for
        _connected().kill(handle, no_restart=True)


def _kept(key: str) -> bytes:
    return f"kvfabric:{key}".encode()


def keep(key: str, value: bytes) -> None:
    """Keep a value in Ray's internal KV (there is no public door to it): it lasts as long as the cluster's head."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_kept(key), value, overwrite=True, namespace=KV_NAMESPACE)


def kept(key: str) -> bytes | None:
    """What was kept under a key; None for nothing."""
    from ray.experimental.internal_kv import _internal_kv_get

    found = _internal_kv_get(_kept(key), namespace=KV_NAMESPACE)
    return None if found is None else bytes(found)


def let_go(key: str) -> None:
    """Keep it no longer."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(_kept(key), namespace=KV_NAMESPACE)


def next_count(key: str) -> int:
    """The next value of a durable counter (incarnations, epochs)."""
    value = count_of(key) + 1
    keep(key, str(value).encode())
    return value


def count_of(key: str) -> int:
    """A durable counter's last value; 0 before the first."""
    return int(kept(key) or 0)


UNTOLD = frozenset({"memory", "object_store_memory"})
"""Resources whose use says nothing of an engine."""
USE_MIN = 0.01


def nodes_in_use() -> set[str]:
    """Nodes where tasks or actors hold CPUs, GPUs or other resources. Raises Unavailable."""
    from ray._private.state import available_resources_per_node

    _connected()
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return {
        n.node
        for n in nodes()
        for name, offered in n.resources.items()
        if name not in UNTOLD and not name.startswith("node:")
        if offered - float(free.get(n.node, n.resources).get(name, 0.0)) >= USE_MIN
    }


def request_nodes(bundle: Mapping[str, float], count: int) -> None:
    """Ask Ray's autoscaler for room for so many bundles in all; 0 withdraws what was asked for."""
    from ray.autoscaler.sdk import request_resources

    _connected()
    request_resources(bundles=[dict(bundle)] * count)


def draining_nodes() -> dict[str, float]:
    """Nodes that Ray is about to take away, each with the unix time when it does (0: not told)."""
    from ray._private.state import state

    _connected()
    return {str(node): at_ms / 1000 for node, at_ms in state.get_draining_nodes().items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what Ray prints at start and end off a user's terminal; errors still raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = logging.getLogger("ray")
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


def environment() -> dict[str, str]:
    """What an embedded cluster's processes need set before their first import."""
    return {
        "RAY_AUTH_MODE": "disabled",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }
