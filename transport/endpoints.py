"""Where a control socket listens, as one string, and the socket options both sides use.

``unix:/run/x/holder.sock`` is a path in a directory of its user's own; ``unix:@name`` lies in Linux's
abstract namespace: no file, so nothing is left after kill -9 (it is visible to every user of the network
namespace, which is why both sides ask the kernel whose process the other one is); ``tcp:host:port``
needs the cluster's secret.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from ..fabric.kinds import SpecError

UNIX_PATH_BYTES_MAX = 107
BACKLOG = 1024
"""How many connections may wait to be accepted: all workers of a node at once, while the loop is busy."""
_CREDENTIALS = struct.Struct("3i")

# A silent peer is given up after about 5 s instead of the kernel's two hours.
_KEEPALIVE_IDLE_S = 2
_KEEPALIVE_INTERVAL_S = 1
_KEEPALIVE_PROBES = 3
_USER_TIMEOUT_MS = 5000


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed address: ``path`` for Unix sockets (``@`` leads an abstract name), else host and port."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def sockaddr(self) -> str | tuple[str, int]:
        """What ``socket.connect`` and ``bind`` take."""
        if not self.is_unix:
            return (self.host, self.port)
        return "\0" + self.path[1:] if self.path.startswith("@") else self.path

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.is_unix else f"tcp:{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Raises SpecError for anything but ``unix:PATH``, ``unix:@NAME`` or ``tcp:HOST:PORT``."""
        scheme, _, rest = text.partition(":")
        if scheme == "unix" and rest:
            return cls(path=check_unix_path(rest))
        host, _, port = rest.rpartition(":")
        if scheme == "tcp" and host and port.isdecimal() and int(port) < 1 << 16:
            return cls(host=host.strip("[]"), port=int(port))
        raise SpecError(f"endpoint: {text!r} is none of unix:PATH, unix:@NAME, tcp:HOST:PORT")


def check_unix_path(path: str) -> str:
    """Raises SpecError for a path the kernel would cut off."""
    length = len(os.fsencode(path))
    if length > UNIX_PATH_BYTES_MAX:
        raise SpecError(f"endpoint: {path!r} has {length} bytes, Unix sockets take {UNIX_PATH_BYTES_MAX}")
    return path


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of a Unix socket's other end, as the kernel recorded them at connect."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def tune_tcp(sock: socket.socket) -> None:
    """No delay for small frames, and a lost peer is noticed within seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def private_directory(path: Path) -> None:
    """Make ``path`` for this user alone. Raises SpecError if it exists and others own or may enter it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise SpecError(f"socket directory: {path} must be a directory of this user's with mode 0700")


def listen_unix(path: str) -> socket.socket:
    """A listening Unix socket at ``path``; a socket file that nobody serves any more is replaced.

    Raises SpecError for a directory that is not private, OSError (EADDRINUSE) if somebody listens there.
    """
    endpoint = Endpoint(path=check_unix_path(path))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if not path.startswith("@"):
            private_directory(Path(path).parent)
            _remove_dead_socket(Path(path))
        sock.bind(endpoint.sockaddr)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_dead_socket(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
