"""Versions side by side: each shard a process of its own, spoken to over real sockets in every schema.

An older or newer version is this package with another number as its schema: fields and records declared to be of a
later schema are then unknown to it, and so is every frame that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvfabric.actors.info import INFO_SCHEMA, FabricInfo
from kvfabric.actors.lease import BARE_TOKEN_SCHEMA, Lease, LeaseRefused, node_here
from kvfabric.actors.mesh import Mesh
from kvfabric.actors.service import Service
from kvfabric.actors.spec import FabricSpec
from kvfabric.fabric import wire
from kvfabric.fabric.bands import IN_MEMORY
from kvfabric.fabric.kinds import Reason, WireError
from kvfabric.fabric.messages import (
    EventBatch,
    EventRun,
    EventsSeen,
    Found,
    GrantSeen,
    GrantUntil,
    Lane,
    LeaseGrant,
    LeasePart,
    Lookup,
    Member,
    Members,
    StatusReply,
    StatusRequest,
    Strip,
)
from kvfabric.fabric.model import ModelSpec
from kvfabric.fabric.passport import Abi
from kvfabric.fabric.settings import written
from kvfabric.fabric.supervisor import SUPERVISOR
from kvfabric.transport.challenge import door_secret
from kvfabric.transport.control_client import BlockingClient
from kvfabric.transport.link import host_identity

from ..fabric.directory_bed import BLOCK
from . import copies

HERE = Path(__file__).parent
SPEC = FabricSpec(
    model=ModelSpec.load(
        {
            "name": "m",
            "groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": BLOCK, "block_bytes": 16}],
        }
    )
)
SECRET = secrets.token_bytes(32)
CHAIN = secrets.token_bytes(16 * 20)
VERSIONS = (wire.SCHEMA - 1, wire.SCHEMA, wire.SCHEMA + 1, wire.SCHEMA + 2)


def started(path: Path, number: int, spec: str) -> subprocess.Popen[str]:
    """A shard of the version that lies at ``path``."""
    command = [sys.executable, str(HERE / "peer_process.py"), str(number), SECRET.hex(), spec]
    pipe, env = subprocess.PIPE, {"PYTHONPATH": str(path)}
    return subprocess.Popen(command, text=True, env=env, stdin=pipe, stdout=pipe, stderr=pipe)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, dict[str, Any]]]:
    """A shard of each version: where it listens."""
    running, where, path_of = [], {}, {}
    with contextlib.ExitStack() as stack:
        for schema in VERSIONS:
            path = copies.copied(tmp_path_factory.mktemp(f"schema-{schema}"))
            copies.speaking(path, schema)
            if schema == wire.SCHEMA + 1:
                copies.with_later_settings(path)
            path_of[schema] = path.parent
            process = started(path.parent, schema, SPEC.text)
            stack.callback(process.kill)
            running.append(process)
        for schema, process in zip(VERSIONS, running, strict=True):
            assert process.stdout is not None
            where[schema] = {**json.loads(process.stdout.readline()), "path": path_of[schema]}
            assert where[schema]["wire"] == schema
        yield where
        for process in running:
            process.communicate("", timeout=10)


def said(endpoint: str, frame: bytes) -> bytes:
    with BlockingClient.connect(endpoint, secret=door_secret(SECRET)) as client:
        return client.request(frame, 10.0).payload


def member_of(place: dict[str, Any], schema: int) -> Member:
    return Member(place["address"], 1, "n", place["host"], place["unix"], place["tcp"], (), schema)


@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_a_client_of_the_version_before_is_answered_in_its_own_words(shards, door):
    endpoint = shards[wire.SCHEMA][door]
    lookup = Lookup("l", 0, (Strip(BLOCK, 0, CHAIN),))
    for schema in (wire.SCHEMA - 1, wire.SCHEMA):
        for question, expected in ((StatusRequest("s"), StatusReply), (lookup, Found)):
            answered, reply = wire.read(said(endpoint, wire.encode(question, schema)))
            assert (answered, type(reply)) == (schema, expected)
            if isinstance(reply, Found):
                assert (reply.editions == ()) == (schema < wire.SCHEMA), (
                    "what the schema gained is told to who knows it"
                )


def test_this_version_speaks_to_a_shard_of_the_version_before_as_that_one_does(shards):
    place = shards[wire.SCHEMA - 1]
    old = member_of(place, wire.SCHEMA - 1)
    _, reply = wire.read(said(place["unix"], wire.encode(StatusRequest("s"), wire.spoken_with(old.schema))))
    assert isinstance(reply, StatusReply)


@pytest.mark.parametrize(("reader", "speaker"), [(0, 2), (0, 3), (1, 3), (2, 0), (3, 0), (3, 1)])
def test_versions_further_apart_are_refused_with_both_numbers(shards, reader, speaker):
    """Each side is a process of its own, so the number of a frame is all that there is to go by."""
    theirs, mine = VERSIONS[reader], VERSIONS[speaker]
    frame = msgpack.packb([mine, 66, ["s"]])
    reply = msgpack.unpackb(said(shards[theirs]["unix"], frame))
    schema, number, (_, text) = reply
    assert (schema, number) == (theirs, 71)
    reads = [s for s in (theirs - 1, theirs) if s]
    assert text == f"schema {mine} found, this version reads {', '.join(map(str, reads))}"


def test_a_reply_that_an_older_schema_has_no_words_for_is_refused_with_both_numbers():
    @wire.record(9999, since=wire.SCHEMA)
    class _Fresh:
        pass

    try:
        with pytest.raises(WireError, match=f"of schema {wire.SCHEMA}, the peer speaks {wire.SCHEMA - 1}"):
            wire.encode(_Fresh(), wire.SCHEMA - 1)
    finally:
        del wire._by_number[9999], wire._number_of[_Fresh], wire._since[_Fresh]


class Ear(Service):
    """A holder's place in the mesh: keeps what the shards send it."""

    def __init__(self) -> None:
        super().__init__(
            fabric=f"ear-{SECRET.hex()[:8]}",
            address="holder:x",
            incarnation=1,
            node="n",
            host="127.0.0.1",
            secret=SECRET,
            model=SPEC.model,
        )
        self.heard: list[tuple[str, Any]] = []

    def received(self, sender: str, record: Any) -> None:
        self.heard.append((sender, record))


async def heard_from(records: list[Any], count: int) -> None:
    """Until so many came, for ten seconds at most."""
    for _ in range(200):
        if len(records) >= count:
            return
        await asyncio.sleep(0.05)


def test_shards_of_two_versions_serve_one_holder_side_by_side(shards):
    """Events, their acknowledgements, look-ups and the supervisor's records, both ways, over Unix sockets and TCP."""

    async def run() -> tuple[list[tuple[str, Any]], list[Any]]:
        ear = Ear()
        me = await ear.listen((0,))
        old, new = (member_of(shards[schema], schema) for schema in (wire.SCHEMA - 1, wire.SCHEMA))
        grants: list[Any] = []
        supervisor = Mesh(SUPERVISOR, SECRET, lambda to, record: None, lambda to, record: grants.append(record))
        everyone = Members(1, (me, old, new))
        supervisor.update(everyone)
        ear.mesh.update(everyone)
        lane = Lane(0, 0, IN_MEMORY, 0, Abi(b"x" * 8, 4))
        events = EventRun(lane, BLOCK, CHAIN[:16], b"", 0, CHAIN, bytes(8 * 20))
        for shard in (old, new):
            supervisor.send(shard.address, everyone)
            supervisor.send(shard.address, GrantUntil(1, 10.0))
        await heard_from(grants, 2)  # a shard answers those alone of whom the supervisor has told it
        for shard in (old, new):
            ear.mesh.send(shard.address, EventBatch("holder:x", 1, 1, 1, (events,)))
            ear.mesh.send(shard.address, Lookup("l", 0, (Strip(BLOCK, 0, CHAIN),)))
        await heard_from(ear.heard, 4)
        await supervisor.close()
        await ear.close()
        return ear.heard, grants

    heard, grants = asyncio.run(run())
    assert [type(record) for record in grants] == [GrantSeen, GrantSeen]
    told = {}
    for sender, record in heard:
        told[sender, type(record)] = record
    for schema in (wire.SCHEMA - 1, wire.SCHEMA):
        address = shards[schema]["address"]
        assert told[address, EventsSeen].seq == 1
        (stripe,) = told[address, Found].stripes
        assert (stripe.holder, stripe.bits) == ("holder:x", (1 << 20) - 1)
        assert bool(told[address, Found].editions) == (schema == wire.SCHEMA)


def test_what_a_client_is_told_of_a_fabric_is_read_by_the_version_before_too():
    member = Member("directory:0", 1, "n", host_identity(), "unix:@x", "tcp:h:1", (), wire.SCHEMA)
    info = FabricInfo("f", SPEC, "v1", (member,), "n", bytes(32))
    assert FabricInfo.decode(info.encode(), "n") == info
    before = FabricInfo.decode(info.encode(INFO_SCHEMA - 1), "n")
    assert (before.door_secret, before.members[0].schema) == (b"", 1)
    plain = msgpack.unpackb(info.encode(1))
    assert len(plain) == 6, "as the version before unpacks it"
    with pytest.raises(WireError, match=rf"schema {INFO_SCHEMA + 1} found, this version reads 1, 2"):
        info.encode(INFO_SCHEMA + 1)


def token_of(schema):
    """A lease's token as a version of this schema would make it, of a holder that is not there any more."""
    member = Member("holder:x", 1, "n", host_identity(), "unix:@gone", "tcp:h:1", (0,), wire.SCHEMA)
    grant = LeaseGrant("holder:x", 1, 64, 1.0, bytes(16), (LeasePart("holder:x", 1, 1, ()),))
    said_in = min(schema, wire.SCHEMA)
    plain = [wire.encode_plain(record, said_in) for record in (grant, member)]
    if schema > said_in:
        plain = [msgpack.packb([schema, *msgpack.unpackb(raw)[1:]]) for raw in plain]
    return msgpack.packb(
        [BARE_TOKEN_SCHEMA, host_identity(), node_here() or "n", 1e9, plain[0], [plain[1]], written(SPEC.model)]
    )


@pytest.mark.parametrize("schema", wire.SCHEMAS_READ)
def test_a_leases_token_of_the_version_before_is_opened(schema):
    with pytest.raises(LeaseRefused) as refused:
        Lease.open(token_of(schema))
    assert refused.value.reason is Reason.HOLDER_LOST, "it was read, and its holder looked for"


def test_a_leases_token_of_the_version_after_is_refused_with_both_numbers_and_what_to_do():
    told = f"lease token: schema {wire.SCHEMA + 1} found, this version reads 1, 2; .* or acquire here"
    with pytest.raises(WireError, match=told):
        Lease.open(token_of(wire.SCHEMA + 1))


def test_the_schema_before_stays_as_it_was():
    """A field that a record gains is declared with ``wire.added``, a record with ``since``: else older peers fail."""
    for module in ("doors", "messages"):
        importlib.import_module(f"kvfabric.fabric.{module}")
    now = {}
    for number, cls in sorted(wire._by_number.items()):
        if cls.__module__.startswith("kvfabric.fabric.") and wire._since[cls] == 1:
            now[str(number)] = [f.name for f in dataclasses.fields(cls) if f.metadata.get("since", 1) == 1]
    pinned = json.loads((HERE / "schema_1.json").read_text())
    assert {number: now.get(number) for number in pinned} == pinned
    assert set(now) <= set(pinned), "a record of a number that schema 1 does not have"


WRITE = """
import json, sys
from kvfabric.actors.spec import FabricSpec
spec = json.loads(sys.argv[1])
print(json.dumps([FabricSpec.load({**spec, "novel": 1, "vital": vital}).text for vital in (0, 1)]))
"""


def test_a_process_serves_under_the_spec_of_the_version_after_and_refuses_what_it_may_not_pass_over(shards):
    newer = {"PYTHONPATH": str(shards[wire.SCHEMA + 1]["path"])}
    plain = json.dumps(SPEC.model_dump(mode="json"))
    told = subprocess.run(
        [sys.executable, "-c", WRITE, plain], env=newer, capture_output=True, text=True, check=True, timeout=60
    )
    novel, vital = json.loads(told.stdout)
    mine = copies.ROOT.parent
    serving, refusing = started(mine, 7, novel), started(mine, 8, vital)
    try:
        assert serving.stdout is not None
        place = json.loads(serving.stdout.readline())
        _, reply = wire.read(said(place["unix"], wire.encode(StatusRequest("s"))))
        assert json.loads(reply.status)["address"] == "directory:7"
        _, errors = refusing.communicate("", timeout=60)
        assert refusing.returncode != 0
        last = errors.strip().splitlines()[-1]
        assert "the fabric's spec: vital: of spec schema 2, which nobody may pass over" in last
    finally:
        for process in (serving, refusing):
            process.kill()
            process.communicate(timeout=10)
