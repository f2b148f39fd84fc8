"""Which links a holder has: what its spec names and this machine can really start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..transport.isolated_link import IsolatedLink
from ..transport.link import Link, LinkError, LinkFailure, LinkKind
from ..transport.memfd import ArenaMemory
from ..transport.nixl_agent import GpuRange
from ..transport.nixl_link import NixlLink
from ..transport.nixl_settings import NixlSettings, child_environment
from ..transport.payloads import Payloads
from ..transport.shared_memory_link import SharedMemoryLink
from ..transport.tcp_link import TcpLink
from .spec_sections import TransportSpec

if TYPE_CHECKING:
    from ..transport.gpu import GpuPools


@dataclass(frozen=True, slots=True)
class HolderMemory:
    """What a holder's links move bytes into."""

    memory: ArenaMemory
    payloads: Payloads
    gpu: GpuPools | None


def start_links(
    own: HolderMemory,
    spec: TransportSpec,
    *,
    holder: str,
    incarnation: int,
    suffix: str,
    host: str,
    secret: bytes,
) -> tuple[dict[LinkKind, Link], dict[str, str]]:
    """The links that started, in the spec's order, and for each that did not the reason."""
    memory = own.memory
    links: dict[LinkKind, Link] = {}
    problems: dict[str, str] = {}
    for name in spec.links:
        started: Link | LinkError
        match name:
            case "nixl" if own.gpu is not None:
                settings = NixlSettings(spec.nixl_backend, spec.nixl_transports, spec.network_devices)
                started = _nixl_here(own, own.gpu, settings, holder=holder, incarnation=incarnation, suffix=suffix)
            case _ if own.gpu is not None:
                started = LinkError(LinkFailure.UNAVAILABLE, "the arena's payload lies on a GPU, which it cannot reach")
            case "shared_memory":
                started = SharedMemoryLink.start(memory, holder=holder, incarnation=incarnation)
            case "nixl":
                settings = NixlSettings(spec.nixl_backend, spec.nixl_transports, spec.network_devices)
                started = IsolatedLink.start(
                    memory, holder=holder, incarnation=incarnation, suffix=suffix, settings=settings
                )
            case _:
                started = TcpLink.start(
                    memory.arena,
                    holder=holder,
                    incarnation=incarnation,
                    host=spec.tcp_host or host,
                    secret=secret,
                    bytes_per_s=spec.tcp_bytes_per_s,
                )
        if isinstance(started, LinkError):
            problems[name] = f"{started.failure}: {started.detail}"
        else:
            links[LinkKind(name)] = started
    return links, problems


def _nixl_here(
    own: HolderMemory, gpu: GpuPools, settings: NixlSettings, *, holder: str, incarnation: int, suffix: str
) -> NixlLink | LinkError:
    """NIXL in the holder's own process: memory that CUDA lent to another process is not that one's to register.

    What ends NIXL ends the holder, too; its leases are then over, and its successor begins empty.
    """
    os.environ.update(child_environment(settings, os.environ))
    memory = gpu.memory
    return NixlLink.start(
        own.memory.arena,
        holder=holder,
        incarnation=incarnation,
        suffix=suffix,
        settings=settings,
        payloads=own.payloads,
        gpu=GpuRange(memory.data_ptr(), memory.numel(), memory.device.index),
    )
