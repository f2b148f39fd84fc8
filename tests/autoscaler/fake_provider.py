"""Nodes for Ray's autoscaler that are raylets on this machine, as the autoscaler's own process starts and ends them."""

from __future__ import annotations

import hashlib
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class FakeNodes(FakeMultiNodeProvider):
    """Ray's fake provider, with node ids that differ from their first letters on, as real ones do."""

    def _next_hex_node_id(self) -> str:
        self._next_node_id += 1
        return hashlib.sha256(str(self._next_node_id).encode()).hexdigest()[:56]

    def set_node_tags(self, node_id: str, tags: dict[str, Any]) -> None:
        """Nothing depends on them here."""
