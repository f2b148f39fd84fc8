"""Keeping a holder's memory and threads on one NUMA node: next to the GPU or the network card that they serve.

Memory is asked for on the node and taken elsewhere where it is full: a holder on the far node beats none. The kernel
keeps the wish with the memory file itself, so it holds whoever touches a page first, a writer in another process too
(set_mempolicy(2), mbind(2); ``/proc/PID/numa_maps`` shows ``prefer:N``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path

from ..fabric.kinds import SpecError
from .memfd import ArenaMemory

_NODES = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}
"""System call numbers: the C library has no function for it."""
_MPOL_PREFERRED = 1
_MASK_BITS = 1024

_libc = ctypes.CDLL(None, use_errno=True)


def numa_nodes() -> list[int]:
    """The machine's nodes that have memory, ascending; empty where the kernel tells of none."""
    try:
        return sorted(_numbers((_NODES / "has_memory").read_text(encoding="ascii")))
    except OSError:
        return []


def cpus_of(node: int) -> set[int]:
    """The CPUs of a node; empty for one that has only memory."""
    return _numbers((_NODES / f"node{node}" / "cpulist").read_text(encoding="ascii"))


def stay_on(node: int, memory: ArenaMemory) -> None:
    """Prefer the node for the arena's pages, and let all of this process's threads run on its CPUs only.

    Threads and processes that begin later inherit that. Raises SpecError where there is no such node, where this
    process may use none of its CPUs, or where the kernel refuses.
    """
    known = numa_nodes()
    if node not in known:
        listed = ", ".join(map(str, known)) or "none"
        raise SpecError(
            f"transport.numa_node: {node} is no NUMA node with memory of this machine (there are: {listed})"
        )
    _prefer(node, memory)
    cpus = cpus_of(node)
    if not cpus:
        return
    allowed = cpus & os.sched_getaffinity(0)
    if not allowed:
        raise SpecError(f"transport.numa_node: this process may not run on any CPU of node {node}")
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
            os.sched_setaffinity(int(task.name), allowed)


def _prefer(node: int, memory: ArenaMemory) -> None:
    number = _MBIND.get(platform.machine())
    if number is None:
        raise SpecError(f"transport.numa_node: not known how to ask for it on {platform.machine()}")
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    # The kernel reads one bit less than it is told.
    refused = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(memory.address),
        ctypes.c_ulong(memory.layout.size_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(_MASK_BITS + 1),
        ctypes.c_uint(0),
    )
    if refused:
        raise SpecError(f"transport.numa_node: the kernel refuses node {node} ({os.strerror(ctypes.get_errno())})")


def _numbers(listed: str) -> set[int]:
    """The numbers of a kernel list such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
