"""Where to send a request: for each node, how far it could resume there and what must be moved for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .planner import View


@dataclass(frozen=True, slots=True)
class NodeRank:
    """One node's offer. ``tokens``: the resume position, wherever the state lies; ``local_tokens``: with nothing
    but the node's own memory; ``move_bytes``: to fetch from other holders; ``restore_bytes``: of all of it, what
    lies on a tier only.
    """

    node: str
    tokens: int
    local_tokens: int
    move_bytes: int
    restore_bytes: int

    @property
    def cost_bytes(self) -> int:
        """What stands between a request and its resume, in bytes."""
        return self.move_bytes + self.restore_bytes


def rank_nodes(view: View, nodes: Mapping[str, Sequence[str]]) -> list[NodeRank]:
    """The nodes, best first: the farthest resume, then the fewest bytes. ``nodes``: each rank's holder, a node."""
    ranks = [_rank(view, node, tuple(readers)) for node, readers in nodes.items()]
    return sorted(ranks, key=lambda r: (-r.tokens, r.cost_bytes, -r.local_tokens, r.node))


def _rank(view: View, node: str, readers: tuple[str, ...]) -> NodeRank:
    there = View(
        view.model,
        view.prompt,
        view.abis,
        readers,
        columns=view.columns,
        unreachable=view.unreachable,
        evicted=view.evicted,
    )
    found = there.found()
    local = there.of_readers().found(tiers=False)
    moved = restored = 0
    if found.tokens:
        sizes = [group.block_bytes for group in view.model.groups]
        for part in there.plan(found.tokens, found.revisions):
            for fetch in part.fetches:
                moved += len(fetch.objects.indices) * sizes[fetch.objects.group]
                restored += _on_tier(
                    there, fetch.source, fetch.objects.group, fetch.objects.shard, fetch.objects.indices
                )
            for run in part.local:
                restored += _on_tier(there, part.holder, run.group, run.shard, run.indices)
    return NodeRank(node, found.tokens, local.tokens, moved, restored)


def _on_tier(view: View, holder: str, group: int, shard: int, indices: Sequence[int]) -> int:
    column = view.columns.get((holder, group, shard))
    if column is None or not column.tier:
        return 0
    return sum(1 for i in indices if column.tier >> i & 1) * view.model.groups[group].block_bytes
