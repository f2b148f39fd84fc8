"""Look-ups for schedulers and routers, on a real cluster."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace

import kvfabric
from kvfabric import AsyncSession, Fabric, Session, Status
from kvfabric.fabric.memo import Remembered

from .conftest import MAIN, Away
from .stories import eventually, objects, prompt


def test_a_scheduler_never_waits_and_knows_at_the_next_step(session: Session) -> None:
    tokens = prompt("lookahead")
    assert session.probe_nowait(tokens) is None
    cold = eventually(lambda: session.probe_nowait(tokens), lambda known: known is not None)
    assert cold == Remembered(0, cold=True)
    assert session.publish(tokens, objects(session.model, tokens)).ok
    warm = eventually(lambda: session.probe_nowait(tokens), lambda known: known is not None)
    assert warm == Remembered(64, cold=False), "what this session stored hides behind no old answer"
    session.acquire(tokens).cancel()
    assert session.probe_nowait(tokens) == Remembered(64, cold=False)


def test_a_batch_is_matched_in_one_round_trip_in_order(session: Session) -> None:
    stored, absent = prompt("batch"), prompt("no batch")
    assert session.publish(stored, objects(session.model, stored)).ok
    found = session.match_many([absent, stored, session.keys(stored), absent])
    assert [answer.tokens for answer in found] == [0, 64, 64, 0]
    assert [answer.status for answer in found] == [Status.MISS, Status.FULL_HIT, Status.FULL_HIT, Status.MISS]
    assert session.match_many([]) == []


def test_a_router_is_told_where_the_state_is(fabric: Fabric, session: Session) -> None:
    tokens = prompt("ranked")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    here = fabric.info().node
    ranks = fabric.rank(tokens)
    assert len(ranks) == 2
    assert (ranks[0].node, ranks[0].tokens, ranks[0].local_tokens, ranks[0].cost_bytes) == (here, 64, 64, 0)
    assert (ranks[1].tokens, ranks[1].local_tokens) == (64, 0)
    assert ranks[1].move_bytes > 0


def test_a_router_on_a_node_without_a_holder_is_told_the_same(fabric: Fabric, session: Session) -> None:
    tokens = prompt("ranked from outside")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    info = fabric.info()
    elsewhere = replace(info, node="a node of routers")
    expected = session.rank(tokens)
    assert (expected[0].node, expected[0].cost_bytes) == (info.node, 0)
    assert expected[1].move_bytes > 0
    with Session(lambda: elsewhere, name=MAIN) as router:
        assert eventually(lambda: router.rank(tokens), lambda ranks: ranks == expected) == expected
        assert router.acquire(tokens).status is Status.MISS, "a lease is of this node's memory, and there is none"
    stranger = replace(elsewhere, door_secret=bytes(32))
    with Session(lambda: stranger, name=MAIN) as router:
        assert [rank.tokens for rank in router.rank(tokens)] == [0, 0]


def test_a_session_elsewhere_sees_what_this_one_wrote_by_its_mark(session: Session, away: Away) -> None:
    tokens = prompt("own writes")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    (mark,) = session._fresh_marks()
    assert mark.mark > 0
    probe = session._acquire(session.keys(tokens), probe=True)
    assert probe.marks == (mark,)


def test_no_verb_is_only_blocking() -> None:
    def verbs(of: type) -> set[str]:
        return {name for name in dir(of) if not name.startswith("_") and inspect.isroutine(getattr(of, name))}

    # Makes a record and asks nobody.
    assert verbs(Session) - verbs(AsyncSession) == {"request"}
    at_once = {"probe_nowait", "audit_due"}
    assert all(inspect.iscoroutinefunction(getattr(AsyncSession, name)) for name in verbs(AsyncSession) - at_once)


def test_every_verb_can_be_awaited(fabric: Fabric) -> None:
    async def use() -> tuple[int, int, int]:
        session = await kvfabric.connect_async(MAIN)
        tokens = prompt("awaited")
        assert (await session.publish(tokens, objects(session.session.model, tokens))).ok
        many = await session.match_many([tokens])
        ranks = await session.rank(tokens)
        session.probe_nowait(tokens)
        await session.close()
        return many[0].tokens, ranks[0].tokens, len(ranks)

    assert asyncio.run(use()) == (64, 64, 2)
