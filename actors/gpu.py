"""A holder's GPU, and how what lies on it is reached: the only place where actors load torch, and only for that.

A holder is bound to one GPU of its node: the first holder to the first in PCI order, and so on. Ray
hides all GPUs from an actor that asks for none, so the holder names its own before CUDA is loaded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..fabric.arena import Arena, ArenaLayout
from ..transport.payloads import HostPayloads, Payloads
from .addresses import place_of

if TYPE_CHECKING:
    from ..transport.gpu import GpuPools


def take_gpu(layout: ArenaLayout, address: str) -> GpuPools | None:
    """The memory on its GPU of the holder of that address; None where no pool of its layout lies there.

    Raises SpecError where there is no such GPU, or not as much free memory on it.
    """
    if not layout.cuda_bytes:
        return None
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = str(place_of(address))
    from ..transport.gpu import GpuPools

    return GpuPools.allocate(layout, 0)


def payloads_of(arena: Arena, pools: GpuPools | None) -> Payloads:
    """What does to payload what a holder asks, wherever it lies."""
    if pools is None:
        return HostPayloads(arena)
    from ..transport.gpu import GpuPayloads

    return GpuPayloads(arena, pools)
