"""The properties can fail: an oracle with one wrong rule disagrees with the engine on the same examples."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import Phase, given, settings

from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.rules import resolve

from .oracle import HISTORY, INDEXER, TAIL, WINDOW, Answer, Copy, Group, Oracle
from .test_oracle import Said, engine_said, evidence_of, oracle_of, oracle_said
from .worlds import Case, cases


@cache
def answered() -> list[tuple[Case, Said]]:
    """1,000 examples, the same in each run, with what the engine says."""
    drawn: list[tuple[Case, Said]] = []

    @settings(max_examples=1000, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(cases())
    def draw(case: Case) -> None:
        found = resolve(ModelSpec.load(case.spec()), evidence_of(case), len(case.prompt))
        drawn.append((case, engine_said(found)))

    draw()
    return drawn


class WindowOneTokenShort(Oracle):
    def _owes(self, g: Group, p: int) -> tuple[int, ...]:
        if g.kind != WINDOW or g.state:
            return super()._owes(g, p)
        wanted = {*range(max(0, p - g.window + 2), p), *range(min(g.sink, p)), *range(p, p + self.drop)}
        return tuple(sorted({token - token % g.unit + g.unit for token in wanted}))


class SinksForgotten(Oracle):
    def _owes(self, g: Group, p: int) -> tuple[int, ...]:
        floor = p - g.window + 1 if g.kind == WINDOW and not g.state else 0
        return tuple(end for end in super()._owes(g, p) if end > floor)


class OverlapOptionalAtAlignedPositions(Oracle):
    def _owes(self, g: Group, p: int) -> tuple[int, ...]:
        ends = super()._owes(g, p)
        aligned = g.kind == TAIL and not g.state and self.compressed(g, p) == p
        return tuple(end for end in ends if end > p) if aligned else ends


class LagForgotten(Oracle):
    def compressed(self, g: Group, p: int) -> int:
        ratio = self.history(g).ratio
        return p // ratio * ratio


class RatioForgotten(Oracle):
    def compressed(self, g: Group, p: int) -> int:
        return max(0, p - self.history(g).lag)


class HalfABlockSuffices(Oracle):
    def _owes(self, g: Group, p: int) -> tuple[int, ...]:
        return tuple(end for end in super()._owes(g, p) if end <= p + self.drop)


class OneShardSuffices(Oracle):
    def _bears(self, g: Group, end: int) -> frozenset[int]:
        return frozenset(c.revision for copies in self.copies(g, end) for c in copies if not c.trouble)


class TroubleForgiven(Oracle):
    def copies(self, g: Group, end: int) -> list[set[Copy]]:
        return [{Copy(c.revision) for c in copies} for copies in super().copies(g, end)]


class TailOfAnyRevision(Oracle):
    def failing(self, g: Group, p: int, revision: int) -> list[int]:
        if g.kind == TAIL:
            return [end for end in self.owes(g, p) if not self.bears(g, end)]
        return super().failing(g, p, revision)


class IndexerOfAnyRevision(Oracle):
    def failing(self, g: Group, p: int, revision: int) -> list[int]:
        if g.kind == INDEXER:
            return [end for end in self.owes(g, p) if not self.bears(g, end)]
        return super().failing(g, p, revision)


class HistoryOfMixedRevisions(Oracle):
    def failing(self, g: Group, p: int, revision: int) -> list[int]:
        if g.kind == HISTORY:
            return [end for end in self.owes(g, p) if not self.bears(g, end)]
        return super().failing(g, p, revision)


class LowerRevisionPreferred(Oracle):
    def _choices(self, root: Group) -> list[int]:
        return super()._choices(root)[::-1]


class StaleIndexerBlamedOnTheHistory(Oracle):
    def contradicted(self, root: Group, p: int, revision: int, lifted: str) -> bool:
        return False


class SpeculationForgotten(Oracle):
    def answer(self) -> Answer:
        self.drop = 0
        return super().answer()


class LastTokenResumedToo(Oracle):
    def _hash_tokens(self) -> int:
        n = len(self.prompt)
        return n if n and n % self.grid == 0 and self.promised(n) else super()._hash_tokens()


class LastGroupBlamedOnATie(Oracle):
    def answer(self) -> Answer:
        self.groups = self.groups[::-1]
        return super().answer()


WRONG = Oracle.__subclasses__()


def first_disagreement(rule: type[Oracle]) -> int | None:
    """Index of the first example on which an oracle with this rule is not the engine."""
    for i, (case, said) in enumerate(answered()):
        if oracle_said(oracle_of(case, rule)) != said:
            return i
    return None


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_a_wrong_rule_is_found(rule: type[Oracle]) -> None:
    assert first_disagreement(rule) is not None


def test_the_right_rules_disagree_nowhere() -> None:
    assert first_disagreement(Oracle) is None
