"""Which links a holder has: what its spec names and this machine can really start."""

from __future__ import annotations

from ..transport.isolated_link import IsolatedLink
from ..transport.link import Link, LinkError, LinkKind
from ..transport.memfd import ArenaMemory
from ..transport.nixl_settings import NixlSettings
from ..transport.shared_memory_link import SharedMemoryLink
from ..transport.tcp_link import TcpLink
from .spec import TransportSpec


def start_links(
    memory: ArenaMemory,
    spec: TransportSpec,
    *,
    holder: str,
    incarnation: int,
    suffix: str,
    host: str,
    secret: bytes,
) -> tuple[dict[LinkKind, Link], dict[str, str]]:
    """The links that started, in the spec's order, and for each that did not the reason."""
    links: dict[LinkKind, Link] = {}
    problems: dict[str, str] = {}
    for name in spec.links:
        started: Link | LinkError
        match name:
            case "shared_memory":
                started = SharedMemoryLink.start(memory, holder=holder, incarnation=incarnation)
            case "nixl":
                settings = NixlSettings(spec.nixl_backend, spec.nixl_transports, spec.network_devices)
                started = IsolatedLink.start(
                    memory, holder=holder, incarnation=incarnation, suffix=suffix, settings=settings
                )
            case _:
                started = TcpLink.start(
                    memory.arena, holder=holder, incarnation=incarnation, host=spec.tcp_host or host, secret=secret
                )
        if isinstance(started, LinkError):
            problems[name] = f"{started.failure}: {started.detail}"
        else:
            links[LinkKind(name)] = started
    return links, problems
