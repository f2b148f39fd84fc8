"""Where a request is best sent: by what is there, what must be moved and what must be restored."""

from __future__ import annotations

from kvfabric.fabric.messages import Acquire, Answer
from kvfabric.fabric.planner import View
from kvfabric.fabric.ranking import NodeRank, rank_nodes

from .directory_bed import ABI, BLOCK, MODEL, Bed, prompt_of

P = prompt_of(1, 100 * BLOCK + 1)


def ranks(bed: Bed, asked: str) -> list[NodeRank]:
    answer: Answer = bed.ask(asked, Acquire(bed.request(), P, (ABI,), (asked,), 1.0, None, 0, True, explain=True))
    view = View(MODEL, P, (ABI,), (asked,))
    view.columns = {(c.holder, c.group, c.shard): c for c in answer.columns}
    view.unreachable, view.evicted = set(answer.unreachable), dict(answer.evicted)
    return rank_nodes(view, {name: (name,) for name in bed.holders})


def test_the_node_that_has_most_comes_first_whoever_is_asked():
    bed = Bed()
    bed.directory()
    for name in ("a", "b", "c"):
        bed.holder(name)
    bed.store("a", P, 0, 80)
    bed.store("b", P)
    for asked in ("a", "b", "c"):
        found = ranks(bed, asked)
        assert [(r.node, r.tokens, r.local_tokens, r.move_bytes) for r in found] == [
            ("b", 400, 400, 0),
            ("a", 400, 320, 20 * 16),
            ("c", 400, 0, 100 * 16),
        ]


def test_state_nobody_has_ranks_all_nodes_alike_at_nothing():
    bed = Bed()
    bed.directory()
    for name in ("a", "b"):
        bed.holder(name)
    assert [(r.tokens, r.cost_bytes) for r in ranks(bed, "a")] == [(0, 0), (0, 0)]
