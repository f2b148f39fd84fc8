"""Ends what is left of an embedded cluster, and removes its folder: run as a process of its own.

    python sweeper.py FOLDER        started by the process that starts the cluster, standard input a pipe from it

A byte on the pipe says that the cluster was shut down; its end without one that the process died, be it
by kill -9. The cluster's processes, which Ray's fate sharing ends within seconds, get a grace period;
those that remain are killed, each by its id; the folder goes last. A process belongs to the cluster if its environment at start named the folder in
``KVFABRIC_CLUSTER``: only the cluster's own processes were started with it.

Standard library only, and no import of this package: it must outlive whatever broke.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "KVFABRIC_CLUSTER"
GRACE_S = {b"shut down": 3.0, b"": 8.0}
KILLS_MAX = 50
POLL_S = 0.05


def marked(folder: str) -> list[int]:
    """Process ids of the cluster that has this folder; zombies have ended and do not count."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def sweep(folder: str, grace_s: float) -> None:
    """Wait, kill, remove."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and marked(folder):
        time.sleep(POLL_S)
    for _ in range(KILLS_MAX):
        left = marked(folder)
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sweep(sys.argv[1], GRACE_S.get(os.read(0, 64), 0.0))
