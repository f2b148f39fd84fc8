"""The rule engine and a naive computation of the same answer agree on random models and worlds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings

from kvfabric.fabric.cause import LOSSES_TRIED_MAX
from kvfabric.fabric.evidence import Blocked, GroupEvidence
from kvfabric.fabric.kinds import Reason
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.needs import rules_of
from kvfabric.fabric.rules import (
    Resolution,
    hash_tokens,
    needs_past,
    resolve,
    servable,
    serve_limits,
    usable_position,
    what_would_lengthen,
)

from .oracle import HISTORY, INDEXER, TAIL, WINDOW, Answer, Copy, Group, Oracle, World
from .worlds import Case, cases

Seen = Counter[str]
Said = tuple[int, int, str, tuple[str, str, str, str] | None, tuple[str, ...], tuple[int | None, ...]]


def oracle_of(case: Case, kind: type[Oracle] = Oracle) -> Oracle:
    return kind(case.groups, case.world, case.prompt, shards=case.shards, drop_last=case.drop_last)


def evidence_of(case: Case) -> tuple[GroupEvidence, ...]:
    """What a directory would tell the engine of this world, for this prompt."""
    return tuple(group_evidence(case, group) for group in case.groups)


def group_evidence(case: Case, group: Group) -> GroupEvidence:
    usable: Counter[int] = Counter()
    blocked: dict[tuple[str, bool], int] = {}
    matched = 0
    for i in range(len(case.prompt) // group.unit):
        prefix = case.prompt[: (i + 1) * group.unit]
        shards = [sorted(case.world.copies.get((prefix, group.name, s), ())) for s in range(case.shards)]
        everything = [copy for copies in shards for copy in copies]
        everywhere = [r for r in range(3) if all(Copy(r) in copies for copies in shards)]
        for revision in everywhere:
            usable[revision] |= 1 << i
        matched |= bool(everything) << i
        spoilt = [copy for copy in everything if copy.trouble]
        if spoilt:
            why = spoilt[0].trouble, spoilt[0].on_disk
        elif everything and not everywhere and not group.state:
            why = "block_incomplete", False
        elif (prefix, group.name) in case.world.evicted:
            why = "evicted", False
        else:
            continue
        blocked[why] = blocked.get(why, 0) | 1 << i
    entries = [Blocked(Reason(reason), bits, on_disk) for (reason, on_disk), bits in blocked.items()]
    # Who speaks second is never heard.
    entries += [Blocked(Reason.QUARANTINED, bits.bits) for bits in entries[:1]]
    return GroupEvidence(dict(usable), matched, tuple(entries))


def engine_said(found: Resolution) -> Said:
    cause = found.cause
    said = None if cause is None else (cause.group, cause.kind.value, cause.layer.value, cause.reason.value)
    return found.tokens, found.hash_tokens, found.status.value, said, found.also, found.revisions


def oracle_said(oracle: Oracle) -> Said:
    answer = oracle.answer()
    cut, revisions = answer.cut, oracle.granted_revisions(answer.tokens)
    said = None if cut is None else (cut.group, cut.kind, cut.layer, cut.reason)
    return answer.tokens, answer.hash_tokens, answer.status, said, () if cut is None else cut.also, revisions


def restored(case: Case, answer: Answer) -> Case | None:
    """The case with everything restored that the cut names; None where the prompt's own end is the cut."""
    assert answer.cut is not None
    if answer.cut.reason == "off_grid":
        return None
    oracle = oracle_of(case)
    copies = {key: set(there) for key, there in case.world.copies.items()}
    for name in (answer.cut.group, *answer.cut.also):
        group = oracle.by_name[name]
        revision = dict(answer.cut.revisions).get(oracle.history(group).name, 0)
        for end in oracle.owes(group, answer.cut.target):
            if end > len(case.prompt):
                return None
            for shard in range(case.shards):
                copies.setdefault((case.prompt[:end], name, shard), set()).add(Copy(revision))
    return Case(case.groups, case.shards, case.drop_last, case.prompt, World(copies, case.world.evicted))


def check_every_position(case: Case, model: ModelSpec, evidence: tuple[GroupEvidence, ...], oracle: Oracle) -> None:
    """What the engine says of single positions, groups and limits is what the oracle says."""
    n, positions, hit = len(case.prompt), oracle.positions(), oracle.hit()
    assert servable(model, evidence, n) == 1 | sum(1 << p // oracle.grid for p in positions)
    assert usable_position(model, evidence, n) == hit
    assert hash_tokens(model, evidence, n) == oracle.hash_tokens()
    assert serve_limits(model, evidence, n) == tuple(oracle.alone(g) for g in case.groups)
    for p in range(oracle.grid, n, oracle.grid):
        wanted = [[i for some in ranges for i in some] for ranges in needs_past(model, p)]
        assert wanted == [[end // g.unit - 1 for end in oracle.owes(g, p)] for g in case.groups]
    for limit in range(0, hit, oracle.grid):
        limited = resolve(model, evidence, n, limit_tokens=limit)
        best = max((p for p in positions if p <= limit), default=0)
        assert engine_said(limited) == (
            best,
            oracle.hash_tokens(),
            "PARTIAL_HIT",
            None,
            (),
            oracle.granted_revisions(best),
        )


def check_law(case: Case, answer: Answer, seen: Seen) -> None:
    """Restoring what the cut names lengthens the hit: for both, by what either says has to be restored."""
    mended = restored(case, answer)
    if mended is None:
        return
    seen["restored"] += 1
    model, n = ModelSpec.load(case.spec()), len(case.prompt)
    assert oracle_of(mended).hit() > answer.tokens
    assert usable_position(model, evidence_of(mended), n) > answer.tokens
    cut = what_would_lengthen(model, evidence_of(case), n)
    assert cut is not None
    assert answer.cut is not None
    assert cut.groups == (answer.cut.group, *answer.cut.also)
    assert cut.target_tokens == answer.cut.target


def check(case: Case, seen: Seen) -> None:
    """The engine says what the oracle says, and what both name is what is missing."""
    oracle = oracle_of(case)
    answer = oracle.answer()
    model, evidence = ModelSpec.load(case.spec()), evidence_of(case)
    found = resolve(model, evidence, len(case.prompt))
    assert engine_said(found) == oracle_said(oracle)
    rules = rules_of(model)
    if rules.grid // rules.finest <= LOSSES_TRIED_MAX:  # beyond, the engine stops counting
        assert found.tokens_lost_to_alignment == oracle.lost_to_alignment()
    check_every_position(case, model, evidence, oracle)
    seen["examples"] += 1
    seen["granted"] += answer.tokens > 0
    seen["cut"] += answer.tokens < answer.hash_tokens
    seen["off_the_grid"] += found.tokens_lost_to_alignment > 0
    seen[answer.status] += 1
    if answer.cut is not None:
        seen[answer.cut.kind] += 1
        seen[answer.cut.layer] += 1
        seen[answer.cut.reason] += 1
        seen["several"] += bool(answer.cut.also)
        check_law(case, answer, seen)


def run(examples: int, checked: Callable[[Case, Seen], None], *, same_each_time: bool) -> Seen:
    seen: Seen = Counter()

    @settings(max_examples=examples, derandomize=same_each_time, database=None, deadline=None)
    @given(cases())
    def each(case: Case) -> None:
        checked(case, seen)

    each()
    return seen


def enough_happened(seen: Seen) -> None:
    """A third of the examples grant something, a third are cut, and nothing that can be said is unheard."""
    assert seen["granted"] * 3 >= seen["examples"], seen
    assert seen["cut"] * 3 >= seen["examples"], seen
    assert seen["restored"] * 4 >= seen["examples"], seen
    kinds = {HISTORY, TAIL, WINDOW, INDEXER, "disk_prefix"}
    statuses = {"FULL_HIT", "PARTIAL_HIT", "INVALID", "MISS"}
    reasons = {"not_stored", "evicted", "block_incomplete", "off_grid", "window_incomplete", "snapshot_absent"}
    reasons |= {"tail_gap", "index_absent", "index_stale"}
    layers = {"whole_block", "abi", "intersection", "alignment", "transport"}
    unheard = {word for word in kinds | statuses | reasons | layers | {"several", "off_the_grid"} if not seen[word]}
    assert not unheard, (unheard, seen)


def test_the_engine_equals_the_oracle_and_restoring_what_it_names_lengthens_the_hit() -> None:
    enough_happened(run(600, check, same_each_time=True))


def test_a_block_promises_nothing_at_its_own_start() -> None:
    for n, status in ((32, "MISS"), (33, "PARTIAL_HIT")):
        prompt = tuple(range(n))
        world = World({(prompt[:32], "kv", 0): {Copy(0)}})
        case = Case((Group("kv", HISTORY, 16),), 1, 0, prompt, world)
        check(case, Counter())
        assert oracle_of(case).answer().status == status


@pytest.mark.long
def test_the_engine_equals_the_oracle_over_twenty_thousand_fresh_examples() -> None:
    enough_happened(run(20_000, check, same_each_time=False))
