"""The process an :class:`~kvfabric.transport.isolated_link.IsolatedLink` runs its NIXL link in.

It maps the holder's arena, starts the link, writes one line of JSON (its endpoint and region, or why it cannot start)
to the descriptor it was given, and serves the holder's threads, one connection each. It ends when its standard
input does, which is when the holder ends, however that happens, and always by ``os._exit``.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from typing import Any

import msgpack

from ..fabric.arena import Arena, ArenaLayout
from ..fabric.kinds import WireError
from .endpoints import Endpoint, listen_unix, peer_credentials
from .frames import Frame, FrameDecoder, FrameStatus, encode
from .link import Link, LinkError
from .link_wire import (
    Verb,
    pack_headers,
    pack_reply,
    pack_results,
    unpack_pairs,
    unpack_request,
)
from .memfd import map_read_write
from .nixl_link import NixlLink
from .nixl_settings import NixlSettings

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 16


def main(arguments: str) -> None:
    """Run until the holder ends. ``arguments`` is what ``IsolatedLink`` passes, as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the holder's to act on; its end is ours
    try:
        told = _start(json.loads(arguments))
        if told:
            sys.stdin.buffer.read()
    finally:
        os._exit(0)


def _start(given: dict[str, Any]) -> bool:
    """Start the link and the server and tell the holder; False if the link cannot start."""
    arena = map_read_write(given["arena_fd"], ArenaLayout.from_plain(given["layout"]))
    link = _start_link(arena, given)
    if isinstance(link, LinkError):
        _tell(given["tell_fd"], {"failure": link.failure, "detail": link.detail})
        return False
    endpoint = Endpoint(path=f"@kvfabric-link-{secrets.token_hex(8)}")
    listener = listen_unix(endpoint.path)
    threading.Thread(target=_accept, args=(listener, link), daemon=True).start()
    region = base64.b64encode(msgpack.packb(link.region().to_plain())).decode()
    _tell(given["tell_fd"], {"endpoint": str(endpoint), "region": region})
    return True


def _start_link(arena: Arena, given: dict[str, Any]) -> NixlLink | LinkError:
    return NixlLink.start(
        arena,
        holder=given["holder"],
        incarnation=given["incarnation"],
        suffix=given["suffix"],
        settings=NixlSettings(**given["settings"]),
    )


def _tell(fd: int, what: dict[str, Any]) -> None:
    with os.fdopen(fd, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(what))


def _accept(listener: socket.socket, link: Link) -> None:
    while True:
        sock, _ = listener.accept()
        pid, uid = peer_credentials(sock)
        if uid != os.geteuid():
            logger.info("link process: process %s of another user refused", pid)
            sock.close()
            continue
        threading.Thread(target=_serve, args=(sock, link), daemon=True).start()


def _serve(sock: socket.socket, link: Link) -> None:
    """Answer one of the holder's threads at a time, until it lets go."""
    decoder = FrameDecoder()
    frames: list[Frame] = []
    with sock:
        while True:
            try:
                data = sock.recv(_READ_BYTES)
                frames = decoder.feed(data) if data else []
                for frame in frames:
                    sock.sendall(encode(frame.request_id, FrameStatus.REPLY, answer(link, frame.payload)))
            except (OSError, WireError) as error:
                logger.info("link process: a connection ended: %s", error)
                return
            if not data:
                return


def answer(link: Link, request: bytes) -> bytes:
    """Serve one request of :mod:`link_wire`. Raises WireError for what is none."""
    verb, region, argument, deadline_s = unpack_request(request)
    if verb is Verb.QUIET:
        return pack_reply(None, link.quiet(argument))
    if region is None:
        raise WireError("link request: no region")
    match verb:
        case Verb.CONNECT:
            return pack_reply(link.connect(region, deadline_s))
        case Verb.DISCONNECT:
            link.disconnect(region)
            return pack_reply(None)
        case Verb.FETCH:
            return pack_reply(None, pack_results(link.fetch(region, unpack_pairs(argument), deadline_s)))
        case Verb.HEADERS:
            rows = link.headers(region, argument, deadline_s)
            return pack_reply(rows) if isinstance(rows, LinkError) else pack_reply(None, pack_headers(rows))
