"""Bytes, rates and nodes of a workload, by a model's own rules: pure arithmetic, nothing is measured.

    a prompt          by kind, the bytes that a resume brings, that the whole prompt leaves, and that are new
    a second          what is stored, fetched from other nodes, restored from a tier and prefilled
    memory            new state kept for `reuse_s`, and what arrives from elsewhere while leases hold it
    nodes             the most of what memory, links and disks ask for

Objects are counted as the fabric counts them: :func:`needs` says what a resume brings,
:func:`published` what a store leaves under a checkpoint policy. Shards of a model are summed up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ...fabric.arena import PAGE_BYTES
from ...fabric.checkpoints import CheckpointPolicy, published, trail_of
from ...fabric.kinds import SpecError
from ...fabric.model import GroupSpec, ModelSpec
from ...fabric.needs import needs

GIB = 1 << 30
TOKENS_MAX = 1 << 23
NODES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of a cluster.

    ``tokens``: of a prompt; ``output_tokens``: computed behind it and stored too; ``hit_share``: the part of a
    prompt that is there already; ``routed_share``: requests that go to the node where that is; ``restore_share``:
    the part of what a resume needs that lies on a tier; ``reuse_s``: for how long state shall stay in memory;
    ``lease_s``: how long a request holds what it resumed from.
    """

    tokens: int
    qps: float
    output_tokens: int = 0
    hit_share: float = 0.5
    routed_share: float = 0.0
    restore_share: float = 0.0
    reuse_s: float = 600.0
    lease_s: float = 10.0

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("tokens", self.tokens, 1, TOKENS_MAX),
            ("output_tokens", self.output_tokens, 0, TOKENS_MAX),
            ("hit_share", self.hit_share, 0, 1),
            ("routed_share", self.routed_share, 0, 1),
            ("restore_share", self.restore_share, 0, 1),
            ("qps", self.qps, 0, 1e9),
            ("reuse_s", self.reuse_s, 0, 1e9),
            ("lease_s", self.lease_s, 0, 1e9),
        ):
            if not low <= value <= high:
                raise SpecError(f"{name}: {value} is not from {low} to {high:g}")


@dataclass(frozen=True, slots=True)
class Node:
    """One node: memory that readers map, and what its link and its disk move a second (None: no limit)."""

    memory_bytes: int = 64 * GIB
    transfer_bytes_per_s: float | None = None
    restore_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "transfer_bytes_per_s", "restore_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise SpecError(f"{name}: {value} is not above 0")


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. Bytes are payload, but for those of memory, whose slots are whole pages.

    ``resume``, ``stored``, ``new``: objects of each group that one request brings, that its whole prompt and output
    leave, and of these the ones that were not there before.
    """

    model: ModelSpec
    workload: Workload
    node: Node
    resume_tokens: int
    resume: tuple[int, ...]
    stored: tuple[int, ...]
    new: tuple[int, ...]
    nodes: int = 1

    @property
    def resume_bytes(self) -> int:
        """Payload that one request resumes from."""
        return _payload(self.model, self.resume)

    @property
    def restore_bytes_per_s(self) -> float:
        """From tiers, over all nodes."""
        return self.workload.qps * self.workload.restore_share * self.resume_bytes

    @property
    def transfer_bytes_per_s(self) -> float:
        """Between nodes, over all of them: a request that was not routed finds its state elsewhere, but for one in ``nodes``."""
        elsewhere = (1 - self.workload.routed_share) * (1 - 1 / self.nodes)
        return self.workload.qps * (1 - self.workload.restore_share) * self.resume_bytes * elsewhere

    @property
    def stored_bytes_per_s(self) -> float:
        """New payload, over all nodes; with a disk tier also what is written there."""
        return self.workload.qps * _payload(self.model, self.new)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens that are computed for want of state."""
        return self.workload.qps * (self.workload.tokens - self.resume_tokens)

    @property
    def working_set_bytes(self) -> int:
        """Slots of the new state of ``reuse_s``."""
        return ceil(self.workload.qps * self.workload.reuse_s * _slots(self.model, self.new))

    @property
    def landing_bytes(self) -> int:
        """Slots that what is fetched and restored takes while leases hold it."""
        if not self.resume_bytes:
            return 0
        payload = (self.transfer_bytes_per_s + self.restore_bytes_per_s) * self.workload.lease_s
        return ceil(payload * _slots(self.model, self.resume) / self.resume_bytes)

    def nodes_by(self) -> dict[str, int]:
        """Nodes that memory, links and disks each ask for."""
        memory = ceil((self.working_set_bytes + self.landing_bytes) / self.node.memory_bytes)
        limits = {
            "transfer": (self.transfer_bytes_per_s, self.node.transfer_bytes_per_s),
            "restore": (self.restore_bytes_per_s, self.node.restore_bytes_per_s),
        }
        return {
            "memory": memory,
            **{name: ceil(rate / limit) if limit else 0 for name, (rate, limit) in limits.items()},
        }

    def plain(self) -> dict[str, Any]:
        """Everything as plain data."""
        model = self.model
        objects = sum(self.new) * model.shards
        return {
            "model": model.name,
            "grid_tokens": model.grid_tokens,
            "tokens": self.workload.tokens,
            "resume_tokens": self.resume_tokens,
            "groups": [
                {"name": g.name, "kind": str(g.kind)}
                | {
                    f"{name}_bytes": n * _bytes(model, g)
                    for name, n in zip(("resume", "stored", "new"), of, strict=True)
                }
                for g, *of in zip(model.groups, self.resume, self.stored, self.new, strict=True)
            ],
            "kinds": {
                "resume_bytes": _by_kind(model, self.resume),
                "stored_bytes": _by_kind(model, self.stored),
                "new_bytes": _by_kind(model, self.new),
            },
            "resume_bytes": self.resume_bytes,
            "stored_bytes": _payload(model, self.stored),
            "new_bytes": _payload(model, self.new),
            "stored_bytes_per_s": self.stored_bytes_per_s,
            "transfer_bytes_per_s": self.transfer_bytes_per_s,
            "restore_bytes_per_s": self.restore_bytes_per_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "working_set_bytes": self.working_set_bytes,
            "working_set_objects": ceil(self.workload.qps * self.workload.reuse_s * objects),
            "landing_bytes": self.landing_bytes,
            "nodes_by": self.nodes_by(),
            "nodes": self.nodes,
            "a_node": {
                "memory_bytes": ceil((self.working_set_bytes + self.landing_bytes) / self.nodes),
                "transfer_bytes_per_s": self.transfer_bytes_per_s / self.nodes,
                "restore_bytes_per_s": self.restore_bytes_per_s / self.nodes,
            },
        }


def plan(model: ModelSpec, workload: Workload, node: Node, policy: CheckpointPolicy) -> Plan:
    """What the workload takes. Raises SpecError where it would take more than :data:`NODES_MAX` nodes.

    More nodes mean that less of what is asked for lies where it is asked for, so the count is raised until it
    is enough for what it causes itself.
    """
    grid = model.grid_tokens
    reached = min(int(workload.hit_share * workload.tokens), workload.tokens - 1) // grid * grid
    end = workload.tokens + workload.output_tokens
    before = (
        _published(model, policy, reached, reached, ()) if reached else tuple(frozenset[int]() for _ in model.groups)
    )
    whole = _published(model, policy, end, workload.tokens, (reached,) if reached else ())
    found = Plan(
        model,
        workload,
        node,
        resume_tokens=reached,
        resume=tuple(sum(len(r) for r in ranges) for ranges in needs(model, reached)),
        stored=tuple(len(objects) for objects in whole),
        new=tuple(len(objects - there) for objects, there in zip(whole, before, strict=True)),
    )
    while (wanted := max(found.nodes_by().values())) > found.nodes:
        if wanted > NODES_MAX:
            raise SpecError(f"qps: {workload.qps:g} of such requests take more than {NODES_MAX:,} nodes")
        found = replace(found, nodes=wanted)
    return found


def _published(
    model: ModelSpec, policy: CheckpointPolicy, end: int, prompt: int, branches: Sequence[int]
) -> tuple[frozenset[int], ...]:
    positions: Collection[int] = policy.positions(trail_of(model, end, prompt, branches))
    return published(model, positions, end)


def _bytes(model: ModelSpec, group: GroupSpec) -> int:
    return group.block_bytes * model.shards


def _payload(model: ModelSpec, objects: Sequence[int]) -> int:
    return sum(n * _bytes(model, group) for group, n in zip(model.groups, objects, strict=True))


def _slots(model: ModelSpec, objects: Sequence[int]) -> int:
    strides = (-(-group.block_bytes // PAGE_BYTES) * PAGE_BYTES for group in model.groups)
    return sum(n * stride * model.shards for stride, n in zip(strides, objects, strict=True))


def _by_kind(model: ModelSpec, objects: Sequence[int]) -> Mapping[str, int]:
    found: Counter[str] = Counter()
    for group, n in zip(model.groups, objects, strict=True):
        found[str(group.kind)] += n * _bytes(model, group)
    return dict(found)
