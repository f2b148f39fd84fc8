"""What NIXL and UCX read from the environment, and when to set it: before the first import, in every process.

UCX knows no time-out of its own: a transfer over a cut link stays in progress for ever. The five time-outs
below make it raise after three to four seconds. A killed peer is noticed in well under one either way.

A process that made a NIXL agent with UCX dies of SIGSEGV at normal interpreter exit, in the verbs library
bundled with it, unless that module is off (``UCX_MODULES=^ib``) or the process ends by ``os._exit``. The module
must stay on where there are RDMA devices: without it UCX falls back to TCP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")

TIMEOUTS = {
    "UCX_TCP_KEEPIDLE": "1s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "2",
    "UCX_TCP_USER_TIMEOUT": "3s",
    "UCX_KEEPALIVE_INTERVAL": "1s",
}


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """How NIXL is used; the defaults leave the choice of transports and devices to UCX.

    ``transports`` is UCX_TLS (``tcp`` forces plain sockets), ``devices`` UCX_NET_DEVICES (``lo``, ``eth0``,
    ``mlx5_0:1``). ``progress_delay_us`` is how long the agent's progress thread sleeps: NIXL's own 0 keeps
    a fifth to a third of a core busy, 1000 one or two hundredths.
    """

    backend: str = "UCX"
    transports: str = ""
    devices: str = ""
    progress_delay_us: int = 1000


def nixl_environment(settings: NixlSettings | None = None) -> dict[str, str]:
    """Variables to set, where the user has not, before nixl is imported in this process or a child.

    NIXL and UCX are silenced because their failures come back as values; UCX_LOG_LEVEL=error shows what UCX thought.
    With them two processes of one host still use UCX's shared memory or CMA unless ``transports`` says ``tcp``.
    """
    settings = settings or NixlSettings()
    environment = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", **TIMEOUTS}
    if not rdma_devices():
        environment["UCX_MODULES"] = "^ib"
    return environment | chosen(settings)


def child_environment(settings: NixlSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that uses NIXL so.

    What the settings name wins over what the user's environment has, and that over our defaults.
    """
    return {**nixl_environment(settings), **inherited, **chosen(settings)}


def chosen(settings: NixlSettings) -> dict[str, str]:
    """The variables that stand for what the settings name."""
    named = {"UCX_TLS": settings.transports, "UCX_NET_DEVICES": settings.devices}
    return {name: value for name, value in named.items() if value}


def rdma_devices() -> list[str]:
    """Names of this machine's RDMA devices."""
    return sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
