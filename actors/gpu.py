"""A holder's GPU, and how what lies on it is reached: the only place where actors load torch, and only for that.

A holder is bound to one GPU of its node by its UUID: in its first life the first holder to the first in PCI order,
and so on; in every later life to the same one, or it does not start: when a GPU drops off the bus the others
change their numbers. Ray hides all GPUs from an actor that asks for none, so the holder names its own
before CUDA is loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from ..fabric.arena import Arena, ArenaLayout
from ..fabric.kinds import SpecError
from ..transport.payloads import HostPayloads, Payloads
from . import ray_api
from .addresses import place_of, prefix_of

if TYPE_CHECKING:
    from ..transport.gpu import GpuPools

LIST_TIMEOUT_S = 30.0
_BY_CUDA = """
import torch
for number in range(torch.cuda.device_count()):
    print(f"GPU-{torch.cuda.get_device_properties(number).uuid}")
"""
_LISTINGS = (["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], [sys.executable, "-c", _BY_CUDA])
"""In processes of their own: this one must not load CUDA before it chose."""


def gpu_uuids() -> list[str]:
    """UUIDs of this node's GPUs in PCI order, by the driver's tool or else by CUDA. Raises SpecError where neither tells."""
    problems = []
    hidden = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    for command in _LISTINGS:
        try:
            told = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=LIST_TIMEOUT_S,
                check=True,
                env=hidden | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            problems.append(str(error))
        else:
            return [line.strip() for line in told.splitlines() if line.strip()]
    raise SpecError(f"device: the GPUs of this node are not known: {'; '.join(problems)}")


def gpu_of(fabric: str, address: str) -> str:
    """The UUID of the GPU that a holder is bound to, from its first life on. Raises SpecError where it is not there."""
    there, key = gpu_uuids(), f"{prefix_of(fabric)}{address}/gpu"
    kept = ray_api.kept(key)
    if kept is not None:
        bound = kept.decode()
        if bound not in there:
            raise SpecError(
                f"device: {address} is bound to {bound}, which this node has no more: replace the GPU or the node"
            )
        return bound
    place = place_of(address)
    if place >= len(there):
        raise SpecError(f"device: {address} needs GPU number {place}, this node has {len(there)}")
    ray_api.keep(key, there[place].encode())
    return there[place]


def take_gpu(layout: ArenaLayout, fabric: str, address: str) -> GpuPools | None:
    """The memory on its GPU of the holder of that address; None where no pool of its layout lies there.

    Raises SpecError where there is no such GPU, or not as much free memory on it.
    """
    if not layout.cuda_bytes:
        return None
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of(fabric, address)
    from ..transport.gpu import GpuPools

    return GpuPools.allocate(layout, 0)


def payloads_of(arena: Arena, pools: GpuPools | None) -> Payloads:
    """What does to payload what a holder asks, wherever it lies."""
    if pools is None:
        return HostPayloads(arena)
    from ..transport.gpu import GpuPayloads

    return GpuPayloads(arena, pools)
