"""One cluster of two nodes for all faults, and a fabric on it whose transfers are long enough to have a middle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvfabric
from kvfabric import Fabric

from ..actors.stories import GROUPS, spec
from .scene import BIG_BLOCK_BYTES, Scene

NODES = ("kvfabric_node_0", "kvfabric_node_1")  # not those that a test adds
BIG_GROUPS = [g | {"block_bytes": BIG_BLOCK_BYTES} if g["name"] == "csa" else g for g in GROUPS]


def big_spec(**more: Any) -> dict[str, Any]:
    """Room for two big prompts on a node; bytes travel by NIXL over TCP, as between hosts."""
    return spec(
        model={"name": "big", "groups": BIG_GROUPS},
        slots={"csa": 72, "tail": 72, "idx": 72, "swa": 72},
        transport={"links": ["nixl"], "nixl_transports": "tcp", "network_devices": "lo", "transfer_timeout_s": 4.0},
        node_resource=NODES,
        **more,
    )


@pytest.fixture(scope="session")
def fabric() -> Iterator[Fabric]:
    """The fabric that most faults strike; it outlives them all."""
    with kvfabric.launch(big_spec(), name="faults", nodes=2) as running:
        yield running


@pytest.fixture
def scene(fabric: Fabric) -> Iterator[Scene]:
    with Scene(fabric) as stage:
        stage.whole()
        yield stage
        stage.balanced()
