"""Sessions: passed on, awaited, and what a client may not do."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import kvfabric
from kvfabric import Fabric, FabricError, Reason, Session, Status
from kvfabric.actors import ray_api
from kvfabric.fabric import wire
from kvfabric.fabric.kinds import WireError
from kvfabric.fabric.messages import (
    Acquire,
    Answer,
    ArenaRequest,
    Done,
    Drop,
    Generated,
    GrantUntil,
    HolderGone,
    Members,
    Misuse,
    Objects,
    PartGrant,
    PeerHello,
    Prompt,
    Renew,
    SetMode,
    SetWeights,
    SlotsRequest,
    StatusReply,
    StatusRequest,
    StoreAbort,
    StoreBegin,
    StoreCommit,
    StoreItem,
    WriteSlots,
)
from kvfabric.fabric.passport import Abi
from kvfabric.transport.control_client import BlockingClient, ConnectionLost

from .conftest import MAIN, Away, holders, successor
from .stories import eventually, objects, prompt, wrong_bytes


def probed(kept: dict[str, Any], session: Session, tokens: list[int]) -> tuple[int, int, str]:
    with session:
        return session.probe(tokens).tokens, os.getpid(), session.weights_revision


def test_a_session_passed_to_another_process_reconnects_there(session: Session, away: Away) -> None:
    tokens = prompt("passed on")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    _, pid, weights = eventually(lambda: away.do(probed, session, tokens), lambda told: told[0] == 64)
    assert pid != os.getpid()
    assert weights == session.weights_revision


def test_a_session_that_is_told_its_node_stores_there(fabric: Fabric, cluster: Any) -> None:
    for number, node in enumerate(cluster.node_ids[:2]):
        tokens = prompt(f"told its node {number}")
        with kvfabric.connect(node=node) as session:
            assert session.publish(tokens, objects(session.model, tokens)).ok
        best = eventually(partial(fabric.rank, tokens), lambda ranks: ranks[0].local_tokens == 64)
        assert best[0].node == node
    with pytest.raises(FabricError, match="is no node that is alive"):
        kvfabric.connect(node="f" * 56)


def test_an_asyncio_session_has_the_same_verbs(fabric: Fabric) -> None:
    async def story() -> None:
        session = await kvfabric.connect_async()
        model = session.session.model
        prompts = [prompt(f"asyncio {i}") for i in range(4)]
        stored = await asyncio.gather(*(session.publish(tokens, objects(model, tokens)) for tokens in prompts))
        assert all(s.ok for s in stored)
        answers = await asyncio.gather(*(session.acquire(tokens) for tokens in prompts))
        for tokens, answer in zip(prompts, answers, strict=True):
            assert answer.status is Status.FULL_HIT
            assert answer.lease is not None
            with answer.lease as lease:
                assert wrong_bytes(lease, model, tokens) == []
        assert (await session.probe(prompts[0])).tokens == 64
        assert (await session.explain(prompts[0])).tokens == 64
        await session.close()

    asyncio.run(story())


def test_connecting_to_a_fabric_that_is_not_there_is_one_clear_line(fabric: Fabric) -> None:
    with pytest.raises(FabricError, match=r"^no fabric 'nowhere' runs on this cluster: kvfabric\.launch"):
        kvfabric.connect("nowhere")


def test_a_bypassed_fabric_answers_recompute_and_keeps_what_was_granted(fabric: Fabric, session: Session) -> None:
    tokens = prompt("bypassed")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    lease = session.acquire(tokens).lease
    assert lease is not None
    fabric.bypass(on=True)
    try:
        answer = session.acquire(tokens)
        assert (answer.tokens, answer.lease) == (0, None)
        assert answer.cause is not None
        assert answer.cause.reason is Reason.BYPASSED
        assert wrong_bytes(lease, session.model, tokens) == []
    finally:
        fabric.bypass(on=False)
    lease.release()
    answer = session.acquire(tokens)
    assert answer.status is Status.FULL_HIT
    answer.cancel()


BLOCK = np.zeros(5000, np.uint8)
MISTAKES: dict[str, tuple[Callable[[Any, Any, list[int]], Any], str]] = {
    "a passport of no group": (lambda *_: kvfabric.connect(passport={"cas": kvfabric.AbiPassport()}), "passport.cas: "),
    "weights of no name": (lambda fabric, *_: fabric.update_weights(""), "revision: "),
    "weights of a number": (lambda fabric, *_: fabric.update_weights(5), "revision: "),
    "a bypass that is a word": (lambda fabric, *_: fabric.bypass("off"), "on: "),
    "a wait of no length": (lambda _, session, t: session.acquire(t, wait_s=float("nan")), "wait_s: "),
    "a number too large": (lambda _, session, t: session.acquire(t, priority=1 << 70), "Acquire: a number"),
    "an index that is a word": (lambda _, session, t: session.publish(t, {"csa": {"0": BLOCK}}), "objects.csa: "),
    "an index between two": (lambda _, session, t: session.begin(t, {"csa": [0.5]}), "objects.csa: "),
    "blocks of no group": (lambda _, session, t: session.publish(t, [BLOCK]), "objects: "),
    "growth from before": (lambda _, session, t: session.extend(t, -1, {"csa": {0: BLOCK}}), "from_token: "),
    "growth from behind": (lambda _, session, t: session.extend(t, 10_000, {"csa": {0: BLOCK}}), "from_token: "),
}


@pytest.mark.parametrize(("wrong", "told"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_call_is_told_by_the_argument_and_changes_nothing(
    fabric: Fabric, session: Session, wrong: Any, told: str
) -> None:
    tokens = prompt("mistakes")
    with pytest.raises(FabricError, match=f"^{re.escape(told)}"):
        wrong(fabric, session, tokens)
    assert session.publish(tokens, objects(session.model, tokens)).ok
    answer = session.acquire(tokens)
    assert answer.status is Status.FULL_HIT
    answer.cancel()


def test_a_damaged_token_opens_nothing(session: Session) -> None:
    tokens = prompt("token")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    lease = session.acquire(tokens).lease
    assert lease is not None
    with lease:
        token = lease.token()
        for at in range(0, len(token), 7):
            damaged = bytearray(token)
            damaged[at] ^= 1 << at % 8
            with pytest.raises(WireError):
                kvfabric.Lease.open(bytes(damaged))
        with kvfabric.Lease.open(token) as opened:
            assert wrong_bytes(opened, session.model, tokens) == []


# --- what a client may not do ----------------------------------------------------------------------


@pytest.fixture
def socket(fabric: Fabric) -> Iterator[BlockingClient]:
    """A client's bare connection to this node's holder."""
    here = holders(fabric)[0]["address"]
    member = next(m for m in fabric.info().members if m.address == here)
    with BlockingClient.connect(member.unix) as client:
        yield client


def said(socket: BlockingClient, frame: bytes) -> Any:
    answer = socket.request(frame, 5.0)
    assert answer.descriptors == ()
    return wire.decode(answer.payload)


def alive(socket: BlockingClient) -> bool:
    return isinstance(said(socket, wire.encode(StatusRequest("s"))), StatusReply)


ABI = Abi()
KEYS = ((16, bytes(4 * 32)), (4, bytes(17 * 32)))
GOOD = Prompt(bytes(32), bytes(16), "", 70, KEYS)


def begin(objects_of: Objects, length: int = 5000, prompt_of: Prompt = GOOD) -> StoreBegin:
    return StoreBegin("r", prompt_of, (StoreItem(objects_of, 0, length, ABI),), (), False)


def acquire(**changed: Any) -> Acquire:
    fields: dict[str, Any] = {
        "request": "r",
        "prompt": GOOD,
        "abis": (ABI,) * 4,
        "readers": ("me",),
        "lease_s": 1.0,
        "wait_s": None,
    }
    fields |= {"min_tokens": 0, "probe": True}
    return Acquire(**(fields | changed))


SENSELESS = {
    "another group": (begin(Objects(9, 0, (0,), bytes(32))), "no group number 9"),
    "another shard": (begin(Objects(0, 1, (0,), bytes(32))), "no shard 1"),
    "half a digest": (begin(Objects(0, 0, (0,), bytes(16))), "bytes of digests"),
    "an index before the first": (begin(Objects(0, 0, (-1,), bytes(32))), "indices must ascend"),
    "an index twice": (begin(Objects(0, 0, (1, 1), bytes(64))), "indices must ascend"),
    "an index outside the prompt": (begin(Objects(0, 0, (4,), bytes(32))), "outside the prompt"),
    "more bytes than a slot has": (begin(Objects(0, 0, (0,), bytes(32)), 5001), "5001 bytes are no object of csa"),
    "digests of another prompt": (acquire(prompt=Prompt(bytes(32), bytes(16), "", 64, KEYS)), "every 4"),
    "half a namespace": (acquire(prompt=Prompt(bytes(16), bytes(16), "", 0, ())), "namespace has 32"),
    "passports of another model": (acquire(abis=(ABI,)), "abis: 1 are given for 4 groups"),
    "no reader": (acquire(readers=()), "readers"),
    "a lease of no length": (acquire(lease_s=0.0), "lease_s"),
    "a lease without end": (acquire(lease_s=float("nan")), "lease_s"),
    "a renewal without end": (Renew("r", 1, float("nan")), "lease_s"),
    "a negative wait": (acquire(wait_s=-1.0), "wait_s"),
    "no name": (acquire(request=""), "request"),
    "half a drop": (Drop("r", (Objects(0, 0, (0, 1), bytes(32)),)), "objects: 2 objects"),
}


@pytest.mark.parametrize(("record", "words"), SENSELESS.values(), ids=SENSELESS)
def test_a_senseless_request_is_refused_by_name_and_costs_nothing_else(
    fabric: Fabric, socket: BlockingClient, record: Any, words: str
) -> None:
    before = holders(fabric)[0]
    reply = said(socket, wire.encode(record))
    assert isinstance(reply, Misuse)
    assert words in reply.text
    assert alive(socket)
    after = holders(fabric)[0]
    assert after["requests_refused"] == before["requests_refused"] + 1
    assert {k: after[k] for k in ("pools", "attempts", "leases")} == {
        k: before[k] for k in ("pools", "attempts", "leases")
    }


@pytest.mark.parametrize("frame", [b"", b"\xc1", os.urandom(64), b"\x93\x01\x0a\x90", b"\x93\x63\x0a\x90", bytes(5000)])
def test_garbage_in_a_frame_costs_one_refused_request(socket: BlockingClient, frame: bytes) -> None:
    assert isinstance(said(socket, frame), Misuse)
    assert alive(socket)


def test_garbage_instead_of_frames_costs_its_own_connection_only(fabric: Fabric, socket: BlockingClient) -> None:
    member = next(m for m in fabric.info().members if m.address == holders(fabric)[0]["address"])
    vandal = BlockingClient.connect(member.unix)
    vandal._channel.sock.sendall(struct.pack("<IQHH", 2**32 - 1, 1, 0, 0) + b"x" * 100)
    with pytest.raises(ConnectionLost):
        vandal.request(wire.encode(StatusRequest("s")), 5.0)
    vandal.close()
    assert alive(socket)


FORBIDDEN = [
    GrantUntil(1, 3600.0),
    SetWeights(bytes(16), ()),
    SetMode(draining=True, bypassed=True),
    HolderGone("directory:0", 99),
    Members(10**9, ()),
    PartGrant("op", 30.0, False),
]


@pytest.mark.parametrize("record", FORBIDDEN, ids=lambda record: type(record).__name__)
def test_what_only_peers_may_say_is_refused_from_a_client(
    fabric: Fabric, session: Session, socket: BlockingClient, record: Any
) -> None:
    assert isinstance(said(socket, wire.encode(record)), Misuse)
    for sender in ("supervisor", holders(fabric)[1]["address"]):
        hello = said(socket, wire.encode(PeerHello(sender, os.urandom(32))))
        assert isinstance(hello, Misuse)
        assert isinstance(said(socket, wire.encode(record)), Misuse)
    assert isinstance(through_handle(fabric, wire.encode(record)), Misuse)
    status = holders(fabric)[0]
    assert (status["grants"], status["draining"], status["bypassed"]) == (True, False, False)


def through_handle(fabric: Fabric, frame: bytes) -> Any:
    return wire.decode(ray_api.call(fabric.holder().request.remote(frame)))


def test_a_request_whose_id_another_one_bears_gets_no_answer_to_that_one(
    fabric: Fabric, socket: BlockingClient
) -> None:
    address = holders(fabric)[0]["address"]
    first, other = (
        wire.encode(
            acquire(request="twice", readers=(address,), prompt=Prompt(bytes([n]) * 32, bytes(16), "", 70, KEYS))
        )
        for n in (1, 2)
    )
    told = [wire.decode(reply.payload) for reply in socket.request_many([first, other, first], 5.0)]
    assert [type(reply) for reply in told] == [Answer, Misuse, Answer]
    assert told[0] == told[2] == said(socket, first)
    assert isinstance(said(socket, other), Misuse)
    assert isinstance(through_handle(fabric, other), Misuse)


def test_memory_is_not_handed_out_through_the_handle(fabric: Fabric) -> None:
    reply = through_handle(fabric, wire.encode(ArenaRequest("a")))
    assert isinstance(reply, Misuse)
    assert "Unix socket" in reply.text


def test_an_attempt_is_of_the_client_that_began_it(fabric: Fabric, session: Session, socket: BlockingClient) -> None:
    attempt = session.begin(prompt("mine"), {"csa": [0]})
    assert isinstance(attempt, kvfabric.Attempt)
    number = attempt._number
    for record in (
        SlotsRequest("a", number),
        WriteSlots("b", number, ()),
        StoreCommit("c", number, bytes(16)),
    ):
        reply = said(socket, wire.encode(record))
        assert isinstance(reply, Done)
        assert reply.refused is Reason.ATTEMPT_SUPERSEDED
    said(socket, wire.encode(StoreAbort("d", number)))
    assert attempt.commit().ok


@pytest.mark.faults
def test_a_session_answers_while_its_holder_is_away_and_uses_the_next_one(fabric: Fabric, session: Session) -> None:
    tokens = prompt("survivor")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    before = holders(fabric)[0]
    held = session.acquire(tokens).lease
    asked = session.request(tokens)
    granted = session._ask(asked, 5.0)
    assert held is not None
    assert granted.grant is not None
    os.kill(before["pid"], signal.SIGKILL)
    eventually(held.check, lambda reason: reason is Reason.HOLDER_LOST)
    died = session._answer(granted, asked.request)  # between its word and the lease
    assert (died.status, died.tokens, died.lease) == (Status.MISS, 0, None)
    assert session.register_graph(held) == kvfabric.Stored(Reason.HOLDER_LOST)
    assert session.audited(tokens, held, "equal") is Reason.HOLDER_LOST
    assert not session.retain(tokens, ttl_s=1.0)
    session.generated(tokens, 3)  # a hint that nobody hears is lost
    with pytest.raises(kvfabric.FabricError, match="output_tokens"):
        session.generated(tokens, -1)
    answer = eventually(lambda: session.acquire(tokens), lambda answer: answer.lease is None, within_s=2.0)
    assert (answer.status, answer.tokens) == (Status.MISS, 0)
    assert answer.cause is not None
    assert answer.cause.reason is Reason.HOLDER_LOST
    assert session.publish(tokens, objects(session.model, tokens)).refused in (Reason.HOLDER_LOST, None)

    eventually(lambda: session.publish(prompt("after"), objects(session.model, prompt("after"))).ok)
    assert successor(fabric, before)["address"] == before["address"]
    assert session.probe(prompt("after")).tokens == 64
    lease = session.acquire(prompt("after")).lease
    assert lease is not None
    with lease:
        assert wrong_bytes(lease, session.model, prompt("after")) == []


def test_a_hint_that_a_holder_of_the_version_before_has_no_words_for_is_lost_alone(
    fabric: Fabric, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt("heard by nobody")
    assert session.publish(tokens, objects(session.model, tokens)).ok
    own = kvfabric.connect(MAIN)
    try:
        (reader,) = set(own._holders.readers) - {""}
        client = own._holders.client(reader)
        monkeypatch.setattr(client, "_schema", wire.SCHEMA - 1)
        own.generated(tokens, 3)
        lease = own.acquire(tokens).lease  # what was told goes ahead of it, and is nothing
        assert lease is not None
        lease.release()
        with pytest.raises(WireError, match=f"the peer speaks {wire.SCHEMA - 1}"):
            client.tell(Generated("g", own.keys(tokens).prompt, 3))
        assert own.probe(tokens).tokens == 64
    finally:
        own.close()


def test_digests_computed_once_stand_for_the_prompt(session: Session) -> None:
    tokens = prompt("digests at hand")
    keys = session.keys(tokens, tenant="a")
    assert session.publish(keys, objects(session.model, tokens)).ok
    assert session.probe(tokens, tenant="a").tokens == 64
    assert session.probe(keys).tokens == 64
    assert session.probe(tokens).status is Status.MISS
    with pytest.raises(FabricError, match="KEY is given twice"):
        session.probe(keys, tenant="a")
    with kvfabric.connect(weights_revision="v9") as other, pytest.raises(FabricError, match="another model or weights"):
        other.probe(keys)
